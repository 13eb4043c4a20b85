"""Guard a training loop: compare the model's layouts and replicas with a plan every n steps."""

# Reading all values takes seconds, so a guard compares checksums only at the first and each n-th step (decisions/0162).
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from layoutmap.adapters import CheckpointAdapter, get_model_adapter, require_capability
from layoutmap.core.errors import PlanError, ScopeError
from layoutmap.core.variables import Kind
from layoutmap.engines.protocol import Array
from layoutmap.inspecting.inspect import inspect
from layoutmap.plan.problems import merge_problems
from layoutmap.plan.table import PlanTable
from layoutmap.saving.sync_versions import find_missed_version
from layoutmap.scope.plan import Plan

_EXISTS_BEFORE_STEP: Mapping[Kind, bool] = {
    Kind.WEIGHT: True,
    Kind.STATE: True,
    Kind.RNG: False,
    Kind.SLOT: False,
    Kind.METRIC: False,
    Kind.LATER: False,
}
"""Whether variables of a kind exist before the first step. Other variables are compared once the plan has them."""


class Guard:
    """Compare a model with a plan at the first step and at every n-th step. Call it once per step.

    Attributes:
        plan: Plan to compare with. `None`: the first comparison sets it, and adds the slots and metrics that the first
            step created.
    """

    def __init__(self, model: object, plan: PlanTable | None, optimizer: object, every: int):
        self._model, self._optimizer, self._every = model, optimizer, every
        self.plan = None if plan is None else Plan.from_table(plan)
        self._num_steps = 0

    def __call__(self, model: object = None, optimizer: object = None) -> None:
        """Compare the model with the plan if a comparison is due. Raise at any step if a sampler missed a sync.

        Args:
            model: The model after the step, if it is a new object: a pytree of JAX. `None`: the model of this guard.
            optimizer: The new state of the optimizer, likewise.
        """
        self._check_no_missed_sync(self._model if model is None else model)
        if self._num_steps % self._every == 0:
            self.check(model, optimizer)
        self._num_steps += 1

    def _check_no_missed_sync(self, model: object) -> None:
        """Raise if the model is a sampler that missed a version of its trainer's weights."""
        missed = find_missed_version(model, lambda: _list_model_arrays(model))
        if missed is None:
            return
        version, newest = missed
        raise PlanError(
            f"the sampler has version {version} of its trainer's weights, and version {newest} was synced",
            facts={"step": str(self._num_steps)},
            why="the last sync of this sampler failed or was not called",
            fix="call sync() before the next step; if your samplers sync at different times, pass "
            "sync(version=step)",
        )

    def check(self, model: object = None, optimizer: object = None) -> None:
        """Compare the model with the plan now, and raise if they differ. All processes must call this.

        Raises:
            PlanError: The model differs from the plan, or its replicas differ.
        """
        found = inspect(
            self._model if model is None else model,
            self._optimizer if optimizer is None else optimizer,
            across=True,
        )
        planned = self.plan or found
        of_model = [
            a for a in planned.assignments if a.variable.kind is not Kind.LATER or a.variable.path in found
        ]
        planned = replace(planned, assignments=tuple(of_model))
        known = [
            a for a in found.assignments if _EXISTS_BEFORE_STEP[a.variable.kind] or a.variable.path in planned
        ]
        difference = planned.diff(replace(found, assignments=tuple(known)))
        if not difference and not found.errors:
            self.plan = found
            return
        facts = {"changes": str(difference)} if difference else {}
        facts |= {problem.subject: str(problem) for problem in merge_problems(found.errors)}
        raise PlanError(
            f"the model differs from its plan at step {self._num_steps}",
            problems=found.errors,
            facts=facts,
            why="the program sharded, replaced, or changed an array after the plan was made",
            fix="find the step that changed it with lm.guard(.., every=1), or accept the new layouts as the plan: "
            "lm.inspect(model).to_json()",
        )

    def hook(self, optimizer: Any) -> Any:
        """Call the guard after each step of a torch optimizer, and return the handle that removes it."""

        def call_guard(*_: object) -> None:
            self()

        return optimizer.register_step_post_hook(call_guard)

    def callback(self) -> Any:
        """Return a callback for `fit` of Keras that calls the guard after each batch."""
        # Imported here, so that programs without Keras can use guards.
        from layoutmap.adapters.keras.callback import make_callback_after_each_batch

        return make_callback_after_each_batch(self)


def guard(
    model: object, plan: PlanTable | None = None, optimizer: object = None, *, every: int = 1000
) -> Guard:
    """Create a guard for a training loop that raises if layouts change or replicas differ.

    In a JAX loop, call it after each step: `guard(state)`. For torch, `guard.hook(optimizer)` calls it after each
    optimizer step. For Keras, pass `callbacks=[guard.callback()]` to `fit`. At the first step, and every `every` steps,
    it compares the layouts of all variables, and checksums of the replicas on all devices of all processes. All
    processes must take the same number of steps. Every call raises if a sampler missed a version of its trainer
    (`plan_sync`), provided that both are modules.

    Args:
        model: The model, see `layoutmap.inspect`.
        plan: Expected plan, as from `Plan.from_json`; `None`: the layouts after the first step.
        optimizer: Optimizer or its state, if the model does not hold it.
        every: Number of steps from one comparison to the next. A comparison reads all values, at about 1 GB per second.

    Raises:
        ScopeError: `every` is not a number of steps.

    Example:
        >>> import jax, layoutmap as lm
        >>> mesh = jax.make_mesh((8,), ("model",))
        >>> params = {"w": jax.device_put(jax.numpy.ones((8, 8)), jax.NamedSharding(mesh, jax.P("model")))}
        >>> guarded = lm.guard(params, every=1)
        >>> guarded(params)
        >>> guarded({"w": jax.device_put(params["w"], jax.NamedSharding(mesh, jax.P(None, "model")))})
        Traceback (most recent call last):
        layoutmap.core.errors.PlanError: the model differs from its plan at step 1
          changes  w  layout  (model, unsharded) -> (unsharded, model)
          ...
    """
    if every < 1:
        raise ScopeError(
            f"every={every!r} is not a number of steps",
            why="every is the number of steps from one comparison to the next",
            fix="pass a positive number, as in every=1000",
        )
    return Guard(model, plan, optimizer, every)


def _list_model_arrays(tree: object) -> list[Array]:
    adapter = require_capability(get_model_adapter(tree), CheckpointAdapter, "guard")
    return [each.array for each in adapter.list_stored_variables(tree)]
