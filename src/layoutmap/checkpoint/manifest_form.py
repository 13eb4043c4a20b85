"""The form of a manifest: each value is of its type, in its range, and can be used as what it stands for.

Whoever changes a manifest can give it the right checksum. So nothing in it is used before all of it has been checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from layoutmap.checkpoint.states import decode
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh

_TEXTS = ("created", "writer", "library", "engine", "plan", "id")
_MOST = 2**63 - 1


def check_form(found: Mapping[str, Any]) -> None:
    """Raise if a manifest does not have the form that its version has; says which part of it.

    Args:
        found: The manifest, as JSON.

    Raises:
        ValueError: It does not; `TypeError`, `KeyError` and the like, where a value is no mapping or list at all.
    """
    _check("step", found["step"], _is_count)
    for name in _TEXTS:
        _check(name, found.get(name), lambda value: value is None or isinstance(value, str))
    _check("parent", found.get("parent"), lambda value: value is None or _is_count(value))
    _check("order", found.get("order", 0), _is_count)
    _check("lines", found.get("lines", {"": 0}), _are_lines)
    for file in found["files"]:
        _check("name of a file", file["name"], _is_inside)
        _check(f"header of {file['name']}", file["header"], _is_text)
        for name in ("bytes", "header_bytes"):
            _check(f"{name} of {file['name']}", file[name], _is_count)
        if file["header_bytes"] > file["bytes"]:
            raise ValueError(f"{file['name']}: {file['bytes']} bytes")
    _check_states(found)
    mesh = _mapping("mesh", {} if (dims := found.get("mesh")) is None else dims)
    _check_variables(found["variables"], Mesh(None, list(mesh.items())))


def _check_states(found: Mapping[str, Any]) -> None:
    decode(found["metadata"])
    states = {name: decode(value) for name, value in _mapping("states", found["states"]).items()}
    _mapping("settings", states.get("settings", {}))
    for each in _list("processes", states.get("processes", [])):
        _mapping("random", _mapping("processes", each).get("random", {}))
    metrics = _mapping("metrics", decode(found.get("metrics", {})))
    for name, value in metrics.items():
        _check(f"metrics[{name!r}]", value, lambda value: isinstance(value, (int, float)))


def _check_variables(variables: Any, mesh: Mesh) -> None:
    paths: set[str] = set()
    layouts: set[Any] = set()
    for each in _list("variables", variables):
        path = each["path"]
        _check("path", path, lambda path: _is_text(path) and path not in paths)
        paths.add(path)
        shape = _list(f"{path}: shape", each["shape"])
        _check(f"{path}: shape", shape, lambda shape: all(map(_is_count, shape)))
        _check(f"{path}: dtype", each["dtype"], _is_text)
        _check(f"{path}: aliases", each.get("aliases", []), _are_texts)
        if (layout := each.get("layout")) is not None:
            parts = _list(f"{path}: layout", layout)
            specs = tuple(tuple(cast("list[Any]", s)) if isinstance(s, list) else s for s in parts)
            _check(f"{path}: layout", specs, lambda specs, shape=shape: len(specs) == len(shape))
            if specs not in layouts:
                Layout(specs, mesh)  # raises, if it is none
                layouts.add(specs)


def _check(what: str, value: Any, is_right: Callable[[Any], bool]) -> None:
    if not is_right(value):
        raise ValueError(f"{what}: {value!r:.200}")


def _mapping(what: str, value: Any) -> dict[str, Any]:
    _check(what, value, lambda value: isinstance(value, dict))
    return value


def _list(what: str, value: Any) -> list[Any]:
    _check(what, value, lambda value: isinstance(value, list))
    return value


def _are_lines(value: Any) -> bool:
    found = list(cast("dict[str, Any]", value).values()) if isinstance(value, dict) else []
    return bool(found) and all(map(_is_count, found))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, cast("list[Any]", value)))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_inside(name: Any) -> bool:
    """Whether a name is that of a file in the folder of the step, or in a folder of it."""
    parts = name.split("/") if _is_text(name) else [""]
    return (
        not any(part in ("", ".", "..") for part in parts) and not {*"\\\0"} & {*name} and bool(name.encode())
    )
