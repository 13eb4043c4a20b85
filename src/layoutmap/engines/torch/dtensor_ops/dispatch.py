"""Patch DTensor's dispatcher, so that layoutmap decides how each operator is computed.

`guard` decides. The dispatcher asks about each operator once for some shapes and placements, and remembers the answer.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import register_sharding

from layoutmap.engines.patches import patch_method_context
from layoutmap.engines.tested import ImportErrorConverter, check_names_exist
from layoutmap.engines.torch.changes import call_when_patches_are_removed
from layoutmap.engines.torch.operators import (
    COLLECTIVES,
    OPERATORS,
    Args,
    Function,
    Kwargs,
    OpOverload,
    is_pure_view,
    list_written_arguments,
)
from layoutmap.engines.torch.placing import restore_memory_axis_order
from layoutmap.engines.torch.specs import DTensorSpec, get_local, get_spec, set_local_tensor
from layoutmap.engines.torch.trees import tree_leaves

with ImportErrorConverter("torch"):
    from torch.distributed.tensor import _dispatch as _of_dispatch
    from torch.distributed.tensor._op_schema import OutputSharding
    from torch.distributed.tensor._redistribute import DTensorRedistributePlanner as _Planner
    from torch.utils._python_dispatch import return_and_correct_aliasing  # pyright: ignore[reportUnknownVariableType]

    _DISPATCHER: Any = DTensor._op_dispatcher
    _Dispatcher: Any = type(_DISPATCHER)  # pyright: ignore[reportUnknownVariableType]

# DTensor's method that computes an operator's output sharding if the sharding is not in its cache
_PROPAGATE = "_propagate_op_sharding_dispatch_slow_path"
_TAIL = "_dispatch_fast_path_python_tail"  # method that returns the results of in-place operators
_SEARCH = "find_min_cost_path"  # method that chooses the collectives that redistribute a tensor
_COMPUTE_SHAPES = (
    "_propagate_tensor_meta_non_cached"  # method that computes results' global shapes on fake tensors
)
_RESULTS = "_dispatch_get_local_results_slow_path"  # method that redistributes arguments and runs operators

check_names_exist(
    "torch",
    (
        _DISPATCHER,
        f"{_PROPAGATE} {_TAIL} {_RESULTS} redistribute_local_args _custom_op_handlers sharding_propagator",
    ),
    (
        _DISPATCHER.sharding_propagator,
        f"op_strategy_funcs op_to_schema_info propagate_op_sharding {_COMPUTE_SHAPES}",
    ),
    (_Planner, f"{_SEARCH} get_next_state"),
    (torch._C, "_clear_DTensor_sharding_propagator_cache _dispatch_has_kernel_for_dispatch_key"),
)

# Not all releases have each of these tables.
_RULE_TABLES = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")
_TORCH_NAMESPACES = ("aten", "prims", *COLLECTIVES)


def has_sharding_rule(op: OpOverload) -> bool:
    """Return whether DTensor has a sharding rule for an operator."""
    propagator: Any = _DISPATCHER.sharding_propagator
    return any(op in getattr(propagator, table, ()) for table in _RULE_TABLES)


def register_rule_temporarily(ops: list[OpOverload], list_shardings: Function) -> None:
    """Register a sharding rule of operators with DTensor, until torch's patches are removed."""
    register_sharding(ops)(list_shardings)
    propagator: Any = _DISPATCHER.sharding_propagator
    rules = {op: propagator.op_strategy_funcs[op] for op in ops}

    def remove_own_rules() -> None:
        for op, rule in rules.items():
            if (
                propagator.op_strategy_funcs.get(op) is rule
            ):  # a program may have registered another one since
                del propagator.op_strategy_funcs[op], propagator.op_to_schema_info[op]

    call_when_patches_are_removed(remove_own_rules)


def is_custom_operator_without_rule(function: Function) -> bool:
    """Return whether a function is an operator from outside torch without a registered sharding rule."""
    if not isinstance(function, OPERATORS) or str(function).partition(".")[0] in _TORCH_NAMESPACES:
        return False
    packet: Any = getattr(function, "overloadpacket", function)
    return not all(has_sharding_rule(getattr(packet, name)) for name in packet.overloads())


def replace_argument_by_view(op: OpOverload, args: Args, kwargs: Kwargs, view: object) -> object:
    """Replace an operator's first argument in place by a view of it, as `squeeze_` does, and return the argument."""
    set_local_tensor(args[0], get_local(view), get_spec(view))
    return return_and_correct_aliasing(op, args, kwargs, args[0])  # pyright: ignore[reportUnknownVariableType]


def list_planned_specs(output_sharding: object) -> list[DTensorSpec]:
    """Return the specs of results and redistributed arguments that DTensor has planned for an operator."""
    if not isinstance(output_sharding, OutputSharding):
        return []
    found = [each for each in tree_leaves(output_sharding.output_spec) if isinstance(each, DTensorSpec)]
    return found + list_redistributed_argument_specs(output_sharding)


