"""Let DTensor compute only proven operators by its own rules. Others are gathered.

DTensor asks the guard before it computes an operator for the first time on arguments of some shapes and placements, in
forward and backward passes. It caches the answer for a proven operator, which costs nothing from then on.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from layoutmap.core.errors import EngineError
from layoutmap.engines.tested import is_older_than
from layoutmap.engines.torch.backward import get_backward_node_name, get_backward_pass_id
from layoutmap.engines.torch.changes import install_patches, meshes
from layoutmap.engines.torch.dtensor_ops.dispatch import (
    OperatorDispatchPatch,
    decompose_and_compute,
    list_planned_specs,
    list_redistributed_argument_specs,
    replace_argument_by_view,
)
from layoutmap.engines.torch.dtensor_ops.elementwise import register_missing_rules
from layoutmap.engines.torch.dtensor_ops.gathered import (
    compute_on_gathered_tensors,
    find_changed_tensors,
    format_function_name,
    warn_of_gathering,
)
from layoutmap.engines.torch.dtensor_ops.local_values import has_shard, make_shard_error
from layoutmap.engines.torch.dtensor_ops.lookups import LOOKUPS, is_axis_sharded
from layoutmap.engines.torch.dtensor_ops.memories import (
    copied,
    increment_hidden_change_counters,
    record_copy,
    write_changed_copies_back,
)
from layoutmap.engines.torch.dtensor_ops.proven import ALONG, ANY_ORDER, PROVEN, QUIET, REDUCTIONS, SUMS_PASS
from layoutmap.engines.torch.fake_products import allow_fake_grouped_products
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.operators import (
    Args,
    Function,
    Kwargs,
    OpOverload,
    get_overload_name,
    is_pure_view,
    list_argument_names,
    list_written_arguments,
)
from layoutmap.engines.torch.placing import (
    gather_if_sharded,
    has_no_memory_gaps,
    is_replicated,
    make_replicated_placements,
    redistribute_if_needed,
    replace_partial_placements,
    replicate_tensor,
)
from layoutmap.engines.torch.specs import DTensorSpec, get_local, get_spec, has_even_shards, make_dtensor
from layoutmap.engines.torch.storages import get_tensor_version
from layoutmap.engines.torch.trees import tree_leaves, tree_map
from layoutmap.engines.torch.unseen import get_storage

_AXIS_POSITIONS = (
    {"cumsum": 1, "argmax": 1, "argmin": 1, "select_backward": 2, "slice_backward": 2}
    if is_older_than("torch", "2.14")
    else {}
)
"""The position of the axis argument of operators for which DTensor mishandles a negative axis."""

_ADDS_BOOLEANS = is_older_than("torch", "2.14")
"""Whether DTensor sums partial booleans that are multiplied with numbers, although their reduction is `or`."""

_EXTREMES = frozenset(("amax", "amin", "argmax", "argmin", "max", "min"))

_RESHAPING_IN_PLACE = frozenset(("t_", "transpose_", "squeeze_", "unsqueeze_"))
"""In-place operators that change a tensor's shape. Without the underscore they return views."""


_reduced_gradients: MutableMapping[DTensor, tuple[tuple[int, int], DTensor]] = WeakIdKeyDictionary()
"""A dict from a gradient with partial sums to its backward pass and version, and the gradient with the sums reduced."""


class _ShardingRuleState(threading.local):
    """Record whether this thread runs DTensor's sharding rules, which call operators on tensors without values."""

    is_running = False

    @contextmanager
    def mark_sharding_rule_running_temporarily(self) -> Generator[None]:
        before, self.is_running = self.is_running, True
        try:
            yield
        finally:
            self.is_running = before


sharding_query = _ShardingRuleState()


def correct_operators_on_mesh(device_mesh: DeviceMesh) -> None:
    """Let DTensor's own rules compute, on this mesh, only operators that are proven to be correct."""
    if device_mesh not in meshes:
        meshes.add(device_mesh)
        register_missing_rules()
        install_patches(OPERATOR_DISPATCH_PATCH)


