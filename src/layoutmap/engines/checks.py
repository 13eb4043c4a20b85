"""Check inputs for all engines, with one error message for each mistake in every framework."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from layoutmap.core.blocks import BlockReader, Index, NumpyArray, compute_block_shape
from layoutmap.core.errors import EngineError, MeshError, join_names
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment, VariableSpec

Value = TypeVar("Value")

_MAX_REMEMBERED = 512


# -- devices


def refuse_layout_in_host_memory(layout: Layout, framework: str, why: str, alternative: str = "") -> None:
    """Raise an error for a layout in host memory, for a framework that stores arrays only on devices.

    Args:
        layout: The layout.
        framework: The name of the framework.
        why: The reason, for the message.
        alternative: Another way to save device memory with this framework, as a part of the error's fix.

    Raises:
        EngineError: The layout is in host memory.
    """
    if layout.host_memory:
        raise EngineError(
            f"{framework} cannot store an array in {layout.host_memory}",
            facts={"layout": str(layout)},
            why=why,
            fix=f"leave memory out{alternative}, or use JAX",
        )


def make_no_devices_error(framework: str, device_type: str, usable_type: str, why: str) -> EngineError:
    """Return the error for a device type without devices on this machine."""
    return EngineError(
        f"{framework} has no {device_type} devices here",
        why=why,
        fix=f"use device_type={usable_type!r}, or install {framework} for {device_type}",
    )


def format_fix_for_too_few_devices(framework: str, num_devices: int) -> str:
    """Return the `fix` of an error about a mesh that needs `num_devices`, more than the framework has."""
    return (
        f"restart Python and call lm.simulate_devices({num_devices}) before {framework} starts, for as many devices of "
        "the CPU; or make the mesh smaller"
    )


def check_devices_are_simulated(framework: str, num_devices: int, device_names: Sequence[str]) -> None:
    """Raise an `EngineError` unless a framework has started with this number of simulated devices."""
    if len(device_names) == num_devices and device_names[0].startswith("CPU:"):
        return
    raise EngineError(
        f"{num_devices} devices cannot be simulated: {framework} has started",
        facts={"devices": join_names(device_names)},
        why="the number of devices is fixed when the framework starts, at the first array or query for devices",
        fix=f"restart Python, and call lm.simulate_devices({num_devices}) right after the imports",
    )


def resolve_device_names(
    mesh: Mesh,
    list_device_names: Callable[[str | None], Sequence[str]],
    framework: str,
    fix_too_few: str,
    canonicalize_name: Callable[[str], str] = str.upper,
) -> tuple[str, ...]:
    """Return the names of a mesh's devices, or raise if some do not exist. Abstract meshes get the first devices."""
    try:
        device_names = list_device_names(mesh.device_type)
    except EngineError as error:
        raise MeshError(error.what, facts={"mesh": str(mesh)}, why=error.why, fix=error.fix) from None
    if len(device_names) < mesh.size:
        raise MeshError(
            f"the mesh needs {mesh.size} devices, but {framework} has {len(device_names)}",
            facts={"mesh": str(mesh), "devices": join_names(device_names)},
            why="each position of the mesh needs a device",
            fix=fix_too_few,
        )
    if mesh.devices is None:
        return tuple(device_names[: mesh.size])
    names = tuple(map(canonicalize_name, mesh.devices))
    known = set(device_names)
    unknown = [given for given, name in zip(mesh.devices, names, strict=True) if name not in known]
    if unknown:
        raise MeshError(
            f"device {unknown[0]!r} does not exist",
            facts={"mesh": str(mesh), "missing": join_names(unknown), "devices": join_names(device_names)},
            why=f"{framework} has {len(device_names)} devices of that type here, named by their type and number",
            fix="name devices that exist, or pass devices=None",
        )
    return names


def check_no_explicit_axes(mesh: Mesh, framework: str) -> None:
    """Raise a `MeshError` for a mesh with explicit axes, because only JAX has these."""
    if mesh.explicit_dims:
        raise MeshError(
            f"mesh dim {mesh.explicit_dims[0]!r} has explicit axes, and {framework} does not support them",
            facts={"mesh": str(mesh)},
            why="axis types are a feature of JAX, where shardings are part of the types of arrays",
            fix="make the mesh without axis_types, or use JAX",
        )


def bind_mesh_to_devices(mesh: Mesh, names: Sequence[str], local_indices: Iterable[int]) -> Mesh:
    """Return a mesh with these device names and local positions, or the same mesh if it is already bound."""
    local_device_ids = tuple(local_indices)
    if mesh.devices is not None and local_device_ids == mesh.local_device_ids:
        return mesh
    return mesh.with_devices(names, local_device_ids=local_device_ids)


# -- element types


