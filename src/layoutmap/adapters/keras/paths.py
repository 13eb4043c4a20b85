"""Find the object paths of a Keras model's variables.

A path is the way from the model to the variable through attributes, list indices and dict keys. Keras's own names
(`dense_3`) are numbered by the process and change when a model is built twice; attributes do not.

    subclassed models           the attribute path: `blocks.0.attn.query.kernel`
    Functional and Sequential   `layer.name`, then the attribute path inside the layer, at every depth; see `names` for
                                layers that were given no name

Private storage counts under its public name: `_kernel` is `kernel`. In a user's layer the other name is an alias. A
variable with several paths, through a shared layer or a tied weight, has the first of them, in a fixed order: layers
and variables first, containers after, each in the order in which they were assigned. The rest are its aliases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType, NoneType
from typing import Any

import keras

from layoutmap.adapters.keras.names import renumber_names
from layoutmap.adapters.keras.private import Functional, strip_generated_number
from layoutmap.core.variables import make_unique_names

_MAX_ALIASES = 16

SESSION = "_layoutmap_session"
"""The attribute in which a layer, optimizer, or pending variable stores the session of its scope."""

# Objects in these internal attributes of Keras and layoutmap are also in public attributes, so skip these attributes.
_BOOKKEEPING = frozenset(
    (
        SESSION,
        *("_trainable_variables", "_non_trainable_variables", "_layers", "_metrics", "_seed_generators"),
        *("_tracker", "_functional", "_operations", "_operations_by_depth", "_nodes", "_nodes_by_depth"),
        *("_inbound_nodes", "_outbound_nodes", "_losses", "_loss_ids", "_losses_override", "_loss_tracker"),
        *("_compile_loss", "_compile_metrics", "_modules", "_parameters", "_torch_params"),
        *("optimizer", "_optimizer"),
        # TensorFlow stores the tracked objects for its checkpoints again, so skip these copies.
        *("_self_unconditional_checkpoint_dependencies", "_self_unconditional_dependency_names"),
        *("_self_unconditional_deferred_dependencies", "_self_name_based_restores"),
        *("_self_saveable_object_factories", "_self_tracked_trackables"),
    )
)

# Most attributes of a layer have these types, so find them without `isinstance`, which is slow for `Mapping`.
_PLAIN_TYPES = frozenset((bool, int, float, str, NoneType, FunctionType, MethodType))


@dataclass(slots=True)
class VariableWithPaths:
    """A variable of a model with its paths."""

    variable: keras.Variable
    path: str
    aliases: list[str] = field(default_factory=list[str])
    is_seed: bool = False


def find_variables(root: object) -> list[VariableWithPaths]:
    """Return all variables of a layer or model in a fixed order, each once."""
    found: dict[int, VariableWithPaths] = {}
    for path, variable, is_seed in _list_variable_paths(root):
        known = found.get(id(variable))
        if known is None:
            found[id(variable)] = VariableWithPaths(variable, path, is_seed=is_seed)
        elif path != known.path and path not in known.aliases and len(known.aliases) < _MAX_ALIASES:
            known.aliases.append(path)
    return number_duplicate_paths(found.values())


def number_duplicate_paths(variables_with_paths: Iterable[VariableWithPaths]) -> list[VariableWithPaths]:
    """Append numbers to paths that occur more than once, so that all paths differ. Return all variables as a list."""
    every = list(variables_with_paths)
    for each, path in zip(every, make_unique_names([each.path for each in every]), strict=True):
        each.path = path
    return every


def iterate_sublayers(layer: object) -> Iterator[keras.Layer]:
    """Yield the direct children of a layer, including the inner model of a `Sequential`."""
    yield from getattr(layer, "_layers", ())
    inner = getattr(layer, "_functional", None)
    if inner is not None:
        yield inner


def find_root_layers(layers: Sequence[object]) -> list[Any]:
    """Return the layers that are not a direct child of any of these layers."""
    below = {id(child) for layer in layers for child in iterate_sublayers(layer)}
    return [layer for layer in layers if id(layer) not in below]


def find_layers(root: object) -> list[tuple[str, keras.Layer]]:
    """Return pairs of path and layer for all layers below a layer or model, once per path, in a fixed order."""
    found: dict[tuple[str, int], keras.Layer] = {}
    open_ids: set[int] = set()

    def visit_children(owner: object, prefix: str) -> None:
        if id(owner) in open_ids:  # the object is inside itself, so stop
            return
        open_ids.add(id(owner))
        for name, child in _list_named_children(owner):
            path = f"{prefix}{name}"
            if isinstance(child, keras.layers.Layer):
                found.setdefault((path, id(child)), child)
            if not isinstance(child, keras.Variable):
                visit_children(child, f"{path}.")
        open_ids.discard(id(owner))

    visit_children(root, "")
    return [(path, layer) for (path, _), layer in found.items()]


def collect_sublayer_names_by_layer_id(layer: object) -> dict[int, str]:
    """Return a dict from the id of each layer in a layer's attributes and containers to its name there."""
    names: dict[int, str] = {}

    def visit_children(owner: object, prefix: str) -> None:
        for name, child in _list_named_children(owner):
            if isinstance(child, keras.layers.Layer):
                names.setdefault(id(child), prefix + name)
            elif isinstance(child, (Mapping, list, tuple)):
                visit_children(child, f"{prefix}{name}.")

    visit_children(layer, "")
    return names


