"""List or simulate devices, and create meshes of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

from layoutmap.core.arguments import as_int
from layoutmap.core.errors import EngineError, MeshError, shorten_repr
from layoutmap.core.mesh import Mesh, MeshDimension
from layoutmap.core.mesh_devices import validate_device_names
from layoutmap.core.mesh_dims import parse_mesh_dims, replace_axis_types, replace_unknown_size
from layoutmap.engines import ENGINES, get_engine, list_installed_engines


# Plans need no devices, so a mesh is abstract unless `engine` or `device_type` is passed (decisions/0001).
def create_mesh(
    mesh_dims: str | Mapping[str, int] | Iterable[MeshDimension | tuple[str, int]],
    mesh_name: str = "",
    devices: Iterable[str] | None = None,
    device_type: str | None = None,
    engine: str | None = None,
    axis_types: object = None,
) -> Mesh:
    """Create a mesh of the first available devices, of given devices, or of devices chosen later.

    With sizes alone, the mesh is abstract: it names no devices and needs none until something is materialized on it.
    `device_type`, `engine`, or a size of -1 select real devices.

    Args:
        mesh_dims: Pairs of name and size, a dict, or text such as `"batch=2,model=4"`. One size may be -1: the number
            of devices divided by the other sizes.
        mesh_name: Any name for the mesh.
        devices: Device names in row-major order. All are used.
        device_type: `"CPU"`, `"GPU"`, or `"TPU"`: the first devices of that type; `None`: of the default type.
        engine: Framework of the devices: `"jax"`, `"tensorflow"`, or `"torch"`; `None`: the framework in use.
        axis_types: JAX's types of the dims, `"auto"` or `"explicit"`: one for all, a list, or a dict by name; `None`:
            `"auto"`. On an explicit mesh, the sharding is part of the types of JAX's arrays (see docs/jax.md).

    Raises:
        MeshError: The dims are invalid, there are too few devices, or given devices are not of `device_type`.
        EngineError: No framework or several frameworks are in use, or the framework has no such devices.

    Example:
        >>> create_mesh("batch=512,model=8")
        Mesh(None, [('batch', 512), ('model', 8)])
        >>> create_mesh([("x", 2), ("y", -1)], devices=["TPU:0", "TPU:1", "TPU:2", "TPU:3", "TPU:4", "TPU:5"]).shape
        (2, 3)
        >>> create_mesh({"x": 1}, device_type="CPU", engine="jax")
        Mesh(['CPU:0'], [('x', 1)])

    References:
        `tf.experimental.dtensor.create_mesh`,
        https://www.tensorflow.org/api_docs/python/tf/experimental/dtensor/create_mesh
    """
    dims = replace_axis_types(parse_mesh_dims(mesh_dims), axis_types)
    open_size = any(dim.size == -1 for dim in dims)
    names = None if devices is None else validate_device_names(devices, dims)
    if names is None and device_type is None and engine is None and not open_size:
        return Mesh(None, dims, mesh_name)
    if names is not None:
        mesh = Mesh(names, replace_unknown_size(dims, len(names)), mesh_name)
        if device_type is not None and mesh.device_type not in (None, device_type.upper()):
            raise MeshError(
                f"devices of type {mesh.device_type} contradict device_type={device_type!r}",
                facts={"mesh": str(mesh)},
                why="a mesh has devices of one type",
                fix="leave device_type out",
            )
        return mesh if engine is None else get_engine(engine).bind_mesh(mesh)
    mesh_engine = get_engine(choose_engine_name() if engine is None else engine)
    available = mesh_engine.list_device_names(device_type)
    mesh = Mesh(None, replace_unknown_size(dims, len(available)), mesh_name)
    kind = available[0].partition(":")[0]
    # Name devices that do not exist, because the engine then raises an error that says how to get more.
    missing = [f"{kind}:{i}" for i in range(len(available), mesh.size)]
    return mesh_engine.bind_mesh(mesh.with_devices([*available, *missing][: mesh.size]))


def list_device_names(engine: str | None = None, device_type: str | None = None) -> tuple[str, ...]:
    """Return the names of the devices of all processes.

    Args:
        engine: Framework of the devices: `"jax"`, `"tensorflow"`, or `"torch"`; `None`: the framework in use.
        device_type: `"CPU"`, `"GPU"`, or `"TPU"`; `None`: the framework's default type.

    Raises:
        EngineError: No framework or several frameworks are in use, or there are no devices of that type.

    Example:
        >>> list_device_names("jax", "CPU")[0]
        'CPU:0'
    """
    return get_engine(choose_engine_name() if engine is None else engine).list_device_names(device_type)


def simulate_devices(number: int, engine: str | None = None) -> None:
    """Simulate devices on the CPU of this machine, in place of its real devices, to try larger meshes.

    Call it before the framework starts: before the imports or right after them. In a program of several processes, each
    process simulates this number of devices. On torch, processes are devices themselves.

    Args:
        number: Number of devices, 1 or more.
        engine: Framework: `"jax"`, `"tensorflow"`, or `"torch"`, which is imported if needed. `None`: the framework in
            use: Keras's backend, or the only imported one, or else the only installed one.

    Raises:
        EngineError: The framework has already started with other devices, or several frameworks could be meant.
        MeshError: `number` is not a number of devices.

    Example:
        >>> simulate_devices(8, engine="jax")
        >>> list_device_names("jax")[-1]
        'CPU:7'
    """
    wanted = as_int(number)
    if wanted is None or wanted < 1:
        raise MeshError(
            f"{shorten_repr(number)} devices cannot be simulated",
            why="a mesh has one device or more",
            fix="pass an integer, as in simulate_devices(8)",
        )
    get_engine(choose_engine_name() if engine is None else engine).simulate_devices(wanted)


def choose_engine_name() -> str:
    """Return the name of the framework in use: Keras's backend, else the only imported or the only installed framework.

    Raises:
        EngineError: Several frameworks could be meant, or Keras's backend has no engine.
    """
    fix = f"pass engine={next(iter(ENGINES))!r}"
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "config"):
        backend: str = keras.config.backend()
        if backend in ENGINES:
            return backend
        raise EngineError(
            f"Keras runs on {backend}, for which there is no engine",
            why=f"the engines are {', '.join(map(repr, ENGINES))}",
            fix=f"set KERAS_BACKEND={next(iter(ENGINES))} before Keras is imported",
        )
    imported = [name for name in ENGINES if name in sys.modules]
    available = imported or _list_candidate_engines()
    if len(available) == 1:
        return available[0]
    raise EngineError(
        f"the engine is ambiguous: {' and '.join(imported)} are imported"
        if imported
        else "the engine is ambiguous: no framework is imported",
        facts={} if imported else {"installed": ", ".join(available)},
        why="without engine=, the imported framework decides",
        fix=fix,
    )


def _list_candidate_engines() -> list[str]:
    """Return the backend in `KERAS_BACKEND` if it has an engine, otherwise all installed frameworks."""
    backend = os.environ.get("KERAS_BACKEND")
    return [backend] if backend in ENGINES else list_installed_engines()
