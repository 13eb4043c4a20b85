"""Count the cost of a training step from shapes, without devices or arrays.

lowered = lm.lower_step(make_model, layout_map, inputs=..)     traced once: seconds
lowered.count(layout_map)                                      a second or so for each map
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layoutmap.adapters import Training, get_adapter, get_imported_adapter, require_capability
from layoutmap.core.errors import ScopeError
from layoutmap.core.mesh import check_dim
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.specs import BatchDim, list_batch_dims
from layoutmap.core.steps import TrainingStep
from layoutmap.core.variables import Assignment
from layoutmap.cost.model_steps import make_training_step
from layoutmap.cost.table import StepCost
from layoutmap.cost.verified import Verified
from layoutmap.plan.completeness import make_unbuilt_problem
from layoutmap.plan.problems import Problem
from layoutmap.rules.rule_set import RuleSet
from layoutmap.scope.arguments import check_maker, check_remat
from layoutmap.scope.context import Scope
from layoutmap.scope.owner import infer_library
from layoutmap.scope.plan import Plan, make_plan
from layoutmap.scope.progress import ElapsedTime, Shown
from layoutmap.scope.scope import make_model_in_scope


class LoweredStep:
    """Training step without layouts, which can be counted in any layouts on any mesh.

    Args:
        step: The step.
        batch_dim: The mesh dim over which batches are sharded, or several, where `count` is told no other one.
        remat: See `lower_step`.
        missing: What the model was found to lack; `None`: all its layers have weights.
        fuse_attention: See `lower_step`.

    Attributes:
        step: See above.
    """

    def __init__(
        self,
        step: TrainingStep,
        batch_dim: BatchDim | None,
        remat: str | None = None,
        missing: Problem | None = None,
        fuse_attention: bool = False,
    ):
        from layoutmap.cost.jax.lowered import LoweredStep as Lowered  # imported here, because it imports JAX

        self.step = step
        self._variables = step.variables
        self._lowered = Lowered(step, remat, fuse_attention)
        self._batch_dim = batch_dim
        self._missing = missing
        self._fuses = fuse_attention

    def with_remat(self, remat: str) -> LoweredStep:
        """Return the step with activations recomputed in the backward pass. See `lower_step`."""
        return LoweredStep(self.step, self._batch_dim, remat, self._missing, self._fuses)

    def plan(self, layout_map: RuleSet) -> Plan:
        """Return the plan of the model under other rules, without building the model again."""
        complete, missing = self._missing is None, filter(None, [self._missing])
        plan = make_plan(self._variables, layout_map, complete=complete, free_activations=True)
        return plan.add_problems([*missing])

    def count(
        self,
        layout_map: RuleSet,
        *,
        batch_dim: BatchDim | None = None,
        target: str | None = None,
        progress: Shown = None,
    ) -> StepCost:
        """Count a step under rules in about a second, from the module that XLA's partitioner makes.

        Args:
            layout_map: The rules, those for activations too, on any mesh.
            batch_dim: The mesh dim over which batches are sharded, or several; `None`: that of `lower_step`, if
                the mesh has it.
            target: A target of `compile`, but no TPU: collectives and memory are those of what XLA compiles for it, of
                equal blocks two and three, some seconds. `None`: what its partitioner says, with buffers estimated.
            progress: See `verify`.

        Raises:
            EngineError: `target` is a TPU, or see `compile`.
            PlanError: Rules do not fit the model.
            LayoutError: A rule for activations does not fit what a layer returns.
            ScopeError: The mesh has no such `batch_dim`.
        """
        with ElapsedTime(
            f"XLA compiles the step for {target}", enabled=progress if target else False
        ) as shown:
            return self._lowered.count(
                *self._assign_layouts(layout_map, batch_dim), target=target, on_wait=shown
            )

    def compile(self, layout_map: RuleSet, *, batch_dim: BatchDim | None = None, target: str = "cpu") -> Any:
        """Have XLA compile the step under rules for devices that need not exist. This may take minutes.

        Args:
            layout_map: See `count`.
            batch_dim: See `count`.
            target: `"cpu"`; with the CUDA plugin of JAX `"h100"`, `"h200"`, `"b200"`, `"a100"`; with libtpu `"v5e"`,
                `"v5p"`, `"v6e"`. The extras `xla-gpu` and `xla-tpu` install these; they need no GPU and no TPU.

        Returns:
            A value with `collectives`, `sent_by_kind`, `argument_bytes` and `peak_bytes`, as XLA has them.

        Raises:
            EngineError: The plugin for the target is not installed, or XLA cannot compile the step. XLA for TPUs
                compiles no step that does not fit their memory.
        """
        return self._lowered.compile(*self._assign_layouts(layout_map, batch_dim), target)

    def verify(
        self,
        layout_map: RuleSet,
        *,
        batch_dim: BatchDim | None = None,
        target: str = "cpu",
        progress: Shown = None,
    ) -> Verified:
        """Count the step under rules, compile it with XLA, and return both for comparison.

        Args:
            layout_map: See `count`.
            batch_dim: See `count`.
            target: See `compile`.
            progress: Whether to show on stderr for how long XLA has compiled; `None`: if it takes long, on a terminal;
                `"log"`: if it takes long, anywhere.

        Raises:
            EngineError: See `compile`.
        """
        assignments, policy = self._assign_layouts(layout_map, batch_dim)
        cost = self._lowered.count(assignments, policy)
        with ElapsedTime(f"XLA compiles the step for {target}", enabled=progress) as shown:
            return self._lowered.verify(assignments, policy, target, cost, shown)

    def _assign_layouts(
        self, layout_map: RuleSet, batch_dim: BatchDim | None
    ) -> tuple[list[Assignment], LayoutPolicy]:
        plan = self.plan(layout_map).check()
        check_dim("batch_dim", batch_dim, plan.mesh, "the batch is sharded over it")
        usual = {*list_batch_dims(self._batch_dim)}
        batch_dim = batch_dim or (self._batch_dim if usual <= {*plan.mesh.dim_names} else None)
        activations = layout_map.activations
        policy = LayoutPolicy(plan.mesh, batch_dim, activations.__getitem__ if activations else None)
        found = {assignment.variable.key: assignment for assignment in plan.assignments}
        return [found[variable.key] for variable in self.step.variables], policy

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of the first array that each layer returns, by path, once a step has been counted."""
        return self._lowered.outputs

    @property
    def fingerprint(self) -> str:
        """Text that is equal for equal steps, once a step has been counted."""
        return self._lowered.fingerprint