def _write_copies_back(op: OpOverload, changed: list[torch.Tensor], args: Args, kwargs: Kwargs) -> None:
    """Write the changes of DTensors that are copies back to the originals."""
    # If DTensor has cached its answer for an operator, it does not call the guard, so make the guard's check here, too.
    _check_no_write_to_unsharded_tensor(op, args, kwargs)
    increment_hidden_change_counters(changed)
    for each in _list_dtensors(changed):  # an operator of lists does not change the version of a tensor
        _reduced_gradients.pop(each, None)
    some = [each for each in _list_dtensors(changed) if each.device_mesh in meshes] if copied else []
    if some:
        write_changed_copies_back(op, some)


def _record_copy_for_view(source: torch.Tensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Record that a DTensor was redistributed for a view, because the view shares memory with the copy."""
    if isinstance(source, DTensor) and source.device_mesh in meshes:
        record_copy(source, make_dtensor(local, spec))


def has_corrected_operators(device_mesh: DeviceMesh) -> bool:
    """Return whether `correct_operators_on_mesh` was called for a mesh."""
    return device_mesh in meshes


@skip_function_modes
@torch.no_grad()
# DTensor computes some operators incorrectly, so use its answer only for proven operators (decisions/0057).
def _compute_proven_or_corrected_operator(
    compute_by_dtensor: Function, op: OpOverload, args: Args, kwargs: Kwargs, mesh: DeviceMesh
) -> object:
    """Return DTensor's own answer for an operator if it is proven to be correct, or else layoutmap's result."""
    if mesh not in meshes:  # the mesh is not one of layoutmap's, so leave the operator to DTensor
        return compute_by_dtensor()
    if has_shard((args, kwargs)):  # the function mode also refuses shards, but may not be active
        raise make_shard_error(
            f"{op}: combines a local shard with a tensor on a mesh", _list_dtensors((args, kwargs))[0]
        )
    _check_no_write_to_unsharded_tensor(op, args, kwargs)
    _check_equal_meshes(op, _list_dtensors((args, kwargs)), mesh)
    return _compute_operator(compute_by_dtensor, op, args, kwargs, mesh)


class DifferentMeshesError(EngineError):
    """An operator would combine tensors on different meshes."""


def _check_equal_meshes(op: OpOverload, tensors: Sequence[DTensor], mesh: DeviceMesh) -> None:
    """Raise if tensors are on different meshes. DTensor would read all placements as those of the first mesh."""
    other = next((each.device_mesh for each in tensors if each.device_mesh != mesh), None)
    # Operators of optimizers do not combine the tensors of a list, and `equal` reads gathered values.
    is_combining = not re.search("_foreach_|_fused_|::equal$", op.name())
    if other is not None and is_combining:
        raise DifferentMeshesError(
            f"{op}: combines tensors on different meshes",
            facts={"meshes": f"{mesh}, {other}"},
            why="the placements of a tensor belong to its own mesh",
            fix="move one of them: layoutmap.dtensor.relayout(tensor, layout), with a layout on the mesh of the other",
        )


def _check_no_write_to_unsharded_tensor(op: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Raise if an operator would change an unsharded tensor by sharded tensors, unless it is `copy_`.

    In an operator of lists a tensor is changed by the tensors at the same position in the other lists.
    """
    if op is torch.ops.aten.copy_.default:
        return
    for place, name in list_written_arguments(op):
        # Check the first argument and keyword arguments. Further arguments, such as the step counts of a fused
        # optimizer, are internal, and stay unsharded.
        tensors = _convert_to_sequence(args[0] if place == 0 else kwargs.get(name))
        for number, each in enumerate(tensors):
            if not isinstance(each, torch.Tensor) or isinstance(each, DTensor):
                continue
            columns = (column for value in args[1:] if (column := _convert_to_sequence(value)))
            others = (column[number if len(column) == len(tensors) else 0] for column in columns)
            if place or any(isinstance(other, DTensor) and not is_replicated(other) for other in others):
                raise EngineError(
                    f"{op}: an unsharded tensor would be changed by tensors on a mesh",
                    facts={"shape": tuple(each.shape), "gradient of": get_backward_node_name()},
                    why="each device would change the tensor, or its own copy of it",
                    fix="pass the values of the tensors on the mesh: tensor.full_tensor()",
                )


def _convert_to_sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)  # pyright: ignore[reportUnknownVariableType]


