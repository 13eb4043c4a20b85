"""Tensors in layouts: made from shards, read shard by shard, redistributed; each with all its bits.

DTensor's own relayout adds shards up with zeros around them, so it loses the sign of a zero and the bits of a NaN, and
does not know all element types. Outside of compiled functions tensors are therefore read and made again shard by
shard. With several processes the shards travel as integers, which a sum with zeros does not change.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from layoutmap.core.blocks import (
    BlockReader,
    Index,
    NumpyArray,
    assemble_blocks,
    find_distinct_shards,
    make_full_index,
)
from layoutmap.core.errors import EngineError, LayoutMapError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.checks import no_element_type, no_numbers
from layoutmap.engines.protocol import Unplaced
from layoutmap.engines.tensorflow.devices import NativeLayout, NativeMesh, bound_mesh, native_layout, to_mesh

dtensor = tf.experimental.dtensor

T = TypeVar("T")
Array: TypeAlias = tf.Tensor | tf.Variable
_MAX_MESHES = 1024
default_mesh_lock = threading.RLock()
"""Held while DTensor's default mesh is set, which it does for itself, too, where it makes a variable or a relayout."""

_lock = threading.Lock()
# Two meshes of ours, an abstract one and the same one bound, are one of DTensor's, which makes it anew for each layout.
# Tensors are on the first that was used, but for those that were made in a layout on another one.
_mesh_of_native: OrderedDict[str, Mesh] = OrderedDict()
_MADE_IN = "_layoutmap_layout"


def native_of(layout: Layout) -> NativeLayout:
    """DTensor's layout; the mesh is remembered, for `layout_of`."""
    native = native_layout(layout)
    with _lock:
        _mesh_of_native.setdefault(native.mesh.to_string(), layout.mesh)
        while len(_mesh_of_native) > _MAX_MESHES:
            _mesh_of_native.popitem(last=False)
    return native


def layout_of(array: object) -> Layout | None:
    """The layout of a tensor or variable; `None` if it is on no mesh, and in a `tf.function`, where none is known."""
    if not isinstance(array, (tf.Tensor, tf.Variable)) or not tf.executing_eagerly():
        return None
    if not dtensor.is_dtensor(array):
        return None
    if (made_in := getattr(array, _MADE_IN, None)) is not None:
        return made_in
    native = dtensor.fetch_layout(array)
    return Layout(list(native.sharding_specs), _mesh_of(native.mesh))


def found(array: object, meshes: Sequence[Mesh] = ()) -> Layout | Unplaced:
    """The layout of a tensor that any program has made, or how it is held otherwise; see `Engine.found`."""
    try:
        layout = layout_of(array)
    except LayoutMapError as error:
        return Unplaced(f"in a layout that has no form here: {error.what}")
    if layout is not None:
        return layout
    device = getattr(array, "device", "").rpartition("device:")[2]
    return Unplaced(
        "on no mesh: DTensor copies it to where it is used", (device,) * bool(device), is_copied=True
    )


def _mesh_of(native_mesh: NativeMesh) -> Mesh:
    with _lock:
        known = _mesh_of_native.get(native_mesh.to_string())
    return known or to_mesh(native_mesh)


def note(array: T, layout: Layout) -> T:
    """Note on a tensor or variable the layout that it was made in: two of ours may be one of DTensor's."""
    setattr(array, _MADE_IN, layout)
    return array


def check_placed(layout: Layout, shape: tuple[int, ...], name: str = "layout") -> NativeLayout:
    """DTensor's form of a layout that fits a shape."""
    layout.check_fits(shape, name)
    return native_of(layout)


def check_dtype(name: str, path: str) -> None:
    """Raise an `EngineError` for a variable of an element type that tensors in layouts cannot have."""
    if not _is_number(name):
        raise no_element_type("TensorFlow", name, path)


def canonical(values: NumpyArray) -> NumpyArray:
    """Numpy values that TensorFlow holds as numbers or truth values; they stay as they are."""
    if not _is_number(values.dtype):
        raise no_numbers("TensorFlow", values.dtype)
    return values