@infer_library
def lower_step(
    make_model: Callable[[], Any],
    layout_map: RuleSet,
    *,
    inputs: object,
    batch_dim: BatchDim | None = None,
    optimizer: object = None,
    loss: Callable[..., Any] | None = None,
    remat: str | None = None,
    fuse_attention: bool = False,
    library: str | None = None,
) -> LoweredStep:
    """Trace and lower a training step once, so that it can be counted under many layout maps.

    Args:
        make_model: Makes the model and returns it.
        layout_map: Rules with a mesh, as for `plan`. The step does not depend on them.
        inputs: What the model is called with in a step, or like: arrays, or anything with `shape` and `dtype`, nested
            as the model takes it. The first axis is that of the global batch.
        batch_dim: The mesh dim over which batches are sharded, or several; `None`: they are replicated.
        optimizer: For Keras the name of one, as in `"adamw"`, or a function that makes one; for flax.nnx and pytrees
            an optimizer of optax. `None`: that of the model, or none.
        loss: Called with what the model returns, returns a number. `None`: the loss that a Keras model was compiled
            with, or that of `train_with`, or else the mean of squared outputs.
        remat: Whose activations are counted as computed again in the backward pass, rather than kept, although the
            model's code does not say so: `"blocks"`, those of the layers that it has several of, or a regex for the
            paths of layers. `None`: as the model's code says (`keras.RematScope`, `nnx.remat`, `jax.checkpoint`).
        fuse_attention: Whether each call of `jax.nn.dot_product_attention` is counted as one fused kernel (flash
            attention), which keeps no scores in memory, as on GPUs Keras may use; `False`: as the model calls it.
        library: See `layoutmap.plan`.

    Raises:
        ScopeError: The model fails when it is traced, is of a library that does not run on JAX, `remat` is no regex,
            `fuse_attention` finds no call, or the mesh has no such `batch_dim`.
    """
    check_maker(make_model, layout_map, "lower_step")
    check_remat(remat)
    adapter = get_adapter(library) if library else get_imported_adapter()
    training = require_capability(adapter, Training, "lower_step")
    if adapter.engine_name != "jax":
        raise ScopeError(
            f"the step of a model of {adapter.name} on {adapter.engine_name} cannot be counted",
            why="steps are counted after the partitioner of XLA",
            fix="plan the same rules with the model on JAX: KERAS_BACKEND=jax"
            if adapter.name == "keras"
            else "plan the same rules with the model of keras-hub or flax.nnx, on JAX",
        )
    context = Scope(layout_map, adapter)
    check_dim("batch_dim", batch_dim, context.mesh, "the batch is sharded over it")
    with adapter.keep_random_states():
        model = make_model_in_scope(
            context, make_model, inputs, lambda model: training.set_optimizer(model, optimizer)
        )
        step = make_training_step(context, model, inputs, optimizer, loss)
    unbuilt = context.session.list_unbuilt_layers()
    missing = make_unbuilt_problem(type(model).__name__, unbuilt, called=True) if unbuilt else None
    return LoweredStep(step, batch_dim, remat, missing, fuse_attention)


def step_cost(
    make_model: Callable[[], Any],
    layout_map: RuleSet,
    *,
    inputs: object,
    batch_dim: BatchDim | None = None,
    optimizer: object = None,
    loss: Callable[..., Any] | None = None,
    remat: str | None = None,
    fuse_attention: bool = False,
    library: str | None = None,
) -> StepCost:
    """Count the collectives, operations, and memory of a training step on each device.

    No array is allocated and no device is needed: the mesh may be any size. See `lower_step` for the arguments.

    Raises:
        PlanError: Rules do not fit the model.
        LayoutError: A rule for activations does not fit what a layer returns.
        ScopeError: See `lower_step`.

    Example:
        >>> import keras, layoutmap as lm
        >>> layout_map = lm.LayoutMap("data=64,model=8", {"up": (None, "model"), "down": ("model", None)})
        >>> def make():
        ...     layers = [keras.layers.Dense(1024, use_bias=False, name="up")]
        ...     layers += [keras.layers.Dense(256, use_bias=False, name="down")]
        ...     return keras.Sequential([keras.Input((256,)), *layers])
        >>> inputs = keras.Input(batch_shape=(512, 256))
        >>> cost = lm.step_cost(make, layout_map, inputs=inputs, batch_dim="data", optimizer="sgd")
        >>> sorted({(each.kind, each.dims, each.cause) for each in cost.collectives if each.tensor_bytes > 8})
        [('all_reduce', ('data',), 'down.kernel'), ('all_reduce', ('data',), 'up.kernel'), \
('all_reduce', ('model',), 'down')]
    """
    lowered = lower_step(
        make_model,
        layout_map,
        inputs=inputs,
        batch_dim=batch_dim,
        optimizer=optimizer,
        loss=loss,
        remat=remat,
        fuse_attention=fuse_attention,
        library=library,
    )
    return lowered.count(layout_map)
