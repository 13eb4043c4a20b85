"""Run one operator for each simulated rank, faster than torch's `LocalTensorMode` does.

Torch flattens the arguments once per rank, and saves and restores the generator for each rank of every operator.
Here the arguments are taken apart once, and only operators that draw random numbers touch the generator.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist

from layoutmap.engines.tested import ImportErrorConverter, check_names_exist
from layoutmap.engines.torch.modes import correct_aliases
from layoutmap.engines.torch.operators import (
    OPERATORS,
    Args,
    Function,
    Kwargs,
    can_return_view,
    count_results,
    get_operator_name,
    list_written_arguments,
)
from layoutmap.engines.torch.trees import is_sequence

with ImportErrorConverter("torch"):
    import torch.distributed._local_tensor as local_tensors
    from torch.distributed._local_tensor import LocalIntNode as LocalIntNode
    from torch.distributed._local_tensor import LocalTensor as LocalTensor
    from torch.distributed._local_tensor import LocalTensorMode as LocalTensorMode
    from torch.distributed._local_tensor import _c10d as local_collectives
    from torch.distributed._local_tensor import enabled_local_tensor_mode as enabled_local_tensor_mode

__all__ = ["local_collectives", "local_tensors"]

check_names_exist(
    "torch",
    (local_tensors, "_combine_rank_results _get_rng_state _set_rng_state"),
    (LocalTensor, "_local_tensors _ranks"),
    (LocalIntNode, "_local_ints"),
)

get_ranks = attrgetter("_ranks")
"""Return the simulated ranks of which a `LocalTensor` has tensors."""

get_rank_sizes = attrgetter("_local_ints")
"""Return the size on each simulated rank, from a symbolic size that differs between ranks."""


def get_rank_tensors(local: LocalTensor) -> dict[int, torch.Tensor]:
    """Return the local tensor of each simulated rank."""
    return dict(local._local_tensors)


_NO_KEYS = torch._C.DispatchKeySet.from_raw_repr(0)
_NEW_LOCAL_TENSOR: Any = inspect.unwrap(cast(Any, LocalTensor).__new__)
_TENSOR_TYPES = frozenset((LocalTensor, torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
# For these operators, torch's simulation makes results of its own, such as empty pieces for ranks with fewer splits.
_NAMES_NEEDING_TORCH_SIMULATION = frozenset(("split", "hash_tensor", "dim"))


_SIZE_READERS: dict[object, Callable[[torch.Tensor], object]] = {
    torch.ops.aten.sym_size.default: torch.Tensor.size,
    torch.ops.aten.sym_stride.default: torch.Tensor.stride,
    torch.ops.aten.sym_storage_offset.default: torch.Tensor.storage_offset,
    torch.ops.aten.sym_numel.default: torch.Tensor.numel,
    torch.ops.aten.dim.default: torch.Tensor.dim,
}


def read_common_size(func: Function, args: Args) -> object:
    """Return the size or stride that an operator reads, or None if ranks differ or it reads no size."""
    read = _SIZE_READERS.get(func)
    if read is None or not isinstance(args[0], LocalTensor):
        return None
    first, *others = map(read, args[0]._local_tensors.values())
    return first if all(each == first for each in others) else None


@dataclass(frozen=True, slots=True)
class _OperatorTraits:
    """Properties of an operator that decide how it runs for each rank."""

    needs_torch_simulation: bool
    is_random: bool
    is_in_place: bool
    can_alias: bool


@functools.cache
def _determine_operator_traits(op: Any) -> _OperatorTraits:
    """Return the properties of an operator, by its schema and tags."""
    name = get_operator_name(op).removeprefix("aten::")
    needs_torch_simulation = (
        op.namespace != "aten" or name in _NAMES_NEEDING_TORCH_SIMULATION or name.startswith("sym_")
    )
    writes = list_written_arguments(op)
    is_in_place = name.endswith("_") and bool(writes) and writes[0][0] == 0 and count_results(op) == 1
    return _OperatorTraits(
        needs_torch_simulation=needs_torch_simulation or torch.Tag.inplace_view in op.tags,
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        is_in_place=is_in_place,
        can_alias=bool(writes) or can_return_view(op),
    )


def flatten_args(args: Args, kwargs: Kwargs) -> list[object]:
    """Return all arguments of an operator in one list, with the items of lists in place of the lists."""
    leaves: list[object] = []
    for value in (*args, *kwargs.values()):
        if is_sequence(value):
            leaves += flatten_args(value, {})
        else:
            leaves.append(value)
    return leaves


def can_run_without_simulation_mode(func: Function, leaves: Iterable[object]) -> bool:
    """Return whether `run_operator_for_ranks` can run an operator, which then needs no `LocalTensorMode`."""
    if not isinstance(func, OPERATORS) or _determine_operator_traits(func).needs_torch_simulation:
        return False
    return all(type(leaf) in _TENSOR_TYPES for leaf in leaves if isinstance(leaf, torch.Tensor))


def find_common_ranks(ranks: frozenset[int], leaves: Iterable[object]) -> frozenset[int]:
    """Return the ranks among `ranks` for which all arguments have values.

    If a forward pass ran for only some of the simulated ranks, the tensors in its backward pass have only these.
    """
    for leaf in leaves:
        leaf = getattr(leaf, "elem", leaf)  # unwrap the result of a running collective
        if isinstance(leaf, LocalTensor):
            ranks = ranks & get_ranks(leaf)
        elif isinstance(leaf, torch.SymInt) and isinstance(leaf.node, LocalIntNode):  # pyright: ignore[reportUnknownMemberType]
            ranks = ranks & get_rank_sizes(leaf.node).keys()
    return ranks


def make_rank_loop(torch_loop: Function) -> Function:
    """Return a replacement of `torch_loop`, the function of torch that runs an operator for each rank.

    It runs for the ranks of the arguments only. Unsharded tensors are changed by the first rank only, because each rank
    would change them again.

    `torch_loop` still runs the operators for which torch's simulation makes results of its own.
    """

    @functools.wraps(torch_loop)
    def run_for_common_ranks(
        func: Function, ranks: frozenset[int], args: Args, kwargs: Kwargs, **options: Any
    ) -> object:
        if (size := read_common_size(func, args)) is not None:
            return size
        leaves = flatten_args(args, kwargs)
        if options.get("alias", True) and can_run_without_simulation_mode(func, leaves):
            return run_operator_for_ranks(func, ranks, args, kwargs, leaves)
        ranks = find_common_ranks(ranks, leaves)
        return _run_for_ranks_and_write_once(
            functools.partial(torch_loop, **options), func, ranks, args, kwargs
        )

    return run_for_common_ranks


def run_operator_for_ranks(
    func: Function, ranks: frozenset[int], args: Args, kwargs: Kwargs, leaves: Iterable[object]
) -> object:
    """Run an operator that `can_run_without_simulation_mode` accepts for each rank, and return the joined results."""
    return _run_for_ranks_and_write_once(
        _run_for_each_rank, func, find_common_ranks(ranks, leaves), args, kwargs
    )


def _run_for_ranks_and_write_once(
    run_loop: Function, func: Function, ranks: frozenset[int], args: Args, kwargs: Kwargs
) -> object:
    """Run an operator for each rank, and return joined results. Unsharded tensors are changed only once."""
    unsharded = _find_changed_unsharded_positions(func, args)
    if not unsharded:
        return run_loop(func, ranks, args, kwargs)
    first = frozenset([min(ranks)])
    if unsharded == [None] or len(unsharded) == len(args[0]):
        return run_loop(func, first, args, kwargs)
    run_loop(func, first, _select_list_items(args, unsharded), kwargs)
    others = [number for number in range(len(args[0])) if number not in unsharded]
    return run_loop(func, ranks, _select_list_items(args, others), kwargs)


def _run_for_each_rank(func: Any, ranks: frozenset[int], args: Args, kwargs: Kwargs) -> object:
    """Run an operator once for each rank (see `can_run_without_simulation_mode`), and return the joined results."""
    traits, order = _determine_operator_traits(func), sorted(ranks)
    columns = [_iterate_value_by_rank(value, order) for value in args]
    named = [_iterate_value_by_rank(value, order) for value in kwargs.values()]
    rows = zip(*columns, strict=False) if columns else repeat(())
    named_rows = zip(*named, strict=False) if named else repeat(())
    state = local_tensors._get_rng_state() if traits.is_random else None
    results: dict[int, Any] = {}
    for rank, row, named_row in zip(order, rows, named_rows, strict=False):
        if state is not None:
            local_tensors._set_rng_state(*state)  # so that all ranks draw equal numbers
        results[rank] = func(*row, **dict(zip(kwargs, named_row, strict=True)))
    if traits.is_in_place:
        return args[0]
    joined = _join_rank_results(results)
    if not traits.can_alias:
        return joined
    return correct_aliases(func, args, kwargs, joined)


def _join_rank_results(results: dict[int, Any]) -> object:
    """Return the results of all ranks as one result, with `LocalTensor`s in place of tensors."""
    first = next(iter(results.values()))
    if isinstance(first, torch.Tensor):
        return _NEW_LOCAL_TENSOR(LocalTensor, results)
    if is_sequence(first):
        return type(first)(
            _join_rank_results(dict(zip(results, row, strict=True)))
            for row in zip(*results.values(), strict=True)
        )
    return local_tensors._combine_rank_results(results, None)


def _iterate_value_by_rank(value: object, ranks: Sequence[int]) -> Iterable[object]:
    """Return an iterable of an argument's value on each rank. It is endless if the value is the same on all ranks."""
    if isinstance(value, LocalTensor):
        return [value._local_tensors[rank] for rank in ranks]
    if isinstance(value, torch.SymInt) and isinstance(value.node, LocalIntNode):  # pyright: ignore[reportUnknownMemberType]
        return [get_rank_sizes(value.node)[rank] for rank in ranks]
    if is_sequence(value):
        columns = [_iterate_value_by_rank(item, ranks) for item in value]
        if not all(isinstance(column, repeat) for column in columns):
            return [list(row) for row in zip(*columns, strict=False)]
    return repeat(value)