def _is_number(dtype: Any) -> bool:
    """Whether tensors in layouts can have elements of a type, given as TensorFlow's, numpy's or its name."""
    try:
        dtype = tf.as_dtype(dtype)
    except TypeError:
        return False
    return dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool


def tensor_of(array: Array) -> tf.Tensor:
    """The tensor in a variable; a tensor as it is."""
    return array.read_value() if isinstance(array, tf.Variable) else array


def shape_of(tensor: tf.Tensor) -> tuple[int, ...]:
    """The shape of a tensor whose sizes are all known."""
    return tuple(tensor.shape)  # pyright: ignore[reportReturnType]


def _with_values(array: Array) -> tf.Tensor:
    """The tensor in a variable, or a tensor, that has values."""
    tensor = tensor_of(array)
    if tf.is_symbolic_tensor(tensor):
        raise EngineError(
            "a tensor inside a tf.function has no values yet",
            why="the function is being traced, and computes them later",
            fix="read its values outside of the function; relayout works inside",
        )
    return tensor


def shards_of(array: Array, *, copy: bool = True) -> Iterator[tuple[Index, NumpyArray]]:
    """The shards that this process holds, each index once, with both ends; always copies."""
    tensor = _with_values(array)
    layout = layout_of(tensor)
    shape = shape_of(tensor)
    if layout is None:
        yield make_full_index(shape), tensor.numpy()
        return
    places = dtensor.fetch_layout(tensor).mesh.local_device_ids()
    components = dict(zip(places, dtensor.unpack(tensor), strict=True))
    for index, holders in find_distinct_shards(layout, shape, places).values():
        yield index, components[holders[0]].numpy()


def by_device(array: Array) -> Iterator[tuple[str, NumpyArray]]:
    """The values that each device of this process holds, with its name."""
    tensor = _with_values(array)
    layout = layout_of(tensor)
    if layout is None:
        yield getattr(tensor, "device", ""), tensor.numpy()
        return
    names: Sequence[str] = tuple(bound_mesh(layout.mesh).devices or ())
    places = dtensor.fetch_layout(tensor).mesh.local_device_ids()
    for place, component in zip(places, dtensor.unpack(tensor), strict=True):
        yield names[place], component.numpy()


def from_blocks(shape: tuple[int, ...], layout: Layout, read: BlockReader, *, copy: bool = True) -> tf.Tensor:
    """Make a tensor from blocks, each read once.

    Args:
        shape: The shape of the tensor.
        layout: Its layout.
        read: Gives the values at an index.
        copy: Whether what is read may change later: TensorFlow may share the memory of a numpy array.
    """
    native = native_of(layout)
    device_of = dict(zip(native.mesh.local_device_ids(), native.mesh.local_devices(), strict=True))
    made: dict[int, tf.Tensor] = {}
    for index, holders in find_distinct_shards(layout, shape, device_of).values():
        values = np.array(read(index), copy=copy or None, order="C")
        for place in holders:
            with tf.device(device_of[place]):
                made[place] = tf.constant(values)
    components = [made[place] for place in device_of]
    return note(dtensor.pack(components, native), layout)


@contextmanager
def run_on(native_mesh: NativeMesh) -> Generator[None]:
    """While open, operations on plain tensors run on the mesh. An exception ends that, too, as in DTensor it does not.

    DTensor has one such mesh for all threads, so a thread waits here for another one that is inside.
    """
    with default_mesh_lock:
        inside = dtensor.default_mesh(native_mesh)
        inside.__enter__()
        try:
            yield
        finally:
            inside.__exit__(None, None, None)


def to_numpy(array: Array) -> NumpyArray:
    """Return all of an array's values."""
    tensor = _with_values(array)
    layout = layout_of(tensor)
    if layout is None:
        return tensor.numpy()
    if layout.is_fully_replicated():  # as what each step logs
        return dtensor.unpack(tensor)[0].numpy()
    if dtensor.num_clients() > 1:
        tensor = _replicated(tensor, layout)
    return assemble_blocks(shards_of(tensor), shape_of(tensor), tensor.dtype.as_numpy_dtype)