def make_bad_dtype_error(framework: str, name: str, path: str) -> EngineError:
    """Return the error for a variable with an element type that sharded arrays cannot have."""
    return EngineError(
        f"{path}: {framework} cannot shard element type {name!r}",
        why="sharded arrays hold numbers and booleans",
        fix="create the variable outside the scope, or store numbers",
    )


def is_python_number_or_list(value: Any) -> bool:
    """Return whether a value is a Python number, or nested lists of such numbers."""
    if isinstance(value, list | tuple):
        return all(map(is_python_number_or_list, cast("list[Any]", value)))
    return isinstance(value, (int, float, complex)) and not isinstance(value, np.generic)


def make_non_numeric_error(framework: str, dtype: object) -> EngineError:
    """Return the error for an array with elements that are neither numbers nor booleans."""
    return EngineError(
        f"{framework} cannot shard an array of {dtype}",
        why="sharded arrays hold numbers and booleans",
        fix="pass an array of numbers",
    )


# -- values


def check_no_initializer_is_missing(
    assignments: Mapping[str, Assignment], initializers: Mapping[str, Initializer]
) -> None:
    """Raise an `EngineError` unless each variable that is to be created has an initializer."""
    missing = [key for key in assignments if key not in initializers]
    if missing:
        raise EngineError(
            f"{missing[0]}: there is no initializer",
            facts={"missing": ", ".join(missing[:10])},
            why="the initial value of each new variable comes from its initializer",
            fix="pass an Initializer for each assignment",
        )


def check_initial_value(variable: VariableSpec, shape: Sequence[int], dtype: str) -> None:
    """Raise an `EngineError` unless an initial value has the shape and element type of its variable."""
    if tuple(shape) != variable.shape or dtype != variable.dtype:
        raise EngineError(
            f"{variable.path}: its initializer returns an array with a wrong shape or element type",
            facts={
                "variable": f"{variable.dtype}{list(variable.shape)}",
                "returned": f"{dtype}{list(shape)}",
            },
            why="an initial value must have the shape and element type of the variable",
            fix="make the initializer return an array of that shape and element type",
        )


def check_shard(variable: VariableSpec, index: Index, shape: Sequence[int], dtype: str) -> None:
    """Raise an `EngineError` unless a shard has the shape of its index and the variable's element type."""
    if tuple(shape) != compute_block_shape(index) or dtype != variable.dtype:
        raise EngineError(
            f"{variable.path}: `read` returned a shard with a wrong shape or element type",
            facts={
                "index": index,
                "shard": f"{variable.dtype}{list(compute_block_shape(index))}",
                "returned": f"{dtype}{list(shape)}",
            },
            why="a shard has the shape of its index and the variable's element type",
            fix="make `read` return exactly the values at the index, in the variable's element type",
        )


def add_checks_to_block_reader(variable: VariableSpec, read: BlockReader) -> BlockReader:
    """Wrap `read`, which returns values of a variable, so that a wrong shape or element type raises."""

    def read_checked_values(index: Index) -> NumpyArray:
        block = np.asarray(read(index))
        check_shard(variable, index, block.shape, block.dtype.name)
        return block

    return read_checked_values


def check_function_returns_one_array(function: Callable[..., Any], num_results: int) -> None:
    """Raise an `EngineError` unless a function that is called with one layout returns one array."""
    if num_results != 1:
        raise EngineError(
            f"{getattr(function, '__name__', function)} returns {num_results} arrays",
            why="a layout belongs to one array",
            fix="split it into functions that return one array each, and pass each of them to call_with_layout",
        )


def make_unequal_initial_values_error(what: str, facts: Mapping[str, object] | None = None) -> EngineError:
    """Return the error for processes that would initialize one variable to different values."""
    return EngineError(
        what,
        facts=facts,
        why="each process computes initial values separately, and they must be equal",
        fix="create the same model with the same random seed in all processes",
    )


# -- random numbers


def check_random_mode(engine: str, draws: str, supported_modes: Sequence[str] = ("exact",)) -> None:
    """Raise an `EngineError` for a mode of drawing random numbers that an engine does not support."""
    if draws not in supported_modes:
        raise EngineError(
            f"draws={draws!r}: {engine} cannot draw random numbers this way",
            facts={"supported modes": ", ".join(map(repr, supported_modes))},
            why='each engine draws the framework\'s own numbers in the mode "exact", and few engines have other modes',
            fix='leave draws out, or pass draws="exact"',
        )


# -- cache of programs


def store_in_bounded_cache(cache: OrderedDict[Hashable, Value], key: Hashable, value: Value) -> Value:
    """Store a value in a cache and return it. Remove the oldest values of a full cache. The caller must hold a lock."""
    cache[key] = value
    while len(cache) > _MAX_REMEMBERED:
        cache.popitem(last=False)
    return value
