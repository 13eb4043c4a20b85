"""Apply the rules of Keras's own layout maps unchanged: `keras:transformer_layer.*attention_output.kernel`.

A key of `keras.distribution.LayoutMap` is a regex over `variable.path`: the names of layers, joined by slashes. These
are not object paths, and no translation of the regex is right for all models. So a rule that begins with `keras:` is
tried only on the names that Keras gives variables, and has the same meaning as in Keras:

    an exact name comes first, else the regex that matches all of the name (`re.fullmatch`)
    two regexes that match one name contradict each other, which is an error in the plan
    a layout that is shorter than the variable's shape leaves the last axes unsharded

`adapters/keras/describing.py` finds the names; the planner asks a map for them if it has such a rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import LayoutMapError, RuleError, shorten_repr
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.match import KERAS, Rule
from layoutmap.core.mesh import Mesh

_FLAGS = re.compile(r"(?:\(\?[aiLmsux]+\))+")


# Keras rules match the names of variables in Keras, not paths, so `keras:` distinguishes them (decisions/0014).
def is_keras_rule(text: str) -> bool:
    """Return whether a text is the pattern of a `keras:` rule, or the name of a variable in Keras after `keras:`."""
    return text.startswith(KERAS)


def anchor_keras_pattern(pattern: str) -> str:
    r"""Return a rule's regex. `keras:a|b` becomes `keras:(?:a|b)\Z`, because Keras's rules match whole names."""
    if not is_keras_rule(pattern):
        return pattern
    body = pattern.removeprefix(KERAS)
    flags = _FLAGS.match(body)
    # A verbose regex may end in a comment, which would hide the closing bracket, so put the bracket on a new line.
    end = "\n" if re.compile(body).flags & re.VERBOSE else ""
    return f"{flags[0] if flags else ''}{KERAS}(?:{body[flags.end() if flags else 0 :]}{end})\\Z"


def pad_rule_layout(rule: Rule, rank: int) -> Layout:
    """Return a rule's layout, with unsharded axes added up to this rank if a `keras:` rule's layout is shorter."""
    layout = rule.layout
    if not is_keras_rule(rule.pattern) or layout.rank >= rank:
        return layout
    padding = [UNSHARDED] * (rank - layout.rank)
    return Layout.from_valid_specs([*layout.sharding_specs, *padding], layout.mesh, layout.memory)


def read_keras_map(keras_map: Any, mesh: Mesh | None) -> tuple[Mesh, dict[str, tuple[object, ...]]]:
    """Return a mesh (the argument, else the map's own) and the rules of a `keras.distribution.LayoutMap` by pattern.

    Raises:
        RuleError: It is no layout map of Keras, has no mesh or several, or a key is not text.
        MeshError: Its mesh has dims or devices that a mesh cannot have.
    """
    if not _is_keras_map(keras_map):
        raise RuleError(
            f"from_keras: {shorten_repr(keras_map)} is not a Keras layout map",
            why=f"it is {describe_type(keras_map)}",
            fix="pass a keras.distribution.LayoutMap, as in Llama3Backbone.get_layout_map(device_mesh)",
        )
    rules: dict[str, tuple[object, ...]] = {}
    device_meshes: list[Any] = [keras_map.device_mesh]
    for key, layout in keras_map.items():
        if not isinstance(key, str):
            raise RuleError(
                f"from_keras: the key {key!r} is not text",
                why="Keras reads it as a regex over variable.path",
                fix="remove the key from the map",
            )
        rules[f"{KERAS}{key}"] = tuple(layout.axes)
        device_meshes.append(layout.device_mesh)
    known_meshes = [device_mesh for device_mesh in device_meshes if device_mesh is not None]
    if mesh is None and not known_meshes:
        raise RuleError(
            "from_keras: the map has no mesh",
            why="neither the map nor a layout in it has a device_mesh",
            fix='pass one: LayoutMap.from_keras(keras_map, lm.create_mesh("batch=2,model=4"))',
        )
    found = [mesh] if mesh else list(dict.fromkeys(map(_convert_keras_mesh, known_meshes)))
    if len(found) > 1:
        raise RuleError(
            f"from_keras: the layouts of the map are on {len(found)} meshes",
            facts={"meshes": "; ".join(map(str, found))},
            why="all variables of a model share one mesh",
            fix="build the Keras map on one DeviceMesh, or pass a mesh",
        )
    return found[0], rules


def _is_keras_map(value: object) -> bool:
    return isinstance(value, Mapping) and hasattr(value, "device_mesh")  # pyright: ignore[reportUnknownArgumentType]


def _convert_keras_mesh(device_mesh: Any) -> Mesh:
    """Return a `keras.distribution.DeviceMesh` as layoutmap's `Mesh`."""
    dims = list(zip(map(str, device_mesh.axis_names), map(int, device_mesh.shape), strict=True))
    names = [
        f"{each.platform}:{each.id}" if hasattr(each, "platform") else each
        for each in device_mesh.devices.flat
    ]
    try:
        return Mesh([str(name).upper() for name in names], dims)
    except LayoutMapError as error:
        raise type(error)(
            f"from_keras: {error.what}", facts=error.facts, why=error.why, fix=error.fix
        ) from error