def make_slot_path(
    slot: keras.Variable,
    weight: keras.Variable | None,
    weight_path: str,
    taken_paths: set[str],
    kind: str = "",
) -> str:
    """Return an optimizer variable's path: `optimizer.WEIGHT_PATH.KIND`, or without a weight `optimizer.NAME`.

    The path is added to `taken_paths`. An empty kind is read from the slot's name.
    """
    if weight is None:
        path = f"optimizer.{strip_generated_number(slot.name)}"
    else:
        kind = kind or slot.name.removeprefix(weight.path.replace("/", "_") + "_")
        path = f"optimizer.{weight_path}.{kind}"
    numbers = itertools.chain([path], (f"{path}_{n}" for n in itertools.count(1)))
    unique = next(p for p in numbers if p not in taken_paths)
    taken_paths.add(unique)
    return unique


def _list_variable_paths(root: object) -> list[tuple[str, object, bool]]:
    """Return tuples of a path, a variable, and whether it is a seed state, for all variables below an object.

    A shared object is visited once, and its paths are repeated for each occurrence.
    """
    found: dict[int, list[tuple[str, object, bool]]] = {}
    open_ids: set[int] = set()

    def list_paths(owner: object, child: object) -> list[tuple[str, object, bool]]:
        if isinstance(child, keras.Variable):
            return [("", child, isinstance(owner, keras.random.SeedGenerator))]
        if id(child) in open_ids:  # the object is inside itself, so stop
            return []
        if id(child) not in found:
            open_ids.add(id(child))
            found[id(child)] = [
                (f"{name}.{path}" if path else name, variable, is_seed)
                for name, inner in _list_named_children(child)
                for path, variable, is_seed in list_paths(child, inner)
            ]
            open_ids.discard(id(child))
        return found[id(child)]

    return list_paths(None, root)


def _list_named_children(owner: object) -> list[tuple[str, object]]:
    """Return pairs of a public name and a value, for the values in an object that are or contain variables."""
    if isinstance(owner, Mapping):
        return [(str(key), value) for key, value in owner.items() if _can_have_variables(value)]
    if isinstance(owner, (list, tuple)):
        return [(str(i), value) for i, value in enumerate(owner) if _can_have_variables(value)]
    children: list[tuple[str, object]] = []
    if isinstance(owner, (keras.Sequential, Functional)):
        children += zip(renumber_names(owner.layers), owner.layers, strict=True)
    walked = [*iterate_public_attributes(owner, _can_have_variables)]
    single = [(n, v) for n, v in walked if not isinstance(v, (Mapping, list, tuple))]
    children += single + [(n, v) for n, v in walked if isinstance(v, (Mapping, list, tuple))]
    if isinstance(owner, keras.layers.Layer):
        children += [*_list_objects_without_attribute(owner, children), *_iterate_aliased_variables(owner)]
    return children


