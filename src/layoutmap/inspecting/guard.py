"""Guard a training loop: every n-th step, the layouts and replicas of the model are compared with a plan."""

# Comparing all values takes seconds, so only the first and each n-th step are checked, by checksums (decisions/0162).
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from layoutmap.adapters import Keeping, get_model_adapter, require_capability
from layoutmap.core.errors import PlanError, ScopeError
from layoutmap.core.variables import Kind
from layoutmap.engines.protocol import Array
from layoutmap.inspecting.inspect import inspect
from layoutmap.plan.problems import group_problems
from layoutmap.plan.table import PlanTable
from layoutmap.saving.sync_versions import find_missed_version
from layoutmap.scope.plan import Plan

_IS_MADE_FIRST: Mapping[Kind, bool] = {
    Kind.WEIGHT: True,
    Kind.STATE: True,
    Kind.RNG: False,
    Kind.SLOT: False,
    Kind.METRIC: False,
    Kind.LATER: False,
}
"""Kind -> whether a model has such variables before its first step. Others are compared once a plan has them."""


class Guard:
    """Callable that counts steps, and compares the model with a plan at the first and each n-th one.

    Attributes:
        plan: What the model is compared with; `None`: that which the first comparison finds. From there on it has the
            slots and metrics, too, that the first step made.
    """

    def __init__(self, model: object, plan: PlanTable | None, optimizer: object, every: int):
        self._model, self._optimizer, self._every = model, optimizer, every
        self.plan = None if plan is None else Plan.of(plan)
        self._num_steps = 0

    def __call__(self, model: object = None, optimizer: object = None) -> None:
        """Count a step, and compare the model if the step is due. A sampler that missed a sync is reported at any step.

        Args:
            model: The model as the step has left it, where that is another object: a pytree of JAX.
            optimizer: Its optimizer's state, likewise.
        """
        self._check_synced(self._model if model is None else model)
        if self._num_steps % self._every == 0:
            self.check(model, optimizer)
        self._num_steps += 1

    def _check_synced(self, model: object) -> None:
        missed = find_missed_version(model, lambda: _list_arrays(model))
        if missed is None:
            return
        version, newest = missed
        raise PlanError(
            f"the sampler has version {version} of its trainer's weights, and version {newest} was synced",
            facts={"step": str(self._num_steps)},
            why="the sync of this sampler was not called, or failed",
            fix="call it before the next step: sync(). If you sync your samplers at different times, pass "
            "sync(version=step)",
        )

    def check(self, model: object = None, optimizer: object = None) -> None:
        """Compare now. All processes must call this.

        Raises:
            PlanError: The model is not as planned, or its replicas have drifted apart.
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
            a for a in found.assignments if _IS_MADE_FIRST[a.variable.kind] or a.variable.path in planned
        ]
        difference = planned.diff(replace(found, assignments=tuple(known)))
        if not difference and not found.errors:
            self.plan = found
            return
        facts = {"changes": str(difference)} if difference else {}
        facts |= {problem.subject: str(problem) for problem in group_problems(found.errors)}
        raise PlanError(
            f"the model is no longer as planned, at step {self._num_steps}",
            problems=found.errors,
            facts=facts,
            why="the program has laid out, replaced or changed an array since",
            fix="find the step that does it: guard with every=1; or take this plan: lm.inspect(model).to_json()",
        )

    def hook(self, optimizer: Any) -> Any:
        """Call the guard after each step of a torch optimizer, and return the handle that removes it."""

        def count_step(*_: object) -> None:
            self()

        return optimizer.register_step_post_hook(count_step)

    def callback(self) -> Any:
        """Return a callback for `fit` of Keras that calls the guard after each batch."""
        # Imported here, because it imports Keras.
        from layoutmap.adapters.keras.callback import make_batch_callback

        return make_batch_callback(self)


def guard(
    model: object, plan: PlanTable | None = None, optimizer: object = None, *, every: int = 1000
) -> Guard:
    """Return a guard for a training loop, which raises if layouts change or replicas differ.

    A loop of JAX calls it after each step, `guard(state)`; an optimizer of torch does after `guard.hook(optimizer)`,
    and `fit` of Keras with `callbacks=[guard.callback()]`. The first step is looked at, and every n-th from there: the
    layouts of all variables, and checksums of replicas on all devices and in all processes, which all count alike.
    Each call raises if a sampler missed a version of its trainer (`plan_sync`), where both are modules and not trees.

    Args:
        model: The model, see `layoutmap.inspect`.
        plan: What it is to be, as `Plan.from_json` reads it; `None`: as the first step leaves it.
        optimizer: Its optimizer, or the state of one, where the model does not have it.
        every: Number of steps from one comparison to the next. A comparison reads all values, at about 1 GB per second.

    Raises:
        ScopeError: `every` is no number of steps.

    Example:
        >>> import jax, layoutmap as lm
        >>> mesh = jax.make_mesh((8,), ("model",))
        >>> params = {"w": jax.device_put(jax.numpy.ones((8, 8)), jax.NamedSharding(mesh, jax.P("model")))}
        >>> guarded = lm.guard(params, every=1)
        >>> guarded(params)
        >>> guarded({"w": jax.device_put(params["w"], jax.NamedSharding(mesh, jax.P(None, "model")))})
        Traceback (most recent call last):
        layoutmap.core.errors.PlanError: the model is no longer as planned, at step 1
          changes  w  layout  (model, unsharded) -> (unsharded, model)
          ...
    """
    if every < 1:
        raise ScopeError(
            f"every={every!r}",
            why="it is the number of steps from one comparison to the next",
            fix="pass a positive number, as in every=1000",
        )
    return Guard(model, plan, optimizer, every)


def _list_arrays(tree: object) -> list[Array]:
    adapter = require_capability(get_model_adapter(tree), Keeping, "guard")
    return [each.array for each in adapter.list_stored_variables(tree)]
