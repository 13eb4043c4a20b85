"""Define the context in which DTensors compute correctly: `enable_dtensor_ops_temporarily`.

Operators for which DTensor is not proven to be correct are computed on gathered tensors: see `guard`. The functions in
these tables are handled before that, without a gather, or with the random numbers of one device:

linear        products of shards, which DTensor computes slowly, and products with a vector, which fail
losses        means over shards, and ignored labels
norms         statistics of a sharded batch
attention     sharded along the batch or the heads
convolutions  with output channels that are sharded
recurrent     sharded along the batch
randomness    dropout and other functions that must draw the numbers of the unsharded program
rows          functions that treat images or elements independently, but have no rule for their gradients
lookups       rows and elements by their index, along a sharded axis
slices        in-place changes of a part of a tensor, which may be a copy
gathered      functions that read values, custom operators, and functions that change a tensor's shape in place

Plain tensors that meet DTensors count as replicated.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from layoutmap.engines.tested import ImportErrorConverter
from layoutmap.engines.torch.changes import keep_patches_while_alive
from layoutmap.engines.torch.dtensor_ops.attention import ATTENTION, ATTENTION_BY_SHARDS
from layoutmap.engines.torch.dtensor_ops.class_losses import CLASS_LOSSES
from layoutmap.engines.torch.dtensor_ops.convolutions import CONVOLUTIONS
from layoutmap.engines.torch.dtensor_ops.dispatch import is_custom_operator_without_rule
from layoutmap.engines.torch.dtensor_ops.gathered import (
    GATHERED,
    READS,
    compute_custom_operator,
    compute_on_gathered_tensors,
    find_changed_tensors,
    format_function_name,
    is_in_place,
)
from layoutmap.engines.torch.dtensor_ops.guard import correct_operators_on_mesh
from layoutmap.engines.torch.dtensor_ops.joining import JOINS, drop_empty_tensors
from layoutmap.engines.torch.dtensor_ops.linear import LINEAR
from layoutmap.engines.torch.dtensor_ops.local_values import (
    check_no_shard_with_dtensor,
    has_local_tensor,
    has_shard,
    make_shard_error,
    record_which_results_are_shards,
)
from layoutmap.engines.torch.dtensor_ops.lookups import LOOKUPS
from layoutmap.engines.torch.dtensor_ops.losses import LOSSES
from layoutmap.engines.torch.dtensor_ops.memories import (
    METADATA_METHODS,
    check_no_slice_is_outdated,
    outdated,
)
from layoutmap.engines.torch.dtensor_ops.norms import NORMS
from layoutmap.engines.torch.dtensor_ops.randomness import RANDOM, RANDOM_BY_SHARDS
from layoutmap.engines.torch.dtensor_ops.recurrent import RECURRENT
from layoutmap.engines.torch.dtensor_ops.rows import ROWS
from layoutmap.engines.torch.dtensor_ops.slices import assign_item, restore_gradient_layout_in_backward
from layoutmap.engines.torch.dtensor_ops.softmax import SOFTMAX
from layoutmap.engines.torch.dtensor_ops.unwrap_python import copy_without_override_check, has_override_check
from layoutmap.engines.torch.modes import disable_function_modes, skip_function_modes, suspend_function_modes
from layoutmap.engines.torch.operators import OPERATORS, Args, Function, Kwargs
from layoutmap.engines.torch.placing import reduce_if_partial, replicate_tensor
from layoutmap.engines.torch.storages import get_base_tensor
from layoutmap.engines.torch.trees import tree_leaves, tree_map

with ImportErrorConverter("torch"):
    from torch._C import _get_dtensor_allow_implicit_replication as replicates_plain_tensors  # pyright: ignore[reportPrivateUsage]
    from torch._C import _set_dtensor_allow_implicit_replication as set_replicates_plain_tensors  # pyright: ignore[reportPrivateUsage]

Handler = Callable[[Function, Args, Kwargs], Any]

_TABLES: tuple[Mapping[Any, Handler], ...] = (
    LINEAR,
    LOSSES,
    CLASS_LOSSES,
    SOFTMAX,
    NORMS,
    ATTENTION,
    CONVOLUTIONS,
    RANDOM,
    ROWS,
    LOOKUPS,
    RECURRENT,
    GATHERED,
    READS,
    {torch.Tensor.__setitem__: assign_item},
)
_HANDLERS = {
    function: skip_function_modes(handler) for table in _TABLES for function, handler in table.items()
}
_HANDLERS_BY_SHARDS = {
    f: skip_function_modes(handler) for f, handler in {**RANDOM_BY_SHARDS, **ATTENTION_BY_SHARDS}.items()
}
_COMPUTE_ON_GATHERED = skip_function_modes(compute_on_gathered_tensors)
_BACKWARD = (torch.Tensor.backward, torch.autograd.grad)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


@contextmanager
def enable_dtensor_ops_temporarily(
    device_mesh: DeviceMesh, *, draws_by_shards: bool = False
) -> Generator[None]:
    """Make functions of DTensors give the same results as for unsharded tensors, while the `with` block runs.

    Only this thread is affected. Blocks may be nested. Functions of plain tensors alone do not change.

    Args:
        device_mesh: The mesh of the DTensors.
        draws_by_shards: Whether each device draws only its shard of a dropout mask. Plain tensors get different masks.
    """
    correct_operators_on_mesh(device_mesh)
    before = replicates_plain_tensors()
    set_replicates_plain_tensors(True)  # otherwise DTensor refuses unsharded tensors next to DTensors
    try:
        mode = _DTensorFunctionMode(draws_by_shards)
        keep_patches_while_alive(mode)
        with mode:
            yield
    finally:
        set_replicates_plain_tensors(before)


class _DTensorFunctionMode(TorchFunctionMode):
    """Call the handler of each torch function that has a DTensor among its arguments."""

    def __init__(self, draws_by_shards: bool) -> None:
        super().__init__()
        self._draws_by_shards = draws_by_shards

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (type(func) is _PROPERTY or func in METADATA_METHODS) and type(args[0]) is DTensor:
            with disable_function_modes():  # the call computes nothing, so hide it from the program's modes
                return func(*args, **kwargs)
        if outdated:
            check_no_slice_is_outdated(format_function_name(func), (args, kwargs))
        known = _determine_function_traits(func, self._draws_by_shards)
        if known.is_backward:
            # Leave other modes, because they would see DTensor's internal operations as operations of the program.
            with suspend_function_modes(), self:
                return copy_without_override_check(func)(*args, **kwargs)
        found, is_mixed = _find_dtensor_and_unsharded_tensor((*args, *kwargs.values()) if kwargs else args)
        if found is None:
            return (
                _compute_on_local_tensors(func, args, kwargs)
                if has_local_tensor((args, kwargs))
                else func(*args, **kwargs)
            )
        changed = find_changed_tensors(func, args, kwargs) if known.changes or "out" in kwargs else []
        if known.indexes:
            args = (args[0], _convert_lists_in_index(args[1]), *args[2:])
            is_mixed = _find_dtensor_and_unsharded_tensor(args)[1]
        if is_mixed and has_shard((args, kwargs)):
            check_no_shard_with_dtensor(func, args, kwargs, changed)
            try:
                return _compute_on_local_tensors(func, args, kwargs)
            # The shapes of a shard and a global tensor differ, so explain torch's error.
            except RuntimeError as error:
                raise make_shard_error(
                    f"{format_function_name(func)}: combines a local shard with a global tensor", found
                ) from error
        handler = known.handler
        if changed and not all(isinstance(each, DTensor) for each in changed):
            handler = _COMPUTE_ON_GATHERED
        elif is_mixed:
            args, kwargs = _replicate_arguments(args, kwargs, found.device_mesh)
        if handler is not None:
            return handler(func, args, kwargs)
        if known.is_unwrapped:
            with self:
                return copy_without_override_check(func)(*args, **kwargs)
        return _compute_without_handler(known.joins, changed, func, args, kwargs)


@dataclass(frozen=True, slots=True)
class _FunctionTraits:
    """Properties of a torch function that determine how it is computed.

    Attributes:
        handler: The function that computes it; `None`: DTensor computes it, or its inner calls have handlers.
        changes: Whether it changes arguments that are not named `out`.
        indexes: Whether its second argument is an index.
        joins: Whether it joins tensors, of which some may be empty.
        is_backward: Whether it runs a backward pass.
        is_unwrapped: Whether it is Python code, so that handlers are looked up for the functions that it calls.
    """

    handler: Handler | None
    changes: bool
    indexes: bool
    joins: bool
    is_backward: bool
    is_unwrapped: bool


@functools.lru_cache(maxsize=4096)
def _determine_function_traits(func: Function, draws_by_shards: bool) -> _FunctionTraits:
    """Return the properties of a torch function. `draws_by_shards` selects handlers that draw masks by shards."""
    handler = _HANDLERS_BY_SHARDS.get(func) if draws_by_shards else None
    return _FunctionTraits(
        handler=handler
        or _HANDLERS.get(func)
        or (skip_function_modes(compute_custom_operator) if is_custom_operator_without_rule(func) else None),
        changes=isinstance(func, OPERATORS) or is_in_place(func),
        indexes=func in _INDEXING,
        joins=func in JOINS,
        is_backward=func in _BACKWARD,
        is_unwrapped=func not in _THIN_WRAPPERS and has_override_check(func),
    )


def _compute_on_local_tensors(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Call a function on the local tensors of replicated DTensors, and record which results are shards."""
    args, kwargs = tree_map(
        lambda each: each.to_local() if isinstance(each, DTensor) else each, (tuple(args), kwargs)
    )
    with disable_function_modes():
        return record_which_results_are_shards(function, args, kwargs, function(*args, **kwargs))


