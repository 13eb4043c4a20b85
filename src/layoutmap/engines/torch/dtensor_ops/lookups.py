"""Look up rows and elements by index in tensors that may be sharded along the indexed axis.

Each device looks up the rows of its shard, with zeros for other rows, and the results are summed at once. DTensor does
the same, but its pending sums share one mask, and an index that no device has returns zero. Here that is an error, as
on one device. On an accelerator, the check is asynchronous, as torch's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F

from layoutmap.core.errors import EngineError
from layoutmap.engines.tested import check_names_exist
from layoutmap.engines.torch.dtensor_ops.gathered import compute_on_gathered_tensors
from layoutmap.engines.torch.dtensor_ops.shards import (
    find_axes_that_stay_sharded,
    make_placements,
    redistribute_to_local_shard,
)
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import make_dtensor_from_shards, reduce_if_partial
from layoutmap.engines.torch.specs import get_local, get_spec

check_names_exist("torch", (torch.ops.aten, "_assert_async"))


def _compute_embedding(function: Function, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Compute `embedding` without gathering a table with sharded rows."""
    given = {**dict(zip(_EMBEDDING, args, strict=False)), **kwargs}
    if given.get("max_norm") is not None:
        raise EngineError(
            "embedding does not support max_norm on a table that is on a mesh",
            facts={"max_norm": given["max_norm"]},
            why="max_norm changes rows of the table while it reads them, and each device would change "
            "different rows",
            fix="embed without max_norm, and clip the table after each step: torch.renorm(weight, 2, 0, max_norm)",
        )
    # The option needs row frequencies in the global batch, so gather.
    if given.get("scale_grad_by_freq", False):
        return compute_on_gathered_tensors(function, args, kwargs)
    rows, table = given["input"], given["weight"]
    if given.get("sparse", False) and not all(each.is_replicate() for each in table.placements):
        raise EngineError(
            "embedding does not support sparse=True on a table that is sharded",
            facts={"placements": table.placements},
            why="the gradient of a sharded table is a DTensor, which has no sparse form",
            fix="leave sparse out, or leave the table unsharded",
        )
    if rows.ndim == 0:
        return _compute_embedding(function, (), {**given, "input": rows.reshape(1)}).squeeze(0)
    if not is_axis_sharded(table, 0):
        return reduce_if_partial(function(**given))
    check_index_range(rows, table.shape[0], "embedding")
    mesh = table.device_mesh
    apart = find_axes_that_stay_sharded([rows], mesh, range(rows.ndim))
    along = find_axes_that_stay_sharded([table], mesh, (0, 1), excluded_mesh_dims=apart, uneven_axes=(0, 1))
    shard = redistribute_to_local_shard(table, mesh, along, apart)
    rows = redistribute_to_local_shard(rows, mesh, apart, ())
    here, is_here = convert_to_local_rows(
        rows, table.shape[0], mesh, [dim for dim, axis in along.items() if axis == 0]
    )
    found = F.embedding(here, shard).where(is_here[..., None], 0)
    if given.get("padding_idx") is not None:
        is_padding = rows == given["padding_idx"] % table.shape[0]
        found = torch.where(is_padding[..., None], found.detach(), found)  # the padding row gets no gradient
    columns = {dim: rows.ndim for dim, axis in along.items() if axis == 1}
    shape = (*given["input"].shape, table.shape[1])
    return sum_local_tensors_to_dtensor(
        found, mesh, {**apart, **columns}, along.keys() - columns.keys(), shape
    )


_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


def _compute_gather(function: Function, args: Args, kwargs: Kwargs) -> object:
    given = {**dict(zip(("input", "dim", "index"), args, strict=False)), **kwargs}
    x, index = given["input"], given["index"]
    if not is_axis_sharded(x, given["dim"]) or index.ndim != x.ndim:
        return function(*args, **kwargs)
    axis, mesh = given["dim"] % x.ndim, x.device_mesh
    check_index_range(index, x.shape[axis], "gather", axis)
    apart: dict[int, int] = {}
    if _copy_shape_with_size_1(x.shape, axis) == _copy_shape_with_size_1(index.shape, axis):
        apart = find_axes_that_stay_sharded([x, index], mesh, set(range(x.ndim)) - {axis})
    along = find_axes_that_stay_sharded([x], mesh, {axis}, excluded_mesh_dims=apart, uneven_axes={axis})
    shard = redistribute_to_local_shard(x, mesh, {**apart, **along}, apart)
    index = redistribute_to_local_shard(index, mesh, apart, ())
    here, is_here = convert_to_local_rows(index, x.shape[axis], mesh, along)
    return sum_local_tensors_to_dtensor(shard.gather(axis, here).where(is_here, 0), mesh, apart, along)


