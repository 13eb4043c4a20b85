"""Write changes of redistributed slices back to their source, because these slices are copies and not views.

`weight[2:4]` of a weight whose rows are sharded is taken of the gathered weight. For torch it is a view: what changes
one changes the other, with their gradients. Here the gathered memory knows of which tensor it is a copy:

- an operator that changes it has it written to that tensor, at once;
- an operator that changes the tensor leaves its copies outdated, and all functions of torch refuse these from then on.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
import weakref
from collections.abc import Generator, Iterable, Sequence
from types import MethodWrapperType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from layoutmap.core.errors import EngineError
from layoutmap.engines.tested import check_names
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.dtensor_ops.gathered import format_function, warn_of_gathering
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.operators import Args, Function, Kwargs, OpOverload
from layoutmap.engines.torch.placing import find_reachable_placements, move_to_placements
from layoutmap.engines.torch.specs import DTensorSpec, get_local, get_meta, get_spec, make_dtensor
from layoutmap.engines.torch.storages import get_base
from layoutmap.engines.torch.trees import tree_leaves
from layoutmap.engines.torch.unseen import count, get_memory, has_hidden_changes

check_names("torch", (torch._C, "_disabled_torch_function_impl"))

_ORIGIN = "_layoutmap_origin"  # attribute of a copied storage: its source
_COPIES = "_layoutmap_copies"  # attribute of a storage: its copies
copied: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""Storages that are copies of others."""
outdated: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""Copies with outdated values."""


# A slice of a DTensor may be a copy, so its source is stored to receive later writes (decisions/0151).
class _Origin(NamedTuple):
    """The tensor from which a redistributed copy was made.

    Attributes:
        source: That tensor, outside of autograd.
        base: What autograd has slices of it be views of.
        spec: The mesh, placements, shape and element type of the copy.
        places: Where in its memory the copy is, on each rank: where it begins, its shape and strides.
    """

    source: DTensor
    base: weakref.ref[torch.Tensor]
    spec: DTensorSpec
    places: dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]]

    def rebuild_copy(self, part: torch.Tensor) -> DTensor:
        """Return the whole copy that shares its memory with a part."""
        dtype = get_meta(self.spec).dtype
        pieces = {
            rank: torch.empty(0, dtype=dtype, device=piece.device).set_(
                piece.untyped_storage(), *self.places[rank]
            )
            for rank, piece in simulation.get_pieces(get_local(part)).items()
        }
        return make_dtensor(simulation.join_pieces(pieces, dtype), self.spec)


def note_redistributed(source: torch.Tensor, copy: torch.Tensor) -> None:
    """Record that a DTensor was redistributed before views are taken.

    Args:
        source: The DTensor.
        copy: The same in the other layout.
    """
    memory, above = get_memory(copy), get_memory(source)
    if memory is above:  # the redistribution copied nothing
        return
    places = {
        rank: (int(piece.storage_offset()), tuple(piece.shape), piece.stride())
        for rank, piece in simulation.get_pieces(get_local(copy)).items()
    }
    own = make_dtensor(get_local(source), get_spec(source))  # a new DTensor outside the graph
    setattr(memory, _ORIGIN, _Origin(own, weakref.ref(get_base(source)), get_spec(copy), places))
    vars(above).setdefault(_COPIES, weakref.WeakSet()).add(memory)
    copied.add(memory)
    if above in outdated:
        _mark(memory, is_seen=True)


def _get_origin(memory: torch.UntypedStorage) -> _Origin | None:
    return getattr(memory, _ORIGIN, None)


def _iterate_origins(memory: torch.UntypedStorage) -> Generator[torch.UntypedStorage]:
    """Yield a memory, the memory that it is a copy of, and so on."""
    yield memory
    while (origin := _get_origin(memory)) is not None:
        yield (memory := get_memory(origin.source))


@skip_function_modes
@torch.no_grad()
def write_back(op: OpOverload, changed: list[DTensor]) -> None:
    """Write an operator's changes of copies back to their origins, and mark other copies as outdated.

    Args:
        op: The operator.
        changed: The DTensors that it has changed.

    Raises:
        EngineError: It has changed a copy that is outdated, a copy of an expanded tensor, several copies of one tensor,
            or one while a graph is recorded.
    """
    name = format_function(op)
    tensors = {id(get_memory(each)): each for each in changed}.values()  # one tensor per storage
    parts = [(each, origin) for each in tensors if (origin := _get_origin(get_memory(each))) is not None]
    refuse_outdated(name, [part for part, _ in parts])
    for part, origin in parts:
        _check_writable(name, part, origin, [each for each in tensors if each is not part])
    for each in tensors:
        _mark_copies(list(_iterate_origins(get_memory(each))), is_seen=not has_hidden_changes(each))
    for part, origin in parts:
        warn_of_gathering(f"{name} of a slice", "along a sharded axis it is a copy, and is written back")
        origin.source.copy_(
            move_to_placements(origin.rebuild_copy(part), find_reachable_placements(origin.source))
        )
        outdated.discard(get_memory(part))  # the copy is up to date again


def _check_writable(name: str, part: torch.Tensor, origin: _Origin, others: Iterable[torch.Tensor]) -> None:
    """Raise an EngineError for a changed copy that cannot be written back."""
    *_, root = _iterate_origins(get_memory(part))
    if 0 in origin.source.stride():  # expanded tensors
        why, fix = (
            "in an expanded tensor several elements share memory",
            "clone the tensor first: x = x.clone()",
        )
    elif any(root is memory for each in others for memory in _iterate_origins(get_memory(each))):
        why, fix = "another slice was changed by the same call", "change one after the other"
    elif type(simulation.get_first_piece(get_local(part))) is not torch.Tensor:
        why, fix = "a graph is recorded, which has no memory", "assign to it: x[...] = value"
    else:
        return
    _mark(get_memory(part), is_seen=True)
    raise EngineError(
        f"{name}: a slice along a sharded axis, changed in place",
        facts={"shape": tuple(part.shape), "tensor": tuple(origin.source.shape)},
        why=f"it is a copy, and {why}",
        fix=fix,
    )


def count_unseen(changed: list[torch.Tensor]) -> None:
    """Count changes of tensors and their origins that autograd does not see."""
    for each in filter(has_hidden_changes, changed):
        for memory in _iterate_origins(get_memory(each)):
            count(memory)


def _mark_copies(memories: Sequence[torch.UntypedStorage], *, is_seen: bool) -> None:
    """Mark the copies of some memories as outdated, except for these memories themselves."""
    for memory in memories:
        for each in list(getattr(memory, _COPIES, ())):  # garbage collection may shrink the list
            if not any(each is other for other in memories):
                _mark(each, is_seen=is_seen)


def _mark(memory: torch.UntypedStorage, *, is_seen: bool) -> None:
    if not outdated:  # remove the function mode, so that DTensors cost nothing while no slice is outdated
        _watch_functions()
    outdated.add(memory)
    base = getattr(memory, _ORIGIN).base()
    if not is_seen and base is not None and not base.is_inference():
        torch.autograd.graph.increment_version(base)  # so that a backward pass that needs the old value fails
    _mark_copies([memory], is_seen=is_seen)


def _check_arguments(function: Function, values: object) -> None:
    if function not in METADATA_METHODS:
        refuse_outdated(format_function(function), values)
    if not outdated:
        _stop_watching_functions()


_METHODS = ("size", "dim", "stride", "numel", "is_floating_point", "is_complex", "is_contiguous", "__len__")
METADATA_METHODS = frozenset(
    getattr(torch.Tensor, name) for name in (*_METHODS, "storage_offset", "__hash__")
)
"""Methods that do not read values."""


def _format_tensor(tensor: DTensor) -> str:
    return _SHOW(tensor) + (" (outdated: take it again)" if get_memory(tensor) in outdated else "")


def refuse_outdated(name: str, values: object) -> None:
    """Refuse a call with slices of a tensor that was changed after they were taken.

    Raises:
        EngineError: There is such a slice among the values.
    """
    for each in tree_leaves(values) if outdated else ():
        if isinstance(each, DTensor) and (memory := get_memory(each)) in outdated:
            raise EngineError(
                f"{name}: a slice of a tensor that was changed after it was taken",
                facts={"shape": tuple(each.shape), "tensor": tuple(getattr(memory, _ORIGIN).source.shape)},
                why="along a sharded axis a slice is a copy, and does not change with its tensor",
                fix="take the slice where it is used, x[...], or clone it before the change: x[...].clone()",
            )


_SHOW = DTensor.__repr__


def _watch_functions() -> None:
    """Check for outdated slices before each torch function that is called with a DTensor."""
    owner: Any = DTensor
    owner.__torch_function__ = classmethod(_check_torch_function)
    owner.__repr__ = functools.wraps(_SHOW)(_format_tensor)


def _check_torch_function(
    _: object, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
) -> object:
    if type(func) is not MethodWrapperType:  # properties read no values
        _check_arguments(func, (args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _stop_watching_functions() -> None:
    """Stop checking functions for outdated slices."""
    owner: Any = DTensor
    owner.__torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportUnknownMemberType]
    owner.__repr__ = _SHOW
