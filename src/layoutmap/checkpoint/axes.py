"""Permute, split, and merge the axes of arrays by expressions such as `(heads size) width -> width heads size`.

Each side names the axes of an array in their order. Several names in parentheses are one axis, the first of them the
slowest. `1/3` selects the second of three equal parts, since they are counted from 0. An expression moves values and
never computes any, so it is exact in both directions, and each block of one array maps to blocks of the other.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layoutmap.checkpoint.chunks import choose_chunk_shape, split_shard_into_chunks
from layoutmap.core.blocks import Index, NumpyArray, compute_block_shape, make_relative_index

_TOKEN = re.compile(r"\s*([()]|\d+/\d+|[A-Za-z_]\w*|\S)")
_STEP_BYTES = 1 << 24  # maximum bytes to read at once, so that a read needs little memory besides the result

AxisRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AxisPart:
    """A part of an axis: part `index`, counted from 0, of `count` equal parts."""

    index: int
    count: int


AxisAtom = str | AxisPart
ArrayAxes = tuple[tuple[AxisAtom, ...], ...]
"""The axes of an array. Each axis merges one or several atoms (axis names or parts), the slowest first."""


def parse_axes_expression(text: str) -> tuple[ArrayAxes, ArrayAxes]:
    """Parse an expression such as `(heads size) width -> width heads size`, and return the axes of its two sides.

    Raises:
        ValueError: The expression is invalid; the message says why.

    Example:
        >>> parse_axes_expression("(heads size) width -> width heads size")
        ((('heads', 'size'), ('width',)), (('width',), ('heads',), ('size',)))
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"axes {text!r} lacks the arrow between its two sides, as in 'out in -> in out'")
    return _parse_array_axes(left), _parse_array_axes(right)


def check_same_axis_names(left: ArrayAxes, right: ArrayAxes) -> None:
    """Raise unless both sides of an expression have the same axis names, each exactly once.

    Raises:
        ValueError: A name appears twice on one side, or only on one side. The message names it.
    """
    names = [[atom for axis in side for atom in axis if isinstance(atom, str)] for side in (left, right)]
    for found in names:
        if again := next((name for name in found if found.count(name) > 1), None):
            raise ValueError(f"the axis name {again!r} appears twice on one side of the arrow")
    if one := next(iter({*names[0]} ^ {*names[1]}), None):
        raise ValueError(f"the axis name {one!r} is on only one side of the arrow")


def solve_axis_sizes(axes_and_shapes: Sequence[tuple[ArrayAxes, Sequence[int]]]) -> dict[str, int] | None:
    """Return the size of each axis name, or `None` if the shapes contradict each other or leave a size undetermined.

    Example:
        >>> here, there = parse_axes_expression("(heads size) width -> width heads size")
        >>> solve_axis_sizes([(here, (32, 16)), (there, (16, 4, 8))])
        {'width': 16, 'heads': 4, 'size': 8}
        >>> solve_axis_sizes([(here, (32, 16))])
    """
    if any(len(side) != len(shape) for side, shape in axes_and_shapes):
        return None
    axes = [(axis, size) for side, shape in axes_and_shapes for axis, size in zip(side, shape, strict=True)]
    sizes: dict[str, int] = {}
    for _ in range(len(axes)):
        for axis, size in axes:
            unknown = [atom for atom in axis if isinstance(atom, str) and atom not in sizes]
            known = math.prod(get_axis_atom_size(atom, sizes) for atom in axis if atom not in unknown)
            if len(unknown) == 1 and known and size % known == 0:
                sizes[unknown[0]] = size // known
    complete = {atom for axis, _ in axes for atom in axis if isinstance(atom, str)} == {*sizes}
    return sizes if complete and all(_compute_axis_size(axis, sizes) == size for axis, size in axes) else None


