"""Changes in place of DTensors and of their slices.

Torch's slices are views: what changes one changes the tensor, and the other way round. DTensor's slices along a sharded
axis are copies, and such a change is lost without a word. Here each of them knows what it is a slice of: a change of it
is written there, and a change there is written to the slices that are still in use. Where a slice is a view, its
gradient goes through a view again, of a gradient that has the layout of the tensor.

This is so for what a call of a model computes, where each function is seen; `memories` has the others.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from layoutmap.core.errors import EngineError
from layoutmap.engines.torch.dtensor_ops.gathered import name_of, on_gathered, warn_of_gathering
from layoutmap.engines.torch.dtensor_ops.memories import leave_to_calls, once
from layoutmap.engines.torch.placing import (
    attainable_placements,
    everywhere,
    full_tensor,
    like,
    on_mesh,
    placed,
    reduced,
)
from layoutmap.engines.torch.private import (
    base_of,
    dtensor,
    local_of,
    plainly,
    spec_of,
    storage_key,
    tree_leaves,
    tree_map,
)
from layoutmap.engines.torch.unseen import hide, is_unseen, memory_of

_SLICE = "_layoutmap_slice"
copies: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The slices in use that are copies, by their ids."""


class _Slice(NamedTuple):  # why: decisions/0106
    """The tensor, and its indices, that a copy is a slice of.

    Attributes:
        source: The tensor, which is no such copy.
        memory: Where that is.
        view: Takes the slice of a tensor like it.
        is_tracked: Whether gradients pass between them.
    """

    source: Any
    memory: torch.UntypedStorage
    view: Callable[[Any], Any]
    is_tracked: bool

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a slice is a slice of nothing."""

    def __reduce__(self) -> Any:
        return torch.Size, ()  # which all of torch's readers know, and we pass over


def _slice_of(tensor: Any) -> _Slice | None:
    """The slice that a tensor is a copy of, if that was noted."""
    found = getattr(tensor, _SLICE, None)
    return found if isinstance(found, _Slice) else None


@plainly
def note_copies(function: Callable[..., Any], args: Any, kwargs: Any, results: Any) -> Any:
    """The results of a function, of which those are noted that are copies here, and views on one device."""
    source = args[0] if args else kwargs.get("input")
    if not isinstance(source, DTensor):
        return results
    of = _slice_of(source)
    # What is most frequent, before what takes longer.
    if of is None and type(results) is DTensor and _is_same_memory(results, source):
        return results
    memory, named = memory_of(source), dict(kwargs)
    if not args:
        del named["input"]
    rest, named = tree_map(_off_mesh, (args[1:], named))

    def view(number: int, tensor: Any) -> Any:
        return tree_leaves(function(tensor, *rest, **named))[number]

    numbers = itertools.count()

    def noted(each: Any) -> Any:
        take = functools.partial(view, next(numbers))
        if not isinstance(each, DTensor) or each is source or (of is None and memory_of(each) is memory):
            return each
        if not _is_view(function, source, take, rest):
            return each
        copy = _Copy.apply(each).requires_grad_(each.requires_grad)  # also a view that is taken under no_grad
        is_tracked = torch.is_grad_enabled() and function not in _DETACHING
        found = _Slice(source, memory, take, is_tracked)
        if of is not None:
            found = of._replace(view=_then(of.view, take), is_tracked=is_tracked and of.is_tracked)
        setattr(copy, _SLICE, found)
        if is_unseen(source):
            hide(copy)
        leave_to_calls(copy)
        copies[id(copy)] = copy
        return copy

    return tree_map(noted, results)


def _is_same_memory(view: Any, source: Any) -> bool:
    return spec_of(view).placements == spec_of(source).placements or memory_of(view) is memory_of(source)


class _Copy(torch.autograd.Function):
    """The same tensor, and for autograd no view: it would have gradients of changes pass through views of gradients."""

    @staticmethod
    def forward(ctx: Any, view: Any) -> Any:
        return dtensor(local_of(view), spec_of(view))

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return upstream[0]


def _off_mesh(value: Any) -> Any:
    """An argument of a view that any tensor like the first one can be passed with: numbers, or another's shape."""
    if not isinstance(value, DTensor) or value.dtype == torch.bool:
        return value
    return torch.empty(value.shape, device="meta") if value.ndim else int(full_tensor(value))


