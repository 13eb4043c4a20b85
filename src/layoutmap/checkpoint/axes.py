"""Permute, split, and merge the axes of arrays by expressions such as `(heads size) width -> width heads size`.

Each side names the axes of an array in their order. Several names in parentheses are one axis, the first of them the
slowest. `1/3` selects a part: the second of three equal parts, counted from 0. An expression moves values and never
computes any, so it is exact in both directions, and each block of one array maps to blocks of the other.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layoutmap.checkpoint.chunks import choose_chunk_shape, split_shard
from layoutmap.core.blocks import Index, NumpyArray, compute_block_shape, make_relative_index

_TOKEN = re.compile(r"\s*([()]|\d+/\d+|[A-Za-z_]\w*|\S)")
_STEP_BYTES = 1 << 24  # maximum bytes to read at once before they are copied into the result

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AxisPart:
    """One of `count` equal parts of an axis, numbered from 0."""

    number: int
    count: int


Atom = str | AxisPart
Side = tuple[tuple[Atom, ...], ...]
"""The axes of an array. Each axis joins one or several atoms, the slowest first."""


def parse_axes(text: str) -> tuple[Side, Side]:
    """Parse an expression such as `(heads size) width -> width heads size` into its two sides.

    Raises:
        ValueError: The expression is invalid; the message says why.

    Example:
        >>> parse_axes("(heads size) width -> width heads size")
        ((('heads', 'size'), ('width',)), (('width',), ('heads',), ('size',)))
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError("it has no ->, as in: out in -> in out")
    return _parse_side(left), _parse_side(right)


def check_sides(here: Side, there: Side) -> None:
    """Raise unless both sides have the same axis names, each once.

    Raises:
        ValueError: They do not; says which.
    """
    names = [[atom for axis in side for atom in axis if isinstance(atom, str)] for side in (here, there)]
    for found in names:
        if again := next((name for name in found if found.count(name) > 1), None):
            raise ValueError(f"{again!r} appears twice on one side")
    if one := next(iter({*names[0]} ^ {*names[1]}), None):
        raise ValueError(f"{one!r} is on one side only")


def solve_sizes(sides: Sequence[tuple[Side, Sequence[int]]]) -> dict[str, int] | None:
    """Compute the size of each axis name from array shapes, or return `None` if they do not determine all sizes.

    Example:
        >>> here, there = parse_axes("(heads size) width -> width heads size")
        >>> solve_sizes([(here, (32, 16)), (there, (16, 4, 8))])
        {'width': 16, 'heads': 4, 'size': 8}
        >>> solve_sizes([(here, (32, 16))])
    """
    if any(len(side) != len(shape) for side, shape in sides):
        return None
    axes = [(axis, size) for side, shape in sides for axis, size in zip(side, shape, strict=True)]
    sizes: dict[str, int] = {}
    for _ in range(len(axes)):
        for axis, size in axes:
            unknown = [atom for atom in axis if isinstance(atom, str) and atom not in sizes]
            known = math.prod(get_atom_size(atom, sizes) for atom in axis if atom not in unknown)
            if len(unknown) == 1 and known and size % known == 0:
                sizes[unknown[0]] = size // known
    complete = {atom for axis, _ in axes for atom in axis if isinstance(atom, str)} == {*sizes}
    return sizes if complete and all(_compute_axis_size(axis, sizes) == size for axis, size in axes) else None


