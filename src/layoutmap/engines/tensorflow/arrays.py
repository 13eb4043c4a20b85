"""Create, read, and relayout tensors without changing a bit.

DTensor's own relayout pads shards with zeros and sums them, so it loses the sign of a zero and the bits of a NaN, and
does not support all element types. Outside of compiled functions, a relayout therefore reads each shard and creates a
new tensor. Between processes, shards are sent as integers, which a sum with zeros does not change.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from layoutmap.core.blocks import (
    BlockReader,
    Index,
    NumpyArray,
    assemble_blocks,
    group_devices_by_shard,
    make_full_index,
)
from layoutmap.core.errors import EngineError, LayoutMapError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.checks import (
    is_python_number_or_list,
    make_bad_dtype_error,
    make_non_numeric_error,
)
from layoutmap.engines.protocol import PlacementWithoutLayout
from layoutmap.engines.tensorflow.devices import (
    NativeLayout,
    NativeMesh,
    bind_mesh,
    convert_from_native_mesh,
    make_native_layout,
)

dtensor = tf.experimental.dtensor

T = TypeVar("T")
Array: TypeAlias = tf.Tensor | tf.Variable
_MAX_MESHES = 1024
default_mesh_lock = threading.RLock()
"""The lock for setting DTensor's default mesh, which DTensor also sets when it creates a variable or relayouts."""

_lock = threading.Lock()
# From each mesh of DTensor to the mesh of layoutmap that was first converted to it, because meshes with and without
# devices become one mesh of DTensor. Keys are texts, because DTensor creates a mesh object for each layout. A tensor's
# attribute `_MADE_IN` takes precedence.
_mesh_of_native: OrderedDict[str, Mesh] = OrderedDict()
_MADE_IN = "_layoutmap_layout"


def convert_to_native_layout(layout: Layout) -> NativeLayout:
    """Convert a layout to a DTensor layout, and record its mesh, so that `get_layout` returns the same mesh."""
    native = make_native_layout(layout)
    with _lock:
        _mesh_of_native.setdefault(native.mesh.to_string(), layout.mesh)
        while len(_mesh_of_native) > _MAX_MESHES:
            _mesh_of_native.popitem(last=False)
    return native


def get_layout(array: object) -> Layout | None:
    """Return the layout of a tensor or variable, or None if it is on no mesh or a `tf.function` is being traced."""
    if not isinstance(array, (tf.Tensor, tf.Variable)) or not tf.executing_eagerly():
        return None
    if not dtensor.is_dtensor(array):
        return None
    if (made_in := getattr(array, _MADE_IN, None)) is not None:
        return made_in
    native = dtensor.fetch_layout(array)
    return Layout(list(native.sharding_specs), _find_recorded_mesh(native.mesh))


def find_placement(array: object, meshes: Sequence[Mesh] = ()) -> Layout | PlacementWithoutLayout:
    """Return the layout of any tensor, or a description of its placement if no layout expresses it."""
    try:
        layout = get_layout(array)
    except LayoutMapError as error:
        return PlacementWithoutLayout(f"in a layout that layoutmap cannot express: {error.what}")
    if layout is not None:
        return layout
    device = getattr(array, "device", "").rpartition("device:")[2]
    return PlacementWithoutLayout(
        "on no mesh: DTensor copies it to where it is used", (device,) * bool(device), is_copied=True
    )


def _find_recorded_mesh(native_mesh: NativeMesh) -> Mesh:
    with _lock:
        known = _mesh_of_native.get(native_mesh.to_string())
    return known or convert_from_native_mesh(native_mesh)


def record_layout(array: T, layout: Layout) -> T:
    """Record the layout in which a tensor was created, because DTensor merges some layouts. Return the tensor."""
    setattr(array, _MADE_IN, layout)
    return array


def check_and_convert_layout(layout: Layout, shape: tuple[int, ...], name: str = "layout") -> NativeLayout:
    """Convert a layout to a DTensor layout, or raise if the layout does not fit the shape."""
    layout.check_fits(shape, name)
    return convert_to_native_layout(layout)


def check_dtype(name: str, path: str) -> None:
    """Raise an `EngineError` for a dtype that sharded tensors do not support."""
    if not is_numeric_dtype(name):
        raise make_bad_dtype_error("TensorFlow", name, path)


