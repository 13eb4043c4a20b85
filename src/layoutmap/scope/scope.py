"""Plan a model, or build it with each variable created in its layout.

`plan`, `scope`, `build` and `apply` do the same steps: variables are deferred, described, matched with rules, checked,
and created. A plan stops before the last step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from layoutmap.adapters import (
    ModelAdapter,
    TrainingAdapter,
    forbid_models_of_other_libraries,
    get_adapter,
    get_adapter_of_imported_library,
    get_model_adapter,
    require_capability,
)
from layoutmap.adapters.options import COMMON_OPTIONS, OptionsByName, ScopeOptions
from layoutmap.core.errors import EngineError, LayoutMapError, ScopeError, join_names
from layoutmap.core.garbage import pause_garbage_collection
from layoutmap.core.mesh import Mesh, check_dims_in_mesh
from layoutmap.core.specs import BatchDim, list_batch_dims
from layoutmap.core.unsupported import UNKNOWN_ORDER_KIND
from layoutmap.engines import get_engine
from layoutmap.plan.carried_cost import load_cost_package
from layoutmap.plan.completeness import has_weights, make_unbuilt_layers_problem
from layoutmap.rules.rule_set import RuleSet
from layoutmap.scope.arguments import (
    check_apply_arguments,
    check_cost_options,
    check_layout_map,
    check_model_function,
    document_scope_options,
)
from layoutmap.scope.context import Scope, get_layout_map_mesh
from layoutmap.scope.owner import check_model_library, retry_with_model_library
from layoutmap.scope.plan import Plan, make_plan

if TYPE_CHECKING:
    from layoutmap.checkpoint.model_values import SavedModelValues


@document_scope_options
@contextmanager
def scope(
    layout_map: RuleSet, *, library: str | None = None, **options: Unpack[OptionsByName]
) -> Generator[Scope]:
    """Build models in a `with` block, with each variable created in its layout.

    Inside the block, and in the first call of a model that was built in it, every variable is deferred, matched by its
    object path, and materialized in its layout. All rules are checked before anything is created.

    The scope copies the rules when it opens. Later changes of the map apply only to scopes that open later, also for
    variables that these models create after the block, in `compile` or `fit`.

    The scope belongs to the thread and the asyncio task that opened it. Threads and tasks that start inside the block
    build unsharded models unless they open their own scope. A generator that is closed late ends only its own scope.

    Args:
        layout_map: The rules. They are copied.
        library: Model library, as in `"keras"`; `None`: the imported one.
        **options: Options by name, as in `batch_dim="batch"`: see `layoutmap.adapters.options.ScopeOptions`.

    Yields:
        The scope. `scope.plan` is the plan of its models.

    Raises:
        PlanError: The rules do not fit the model. Raised at the end of the block, or by the call that creates the
            weights.
        ScopeError: A scope cannot be opened here.
        MeshError: The machine does not have the mesh's devices.

    Example:
        >>> import keras, layoutmap as lm
        >>> layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"))
        >>> layout_map[r".*\\.kernel"] = (None, "model")
        >>> with layout_map.scope(batch_dim="batch") as scope:
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")])
        >>> model.layers[0].kernel.layout.sharding_specs
        ('unsharded', 'model')
        >>> scope.plan["d1.kernel"].shard_shape
        (8, 4)

    References:
        `tf.keras.dtensor.experimental.LayoutMap.scope` of TensorFlow 2.9 to 2.15.
    """
    check_layout_map(layout_map, "scope")
    context = _open_scope(layout_map, _choose_adapter(library), options)
    with context.session.defer_variables(), forbid_models_of_other_libraries(context.adapter):
        yield context
    context.warn_if_scope_is_empty()
    context.warn_of_unbuilt_layers()


@contextmanager
def layout_map_scope(layout_map: RuleSet) -> Generator[Scope]:
    """Open a scope: the deprecated spelling of `layout_map.scope()`."""
    warnings.warn(
        "layout_map_scope(layout_map) is deprecated: write layout_map.scope()",
        DeprecationWarning,
        stacklevel=3,
    )
    with scope(layout_map) as context:
        yield context


@document_scope_options
@retry_with_model_library
def build(
    make_model: Callable[[], Any],
    layout_map: RuleSet,
    *,
    inputs: Any = None,
    library: str | None = None,
    values: SavedModelValues | None = None,
    **options: Unpack[OptionsByName],
) -> Any:
    """Build one model in a scope.

    Args:
        make_model: Function that creates and returns the model.
        layout_map: The rules.
        inputs: Example input of the model (arrays, or objects with `shape` and `dtype`), for models that create their
            weights in their first call. Nothing is computed with it. A compiled model that has its weights also gets
            its optimizer's slots here. `None`: weights are created in the first call.
        library: Model library: `"keras"`, `"torch"`, or `"jax"` (also `"flax"`). `None`: the imported one. It is
            `"jax"` if the function names JAX, flax, or equinox, and neither Keras nor torch. If none is imported, it is
            one that the function names, or torch. If it returns a model of another library, it is called a second time.
            The first call creates unsharded arrays, so pass the library for a model that does not fit one device.
        values: Source of values to read instead of initializing weights; `layoutmap.load` passes it.
        **options: Options by name, as in `batch_dim="batch"`: see `layoutmap.adapters.options.ScopeOptions`.

    Returns:
        The model with sharded variables.

    Raises:
        PlanError: The rules do not fit the model. Nothing was created.
        ScopeError: The function did not return a model, the layout map has no mesh, or a scope cannot be opened here.

    Example:
        >>> import keras, layoutmap as lm
        >>> layout_map = lm.LayoutMap(lm.create_mesh("model=4"), {r".*\\.kernel": (None, "model")})
        >>> model = layout_map.build(lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d")]))
        >>> model.layers[0].bias.layout.is_fully_replicated()
        True
    """
    check_model_function(make_model, layout_map, "build")
    context = _open_scope(layout_map, _choose_adapter(library), options)
    context.values = values
    model = make_model_in_scope(context, make_model, inputs)
    context.warn_of_unbuilt_layers()
    return model


@retry_with_model_library
def plan(
    make_model: Callable[[], Any],
    layout_map: RuleSet,
    *,
    inputs: object = None,
    strict: bool = False,
    library: str | None = None,
    optimizer: object = None,
    on: object = None,
    batch_dim: BatchDim | None = None,
    later: Mapping[str, Callable[[], object]] | None = None,
    loss: Callable[..., Any] | None = None,
    verify: bool | str | None = None,
    remat: str | None = None,
    fuse_attention: bool = False,
    device_memory: int | None = None,
    advise: bool = True,
) -> Plan:
    """Return a plan with the layout of each variable of a model, from a dry run that creates no values.

    The dry run allocates no array and needs no device, so the mesh may have any size. The function's model has only
    shapes, and is discarded. Random states are restored, so the plan does not change the values of the next model.

    Args:
        make_model: Function that creates and returns the model.
        layout_map: The rules.
        inputs: See `build`. Without it, the plan reports variables that the model would create in its first call as
            unknown.
        strict: Whether to raise on warnings, too.
        library: See `build`.
        optimizer: Optimizer, so that its slots are planned. For Keras: a name, as in `"adamw"`, or a function that
            creates one; `None`: that of the model. For flax.nnx and pytrees a name or an optax optimizer, and for torch
            a name or a function that creates one from parameters: their slots are only in the cost.
        on: Machine, as in `"h100:64"` (see `layoutmap.cost.machines`): `plan.cost` then holds the bytes sent, the
            computation, the memory, and the time of a training step. `None`: no cost.
        batch_dim: Mesh dim over which batches are sharded, for `on`. `None`: the dim over which rules shard the first
            axis of activations, or else a dim called batch, data, dp, or fsdp.
        later: Functions that create the arrays which appear after the model, by name, as for `build`.
        loss: Function from the model's output to a number, for `on`. `None`: the loss of the model, or else the mean of
            the squared outputs.
        verify: Whether XLA also compiles the whole step for the devices of `on`, which need not exist.
            `plan.cost.verified` then holds its figures next to the estimate. A text names another device to compile
            for; `"cpu"` needs nothing, GPUs need the extra `xla-gpu`, TPUs `xla-tpu`. It takes seconds to minutes, and
            supports models on JAX. `None`: if the compiler for the GPUs of `on` is installed, XLA compiles the step
            with two and three of its equal blocks, which takes seconds, and the cost's collectives and memory come from
            that. `False`: nothing is compiled.
        remat: Layers whose activations `on` counts as recomputed in the backward pass, although the model's code keeps
            them; see `lower_step`.
        fuse_attention: Whether `on` counts attention as one fused kernel (flash attention) that stores no scores,
            although the model calls none; see `lower_step`.
        device_memory: Memory of a device in bytes, for the verdict; `None`: that of the machine of `on`.
        advise: Whether to try alternatives if a step does not fit the machine of `on`, for at most 10 seconds of CPU
            time. The verdict names an alternative that fits.

    Returns:
        The plan, with its problems. Without `strict`, problems do not raise.

    Raises:
        PlanError: With `strict`, there are problems.
        ScopeError: The layout map has no mesh, or the function did not return a model.
        LayoutMapError: The machine is unknown, or its number of devices differs from the mesh's.
        EngineError: XLA has no compiler for the devices here, or cannot compile the step.

    Example:
        >>> import keras, layoutmap as lm
        >>> layout_map = lm.LayoutMap(lm.create_mesh("batch=512,model=8"), {r".*\\.kernel": (None, "model")})
        >>> lm.plan(lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")]), layout_map)
        <Plan: 2 variables on batch=512, model=8, 576 B, 128 B per device; 1 warning>
    """
    check_model_function(make_model, layout_map, "plan")
    adapter = _choose_adapter(library)
    default_options = ScopeOptions(later=later)
    own = adapter.read_library_options({}, default_options, spans_processes=False)
    context = Scope(layout_map, adapter, options=replace(default_options, own=own))
    options = {"batch_dim": batch_dim, "loss": loss, "verify": verify, "remat": remat}
    options["fuse_attention"] = fuse_attention or None
    check_cost_options(on, context.mesh.size, options)
    request = None
    if on is not None:
        request = load_cost_package().make_cost_request(
            on, context.mesh, inputs, adapter.engine_name, options
        )
    with adapter.preserve_random_states(), pause_garbage_collection():
        change_model = None
        if optimizer is not None:
            training = require_capability(adapter, TrainingAdapter, "plan: optimizer")
            change_model = functools.partial(training.set_optimizer, optimizer=optimizer)
        model = make_model_in_scope(context, make_model, inputs, change_model)
        unbuilt = context.session.list_unbuilt_layer_names()
        found = context.plan
        complete = has_weights(found) and not unbuilt
        final = make_plan(
            [a.variable for a in found.assignments],
            context.layout_map,
            global_init={a.variable.key: a.global_init for a in found.assignments},
            complete=complete,
            layers=context.layers,
            free_activations=context.free_activations,
            batch_dim=batch_dim,
            several_dims=context.several_dims,
            explain_why_padding_is_impossible=adapter.explain_why_padding_is_impossible,
        )
        kinds = ("unsupported layout", "unsupported", UNKNOWN_ORDER_KIND)
        engine_problems = [p for p in found.problems if p.kind in kinds]
        final = final.add_problems([p for p in engine_problems if p not in final.problems])
    if not complete:
        problem = make_unbuilt_layers_problem(type(model).__name__, unbuilt, called=inputs is not None)
        final = final.add_problem(problem)
    if strict:
        final.check(strict=True)
    if request is not None and not final.errors:
        with adapter.preserve_random_states():
            request = replace(request, device_memory=device_memory, advises=advise)
            return load_cost_package().make_plan_with_step_cost(
                final, context, model, inputs, optimizer, request
            )
    return final.set_limits(device_memory=device_memory)


@document_scope_options
def apply(model: object, layout_map: RuleSet, **options: Unpack[OptionsByName]) -> Any:
    """Shard an existing model in place. It keeps its values, and gets the layouts that `build` would plan.

    Args:
        model: The model. It is changed in place.
        layout_map: The rules.
        **options: Options by name, as in `batch_dim="batch"`: see `layoutmap.adapters.options.ScopeOptions`.

    Returns:
        The model.

    Raises:
        PlanError: The rules do not fit the model. Nothing was redistributed.

    Example:
        >>> import keras, layoutmap as lm
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")])
        >>> layout_map = lm.LayoutMap(lm.create_mesh("model=4"), {"d1.kernel": (None, "model")})
        >>> layout_map.apply(model).layers[0].kernel.layout.sharding_specs
        ('unsharded', 'model')
    """
    check_apply_arguments(model, layout_map)
    adapter = get_model_adapter(model)
    context = _open_scope(layout_map, adapter, options)
    sharded_model = context.session.shard_model(model)
    context.warn_of_unbuilt_layers()
    return sharded_model


def _choose_adapter(library: str | None) -> ModelAdapter:
    return get_adapter(library) if library else get_adapter_of_imported_library()


def _open_scope(layout_map: RuleSet, adapter: ModelAdapter, user_options: Mapping[str, Any]) -> Scope:
    """Start the devices of a layout map's mesh, and return a scope with the user's options."""
    adapter.check_scope_can_open()
    engine, mesh = get_engine(adapter.engine_name), get_layout_map_mesh(layout_map)
    bound = engine.bind_mesh(mesh)
    spans_processes = len(bound.local_device_ids) < bound.size
    if not bound.local_device_ids:
        raise ScopeError(
            "no device of the mesh belongs to this process",
            facts={"mesh": str(bound), "devices": join_names(bound.devices or ())},
            why="a process computes with its own devices",
            fix="open the scope only in processes that have these devices, or use a mesh of all "
            "devices: lm.create_mesh(..)",
        )
    try:
        options, refusal = _check_and_read_user_options(adapter, user_options, mesh, spans_processes), None
    except LayoutMapError as error:
        options, refusal = None, error
    if spans_processes:
        from layoutmap.scope.process_group import check_same_options

        # Compare options before raising: if one process raises, all must, because the others would wait forever.
        compared = replace(options, progress=None, later=None) if options else refusal
        check_same_options(
            f"library={adapter.name!r}, {compared}", lambda values: engine.gather_from_processes(values, mesh)
        )
    if refusal is not None:
        raise refusal
    context = Scope(layout_map, adapter, engine, options, spans_processes=spans_processes)
    replicated = context.policy.make_replicated_layout(0)
    try:
        engine.check_layout(replicated)
    except EngineError:
        return context  # the plan reports the refused layout with all other problems
    # Start simulated devices before the session, because parts of the simulation cannot start inside one.
    engine.make_native_layout(replicated, 0)
    return context


# Adapters check their own options, and the scope checks the common ones (decisions/0171).
def _check_and_read_user_options(
    adapter: ModelAdapter, user_options: Mapping[str, Any], mesh: Mesh, spans_processes: bool
) -> ScopeOptions:
    """Check the options that the user passed, and return them as `ScopeOptions`."""
    options = ScopeOptions(**{name: value for name, value in user_options.items() if name in COMMON_OPTIONS})
    check_dims_in_mesh("batch_dim", options.batch_dim, mesh, "the batch is sharded over it")
    if (
        len(dims := list_batch_dims(options.batch_dim)) > 1
        and not get_engine(adapter.engine_name).several_dims
    ):
        raise ScopeError(
            f"batch_dim={options.batch_dim!r} has {len(dims)} dims",
            facts={"mesh": str(mesh), "engine": adapter.engine_name},
            why=f"an axis of an array of {adapter.engine_name} is sharded over one mesh dim at most",
            fix="use a mesh in which one dim contains all devices of the batch, or use JAX or PyTorch",
        )
    own = {name: value for name, value in user_options.items() if name not in COMMON_OPTIONS}
    return replace(options, own=adapter.read_library_options(own, options, spans_processes=spans_processes))


def make_model_in_scope(
    context: Scope,
    make_model: Callable[[], Any],
    inputs: object,
    change_model: Callable[[object], object] | None = None,
) -> Any:
    """Call a model function in a scope, and return the model with all its weights.

    Args:
        context: The scope.
        make_model: Creates the model and returns it.
        inputs: See `build`.
        change_model: Changes the model before its weights are created, and returns it, as to give it an optimizer.
    """

    def make_model_of_only_this_library() -> Any:
        with forbid_models_of_other_libraries(context.adapter):
            return _make_and_check_model(context, make_model, inputs, change_model)

    return context.session.build_model(make_model_of_only_this_library)


def _make_and_check_model(
    context: Scope,
    make_model: Callable[[], Any],
    inputs: object,
    change_model: Callable[[object], object] | None,
) -> Any:
    """Call the function that creates the model, check its result, and return the model with all its weights."""
    model = make_model()
    if model is None:
        raise ScopeError(
            "the function returned no model",
            why="build and plan use the model that the function returns",
            fix="end the function with: return model",
        )
    check_model_library(model, context.adapter.name)
    model = model if change_model is None else change_model(model)
    if not context.session.has_built(model):
        raise ScopeError(
            f"{type(model).__name__}: the function returned an existing model",
            facts={"model": getattr(model, "name", "")},
            why="only variables that the function creates are sharded; the model is unchanged",
            fix="create the model inside the function, or shard the existing one: layout_map.apply(model)",
        )
    context.session.create_lazy_variables(model, inputs)
    return model