def compute_shape(side: Side, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an array from the sizes of its axis names."""
    return tuple(_compute_axis_size(axis, sizes) for axis in side)


def get_atom_size(atom: Atom, sizes: Mapping[str, int]) -> int:
    """Return the size of an axis name, or the number of parts of an `AxisPart`."""
    return atom.count if isinstance(atom, AxisPart) else sizes[atom]


def fill_block(
    result: NumpyArray,
    index: Index,
    here: Side,
    there: Side,
    sizes: Mapping[str, int],
    read: Callable[[Index], NumpyArray],
) -> int:
    """Fill a block of an array from another array, and permute, split, or merge the axes.

    Args:
        result: The block.
        index: Where it is in its array.
        here: The axes of its array.
        there: The axes of the other array.
        sizes: The size of each name.
        read: Returns a block of the other array. It is asked for just what is needed, in pieces.

    Returns:
        Number of filled elements: those of the part of the array that the other one has.
    """
    order = [atom for axis in there for atom in axis if isinstance(atom, str)]
    inside = [atom for axis in here for atom in axis]
    names = [atom for atom in inside if isinstance(atom, str)]
    filled = 0
    for step in split_shard(
        index, choose_chunk_shape(compute_block_shape(index), result.itemsize, _STEP_BYTES)
    ):
        for place, box in _split_block(step, here, sizes):
            at = [
                slice(None) if isinstance(atom, str) else atom.number - start
                for atom, (start, _) in zip(inside, box, strict=True)
            ]
            spans = {atom: span for atom, span in zip(inside, box, strict=True) if isinstance(atom, str)}
            # Give each axis name an axis of its own. Splitting axes is a view in numpy, so nothing is copied.
            view = result[(*make_relative_index(place, index), ...)].reshape(
                [b - a for a, b in box], copy=False
            )[(*at, ...)]
            for block, found in _list_blocks(there, spans, sizes):
                values = read(block).reshape([found[name][1] - found[name][0] for name in order])
                target = (slice(found[n][0] - spans[n][0], found[n][1] - spans[n][0]) for n in names)
                view[(*target, ...)] = values.transpose([order.index(name) for name in names])
                filled += values.size
    return filled


@dataclass(frozen=True)
class AxisConversion:
    """Compute an array from source arrays by permuting, splitting, and joining axes.

    Args:
        shape: Shape of the array.
        parts: For each source the axes of the array, those of the source, and the size of each name.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[Side, Side, Mapping[str, int]], ...]

    def list_blocks(self, index: Index) -> list[list[Index]]:
        """Return, for each source, the blocks needed for a block of the result."""
        return [list(self._iterate_blocks(index, *part)) for part in self.parts]

    def fill(self, index: Index, sources: Sequence[Callable[[Index], NumpyArray]], dtype: Any) -> NumpyArray:
        """Compute a block of the result from the sources."""
        result = np.empty(compute_block_shape(index), dtype)
        for part, read in zip(self.parts, sources, strict=True):
            fill_block(result, index, *part, read)
        return result

    def compute(self, namespace: Any, sources: Sequence[Any]) -> Any:
        """Compute the result as an array of a numpy-like namespace, which may be traced."""
        here, _, sizes = self.parts[0]
        places = [
            n for n, atom in enumerate(atom for axis in here for atom in axis) if isinstance(atom, AxisPart)
        ]
        made = [
            _permute_source(namespace, *part, each) for part, each in zip(self.parts, sources, strict=True)
        ]
        if not places:
            return made[0].reshape(compute_shape(here, sizes))
        numbers = [
            next(a.number for axis in part[0] for a in axis if isinstance(a, AxisPart)) for part in self.parts
        ]
        joined = namespace.stack([made[numbers.index(n)] for n in range(len(made))], places[0])
        return joined.reshape(compute_shape(here, sizes))

    @staticmethod
    def _iterate_blocks(index: Index, here: Side, there: Side, sizes: Mapping[str, int]) -> Iterator[Index]:
        atoms = [atom for axis in here for atom in axis]
        for _, box in _split_block(index, here, sizes):
            spans = {atom: span for atom, span in zip(atoms, box, strict=True) if isinstance(atom, str)}
            yield from (block for block, _ in _list_blocks(there, spans, sizes))


def _permute_source(namespace: Any, here: Side, there: Side, sizes: Mapping[str, int], source: Any) -> Any:
    """Reshape and transpose a source so that it has one axis per name, in the order of the result."""
    atoms = [atom for axis in there for atom in axis]
    split = source.reshape([get_atom_size(atom, sizes) for atom in atoms])
    taken = split[tuple(slice(None) if isinstance(atom, str) else atom.number for atom in atoms)]
    names = [atom for atom in atoms if isinstance(atom, str)]
    order = [atom for axis in here for atom in axis if isinstance(atom, str)]
    return namespace.moveaxis(taken, list(range(len(names))), [order.index(name) for name in names])


