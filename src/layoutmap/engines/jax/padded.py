"""Store arrays with uneven axes padded with zeros, and present them with their shape without padding.

JAX refuses uneven shards of a program's arguments and results, and accepts them inside it. A program therefore takes
padded arrays, slices them, and pads its results, so that XLA partitions arrays of the logical shape (decisions/0230).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from layoutmap.core.blocks import (
    BlockReader,
    Index,
    NumpyArray,
    compute_block_shape,
    intersect_blocks,
    make_full_index,
    make_relative_index,
    normalize_index,
)
from layoutmap.core.layout import Layout
from layoutmap.core.variables import VariableSpec
from layoutmap.engines.jax.ambient import use_mesh
from layoutmap.engines.jax.trees import find_memory_kind, move_to_memory
from layoutmap.engines.protocol import Array

Shape = tuple[int, ...]
T = TypeVar("T")


# JAX would trace into a pytree node, and optimizers would see the padding, so this is an opaque leaf (decisions/0230).
class PaddedArray:
    """Store an array with padding. `jax.numpy` and numpy read it without the padding.

    A step of `layoutmap.jit_step` gets it as an array. `jax.jit` and `jax.grad` refuse it; `jnp.asarray` gathers the
    axes that are padded.

    Args:
        array: The padded array.
        shape: The shape without padding.
    """

    __slots__ = ("__weakref__", "array", "shape")
    __hash__ = None  # type: ignore[assignment]
    __array_priority__ = 100
    committed = True
    is_padded = True
    # jnp.zeros_like would copy the sharding of a committed array, which JAX refuses for uneven shapes, so claim to be
    # uncommitted.
    _committed = False
    weak_type = False
    sharding = property(operator.attrgetter("array.sharding"))
    is_fully_addressable = property(operator.attrgetter("array.is_fully_addressable"))
    is_deleted = property(operator.attrgetter("array.is_deleted"))

    def __init__(self, array: Array, shape: Sequence[int]):
        self.array = array
        self.shape: Shape = tuple(shape)

    @property
    def dtype(self) -> Array:
        """Element type."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, without padding."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without padding."""
        return self.size * self.dtype.itemsize

    def __jax_array__(self) -> jax.Array:
        """Return an array of the logical shape, gathered along the padded axes."""
        if isinstance(self.array, jax.core.Tracer):
            return unpad_array(self.array, self.shape)
        pairs = zip(self.shape, self.array.shape, _pad_spec_to_rank(self.sharding, self.ndim), strict=True)
        spec = PartitionSpec(*(each if size == padded else None for size, padded, each in pairs))
        sharding = NamedSharding(self.sharding.mesh, spec)
        # JAX refuses a slice under a mesh with other axis types, so set this mesh.
        with use_mesh(sharding.mesh):
            return _gather_without_padding(self.array, self.shape, sharding)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> NumpyArray:
        values = np.empty(self.shape, self.dtype)
        # JAX would keep the result of np.asarray in memory as long as the array, so copy shard by shard.
        for shard in self.array.addressable_shards:
            index, block = self.read_unpadded_shard(shard)
            values[index] = block
        return values if dtype is None else values.astype(dtype)

    def read_unpadded_shard(self, shard: Array) -> tuple[Index, NumpyArray]:
        """Return the index and the values of a shard without the padding. Both may be empty."""
        index = normalize_index(shard.index[: self.ndim], self.array.shape)
        index = tuple(
            slice(min(part.start, n), min(part.stop, n)) for part, n in zip(index, self.shape, strict=True)
        )
        return index, np.asarray(shard.data)[make_full_index(compute_block_shape(index))]

    def __getattr__(self, name: str) -> Array:
        """Return an attribute of the unpadded array."""
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__jax_array__(), name)

    def __getitem__(self, index: Array) -> jax.Array:
        return self.__jax_array__()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"PaddedArray({self.array!r}, {self.shape})"


def _make_operator_method(name: str) -> Callable[..., Array]:
    def call_operator(self: PaddedArray, *args: object) -> Array:
        return getattr(self.__jax_array__(), name)(*map(_unpad_operand, args))

    call_operator.__name__ = name
    return call_operator


def _unpad_operand(value: object) -> object:
    return value.__jax_array__() if isinstance(value, PaddedArray) else value


def _wait_until_ready(array: PaddedArray) -> PaddedArray:
    array.array.block_until_ready()
    return array


_ARITHMETIC = ("add", "divmod", "floordiv", "matmul", "mod", "mul", "pow", "sub", "truediv")
_BINARY = (*_ARITHMETIC, "and", "lshift", "or", "rshift", "xor")
_COMPARISONS = ("contains", "eq", "ge", "gt", "le", "lt", "ne")
_UNARY = ("abs", "bool", "complex", "float", "index", "int", "invert", "iter", "neg", "pos", "round")
PaddedArray.block_until_ready = _wait_until_ready  # type: ignore[attr-defined]
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_COMPARISONS, *_UNARY):
    setattr(PaddedArray, f"__{_name}__", _make_operator_method(f"__{_name}__"))


def pad_array(array: Array, shape: Sequence[int]) -> Array:
    """Pad an array with zeros at the end of its axes, up to a shape."""
    if tuple(array.shape) == tuple(shape):
        return array
    config = [(0, padded - size, 0) for size, padded in zip(array.shape, shape, strict=True)]
    return jax.lax.pad(array, jnp.zeros((), array.dtype), config)


def unpad_array(array: Array, shape: Sequence[int]) -> Array:
    """Remove the padding of an array."""
    return array if tuple(array.shape) == tuple(shape) else jax.lax.slice(array, (0,) * len(shape), shape)


@partial(jax.jit, static_argnums=(1, 2))
def _gather_without_padding(array: jax.Array, shape: Shape, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(unpad_array(array, shape), sharding)


@partial(jax.jit, static_argnums=(1, 2, 3))
def change_padding_and_sharding(
    array: jax.Array, shape: Shape, padded_shape: Shape, sharding: NamedSharding
) -> jax.Array:
    """Return a padded array with a new padding and sharding on the same devices. `shape` is the unpadded shape."""
    return jax.lax.with_sharding_constraint(pad_array(unpad_array(array, shape), padded_shape), sharding)


def compute_padded_shape(shape: Sequence[int], sharding: NamedSharding) -> Shape:
    """Return a shape with each axis rounded up to a multiple of its number of shards."""
    sizes = sharding.mesh.shape
    dims = [() if each is None else (each,) if isinstance(each, str) else each for each in sharding.spec]
    counts = [math.prod(sizes[dim] for dim in each) for each in dims]
    counts += [1] * (len(shape) - len(counts))
    return tuple(-(-n // count) * count for n, count in zip(shape, counts, strict=True))


def wrap_padded_array(array: Array, shape: Sequence[int]) -> Array:
    """Return an array as a `PaddedArray` of a logical shape, or unchanged if the array itself has this shape."""
    return array if tuple(array.shape) == tuple(shape) else PaddedArray(array, shape)


def unwrap_padded_array(array: Array) -> Array:
    """Return the padded array of a `PaddedArray`, and other values unchanged."""
    return array.array if isinstance(array, PaddedArray) else array


def explain_why_padding_is_impossible(variable: VariableSpec, layout: Layout) -> str:
    """Return why an array cannot be stored padded, or an empty text if it can."""
    if layout.mesh.explicit_dims:
        return f"JAX cannot slice padding off along the explicit axes of {layout.mesh.explicit_dims[0]!r}"
    if variable.memory:
        return f"arrays in {variable.memory} are not padded"
    return "random keys are not padded" if variable.dtype.startswith("key<") else ""


def replace_padded_arrays_by_shapes(tree: T) -> T:
    """Return a tree for tracing: a `ShapeDtypeStruct` replaces each `PaddedArray` and each array in host memory."""

    def replace_leaf(leaf: object) -> object:
        if isinstance(leaf, jax.Array) and find_memory_kind(leaf):
            sharding = leaf.sharding
            if isinstance(sharding, NamedSharding):
                sharding = NamedSharding(sharding.mesh, sharding.spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, PaddedArray) else leaf

    return jax.tree.map(replace_leaf, tree)


def wrap_function_for_stored_arrays(
    function: Callable[..., T], *trees: object
) -> tuple[Callable[..., T], list[Array]]:
    """Return a pair: `function` with one argument per stored, padded array of `trees`, and the list of these arrays."""
    leaves, tree = jax.tree.flatten(trees)
    shapes = [leaf.shape if isinstance(leaf, PaddedArray) else None for leaf in leaves]

    def call_with_logical_arrays(*stored: Array) -> T:
        pairs = zip((move_to_memory(each, "device") for each in stored), shapes, strict=True)
        logical = [each if shape is None else unpad_array(each, shape) for each, shape in pairs]
        return function(*jax.tree.unflatten(tree, logical))

    return call_with_logical_arrays, list(map(unwrap_padded_array, leaves))


def add_padding_to_block_reader(
    read: BlockReader, shape: Sequence[int], dtype: np.dtype[np.generic]
) -> BlockReader:
    """Wrap `read`, which returns unpadded blocks, so that it accepts indices in the padding and returns zeros there."""

    def read_padded_values(index: Index) -> NumpyArray:
        part = intersect_blocks(index, make_full_index(shape))
        if part == index:
            return read(index)
        block = np.zeros(compute_block_shape(index), dtype)
        if part is not None:
            block[make_relative_index(part, index)] = read(part)
        return block

    return read_padded_values


def _pad_spec_to_rank(sharding: NamedSharding, rank: int) -> list[Array]:
    return [*sharding.spec, *[None] * (rank - len(sharding.spec))]