def make_common_meta_reader(read_meta: Function) -> Function:
    """Return a faster replacement of torch's `read_meta`, which reads the shape and strides common to all ranks.

    Torch compares each size of each rank. Tensors of equal shape, strides, and type take one comparison per rank here.
    """

    @functools.wraps(read_meta)
    def read_common_meta(pieces: Mapping[int, torch.Tensor]) -> object:
        first, *others = pieces.values()
        shape, strides, dtype = first.shape, first.stride(), first.dtype
        for piece in (first, *others):
            if piece.shape != shape or piece.dtype != dtype or piece.layout != first.layout:
                return read_meta(pieces)
            if piece.stride() != strides or piece.is_neg() or piece.is_conj():
                return read_meta(pieces)
        return list(shape), list(strides), first.device, dtype, first.layout, _NO_KEYS

    return read_common_meta


def make_cached_group_finder(prepare_groups: Function) -> Function:
    """Return a caching replacement of torch's `prepare_groups`, which finds the ranks of a collective."""
    known: dict[tuple[int, ...], object] = {}

    @functools.wraps(prepare_groups)
    def find_cached_groups(group: Any) -> object:
        opened = group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
        ranks = tuple(dist.get_process_group_ranks(opened))
        if ranks not in known:
            known[ranks] = prepare_groups(group)
        return known[ranks]

    return find_cached_groups


def _find_changed_unsharded_positions(func: Function, args: Args) -> list[int | None]:
    """Return the positions of unsharded tensors in the list that an operator changes.

    Return [None] if it changes one unsharded tensor in place of a list, and an empty list if it changes none.
    """
    if not isinstance(func, OPERATORS) or func is torch.ops.aten.copy_.default:
        return []
    if not any(place == 0 for place, _ in list_written_arguments(func)):
        return []
    if isinstance(args[0], torch.Tensor):
        return [] if isinstance(args[0], LocalTensor) else [None]
    return [number for number, each in enumerate(args[0]) if not isinstance(each, LocalTensor)]


def _select_list_items(args: Args, positions: Sequence[Any]) -> Args:
    """Return the arguments of an operator of lists, with only the items at some positions of each list."""

    def select_items_if_list(value: Any) -> object:
        is_list = isinstance(value, (list, tuple)) and len(value) == len(args[0])  # pyright: ignore[reportUnknownArgumentType]
        return [value[position] for position in positions] if is_list else value  # pyright: ignore[reportUnknownVariableType]

    return tuple(map(select_items_if_list, args))
