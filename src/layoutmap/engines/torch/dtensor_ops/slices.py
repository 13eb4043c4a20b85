"""Changes in place of parts of DTensors.

Torch's slices are views: what changes them changes the tensor. DTensor's slices along a sharded axis are copies,
and a change of one is lost without a word. Here `x[...] = y` is made right, and any other such change is refused. Where
a slice is a view, its gradient goes through a view again, of a gradient that has the layout of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.core.errors import EngineError
from layoutmap.engines.torch.dtensor_ops.conversions import everywhere, placed, reduced
from layoutmap.engines.torch.dtensor_ops.gathered import name_of, on_gathered
from layoutmap.engines.torch.private import base_of, tree_leaves

_COPY = "_layoutmap_copy_of_slice"


def check_no_copy(function: Callable[..., Any], target: Any) -> None:
    """Refuse to change a slice that is a copy.

    Raises:
        EngineError: It is one.
    """
    if getattr(target, _COPY, False):
        raise EngineError(
            f"{name_of(function)}: a slice along a sharded axis, changed in place",
            facts={"shape": tuple(target.shape)},
            why="such a slice is a copy, so the tensor that it was taken from would not change",
            fix="assign to the tensor itself: x[...] = x[...] + values",
        )


def mark_copies(tensor: Any, views: Any) -> None:
    """Mark those of the views of a DTensor that became copies on the way."""
    if not isinstance(tensor, DTensor):
        return
    if type(views) is DTensor and views.placements == tensor.placements and not hasattr(tensor, _COPY):
        return
    sharded = _num_sharded(tensor)
    for each in tree_leaves(views):
        if isinstance(each, DTensor) and (getattr(tensor, _COPY, False) or _num_sharded(each) < sharded):
            setattr(each, _COPY, True)


def _num_sharded(tensor: Any) -> int:
    return sum(not placement.is_replicate() for placement in tensor.placements)


def keep_gradient(changed: Any) -> None:
    """Have the gradient of a DTensor of which a view was changed come in the layout in which that was a view."""
    base = base_of(changed)
    if isinstance(base, DTensor) and base.requires_grad and not base.is_leaf:
        placements = reduced(base.detach()).placements
        base.register_hook(lambda gradient: placed(reduced(gradient), placements))


def assign(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`x[index] = value`."""
    target, index, value = args
    if isinstance(target, DTensor) and _is_replicated_where_indexed(target, index):
        on_mesh = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        with suppress(NotImplementedError):
            function(target, index, everywhere(value, target.device_mesh) if on_mesh else value)
            keep_gradient(target)
            return None
    return on_gathered(function, args, kwargs)


def _is_replicated_where_indexed(target: Any, index: Any) -> bool:
    """Whether an index of slices and numbers takes all of each sharded axis."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(not (part is None or part is ... or isinstance(part, (int, slice))) for part in parts):
        return False
    named = sum(part is not None and part is not ... for part in parts)
    if ... not in parts:
        parts.append(...)
    axis, touched = 0, set()
    for part in parts:
        if part is ...:
            axis += target.ndim - named
        elif part is not None:
            if part != slice(None):
                touched.add(axis)
            axis += 1
    return all(p.is_replicate() or (p.is_shard() and p.dim not in touched) for p in target.placements)


_NAMES = (
    *("__getitem__", "narrow", "select", "split", "chunk", "unbind", "tensor_split", "diagonal", "unfold"),
    *("hsplit", "vsplit", "dsplit", "view", "view_as", "unflatten", "squeeze", "unsqueeze", "transpose"),
    *(
        "permute",
        "t",
        "movedim",
        "moveaxis",
        "swapaxes",
        "swapdims",
        "expand",
        "expand_as",
        "split_with_sizes",
    ),
)

VIEWS = frozenset(
    getattr(home, name) for home in (torch.Tensor, torch) for name in _NAMES if hasattr(home, name)
)
