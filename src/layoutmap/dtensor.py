"""Pack, unpack, and move sharded tensors of any engine.

Names and meanings follow `tf.experimental.dtensor`. Input that crashes it or gives wrong values there, such as
replicas that differ, is an error here. Layouts and meshes may be TensorFlow's own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from layoutmap.core.blocks import Ends, NumpyArray, assemble_blocks, get_starts_and_stops
from layoutmap.core.errors import EngineError, LayoutError
from layoutmap.core.layout import Layout, convert_layout
from layoutmap.core.mesh import Mesh, convert_mesh
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import Engine, find_engine, get_engine
from layoutmap.scope.devices import choose_engine_name, create_mesh

__all__ = [
    "barrier",
    "call_with_layout",
    "check_layout",
    "convert_from_tensorflow",
    "convert_to_tensorflow",
    "copy_to_mesh",
    "create_distributed_mesh",
    "default_mesh",
    "fetch_layout",
    "is_dtensor",
    "pack",
    "relayout",
    "relayout_like",
    "run_on",
    "unpack",
]

create_distributed_mesh = create_mesh
"""TensorFlow's name for a mesh over the devices of all processes, which `layoutmap.create_mesh` makes."""


def pack(tensors: Sequence[Any], layout: Layout, *, engine: str | None = None) -> Any:
    """Return one tensor that consists of the given components, one for each device.

    Args:
        tensors: One component for each device of this process, in mesh order: framework arrays, numpy arrays, or
            numbers, all of one shape and dtype. Devices with the same shard need equal components.
        layout: The layout of the tensor.
        engine: The engine of the result if the components are not framework arrays. `None` means the framework in
            use.

    Returns:
        The tensor. An axis sharded `n` ways is `n` times as long as that of a component.

    Raises:
        LayoutError: The number of components, or their shape, element type, or values do not fit the layout.
        MeshError: The machine does not have the mesh's devices.

    Example:
        >>> import numpy as np
        >>> from layoutmap import Mesh
        >>> mesh = Mesh(None, [("x", 3), ("y", 2)])
        >>> halves = [np.float32([2 * i, 2 * i + 1]) for i in (0, 0, 1, 1, 2, 2)]
        >>> tensor = pack(halves, Layout(["x"], mesh), engine="jax")
        >>> np.asarray(tensor)
        array([0., 1., 2., 3., 4., 5.], dtype=float32)
        >>> pack(halves[:5], Layout(["x"], mesh), engine="jax")
        Traceback (most recent call last):
        ...
        layoutmap.core.errors.LayoutError: pack: there are 5 components for 6 devices
          layout  (x,)
          mesh    x=3, y=2
          why     each device holds one component
          fix     pass 6 components, in the order of the mesh's devices

    References:
        `tf.experimental.dtensor.pack`, https://www.tensorflow.org/api_docs/python/tf/experimental/dtensor/pack
    """
    layout = convert_layout(layout)
    target = _choose_engine(tensors[0] if len(tensors) else None, engine)
    mesh = target.bind_mesh(layout.mesh)
    device_ids = mesh.local_device_ids
    if len(tensors) != len(device_ids):
        raise LayoutError(
            f"pack: there are {len(tensors)} components for {len(device_ids)} devices",
            facts={"layout": str(layout), "mesh": str(mesh)},
            why="each device holds one component",
            fix=f"pass {len(device_ids)} components, in the order of the mesh's devices",
        )
    components = [target.canonicalize_values(_to_numpy(tensor)) for tensor in tensors]
    first = components[0]
    for i, component in enumerate(components):
        if component.shape != first.shape or component.dtype != first.dtype:
            raise LayoutError(
                f"pack: component {i} differs from component 0",
                facts={
                    "component 0": f"{first.dtype}{list(first.shape)}",
                    f"component {i}": f"{component.dtype}{list(component.shape)}",
                },
                why="all components of a tensor have the same shape and element type",
                fix="convert all components to one dtype, and pad smaller ones to the shape of the largest",
            )
    layout.check_rank(first.shape, "pack")
    shape = tuple(n * count for n, count in zip(first.shape, layout.shard_counts, strict=True))
    parts: dict[Ends, tuple[int, NumpyArray]] = {}
    for i, (device_id, component) in enumerate(zip(device_ids, components, strict=True)):
        number, same = parts.setdefault(
            get_starts_and_stops(layout.shard_slices(shape, device_id)), (i, component)
        )
        if same.tobytes() != component.tobytes() and first.size:
            raise LayoutError(
                f"pack: components {number} and {i} differ, but are the same shard",
                facts={"layout": str(layout), "mesh": str(mesh), "shard": layout.locate_shard(device_id)},
                why="devices that hold the same shard hold the same values",
                fix=f"pass component {number} again as component {i}, or shard an axis over a further mesh dim",
            )
    variable = VariableSpec("pack", shape, str(first.dtype))
    return target.create_from_shards(
        Assignment(variable, layout), lambda index: parts[get_starts_and_stops(index)][1]
    )