def compute_array_shape(axes: ArrayAxes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Compute the shape of an array with these axes from the sizes of the axis names."""
    return tuple(_compute_axis_size(axis, sizes) for axis in axes)


def get_axis_atom_size(atom: AxisAtom, sizes: Mapping[str, int]) -> int:
    """Return the size of an item of an axes expression: of a named axis, or the `count` of an `AxisPart`."""
    return atom.count if isinstance(atom, AxisPart) else sizes[atom]


def fill_block_from_source(
    result: NumpyArray,
    index: Index,
    target_axes: ArrayAxes,
    source_axes: ArrayAxes,
    sizes: Mapping[str, int],
    read_source: Callable[[Index], NumpyArray],
) -> int:
    """Fill a block of a target array from a source array with permuted, split, or merged axes.

    Args:
        result: The memory of the block.
        index: The position of the block in the target array.
        target_axes: The axes of the target array.
        source_axes: The axes of the source array.
        sizes: The size of each axis name.
        read_source: Returns a block of the source array. It is called once for each contiguous block that is needed.

    Returns:
        Number of filled elements. It is smaller than the block if the source contains only a part of the target.
    """
    order = [atom for axis in source_axes for atom in axis if isinstance(atom, str)]
    atoms = [atom for axis in target_axes for atom in axis]
    names = [atom for atom in atoms if isinstance(atom, str)]
    filled = 0
    for step in split_shard_into_chunks(
        index, choose_chunk_shape(compute_block_shape(index), result.itemsize, _STEP_BYTES)
    ):
        for box_index, box in _iterate_boxes_in_block(step, target_axes, sizes):
            at = [
                slice(None) if isinstance(atom, str) else atom.index - start
                for atom, (start, _) in zip(atoms, box, strict=True)
            ]
            spans = {atom: span for atom, span in zip(atoms, box, strict=True) if isinstance(atom, str)}
            # Reshape so that each axis name has its own axis. Splitting axes gives a view, so writes reach `result`.
            view = result[(*make_relative_index(box_index, index), ...)].reshape(
                [b - a for a, b in box], copy=False
            )[(*at, ...)]
            for block, found in _iterate_blocks_covering_ranges(source_axes, spans, sizes):
                values = read_source(block).reshape([found[name][1] - found[name][0] for name in order])
                target = (slice(found[n][0] - spans[n][0], found[n][1] - spans[n][0]) for n in names)
                view[(*target, ...)] = values.transpose([order.index(name) for name in names])
                filled += values.size
    return filled


@dataclass(frozen=True)
class AxisConversion:
    """Compute an array from source arrays by permuting, splitting, and joining axes.

    Args:
        shape: Shape of the array.
        parts: For each source, the axes of the array, the axes of the source, and the size of each axis name.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[ArrayAxes, ArrayAxes, Mapping[str, int]], ...]

    def list_source_blocks(self, index: Index) -> list[list[Index]]:
        """Return for each source a list of its blocks that contain the values of the result's block at `index`."""
        return [list(self._iterate_source_blocks(index, *part)) for part in self.parts]

    def compute_block(
        self, index: Index, sources: Sequence[Callable[[Index], NumpyArray]], dtype: Any
    ) -> NumpyArray:
        """Compute a block of the result from the sources."""
        result = np.empty(compute_block_shape(index), dtype)
        for part, read_source in zip(self.parts, sources, strict=True):
            fill_block_from_source(result, index, *part, read_source)
        return result

    def compute_array(self, namespace: Any, sources: Sequence[Any]) -> Any:
        """Compute the result with a module like numpy, such as `jax.numpy`. The sources may be traced arrays."""
        axes, _, sizes = self.parts[0]
        positions = [
            n for n, atom in enumerate(atom for axis in axes for atom in axis) if isinstance(atom, AxisPart)
        ]
        arrays = [
            _split_and_permute_axes(namespace, *part, each)
            for part, each in zip(self.parts, sources, strict=True)
        ]
        if not positions:
            return arrays[0].reshape(compute_array_shape(axes, sizes))
        numbers = [
            next(a.index for axis in part[0] for a in axis if isinstance(a, AxisPart)) for part in self.parts
        ]
        joined = namespace.stack([arrays[numbers.index(n)] for n in range(len(arrays))], positions[0])
        return joined.reshape(compute_array_shape(axes, sizes))

    @staticmethod
    def _iterate_source_blocks(
        index: Index, target_axes: ArrayAxes, source_axes: ArrayAxes, sizes: Mapping[str, int]
    ) -> Iterator[Index]:
        atoms = [atom for axis in target_axes for atom in axis]
        for _, box in _iterate_boxes_in_block(index, target_axes, sizes):
            spans = {atom: span for atom, span in zip(atoms, box, strict=True) if isinstance(atom, str)}
            yield from (block for block, _ in _iterate_blocks_covering_ranges(source_axes, spans, sizes))


def _split_and_permute_axes(
    namespace: Any, target_axes: ArrayAxes, source_axes: ArrayAxes, sizes: Mapping[str, int], source: Any
) -> Any:
    """Return a source array with one axis for each axis name, in the order of the target's names."""
    atoms = [atom for axis in source_axes for atom in axis]
    split = source.reshape([get_axis_atom_size(atom, sizes) for atom in atoms])
    taken = split[tuple(slice(None) if isinstance(atom, str) else atom.index for atom in atoms)]
    names = [atom for atom in atoms if isinstance(atom, str)]
    order = [atom for axis in target_axes for atom in axis if isinstance(atom, str)]
    return namespace.moveaxis(taken, list(range(len(names))), [order.index(name) for name in names])


