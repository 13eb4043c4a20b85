"""Changes in place of DTensors and of their slices.

Torch's slices are views: what changes one changes the tensor, and the other way round. DTensor's slices along a sharded
axis are copies, and such a change is lost without a word. Here each of them knows what it is a slice of: a change of it
is written there, and a change there is written to the slices that are still in use. Where a slice is a view, its
gradient goes through a view again, of a gradient that has the layout of the tensor.

Outside of calls no function is seen. There torch tells which operator has changed a tensor, and autograd of what that
is a view; a slice whose tensor was changed meanwhile has former values, and a change of it is refused.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from layoutmap.core.errors import EngineError
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.dtensor_ops.conversions import everywhere, full_tensor, like, placed, reduced
from layoutmap.engines.torch.dtensor_ops.gathered import name_of, on_gathered, warn_of_gathering
from layoutmap.engines.torch.placing import attainable_placements
from layoutmap.engines.torch.private import (
    base_of,
    dtensor,
    local_of,
    plainly,
    spec_of,
    storage_key,
    tree_leaves,
    tree_map,
    version_of,
    view_again,
)

_SLICE = "_layoutmap_slice"
_CHANGES = "_layoutmap_changes"  # of a memory: which part was changed at each version, outside of calls
_VERSION = "_layoutmap_version"  # of the memory of a copy: the version of the tensor whose values it has
copies: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The slices in use that are copies, by their ids."""
_here = threading.local()


class _Slice(NamedTuple):
    """What a copy is a slice of.

    Attributes:
        source: The tensor, which is no such copy.
        memory: Where that is.
        view: Takes the slice of a tensor like it.
        is_tracked: Whether gradients pass between them.
        is_view: Whether it is a view for autograd, which counts the changes of both together.
    """

    source: Any
    memory: torch.UntypedStorage
    view: Callable[[Any], Any]
    is_tracked: bool
    is_view: bool

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a slice is a slice of nothing."""

    def __reduce__(self) -> Any:
        return torch.Size, ()  # which all of torch's readers know, and we pass over


def _slice_of(tensor: Any) -> _Slice | None:
    """What a tensor is a slice of, and a copy of, if that was noted."""
    found = getattr(tensor, _SLICE, None)
    return found if isinstance(found, _Slice) else None


@plainly
def note_copies(function: Callable[..., Any], args: Any, kwargs: Any, results: Any) -> Any:
    """The results of a function, of which those are noted that are copies here, and views on one device."""
    named = dict(kwargs)
    source, *rest = args or [named.pop("input", None)]
    of = _slice_of(source)
    if not isinstance(source, DTensor):
        return results
    if of is None and type(results) is DTensor and results.placements == source.placements:
        return results
    memory = _memory(source)
    rest, named = tree_map(_off_mesh, (rest, named))

    def view(number: int, tensor: Any) -> Any:
        return tree_leaves(function(tensor, *rest, **named))[number]

    numbers = itertools.count()

    def noted(each: Any) -> Any:
        take = functools.partial(view, next(numbers))
        if not isinstance(each, DTensor) or each is source or (of is None and _memory(each) is memory):
            return each
        if not _is_view(function, source, take, rest):
            return each
        copy = _Copy.apply(each).requires_grad_(each.requires_grad)  # also a view that is taken under no_grad
        is_tracked = torch.is_grad_enabled() and function not in _DETACHING
        found = _Slice(source, memory, take, is_tracked, is_view=False)
        if of is not None:
            found = of._replace(view=_then(of.view, take), is_tracked=is_tracked and of.is_tracked)
        setattr(copy, _SLICE, found)
        copies[id(copy)] = copy
        return copy

    return tree_map(noted, results)


class _Copy(torch.autograd.Function):
    """The same tensor, and for autograd no view: it would have gradients of changes pass through views of gradients."""

    @staticmethod
    def forward(ctx: Any, view: Any) -> Any:
        return dtensor(local_of(view), spec_of(view))

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return upstream[0]


def _memory(tensor: Any) -> torch.UntypedStorage:
    """Where a DTensor is on this device, or on the first; torch has one object of it as long as it is there."""
    return simulation.plain(local_of(tensor)).untyped_storage()


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


@contextmanager
def following() -> Generator[None]:
    """While open on this thread, `follow` is called after each change of a tensor, but for those of autograd's own."""
    before = getattr(_here, "follow", False)
    _here.follow = True
    try:
        yield
    finally:
        _here.follow = before


@plainly
def follow(function: Callable[..., Any], changed: Any) -> None:
    """Write what a function changed in place to what it is a slice of, and to the slices of that."""
    for target in tree_leaves(changed):
        if not isinstance(target, DTensor):
            continue
        of = _slice_of(target)
        memory = _memory(target) if of is None else of.memory
        if of is not None:
            _write_back(name_of(function), target, of)
            keep_gradient(of.source)
            setattr(_memory(target), _VERSION, version_of(of.source))
        for each in list(copies.values()):
            its: _Slice = getattr(each, _SLICE)
            if each is not target and its.memory is memory:
                is_tracked = its.is_tracked and not (each.is_leaf and each.requires_grad)
                with torch.set_grad_enabled(torch.is_grad_enabled() and is_tracked):
                    each.copy_(its.view(its.source))
                setattr(_memory(each), _VERSION, version_of(its.source))


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
        of.view(values).copy_(full_tensor(target))
        source.copy_(like(values, source))


