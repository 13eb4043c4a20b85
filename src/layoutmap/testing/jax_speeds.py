"""Collectives, products and copies on JAX's devices, to be measured; and facts of the devices."""

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
from layoutmap.engines.jax.devices import named_sharding

_OPERATIONS: Mapping[str, Callable[[Any, str], jax.Array]] = {
    "all_gather": lambda x, dim: lax.all_gather(x, dim, tiled=True),
    "reduce_scatter": lambda x, dim: lax.psum_scatter(x, dim, tiled=True),
    "all_reduce": lax.psum,
    "all_to_all": lambda x, dim: lax.all_to_all(x, dim, 0, 0, tiled=True),
}


def collective(kind: CollectiveKind, mesh: Mesh, dim: str, num_bytes: int) -> Callable[[], object]:
    """Return a function that runs a collective of float32 over a mesh dim."""
    size = mesh.dim_size(dim)
    length = num_bytes // 4 // size**2 * (size if kind == "all_gather" else size**2)  # of each device
    sharding = named_sharding(Layout([mesh.dim_names], mesh))
    operation = jax.shard_map(
        lambda x: _OPERATIONS[kind](x, dim),
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=sharding.spec,
        check_vma=False,
    )
    values = jax.jit(lambda: jnp.ones(length * mesh.size), out_shardings=sharding)()
    return partial(jax.jit(operation), values)


def product(dtype: str, size: int) -> Callable[[], object]:
    """Return a function that multiplies two square matrices on one device."""
    return partial(jax.jit(jnp.matmul), *[jnp.ones((size, size), dtype)] * 2)


def copy(num_bytes: int) -> Callable[[], object]:
    """Return a function that copies on one device: it reads so many bytes and writes as many."""
    return partial(jax.jit(jnp.negative), jnp.ones(num_bytes // 4))


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


def wait(done: object) -> None:
    """Return when all is computed that was begun."""
    jax.block_until_ready(done)
