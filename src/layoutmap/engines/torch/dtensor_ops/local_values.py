"""Tensors that a program takes out of DTensors, by `to_local` or `full_tensor`, tracked through its functions.

Inside of a model's call, a plain tensor that meets a DTensor counts as the global tensor, the same on each device. A
shard is not, so each tensor that is computed from one has a mark with the mesh dims over which devices differ:

- beside tensors that all devices have in full, each device computes with its own, and the result is marked, too
- beside any other DTensor, or as an output of the model, it is refused
- the gradient of a tensor that all devices have, and that is computed with a shard, is a sum over these dims
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from layoutmap.core.errors import EngineError
from layoutmap.engines.torch.dtensor_ops.gathered import changes_in_place, name_of
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.trees import tree_leaves

_MARK = "_layoutmap_local"  # of a tensor


class Origin:
    """A DTensor of which each device's tensor was taken, and the placements in which its gradient comes back.

    Args:
        placements: The placements of the DTensor.
        of_gradient: The placements that the program has named; `None`: they follow from what is computed.
    """

    def __init__(
        self, placements: Sequence[Placement], of_gradient: Sequence[Placement] | None = None
    ) -> None:
        self.placements = tuple(placements)
        self._of_gradient = None if of_gradient is None else tuple(of_gradient)
        self.summed = set[int]()

    def placements_of_gradient(self) -> tuple[Placement, ...]:
        """Return the placements of the gradient, once the forward pass is done."""
        if self._of_gradient is not None:
            return self._of_gradient
        return tuple(
            Replicate()
            if each.is_partial()
            else Partial()
            if each.is_replicate() and dim in self.summed
            else each
            for dim, each in enumerate(self.placements)
        )


class _Mark:
    """The mark of a tensor: the mesh dims over which devices differ, and the DTensors that it is computed from."""

    def __init__(self, varies: frozenset[int], origins: frozenset[Origin]) -> None:
        self.varies, self.origins = varies, origins
        for origin in origins:
            origin.summed |= varies
        marks.add(self)


marks: weakref.WeakSet[_Mark] = weakref.WeakSet()
"""The marks in use: where there is none, no function looks for one."""


def mark_local(local: torch.Tensor, origin: Origin, placements: Sequence[Placement]) -> torch.Tensor:
    """Mark what each device holds of a DTensor in some placements."""
    varies = frozenset(dim for dim, each in enumerate(placements) if not each.is_replicate())
    setattr(local, _MARK, _Mark(varies, frozenset((origin,))))
    return local


def note_parts(local: torch.Tensor, placements: Sequence[Placement]) -> None:
    """Note that devices use what they have as shards or summands, so that their gradients differ."""
    mark = _mark_of(local)
    if mark is not None:
        _Mark(frozenset(d for d, each in enumerate(placements) if not each.is_replicate()), mark.origins)


def _mark_of(value: object) -> _Mark | None:
    return getattr(value, _MARK, None) if isinstance(value, torch.Tensor) else None


def _marks_in(values: object) -> list[_Mark]:
    return [mark for each in tree_leaves(values) if (mark := _mark_of(each)) is not None]


def is_marked(values: object) -> bool:
    """Whether there is a tensor among some values that was taken out of a DTensor."""
    return bool(marks) and bool(_marks_in(values))


def is_shard(values: object) -> bool:
    """Whether there is a tensor among some values that differs between devices."""
    return bool(marks) and any(mark.varies for mark in _marks_in(values))


def mark_results(function: Function, args: Args, kwargs: Kwargs, result: Any) -> Any:
    """Mark the results of a function that was computed by each device with its own tensors; returns them."""
    found = _marks_in((args, kwargs))
    mark = _Mark(
        frozenset[int]().union(*(each.varies for each in found)),
        frozenset[Origin]().union(*(each.origins for each in found)),
    )
    for each in tree_leaves((result, args[:1] if changes_in_place(function) else (), kwargs.get("out"))):
        if isinstance(each, torch.Tensor) and not isinstance(each, DTensor):
            setattr(each, _MARK, mark)
    return result


def refuse_mixed(function: Function, args: Args, kwargs: Kwargs, changed: Sequence[torch.Tensor]) -> None:
    """Refuse a shard beside a DTensor of which no device, or not each, has all.

    Raises:
        EngineError: There is one, or a DTensor is changed.
    """
    for each in tree_leaves((args, kwargs)):
        if isinstance(each, DTensor) and (
            any(each is other for other in changed) or not all(p.is_replicate() for p in each.placements)
        ):
            raise _error(f"{name_of(function)}: a shard, computed with a tensor on the mesh", each)


def refuse_shard(what: str, value: object) -> None:
    """Refuse a tensor that differs between devices where the global tensor is needed.

    Raises:
        EngineError: It differs.
    """
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and is_shard(value):
        raise _error(f"{what}: a shard in the place of the global tensor", value)


def _error(what: str, tensor: torch.Tensor) -> EngineError:
    layout = {"layout": str(tensor.placements)} if isinstance(tensor, DTensor) else {}
    return EngineError(
        what,
        facts={"shape": tuple(tensor.shape), **layout},
        why="to_local() gives each device its own part, and here it would count as all of the tensor",
        fix="use the tensor itself or tensor.full_tensor(), or put the parts together before: "
        "DTensor.from_local(part, mesh, placements)",
    )
