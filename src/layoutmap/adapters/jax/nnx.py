"""Find the variables of flax.nnx modules by path, their axis roles, and shared variables."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from layoutmap.adapters.jax import pytrees
from layoutmap.adapters.jax.held_arrays import (
    check_state_has_all_arrays,
    find_array_attributes,
    mark_traced_attributes_as_data,
)
from layoutmap.adapters.jax.module_outputs import (
    CallTracingHandler,
    ModelMeshHandler,
    OutputLayoutHandler,
    remove_call_handler,
    set_call_handler,
)
from layoutmap.adapters.jax.pytrees import ModelLeaf, SplitModel, infer_array_kind
from layoutmap.adapters.jax.roles import find_weight_axis_roles
from layoutmap.core.layout import Layout
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.steps import StepTracer
from layoutmap.core.variables import Kind, number_inputs
from layoutmap.engines import get_engine
from layoutmap.engines.jax.ambient import differs_from_ambient_mesh, warn_of_different_axis_types

_EAGER_SHARDING_OFF = 0
"""Value for `nnx.use_eager_sharding`: false, but distinguishable from the `False` that a program may set."""


def split_module(model: nnx.Module) -> SplitModel:
    """Split a module into the arrays of its Variables and attributes, and a function that rebuilds it.

    Raises:
        ScopeError: A traced array is in an attribute in which flax does not look for arrays.
    """
    nodes = [*nnx.iter_graph(model)]
    mark_traced_attributes_as_data(nodes)
    graph, state = nnx.split(model)
    check_state_has_all_arrays(nodes, state)
    variables = {_make_path_parts(path): each for path, each in nnx.to_flat_state(state)}
    # Flax takes longer to find shared objects than to split a module, so search only if the graph contains some.
    is_shared = any(isinstance(node, nnx.graph.NodeRef) for node in graph.nodes)
    shared = _SharedObjectPaths(nnx.find_duplicates(model) if is_shared else ())
    modules = [(path, node) for path, node in nodes if isinstance(node, nnx.Module)]
    used = find_weight_axis_roles(modules)
    paths: list[Sequence[str]] = []

    def describe_leaf(keys: Sequence[str], value: object) -> ModelLeaf:
        length = next(n for n in range(len(keys) + 1) if tuple(keys[:n]) in variables)
        variable = variables[tuple(keys[:length])]
        if not isinstance(variable, nnx.Variable):
            paths.append(keys)
            why = "it is in an attribute that is not a Variable, and flax allows only JAX arrays there"
            return ModelLeaf(_format_path(keys), value, infer_array_kind(value), no_padding=why)
        inner = keys[length + 1 :]  # a Variable adds the key "value" to the path, so drop it
        path = (*keys[:length], *inner)
        paths.append(path)
        aliases = tuple(_format_path(other) for other in shared.find_other_paths(path))
        kind, annotation = _infer_variable_kind(variable), _read_sharding_annotation(variable)
        return ModelLeaf(_format_path(path), value, kind, aliases, annotation, used.get(path))

    parts = pytrees.split_pytree(state, describe_leaf)

    def rebuild_model(arrays: Sequence[object]) -> nnx.Module:
        return nnx.merge(graph, parts.rebuild_model(arrays))

    layers = [path for same, _ in _iterate_callable_modules(modules, shared) for path in same]
    keys = [*_iterate_sort_keys_by_attribute_order(model, paths)]
    return SplitModel(parts.leaves, rebuild_model, layers, sorted(range(len(keys)), key=keys.__getitem__))


def _iterate_sort_keys_by_attribute_order(
    model: nnx.Module, paths: Iterable[Sequence[str]]
) -> Iterator[list[int]]:
    """Yield a sort key for each path, which sorts the paths in the order in which attributes were assigned.

    The key has a number for each part of the path: the position of the part among the members of its module.
    """
    known: dict[int, dict[str, tuple[int, object]]] = {}
    for keys in paths:
        positions: list[int] = []
        node: object = model
        for key in keys:
            members = known.get(id(node))
            if members is None:
                numbered = enumerate(_iterate_named_members(node))
                members = known[id(node)] = {name: (number, value) for number, (name, value) in numbered}
            number, node = members.get(key, (0, None))
            positions.append(number)
        yield positions


def _iterate_named_members(node: object) -> Iterator[tuple[str, object]]:
    """Yield pairs of a name and a value: a module's attributes, or the items of a container, in order."""
    if isinstance(node, nnx.Pytree):
        yield from vars(node).items()
    elif not isinstance(node, nnx.Variable):
        for path, value in jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]:
            yield _format_path(path), value


def replace_arrays(model: nnx.Module, values: Sequence[object]) -> None:
    """Assign new arrays to a module in place, in the order of its leaves."""
    new = nnx.to_flat_state(pytrees.split_pytree(nnx.state(model)).rebuild_model(values))
    nnx.update(model, nnx.from_flat_state([each for each in new if isinstance(each[1], nnx.Variable)]))
    arrays = {_make_path_parts(path): value for path, value in new if not isinstance(value, nnx.Variable)}
    for held in find_array_attributes(model) if arrays else ():
        held.assign_arrays(arrays)


def _make_path_parts(keys: Sequence[object]) -> tuple[str, ...]:
    return tuple(map(pytrees.format_pytree_key, keys))


def _format_path(keys: Sequence[object]) -> str:
    return ".".join(_make_path_parts(keys))


def _infer_variable_kind(variable: nnx.Variable[object]) -> Kind:
    if isinstance(variable, nnx.RngState):
        return Kind.RNG
    return Kind.WEIGHT if isinstance(variable, nnx.Param) else Kind.STATE


