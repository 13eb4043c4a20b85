"""Let DTensor compute only proven operators by its own rules. Others are gathered.

DTensor asks about each operator of torch, in forward and backward passes, before it computes it for the first time on
arguments of some shapes and placements. What it may do it remembers, so a proven operator costs nothing from then on.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from layoutmap.core.errors import EngineError
from layoutmap.engines.tested import is_before
from layoutmap.engines.torch.backward import get_backward_node
from layoutmap.engines.torch.changes import change, meshes
from layoutmap.engines.torch.dtensor_ops.dispatch import (
    OperatorGuardPatch,
    decompose_operator,
    list_argument_specs,
    list_specs,
    take_view_shape,
)
from layoutmap.engines.torch.dtensor_ops.gathered import (
    compute_gathered,
    find_changed,
    format_function,
    warn_of_gathering,
)
from layoutmap.engines.torch.dtensor_ops.local_values import has_shard, shard_error
from layoutmap.engines.torch.dtensor_ops.lookups import LOOKUPS, is_axis_sharded
from layoutmap.engines.torch.dtensor_ops.memories import copied, count_unseen, note_redistributed, write_back
from layoutmap.engines.torch.dtensor_ops.proven import ALONG, ANY_ORDER, PROVEN, QUIET, REDUCTIONS, SUMS_PASS
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
    full_tensor,
    has_no_gaps,
    is_replicated,
    make_replicated_placements,
    move_to_placements,
    reduce_placements,
    replicate_tensor,
)
from layoutmap.engines.torch.specs import DTensorSpec, get_local, get_spec, has_even_shards, make_dtensor
from layoutmap.engines.torch.trees import tree_leaves, tree_map
from layoutmap.engines.torch.unseen import get_memory

_AXIS_POSITIONS = (
    {"cumsum": 1, "argmax": 1, "argmin": 1, "select_backward": 2, "slice_backward": 2}
    if is_before("torch", "2.14")
    else {}
)
"""The position of the axis argument of operators for which DTensor mishandles a negative axis."""

_ADDS_BOOLEANS = is_before("torch", "2.14")
"""Whether DTensor wrongly sums a partial `or` of booleans that is multiplied with numbers."""

_EXTREMES = frozenset(("amax", "amin", "argmax", "argmin"))

_RESHAPING = frozenset(("t_", "transpose_", "squeeze_", "unsqueeze_"))
"""In-place operators that change a tensor's shape. Without the underscore they return views."""


class _ShardingQuery(threading.local):
    """Track whether this thread queries DTensor's sharding, which runs operators on tensors without values."""

    is_open = False

    @contextmanager
    def mark_open(self) -> Generator[None]:
        before, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = before


sharding_query = _ShardingQuery()


def guard_mesh(device_mesh: DeviceMesh) -> None:
    """Let DTensor compute only proven operators on a mesh. Other meshes stay as they are."""
    if device_mesh not in meshes:
        meshes.add(device_mesh)
        change(OPERATORS_GUARDED)


def _propagate_changes(op: OpOverload, changed: list[torch.Tensor], args: Args, kwargs: Kwargs) -> None:
    """Write the changes of DTensors back to the tensors that they are copies of."""
    _refuse_unsharded_writes(op, args, kwargs)  # DTensor does not check its support for replicated operands
    count_unseen(changed)
    some = [each for each in _list_dtensors(changed) if each.device_mesh in meshes] if copied else []
    if some:
        write_back(op, some)


def _note_copy(source: torch.Tensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Record the source of a redistributed tensor, because views of it are copies."""
    if isinstance(source, DTensor) and source.device_mesh in meshes:
        note_redistributed(source, make_dtensor(local, spec))


def is_guarded(device_mesh: DeviceMesh) -> bool:
    """Return whether DTensor computes only proven operators on a mesh."""
    return device_mesh in meshes


@skip_function_modes
@torch.no_grad()
# DTensor computes some operators incorrectly, so it answers only proven ones (decisions/0057).
def _answer_operator(own: Function, op: OpOverload, args: Args, kwargs: Kwargs, mesh: DeviceMesh) -> object:
    """Return DTensor's own result of an operator if that is proven, or this library's result."""
    if mesh not in meshes:  # DTensors of the program, not of this library
        return own()
    if has_shard((args, kwargs)):  # outside modes, where local shards were not checked
        raise shard_error(
            f"{op}: a shard, computed with a tensor on the mesh", _list_dtensors((args, kwargs))[0]
        )
    _refuse_unsharded_writes(op, args, kwargs)
    return _compute_operator(own, op, args, kwargs, mesh)


def _refuse_unsharded_writes(op: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Refuse an operator that would change an unsharded tensor by sharded ones, except a copy of values.

    In an operator of lists a tensor is changed by the tensors at its place in the other lists.
    """
    if op is torch.ops.aten.copy_.default:
        return
    for place, name in list_written_arguments(op):
        # Other arguments are internal, such as the steps of a fused optimizer.
        tensors = _as_list(args[0] if place == 0 else kwargs.get(name))
        for number, each in enumerate(tensors):
            if not isinstance(each, torch.Tensor) or isinstance(each, DTensor):
                continue
            columns = (column for value in args[1:] if (column := _as_list(value)))
            others = (column[number if len(column) == len(tensors) else 0] for column in columns)
            if place or any(isinstance(other, DTensor) and not is_replicated(other) for other in others):
                raise EngineError(
                    f"{op}: an unsharded tensor would be changed by tensors on a mesh",
                    facts={"shape": tuple(each.shape), "gradient of": get_backward_node()},
                    why="each device would change it, or a copy of it",
                    fix="pass their values: tensor.full_tensor()",
                )


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)  # pyright: ignore[reportUnknownVariableType]