def convert_to_local_rows(
    index: torch.Tensor, size: int, mesh: DeviceMesh, mesh_dims: Collection[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert global row numbers to row numbers of this shard. Return them, and a mask of the rows in this shard.

    The indexed axis has `size` elements on all devices, and is sharded over the mesh dims at these positions.
    """
    numbers = list_local_indices_of_axis(size, mesh, mesh_dims, index.device)
    is_here = (index >= numbers[0]) & (index <= numbers[-1])
    # Replace an index outside of this shard by any valid one, because the mask removes its row later.
    return (index - numbers[0]).clamp(min=0).minimum(numbers[-1] - numbers[0]), is_here


def list_local_indices_of_axis(
    size: int, mesh: DeviceMesh, mesh_dims: Collection[int], device: torch.device
) -> torch.Tensor:
    """Return the global indices along an axis that this device's shard contains (see `convert_to_local_rows`)."""
    return redistribute_to_local_shard(
        torch.arange(size, device=device), mesh, dict.fromkeys(mesh_dims, 0), ()
    )


def sum_local_tensors_to_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    axes_by_mesh_dim: Mapping[int, int],
    summed_mesh_dims: Collection[int],
    shape: Sequence[int] | None = None,
) -> DTensor:
    """Sum local tensors over mesh dims, and return the sum as a DTensor that is sharded over other mesh dims."""
    placements = [
        Partial() if dim in summed_mesh_dims else placement
        for dim, placement in enumerate(make_placements(mesh, axes_by_mesh_dim))
    ]
    return reduce_if_partial(make_dtensor_from_shards(local, mesh, placements, shape))


def _compute_take_along_dim(function: Function, args: Args, kwargs: Kwargs) -> object:
    given = {**dict(zip(("input", "indices", "dim"), args, strict=False)), **kwargs}
    x, index, axis = given["input"], given["indices"], given.get("dim")
    if axis is None or x.ndim != index.ndim or not is_axis_sharded(x, axis):
        return function(*args, **kwargs)
    axis %= x.ndim
    shapes = _copy_shape_with_size_1(x.shape, axis), _copy_shape_with_size_1(index.shape, axis)
    shape = torch.broadcast_shapes(*shapes)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    x, index = (each.expand(*shape[:axis], each.shape[axis], *shape[axis + 1 :]) for each in (x, index))
    return _compute_gather(torch.gather, (x, axis, index.remainder(x.shape[axis])), {})


def _compute_one_hot(function: Function, args: Args, kwargs: Kwargs) -> object:
    given = {**dict(zip(("input", "num_classes"), args, strict=False)), **kwargs}
    if given.get("num_classes", -1) >= 0:
        check_index_range(given["input"], given["num_classes"], "one_hot")
    return function(*args, **kwargs)


def is_axis_sharded(tensor: torch.Tensor, axis: int) -> bool:
    """Return whether an axis of a DTensor is sharded over any mesh dim."""
    if not isinstance(tensor, DTensor) or tensor.ndim == 0:
        return False
    return any(placement.is_shard(axis % tensor.ndim) for placement in get_spec(tensor).placements)


def _copy_shape_with_size_1(shape: Sequence[int], axis: int) -> list[int]:
    return [*shape[:axis], 1, *shape[axis + 1 :]]


def check_index_range(indices: torch.Tensor, size: int, name: str, axis: int = 0) -> None:
    """Raise an IndexError for an index outside of an axis. On accelerators, the error may come later."""
    indices = reduce_if_partial(indices)
    local = get_local(indices) if isinstance(indices, DTensor) else indices
    what = f"{name}: index out of range: axis {axis} has size {size}"
    try:
        # An accelerator checks this asynchronously, so its error may be raised by a later operation.
        torch.ops.aten._assert_async.msg(((local >= 0) & (local < size)).all(), what)
    except RuntimeError as error:
        raise IndexError(what) from error


LOOKUPS: dict[object, Function] = {
    F.embedding: _compute_embedding,
    **dict.fromkeys((torch.gather, torch.Tensor.gather), _compute_gather),
    **dict.fromkeys((torch.take_along_dim, torch.Tensor.take_along_dim), _compute_take_along_dim),
    F.one_hot: _compute_one_hot,
}
