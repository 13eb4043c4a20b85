"""Functions along some axes of a DTensor: each device computes its own pieces, with those axes whole.

DTensor has a rule for them, but gradients that are no numbers, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from layoutmap.pytorch.gathered import on_whole
from layoutmap.pytorch.pieces import cut_axis, divides, join, piece

__all__ = ["ALONG"]


def _along(place: int) -> Callable[..., Any]:
    """How to compute a function that says at a place, or as `dim`, along which axes it works."""

    def compute(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        values = dict(kwargs)
        x = values.pop("input") if "input" in values else args[0]
        dims = args[place] if len(args) > place else values.get("dim", values.get("axis"))
        dims = {dims} if isinstance(dims, int) else set(dims or ())
        if not dims or not hasattr(x, "placements"):
            return on_whole(function, args, kwargs)
        dims = {dim % x.ndim for dim in dims}
        mesh = x.device_mesh
        kept: dict[int, int] = {}
        for dim in range(mesh.ndim):
            axis = cut_axis(x, dim)
            if axis is not None and axis not in dims:
                over = [other for other, cut in kept.items() if cut == axis] + [dim]
                if divides(x, axis, over, mesh):
                    kept[dim] = axis
        local = function(
            piece(x, mesh, [Shard(kept[i]) if i in kept else Replicate() for i in range(mesh.ndim)], kept),
            *args[1 if args else 0 :],
            **values,
        )

        def joined(each: Any) -> Any:
            gone = sorted(dims) if each.ndim < x.ndim else []
            axes = {i: axis - sum(dim < axis for dim in gone) for i, axis in kept.items()}
            return join(each, mesh, [Shard(axes[i]) if i in axes else Replicate() for i in range(mesh.ndim)])

        if isinstance(local, torch.Tensor):
            return joined(local)
        return type(local)([joined(each) for each in local])

    return compute


_PLACES = {
    **dict.fromkeys(("amax", "amin", "prod", "cumprod", "cummax", "cummin"), 1),
    "quantile": 2,
}
ALONG: dict[Any, Callable[..., Any]] = {
    getattr(home, name): _along(place) for home in (torch.Tensor, torch) for name, place in _PLACES.items()
}
