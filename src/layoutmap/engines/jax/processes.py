"""Share seeds and compare values between JAX processes.

Only processes that have a device of the mesh take part.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from layoutmap.core.blocks import NumpyArray
from layoutmap.core.errors import EngineError
from layoutmap.core.initializers import Initializer
from layoutmap.engines.checks import make_unequal_initial_values_error
from layoutmap.engines.jax.devices import Device


def gather_from_processes(values: NumpyArray, devices: Sequence[Device]) -> NumpyArray:
    """Return the values of each process that has one of the devices, one row each, in process order.

    Args:
        values: The values of this process, with the same shape and element type in all processes.
        devices: The devices, in the same order in all processes.

    Raises:
        EngineError: Another process cannot be reached.
    """
    sharding = _make_process_sharding(tuple(devices))
    num_processes = sharding.mesh.size
    if num_processes == 1:
        return values[None]
    try:
        # JAX disables 64-bit types by default, so send bytes.
        row = np.ascontiguousarray(values).view(np.uint8).reshape(1, -1)
        rows = jax.make_array_from_callback((num_processes, row.size), sharding, lambda _: row)
        replicated = jax.device_put(rows, NamedSharding(sharding.mesh, PartitionSpec()))
        received = np.asarray(replicated.addressable_data(0))
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # ValueError if JAX cannot start the transfer
        raise _make_unreachable_error(error) from error
    return received.view(values.dtype).reshape(-1, *values.shape)


def _make_unreachable_error(error: Exception) -> EngineError:
    """Return the error for processes that could not exchange a few bytes."""
    lines = str(error).strip().splitlines()
    return EngineError(
        "another process of this job cannot be reached",
        facts={"jax": lines[0] if lines else type(error).__name__},
        why="that process ended, failed, or does not answer, and computing on the mesh needs all processes",
        fix="read the last output of the other processes, and restart all processes",
    )


@functools.lru_cache(256)
def _make_process_sharding(devices: tuple[Device, ...]) -> NamedSharding:
    """Return the sharding of an array with one row per process, each on the first device of its process."""
    first = {device.process_index: device for device in reversed(devices)}
    column = np.empty(len(first), object)
    column[:] = [first[process] for process in sorted(first)]
    return NamedSharding(jax.sharding.Mesh(column, ("process",)), PartitionSpec("process"))


def broadcast_seeds(initializers: Mapping[str, Initializer], devices: Sequence[Device]) -> dict[str, object]:
    """Return the seed of each initializer that has a program, by key. All processes get the seeds of process 0.

    Args:
        initializers: The initializers by key, in the same order in all processes.
        devices: The devices of the mesh, or none if all of them belong to this process.

    Raises:
        EngineError: The processes have different initializers.
    """
    seeds = {key: each.program.seed for key, each in initializers.items() if each.program is not None}
    if not devices:
        return seeds
    leaves, tree = jax.tree.flatten(seeds)
    keys = [_is_random_key(leaf) for leaf in leaves]
    plain = [
        np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        for leaf, is_key in zip(leaves, keys, strict=True)
    ]
    text = repr((list(initializers), [(leaf.shape, str(leaf.dtype)) for leaf in plain]))
    # Gather two numbers, as `agreement` does. If another process makes a different comparison now, both then
    # detect the difference.
    if (
        len(set(gather_from_processes(np.array([zlib.crc32(text.encode()), 0], np.uint32), devices)[:, 0]))
        > 1
    ):
        raise make_unequal_initial_values_error("the processes create different variables")
    sent = np.concatenate(
        [np.frombuffer(leaf.tobytes(), np.uint8) for leaf in plain] or [np.empty(0, np.uint8)]
    )
    data = gather_from_processes(sent, devices)[0].tobytes() if sent.size else b""
    start, common = 0, list[object]()
    for leaf, own, is_key in zip(leaves, plain, keys, strict=True):
        value: Any = np.frombuffer(data[start : start + own.nbytes], own.dtype).reshape(own.shape)
        start += own.nbytes
        common.append(jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)) if is_key else value)
    return jax.tree.unflatten(tree, common)


def _is_random_key(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
