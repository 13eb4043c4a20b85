"""Run collectives, products, and copies on JAX devices, to measure their speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.cost.table import CollectiveKind
from layoutmap.engines.jax.devices import make_named_sharding

_OPERATIONS: Mapping[str, Callable[[Any, str], jax.Array]] = {
    "all_gather": lambda x, dim: lax.all_gather(x, dim, tiled=True),
    "reduce_scatter": lambda x, dim: lax.psum_scatter(x, dim, tiled=True),
    "all_reduce": lax.psum,
    "all_to_all": lambda x, dim: lax.all_to_all(x, dim, 0, 0, tiled=True),
}


def make_collective_function(
    kind: CollectiveKind, mesh: Mesh, dim: str, num_bytes: int
) -> Callable[[], object]:
    """Return a function without arguments that runs a collective of float32 values over a mesh dim."""
    size = mesh.dim_size(dim)
    # Number of elements on each device.
    length = num_bytes // 4 // size**2 * (size if kind == "all_gather" else size**2)
    sharding = make_named_sharding(Layout([mesh.dim_names], mesh))
    operation = jax.shard_map(
        lambda x: _OPERATIONS[kind](x, dim),
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=sharding.spec,
        check_vma=False,
    )
    values = jax.jit(lambda: jnp.ones(length * mesh.size), out_shardings=sharding)()
    return partial(jax.jit(operation), values)


def make_matmul_function(dtype: str, size: int) -> Callable[[], object]:
    """Return a function that multiplies two square matrices on one device."""
    return partial(jax.jit(jnp.matmul), *[jnp.ones((size, size), dtype)] * 2)


def make_memory_copy_function(num_bytes: int) -> Callable[[], object]:
    """Return a function that reads and writes `num_bytes` on one device."""
    return partial(jax.jit(jnp.negative), jnp.ones(num_bytes // 4))


def get_device_memory_bytes() -> int | None:
    """Return the bytes that JAX may use on a device, or None if the device uses the host's memory."""
    return _get_memory_stats().get("bytes_limit")


def make_peak_bytes_function() -> Callable[[], int | None]:
    """Return a function that returns the most bytes in use since this call.

    It returns `None` if devices report no memory, as CPUs do, or if an earlier peak was higher, since JAX cannot reset
    the peak.
    """
    earlier = _get_memory_stats().get("peak_bytes_in_use", 0)

    def read_peak_bytes() -> int | None:
        peak = _get_memory_stats().get("peak_bytes_in_use", 0)
        return peak if peak > earlier else None

    return read_peak_bytes


def _get_memory_stats() -> Mapping[str, int]:
    return jax.local_devices()[0].memory_stats() or {}


def make_device_facts() -> dict[str, str]:
    """Return a dict of facts about the devices for a report: their kind and, for TPUs, coordinates and slices."""
    devices = jax.devices()
    facts = {"kind": ", ".join(sorted({device.device_kind for device in devices}))}
    slices = {getattr(device, "slice_index", None) for device in devices} - {None}
    coords = [device.coords for device in devices if getattr(device, "coords", None) is not None]
    if coords:  # only TPUs have coordinates, which give their place in the torus
        lowest, highest = (tuple(map(end, *coords, coords[0])) for end in (min, max))
        facts["coordinates"] = f"{lowest} to {highest}"
    return facts | ({"slices": str(len(slices))} if slices else {})


def wait_for_result(result: object) -> None:
    """Wait until the devices have computed a result."""
    jax.block_until_ready(result)
