"""Compare the values of a trainer and a sampler by exchanging only checksums of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from layoutmap.adapters.protocol import StoredVariable
from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.core.blocks import (
    Ends,
    Index,
    NumpyArray,
    compute_block_shape,
    get_starts_and_stops,
    intersect_blocks,
    make_relative_index,
)
from layoutmap.core.checksums import compute_position_checksum
from layoutmap.core.pieces import ArrayConversion
from layoutmap.engines.protocol import Array
from layoutmap.saving.sync_plan import SyncEndpoint, SyncRow

BlockChecksums = dict[Ends, int]
"""The checksum of each distinct block on the sampler's devices."""


def find_variables_with_wrong_values(
    trainer: SyncEndpoint,
    sampler: SyncEndpoint,
    rows: Sequence[SyncRow],
    trainer_arrays: Sequence[Array],
    new_arrays: Sequence[Array],
    sum_over_processes: Callable[[NumpyArray], NumpyArray],
) -> list[str]:
    """Return the paths of the variables with values on this process's devices that differ from the trainer's values.

    Args:
        trainer: The end that provides the values.
        sampler: The end that gets them.
        rows: The variables to compare.
        trainer_arrays: All arrays of the trainer.
        new_arrays: The new arrays of the sampler, one for each row.
        sum_over_processes: Returns the sums of numbers over all processes. All of them call it once.
    """
    targets = {each.variable.path: each for each in sampler.stored}
    numbers = {each.variable.path: n for n, each in enumerate(trainer.stored)}
    device_blocks = [sampler.find_device_blocks(targets[row.variable.path]) for row in rows]
    expected: list[BlockChecksums] = []
    for row, blocks in zip(rows, device_blocks, strict=True):
        sums = dict.fromkeys(map(get_starts_and_stops, blocks.values()), 0)
        sources = [(trainer.stored[numbers[path]], trainer_arrays[numbers[path]]) for path in row.sources]
        positions: dict[str, NumpyArray] = {}
        if row.conversion is not None:
            positions = _find_element_positions_in_result(row.conversion, [source for source, _ in sources])
        for source, array in sources:
            _add_source_checksums(sums, trainer, source, array, row, positions.get(source.variable.path))
        expected.append(sums)
    flat = np.array([value for sums in expected for value in sums.values()], np.uint64)
    totals = iter(sum_over_processes(flat).tolist())
    expected = [{ends: next(totals) for ends in sums} for sums in expected]
    wrong: list[str] = []
    for row, blocks, sums, array in zip(rows, device_blocks, expected, new_arrays, strict=True):
        shape = row.variable.shape
        for device, values in sampler.engine.iterate_device_values(array):
            index = blocks[device]
            begins = [part.start for part in index]
            if compute_position_checksum(values, shape, begins) != sums[get_starts_and_stops(index)]:
                wrong.append(row.variable.path)
                break
    return wrong


def _find_element_positions_in_result(
    conversion: ArrayConversion, sources: Sequence[StoredVariable]
) -> dict[str, NumpyArray]:
    """Return a dict from source path to the position of each element in the converted result (-1: unused)."""
    sizes = [math.prod(source.variable.shape) for source in sources]
    begins = np.cumsum([0, *sizes])
    labels: list[NumpyArray] = []
    for begin, size, source in zip(begins, sizes, sources, strict=False):
        numbers = np.arange(begin, begin + size, dtype=np.int64)
        labels.append(numbers.reshape(source.variable.shape))
    made = conversion.compute_array(np, labels).reshape(-1)
    positions = np.full(begins[-1], -1, np.int64)
    positions[made] = np.arange(made.size)
    return {
        source.variable.path: positions[begin : begin + size].reshape(source.variable.shape)
        for begin, size, source in zip(begins, sizes, sources, strict=False)
    }


def _add_source_checksums(
    sums: BlockChecksums,
    trainer: SyncEndpoint,
    source: StoredVariable,
    array: Array,
    row: SyncRow,
    positions: NumpyArray | None,
) -> None:
    """Add to each block's checksum in `sums` the values of one source in this process. Skip replicas of a shard."""
    dtype, shape = get_numpy_dtype(row.variable.dtype, row.variable.path), row.variable.shape
    device_blocks = trainer.find_device_blocks(source)
    first: dict[Ends, str] = {}
    for device, index in device_blocks.items():
        first.setdefault(get_starts_and_stops(index), device)
    for device, values in trainer.engine.iterate_device_values(array):
        index = device_blocks[device]
        if first[get_starts_and_stops(index)] != device:
            continue
        values = values.astype(dtype, copy=False)
        for ends in sums:
            block = tuple(slice(*pair) for pair in ends)
            if positions is None:
                both = intersect_blocks(index, block)
                if both is not None:
                    part, begins = values[make_relative_index(both, index)], [each.start for each in both]
                    sums[ends] = (sums[ends] + compute_position_checksum(part, shape, begins)) % 2**64
            else:
                where = positions[index]
                chosen = _make_block_mask(where, shape, block)
                part = compute_position_checksum(values[chosen], shape, (0,), where[chosen])
                sums[ends] = (sums[ends] + part) % 2**64


def _make_block_mask(positions: NumpyArray, shape: Sequence[int], block: Index) -> NumpyArray:
    """Return a mask of the flat positions that are inside a block of an array."""
    if not compute_block_shape(block):
        return positions >= 0
    coordinates = np.unravel_index(np.maximum(positions, 0), tuple(shape))
    is_inside = [(p.start <= each) & (each < p.stop) for p, each in zip(block, coordinates, strict=True)]
    return np.logical_and.reduce(is_inside) & (positions >= 0)