def iterate_public_attributes(
    owner: object, is_wanted: Callable[[object], bool] = lambda value: True
) -> Iterator[tuple[str, object]]:
    """Yield pairs of a public name and a wanted value, of an object's attributes that are not Keras's bookkeeping."""
    # torch stores sublayers separately. List them first, because they usually precede variables, so that a variable
    # with two paths has the same first path on each backend.
    values = {**(vars(owner).get("_modules") or {}), **vars(owner)}
    for name, value in values.items():
        if name not in _BOOKKEEPING and is_wanted(value):
            yield _find_public_name(owner, name, values), value


def _find_public_name(owner: object, name: str, values: Mapping[str, object]) -> str:
    """Return an attribute's name without leading underscores, or unchanged if that name is already in use."""
    public = name.lstrip("_")
    if public == name or not public or public in values:
        return name
    return public if isinstance(getattr(type(owner), public, None), (property, type(None))) else name


def _iterate_aliased_variables(layer: object) -> Iterator[tuple[str, object]]:
    """Yield pairs of an alias and a variable of a user's layer: its public or private name that is in no path.

    `tf.keras` has the path `d1._weight`, and here it is `d1.weight` if the layer has a property `weight`.
    """
    values = vars(layer)
    if type(layer).__module__.partition(".")[0] == "keras":
        return
    for name, value in values.items():
        public = name.lstrip("_")
        if isinstance(value, keras.Variable) and public not in ("", name) and public not in values:
            yield name if _find_public_name(layer, name, values) == public else public, value


def _can_have_variables(value: object) -> bool:
    """Return whether a value is a variable, a layer, a seed generator, or a container of these, but no metric."""
    if type(value) in _PLAIN_TYPES or isinstance(value, keras.Metric):
        return False
    if isinstance(value, (keras.Variable, keras.layers.Layer, keras.random.SeedGenerator)):
        return True
    if isinstance(value, (list, tuple)):
        return any(_can_have_variables(v) for v in value)
    return isinstance(value, Mapping) and any(_can_have_variables(v) for v in value.values())


def _list_objects_without_attribute(
    layer: object, children: list[tuple[str, object]]
) -> list[tuple[str, object]]:
    """Return pairs of a name and an object, for layers and variables that a layer tracks but has in no attribute."""
    known_ids: set[int] = set()
    for _, child in children:
        _add_nested_ids(child, known_ids)
    tracked = [
        *getattr(layer, "_layers", ()),
        *getattr(layer, "_trainable_variables", ()),
        *getattr(layer, "_non_trainable_variables", ()),
    ]
    unattached = [
        thing for thing in tracked if id(thing) not in known_ids and not isinstance(thing, keras.Metric)
    ]
    layers = [thing for thing in unattached if isinstance(thing, keras.layers.Layer)]
    variables = [thing for thing in unattached if not isinstance(thing, keras.layers.Layer)]
    return [
        *zip(renumber_names(layers), layers, strict=True),
        *((strip_generated_number(v.name), v) for v in variables),
    ]


def _add_nested_ids(child: object, ids: set[int]) -> None:
    """Add the ids of a value, and of all values in it if it is a container, to `ids`."""
    ids.add(id(child))
    if isinstance(child, keras.random.SeedGenerator):
        ids.add(id(child.state))
    elif isinstance(child, Mapping):
        for value in child.values():
            _add_nested_ids(value, ids)
    elif isinstance(child, (list, tuple)):
        for value in child:
            _add_nested_ids(value, ids)