# Python functions that only call a function that DTensor supports, so they are computed without unwrapping.
_THIN_WRAPPERS = frozenset(
    (
        F.celu,
        F.elu,
        F.glu,
        F.layer_norm,
        F.leaky_relu,
        F.log_softmax,
        F.mish,
        F.relu,
        F.selu,
        F.silu,
        F.softmax,
    )
)
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_PROPERTY = types.MethodWrapperType  # type of property getters such as `Tensor.shape.__get__`


def _compute_without_handler(
    is_concatenation: bool, changed: list[torch.Tensor], function: Function, args: Any, kwargs: Any
) -> object:
    """Compute a function that has no handler, outside of all function modes. `guard.py` corrects its operators."""
    with disable_function_modes():
        if is_concatenation:
            args, kwargs = drop_empty_tensors(args, kwargs)
        result = function(*args, **kwargs)
        for each in changed:
            if get_base_tensor(each) is not each:
                restore_gradient_layout_in_backward(each)
        if not changed and type(result) is DTensor and result.ndim == 0 and get_base_tensor(result) is result:
            # A program may read a scalar such as its loss outside of all modes, so reduce it now if it is a partial
            # sum.
            return reduce_if_partial(result)
        return result


def _convert_lists_in_index(index: object) -> object:
    """Return an index in which tensors replace lists of integers, as torch converts them."""
    if type(index) is tuple:
        return tuple(map(_convert_lists_in_index, index))  # pyright: ignore[reportUnknownArgumentType]
    numbers = type(index) is list and all(isinstance(each, int) for each in tree_leaves(index))
    return torch.tensor(index) if numbers else index  # pyright: ignore[reportUnknownVariableType]