def _iterate_boxes_in_block(
    index: Index, axes: ArrayAxes, sizes: Mapping[str, int]
) -> Iterator[tuple[Index, list[AxisRange]]]:
    """Split a block into boxes that are one range on every named axis. Yield a box's index and its ranges."""
    dims = [[get_axis_atom_size(atom, sizes) for atom in axis] for axis in axes]
    ranges = [
        list(_split_range_of_merged_axis(part.start, part.stop, each))
        for part, each in zip(index, dims, strict=True)
    ]
    for chosen in itertools.product(*ranges):
        spans = [span for axis in chosen for span in axis]
        atoms = [atom for axis in axes for atom in axis]
        if all(
            isinstance(atom, str) or start <= atom.index < stop
            for atom, (start, stop) in zip(atoms, spans, strict=True)
        ):
            starts = [
                _flatten_position([a for a, _ in axis], each) for axis, each in zip(chosen, dims, strict=True)
            ]
            lengths = [math.prod(b - a for a, b in axis) for axis in chosen]
            yield tuple(slice(a, a + n) for a, n in zip(starts, lengths, strict=True)), spans


def _split_range_of_merged_axis(start: int, stop: int, dims: Sequence[int]) -> Iterator[list[AxisRange]]:
    """Split a range of an axis that merges axes of sizes `dims`. Yield boxes, each as a range on every merged axis."""
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
        for rest in _split_range_of_merged_axis(start - first * inner, stop - first * inner, dims[1:]):
            yield [(first, first + 1), *rest]
    else:
        ends = -(-start // inner) * inner, stop // inner * inner
        for begin, end in ((start, ends[0]), ends, (ends[1], stop)):
            yield from _split_range_of_merged_axis(begin, end, dims)


def _iterate_blocks_covering_ranges(
    array_axes: ArrayAxes, spans: Mapping[str, AxisRange], sizes: Mapping[str, int]
) -> Iterator[tuple[Index, dict[str, AxisRange]]]:
    """Yield blocks of an array that together cover the ranges `spans`, each with its range on every named axis."""
    axes = [list(_iterate_axis_ranges_covering_ranges(axis, spans, sizes)) for axis in array_axes]
    for chosen in itertools.product(*axes):
        found = {name: span for _, own in chosen for name, span in own.items()}
        yield tuple(part for part, _ in chosen), found


def _iterate_axis_ranges_covering_ranges(
    axis: Sequence[AxisAtom], spans: Mapping[str, AxisRange], sizes: Mapping[str, int]
) -> Iterator[tuple[slice, dict[str, AxisRange]]]:
    """Yield ranges of one axis that together cover the ranges `spans`, each with its range on every named axis."""
    dims = [get_axis_atom_size(atom, sizes) for atom in axis]
    wanted = [(a.index, a.index + 1) if isinstance(a, AxisPart) else spans[a] for a in axis]
    split = len(axis) - 1  # axes after `split` are read in full; axes before it need one range per position
    while split > 0 and wanted[split] == (0, dims[split]):
        split -= 1
    for leading in itertools.product(*(range(*span) for span in wanted[:split])):
        own = [(i, i + 1) for i in leading] + wanted[split:]
        start = _flatten_position([a for a, _ in own], dims)
        length = math.prod(b - a for a, b in own)
        named = {a: span for a, span in zip(axis, own, strict=True) if isinstance(a, str)}
        yield slice(start, start + length), named


def _flatten_position(positions: Sequence[int], sizes: Sequence[int]) -> int:
    """Convert positions on the axes that a merged axis consists of to the position on the merged axis."""
    start = 0
    for each, dim in zip(positions, sizes, strict=True):
        start = start * dim + each
    return start


def _compute_axis_size(axis: Sequence[AxisAtom], sizes: Mapping[str, int]) -> int:
    return math.prod(get_axis_atom_size(atom, sizes) for atom in axis)


def _parse_array_axes(text: str) -> ArrayAxes:
    """Parse one side of an axes expression, and return the axes of the array that it describes."""
    found: list[tuple[AxisAtom, ...]] = []
    group: list[AxisAtom] | None = None
    for token in _TOKEN.findall(text):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            found.append(tuple(group))
            group = None
        elif token[0].isalnum() or token[0] == "_":
            atom = token
            if "/" in token:
                index, count = map(int, token.split("/"))
                if index >= count:
                    raise ValueError(
                        f"there is no part {token!r} of an axis: use 0/{count} to {count - 1}/{count}"
                    )
                atom = AxisPart(index, count)
            if group is None:
                found.append((atom,))
            else:
                group.append(atom)
        else:
            raise ValueError(
                f"{token!r} cannot be parsed in {text.strip()!r}: axes are names, names in parentheses, or parts as 1/3"
            )
    if group is not None:
        raise ValueError(f"a parenthesis is not closed in {text.strip()!r}")
    return tuple(found)