def unpack(tensor: Any) -> list[NumpyArray]:
    """Return the local component of each device of this process, in mesh order.

    Args:
        tensor: A sharded tensor.

    Returns:
        One numpy array for each device. Devices with the same shard share one array.

    Raises:
        LayoutError: The tensor is on no mesh.

    Example:
        >>> import numpy as np
        >>> from layoutmap import Mesh
        >>> layout = Layout(["x", "y"], Mesh(None, [("x", 3), ("y", 2)]))
        >>> tensor = relayout(np.float32(np.arange(6)).reshape(3, 2), layout, engine="jax")
        >>> [float(component[0, 0]) for component in unpack(tensor)]
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    References:
        `tf.experimental.dtensor.unpack`, https://www.tensorflow.org/api_docs/python/tf/experimental/dtensor/unpack
    """
    layout = fetch_layout(tensor)
    target = find_engine(tensor)
    shards = {get_starts_and_stops(index): values for index, values in target.iterate_shards(tensor)}
    shape = tuple(tensor.shape)
    return [
        shards[get_starts_and_stops(layout.shard_slices(shape, device_id))]
        for device_id in target.bind_mesh(layout.mesh).local_device_ids
    ]


def relayout(tensor: Any, layout: Layout, *, engine: str | None = None) -> Any:
    """Return a tensor's values in the layout `layout`, on the same mesh or a different one.

    Args:
        tensor: A framework array, sharded or not, or a numpy array.
        layout: The target layout: a `Layout`, a `jax.sharding.NamedSharding`, or, for a tensor on a mesh, specs such as
            `(None, "model")` or `jax.P(None, "model")`. With `memory`, the tensor moves to that memory.
        engine: The engine of the result if `tensor` is a numpy array. `None` means the framework in use.

    Raises:
        LayoutError: The layout does not fit the tensor's shape.
        EngineError: The engine cannot hold the layout, or no engine knows the tensor.

    Example:
        >>> import numpy as np
        >>> from layoutmap import Mesh
        >>> layout = Layout(["x"], Mesh(None, [("x", 2)]))
        >>> fetch_layout(relayout(np.float32([1, 2]), layout, engine="jax")) == layout
        True

    References:
        `tf.experimental.dtensor.relayout`,
        https://www.tensorflow.org/api_docs/python/tf/experimental/dtensor/relayout
    """
    target = _choose_engine(tensor, engine)
    present = target.get_layout(tensor) if isinstance(tensor, target.array_types) else None
    return target.relayout(tensor, convert_layout(layout, present and present.mesh, _get_rank(tensor)))


def relayout_like(tensor: Any, layout_tensor: Any, *, engine: str | None = None) -> Any:
    """Return a tensor's values in the layout of `layout_tensor`. See `relayout`."""
    layout = fetch_layout(layout_tensor)
    return relayout(tensor, layout.replace_memory(layout.memory or "device"), engine=engine)


def copy_to_mesh(tensor: Any, layout: Layout, *, engine: str | None = None) -> Any:
    """Place an unsharded tensor on the devices of a layout's mesh.

    Unlike `relayout`, it refuses a tensor that has a layout, so that no redistribution is implicit.

    Args:
        tensor: An unsharded framework array or a numpy array.
        layout: The target layout.
        engine: The engine of the result if `tensor` is a numpy array. `None` means the framework in use.

    Raises:
        LayoutError: The tensor has a layout, or the layout does not fit its shape.
        EngineError: The engine cannot hold the layout, or no engine knows the tensor.

    References:
        `tf.experimental.dtensor.copy_to_mesh`,
        https://www.tensorflow.org/api_docs/python/tf/experimental/dtensor/copy_to_mesh
    """
    target = _choose_engine(tensor, engine)
    present = target.get_layout(tensor) if isinstance(tensor, target.array_types) else None
    if present is not None:
        raise LayoutError(
            "copy_to_mesh: the tensor is on a mesh already",
            facts={"layout": str(present), "mesh": str(present.mesh)},
            why="copy_to_mesh takes an unsharded tensor",
            fix="use relayout(tensor, layout)",
        )
    return target.relayout(tensor, convert_layout(layout, rank=_get_rank(tensor)))


