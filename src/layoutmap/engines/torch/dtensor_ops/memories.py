"""Write changes of redistributed slices back to their source, because these slices are copies and not views.

If the rows of a weight are sharded, `weight[2:4]` is a slice of a gathered copy. In torch it would be a view: a change
of one also changes the other, with their gradients. Here the copy's storage refers to the tensor that was copied:

- if an operator changes the copy, the change is written back to that tensor at once;
- if an operator changes the tensor, its copies are outdated, and functions of torch refuse them from then on.
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
from layoutmap.engines.tested import check_names_exist
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.dtensor_ops.gathered import format_function_name, warn_of_gathering
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.operators import Args, Function, Kwargs, OpOverload
from layoutmap.engines.torch.placing import find_reachable_placements, redistribute_if_needed
from layoutmap.engines.torch.specs import DTensorSpec, get_local, get_meta, get_spec, make_dtensor
from layoutmap.engines.torch.storages import get_base_tensor
from layoutmap.engines.torch.trees import tree_leaves
from layoutmap.engines.torch.unseen import get_storage, has_hidden_changes, increment_change_counter

check_names_exist("torch", (torch._C, "_disabled_torch_function_impl"))

_ORIGIN = "_layoutmap_origin"  # attribute of the storage of a copy: where the copy comes from
_COPIES = "_layoutmap_copies"  # attribute of a storage: the storages of its copies
copied: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""Storages of redistributed copies."""
outdated: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""Storages of copies whose source was changed after they were made."""


# A slice of a DTensor may be a copy, so its source is stored to receive later writes (decisions/0151).
class _CopyOrigin(NamedTuple):
    """The source of a redistributed copy, and where the copy is in memory.

    Attributes:
        source: That tensor, outside of autograd.
        base: The tensor whose views, for autograd, are the slices of the source.
        spec: The mesh, placements, shape and element type of the copy.
        geometries: For each rank, the offset, shape, and strides of the copy in its memory.
    """

    source: DTensor
    base: weakref.ref[torch.Tensor]
    spec: DTensorSpec
    geometries: dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]]

    def rebuild_copy(self, part: torch.Tensor) -> DTensor:
        """Return the recorded copy as a DTensor, given a part of it, such as a view, in the same memory."""
        dtype = get_meta(self.spec).dtype
        pieces = {
            rank: torch.empty(0, dtype=dtype, device=piece.device).set_(
                piece.untyped_storage(), *self.geometries[rank]
            )
            for rank, piece in simulation.get_tensors_by_rank(get_local(part)).items()
        }
        return make_dtensor(simulation.make_local_tensor(pieces, dtype), self.spec)


def record_copy(source: torch.Tensor, copy: torch.Tensor) -> None:
    """Record that a redistributed DTensor is a copy, so that changes of its views are written back to `source`."""
    copy_storage, source_storage = get_storage(copy), get_storage(source)
    if copy_storage is source_storage:  # a view, not a copy: writes change the source itself
        return
    geometries = {
        rank: (int(piece.storage_offset()), tuple(piece.shape), piece.stride())
        for rank, piece in simulation.get_tensors_by_rank(get_local(copy)).items()
    }
    # Make a new DTensor, because the source would keep its autograd graph in memory.
    own = make_dtensor(get_local(source), get_spec(source))
    origin = _CopyOrigin(own, weakref.ref(get_base_tensor(source)), get_spec(copy), geometries)
    setattr(copy_storage, _ORIGIN, origin)
    vars(source_storage).setdefault(_COPIES, weakref.WeakSet()).add(copy_storage)
    copied.add(copy_storage)
    if source_storage in outdated:
        _mark_copy_as_outdated(copy_storage, is_counted_by_autograd=True)


def _get_copy_origin(storage: torch.UntypedStorage) -> _CopyOrigin | None:
    return getattr(storage, _ORIGIN, None)


def _iterate_source_storages(storage: torch.UntypedStorage) -> Generator[torch.UntypedStorage]:
    """Yield a storage, then the storage that it is a copy of, and so on."""
    yield storage
    while (origin := _get_copy_origin(storage)) is not None:
        yield (storage := get_storage(origin.source))


@skip_function_modes
@torch.no_grad()
def write_changed_copies_back(op: OpOverload, changed: list[DTensor]) -> None:
    """Write changes of copies back to the copied tensors, and mark all other copies of these tensors as outdated.

    Raises:
        EngineError: The operator has changed an outdated copy, a copy of an expanded tensor, several copies of one
            tensor, or a copy while a graph is recorded.
    """
    name = format_function_name(op)
    tensors = {id(get_storage(each)): each for each in changed}.values()  # one tensor for each storage
    parts = [
        (each, origin) for each in tensors if (origin := _get_copy_origin(get_storage(each))) is not None
    ]
    check_no_slice_is_outdated(name, [part for part, _ in parts])
    for part, origin in parts:
        _check_copy_can_be_written_back(name, part, origin, [each for each in tensors if each is not part])
    for each in tensors:
        storages = list(_iterate_source_storages(get_storage(each)))
        _mark_copies_as_outdated(storages, is_counted_by_autograd=not has_hidden_changes(each))
    for part, origin in parts:
        warn_of_gathering(f"{name} of a slice", "along a sharded axis a slice is a copy, and is written back")
        origin.source.copy_(
            redistribute_if_needed(origin.rebuild_copy(part), find_reachable_placements(origin.source))
        )
        outdated.discard(get_storage(part))  # the copy is up to date again


def _check_copy_can_be_written_back(
    name: str, part: torch.Tensor, origin: _CopyOrigin, others: Iterable[torch.Tensor]
) -> None:
    """Raise if a changed copy cannot be written back to its source."""
    *_, root = _iterate_source_storages(get_storage(part))
    if 0 in origin.source.stride():  # only an expanded tensor has strides of 0
        why, fix = (
            "in an expanded tensor several elements share memory",
            "clone the tensor first: x = x.clone()",
        )
    elif any(root is storage for each in others for storage in _iterate_source_storages(get_storage(each))):
        why, fix = "another slice was changed by the same call", "change one slice after the other"
    elif type(simulation.get_first_local_tensor(get_local(part))) is not torch.Tensor:
        why, fix = "a recorded graph cannot write copies back", "assign to the tensor instead: x[...] = value"
    else:
        return
    _mark_copy_as_outdated(get_storage(part), is_counted_by_autograd=True)
    raise EngineError(
        f"{name} cannot change a slice along a sharded axis in place",
        facts={"shape": tuple(part.shape), "tensor": tuple(origin.source.shape)},
        why=f"the slice is a copy, and {why}",
        fix=fix,
    )


def increment_hidden_change_counters(changed: list[torch.Tensor]) -> None:
    """Count changes that autograd does not see, for the changed tensors and for the sources of copies."""
    for each in filter(has_hidden_changes, changed):
        for storage in _iterate_source_storages(get_storage(each)):
            increment_change_counter(storage)


def _mark_copies_as_outdated(
    storages: Sequence[torch.UntypedStorage], *, is_counted_by_autograd: bool
) -> None:
    """Mark all copies of some storages as outdated, unless a copy is itself among these storages."""
    for storage in storages:
        for each in list(getattr(storage, _COPIES, ())):  # a list, because the set may shrink during the loop
            if not any(each is other for other in storages):
                _mark_copy_as_outdated(each, is_counted_by_autograd=is_counted_by_autograd)


def _mark_copy_as_outdated(storage: torch.UntypedStorage, *, is_counted_by_autograd: bool) -> None:
    """Mark a copy and all copies of it as outdated."""
    if not outdated:  # check functions only from now on, because checks take time
        _start_checking_for_outdated_slices()
    outdated.add(storage)
    base = getattr(storage, _ORIGIN).base()
    if not is_counted_by_autograd and base is not None and not base.is_inference():
        torch.autograd.graph.increment_version(base)  # a backward pass that needs the old value then fails
    _mark_copies_as_outdated([storage], is_counted_by_autograd=is_counted_by_autograd)


def _check_no_argument_is_outdated(function: Function, values: object) -> None:
    """Raise if a function reads an outdated slice. If no slice is outdated any more, stop checking functions."""
    if function not in METADATA_METHODS:
        check_no_slice_is_outdated(format_function_name(function), values)
    if not outdated:
        _stop_checking_for_outdated_slices()


_METHODS = ("size", "dim", "stride", "numel", "is_floating_point", "is_complex", "is_contiguous", "__len__")
METADATA_METHODS = frozenset(
    getattr(torch.Tensor, name) for name in (*_METHODS, "storage_offset", "__hash__")
)
"""Methods that do not read values."""


def _format_dtensor_with_outdated_note(tensor: DTensor) -> str:
    """Replace `DTensor.__repr__`: append a note if the tensor is outdated."""
    return _ORIGINAL_REPR(tensor) + (" (outdated: take it again)" if get_storage(tensor) in outdated else "")


def check_no_slice_is_outdated(name: str, values: object) -> None:
    """Raise an `EngineError` for a slice of a tensor that was changed after the slice was taken."""
    for each in tree_leaves(values) if outdated else ():
        if isinstance(each, DTensor) and (storage := get_storage(each)) in outdated:
            raise EngineError(
                f"{name}: got a slice of a tensor that was changed after the slice was taken",
                facts={"shape": tuple(each.shape), "tensor": tuple(getattr(storage, _ORIGIN).source.shape)},
                why="along a sharded axis a slice is a copy, which does not change with its tensor",
                fix="take the slice where it is used, x[...], or clone it before the change: x[...].clone()",
            )


_ORIGINAL_REPR = DTensor.__repr__


def _start_checking_for_outdated_slices() -> None:
    """Check each torch function that is called with a DTensor for outdated slices."""
    owner: Any = DTensor
    owner.__torch_function__ = classmethod(_check_and_call_torch_function)
    owner.__repr__ = functools.wraps(_ORIGINAL_REPR)(_format_dtensor_with_outdated_note)


def _check_and_call_torch_function(
    _: object, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
) -> object:
    """Replace `DTensor.__torch_function__`: refuse outdated slices, and call the function."""
    if type(func) is not MethodWrapperType:  # a property's getter reads no values, so allow it
        _check_no_argument_is_outdated(func, (args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _stop_checking_for_outdated_slices() -> None:
    """Remove the check that functions get no slice of a DTensor that was changed after the slice was taken."""
    owner: Any = DTensor
    owner.__torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportUnknownMemberType]
    owner.__repr__ = _ORIGINAL_REPR