def may_be_slice(tensor: Any) -> bool:
    """Whether a DTensor is a view of another, or was noted to be a slice; quick to ask."""
    return base_of(tensor) is not tensor or hasattr(tensor, _SLICE)


@plainly
@torch.no_grad()
def write_to_base(op: Any, changed: Any) -> None:
    """Write what an operator changed to what it is a view of on one device, if it is a copy of that here.

    That is what autograd knows, or, where no call is open that will `follow`, what was noted.
    """
    counts: Counter[int] = Counter()
    for target in tree_leaves(changed):
        of = _known_to_autograd(target)
        if of is not None:
            _write_back_alone(op, target, of, counts)  # that changes the base, of which the same is asked
            continue
        base = base_of(target)
        of = _slice_of(base)
        if of is not None and not getattr(_here, "follow", False):
            _write_back_alone(op, base, of, counts)


def _write_back_alone(op: Any, target: Any, of: _Slice, counts: Counter[int]) -> None:
    """Change what a tensor is a slice of, as the slice was changed, where slices do not follow changes of it.

    Args:
        op: The operator.
        target: The slice.
        of: What it is a slice of.
        counts: How often the operator has changed each tensor; torch counts that when it is done.
    """
    name, source, box = f"torch.ops.{op.namespace}.{op.overloadpacket.__name__}", of.source, _box(of)
    version = version_of(source) + counts[id(source)]
    taken = getattr(_memory(target), _VERSION, -1)
    changes: dict[int, _Box] = vars(_memory(source)).setdefault(_CHANGES, {})
    if not all(n in changes and _are_apart(box, changes[n]) for n in range(taken, version)):
        raise EngineError(
            f"{name}: a slice that no longer has the values of its tensor, changed in place",
            facts={"shape": tuple(target.shape), "tensor": tuple(source.shape)},
            why="along a sharded axis a slice is a copy, and the tensor was changed after it was taken",
            fix="take the slice again after each change of the tensor",
        )
    _write_back(name, target, of)
    changes[version] = box
    setattr(_memory(target), _VERSION, version + 1)
    if of.is_view:
        counts[id(source)] += 1
    elif not source.is_inference():
        torch.autograd.graph.increment_version(source)


_Box = list[tuple[int, int]]  # first and last number along each axis


def _box(of: _Slice) -> _Box:
    """Between which numbers the elements of a slice lie, along each axis of the tensor; all, if that is not clear."""
    like_source = torch.empty(of.source.shape, dtype=of.source.dtype, device="meta")
    view = of.view(like_source)
    first = _along_axes(view.storage_offset(), like_source)
    last = list(first)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        steps = _along_axes(stride, like_source)
        last = [end + (size - 1) * step for end, step in zip(last, steps, strict=True)]
    is_clear = view.dtype == like_source.dtype and all(map(operator.lt, last, like_source.shape))
    return list(zip(first, last, strict=True)) if is_clear else [(0, size - 1) for size in like_source.shape]


def _along_axes(elements: int, tensor: torch.Tensor) -> list[int]:
    """How far one goes along each axis of a contiguous tensor if one goes on in its memory."""
    found: list[int] = []
    for stride in tensor.stride():
        found.append(elements // stride)
        elements %= stride
    return found


def _are_apart(one: _Box, other: _Box) -> bool:
    return any(a[1] < b[0] or b[1] < a[0] for a, b in zip(one, other, strict=True))


def note_taken(source: Any, parts: Any) -> None:
    """Note of what state of a DTensor the local tensors of its slices are copies."""
    version = min(getattr(_memory(source), _VERSION, math.inf), version_of(source))
    for part in tree_leaves(parts):
        setattr(simulation.plain(part).untyped_storage(), _VERSION, version)


def note_detached(tensor: Any, detached: Any) -> Any:
    """A tensor that was detached, of which is noted, as autograd does not, what it is a slice of."""
    of = None if _slice_of(detached) else _known_to_autograd(tensor) or _slice_of(tensor)
    if of is not None:
        setattr(detached, _SLICE, of._replace(is_tracked=False))
    return detached


def _known_to_autograd(tensor: Any) -> _Slice | None:
    """What a tensor is a view of for autograd, if it is a copy of that here."""
    base = base_of(tensor)
    if base is tensor or not isinstance(base, DTensor) or _memory(base) is _memory(tensor):
        return None
    return _Slice(base, _memory(base), functools.partial(view_again, tensor), False, is_view=True)


def keep_gradient(changed: Any) -> None:
    """Have the gradient of a DTensor of which a view was changed come in the layout in which that was a view."""
    base = base_of(changed)
    if isinstance(base, DTensor) and base.requires_grad and not base.is_leaf:
        mesh, placements = base.device_mesh, attainable_placements(base)

        def place(gradient: Any) -> Any:
            if not isinstance(gradient, DTensor):  # zeros that torch has made where there is no gradient
                gradient = everywhere(gradient, mesh)
            return placed(reduced(gradient), placements)

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
