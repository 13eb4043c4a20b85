"""Apply the rules of Keras's own layout maps unchanged: `keras:transformer_layer.*attention_output.kernel`.

A key of `keras.distribution.LayoutMap` is a regex over `variable.path`: the names of layers, joined by slashes. These
are not object paths, and no translation of the regex is right for all models. So a rule that begins with `keras:` is
tried on what Keras calls a variable and on nothing else, and means what it means there:

    an exact name comes first, else the regex that matches all of the name (`re.fullmatch`)
    two regexes that match one name contradict each other, which a plan says as an error
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


# Keras rules match Keras variable names, not paths, so they start with `keras:` (decisions/0014).
def is_keras_rule(text: str) -> bool:
    """Return whether a rule or name starts with `keras:`, so that it refers to Keras variable names."""
    return text.startswith(KERAS)


def anchor_pattern(pattern: str) -> str:
    r"""Anchor a rule's regex at the start of a path: `keras:(?:a|b)\Z` for `keras:a|b`."""
    if not is_keras_rule(pattern):
        return pattern
    body = pattern.removeprefix(KERAS)
    flags = _FLAGS.match(body)
    # A verbose regex may end in a comment, so close the group on a new line.
    end = "\n" if re.compile(body).flags & re.VERBOSE else ""
    return f"{flags[0] if flags else ''}{KERAS}(?:{body[flags.end() if flags else 0 :]}{end})\\Z"


def pad_layout(rule: Rule, rank: int) -> Layout:
    """Return a rule's layout for a variable. Pad the layout of a `keras:` rule with unsharded axes."""
    layout = rule.layout
    if not is_keras_rule(rule.pattern) or layout.rank >= rank:
        return layout
    padding = [UNSHARDED] * (rank - layout.rank)
    return Layout.from_valid_specs([*layout.sharding_specs, *padding], layout.mesh, layout.memory)


def read_keras_map(keras_map: Any, mesh: Mesh | None) -> tuple[Mesh, dict[str, tuple[object, ...]]]:
    """Read the mesh and the rules of a `keras.distribution.LayoutMap`.

    Raises:
        RuleError: It is no map of Keras's, or has no mesh, or a key of it is none.
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
    theirs = [each for each in device_meshes if each is not None]
    if mesh is None and not theirs:
        raise RuleError(
            "from_keras: the map has no mesh",
            why="neither the map nor a layout in it has a device_mesh",
            fix='pass one: LayoutMap.from_keras(keras_map, lm.create_mesh("batch=2,model=4"))',
        )
    found = [mesh] if mesh else list(dict.fromkeys(map(_convert_mesh, theirs)))
    if len(found) > 1:
        raise RuleError(
            f"from_keras: its layouts are on {len(found)} meshes",
            facts={"meshes": "; ".join(map(str, found))},
            why="all variables of a model share one mesh",
            fix="build the Keras map on one DeviceMesh, or pass a mesh",
        )
    return found[0], rules


def _is_keras_map(value: object) -> bool:
    return isinstance(value, Mapping) and hasattr(value, "device_mesh")  # pyright: ignore[reportUnknownArgumentType]


def _convert_mesh(device_mesh: Any) -> Mesh:
    """Convert the mesh of a `keras.distribution.DeviceMesh`."""
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