# Only the layout map determines layouts, so the plan notes that flax's annotations have no effect (decisions/0073).
def _read_sharding_annotation(variable: nnx.Variable[object]) -> str:
    """Return the sharding annotation of a Variable as text, or an empty string if it has none."""
    sharding = variable.get_metadata().get("out_sharding")
    sharding = getattr(sharding, "sharding", sharding)  # unwrap jax.experimental.layout.Format
    return str(tuple(getattr(sharding, "spec", sharding))) if sharding else ""


class _SharedObjectPaths:
    """Store the paths of modules and Variables that occur more than once in a model."""

    def __init__(self, groups: Iterable[Iterable[Sequence[object]]]) -> None:
        self._groups = [[_make_path_parts(path) for path in paths] for paths in groups]
        self._numbers: dict[tuple[str, ...], dict[int, None]] = {}
        for number, paths in enumerate(self._groups):
            for path in paths:
                self._numbers.setdefault(path, {})[number] = None

    def find_other_paths(self, path: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Yield all paths of a shared object, or of an object inside a shared one, except `path`."""
        keys = tuple(path)
        starts = [keys[:length] for length in range(len(keys) + 1)] if self._numbers else ()
        for number in sorted({number for start in starts for number in self._numbers.get(start, ())}):
            paths = self._groups[number]
            own = next(p for p in paths if keys[: len(p)] == p)
            yield from ((*other, *keys[len(own) :]) for other in paths if other != own)


def _iterate_callable_modules(
    modules: Iterable[tuple[Sequence[object], nnx.Module]], shared: _SharedObjectPaths
) -> Iterator[tuple[list[str], nnx.Module]]:
    """Yield a pair for each callable module in a model except the model itself: all of its paths, and the module."""
    for path, module in modules:
        if path and callable(module):
            keys = _make_path_parts(path)
            yield [_format_path(keys), *map(_format_path, shared.find_other_paths(keys))], module


def _list_layers_with_paths(model: nnx.Module) -> list[tuple[list[str], nnx.Module]]:
    return [
        *_iterate_callable_modules([*nnx.iter_modules(model)], _SharedObjectPaths(nnx.find_duplicates(model)))
    ]


def constrain_module_outputs(model: nnx.Module, policy: LayoutPolicy) -> None:
    """Make modules constrain their outputs by activation rules, and remove earlier constraints."""
    for paths, module in _list_layers_with_paths(model):
        rules = ((path, policy.find_activation_layout(path)) for path in paths)
        path, layout = next(((path, rule) for path, rule in rules if rule is not None), ("", None))
        if layout is None:
            remove_call_handler(module)
        else:
            set_call_handler(module, OutputLayoutHandler(layout, policy.batch_dim, path))
    remove_call_handler(model)
    native = get_engine("jax").make_native_layout(Layout.replicated(policy.mesh, 0), 0).mesh
    if differs_from_ambient_mesh(native):
        warn_of_different_axis_types(native)
        set_call_handler(model, ModelMeshHandler(native.abstract_mesh))


def list_layers(model: nnx.Module) -> list[tuple[str, nnx.Module]]:
    """List each callable module in a model, as a pair of its first path and the module."""
    return [(paths[0], module) for paths, module in _list_layers_with_paths(model)]


def report_calls_to_tracer(model: nnx.Module, tracer: StepTracer) -> None:
    """Make each module report its calls to a tracer."""
    for path, module in list_layers(model):
        set_call_handler(module, CallTracingHandler(tracer, path))


class _InputRecorder:
    """Tracer that stores the last input of each module by the module's path, in the order of calls."""

    def __init__(self) -> None:
        self.inputs: dict[str, object] = {}

    def should_recompute(self, path: str) -> bool:
        return False

    def call_layer(self, path: str, function: Callable[..., object], args: Any, kwargs: Any) -> object:
        self.inputs.pop(path, None)
        arrays = (leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.Array))
        if (array := next(arrays, None)) is not None:
            self.inputs[path] = array
        return function(*args, **kwargs)


def number_module_inputs(
    parts: SplitModel, arrays: Sequence[object], call: Callable[[Any, Any], object], inputs: object
) -> dict[str, int]:
    """Return a dict from the path of each called module to the number of the array that it reads in its last call.

    The model is traced.

    Args:
        parts: The model.
        arrays: Its arrays, of which only shapes and dtypes are read.
        call: Calls the model with inputs.
        inputs: Inputs as positional arguments or as a mapping of named ones: objects with shape and dtype.

    Raises:
        Exception: The call failed, as it does if the model's code reads values.
    """
    recorder: Any = _InputRecorder()

    def call_rebuilt_model(arrays: Sequence[object], inputs: Any) -> None:
        model = parts.rebuild_model(arrays)
        report_calls_to_tracer(model, recorder)
        call(model, inputs)

    described = jax.tree.map(_describe_shape, ([*arrays], inputs))
    jax.eval_shape(call_rebuilt_model, *described)
    return number_inputs(recorder.inputs)


def _describe_shape(leaf: Any) -> object:
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype) if is_array else leaf


@contextmanager
def suspend_sharding_annotations() -> Generator[None]:
    """Disable the sharding annotations of Variables that are created until the block ends."""
    with nnx.use_eager_sharding(_EAGER_SHARDING_OFF):
        yield


def restore_eager_sharding(model: nnx.Module) -> None:
    """Set `eager_sharding` to nnx's setting in Variables that were created in `suspend_sharding_annotations`."""
    for _, node in [*nnx.iter_graph(model)]:
        if isinstance(node, nnx.Variable) and type(node.get_metadata("eager_sharding")) is int:
            node.set_metadata("eager_sharding", nnx.using_eager_sharding())