def call_with_layout(
    fn: Callable[..., Any], layout: Layout | None, *args: Any, engine: str | None = None, **kwargs: Any
) -> Any:
    """Call a function so that its result is created in a layout, without the global value on any device.

    Args:
        fn: A framework function that returns one array, such as `jax.numpy.zeros`.
        layout: The layout of the result. `None` calls the function unchanged.
        *args: Passed to the function.
        engine: The engine of the function. `None` means that of the arrays among the arguments, or else the
            framework in use.
        **kwargs: Passed to the function.

    Raises:
        LayoutError: The layout does not fit the shape of the result.
        EngineError: The function does not return one array, or the engine cannot hold the layout.

    Example:
        >>> import numpy as np
        >>> import jax.numpy as jnp
        >>> from layoutmap import Mesh
        >>> layout = Layout(["x", None], Mesh(None, [("x", 2)]))
        >>> tensor = call_with_layout(jnp.ones, layout, shape=(4, 3), engine="jax")
        >>> [component.shape for component in unpack(tensor)]
        [(2, 3), (2, 3)]

    References:
        `tf.experimental.dtensor.call_with_layout`,
        https://www.tensorflow.org/api_docs/python/tf/experimental/dtensor/call_with_layout
    """
    if layout is None:
        return fn(*args, **kwargs)
    array = next((each for each in (*args, *kwargs.values()) if _is_engine_array(each)), None)
    return _choose_engine(array, engine).call_with_layout(fn, convert_layout(layout), args, kwargs)


@contextmanager
def run_on(
    mesh: Mesh, *, engine: str | None = None, draws: Literal["exact", "tiles"] = "exact"
) -> Generator[None]:
    """Run computations of unsharded values on a mesh, replicated on each of its devices.

    Scopes nest, and the innermost one applies. An exception closes them.

    Args:
        mesh: The mesh.
        engine: The engine that computes. `None` means the framework in use.
        draws: `"tiles"`, on torch only: each device draws only its own part of a dropout mask (see
            `layoutmap.scope`). A model built in a scope uses the setting of its scope.

    Raises:
        MeshError: The machine does not have the mesh's devices.
        EngineError: No framework is in use, several are, or the engine does not support `draws`.

    Example:
        >>> import numpy as np
        >>> import jax.numpy as jnp
        >>> from layoutmap import Mesh
        >>> with run_on(Mesh(None, [("x", 2)]), engine="jax"):
        ...     tensor = jnp.ones((2, 3)) @ jnp.ones(3)
        >>> unpack(tensor)
        [array([3., 3.], dtype=float32), array([3., 3.], dtype=float32)]

    References:
        `tf.experimental.dtensor.run_on`,
        https://www.tensorflow.org/api_docs/python/tf/experimental/dtensor/run_on
    """
    with _choose_engine(None, engine).run_on(convert_mesh(mesh), draws):
        yield


default_mesh = run_on
"""TensorFlow's newer name for `run_on`."""


