"""Compute the cost of a training step from shapes, without devices or arrays.

lowered = lm.lower_step(make_model, layout_map, inputs=..)     traced once: seconds
lowered.count(layout_map)                                      a second or so for each map
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layoutmap.adapters import (
    TrainingAdapter,
    get_adapter,
    get_adapter_of_imported_library,
    require_capability,
)
from layoutmap.core.errors import ScopeError
from layoutmap.core.mesh import check_dims_in_mesh
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.specs import BatchDim, list_batch_dims
from layoutmap.core.steps import TrainingStep
from layoutmap.core.variables import Assignment
from layoutmap.cost.model_steps import make_training_step
from layoutmap.cost.table import StepCost
from layoutmap.cost.verified import Verified
from layoutmap.plan.completeness import make_unbuilt_layers_problem
from layoutmap.plan.problems import Problem
from layoutmap.rules.rule_set import RuleSet
from layoutmap.scope.arguments import check_model_function, check_remat
from layoutmap.scope.context import Scope
from layoutmap.scope.owner import retry_with_model_library
from layoutmap.scope.plan import Plan, make_plan
from layoutmap.scope.progress import ElapsedTime, ProgressMode
from layoutmap.scope.scope import make_model_in_scope


class LoweredStep:
    """Training step that is traced once without layouts, so that its cost under any layout map is quick to compute.

    Args:
        step: The step.
        batch_dim: Default mesh dim, or dims, over which batches are sharded.
        remat: See `lower_step`.
        missing: Parts that the model lacks; `None`: all layers have weights.
        fuse_attention: See `lower_step`.

    Attributes:
        step: The step.
    """

    def __init__(
        self,
        step: TrainingStep,
        batch_dim: BatchDim | None,
        remat: str | None = None,
        missing: Problem | None = None,
        fuse_attention: bool = False,
    ):
        from layoutmap.cost.jax.lowered import StepCostCounter  # imported here, because it imports JAX

        self.step = step
        self._variables = step.variables
        self._counter = StepCostCounter(step, remat, fuse_attention)
        self._batch_dim = batch_dim
        self._missing = missing
        self._fuses = fuse_attention

    def with_remat(self, remat: str) -> LoweredStep:
        """Return the same step with recomputed activations in the layers that `remat` selects. See `lower_step`."""
        return LoweredStep(self.step, self._batch_dim, remat, self._missing, self._fuses)

    def plan(self, layout_map: RuleSet) -> Plan:
        """Return the plan of the model under `layout_map`, without building the model again."""
        complete, missing = self._missing is None, filter(None, [self._missing])
        plan = make_plan(self._variables, layout_map, complete=complete, free_activations=True)
        return plan.add_problems([*missing])

    def count(
        self,
        layout_map: RuleSet,
        *,
        batch_dim: BatchDim | None = None,
        target: str | None = None,
        progress: ProgressMode = None,
    ) -> StepCost:
        """Return the collectives, operations, and memory of the step under a layout map, in about a second.

        Args:
            layout_map: Rules, also for activations, on any mesh.
            batch_dim: Mesh dim, or dims, over which batches are sharded; `None`: that of `lower_step`, if the mesh has
                it.
            target: Target of `compile` other than a TPU: XLA compiles the step with two and three of its equal blocks
                for it, in some seconds, and collectives and memory come from that. `None`: the collectives come from
                the partitioner, and memory is estimated.
            progress: See `verify`.

        Raises:
            EngineError: `target` is a TPU, or see `compile`.
            PlanError: The rules do not fit the model.
            LayoutError: A rule for activations does not fit the output of a layer.
            ScopeError: The mesh does not have `batch_dim`.
        """
        with ElapsedTime(
            f"XLA compiles the step for {target}", enabled=progress if target else False
        ) as shown:
            return self._counter.compute_cost(
                *self._make_assignments_and_policy(layout_map, batch_dim), target=target, on_wait=shown
            )

    def compile(self, layout_map: RuleSet, *, batch_dim: BatchDim | None = None, target: str = "cpu") -> Any:
        """Compile the step under a layout map with XLA, for devices that need not exist. This may take minutes.

        Args:
            layout_map: See `count`.
            batch_dim: See `count`.
            target: `"cpu"`. With the CUDA plugin of JAX `"h100"`, `"h200"`, `"b200"`, or `"a100"`. With libtpu `"v5e"`,
                `"v5p"`, or `"v6e"`. The extras `xla-gpu` and `xla-tpu` install these, and need no GPU or TPU.

        Returns:
            A value with XLA's `collectives`, `sent_by_kind`, `argument_bytes`, and `peak_bytes`.

        Raises:
            EngineError: The plugin for the target is not installed, or XLA cannot compile the step. For TPUs, it
                compiles only steps that fit their memory.
        """
        return self._counter.compile(*self._make_assignments_and_policy(layout_map, batch_dim), target)

    def verify(
        self,
        layout_map: RuleSet,
        *,
        batch_dim: BatchDim | None = None,
        target: str = "cpu",
        progress: ProgressMode = None,
    ) -> Verified:
        """Estimate the cost of the step under a layout map, compile the step with XLA, and return both results.

        Args:
            layout_map: See `count`.
            batch_dim: See `count`.
            target: See `compile`.
            progress: Whether to show XLA's compile time on stderr; `None`: only on a terminal and if it takes long;
                `"log"`: if it takes long, anywhere.

        Raises:
            EngineError: See `compile`.
        """
        assignments, policy = self._make_assignments_and_policy(layout_map, batch_dim)
        cost = self._counter.compute_cost(assignments, policy)
        with ElapsedTime(f"XLA compiles the step for {target}", enabled=progress) as shown:
            return self._counter.verify(assignments, policy, target, cost, shown)

    def _make_assignments_and_policy(
        self, layout_map: RuleSet, batch_dim: BatchDim | None
    ) -> tuple[list[Assignment], LayoutPolicy]:
        plan = self.plan(layout_map).check()
        check_dims_in_mesh("batch_dim", batch_dim, plan.mesh, "the batch is sharded over it")
        usual = {*list_batch_dims(self._batch_dim)}
        batch_dim = batch_dim or (self._batch_dim if usual <= {*plan.mesh.dim_names} else None)
        activations = layout_map.activations
        policy = LayoutPolicy(plan.mesh, batch_dim, activations.__getitem__ if activations else None)
        found = {assignment.variable.key: assignment for assignment in plan.assignments}
        return [found[variable.key] for variable in self.step.variables], policy

    @property
    def output_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Dict from a layer's path to the shape of the first array that it returns. It is empty before `count`."""
        return self._counter.output_shapes

    @property
    def fingerprint(self) -> str:
        """Text that is equal for equal steps, if it is read after a call of `count`."""
        return self._counter.fingerprint