def canonicalize_values(values: Any) -> NumpyArray:
    """Convert values to a numpy array, or raise if they are neither numbers nor booleans."""
    values = tf.convert_to_tensor(values).numpy() if is_python_number_or_list(values) else np.asarray(values)
    if not is_numeric_dtype(values.dtype):
        raise make_non_numeric_error("TensorFlow", values.dtype)
    return values


def is_numeric_dtype(dtype: Any) -> bool:
    """Return whether sharded tensors support a dtype, which is a dtype of TensorFlow or numpy, or a name."""
    try:
        dtype = tf.as_dtype(dtype)
    except TypeError:
        return False
    return dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool


def unwrap_variable(array: Array) -> tf.Tensor:
    """Return the tensor of a variable, or a tensor unchanged."""
    return array.read_value() if isinstance(array, tf.Variable) else array


def get_static_shape(tensor: tf.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor as integers. All its sizes must be known, which is not checked."""
    return tuple(tensor.shape)  # pyright: ignore[reportReturnType]


def _get_tensor_with_values(array: Array) -> tf.Tensor:
    """Return the tensor of an array, or raise an `EngineError` if it has no values yet."""
    tensor = unwrap_variable(array)
    if tf.is_symbolic_tensor(tensor):
        raise EngineError(
            "a tensor inside a tf.function has no values yet",
            why="the function is being traced and computes them later",
            fix="read its values outside of the function; inside, only relayout works",
        )
    return tensor


def iterate_shards(array: Array, *, copy: bool = True) -> Iterator[tuple[Index, NumpyArray]]:
    """Yield the index and a copy of the values of each distinct shard of this process."""
    tensor = _get_tensor_with_values(array)
    layout = get_layout(tensor)
    shape = get_static_shape(tensor)
    if layout is None:
        yield make_full_index(shape), tensor.numpy()
        return
    places = dtensor.fetch_layout(tensor).mesh.local_device_ids()
    components = dict(zip(places, dtensor.unpack(tensor), strict=True))
    for index, holders in group_devices_by_shard(layout, shape, places).values():
        yield index, components[holders[0]].numpy()


def iterate_device_values(array: Array) -> Iterator[tuple[str, NumpyArray]]:
    """Yield the name of each device of this process and the values of the array on it."""
    tensor = _get_tensor_with_values(array)
    layout = get_layout(tensor)
    if layout is None:
        yield getattr(tensor, "device", ""), tensor.numpy()
        return
    names: Sequence[str] = tuple(bind_mesh(layout.mesh).devices or ())
    places = dtensor.fetch_layout(tensor).mesh.local_device_ids()
    for place, component in zip(places, dtensor.unpack(tensor), strict=True):
        yield names[place], component.numpy()


def create_from_blocks(
    shape: tuple[int, ...], layout: Layout, read: BlockReader, *, copy: bool = True
) -> tf.Tensor:
    """Create a tensor from blocks, each read once. Without `copy`, blocks must not change: memory may be shared."""
    native = convert_to_native_layout(layout)
    device_of = dict(zip(native.mesh.local_device_ids(), native.mesh.local_devices(), strict=True))
    made: dict[int, tf.Tensor] = {}
    for index, holders in group_devices_by_shard(layout, shape, device_of).values():
        values = np.array(read(index), copy=copy or None, order="C")
        for place in holders:
            with tf.device(device_of[place]):
                made[place] = tf.constant(values)
    components = [made[place] for place in device_of]
    return record_layout(dtensor.pack(components, native), layout)


def to_numpy(array: Array) -> NumpyArray:
    """Return all values of an array. Every process of the mesh must call this."""
    tensor = _get_tensor_with_values(array)
    layout = get_layout(tensor)
    if layout is None:
        return tensor.numpy()
    if layout.is_fully_replicated():  # read one device, which is fast for a step's logs
        return dtensor.unpack(tensor)[0].numpy()
    if dtensor.num_clients() > 1:
        tensor = _replicate_over_processes(tensor, layout)
    return assemble_blocks(iterate_shards(tensor), get_static_shape(tensor), tensor.dtype.as_numpy_dtype)


def relayout_tensor(array: Array, layout: Layout) -> tf.Tensor:
    """Return a tensor in a new layout without changing a bit. Its gradient is moved back to the old layout."""
    if not is_numeric_dtype(array.dtype):
        raise make_non_numeric_error("TensorFlow", array.dtype.name)
    if not tf.executing_eagerly():
        return relayout_in_trace(array, layout)
    present = get_layout(array)
    if present is not None and convert_to_native_layout(present) == convert_to_native_layout(layout):
        tensor = unwrap_variable(array)
        if tensor is array and present == layout:
            return tensor
        return record_layout(tf.identity(tensor) if tensor is array else tensor, layout)

    @tf.custom_gradient
    def relayout_values(tensor: tf.Tensor) -> Any:
        def relayout_gradient(upstream: tf.Tensor) -> tf.Tensor:
            return tf.constant(to_numpy(upstream)) if present is None else relayout_tensor(upstream, present)

        return _relayout_by_shards(tensor, layout), relayout_gradient

    if unwrap_variable(array).dtype.is_floating:
        with tf.device(None):
            return record_layout(relayout_values(unwrap_variable(array)), layout)
    return _relayout_by_shards(unwrap_variable(array), layout)


def relayout_in_trace(tensor: Array, layout: Layout) -> tf.Tensor:
    """Return a tensor in a new layout, inside a traced function. Its gradient has the old layout."""
    with default_mesh_lock:
        return dtensor.relayout(tensor, convert_to_native_layout(layout))


def relayout_and_keep_size_one_dims(tensor: tf.Tensor, layout: Layout) -> tf.Tensor:
    """Relayout a result inside a trace, so that its DTensor layout also names mesh dims of size 1."""
    native = make_native_layout(layout, keeps_dims_of_size_1=True)
    if tf.executing_eagerly() or native == convert_to_native_layout(layout):
        return tensor
    with default_mesh_lock:
        return dtensor.relayout(tensor, native)


def _relayout_by_shards(tensor: tf.Tensor, layout: Layout) -> tf.Tensor:
    present = get_layout(tensor)
    if present is not None and dtensor.num_clients() > 1 and not present.is_fully_replicated():
        tensor = _replicate_over_processes(tensor, present)
    shards = list(iterate_shards(tensor))
    shape, dtype = get_static_shape(tensor), tensor.dtype.as_numpy_dtype
    return create_from_blocks(shape, layout, lambda index: assemble_blocks(shards, shape, dtype, index))


def _replicate_over_processes(tensor: tf.Tensor, layout: Layout) -> tf.Tensor:
    """Return a tensor replicated over the devices of all processes. Its bits are sent as integers."""
    width = tensor.dtype.size
    integer = np.int64 if width == 8 else np.int32
    components = [_reinterpret_as_integers(c.numpy(), integer) for c in dtensor.unpack(tensor)]
    flat = [tf.constant(c) for c in components]
    pieces = Layout([*layout.sharding_specs, None], layout.mesh)
    packed = dtensor.pack(flat, convert_to_native_layout(pieces))
    joined = dtensor.relayout(packed, convert_to_native_layout(Layout.replicated(layout.mesh, pieces.rank)))
    values = _reinterpret_integers_as_dtype(dtensor.unpack(joined)[0].numpy(), tensor.dtype.as_numpy_dtype)
    return create_from_blocks(
        get_static_shape(tensor), Layout.replicated(layout.mesh, layout.rank), values.__getitem__
    )


def _reinterpret_as_integers(values: NumpyArray, integer_type: type) -> NumpyArray:
    """Return the bytes of each value as integers, along an additional last axis."""
    width = values.dtype.itemsize
    if width < 4:
        return values[..., None].view(np.uint8).reshape(*values.shape, width).astype(integer_type)
    return np.ascontiguousarray(values)[..., None].view(integer_type)


def _reinterpret_integers_as_dtype(integers: NumpyArray, dtype: type) -> NumpyArray:
    if np.dtype(dtype).itemsize < 4:
        integers = integers.astype(np.uint8)
    return np.ascontiguousarray(integers).view(dtype)[..., 0]
