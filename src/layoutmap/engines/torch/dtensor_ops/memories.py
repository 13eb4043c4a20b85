"""Memories that are copies: what torch sees as a view of a DTensor, and is one of the same in another layout.

`weight[2:4]` of a weight whose rows are sharded is taken of the gathered weight. For torch it is a view: what changes
one changes the other, with their gradients. Here the gathered memory knows of which tensor it is a copy:

- an operator that changes it writes the part that it has changed to that tensor, at once;
- an operator that changes the tensor leaves its copies outdated. They get its values when a function of torch is called
  with one of them, which all processes call. What nobody uses any more is not gathered.

A call of a model looks after the slices that are taken in it (`slices`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial

from layoutmap.core.errors import EngineError
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.dtensor_ops.gathered import warn_of_gathering
from layoutmap.engines.torch.placing import attainable_placements, full_tensor, placed
from layoutmap.engines.torch.private import (
    dtensor,
    local_of,
    plainly,
    spec_of,
    spec_of_shards,
    stop_watching_functions,
    tree_leaves,
    watch_functions,
)
from layoutmap.engines.torch.unseen import count, is_unseen, memory_of

_ORIGIN = "_layoutmap_origin"  # of a memory that is a copy: of what
_COPIES = "_layoutmap_copies"  # of a memory: those that are copies of it
_OF_CALL = "_layoutmap_of_call"  # of a memory that is a copy: a call looks after it
copied: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""The memories in use that are copies."""
outdated: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""Copies that have former values."""
_here = threading.local()


class _Place(NamedTuple):
    """Where in a memory a tensor is.

    Attributes:
        offset: Where it begins, in elements.
        shape: Its shape.
        stride: How far its elements lie from each other, along each axis.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(piece: torch.Tensor) -> _Place:
        return _Place(int(piece.storage_offset()), tuple(piece.shape), piece.stride())

    def on(self, memory: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
        """The tensor that is stored in a memory."""
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, *self)


def once(tensor: Any, strides: tuple[int, ...]) -> Any:
    """A tensor without what its strides, or those of another one, repeat in an expanded axis."""
    return tensor[tuple(slice(None if stride else 1) for stride in strides)] if 0 in strides else tensor


class _Origin(NamedTuple):
    """The tensor that a copy is a copy of.

    Attributes:
        source: That tensor.
        spec: The mesh, placements, shape and element type of the copy.
        places: Where in its memory the copy is, on each rank.
    """

    source: Any
    spec: Any
    places: dict[int, _Place]


@torch.no_grad()
def note_redistributed(source: Any, copy: Any) -> None:
    """Note that a DTensor was redistributed for views to be taken of it.

    Args:
        source: The DTensor.
        copy: The same in the other layout.
    """
    local, memory, above = simulation.plain(local_of(copy)), memory_of(copy), memory_of(source)
    if type(local) is not torch.Tensor or memory is above:
        return  # while torch traces there is no memory
    places = {rank: _Place.of(piece) for rank, piece in simulation.pieces_of(local_of(copy)).items()}
    setattr(memory, _ORIGIN, _Origin(dtensor(local_of(source), spec_of(source)), spec_of(copy), places))
    vars(above).setdefault(_COPIES, weakref.WeakSet()).add(memory)
    copied.add(memory)
    if above in outdated:
        _mark(memory)


@contextmanager
def in_call() -> Generator[None]:
    """While open on this thread, a call looks after the slices that it has noted."""
    before = _is_in_call()
    _here.is_in_call = True
    try:
        yield
    finally:
        _here.is_in_call = before


def _is_in_call() -> bool:
    return getattr(_here, "is_in_call", False)


def leave_to_calls(tensor: Any) -> None:
    """Have a call look after the memory of a slice, as long as it is open."""
    setattr(memory_of(tensor), _OF_CALL, True)


@plainly
@torch.no_grad()
def spread(op: Any, changed: list[Any]) -> None:
    """Write what an operator has changed to what that is a copy of, and mark the copies of that as outdated.

    Args:
        op: The operator.
        changed: The DTensors that it has changed.

    Raises:
        EngineError: It has changed a copy that is outdated, or that is one of an expanded tensor, or elements of a
            tensor in several copies.
    """
    name = f"torch.ops.{op.namespace}.{op.overloadpacket.__name__}"
    memories = {id(each): each for each in map(memory_of, changed)}
    parts = [(each, origin) for each in changed if (origin := _origin(memory_of(each))) is not None]
    for part, origin in parts:
        if memory_of(part) in outdated:
            raise EngineError(
                f"{name}: a slice that no longer has the values of its tensor, changed in place",
                facts={"shape": tuple(part.shape), "tensor": tuple(origin.source.shape)},
                why="along a sharded axis a slice is a copy, and the tensor was changed after it was taken",
                fix="take the slice again after each change of the tensor",
            )
        if 0 in origin.source.stride():
            _mark(memory_of(part))
            raise EngineError(
                f"{name}: a slice of an expanded tensor, changed in place",
                facts={"shape": tuple(part.shape), "strides of the tensor": tuple(origin.source.stride())},
                why="it is a copy here, and in the expanded tensor several elements share memory",
                fix="clone the tensor first: x = x.clone()",
            )
    if len(memories) > 1 and parts:
        _refuse_overlaps(name, changed)
    for memory in memories.values():
        _mark_copies(memory)
    for part, origin in parts:
        warn_of_gathering(f"{name} of a slice", "along a sharded axis it is a copy, and is written back")
        update(origin.source)  # another part may have been written to what that is a copy of
        before = placed(origin.source, origin.spec.placements)
        origin.source.copy_(_moved_back(origin, before, part, part))
    if len(memories) == 1:  # it has what it was changed to
        outdated.difference_update(memories.values())


