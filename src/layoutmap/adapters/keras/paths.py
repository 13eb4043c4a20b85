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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from layoutmap.adapters.keras.names import renumber_names
from layoutmap.adapters.keras.private import Functional, strip_number
from layoutmap.core.variables import make_unique_names

_MOST_ALIASES = 16

# Skip internal attributes of Keras and of this library. Their contents are found under public attributes.
SESSION = "_layoutmap_session"
"""The attribute of a layer, optimizer, or pending variable with the session of its scope."""

_BOOKKEEPING = frozenset(
    (
        SESSION,
        *("_trainable_variables", "_non_trainable_variables", "_layers", "_metrics", "_seed_generators"),
        *("_tracker", "_functional", "_operations", "_operations_by_depth", "_nodes", "_nodes_by_depth"),
        *("_inbound_nodes", "_outbound_nodes", "_losses", "_loss_ids", "_losses_override", "_loss_tracker"),
        *("_compile_loss", "_compile_metrics", "_modules", "_parameters", "_torch_params"),
        *("optimizer", "_optimizer"),
        # TensorFlow stores these for its checkpoints.
        *("_self_unconditional_checkpoint_dependencies", "_self_unconditional_dependency_names"),
        *("_self_unconditional_deferred_dependencies", "_self_name_based_restores"),
        *("_self_saveable_object_factories", "_self_tracked_trackables"),
    )
)


@dataclass(slots=True)
class FoundVariable:
    """A variable of a model with its paths."""

    variable: keras.Variable
    path: str
    aliases: list[str] = field(default_factory=list[str])
    is_seed: bool = False


def find_variables(root: object) -> list[FoundVariable]:
    """Return all variables of a layer or model in a fixed order, each once."""
    found: dict[int, FoundVariable] = {}
    for path, variable, is_seed in _walk_variables(root):
        known = found.get(id(variable))
        if known is None:
            found[id(variable)] = FoundVariable(variable, path, is_seed=is_seed)
        elif path != known.path and path not in known.aliases and len(known.aliases) < _MOST_ALIASES:
            known.aliases.append(path)
    return number_equal_paths(found.values())


def number_equal_paths(found: Iterable[FoundVariable]) -> list[FoundVariable]:
    """Add a number to paths that occur twice."""
    every = list(found)
    for each, path in zip(every, make_unique_names([each.path for each in every]), strict=True):
        each.path = path
    return every


def list_sublayers(layer: object) -> Iterator[keras.Layer]:
    """Yield the direct children of a layer, including the inner model of a `Sequential`."""
    yield from getattr(layer, "_layers", ())
    inner = getattr(layer, "_functional", None)
    if inner is not None:
        yield inner


def find_roots(layers: Sequence[object]) -> list[Any]:
    """Return the layers that no other layer contains."""
    below = {id(child) for layer in layers for child in list_sublayers(layer)}
    return [layer for layer in layers if id(layer) not in below]


def find_layers(root: object) -> list[tuple[str, keras.Layer]]:
    """Return all layers below a layer or model under each of their paths, in the order of the variables."""
    found: dict[tuple[str, int], keras.Layer] = {}
    above: set[int] = set()

    def look(owner: object, prefix: str) -> None:
        if id(owner) in above:  # a cycle: the object references its parent
            return
        above.add(id(owner))
        for name, child in _list_children(owner):
            path = f"{prefix}{name}"
            if isinstance(child, keras.layers.Layer):
                found.setdefault((path, id(child)), child)
            if not isinstance(child, keras.Variable):
                look(child, f"{path}.")
        above.discard(id(owner))

    look(root, "")
    return [(path, layer) for (path, _), layer in found.items()]


def name_sublayers(layer: object) -> dict[int, str]:
    """Return the names of a layer's direct children within it, by the id of the child."""
    names: dict[int, str] = {}

    def look(owner: object, prefix: str) -> None:
        for name, child in _list_children(owner):
            if isinstance(child, keras.layers.Layer):
                names.setdefault(id(child), prefix + name)
            elif isinstance(child, (Mapping, list, tuple)):
                look(child, f"{prefix}{name}.")

    look(layer, "")
    return names


def make_slot_path(
    slot: keras.Variable, weight: keras.Variable | None, weight_path: str, taken: set[str], kind: str = ""
) -> str:
    """Return the path of an optimizer's variable: `optimizer.`, its weight's path, and the kind of slot.

    The path is added to `taken`. An empty kind is read from the slot's name.
    """
    if weight is None:
        path = f"optimizer.{strip_number(slot.name)}"
    else:
        kind = kind or slot.name.removeprefix(weight.path.replace("/", "_") + "_")
        path = f"optimizer.{weight_path}.{kind}"
    numbers = itertools.chain([path], (f"{path}_{n}" for n in itertools.count(1)))
    unique = next(p for p in numbers if p not in taken)
    taken.add(unique)
    return unique