def _compute_operator(
    compute_by_dtensor: Callable[[], object], op: Any, args: Any, kwargs: Any, mesh: DeviceMesh
) -> object:
    """Return DTensor's answer for an operator, or compute it on redistributed or gathered tensors."""
    # Keep the namespace of a custom operator, because its name may be equal to that of an operator of `aten`.
    full_name = str(op.overloadpacket).removeprefix("aten.")
    name = full_name if full_name.endswith("__") else full_name.removesuffix("_")
    if (
        name in ALONG
        and name != full_name
        and isinstance(args[0], DTensor)
        and not _is_partial_or_strided(args[0])
    ):
        return args[0].copy_(getattr(getattr(torch.ops.aten, name), get_overload_name(op))(*args, **kwargs))
    if full_name in _RESHAPING_IN_PLACE and isinstance(args[0], DTensor):
        view = getattr(torch.ops.aten, name)(*args, **kwargs)
        if get_storage(view) is not get_storage(args[0]):
            _raise_shape_change_error(op, args[0], view)
        return replace_argument_by_view(op, args, kwargs, view)
    position = _AXIS_POSITIONS.get(name, len(args))
    if position < len(args) and args[position] is not None and args[position] < 0:
        rank = args[0].ndim if position == 1 else len(args[1])
        return op(*args[:position], args[position] % max(rank, 1), *args[position + 1 :], **kwargs)
    # DTensor may apply the mask of one lookup to the result of another, so use layoutmap's lookup.
    if name == "embedding" and is_axis_sharded(args[0], 0):
        return LOOKUPS[F.embedding](F.embedding, (args[1], args[0]), {})
    tensors = _list_dtensors((args, kwargs))
    written = {id(each) for each in _list_dtensors(find_changed_tensors(op, args, kwargs))}
    # An operator that changes a partial sum must keep its placements, but DTensor cannot redistribute the other
    # operands to these, so do not call DTensor.
    is_filled = any(
        _is_partial_or_strided(each) and any(other.placements != each.placements for other in tensors)
        for each in tensors
        if id(each) in written
    )
    why = "DTensor's own rule for it is not proven to be correct"
    # DTensor would loop forever when it searches the view dims of an empty tensor, so do not call it.
    is_empty = name in ("view", "_unsafe_view") and any(0 in each.shape for each in tensors)
    # An uneven shard may be empty, and an empty shard has no maximum, so gather these tensors.
    is_extreme = name in _EXTREMES or _is_extreme_norm(name, args)
    is_uneven = is_extreme and not all(has_even_shards(get_spec(each)) for each in tensors)
    can_compute = not (is_empty or is_filled or is_uneven)
    if (
        _has_proven_sharding_rule(op, name, args, kwargs)
        and _has_safe_placements(tensors, name)
        and can_compute
    ):
        try:
            with (
                sharding_query.mark_sharding_rule_running_temporarily(),
                allow_fake_grouped_products() if name == "_grouped_mm" else nullcontext(),
            ):
                answer = compute_by_dtensor()
        except (NotImplementedError, RuntimeError) as error:
            why = f"DTensor has no rule: {next(iter(str(error).strip().splitlines()), '')}"
        else:
            is_even = all(map(has_even_shards, list_planned_specs(answer))) or not all(
                has_even_shards(get_spec(each)) for each in tensors
            )
            becomes_sum = _needs_shard_as_partial_sum(tensors, list_redistributed_argument_specs(answer))
            if is_even and not becomes_sum:
                return answer
            what = "convert a sharded argument to a sum" if becomes_sum else "shard its arguments unevenly"
            why = f"DTensor would {what}"
    if any(_is_partial_or_strided(each) and id(each) not in written for each in tensors):
        ready, named = tree_map(
            lambda each: _remove_partial_and_strided_placements(each, written), (tuple(args), kwargs)
        )
        if is_pure_view(op):
            record_copy(args[0], ready[0])
        return op(*ready, **named)
    # The inner operators of a composite operator may be proven, or need smaller gathers, so try to compute these first.
    inner = decompose_and_compute(op, args, kwargs)
    if inner is not NotImplemented:
        return inner
    if is_pure_view(op) and all(map(is_replicated, tensors)) and not _needs_global_strides(name, args[0]):
        return _compute_view_on_local_tensor(op, args, kwargs, mesh)
    if is_pure_view(op):
        copy = replicate_tensor(gather_if_sharded(args[0]), mesh)
        record_copy(args[0], copy)
        result = op(copy, *args[1:], **kwargs)
    else:
        result = compute_on_gathered_tensors(op, args, kwargs, functools.partial(_write_gathered_result, op))
    is_filled = any(_is_partial_or_strided(each) for each in tensors if id(each) in written)
    if not (name in QUIET or is_empty or is_filled or all(map(is_replicated, tensors))):
        warn_of_gathering(format_function_name(op), why)
    return result