def _origin(memory: torch.UntypedStorage) -> _Origin | None:
    is_left = _is_in_call() and hasattr(memory, _OF_CALL)
    return None if is_left else getattr(memory, _ORIGIN, None)


def _moved_back(origin: _Origin, beside: Any, part: Any, values: Any) -> Any:
    """A copy with a part of it changed, in the layout of what it is a copy of.

    Args:
        origin: What the memory of the part is.
        beside: The values beside the part, in the layout of the copy.
        part: A view of the memory.
        values: What the part is to have, in its layout.
    """
    pieces: dict[int, torch.Tensor] = {}
    parts, new = simulation.pieces_of(local_of(part)), simulation.pieces_of(local_of(values))
    for rank, before in simulation.pieces_of(local_of(beside)).items():
        old = parts[rank].untyped_storage()
        memory = torch.UntypedStorage(old.nbytes(), device=old.device)
        pieces[rank] = origin.places[rank].on(memory, before.dtype).copy_(before)
        strides = parts[rank].stride()
        _Place.of(once(parts[rank], strides)).on(memory, new[rank].dtype).copy_(once(new[rank], strides))
    changed = dtensor(simulation.join(pieces, beside.dtype), origin.spec)
    return placed(changed, attainable_placements(origin.source))


def _refuse_overlaps(name: str, changed: list[Any]) -> None:
    """Refuse what has changed an element of a tensor in several memories: on one device they are one.

    Raises:
        EngineError: It has.
    """
    roots = [list(_up_to_the_root(memory_of(each)))[-1] for each in changed]
    for (one, root), (other, its_root) in combinations(zip(changed, roots, strict=True), 2):
        if root is its_root and memory_of(one) is not memory_of(other) and _overlap(one, other):
            for each in (one, other):
                if _origin(memory_of(each)) is not None:
                    _mark(memory_of(each))
            raise EngineError(
                f"{name}: slices of one tensor that overlap, changed at once",
                facts={"shape": tuple(one.shape), "the other's": tuple(other.shape)},
                why="along a sharded axis slices are copies, and each was changed by itself",
                fix="change them one after the other",
            )


def _up_to_the_root(memory: torch.UntypedStorage) -> Generator[torch.UntypedStorage]:
    """A memory, what it is a copy of, and so on."""
    yield memory
    while (origin := _origin(memory)) is not None:
        yield (memory := memory_of(origin.source))


def count_unseen(changed: list[Any]) -> None:
    """Count changes of tensors, and of what these are copies of, that autograd does not see."""
    for each in filter(is_unseen, changed):
        for memory in _up_to_the_root(memory_of(each)):
            count(memory)


def _overlap(one: Any, other: Any) -> bool:
    """Whether two tensors have an element in common of what both are copies of."""
    touched, also = _touched(one), _touched(other)
    counts = {rank: (touched[rank] & also[rank]).sum() for rank in touched}
    mesh = one.device_mesh
    spec = spec_of_shards(mesh, (Partial(),) * mesh.ndim, torch.Size([]), (), torch.int64)
    return bool(full_tensor(dtensor(simulation.join(counts, torch.int64), spec)))


def _touched(part: Any) -> dict[int, torch.Tensor]:
    """Which bytes a tensor is of the memory that it is a copy of in the end, on each rank."""
    mask = torch.ones_like(part)
    while (origin := _origin(memory_of(part))) is not None:
        zeros = torch.zeros_like(placed(origin.source, origin.spec.placements))
        mask, part = _moved_back(origin, zeros, part, mask), origin.source
    touched: dict[int, torch.Tensor] = {}
    ones = simulation.pieces_of(local_of(mask))
    for rank, piece in simulation.pieces_of(local_of(part)).items():
        number = piece.untyped_storage().nbytes()
        touched[rank] = torch.zeros(number, dtype=torch.uint8, device=piece.device)
        _Place.of(piece).on(touched[rank].untyped_storage(), ones[rank].dtype).copy_(ones[rank])
    return {rank: each != 0 for rank, each in touched.items()}


def _mark_copies(memory: torch.UntypedStorage) -> None:
    for each in list(getattr(memory, _COPIES, ())):
        if _origin(each) is not None:
            _mark(each)


def _mark(memory: torch.UntypedStorage) -> None:
    """Mark a copy as outdated, and the copies of it."""
    if not outdated:
        watch_functions(_before_function, _shown)
    outdated.add(memory)
    _mark_copies(memory)


def _before_function(values: Any) -> None:
    update(values)
    if not outdated:
        stop_watching_functions()


def _shown(own: Callable[[Any], str], tensor: Any) -> str:
    """The text of a DTensor. One process may print alone: it says that values are former ones, and gathers nothing."""
    if simulation.is_simulated():
        update(tensor)
    text = own(tensor)
    return (
        f"{text} (outdated: it is gathered when it is next used)" if memory_of(tensor) in outdated else text
    )


@plainly
@torch.no_grad()
def update(values: Any) -> None:
    """Have the DTensors among some values, and in lists of them, the values of what they are outdated copies of."""
    for each in tree_leaves(values) if outdated else ():
        if isinstance(each, DTensor) and memory_of(each) in outdated:
            _update(each)


def _update(part: Any) -> None:
    origin: _Origin = getattr(memory_of(part), _ORIGIN)
    update(origin.source)
    now = simulation.pieces_of(local_of(placed(origin.source, origin.spec.placements)))
    for rank, piece in simulation.pieces_of(local_of(part)).items():
        origin.places[rank].on(piece.untyped_storage(), now[rank].dtype).copy_(now[rank])
    outdated.discard(memory_of(part))