@retry_with_model_library
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
    """Trace and lower a training step once, so that its cost can be computed under many layout maps.

    Args:
        make_model: Function that creates and returns the model.
        layout_map: Rules with a mesh, as for `plan`. The step does not depend on them.
        inputs: Example input of the model in a step: arrays, or objects with `shape` and `dtype`, nested as the model
            takes them. The first axis is the global batch.
        batch_dim: Mesh dim, or dims, over which batches are sharded; `None`: they are replicated.
        optimizer: For Keras a name, as in `"adamw"`, or a function that creates an optimizer. For flax.nnx and pytrees
            a name or an optax optimizer. `None`: that of the model, or none.
        loss: Function from the model's output to a number. `None`: the loss of a compiled Keras model or of
            `train_with`, or else the mean of the squared outputs.
        remat: Layers whose activations are counted as recomputed in the backward pass, although the model's code keeps
            them: `"blocks"` for those of repeated layers, or a regex for the paths of layers. `None`: only those that
            the model's code recomputes (`keras.RematScope`, `nnx.remat`, `jax.checkpoint`).
        fuse_attention: Whether to count each call of `jax.nn.dot_product_attention` as one fused kernel (flash
            attention) that stores no scores, as Keras may use on GPUs.
        library: See `layoutmap.plan`.

    Raises:
        ScopeError: The model cannot be traced, its library does not run on JAX, `remat` is not a regex,
            `fuse_attention` finds no call, or the mesh does not have `batch_dim`.
    """
    check_model_function(make_model, layout_map, "lower_step")
    check_remat(remat)
    adapter = get_adapter(library) if library else get_adapter_of_imported_library()
    training = require_capability(adapter, TrainingAdapter, "lower_step")
    if adapter.engine_name != "jax":
        raise ScopeError(
            f"the cost of a step cannot be computed for a model of {adapter.name} on {adapter.engine_name}",
            why="costs come from XLA's partitioner, which needs a model on JAX",
            fix="plan the same rules with the model on JAX: KERAS_BACKEND=jax"
            if adapter.name == "keras"
            else "plan the same rules with the model of keras-hub or flax.nnx, on JAX",
        )
    context = Scope(layout_map, adapter)
    check_dims_in_mesh("batch_dim", batch_dim, context.mesh, "the batch is sharded over it")
    with adapter.preserve_random_states():
        model = make_model_in_scope(
            context, make_model, inputs, lambda model: training.set_optimizer(model, optimizer)
        )
        step = make_training_step(context, model, inputs, optimizer, loss)
    unbuilt = context.session.list_unbuilt_layer_names()
    missing = make_unbuilt_layers_problem(type(model).__name__, unbuilt, called=True) if unbuilt else None
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
    """Return the cost of a training step on each device: its collectives, operations, and memory.

    No array is allocated and no device is needed, so the mesh may have any size. See `lower_step` for the arguments.

    Raises:
        PlanError: The rules do not fit the model.
        LayoutError: A rule for activations does not fit the output of a layer.
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