def _split_block(index: Index, side: Side, sizes: Mapping[str, int]) -> Iterator[tuple[Index, list[Span]]]:
    """Split a block into boxes that are contiguous in every axis name, and yield the index and spans of each."""
    dims = [[get_atom_size(atom, sizes) for atom in axis] for axis in side]
    ranges = [list(_split_range(part.start, part.stop, each)) for part, each in zip(index, dims, strict=True)]
    for chosen in itertools.product(*ranges):
        spans = [span for axis in chosen for span in axis]
        atoms = [atom for axis in side for atom in axis]
        if all(
            isinstance(atom, str) or start <= atom.number < stop
            for atom, (start, stop) in zip(atoms, spans, strict=True)
        ):
            starts = [
                _flatten_position([a for a, _ in axis], each) for axis, each in zip(chosen, dims, strict=True)
            ]
            lengths = [math.prod(b - a for a, b in axis) for axis in chosen]
            yield tuple(slice(a, a + n) for a, n in zip(starts, lengths, strict=True)), spans


def _split_range(start: int, stop: int, dims: Sequence[int]) -> Iterator[list[Span]]:
    """Split a range of a merged axis into boxes, with one range for each merged name."""
    if start >= stop:
        return
    if not dims:
        yield []
        return
    inner = math.prod(dims[1:])
    first, last = start // inner, (stop - 1) // inner
    if start % inner == 0 and stop % inner == 0:
        yield [(start // inner, stop // inner), *((0, dim) for dim in dims[1:])]
    elif first == last:
        for rest in _split_range(start - first * inner, stop - first * inner, dims[1:]):
            yield [(first, first + 1), *rest]
    else:
        ends = -(-start // inner) * inner, stop // inner * inner
        for begin, end in ((start, ends[0]), ends, (ends[1], stop)):
            yield from _split_range(begin, end, dims)


def _list_blocks(
    side: Side, spans: Mapping[str, Span], sizes: Mapping[str, int]
) -> Iterator[tuple[Index, dict[str, Span]]]:
    """List the blocks of an array that cover a box of axis names, with the span of each name."""
    axes = [list(_list_ranges(axis, spans, sizes)) for axis in side]
    for chosen in itertools.product(*axes):
        found = {name: span for _, own in chosen for name, span in own.items()}
        yield tuple(part for part, _ in chosen), found


def _list_ranges(
    axis: Sequence[Atom], spans: Mapping[str, Span], sizes: Mapping[str, int]
) -> Iterator[tuple[slice, dict[str, Span]]]:
    """List the contiguous ranges of one axis that cover a box, with the span of each name."""
    dims = [get_atom_size(atom, sizes) for atom in axis]
    wanted = [(a.number, a.number + 1) if isinstance(a, AxisPart) else spans[a] for a in axis]
    split = len(axis) - 1  # axes after `split` are read in full; axes before it need one range per position
    while split > 0 and wanted[split] == (0, dims[split]):
        split -= 1
    for place in itertools.product(*(range(*span) for span in wanted[:split])):
        own = [(i, i + 1) for i in place] + wanted[split:]
        start = _flatten_position([a for a, _ in own], dims)
        length = math.prod(b - a for a, b in own)
        named = {a: span for a, span in zip(axis, own, strict=True) if isinstance(a, str)}
        yield slice(start, start + length), named


def _flatten_position(place: Sequence[int], dims: Sequence[int]) -> int:
    """Convert positions on the axes of a merged axis to the position on that axis."""
    start = 0
    for each, dim in zip(place, dims, strict=True):
        start = start * dim + each
    return start


def _compute_axis_size(axis: Sequence[Atom], sizes: Mapping[str, int]) -> int:
    return math.prod(get_atom_size(atom, sizes) for atom in axis)


def _parse_side(text: str) -> Side:
    """Parse the axes on one side of an expression."""
    found: list[tuple[Atom, ...]] = []
    group: list[Atom] | None = None
    for token in _TOKEN.findall(text):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            found.append(tuple(group))
            group = None
        elif token[0].isalnum() or token[0] == "_":
            atom = token
            if "/" in token:
                number, count = map(int, token.split("/"))
                if number >= count:
                    raise ValueError(f"{token!r} is not a valid part: use 0/{count} to {count - 1}/{count}")
                atom = AxisPart(number, count)
            if group is None:
                found.append((atom,))
            else:
                group.append(atom)
        else:
            raise ValueError(f"{token!r} is not expected in {text.strip()!r}")
    if group is not None:
        raise ValueError(f"a parenthesis is not closed in {text.strip()!r}")
    return tuple(found)
