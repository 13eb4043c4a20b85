"""Copy arrays between CPU devices of one process, which share its memory (decisions/0240)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from layoutmap.core.blocks import (
    Ends,
    Index,
    NumpyArray,
    compute_block_shape,
    get_slice_ends,
    intersect_blocks,
    make_full_index,
    make_relative_index,
    normalize_index,
)
from layoutmap.engines.jax.arrays import wait_on_cpu
from layoutmap.engines.jax.devices import Device

_ALIGNMENT = 64
"""JAX copies a numpy array to a CPU device unless its memory begins at a multiple of this many bytes."""


def can_copy_between(devices: Iterable[Device]) -> bool:
    """Return whether all devices are CPU devices of this process."""
    own = jax.process_index()
    return all(device.platform == "cpu" and device.process_index == own for device in devices)


class ShardCopies:
    """Copies of arrays in new memory, with other shardings and dtypes.

    Devices with the same block of a result share its memory. A program to which it is donated copies it.
    """

    def __init__(self, targets: Sequence[tuple[Sharding, np.dtype[Any]]]):
        self._targets = targets

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return copies of the arrays. Equal blocks of an array are copied once."""
        copies: list[tuple[NumpyArray, NumpyArray]] = []
        blocks: list[list[NumpyArray]] = []
        for array, (sharding, dtype) in zip(arrays, self._targets, strict=True):
            shape, made = array.shape, dict[Ends, NumpyArray]()
            held = {
                get_slice_ends(normalize_index(shard.index, shape)): shard.data
                for shard in wait_on_cpu(array).addressable_shards
            }
            sources = [(_make_index(ends), np.asarray(data)) for ends, data in held.items()]
            wanted = [
                get_slice_ends(normalize_index(index or make_full_index(shape), shape))
                for index in sharding.addressable_devices_indices_map(shape).values()
            ]
            for ends in dict.fromkeys(wanted):
                index = _make_index(ends)
                block = made[ends] = _make_aligned(compute_block_shape(index), dtype)
                for place, values in sources:
                    if (both := intersect_blocks(place, index)) is not None:
                        inside = values[make_relative_index(both, place)]
                        copies.append((block[*make_relative_index(both, index), ...], inside))
            blocks.append([made[ends] for ends in wanted])
        _copy_in_threads(copies)
        return [
            _from_blocks(array.shape, *target, parts)
            for array, target, parts in zip(arrays, self._targets, blocks, strict=True)
        ]


def _copy_in_threads(copies: Sequence[tuple[NumpyArray, NumpyArray]]) -> None:
    """Copy values into parts of new arrays, a share of them in each of a few threads."""
    shares = [copies[n :: os.cpu_count() or 1] for n in range(os.cpu_count() or 1)]

    def copy(share: Sequence[tuple[NumpyArray, NumpyArray]]) -> None:
        for part, values in share:
            np.copyto(part, values, casting="unsafe")

    with ThreadPoolExecutor(len(shares)) as threads:
        others = threads.map(copy, shares[1:])
        copy(shares[0])
        list(others)


def _make_index(ends: Ends) -> Index:
    return tuple(slice(*pair) for pair in ends)


def _from_blocks(
    shape: tuple[int, ...], sharding: Sharding, dtype: np.dtype[Any], blocks: Sequence[NumpyArray]
) -> jax.Array:
    devices = sharding.addressable_devices_indices_map(shape)
    shards = jax.device_put(list(blocks), [SingleDeviceSharding(device) for device in devices])
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)


def _make_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NumpyArray:
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)