def _walk_variables(root: object) -> list[tuple[str, object, bool]]:
    """Return path, variable, and whether it is a seed state, for all variables below an object.

    A shared object is visited once, and its paths are repeated for each occurrence.
    """
    found: dict[int, list[tuple[str, object, bool]]] = {}
    above: set[int] = set()

    def walk(owner: object, child: object) -> list[tuple[str, object, bool]]:
        if isinstance(child, keras.Variable):
            return [("", child, isinstance(owner, keras.random.SeedGenerator))]
        if id(child) in above:  # a cycle: the object references its parent
            return []
        if id(child) not in found:
            above.add(id(child))
            found[id(child)] = [
                (f"{name}.{path}" if path else name, variable, is_seed)
                for name, inner in _list_children(child)
                for path, variable, is_seed in walk(child, inner)
            ]
            above.discard(id(child))
        return found[id(child)]

    return walk(None, root)


def _list_children(owner: object) -> list[tuple[str, object]]:
    """Return the values that an object contains, under public names."""
    if isinstance(owner, Mapping):
        return [(str(key), value) for key, value in owner.items() if _is_walked(value)]
    if isinstance(owner, (list, tuple)):
        return [(str(i), value) for i, value in enumerate(owner) if _is_walked(value)]
    children: list[tuple[str, object]] = []
    if isinstance(owner, (keras.Sequential, Functional)):
        children += zip(renumber_names(owner.layers), owner.layers, strict=True)
    walked = [(name, value) for name, value in list_attributes(owner) if _is_walked(value)]
    single = [(n, v) for n, v in walked if not isinstance(v, (Mapping, list, tuple))]
    children += single + [(n, v) for n, v in walked if isinstance(v, (Mapping, list, tuple))]
    if isinstance(owner, keras.layers.Layer):
        children += [*_list_unattached(owner, children), *_list_other_spellings(owner)]
    return children


def list_attributes(owner: object) -> Iterator[tuple[str, object]]:
    """Yield an object's attributes under public names, without Keras's trackers."""
    # torch stores sublayers separately. List them first, because they usually precede variables, so that a variable
    # with two paths has the same first path on each backend.
    values = {**(vars(owner).get("_modules") or {}), **vars(owner)}
    for name, value in values.items():
        if name not in _BOOKKEEPING:
            yield _make_public_name(owner, name, values), value


def _make_public_name(owner: object, name: str, values: Mapping[str, object]) -> str:
    public = name.lstrip("_")
    if public == name or not public or public in values:
        return name
    return public if isinstance(getattr(type(owner), public, None), (property, type(None))) else name


def _list_other_spellings(layer: object) -> Iterator[tuple[str, object]]:
    """Yield variables in a user layer's private attributes, under their other names.

    `tf.keras` has the path `d1._weight`, and here it is `d1.weight` if the layer has a property `weight`.
    """
    values = vars(layer)
    if type(layer).__module__.partition(".")[0] == "keras":
        return
    for name, value in values.items():
        public = name.lstrip("_")
        if isinstance(value, keras.Variable) and public not in ("", name) and public not in values:
            yield name if _make_public_name(layer, name, values) == public else public, value


def _is_walked(value: object) -> bool:
    if isinstance(value, keras.Metric):
        return False
    if isinstance(value, (keras.Variable, keras.layers.Layer, keras.random.SeedGenerator)):
        return True
    if isinstance(value, Mapping):
        return any(_is_walked(v) for v in value.values())
    return isinstance(value, (list, tuple)) and any(_is_walked(v) for v in value)


def _list_unattached(layer: object, children: list[tuple[str, object]]) -> list[tuple[str, object]]:
    """List layers and variables that a layer tracks without an attribute, under their own names."""
    held: set[int] = set()
    for _, child in children:
        _collect_ids(child, held)
    tracked = [
        *getattr(layer, "_layers", ()),
        *getattr(layer, "_trainable_variables", ()),
        *getattr(layer, "_non_trainable_variables", ()),
    ]
    loose = [thing for thing in tracked if id(thing) not in held and not isinstance(thing, keras.Metric)]
    layers = [thing for thing in loose if isinstance(thing, keras.layers.Layer)]
    variables = [thing for thing in loose if not isinstance(thing, keras.layers.Layer)]
    return [
        *zip(renumber_names(layers), layers, strict=True),
        *((strip_number(v.name), v) for v in variables),
    ]


def _collect_ids(child: object, ids: set[int]) -> None:
    ids.add(id(child))
    if isinstance(child, keras.random.SeedGenerator):
        ids.add(id(child.state))
    elif isinstance(child, Mapping):
        for value in child.values():
            _collect_ids(value, ids)
    elif isinstance(child, (list, tuple)):
        for value in child:
            _collect_ids(value, ids)
