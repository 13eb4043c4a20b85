"""Find equal blocks of a model, and check that a step calls them equally, so that it runs only a few of them."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

from layoutmap.core.variables import VariableSpec

_FEWEST = 3
_ABSENT = object()


class BlockDiffersFromFirstError(Exception):
    """Raised if a skipped block is not called like the first block of its stack.

    Args:
        path: The path of the skipped block.
    """

    def __init__(self, path: str):
        super().__init__(path)
        self.path = path


class BlockCallChecker:
    """Check that a step calls each skipped block like the first block of its stack.

    Args:
        skipped: Dict from the path of each skipped block to the path of the first block of its stack.
        make_comparable: Returns the structure of values, with tensors as shape and dtype.

    Attributes:
        skipped: See above.
        differing_path: Path of a skipped block that differs; empty: none is known.
    """

    def __init__(self, skipped: Mapping[str, str], make_comparable: Callable[[Any], object]):
        self.skipped = skipped
        self.differing_path = ""
        self._make_comparable = make_comparable
        self._calls: dict[str, list[object]] = {path: [] for path in (*skipped, *skipped.values())}
        # Paths of blocks whose output has another structure than their input.
        self._changing: set[str] = set()

    def record_call(self, path: str, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
        """Record the arguments of a layer, and return whether to skip the call and return its first argument.

        Raises:
            BlockDiffersFromFirstError: The layer is a skipped block that is not called like the first one.
        """
        if (calls := self._calls.get(path)) is None:
            return False
        calls.append(self._make_comparable((args, kwargs)))
        if path not in self.skipped:
            return False
        first = self.skipped[path]
        if not args or first in self._changing or calls != self._calls[first][: len(calls)]:
            self.differing_path = path
            raise BlockDiffersFromFirstError(path)
        return True

    def record_output(self, path: str, args: Sequence[object], output: object) -> None:
        """Record the output of a layer that was not skipped. Its arguments are `args`."""
        if path in self._calls and (
            not args or self._make_comparable(output) != self._make_comparable(args[0])
        ):
            self._changing.add(path)

    def check_all_calls(self) -> None:
        """Raise if a skipped block differs, or is not called as often as the first block of its stack.

        Raises:
            BlockDiffersFromFirstError: See above.
        """
        for path, first in self.skipped.items():
            if len(self._calls[path]) != len(self._calls[first]):
                self.differing_path = path
        if self.differing_path:
            raise BlockDiffersFromFirstError(self.differing_path)


def find_stacks_of_equal_blocks(
    variables: Sequence[VariableSpec],
    layers: Sequence[tuple[str, Any]],
    make_comparable_settings: Callable[[Any], Any],
) -> list[list[str]]:
    """Return stacks of over three outermost layers with equal weights and settings. A stack is a list of paths."""
    weights: dict[str, list[object]] = {}
    for spec in variables:
        if spec.parent is None:
            parts = spec.path.split(".")
            for n in range(1, len(parts)):
                rest = ".".join(parts[n:]), spec.shape, spec.dtype, spec.trainable, spec.kind
                weights.setdefault(".".join(parts[:n]), []).append(rest)
    groups: dict[object, list[str]] = {}
    for path, layer in sorted(layers, key=lambda pair: pair[0].count(".")):
        if path in weights and re.search(r"\d", path):
            key: Any = re.sub(r"\d+", "#", path), type(layer), tuple(weights[path])
            groups.setdefault(key, []).append(path)
    found: list[list[str]] = []
    by_path = dict(layers)
    for paths in groups.values():
        inside = any(p.startswith(f"{outer}.") for stack in found for outer in stack for p in paths)
        if len(paths) > _FEWEST and not inside:
            stacks = _group_paths_by_settings(paths, by_path, make_comparable_settings)
            found += [stack for stack in stacks if len(stack) > _FEWEST]
    return found


def _group_paths_by_settings(
    paths: Sequence[str], layers: Mapping[str, object], make_comparable_settings: Callable[[object], object]
) -> Iterator[list[str]]:
    """Yield `paths` in lists. The layers at the paths of one list, and their inner layers, have equal settings."""
    contents: dict[str, list[Any]] = {path: [] for path in paths}
    for path, layer in layers.items():
        parts = path.split(".")
        for n in range(1, len(parts) + 1):
            block = ".".join(parts[:n])
            if block in contents:
                contents[block].append((".".join(parts[n:]), type(layer), make_comparable_settings(layer)))
    groups: dict[object, list[str]] = {}
    for path in paths:
        groups.setdefault(tuple(contents[path]), []).append(path)
    yield from groups.values()


def make_comparable_attributes(layer: object, excluded: Collection[str] = ()) -> tuple[tuple[str, Any], ...]:
    """Return a layer's attributes, except `excluded`, as values that are equal for equal layers."""
    attributes = cast("Mapping[str, Any]", vars(layer))
    found = [(name, _make_comparable(value)) for name, value in attributes.items() if name not in excluded]
    return tuple(each for each in found if each[1] is not _ABSENT)


def _make_comparable(value: object, enclosing: tuple[object, ...] = ()) -> object:
    if isinstance(value, tuple | list):
        inner = tuple(_make_comparable(each, enclosing) for each in cast("Sequence[Any]", value))
        return _ABSENT if _ABSENT in inner else inner
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, types.FunctionType):  # compare the code, because all lambdas have one name
        if value in enclosing:  # the function refers to itself, so return its index, not its description
            return enclosing.index(value)
        by_name = sorted((value.__kwdefaults__ or {}).items())
        captured = (
            *map(_read_closure_cell, value.__closure__ or ()),
            *(value.__defaults__ or ()),
            *(e for _, e in by_name),
        )
        return value.__code__, *(_make_comparable(each, (*enclosing, value)) for each in captured)
    return getattr(value, "__qualname__", _ABSENT)


def _read_closure_cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the closure variable has no value yet
        return _ABSENT
