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


def check_device_memory(layout: Layout, framework: str, why: str, way: str = "") -> None:
    """Refuse a layout in host memory, for a framework that stores its arrays on devices.

    Args:
        layout: The layout.
        framework: The name of the framework.
        why: Where the framework stores arrays.
        way: What else the framework offers, as a part of the error's fix.

    Raises:
        EngineError: It is in host memory.
    """
    if layout.host_memory:
        raise EngineError(
            f"{framework} cannot store an array in {layout.host_memory}",
            facts={"layout": str(layout)},
            why=why,
            fix=f"leave memory out{way}, or use JAX",
        )


def make_no_devices_error(framework: str, kind: str, usable: str, why: str) -> EngineError:
    """Return the error for a device type without devices on this machine."""
    return EngineError(
        f"{framework} has no {kind} devices here",
        why=why,
        fix=f"use device_type={usable!r}, or install {framework} for {kind}",
    )


def explain_more_devices(framework: str, number: int) -> str:
    """Return the `fix` of an error about a mesh with more devices than the framework started with."""
    return (
        f"restart Python and call lm.simulate_devices({number}) before {framework} starts, for as many devices of the "
        "CPU; or make the mesh smaller"
    )


def check_simulated(framework: str, number: int, there: Sequence[str]) -> None:
    """Refuse a number of simulated devices other than that with which a framework has started."""
    if len(there) == number and there[0].startswith("CPU:"):  # CPU device numbers restart in each process
        return
    raise EngineError(
        f"{number} devices cannot be simulated: {framework} has started",
        facts={"devices": join_names(there)},
        why="their number is fixed when the framework starts, at the first array or query for devices",
        fix=f"restart Python, and call lm.simulate_devices({number}) right after the imports",
    )


def resolve_device_names(
    mesh: Mesh,
    device_names: Callable[[str | None], Sequence[str]],
    framework: str,
    fix_too_few: str,
    canonical_name: Callable[[str], str] = str.upper,
) -> tuple[str, ...]:
    """Return the names of a mesh's devices on this machine. An abstract mesh gets the first devices."""
    try:
        there = device_names(mesh.device_type)
    except EngineError as error:
        raise MeshError(error.what, facts={"mesh": str(mesh)}, why=error.why, fix=error.fix) from None
    if len(there) < mesh.size:
        raise MeshError(
            f"mesh of {mesh.size} devices, and {framework} has {len(there)}",
            facts={"mesh": str(mesh), "devices": join_names(there)},
            why="each position of the mesh needs a device",
            fix=fix_too_few,
        )
    if mesh.devices is None:
        return tuple(there[: mesh.size])
    names = tuple(map(canonical_name, mesh.devices))
    known = set(there)
    unknown = [given for given, name in zip(mesh.devices, names, strict=True) if name not in known]
    if unknown:
        raise MeshError(
            f"device {unknown[0]!r} does not exist",
            facts={"mesh": str(mesh), "missing": join_names(unknown), "devices": join_names(there)},
            why=f"{framework} has {len(there)} devices of that type here, named by their type and number",
            fix="name devices that exist, or pass devices=None",
        )
    return names


def check_auto_axes(mesh: Mesh, framework: str) -> None:
    """Refuse explicit axes, which only JAX has."""
    if mesh.explicit_dims:
        raise MeshError(
            f"mesh dim {mesh.explicit_dims[0]!r} has explicit axes, and {framework} does not support them",
            facts={"mesh": str(mesh)},
            why="axis types are a feature of JAX, where shardings are part of the types of arrays",
            fix="make the mesh without axis_types, or use JAX",
        )


def bind_devices(mesh: Mesh, names: Sequence[str], here: Iterable[int]) -> Mesh:
    """Return the mesh with its devices, or the same object if it knows them already."""
    local_device_ids = tuple(here)
    if mesh.devices is not None and local_device_ids == mesh.local_device_ids:
        return mesh
    return mesh.with_devices(names, local_device_ids=local_device_ids)


# -- element types


def make_element_type_error(framework: str, name: str, path: str) -> EngineError:
    """Return the error for a variable with an element type that sharded arrays cannot have."""
    return EngineError(
        f"{path}: {framework} cannot shard element type {name!r}",
        why="sharded arrays hold numbers and booleans",
        fix="leave the variable to its framework, or store numbers",
    )


