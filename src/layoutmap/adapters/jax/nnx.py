"""Modules of flax.nnx: their variables by path, what each is for, and shared ones."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.core
from flax import nnx

from layoutmap.adapters.jax import pytrees
from layoutmap.adapters.jax.module_outputs import Output, TracedOutput, with_output, without_output
from layoutmap.adapters.jax.pytrees import Leaf, Parts, kind_of
from layoutmap.adapters.jax.roles import uses
from layoutmap.core.errors import ScopeError
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.steps import Tracer
from layoutmap.core.variables import Kind

_OFF = 0
"""What `nnx.use_eager_sharding` is set to: false, and known from the `False` that a program may set."""


def take_apart(model: nnx.Module) -> Parts:
    """Return a module as the arrays of its variables."""
    _note_arrays(model)
    graph, state = nnx.split(model)
    variables = {tuple(map(str, path)): each for path, each in nnx.to_flat_state(state)}
    shared = _shared(model)
    used = uses(model)
    paths: list[Sequence[str]] = []

    def leaf(keys: Sequence[str], value: Any) -> Leaf:
        length = next(n for n in range(len(keys) + 1) if tuple(keys[:n]) in variables)
        variable = variables[tuple(keys[:length])]
        if not isinstance(variable, nnx.Variable):
            paths.append(keys)
            return Leaf(_path(keys), value, kind_of(value))
        inner = keys[length + 1 :]  # without "value", the attribute of the variable that holds it
        path = (*keys[:length], *inner)
        paths.append(path)
        aliases = tuple(_path(other) for other in _other_paths(path, shared))
        kind, annotation = _kind_of(variable), _annotation(variable)
        return Leaf(_path(path), value, kind, aliases, annotation, used.get(path))

    parts = pytrees.take_apart(state, leaf)

    def put_together(arrays: Sequence[Any]) -> nnx.Module:
        return nnx.merge(graph, parts.put_together(arrays))

    layers = [path for same, _ in _layers(model, shared) for path in same]
    places = [_place(model, path) for path in paths]
    return Parts(parts.leaves, put_together, layers, sorted(range(len(places)), key=places.__getitem__))


def _place(model: nnx.Module, keys: Sequence[str]) -> list[int]:
    """Return where an array is among the attributes of each module on the way: flax sorts them by name."""
    place: list[int] = []
    node: Any = model
    for key in keys:
        members = {str(name): value for name, value in getattr(node, "__dict__", {}).items()}
        place.append(next((number for number, name in enumerate(members) if name == key), 0))
        node = members.get(key)
    return place


def _note_arrays(model: nnx.Module) -> None:
    """Have a module take traced arrays that are its own attributes for arrays, as it does with arrays that have values.

    Flax 0.12.8 takes them for static values, here and in `nnx.eval_shape` and `nnx.jit`, and loses them.

    Raises:
        ScopeError: One is in a container that flax does not look into.
    """
    for path, node in [*nnx.iter_graph(model)]:
        if isinstance(node, jax.core.Tracer) and path:
            owner = functools.reduce(_child, path[:-1], model)
            if isinstance(owner, nnx.Pytree) and isinstance(path[-1], str):
                setattr(owner, path[-1], nnx.data(node))
        elif not isinstance(node, (nnx.Pytree, nnx.Variable)) and any(
            isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(node)
        ):
            raise ScopeError(
                f"{_path(path)}: an array is in a {type(node).__name__}, which flax takes for a static value",
                why="flax.nnx looks for variables in modules, nnx.List and nnx.Dict, and in nothing else",
                fix="assign nnx.List(..), nnx.Dict(..) or nnx.data(..) to the attribute",
            )


def _child(node: Any, key: Any) -> Any:
    return getattr(node, key) if isinstance(key, str) and hasattr(node, key) else node[key]


def put_values(model: nnx.Module, values: Sequence[Any]) -> None:
    """Give the variables of a module other arrays, in the order of its parts; it stays the same object."""
    nnx.update(model, pytrees.take_apart(nnx.state(model)).put_together(values))


def _path(keys: Sequence[Any]) -> str:
    return ".".join(map(str, keys))


def _other_paths(
    path: Sequence[str], shared: Sequence[Sequence[tuple[str, ...]]]
) -> Iterator[tuple[str, ...]]:
    for paths in shared:
        own = next((p for p in paths if tuple(path[: len(p)]) == p), None)
        if own is not None:
            yield from ((*other, *path[len(own) :]) for other in paths if other != own)


def _kind_of(variable: nnx.Variable[Any]) -> Kind:
    if isinstance(variable, nnx.RngState):
        return Kind.RNG
    return Kind.WEIGHT if isinstance(variable, nnx.Param) else Kind.STATE


def _annotation(variable: nnx.Variable[Any]) -> str:
    sharding = variable.get_metadata().get("out_sharding")
    sharding = getattr(sharding, "sharding", sharding)  # of a Format of JAX
    return str(tuple(getattr(sharding, "spec", sharding))) if sharding else ""


def _shared(model: nnx.Module) -> list[list[tuple[str, ...]]]:
    """Return the keys of what is in several places, module or variable."""
    return [[tuple(map(str, path)) for path in paths] for paths in nnx.find_duplicates(model)]


def _layers(
    model: nnx.Module, shared: Sequence[Sequence[tuple[str, ...]]]
) -> Iterator[tuple[list[str], nnx.Module]]:
    """Return each module inside of a model that can be called, with all its paths."""
    for path, module in [*nnx.iter_modules(model)]:
        if path and callable(module):
            keys = tuple(map(str, path))
            yield [_path(keys), *map(_path, _other_paths(keys, shared))], module


def lay_out_outputs(model: nnx.Module, policy: LayoutPolicy) -> None:
    """Have each module with a rule for activations return arrays in the rule's layout, and all others none."""
    for paths, module in [*_layers(model, _shared(model))]:
        rules = ((path, policy.activation_layout(path)) for path in paths)
        path, layout = next(((path, rule) for path, rule in rules if rule is not None), ("", None))
        if layout is None:
            without_output(module)
        else:
            with_output(module, Output(layout, policy.batch_dim, path))


def named_layers(model: nnx.Module) -> list[tuple[str, nnx.Module]]:
    """Return each module inside of a model that can be called, with the first of its paths."""
    return [(paths[0], module) for paths, module in _layers(model, _shared(model))]


def trace_outputs(model: nnx.Module, tracer: Tracer) -> None:
    """Have each module tell a tracer of its calls."""
    for path, module in named_layers(model):
        with_output(module, TracedOutput(tracer, path))


@contextmanager
def annotations_unused() -> Generator[None]:
    """While open, variables that are made do not shard themselves by their annotations."""
    with nnx.use_eager_sharding(_OFF):
        yield


def restore_metadata(model: nnx.Module) -> None:
    """Leave no trace of `annotations_unused` on variables that were made then."""
    for _, node in [*nnx.iter_graph(model)]:
        if isinstance(node, nnx.Variable) and type(node.get_metadata("eager_sharding")) is int:
            node.set_metadata("eager_sharding", nnx.using_eager_sharding())