def move(array: Array, layout: Layout) -> tf.Tensor:
    """A tensor, plain or in a layout, in another layout, with all its bits. Gradients pass through it."""
    if not _is_number(array.dtype):
        raise no_numbers("TensorFlow", array.dtype.name)
    if not tf.executing_eagerly():
        return _constrained(array, native_of(layout))
    present = layout_of(array)
    if present is not None and native_of(present) == native_of(layout):
        tensor = tensor_of(array)
        if tensor is array and present == layout:
            return tensor
        return note(tf.identity(tensor) if tensor is array else tensor, layout)

    @tf.custom_gradient
    def moved(tensor: tf.Tensor) -> Any:
        def back(upstream: tf.Tensor) -> tf.Tensor:
            return tf.constant(to_numpy(upstream)) if present is None else move(upstream, present)

        return _moved(tensor, layout), back

    if tensor_of(array).dtype.is_floating:
        with tf.device(None):
            return note(moved(tensor_of(array)), layout)
    return _moved(tensor_of(array), layout)


def _constrained(tensor: Array, native: NativeLayout) -> tf.Tensor:
    """A tensor inside a compiled function, in a layout. DTensor lays its gradient out as it sees fit.

    DTensor's own gradient of a relayout wants the layout that the tensor had, and fails where propagation has since
    given it another one.
    """

    @tf.custom_gradient
    def constrained(tensor: Array) -> Any:
        return dtensor.relayout(tensor, native), lambda upstream: upstream

    with default_mesh_lock:
        return constrained(tensor) if tensor.dtype.is_floating else dtensor.relayout(tensor, native)


def relayout_in_trace(tensor: tf.Tensor, layout: Layout) -> tf.Tensor:
    """A tensor inside a compiled function, in a layout, by DTensor's own operation and nothing else.

    That is for what is assigned to a variable: DTensor restores checkpoints in a function, where it wants just this.
    """
    with default_mesh_lock:
        return dtensor.relayout(tensor, native_of(layout))


def _moved(tensor: tf.Tensor, layout: Layout) -> tf.Tensor:
    present = layout_of(tensor)
    if present is not None and dtensor.num_clients() > 1 and not present.is_fully_replicated():
        tensor = _replicated(tensor, present)
    shards = list(shards_of(tensor))
    shape, dtype = shape_of(tensor), tensor.dtype.as_numpy_dtype
    return from_blocks(shape, layout, lambda index: assemble_blocks(shards, shape, dtype, index))


def _replicated(tensor: tf.Tensor, layout: Layout) -> tf.Tensor:
    """The tensor on all devices of all processes. Its bits travel as integers."""
    width = tensor.dtype.size
    integer = np.int64 if width == 8 else np.int32
    components = [_as_integers(c.numpy(), integer) for c in dtensor.unpack(tensor)]
    flat = [tf.constant(c) for c in components]
    pieces = Layout([*layout.sharding_specs, None], layout.mesh)
    packed = dtensor.pack(flat, native_of(pieces))
    joined = dtensor.relayout(packed, native_of(Layout.replicated(layout.mesh, pieces.rank)))
    values = _from_integers(dtensor.unpack(joined)[0].numpy(), tensor.dtype.as_numpy_dtype)
    return from_blocks(shape_of(tensor), Layout.replicated(layout.mesh, layout.rank), values.__getitem__)


def _as_integers(values: NumpyArray, integer: type) -> NumpyArray:
    """The bytes of values as integers, along one more axis."""
    width = values.dtype.itemsize
    if width < 4:
        return values[..., None].view(np.uint8).reshape(*values.shape, width).astype(integer)
    return np.ascontiguousarray(values)[..., None].view(integer)


def _from_integers(integers: NumpyArray, dtype: type) -> NumpyArray:
    if np.dtype(dtype).itemsize < 4:
        integers = integers.astype(np.uint8)
    return np.ascontiguousarray(integers).view(dtype)[..., 0]