def is_python_number(value: Any) -> bool:
    """Return whether a value is a Python number, or nested lists of such numbers."""
    if isinstance(value, list | tuple):
        return all(map(is_python_number, cast("list[Any]", value)))
    return isinstance(value, (int, float, complex)) and not isinstance(value, np.generic)


def make_no_numbers_error(framework: str, dtype: object) -> EngineError:
    """Return the error for values that are neither numbers nor booleans."""
    return EngineError(
        f"{framework} cannot shard an array of {dtype}",
        why="sharded arrays hold numbers and booleans",
        fix="pass an array of numbers",
    )


# -- values


def check_initializers(
    assignments: Mapping[str, Assignment], initializers: Mapping[str, Initializer]
) -> None:
    """Raise an `EngineError` unless each variable that is to be created has an initializer."""
    missing = [key for key in assignments if key not in initializers]
    if missing:
        raise EngineError(
            f"{missing[0]}: there is no initializer",
            facts={"missing": ", ".join(missing[:10])},
            why="each new variable needs one",
            fix="pass an Initializer for each assignment",
        )


def check_initial_value(variable: VariableSpec, shape: Sequence[int], dtype: str) -> None:
    """Raise an `EngineError` unless an initial value has the shape and element type of its variable."""
    if tuple(shape) != variable.shape or dtype != variable.dtype:
        raise EngineError(
            f"{variable.path}: its initializer returns another shape or element type",
            facts={
                "variable": f"{variable.dtype}{list(variable.shape)}",
                "returned": f"{dtype}{list(shape)}",
            },
            why="the initial value of a variable has its shape and element type",
            fix="make the initializer return that shape and element type",
        )


def check_shard(variable: VariableSpec, index: Index, shape: Sequence[int], dtype: str) -> None:
    """Raise an `EngineError` unless a shard has the shape of its index and the variable's element type."""
    if tuple(shape) != compute_block_shape(index) or dtype != variable.dtype:
        raise EngineError(
            f"{variable.path}: a shard has another shape or element type than planned",
            facts={
                "index": index,
                "shard": f"{variable.dtype}{list(compute_block_shape(index))}",
                "read": f"{dtype}{list(shape)}",
            },
            why="a shard has the shape of its index and the variable's element type",
            fix="return exactly the values at the index",
        )


def wrap_reader(variable: VariableSpec, read: BlockReader) -> BlockReader:
    """Return a reader of a variable's shards that checks each shard it reads."""

    def read_checked(index: Index) -> NumpyArray:
        block = np.asarray(read(index))
        check_shard(variable, index, block.shape, block.dtype.name)
        return block

    return read_checked


def check_one_result(function: Callable[..., Any], num_results: int) -> None:
    """Raise an `EngineError` unless a function that is called with one layout returns one array."""
    if num_results != 1:
        raise EngineError(
            f"{getattr(function, '__name__', function)} returns {num_results} arrays",
            why="a layout belongs to one array",
            fix="call it once for each array, or pass a function that returns one of them",
        )


def make_difference_error(what: str, facts: Mapping[str, object] | None = None) -> EngineError:
    """Return the error for processes that would initialize one variable to different values."""
    return EngineError(
        what,
        facts=facts,
        why="each process computes initial values separately, and they must be equal",
        fix="create the same model in all processes, and set the same seed before",
    )


# -- random numbers


def check_draws(engine: str, draws: str, ways: Sequence[str] = ("exact",)) -> None:
    """Refuse a way to draw random numbers that an engine does not know."""
    if draws not in ways:
        raise EngineError(
            f"draws={draws!r}: {engine} cannot draw random numbers this way",
            facts={"ways": ", ".join(map(repr, ways))},
            why='"exact" draws the numbers of the framework; an engine may offer other ways, for many devices',
            fix='leave draws out, or draws="exact"',
        )


# -- cache of programs


def store_in_cache(cache: OrderedDict[Hashable, Value], key: Hashable, value: Value) -> Value:
    """Store a value in a cache, and remove the oldest ones if it is full. The caller must hold the lock."""
    cache[key] = value
    while len(cache) > _MAX_REMEMBERED:
        cache.popitem(last=False)
    return value