def _compute_operator(own: Callable[[], object], op: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> object:
    full_name = str(op.overloadpacket).removeprefix("aten.")  # keep the namespace of custom operators
    name = full_name if full_name.endswith("__") else full_name.removesuffix("_")
    if (
        name in ALONG
        and name != full_name
        and isinstance(args[0], DTensor)
        and not _is_partial_or_strided(args[0])
    ):
        return args[0].copy_(getattr(getattr(torch.ops.aten, name), get_overload_name(op))(*args, **kwargs))
    if full_name in _RESHAPING and isinstance(args[0], DTensor):
        view = getattr(torch.ops.aten, name)(*args, **kwargs)
        if get_memory(view) is not get_memory(args[0]):
            _refuse_shape(op, args[0], view)
        return take_view_shape(op, args, kwargs, view)
    place = _AXIS_POSITIONS.get(name, len(args))
    if place < len(args) and args[place] is not None and args[place] < 0:
        rank = args[0].ndim if place == 1 else len(args[1])
        return op(*args[:place], args[place] % max(rank, 1), *args[place + 1 :], **kwargs)
    if name == "embedding" and is_axis_sharded(args[0], 0):  # DTensor mixes up the masks of several lookups
        return LOOKUPS[F.embedding](F.embedding, (args[1], args[0]), {})
    tensors = _list_dtensors((args, kwargs))
    written = {id(each) for each in _list_dtensors(find_changed(op, args, kwargs))}
    # DTensor cannot redistribute the other operands to a partial sum.
    is_filled = any(
        _is_partial_or_strided(each) and any(other.placements != each.placements for other in tensors)
        for each in tensors
        if id(each) in written
    )
    why = "DTensor's own way is not known to be right"
    # DTensor loops forever when it searches view dims of an empty tensor.
    is_empty = name in ("view", "_unsafe_view") and any(0 in each.shape for each in tensors)
    # Empty shards have no maximum.
    is_extreme = name in _EXTREMES or _is_extreme_norm(name, args)
    is_uneven = is_extreme and not all(has_even_shards(get_spec(each)) for each in tensors)
    can_compute = not (is_empty or is_filled or is_uneven)
    if _is_proven(op, name, args, kwargs) and _can_pass(tensors, name) and can_compute:
        try:
            with sharding_query.mark_open():
                answer = own()
        except (NotImplementedError, RuntimeError) as error:
            why = f"DTensor has no rule: {next(iter(str(error).strip().splitlines()), '')}"
        else:
            is_even = all(map(has_even_shards, list_specs(answer))) or not all(
                has_even_shards(get_spec(each)) for each in tensors
            )
            becomes_sum = _needs_partial_shard(tensors, list_argument_specs(answer))
            if is_even and not becomes_sum:
                return answer
            what = "make a sum of a sharded argument" if becomes_sum else "shard its arguments unevenly"
            why = f"DTensor would {what}"
    if any(_is_partial_or_strided(each) and id(each) not in written for each in tensors):
        ready, named = tree_map(lambda each: _reduce_argument(each, written), (tuple(args), kwargs))
        if is_pure_view(op):
            note_redistributed(args[0], ready[0])
        return op(*ready, **named)
    inner = decompose_operator(op, args, kwargs)  # parts of the operator may be proven or gather less
    if inner is not NotImplemented:
        return inner
    if is_pure_view(op) and all(map(is_replicated, tensors)) and not _is_read_by_strides(name, args[0]):
        return _compute_local_view(op, args, kwargs, mesh)
    if is_pure_view(op):
        copy = replicate_tensor(full_tensor(args[0]), mesh)
        note_redistributed(args[0], copy)
        result = op(copy, *args[1:], **kwargs)
    else:
        result = compute_gathered(op, args, kwargs, functools.partial(_write_result, op))
    is_filled = any(_is_partial_or_strided(each) for each in tensors if id(each) in written)
    if not (name in QUIET or is_empty or is_filled or all(map(is_replicated, tensors))):
        warn_of_gathering(format_function(op), why)
    return result


def _is_extreme_norm(name: str, args: Args) -> bool:
    """Return whether an operator computes norms of an order for which an empty tensor has none."""
    return name in ("linalg_vector_norm", "_foreach_norm") and len(args) > 1 and not 0 <= args[1] < math.inf


def _is_proven(op: OpOverload, name: str, args: Args, kwargs: Kwargs) -> bool:
    """Return whether DTensor's own implementation is correct. Operators of the program count as correct."""
    if name in REDUCTIONS:
        place = list_argument_names(op).index("reduction")
        return (args[place] if place < len(args) else kwargs.get("reduction")) in REDUCTIONS[name]
    if name in ALONG and not _is_aligned(args[0], args[1], args):
        return False
    # This decides about backward passes. `lookups` handles forward passes.
    if name == "gather" and is_axis_sharded(args[0], args[1]):
        return False
    changes_shape = torch.Tag.inplace_view in op.tags and name != "detach"
    return (name in PROVEN and not changes_shape) or op.namespace != "aten"


def _is_aligned(target: torch.Tensor, axis: int, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors of one rank have the same sizes on all axes but one."""
    shapes = [list(e.shape) for e in tensors if isinstance(e, torch.Tensor) and 0 < e.ndim == target.ndim]  # pyright: ignore[reportUnnecessaryIsInstance]
    return all(shape[:axis] + shape[axis:][1:] == shapes[0][:axis] + shapes[0][axis:][1:] for shape in shapes)


def _can_pass(tensors: list[DTensor], name: str) -> bool:
    """Return whether DTensor's own implementation is correct for the placements of these tensors."""
    if name in ("alias", "detach"):  # autograd saves the tensor itself
        return True
    if _ADDS_BOOLEANS and any(
        each.dtype == torch.bool and any(p.is_partial() for p in each.placements) for each in tensors
    ):
        return False
    waiting = {p for tensor in tensors for p in tensor.placements if not _is_simple_placement(p)}
    sums = {p for p in waiting if type(p) is Partial and p.reduce_op in ("sum", "avg")}  # pyright: ignore[reportUnknownMemberType]
    others = waiting - sums
    return (not sums or (name in SUMS_PASS and len(sums) == 1)) and (
        not others or (name in ANY_ORDER and not any(p.is_partial() for p in others))
    )


def _needs_partial_shard(tensors: list[DTensor], specs: list[DTensorSpec]) -> bool:
    """Return whether a shard would be redistributed to a partial sum, which DTensor cannot do."""
    return len(tensors) == len(specs) and any(
        type(now) is Shard and then.is_partial()
        for tensor, spec in zip(tensors, specs, strict=True)
        for now, then in zip(tensor.placements, spec.placements, strict=True)
    )


def _list_dtensors(values: object) -> list[DTensor]:
    return [each for each in tree_leaves(values) if isinstance(each, DTensor)]


def _is_partial_or_strided(tensor: DTensor) -> bool:
    """Return whether a DTensor has a partial or a strided placement."""
    return not all(map(_is_simple_placement, tensor.placements))


def _is_simple_placement(placement: Placement) -> bool:
    return type(placement) is Shard or placement.is_replicate()


def _reduce_argument(value: object, written: set[int]) -> object:
    if not isinstance(value, DTensor) or id(value) in written or not _is_partial_or_strided(value):
        return value
    return move_to_placements(value, [p if type(p) is Shard else Replicate() for p in value.placements])


def _is_read_by_strides(name: str, tensor: torch.Tensor) -> bool:
    """Return whether an operator reads memory by strides that a redistributed local tensor does not have."""
    if name != "as_strided" or get_local(tensor).stride() == (strides := tensor.stride()):
        return False
    if not has_no_gaps(tensor.shape, strides):
        raise EngineError(
            "as_strided: of a slice or an expanded tensor that was gathered or summed up",
            facts={"shape": tuple(tensor.shape), "strides": tuple(strides)},
            why="the memory between its elements does not exist",
            fix="use x.contiguous(), and its strides",
        )
    return True


def _compute_local_view(op: OpOverload, args: Args, kwargs: Kwargs, mesh: DeviceMesh) -> object:
    """Compute a view on the local tensor of a replicated DTensor."""
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


def _refuse_shape(op: OpOverload, old: DTensor, new: torch.Tensor) -> NoReturn:
    raise EngineError(
        f"{op}: a tensor on a mesh would change its shape in place",
        facts={"from": tuple(old.shape), "to": tuple(new.shape), "layout": str(old.placements)},
        why="its shards would move to other memory, and its slices would belong to another tensor",
        fix="use the result of the operation: x = operation(x)",
    )


def _write_result(op: OpOverload, old: DTensor, new: torch.Tensor) -> None:
    if old.shape != new.shape:
        _refuse_shape(op, old, new)
    mesh = old.device_mesh
    values = get_local(move_to_placements(replicate_tensor(new, mesh), reduce_placements(old.placements)))
    for dim, placement in enumerate(old.placements):
        # Equal values are their own mean or maximum.
        if placement.is_partial("sum"):
            is_first = replicate_tensor(torch.arange(mesh.size(dim), device=new.device) == 0, mesh)
            axes = [Shard(0) if i == dim else Replicate() for i in range(mesh.ndim)]
            values = values.where(get_local(move_to_placements(is_first, axes)).reshape(()), 0)
    get_local(old).copy_(values)
    _propagate_changes(op, [old], (old,), {})


OPERATORS_GUARDED = OperatorGuardPatch(_answer_operator, _propagate_changes, _note_copy)