def _is_extreme_norm(name: str, args: Args) -> bool:
    """Return whether an operator computes a norm of infinite or negative order, which fails for an empty tensor."""
    return name in ("linalg_vector_norm", "_foreach_norm") and len(args) > 1 and not 0 <= args[1] < math.inf


def _has_proven_sharding_rule(op: OpOverload, name: str, args: Args, kwargs: Kwargs) -> bool:
    """Return whether DTensor's rule for an operator is proven correct. Rules outside `aten` count as proven."""
    if name in REDUCTIONS:
        position = list_argument_names(op).index("reduction")
        return (args[position] if position < len(args) else kwargs.get("reduction")) in REDUCTIONS[name]
    if name == "histc":  # without bounds, each shard would have its own
        return len(args) == 4 and args[2] < args[3]
    if name in ALONG and not _has_equal_other_axes(args[0], args[1], args):
        return False
    # In forward passes, `lookups.py` computes `gather`, so this is a backward pass. Return False, so that the operand
    # is gathered.
    if name == "gather" and is_axis_sharded(args[0], args[1]):
        return False
    changes_shape = torch.Tag.inplace_view in op.tags and name != "detach"
    return (name in PROVEN and not changes_shape) or op.namespace != "aten"


def _has_equal_other_axes(target: torch.Tensor, axis: int, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors with the rank of `target` have equal sizes on all axes except `axis`."""
    shapes = [list(e.shape) for e in tensors if isinstance(e, torch.Tensor) and 0 < e.ndim == target.ndim]  # pyright: ignore[reportUnnecessaryIsInstance]
    return all(shape[:axis] + shape[axis:][1:] == shapes[0][:axis] + shapes[0][axis:][1:] for shape in shapes)


def _has_safe_placements(tensors: list[DTensor], name: str) -> bool:
    """Return whether DTensor's rule for an operator is correct for the placements of its tensors."""
    if name in ("alias", "detach"):  # autograd may save such a result, so its placements must not change
        return True
    if _ADDS_BOOLEANS and any(
        each.dtype == torch.bool and any(p.is_partial() for p in each.placements) for each in tensors
    ):
        return False
    waiting = {p for tensor in tensors for p in tensor.placements if not _is_shard_or_replicate(p)}
    sums = {p for p in waiting if type(p) is Partial and p.reduce_op in ("sum", "avg")}  # pyright: ignore[reportUnknownMemberType]
    others = waiting - sums
    return (not sums or (name in SUMS_PASS and len(sums) == 1 and not _is_sum_beside_operand(tensors))) and (
        not others or (name in ANY_ORDER and not any(p.is_partial() for p in others))
    )


def _is_sum_beside_operand(tensors: list[DTensor]) -> bool:
    """Return whether partial sums meet another operand of more than one element, as in a residual connection.

    DTensor would convert the operand to a partial sum or multiply by it. Then each later operator would reduce its
    result, and a product could gather its weight instead, which costs more.
    """
    dims = {
        tuple(dim for dim, placement in enumerate(each.placements) if placement.is_partial())
        for each in tensors
        if each.numel() > 1
    }
    return len(dims) > 1


def _needs_shard_as_partial_sum(tensors: list[DTensor], specs: list[DTensorSpec]) -> bool:
    """Return whether DTensor would redistribute a shard to a partial sum, which it cannot do."""
    return len(tensors) == len(specs) and any(
        type(now) is Shard and then.is_partial()
        for tensor, spec in zip(tensors, specs, strict=True)
        for now, then in zip(tensor.placements, spec.placements, strict=True)
    )


def _list_dtensors(values: object) -> list[DTensor]:
    return [each for each in tree_leaves(values) if isinstance(each, DTensor)]


def _is_partial_or_strided(tensor: DTensor) -> bool:
    """Return whether a DTensor has any placement besides `Shard` and `Replicate`."""
    return not all(map(_is_shard_or_replicate, tensor.placements))


def _is_shard_or_replicate(placement: Placement) -> bool:
    return type(placement) is Shard or placement.is_replicate()


def _remove_partial_and_strided_placements(value: object, written_ids: set[int]) -> object:
    """Return an argument without partial and strided placements. Arguments in `written_ids` stay unchanged."""
    if not isinstance(value, DTensor) or id(value) in written_ids or not _is_partial_or_strided(value):
        return value
    # In a backward pass, both gradients of a product need the same reduced gradient, so keep it.
    moment = get_backward_pass_id(), get_tensor_version(value)
    if (known := _reduced_gradients.get(value)) and known[0] == moment:
        return known[1]
    result = redistribute_if_needed(value, [p if type(p) is Shard else Replicate() for p in value.placements])
    if moment[0] >= 0:
        _reduced_gradients[value] = moment, result
    return result


def _needs_global_strides(name: str, tensor: torch.Tensor) -> bool:
    """Return whether `as_strided` needs strides that the local tensor lacks. Raise if a copy cannot have them."""
    if name != "as_strided" or get_local(tensor).stride() == (strides := tensor.stride()):
        return False
    if not has_no_memory_gaps(tensor.shape, strides):
        raise EngineError(
            "as_strided cannot view a slice or an expanded tensor that was gathered or summed up",
            facts={"shape": tuple(tensor.shape), "strides": tuple(strides)},
            why="the gathered copy has no memory between its elements, where these strides would read",
            fix="call x = x.contiguous() first, and pass the strides of that x",
        )
    return True


def _compute_view_on_local_tensor(op: OpOverload, args: Args, kwargs: Kwargs, mesh: DeviceMesh) -> object:
    """Compute a view on the local tensor of a replicated DTensor, and return replicated results."""
    args, kwargs = tree_map(
        lambda each: get_local(each) if isinstance(each, DTensor) else each, (args, kwargs)
    )
    return tree_map(
        lambda each: (
            DTensor.from_local(each, mesh, make_replicated_placements(mesh), run_check=False)
            if isinstance(each, torch.Tensor)
            else each
        ),
        op(*args, **kwargs),
    )


def _raise_shape_change_error(op: OpOverload, old: DTensor, new: torch.Tensor) -> NoReturn:
    raise EngineError(
        f"{op}: a tensor on a mesh would change its shape in place",
        facts={"from": tuple(old.shape), "to": tuple(new.shape), "layout": str(old.placements)},
        why="its shards would get new memory, so earlier views of the tensor would no longer see changes of it",
        fix="use the result of the operation: x = operation(x)",
    )


def _write_gathered_result(op: OpOverload, old: DTensor, new: torch.Tensor) -> None:
    """Write a new unsharded value to a DTensor in place, in the DTensor's own placements."""
    if old.shape != new.shape:
        _raise_shape_change_error(op, old, new)
    mesh = old.device_mesh
    values = get_local(
        redistribute_if_needed(replicate_tensor(new, mesh), replace_partial_placements(old.placements))
    )
    for dim, placement in enumerate(old.placements):
        # If all devices have the same value, this is also their mean and maximum, but not their sum. So set the value
        # to zero on all devices but one for a sum.
        if placement.is_partial("sum"):
            is_first = replicate_tensor(torch.arange(mesh.size(dim), device=new.device) == 0, mesh)
            axes = [Shard(0) if i == dim else Replicate() for i in range(mesh.ndim)]
            values = values.where(get_local(redistribute_if_needed(is_first, axes)).reshape(()), 0)
    get_local(old).copy_(values)
    _write_copies_back(op, [old], (old,), {})


OPERATOR_DISPATCH_PATCH = OperatorDispatchPatch(
    _compute_proven_or_corrected_operator, _write_copies_back, _record_copy_for_view
)
