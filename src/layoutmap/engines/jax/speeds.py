"""Collectives, products and copies on JAX's devices, to be measured; and facts of the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from layoutmap.core.blocks import NumpyArray
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.cost.table import CollectiveKind
from layoutmap.engines.jax.devices import named_sharding

Repeated = Callable[[int], None]
"""Does something so many times, and returns when it is done."""

_OPERATIONS: Mapping[str, Callable[[Any, str], Any]] = {
    "all_gather": lambda x, dim: lax.all_gather(x, dim, tiled=True),
    "reduce_scatter": lambda x, dim: lax.psum_scatter(x, dim, tiled=True),
    "all_reduce": lax.psum,
    "all_to_all": lambda x, dim: lax.all_to_all(x, dim, 0, 0, tiled=True),
}
_OF_A_PART = ("all_gather", "all_to_all")  # each device takes a part of the tensor


def collective(kind: CollectiveKind, mesh: Mesh, dim: str, num_bytes: int) -> Repeated:
    """Return a collective over a mesh dim, of float32.

    Args:
        kind: What it does.
        mesh: The mesh.
        dim: The dim.
        num_bytes: Its tensor where that is largest, as `Machine.seconds` takes it.
    """
    size = mesh.dim_size(dim)
    length = num_bytes // 4 // size**2 * (size if kind in _OF_A_PART else size**2)  # of each device
    sharding = named_sharding(Layout([mesh.dim_names], mesh))
    operation = jax.shard_map(
        lambda x: _OPERATIONS[kind](x, dim),
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=sharding.spec,
        check_vma=False,
    )
    values = jax.jit(lambda: jnp.ones(length * mesh.size), out_shardings=sharding)()
    return _repeated(operation, values)


def product(dtype: str, size: int) -> Repeated:
    """Return a product of two square matrices on one device."""
    return _repeated(jnp.matmul, *[jnp.ones((size, size), dtype)] * 2)


def multiplied(a: NumpyArray, b: NumpyArray) -> NumpyArray:
    """Return the product of two matrices, computed on one device."""
    return np.asarray(jnp.matmul(a, b))


def copy(num_bytes: int) -> Repeated:
    """Return a copy on one device, which reads so many bytes and writes as many."""
    return _repeated(jnp.negative, jnp.ones(num_bytes // 4))


def memory_bytes() -> int | None:
    """Return the memory of a device that JAX may use; `None`: it is that of the host."""
    return _memory().get("bytes_limit")


def watched_peak() -> Callable[[], int | None]:
    """Return what returns the most memory that arrays have taken since this call.

    `None`: the devices do not report it, as CPUs; or there was a higher peak before, which nothing sets back.
    """
    before = _memory().get("peak_bytes_in_use", 0)

    def peak() -> int | None:
        found = _memory().get("peak_bytes_in_use", 0)
        return found if found > before else None

    return peak


def _memory() -> Mapping[str, int]:
    return jax.local_devices()[0].memory_stats() or {}


def facts() -> dict[str, str]:
    """Return what JAX knows of the devices, for people."""
    devices = jax.devices()
    found = {"kind": ", ".join(sorted({each.device_kind for each in devices}))}
    slices = {getattr(each, "slice_index", None) for each in devices} - {None}
    coords = [each.coords for each in devices if getattr(each, "coords", None) is not None]
    if coords:  # of TPUs, in their torus
        lowest, highest = (tuple(map(end, *coords, coords[0])) for end in (min, max))
        found["coordinates"] = f"{lowest} to {highest}"
    return found | ({"slices": str(len(slices))} if slices else {})


def _repeated(function: Callable[..., Any], *args: Any) -> Repeated:
    compiled = jax.jit(function)

    def repeated(times: int) -> None:
        for _ in range(times):
            done = compiled(*args)
        done.block_until_ready()

    return repeated