def _is_view(function: Callable[..., Any], source: Any, take: Callable[[Any], Any], rest: Any) -> bool:
    """Whether the result of a function is a view on one device."""
    if function is torch.Tensor.__getitem__:
        parts = rest[0] if isinstance(rest[0], tuple) else rest
        return all(part is None or part is ... or type(part) in (int, slice) for part in parts)
    if function not in _MAYBE:
        return True
    like_source = torch.empty_strided(source.shape, source.stride(), device="meta")
    return storage_key(take(like_source)) == storage_key(like_source)


def _then(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda tensor: second(first(tensor))


@plainly
def follow(function: Callable[..., Any], changed: Any) -> None:
    """Write what a function changed in place to what it is a slice of, and to the slices of that."""
    for target in tree_leaves(changed):
        if not isinstance(target, DTensor):
            continue
        of = _slice_of(target)
        memory = memory_of(target) if of is None else of.memory
        if of is not None:
            _write_back(name_of(function), target, of)
            keep_gradient(of.source)
        for each in list(copies.values()):
            its: _Slice = getattr(each, _SLICE)
            if each is not target and its.memory is memory:
                is_tracked = its.is_tracked and not (each.is_leaf and each.requires_grad)
                with torch.set_grad_enabled(torch.is_grad_enabled() and is_tracked):
                    strides = each.stride()
                    once(_written(each, target), strides).copy_(once(its.view(its.source), strides))


def _write_back(name: str, target: Any, of: _Slice) -> None:
    """Change what a tensor is a slice of, as the slice was changed."""
    source = of.source
    if target.dtype != source.dtype or 0 in source.stride():
        raise EngineError(
            f"{name}: a slice along a sharded axis, changed in place",
            facts={"type": target.dtype, "type of the tensor": source.dtype, "its strides": source.stride()},
            why="it is a copy, of bits or of an expanded tensor, and cannot be written back",
            fix="clone the tensor first, and keep its type: x = x.clone()",
        )
    warn_of_gathering(f"{name} of a slice", "along a sharded axis it is a copy, and is written back")
    with torch.set_grad_enabled(torch.is_grad_enabled() and of.is_tracked):
        values = full_tensor(source).clone()
        part = of.view(values)
        once(part, part.stride()).copy_(once(full_tensor(target), part.stride()))
        _written(source, target).copy_(like(values, source))


def _written(tensor: Any, changed: Any) -> Any:
    """A tensor to be written to as another one was: autograd sees it, or not."""
    return tensor.data if is_unseen(changed) else tensor


def has_slices(tensor: Any) -> bool:
    """Whether a call has taken slices of a tensor that are copies, which find their values by its shape."""
    memory = memory_of(tensor)
    return any(getattr(each, _SLICE).memory is memory for each in list(copies.values()))


def count_change(tensor: Any) -> None:
    """Have autograd see that what a call took a slice of was changed, by a change of the slice after it."""
    of = _slice_of(base_of(tensor))
    if of is not None and not of.source.is_inference() and not is_unseen(tensor):
        torch.autograd.graph.increment_version(of.source)


def keep_gradient(changed: Any) -> None:
    """Have the gradient of a DTensor of which a view was changed come in the layout in which that was a view."""
    base = base_of(changed)
    if isinstance(base, DTensor) and base.requires_grad and not base.is_leaf:
        mesh, placements = base.device_mesh, attainable_placements(base)

        def place(gradient: Any) -> Any:
            return placed(reduced(on_mesh(gradient, mesh)), placements)  # torch may have made plain zeros

        base.register_hook(place)


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
    *("permute", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "expand", "expand_as"),
    *("split_with_sizes", "broadcast_to", "as_strided", "detach"),
)
_HOMES = (torch.Tensor, torch)


def _named(*names: str) -> frozenset[Any]:
    return frozenset(getattr(home, name) for home in _HOMES for name in names if hasattr(home, name))


_MAYBE = _named("reshape", "reshape_as", "flatten", "ravel")
_PROPERTIES = {name: getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data")}
_DETACHING = frozenset((torch.Tensor.detach, torch.detach, _PROPERTIES["data"]))
VIEWS = _named(*_NAMES) | _MAYBE | frozenset(_PROPERTIES.values())