_TYPES_WITHOUT_TENSORS = frozenset((int, float, bool, str, type(None), torch.dtype, slice))


def _find_dtensor_and_unsharded_tensor(values: Iterable[Any]) -> tuple[DTensor | None, bool]:
    """Return a DTensor among values and nested lists (or None), and whether there is an unsharded tensor, too."""
    found, is_mixed = None, False
    for value in values:
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind is DTensor:
            found = value
        elif kind in _TYPES_WITHOUT_TENSORS:
            continue
        elif isinstance(value, torch.Tensor):
            if isinstance(value, DTensor):
                found = value
            else:
                is_mixed = True
        elif kind is tuple or kind is list:
            inner, is_inner_mixed = _find_dtensor_and_unsharded_tensor(value)
            found, is_mixed = inner if found is None else found, is_mixed or is_inner_mixed
    return found, is_mixed


@skip_function_modes
def _replicate_arguments(args: Args, kwargs: Kwargs, mesh: DeviceMesh) -> tuple[Args, Kwargs]:
    return tuple(_replicate_value(each, mesh) for each in args), {
        name: _replicate_value(each, mesh) for name, each in kwargs.items()
    }


def _replicate_value(value: Any, mesh: DeviceMesh) -> object:
    """Replicate an unsharded tensor, also in a list. Scalars without a gradient and other values stay unchanged."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor) or (value.ndim == 0 and not value.requires_grad):
            return value
        return replicate_tensor(value, mesh)
    if type(value) in (list, tuple):
        return type(value)(_replicate_value(each, mesh) for each in value)
    return value