def list_redistributed_argument_specs(output_sharding: object) -> list[DTensorSpec]:
    """Return the specs to which DTensor would redistribute arguments of an operator. The list may be empty."""
    schema = output_sharding.redistribute_schema if isinstance(output_sharding, OutputSharding) else None
    found = () if schema is None else tree_leaves((schema.args_schema, schema.kwargs_schema))
    return [each for each in found if isinstance(each, DTensorSpec)]


def decompose_and_compute(op: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Compute a composite operator by its inner operators. Return `NotImplemented` for other operators."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return NotImplemented
    return op.decompose(*args, **kwargs)


_ALWAYS_ANSWERED = (
    *("convolution.default", "convolution_backward.default", "as_strided.default"),
    *("argmax.default", "argmin.default"),
)


class OperatorDispatchPatch:
    """Make DTensor's dispatcher ask `answer` how to compute each operator.

    Args:
        answer: Called with a function that returns DTensor's own answer, the operator, its args, its kwargs,
            and the mesh. It returns DTensor's answer, which is then cached, or the operator's result.
        write_changes: Called with an operator, the tensors that it has changed, its args, and its kwargs.
        record_copy: Called if a DTensor was redistributed for a view of it: with the DTensor, the redistributed local
            tensor, and its spec.
    """

    def __init__(self, answer: Function, write_changes: Function, record_copy: Function):
        own = getattr(_Dispatcher, _PROPAGATE).__get__(_DISPATCHER)

        def answer_operator(op: OpOverload, args: Args, kwargs: Kwargs, info: Any, try_cache: bool) -> object:
            return answer(lambda: own(op, args, kwargs, info, try_cache), op, args, kwargs, info.compute_mesh)

        self._answer = answer
        self._methods = {
            _PROPAGATE: answer_operator,
            "layoutmap_tail": functools.partial(_record_changes_and_return_results, write_changes),
            "layoutmap_results": functools.partial(_compute_local_results, record_copy),
            "redistribute_local_args": _redistribute_arguments,
        }

    def install(self) -> None:
        """Install the patch, unless it is installed, and clear DTensor's cached answers."""
        if _PROPAGATE in vars(_DISPATCHER):
            return  # the patch is active already, so DTensor has cached only correct answers, which can stay
        vars(_DISPATCHER).update(self._methods)  # pyright: ignore[reportUnknownMemberType]
        for name, instead in _REPLACEMENTS.items():
            getattr(_Dispatcher, name).__code__ = instead.__code__
        # DTensor computes these operators by handlers, and not by the methods patched above, so wrap the handlers, too.
        for name in _ALWAYS_ANSWERED:
            op: Any = functools.reduce(getattr, name.split("."), torch.ops.aten)
            handler = functools.partial(_compute_operator_with_handler, self._answer, _ORIGINAL_HANDLERS[op])
            _DISPATCHER._custom_op_handlers[op] = handler
        setattr(_Planner, _SEARCH, _find_cheapest_redistribution_path)
        _clear_operator_caches()  # remove answers that DTensor cached before the guard was installed

    def remove(self) -> None:
        """Restore torch's dispatcher, and clear its cached answers."""
        for name in self._methods:
            vars(_DISPATCHER).pop(name, None)  # pyright: ignore[reportUnknownMemberType]
        for name, code in _ORIGINAL_CODE.items():
            getattr(_Dispatcher, name).__code__ = code
        _DISPATCHER._custom_op_handlers.update(_ORIGINAL_HANDLERS)
        setattr(_Planner, _SEARCH, _ORIGINAL_SEARCH)
        _clear_operator_caches()


def compute_global_shapes_in(
    make_context: Callable[[], AbstractContextManager[object]],
) -> AbstractContextManager[object]:
    """Let DTensor compute the global shapes of results in a context of this kind until the block ends."""
    return patch_method_context(_DISPATCHER.sharding_propagator, _COMPUTE_SHAPES, make_context)


def _clear_operator_caches() -> None:
    """Clear the caches in which DTensor stores, for this thread, how it computes operators."""
    _DISPATCHER.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


_ORIGINAL_SEARCH: Function = getattr(_Planner, _SEARCH)
_SEARCHES = threading.RLock()
_LayoutPath = tuple[Any, ...]


def _find_cheapest_redistribution_path(planner: Any, source: Any, target: Any) -> list[object]:
    """Return the layouts on the cheapest path from `source` to `target`, by resuming the last search from this source.

    Torch begins anew for each target: the first step of a small model on three mesh dims took a minute.
    """
    # During dynamic compilation, sizes are symbolic, so let torch search.
    if not all(type(size) is int for size in planner.dtensor_meta.shape):
        return _ORIGINAL_SEARCH(planner, source, target)
    state: dict[str, Any] = planner.__dict__
    wanted = [frozenset(each) for each in state.values() if type(each) is set]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    with _SEARCHES:
        found: dict[Any, tuple[dict[Any, _LayoutPath], Iterator[tuple[Any, _LayoutPath]]]]
        found = state.setdefault("layoutmap_found", {})
        step_costs = state.setdefault("layoutmap_steps", {}).setdefault((*wanted,), {})
        paths, search = found.setdefault(
            (source, *wanted), ({}, _iterate_layouts_by_cost(planner, source, step_costs))
        )
        while target not in paths:
            layout, path = next(search, (None, ()))
            if not path:  # no collectives convert the tensor, so let torch raise its error
                return _ORIGINAL_SEARCH(planner, source, target)
            paths[layout] = path
        return list(paths[target])


def _iterate_layouts_by_cost(
    planner: Any, source: Any, step_costs: dict[Any, dict[Any, float]]
) -> Iterator[tuple[Any, _LayoutPath]]:
    """Yield pairs of a reachable layout and the cheapest path to it, cheapest first. Searches share `step_costs`."""
    numbers = itertools.count()
    begun: list[tuple[float, int, Any, _LayoutPath]] = [(0.0, next(numbers), source, (source,))]
    passed = set[object]()
    while begun:
        cost, _, layout, path = heapq.heappop(begun)
        if layout in passed:
            continue
        passed.add(layout)
        yield layout, path
        if layout not in step_costs:
            step_costs[layout] = planner.get_next_state(layout.placements, layout.tensor_dim_to_mesh_dim)
        for other, step in step_costs[layout].items():
            if other not in passed:
                heapq.heappush(begun, (cost + step, next(numbers), other, (*path, other)))


_ORIGINAL_HANDLERS = dict(_DISPATCHER._custom_op_handlers)
# torch's C++ code caches these methods, so replace their `__code__` instead of the attribute.
_ORIGINAL_CODE = {name: getattr(_Dispatcher, name).__code__ for name in (_TAIL, _RESULTS)}
_ORIGINALS = {name: FunctionType(code, _of_dispatch.__dict__) for name, code in _ORIGINAL_CODE.items()}
_REPLACEMENTS: dict[str, Function] = {
    _TAIL: lambda self, *args: self.layoutmap_tail(*args),  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType]
    _RESULTS: lambda self, *args: self.layoutmap_results(*args),  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType]
}


