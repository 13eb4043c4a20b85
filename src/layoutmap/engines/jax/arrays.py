"""Create sharded arrays from blocks, and read them shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from layoutmap.core.blocks import (
    Ends,
    Index,
    NumpyArray,
    get_starts_and_stops,
    make_full_index,
    normalize_index,
)
from layoutmap.core.errors import EngineError
from layoutmap.engines.checks import make_bad_dtype_error, make_non_numeric_error
from layoutmap.engines.jax.devices import Device, get_device_name
from layoutmap.engines.jax.padded import PaddedArray, Shape, add_padding_to_block_reader, unwrap_padded_array
from layoutmap.engines.protocol import Array


def convert_dtype(name: str, path: str) -> np.dtype[Any]:
    """Convert a dtype name to numpy's dtype.

    Raises:
        EngineError: JAX would store a different dtype, or has no such dtype. The message names the path.
    """
    try:
        dtype = np.dtype(jnp.dtype(name))
        kept = jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        raise make_bad_dtype_error("JAX", name, path) from None
    if kept != dtype:
        raise EngineError(
            f"{path}: JAX would store {name} as {kept}",
            facts={"dtype": name},
            why="64-bit numbers are disabled in JAX",
            fix="jax.config.update('jax_enable_x64', True), or use a 32-bit variable",
        )
    return dtype


def canonicalize_values(values: Any) -> NumpyArray:
    """Convert values to a numpy array in the dtype in which JAX stores them.

    Raises:
        EngineError: JAX has no arrays of such elements.
    """
    values = np.asarray(values)
    is_number = jnp.issubdtype(values.dtype, jnp.number) or values.dtype == bool
    if not is_number or values.dtype.kind in "mM":
        raise make_non_numeric_error("JAX", values.dtype)
    return values.astype(jax.dtypes.canonicalize_dtype(values.dtype), copy=False)


def create_from_blocks(
    shape: Shape,
    dtype: np.dtype[Any],
    sharding: NamedSharding,
    read: Callable[[Index], NumpyArray],
    *,
    copy: bool = True,
    padded: Shape | None = None,
) -> Array:
    """Create a sharded array from blocks of values. Each distinct block is read once.

    Args:
        shape: The shape of the array.
        dtype: Its element type.
        sharding: Its sharding.
        read: Returns the values at an index.
        copy: Whether to copy blocks. If not, they must not change, since JAX may share their memory on CPU devices.
        padded: The shape with padding; `None`: there is none.
    """
    if padded is not None and padded != shape:
        read = add_padding_to_block_reader(read, shape, dtype)
        return PaddedArray(create_from_blocks(padded, dtype, sharding, read, copy=copy), shape)
    kind = sharding.memory_kind
    holders: dict[Ends, list[Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        holders.setdefault(get_starts_and_stops(normalize_index(index or (), shape)), []).append(device)
    pieces: list[jax.Array] = []
    for ends, devices in holders.items():
        block = np.array(read(tuple(slice(*pair) for pair in ends)), copy=copy or None)
        places = [SingleDeviceSharding(device, memory_kind=kind) for device in devices]
        pieces.extend(jax.device_put([block] * len(devices), places))
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces, dtype=dtype)


def constrain_traced_array(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return a traced array with a constraint to a sharding, for explicit and auto axes of the mesh of the trace."""
    mesh = jax.typeof(array).sharding.mesh
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.axis_names != sharding.mesh.axis_names:
        return jax.lax.with_sharding_constraint(array, sharding)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit not in types.values():
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, sharding.spec))
    # JAX constrains explicit and auto dims by different operations, so apply one after the other.
    array = jax.sharding.reshard(
        array, _filter_spec_dims_by_axis_type(sharding.spec, types, AxisType.Explicit)
    )
    if AxisType.Auto in types.values():
        spec = _filter_spec_dims_by_axis_type(sharding.spec, types, AxisType.Auto)
        array = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))
    return array


def _filter_spec_dims_by_axis_type(
    spec: PartitionSpec, axis_types: Mapping[str, AxisType], axis_type: AxisType
) -> PartitionSpec:
    """Return a spec with only the mesh dims of one axis type."""
    dims = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    return PartitionSpec(
        *(tuple(dim for dim in entry if axis_types[dim] is axis_type) or None for entry in dims)
    )


def iterate_shards(array: jax.Array, *, copy: bool = True) -> Iterator[tuple[Index, NumpyArray]]:
    """Yield the index and the values of each distinct shard of this process. Random keys are yielded as key data.

    On CPU devices the values share the array's memory, which never changes, because JAX does not donate memory that
    numpy shares. A numpy array, as in a pytree, is yielded as one shard.
    """
    if isinstance(array, (np.ndarray, np.generic)):
        yield make_full_index(array.shape), np.array(array, copy=copy or None)
        return
    seen: set[Ends] = set()
    data = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    for shard in unwrap_padded_array(data).addressable_shards:
        if isinstance(array, PaddedArray):
            index, values = array.read_unpadded_shard(shard)
        else:
            index, values = normalize_index(shard.index[: array.ndim], array.shape), np.asarray(shard.data)
        if get_starts_and_stops(index) not in seen:
            seen.add(get_starts_and_stops(index))
            yield index, values


def iterate_device_values(array: object) -> Iterator[tuple[str, NumpyArray]]:
    """Yield the name of each device of this process and the values on it. Random keys are yielded as key data."""
    if isinstance(array, (np.ndarray, np.generic)):
        yield "", np.asarray(array)
    elif isinstance(array, PaddedArray):
        for shard in array.array.addressable_shards:
            yield get_device_name(shard.device), array.read_unpadded_shard(shard)[1]
    elif isinstance(array, jax.Array):
        data = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
        for shard in data.addressable_shards:
            yield get_device_name(shard.device), np.asarray(shard.data)


def wait_for_computation_on_cpu(array: jax.Array) -> jax.Array:
    """Return the array. On CPUs, wait until its computation is finished.

    On CPU devices, two programs with collectives that run at the same time can deadlock, so each must finish first.
    """
    return jax.block_until_ready(array) if next(iter(array.sharding.device_set)).platform == "cpu" else array