def barrier(mesh: Mesh, *, engine: str | None = None) -> None:
    """Wait until all processes of a mesh have called this function."""
    _choose_engine(None, engine).gather_from_processes(np.zeros(1, np.int32), convert_mesh(mesh))


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor or variable has a layout, so that `fetch_layout` returns it."""
    try:
        fetch_layout(tensor)
    except LayoutError:
        return False
    return True


def check_layout(tensor: Any, layout: Layout) -> None:
    """Raise if a tensor is not in `layout`. Mesh dims of size 1 are ignored, since they shard nothing.

    Raises:
        LayoutError: The tensor has a different layout, or none.
    """
    present, layout = fetch_layout(tensor), convert_layout(layout)
    if (present.mesh, _list_dividing_dims(present)) != (layout.mesh, _list_dividing_dims(layout)):
        raise LayoutError(
            f"the tensor is in the layout {present}",
            facts={"expected": str(layout), "mesh": str(present.mesh)},
            why="the layouts differ in their specs or their meshes",
            fix="move the tensor: relayout(tensor, layout)",
        )


def _list_dividing_dims(layout: Layout) -> list[list[str]]:
    """Return the mesh dims with more than one device that shard each axis of a layout."""
    axes = map(layout.list_mesh_dims, range(layout.rank))
    return [[dim for dim in dims if layout.mesh.dim_size(dim) > 1] for dims in axes]


def convert_to_tensorflow(value: Layout | Mesh) -> Any:
    """Return a layout or a mesh as a `tf.experimental.dtensor.Layout` or `Mesh` on devices of this machine.

    Raises:
        EngineError: TensorFlow is not installed, or the layout shards an axis over several mesh dims.
        MeshError: The machine does not have the mesh's devices.
    """
    native = get_engine("tensorflow").make_native_layout
    return (
        native(Layout.replicated(value, 0), 0).mesh if isinstance(value, Mesh) else native(value, value.rank)
    )


def convert_from_tensorflow(value: Any) -> Layout | Mesh:
    """Return a `tf.experimental.dtensor.Layout` or `Mesh` as a `Layout` or `Mesh`.

    All functions that take a layout or a mesh also accept TensorFlow's own.

    Raises:
        LayoutError: The value is neither, or is a layout on a single device.
    """
    mesh = convert_mesh(value)
    return mesh if isinstance(mesh, Mesh) else convert_layout(value)


def fetch_layout(tensor: Any) -> Layout:
    """Return the layout of a tensor, or of the array in a Keras or flax.nnx variable.

    Raises:
        LayoutError: The tensor is on no mesh.

    Example:
        >>> import numpy as np
        >>> fetch_layout(np.zeros(3))
        Traceback (most recent call last):
        ...
        layoutmap.core.errors.LayoutError: the numpy.ndarray has no layout
          why   it is on no mesh, or a compiled function has yet to compute it
          fix   give it one: relayout(tensor, layout)

    References:
        `tf.experimental.dtensor.fetch_layout`,
        https://www.tensorflow.org/api_docs/python/tf/experimental/dtensor/fetch_layout
    """
    array = tensor if _is_engine_array(tensor) else _read_variable(tensor)
    placement = find_engine(array).find_placement(array) if _is_engine_array(array) else None
    if not isinstance(placement, Layout):
        raise LayoutError(
            f"the {type(tensor).__module__}.{type(tensor).__qualname__} has no layout",
            why="it is on no mesh, or a compiled function has yet to compute it"
            if placement is None or placement.is_copied
            else placement.what,
            fix="give it one: relayout(tensor, layout)",
        )
    return placement


def _is_engine_array(value: Any) -> bool:
    """Return whether a value is an array of a framework that has an engine."""
    try:
        find_engine(value)
    except EngineError:
        return False
    return True


def _read_variable(variable: Any) -> Any:
    """Return the array of a flax.nnx or Keras variable, or `None` for any other value."""
    read = getattr(variable, "get_value", None)
    return read() if callable(read) else getattr(variable, "value", None)


def _get_rank(tensor: Any) -> int:
    """Return the number of axes of a tensor, or of nested lists of numbers. The values of a tensor are not read."""
    shape = getattr(tensor, "shape", None)
    if shape is None:
        return np.ndim(tensor)
    # The rank of a TensorFlow shape is `None` if it is unknown.
    return shape.rank or 0 if hasattr(shape, "rank") else len(shape)


def _choose_engine(tensor: Any, engine: str | None) -> Engine:
    """Return the requested engine, else the engine of the array `tensor`, else the engine of the framework in use."""
    if engine is not None:
        return get_engine(engine)
    return find_engine(tensor) if _is_engine_array(tensor) else get_engine(choose_engine_name())


def _to_numpy(tensor: Any) -> Any:
    """Return the global values of a framework array as a numpy array, and any other value unchanged."""
    if not _is_engine_array(tensor):
        return tensor
    shards = list(find_engine(tensor).iterate_shards(tensor))
    return assemble_blocks(shards, tuple(tensor.shape), shards[0][1].dtype)
