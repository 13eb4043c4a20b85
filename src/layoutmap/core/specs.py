"""Read, check, and format sharding specs: a mesh dim, several, or `UNSHARDED` for each axis of a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from layoutmap.core import tf_format
from layoutmap.core.arguments import convert_to_builtin_str, describe_type
from layoutmap.core.errors import LayoutError
from layoutmap.core.mesh import UNSHARDED, Mesh

ShardingSpec = str | tuple[str, ...]
"""The sharding of one axis: a mesh dim, several (major to minor), or `UNSHARDED`."""

Specs = tuple[ShardingSpec | None, ...]
"""The sharding of all axes, with `None` for `UNSHARDED`."""


# Hybrid FSDP shards the rows of a batch over two dims, so `batch_dim` accepts several dims (decisions/0202).
BatchDim = ShardingSpec
"""The mesh dim over which the first axis of batches is sharded, or several, major to minor."""


def list_batch_dims(batch_dim: BatchDim | None) -> tuple[str, ...]:
    """Return the mesh dims over which batches are sharded, or an empty tuple for replicated batches."""
    return () if batch_dim is None else list_spec_dims(batch_dim)


def parse_batch_dim(text: str) -> BatchDim:
    """Return the batch dims in a command-line option: a str for one, such as `data`, a tuple for `replica,fsdp`."""
    dims = tuple(part.strip() for part in text.split(","))
    return dims[0] if len(dims) == 1 else dims


def count_batch_shards(batch_dim: BatchDim | None, mesh: Mesh) -> int:
    """Return the number of shards into which the mesh dims split a batch, or 1 for replicated batches."""
    return math.prod(map(mesh.dim_size, list_batch_dims(batch_dim)))


def format_batch_dim(batch_dim: BatchDim) -> str:
    """Return the mesh dims over which batches are sharded as text: `batch`, or `replica and fsdp`."""
    return " and ".join(list_spec_dims(batch_dim))


def normalize_specs(specs: Any, mesh: Mesh) -> tuple[ShardingSpec, ...]:
    """Return the sharding specs of a layout in one form: a dim, a tuple of several, or `UNSHARDED` for each axis.

    Raises:
        LayoutError: The value is not a list of specs, a spec is not a dim of the mesh, or a dim is used twice.
    """
    _check_specs_are_list_like(specs, mesh)
    specs = tuple(_normalize_spec(spec, mesh) for spec in specs)
    used: set[str] = set()
    known = {UNSHARDED, *mesh.dim_names}
    for axis, spec in enumerate(specs):
        for dim in list_spec_dims(spec):
            if dim == UNSHARDED or dim in used or dim not in known:
                raise _make_spec_dim_error(dim, used, specs, axis, mesh)
            used.add(dim)
    return specs


def replace_unsharded_by_none(specs: Sequence[ShardingSpec]) -> tuple[ShardingSpec | None, ...]:
    """Return sharding specs with None for each `UNSHARDED`, which is how users write them."""
    return tuple(None if spec == UNSHARDED else spec for spec in specs)


def format_specs(specs: Sequence[ShardingSpec]) -> str:
    """Return sharding specs as text for messages: `(unsharded, model)`, `((batch, model), unsharded)`."""
    shown = [s if isinstance(s, str) else f"({', '.join(s)})" for s in specs]
    return f"({', '.join(shown)}{',' if len(shown) == 1 else ''})"


def list_spec_dims(spec: ShardingSpec) -> tuple[str, ...]:
    """Return the mesh dims of a spec, major to minor, or an empty tuple for `UNSHARDED`."""
    if isinstance(spec, tuple):
        return spec
    return () if spec == UNSHARDED else (spec,)


def make_spec(dims: tuple[str, ...]) -> ShardingSpec:
    """Return the spec of an axis that is sharded over these mesh dims, or `UNSHARDED` if there are none."""
    return dims[0] if len(dims) == 1 else dims or UNSHARDED


def _format_dims_fix(mesh: Mesh) -> str:
    """Return the fix for a message: to use one of the mesh's dims, with their names."""
    return f"use one of {', '.join(map(repr, (*mesh.dim_names, UNSHARDED)))}"


def _check_specs_are_list_like(specs: Any, mesh: Mesh) -> None:
    """Raise a `LayoutError` for a value without one item per axis in order: a set, a dict, a text, or a number."""
    if isinstance(specs, str):
        what, why = "are one text", "a layout has one sharding spec for each axis"
        fix = f"write a list: [{specs!r}]"
    elif isinstance(specs, (Set, Mapping)):
        what, why = (
            "have no order",
            f"they are {describe_type(specs)}, but each spec is for the axis at its position",
        )
        fix = "write a list or a tuple"
    elif not isinstance(specs, Iterable):
        what, why = "are no list", f"they are {describe_type(specs)}"
        fix = "write one spec for each axis, as in [None, None], or use Layout.replicated(mesh, rank)"
    else:
        return
    raise LayoutError(f"sharding specs {specs!r} {what}", facts={"mesh": str(mesh)}, why=why, fix=fix)


def _normalize_spec(spec: Any, mesh: Mesh) -> ShardingSpec:
    if spec is None:
        return UNSHARDED
    if isinstance(spec, str):
        return convert_to_builtin_str(spec)
    names: tuple[Any, ...] = tuple(spec) if isinstance(spec, (tuple, list)) else (None,)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if all(isinstance(dim, str) for dim in names):
        names = tuple(map(convert_to_builtin_str, names))
        return make_spec(names)
    raise LayoutError(
        f"sharding spec {spec!r} cannot be read",
        facts={"mesh": str(mesh)},
        why="a spec is a mesh dim, a tuple of mesh dims, or UNSHARDED",
        fix=_format_dims_fix(mesh),
    )


def _make_spec_dim_error(
    dim: str, used: set[str], specs: tuple[ShardingSpec, ...], axis: int, mesh: Mesh
) -> LayoutError:
    """Return, but do not raise, the error for a spec with an unknown, reserved, or repeated mesh dim."""
    why, fix = f"the mesh has no dim {dim!r}", _format_dims_fix(mesh)
    if dim == tf_format.MATCH:
        why = "'match' is reserved for TensorFlow and shards nothing"
    elif dim == UNSHARDED:  # as in ("x", "unsharded"); a spec that is only UNSHARDED has no dims
        why = "an axis that is sharded over a mesh dim is not unsharded"
        fix = f"name mesh dims only, or {UNSHARDED!r} alone"
    elif dim in used:
        why = f"mesh dim {dim!r} is used twice, and one dim can shard only one axis"
        fix = f"leave axis {axis} unsharded, or shard it over another dim"
    return LayoutError(
        f"layout {format_specs(specs)}: spec {dim!r} of axis {axis} is not allowed",
        facts={"mesh": str(mesh)},
        why=why,
        fix=fix,
    )