def _compute_local_results(record_copy: Function, op: OpOverload, args: Args, info: Any) -> object:
    """Return an operator's local results. If they are views of a redistributed argument, record it as a copy."""
    results = _ORIGINALS[_RESULTS](_DISPATCHER, op, args, info)
    if is_pure_view(op) and (schema := info.output_sharding.redistribute_schema) is not None:
        record_copy(args[0], info.local_args[0], schema.args_schema[0])
    return results


def _redistribute_arguments(info: Any, schema: Any, *options: object) -> None:
    """Redistribute the arguments of an operator as DTensor does, and restore the memory order of their axes."""
    _Dispatcher.redistribute_local_args(info, schema, *options)
    found = schema.args_schema if info.args_tree_spec is None else tree_leaves(schema.args_schema)
    # The lists may have different lengths, so compare only the items that both have.
    for place, (held, wanted) in enumerate(zip(info.flat_args_schema, found, strict=False)):
        if isinstance(held, DTensorSpec) and held != wanted:
            before, after = info.local_args[:place], info.local_args[place + 1 :]
            info.local_args = (*before, restore_memory_axis_order(info.local_args[place], wanted), *after)


def _record_changes_and_return_results(
    record_changes: Function, op: OpOverload, args: Args, kwargs: Kwargs, *others: object
) -> object:
    """Return DTensor's result of an operator. If the operator changed tensors, first record these changes."""
    is_inplace, is_out = others[-2:]
    if is_inplace or is_out:
        changed = args[0] if is_inplace else [kwargs[name] for _, name in list_written_arguments(op)]
        leaves = [changed] if isinstance(changed, torch.Tensor) else tree_leaves(changed)
        record_changes(op, leaves, args, kwargs)
        if is_inplace and isinstance(changed, torch.Tensor) and not isinstance(changed, DTensor):
            return changed
    return _ORIGINALS[_TAIL](_DISPATCHER, op, args, kwargs, *others)


def _compute_operator_with_handler(
    answer: Function, handler: Function, op: OpOverload, args: Args, kwargs: Kwargs
) -> object:
    """Let `answer` compute an operator for which DTensor has a handler instead of a sharding rule."""
    mesh = next(each.device_mesh for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor))
    return answer(lambda: handler(op, args, kwargs), op, args, kwargs, mesh)
