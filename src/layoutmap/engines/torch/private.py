"""Every private name of torch that this package touches; no other file has one. Tested on 2.13 to 2.15.

Those that are not imported here are in `_NAMES`, `_OF_STATE` and `_OF_GROUP`: a release that lacks one is refused with
its name. This file is longer than others because it is the one place of them all.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from types import FunctionType, MethodWrapperType
from typing import Any, ParamSpec, Self, TypeVar

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import _dispatch as _of_dispatch
from torch.nn.modules import module as _of_modules

from layoutmap.core.errors import EngineError
from layoutmap.engines.patches import Attribute
from layoutmap.engines.tested import unsupported

try:
    from torch._C import _current_graph_task_id as backward_pass
    from torch._C import _get_dtensor_allow_implicit_replication as replicates_plain_tensors
    from torch._C import _set_dtensor_allow_implicit_replication as set_replicates_plain_tensors
    from torch._C import _will_engine_execute_node as will_be_reached
    from torch._C._dynamo.eval_frame import set_eval_frame
    from torch._C._functorch import peek_interpreter_stack as transform_of_functions
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import nonstrict_trace
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.eval_frame import make_set_enable_dynamic, skip_code
    from torch._ops import OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch.distributed import _local_tensor as local_tensors
    from torch.distributed._local_tensor import (
        LocalIntNode,
        LocalTensor,
        LocalTensorMode,
        enabled_local_tensor_mode,
    )
    from torch.distributed._local_tensor import _c10d as _of_collectives
    from torch.distributed.distributed_c10d import GroupMember
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
    from torch.distributed.tensor._op_schema import OutputSharding
    from torch.distributed.tensor._redistribute import DTensorRedistributePlanner as _Planner
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
    from torch.jit._trace import is_tracing as is_traced_by_jit
    from torch.optim import _muon as _of_muon
    from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_hooks
    from torch.overrides import _get_current_function_mode_stack as function_modes
    from torch.overrides import _pop_mode, _push_mode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
    from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
    from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode
    from torch.utils._pytree import tree_leaves, tree_map
    from torch.utils.flop_counter import _FlopCounterMode as FlopCounting

    _DISPATCHER: Any = DTensor._op_dispatcher
    _ENGINE: Any = torch.autograd.Variable._execution_engine
    _SAVING: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
except (ImportError, AttributeError) as error:
    raise unsupported("torch", str(error)) from error

_PROPAGATE = "_propagate_op_sharding_dispatch_slow_path"  # asked about operators that are not known yet
_TAIL = "_dispatch_fast_path_python_tail"  # makes what operators return that change tensors
_RESULTS = "_dispatch_get_local_results_slow_path"  # computes operators on arguments that it redistributes
_NAMES: list[tuple[Any, str]] = [
    (DTensor, "_local_tensor _spec"),
    (DTensorSpec, "_convert_shard_order_to_StridedShard _maybe_convert_StridedShard_to_shard_order"),
    (_DISPATCHER, f"{_PROPAGATE} {_TAIL} {_RESULTS} _custom_op_handlers sharding_propagator"),
    (_DISPATCHER.sharding_propagator, "op_strategy_funcs propagate_op_sharding"),
    (_Planner, "get_next_state"),
    (DeviceMesh, "_rank_map"),
    (local_tensors, "_PROCESS_MODE _THREAD_LOCAL_TENSOR_MODE _for_each_rank_run_func"),
    (_of_collectives, "_get_default_group"),
    (local_tensors, "_LocalDeviceMesh _PATCHED_DEVICE_MESH_METHODS"),
    (LocalTensor, "_local_tensors _ranks"),
    (LocalIntNode, "_local_ints"),
    (StridedShard, "_to_replicate_tensor"),
    (LocalTensorMode, "_patch_device_mesh _unpatch_device_mesh _disable"),
    (LocalTensorMode, "_patch_random_functions _unpatch_random_functions _per_rank_rng_states"),
    (torch.nn.Module, "_apply _parameters _buffers _non_persistent_buffers_set"),
    (torch.nn.Module, "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks"),
    (_of_modules, "_global_module_registration_hooks _global_parameter_registration_hooks"),
    (_of_modules, "_global_buffer_registration_hooks"),
    (torch.Tensor, "_base _is_view _version"),
    (torch.Tensor, "_backward_hooks _post_accumulate_grad_hooks"),
    (torch.UntypedStorage, "_cdata"),
    (torch.ops.aten.add.Tensor, "_schema _overloadname"),
    (torch.ops.aten, "_assert_async"),
    (torch.ops._c10d_functional, "all_reduce wait_tensor"),
    (torch._C, "_AutoDispatchBelowAutograd _clear_DTensor_sharding_propagator_cache"),
    (torch._C, "_disabled_torch_function_impl _current_autograd_node"),
    (torch._C, "_dispatch_has_kernel_for_dispatch_key _jit_resolve_packet"),
    (OpOverloadPacket, "_qualified_op_name"),
    (_of_muon, "_zeropower_via_newtonschulz"),
    (_SAVING, "_top_saved_tensors_default_hooks"),
    (torch_checkpoint, "_checkpoint_without_reentrant_generator CheckpointFunction _checkpoint_hook"),
]
"""Objects that have private names, and the names; those of instances, too."""


def _has(owner: Any, name: str) -> bool:
    """Whether an object has an attribute, or methods of a class give it one."""
    methods = (each for each in vars(owner).values() if isinstance(each, FunctionType))
    return hasattr(owner, name) or any(name in each.__code__.co_names for each in methods)


_missing = [
    f"{getattr(owner, '__name__', owner)}.{name}"
    for owner, names in _NAMES
    for name in names.split()
    if not _has(owner, name)
]
if _missing:
    raise unsupported("torch", ", ".join(_missing))

P = ParamSpec("P")
R = TypeVar("R")


# -- layouts and simulated devices


left_out_of_state_dicts = attrgetter("_non_persistent_buffers_set")
"""The names of a module's buffers that are not persistent."""


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module that was passed to `torch.compile`, of what that returned; any other as it is."""
    return getattr(model, "_orig_mod", model)


def assert_async(is_true: torch.Tensor, message: str) -> None:
    """Raise a RuntimeError if a boolean tensor is false; on an accelerator later, without waiting for its value."""
    torch.ops.aten._assert_async.msg(is_true, message)


local_of = attrgetter("_local_tensor")
"""The local tensor of a `DTensor`, without a step of autograd."""

spec_of = attrgetter("_spec")
"""The mesh, placements, shape and element type of a `DTensor`."""

ranks_of_local = attrgetter("_ranks")
"""The simulated ranks that have a local tensor."""


def set_pieces(array: Any, local: torch.Tensor, spec: Any) -> None:
    """Have a `DTensor` hold another local tensor, placed as a spec says."""
    array._local_tensor, array._spec = local, spec


def take_shape(op: Any, args: Any, kwargs: Any, view: Any) -> Any:
    """Have a `DTensor`, the first argument of an operator that changes its shape in place, be as a view of it is."""
    set_pieces(args[0], local_of(view), spec_of(view))
    return return_and_correct_aliasing(op, args, kwargs, args[0])


def pieces_by_rank(local: LocalTensor) -> dict[int, torch.Tensor]:
    """The local tensor of each simulated rank."""
    return dict(local._local_tensors)


def ranks_around(mesh: DeviceMesh) -> list[int]:
    """All ranks of the mesh that a mesh was taken from."""
    return mesh._rank_map.tolist()


placements_of_order = DTensorSpec._convert_shard_order_to_StridedShard
"""The placements that shard axes over several mesh dimensions in an order."""

order_of_placements = DTensorSpec._maybe_convert_StridedShard_to_shard_order
"""The order in which placements shard axes over mesh dimensions; `None` if there is none."""

outside_of_modes = torch._C.DisableTorchFunction
"""Opens a block in which no function mode sees what is called."""


def plainly(function: Callable[P, R]) -> Callable[P, R]:
    """A function inside of which no function mode sees what is called."""

    @functools.wraps(function)
    def without_modes(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return without_modes


@contextmanager
def _without_modes_above(is_found: Callable[[Any], bool]) -> Generator[None]:
    """While open, this thread is in no dispatch mode of the program above the one that is found."""
    above: list[Any] = []
    for mode in reversed(dispatch_modes()):
        if (
            is_found(mode) or getattr(mode, "_mode_key", None) is not None
        ):  # torch's own lie below the program's
            break
        above.append(_pop_dispatch_mode())
    try:
        yield
    finally:
        for mode in reversed(above):
            _push_dispatch_mode(mode)


def is_before(release: str) -> bool:
    """Whether this torch is older than a release, as "2.14": from it on DTensor is right where it was corrected."""
    return torch.__version__ < release


class SimulationMode(LocalTensorMode):
    """A `LocalTensorMode` that leaves random numbers to torch, and is entered below the modes of the program.

    So these see what they would see of real devices, such as collectives.
    """

    @plainly
    def __enter__(self) -> Self:
        with _without_modes_above(lambda mode: isinstance(mode, LocalTensorMode)):
            super().__enter__()
        self._per_rank_rng_states.clear()  # all ranks draw from the one generator of this process
        return self

    def __exit__(self, *error: Any) -> None:
        with _without_modes_above(lambda mode: mode is self):
            super().__exit__(*error)

    def _patch_random_functions(self) -> None:
        """Leave `torch.manual_seed` as it is."""

    def _unpatch_random_functions(self) -> None:
        """See above."""


def dtensor(local: torch.Tensor, spec: DTensorSpec) -> Any:
    """A `DTensor` of a piece of this process, outside of autograd: `from_local` without its checks."""
    make: Any = DTensor.__new__  # what __init__ does takes longer, and is nothing
    return make(DTensor, local, spec, requires_grad=False)


def cached_by_mesh(function: Callable[P, R]) -> Callable[P, R]:
    """A function that remembers what it returned, until DTensor is to forget its meshes."""
    cached: Any = functools.lru_cache(maxsize=4096)(function)
    _of_meshes.append(cached)
    return cached


_of_meshes: list[Any] = []


@cached_by_mesh
def placed_as(spec: Any, placements: tuple[Any, ...], dtype: torch.dtype) -> Any:
    """A spec with other placements, of another element type."""
    keeps: dict[str, Any] = {_MEANING: False} if placements == spec.placements and is_of_view(spec) else {}
    return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta._replace(dtype=dtype), **keeps)


_MEANING = "use_strided_shard_as_shard_order"


def is_of_view(spec: Any) -> bool:
    """Whether the strided shards of a spec are those that views make, to which no other tensor can be redistributed.

    `redistribute` takes what it is asked for to be in another order of mesh dims, as those of layouts are.
    """
    return not getattr(spec, _MEANING, True) and any(
        type(each) is not Shard and not each.is_replicate() and not each.is_partial()
        for each in spec.placements
    )


def placed_over(spec: Any, mesh_dim: int, placement: Any, dtype: torch.dtype) -> Any:
    """A spec with another placement for one mesh dim, of another element type."""
    placements = [placement if i == mesh_dim else each for i, each in enumerate(spec.placements)]
    return placed_as(spec, tuple(placements), dtype)


@cached_by_mesh
def spec_of_shards(mesh: Any, placements: tuple[Any, ...], shape: Any, strides: Any, dtype: Any) -> Any:
    """The spec of a DTensor of which each device has a shard of a shape, whose axes are in memory as strides say."""
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            axis, number = placement.dim, mesh.size(dim)
            # Of axes with one stride and one element the first is major.
            is_above = [
                step > strides[axis] or (step == strides[axis] and (i < axis or shape[i] > 1))
                for i, step in enumerate(strides)
            ]
            strides = [
                step * number if i != axis and above else step
                for i, (step, above) in enumerate(zip(strides, is_above, strict=True))
            ]
            shape = [size * number if i == axis else size for i, size in enumerate(shape)]
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), tuple(strides), dtype))


@cached_by_mesh
def spec_of_tensor(mesh: Any, placements: tuple[Any, ...], shape: Any, dtype: torch.dtype) -> Any:
    """The spec of a DTensor whose axes are in memory in their order."""
    strides = tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))


def summed_over(local: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, reduce_op: str) -> torch.Tensor:
    """The shards of the devices along a mesh dim, summed up or reduced in another way, on each of them."""
    operators: Any = torch.ops._c10d_functional
    with torch._C._AutoDispatchBelowAutograd():  # which is Python for these, and has nothing to do
        made = operators.all_reduce.default(local, reduce_op, mesh.get_group(mesh_dim).group_name)
        return operators.wait_tensor.default(made)


class _Modes(threading.local):
    """The simulations that are active on a thread; each begins with that of all threads.

    Torch has one list for all threads: one that leaves its own simulation would end that of another thread.
    """

    def __init__(self, first: Any) -> None:
        self.value = [first]


def simulated(
    mode: Any, group: Any, coordinate: Callable[..., Any], pickled: Callable[..., Any]
) -> Sequence[Attribute]:
    """The patches by which ranks are simulated for DTensors that have a `LocalTensor`, on all threads.

    Args:
        mode: The simulation of all ranks, which is not entered: what computes with a `LocalTensor` enters one.
        group: The process group of all ranks.
        coordinate: Returns the coordinates of the simulated ranks in a mesh: called with what torch does, and the mesh.
        pickled: Returns `DTensor.__reduce_ex__`, of what that is.
    """
    mode._disable = False
    of_mesh = vars(local_tensors._LocalDeviceMesh)
    methods = {name: of_mesh[name].__func__ for name in local_tensors._PATCHED_DEVICE_MESH_METHODS}
    methods["get_coordinate"] = functools.partial(coordinate, methods["get_coordinate"])
    return (
        # Meshes answer by the simulation of the thread: modes need not patch them each time. And torch's own functions,
        # as get_rank from 2.14 on, are left as they are for the rest of the program.
        *(
            Attribute(LocalTensorMode, name, lambda _: lambda _: None)
            for name in ("_patch_device_mesh", "_unpatch_device_mesh", "_patch_dist", "_unpatch_dist")
            if hasattr(LocalTensorMode, name)
        ),
        *(Attribute(DeviceMesh, name, functools.partial(_either, local)) for name, local in methods.items()),
        Attribute(local_tensors, "_THREAD_LOCAL_TENSOR_MODE", lambda _: _Modes(mode)),
        Attribute(local_tensors, "_PROCESS_MODE", lambda _: False),
        Attribute(_of_collectives, "_get_default_group", lambda _: lambda: group),
        Attribute(StridedShard, "_to_replicate_tensor", functools.partial(_gathered_by_size, type(mode))),
        Attribute(local_tensors, "_for_each_rank_run_func", _for_ranks_of_arguments),
        Attribute(DTensor, "__reduce_ex__", pickled),
    )


def _either(local: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a mesh where ranks are simulated on this thread, and where they are not, as in parts of torch."""

    @functools.wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        return (plain if enabled_local_tensor_mode() is None else local)(*args, **kwargs)

    return method


def _for_ranks_of_arguments(for_ranks: Callable[..., Any]) -> Callable[..., Any]:
    """The function that runs for each simulated rank, for those that its arguments have, if these are fewer.

    That is so in a backward pass of tensors on a mesh of some of the ranks: it runs outside of their simulation.
    """

    @functools.wraps(for_ranks)
    def for_common_ranks(func: Any, ranks: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            leaf = getattr(leaf, "elem", leaf)  # of the result of a collective that is not waited for yet
            if isinstance(leaf, LocalTensor):
                ranks = ranks & leaf._ranks
            elif isinstance(leaf, torch.SymInt) and isinstance(leaf.node, LocalIntNode):
                ranks = ranks & leaf.node._local_ints.keys()
        return for_ranks(func, ranks, args, kwargs, **options)

    return for_common_ranks


@contextmanager
def default_group(group: Any) -> Generator[None]:
    """While open, a process group is the default one of this process."""
    before = GroupMember.WORLD
    GroupMember.WORLD = group
    try:
        yield
    finally:
        GroupMember.WORLD = before


def _gathered_by_size(
    simulation: Callable[[frozenset[int]], AbstractContextManager[Any]], gather: Any
) -> Any:
    """How strided shards are gathered: for those simulated ranks together that have the same sizes.

    Torch makes a range of the size, which it cannot where another mesh dim has left some ranks more than others.
    """

    @functools.wraps(gather)
    def by_size(placement: Any, local: Any, mesh: Any, mesh_dim: int, shape: Sequence[Any]) -> Any:
        nodes = [getattr(size, "node", None) for size in shape]
        if not any(isinstance(node, LocalIntNode) for node in nodes):
            return gather(placement, local, mesh, mesh_dim, shape)
        pieces, ranks_of_shape = pieces_by_rank(local), dict[tuple[int, ...], list[int]]()
        for rank in pieces:
            sizes = [
                node._local_ints[rank] if isinstance(node, LocalIntNode) else int(size)
                for node, size in zip(nodes, shape, strict=True)
            ]
            ranks_of_shape.setdefault(tuple(sizes), []).append(rank)
        gathered: dict[int, torch.Tensor] = {}
        for sizes, ranks in ranks_of_shape.items():
            with simulation(frozenset(ranks)):
                some = LocalTensor({rank: pieces[rank] for rank in ranks})
                gathered |= pieces_by_rank(gather(placement, some, mesh, mesh_dim, sizes))
        return LocalTensor(gathered)

    return by_size


# -- tensors without values

UNFORESEEN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""Errors that a fake tensor raises if a result's shape depends on values, or nobody has said how to foresee it."""


@functools.cache
def argument_names(op: Any) -> tuple[str, ...]:
    """The names of an operation's arguments, in order."""
    return tuple(argument.name for argument in op._schema.arguments)


@functools.cache
def written_arguments(op: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of each argument that an operation changes in place."""
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in ("running_mean", "running_var")  # some batch norms do not say that they do
    )


@functools.cache
def is_view(op: Any) -> bool:
    """Whether what an operation returns may be in the memory of its arguments."""
    return any(result.alias_info is not None for result in op._schema.returns)


@functools.cache
def only_views(op: Any) -> bool:
    """Whether that is so, and the operation leaves its arguments as they are."""
    return is_view(op) and not written_arguments(op)


overload_name = attrgetter("_overloadname")
"""Which overload of its name an operation is."""

OPERATORS = (OpOverload, OpOverloadPacket)
"""The types of `torch.ops.<namespace>.<name>.<overload>`, and of that without an overload."""


def operator_of(function: Any, args: Any, kwargs: Any) -> Any:
    """The overload of an operator of `torch.ops` that a call of it means."""
    if isinstance(function, OpOverload):
        return function
    return getattr(function, torch._C._jit_resolve_packet(function._qualified_op_name, *args, **kwargs))


def is_custom(function: Any) -> bool:
    """Whether a function is an operator that is not torch's own, and no `register_sharding` says how it is sharded."""
    if not isinstance(function, OPERATORS) or str(function).partition(".")[0] in _OWN_OPERATORS:
        return False
    packet: Any = getattr(function, "overloadpacket", function)
    return any(
        getattr(packet, name) not in _DISPATCHER.sharding_propagator.op_strategy_funcs
        for name in packet.overloads()
    )


def gradient_of() -> str:
    """The name of what the gradient is computed of now, on this thread; empty outside of backward passes."""
    node: Any = torch._C._current_autograd_node()
    return node.name() if node is not None else ""


COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "device_mesh")
"""Where the operators are that communicate."""

_OWN_OPERATORS = ("aten", "prims", *COLLECTIVES)


def apply_to_module(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the tensors of a module by what a function makes of them, as `Module.to` does."""
    module._apply(function)


def module_apply(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Attribute:
    """The patch that has `torch.nn.Module._apply` replaced by what `make` makes of it."""
    return Attribute(torch.nn.Module, "_apply", make)


def registration_hooks() -> Sequence[dict[Any, Any]]:
    """The hooks that see modules, parameters and buffers being registered, by the ids of their handles."""
    kinds = ("module", "parameter", "buffer")
    return [getattr(_of_modules, f"_global_{kind}_registration_hooks") for kind in kinds]


# -- computing with DTensors


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs now ends; to be called by a hook of that pass."""
    _ENGINE.queue_callback(function)


@contextmanager
def without_function_modes() -> Generator[None]:
    """While open, this thread is in no function mode, and may enter others."""
    modes = function_modes()
    for _ in modes:
        _pop_mode()
    try:
        yield
    finally:
        for mode in modes:
            _push_mode(mode)


_HANDLED = (
    *("convolution.default", "convolution_backward.default", "as_strided.default"),
    *("argmax.default", "argmin.default"),
)


class OperatorsGuarded:
    """The patch that has `answer` decide what `DTensor` does about operators; what it has decided is forgotten.

    Args:
        answer: Called with a function that returns what `DTensor` would do, the operator, its arguments, positional
            and by name, and their mesh. It returns that, which is then kept, or the operator's result.
        changed: Called with an operator and the tensors that `DTensor` has changed by it.
        moved: Called with a DTensor that was redistributed for a view of it, its local tensor there, and
            the spec of that.
    """

    def __init__(self, answer: Callable[..., Any], changed: Callable[..., Any], moved: Callable[..., Any]):
        own = getattr(type(_DISPATCHER), _PROPAGATE).__get__(_DISPATCHER)

        def propagate(op: Any, args: Any, kwargs: Any, info: Any, try_cache: bool) -> Any:
            return answer(lambda: own(op, args, kwargs, info, try_cache), op, args, kwargs, info.compute_mesh)

        self._answer = answer
        self._methods = {
            _PROPAGATE: propagate,
            "layoutmap_tail": functools.partial(_tail, changed),
            "layoutmap_results": functools.partial(_results, moved),
        }

    def install(self) -> None:
        """Have it decide, where it does not."""
        if _PROPAGATE in vars(_DISPATCHER):
            return
        vars(_DISPATCHER).update(self._methods)
        for name, instead in _INSTEAD.items():
            getattr(type(_DISPATCHER), name).__code__ = instead.__code__
        for name in _HANDLED:  # decided in Python, and not by rules
            op: Any = functools.reduce(getattr, name.split("."), torch.ops.aten)
            handler = functools.partial(_answered, self._answer, _HANDLERS_OF_DTENSOR[op])
            _DISPATCHER._custom_op_handlers[op] = handler
        setattr(_Planner, "get_next_state", _next_layouts)  # noqa: B010
        _forget_answers()

    def remove(self) -> None:
        """Have `DTensor` decide for itself again."""
        for name in self._methods:
            vars(_DISPATCHER).pop(name, None)
        for name, code in _OF_TORCH.items():
            getattr(type(_DISPATCHER), name).__code__ = code
        _DISPATCHER._custom_op_handlers.update(_HANDLERS_OF_DTENSOR)
        setattr(_Planner, "get_next_state", _NEXT_LAYOUTS)  # noqa: B010
        _forget_answers()


_NEXT_LAYOUTS = _Planner.get_next_state


def _next_layouts(planner: Any, placements: Any, order: Any) -> Any:
    """The layouts that are one collective away from one, and what each costs, counted once for each kind of tensor.

    `DTensor` searches the cheapest way from each tensor to each layout that an operator could take it in, and counted
    these anew in every search: the first step of a small model on three mesh dims took a minute.
    """
    wanted = [frozenset(each) for each in vars(planner).values() if type(each) is set]
    known, key = vars(planner).setdefault("layoutmap_known", {}), (placements, order, *wanted)
    if key not in known:
        known[key] = _NEXT_LAYOUTS(planner, placements, order)
    return known[key]


_HANDLERS_OF_DTENSOR = dict(_DISPATCHER._custom_op_handlers)


# Torch's C++ keeps these methods as it finds them first, be it before we are imported: their code is replaced.
_OF_TORCH = {name: getattr(type(_DISPATCHER), name).__code__ for name in (_TAIL, _RESULTS)}
_OWN = {name: FunctionType(code, _of_dispatch.__dict__) for name, code in _OF_TORCH.items()}
_INSTEAD: dict[str, Any] = {
    _TAIL: lambda self, *args: self.layoutmap_tail(*args),
    _RESULTS: lambda self, *args: self.layoutmap_results(*args),
}


def _results(moved: Callable[..., Any], op: Any, args: Any, info: Any) -> Any:
    """The local tensors that an operator returns."""
    results = _OWN[_RESULTS](_DISPATCHER, op, args, info)
    if only_views(op) and (schema := info.output_sharding.redistribute_schema) is not None:
        moved(args[0], info.local_args[0], schema.args_schema[0])
    return results


def _tail(then: Callable[..., Any], op: Any, args: Any, kwargs: Any, *others: Any) -> Any:
    """The return value of `DTensor` for an operator that changes tensors, of which some may be plain."""
    is_inplace, is_out = others[-2:]
    if is_inplace or is_out:
        changed = args[0] if is_inplace else [kwargs[name] for _, name in written_arguments(op)]
        leaves = [changed] if isinstance(changed, torch.Tensor) else tree_leaves(changed)
        then(op, leaves)
        if op is torch.ops.aten.copy_.default and not isinstance(changed, DTensor):
            return changed
    return _OWN[_TAIL](_DISPATCHER, op, args, kwargs, *others)


def _answered(
    answer: Callable[..., Any], handler: Callable[..., Any], op: Any, args: Any, kwargs: Any
) -> Any:
    mesh = next(each.device_mesh for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor))
    return answer(lambda: handler(op, args, kwargs), op, args, kwargs, mesh)


def orthogonal_updates(make: Callable[..., torch.Tensor]) -> Attribute:
    """The patch that has the updates of `torch.optim.Muon` made by another function.

    Args:
        make: Called with what torch does, the gradient, and the options of that.
    """

    def made(own: Any) -> Any:
        return functools.wraps(own)(functools.partial(make, own))

    return Attribute(_of_muon, "_zeropower_via_newtonschulz", made)


class PlainTensorsReplicated:
    """The patch that has plain tensors count as replicated among DTensors, on the thread that installs it."""

    def install(self) -> None:
        """Have them count."""
        set_replicates_plain_tensors(True)

    def remove(self) -> None:
        """Have torch refuse them again."""
        set_replicates_plain_tensors(False)


def watch_functions(before: Callable[[Any, Any], None], shown: Callable[..., str]) -> None:
    """Have a function called before each of torch's that is called with a DTensor, until `stop_watching_functions`.

    Args:
        before: Called with the function and its arguments, of which some may be in lists; not for properties.
        shown: Returns `repr(tensor)`: called with what torch does, and the tensor.
    """

    def __torch_function__(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) is not MethodWrapperType:
            before(func, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    owner: Any = DTensor
    owner.__torch_function__ = classmethod(__torch_function__)
    for name, own in _CONVERSIONS.items():
        setattr(owner, name, _after(before, own))
    owner.__repr__ = functools.wraps(_SHOW)(lambda tensor: shown(_SHOW, tensor))


def _after(before: Callable[[Any, Any], None], own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def watched(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        before(own, tensor)
        return own(tensor, *args, **kwargs)

    return watched


def stop_watching_functions() -> None:
    """Have the functions of torch called as they are."""
    owner: Any = DTensor
    owner.__torch_function__ = torch._C._disabled_torch_function_impl
    for name, own in (*_CONVERSIONS.items(), ("__repr__", _SHOW)):
        setattr(owner, name, own)


_SHOW = DTensor.__repr__
# For which torch calls no function that can be watched.
_CONVERSIONS: dict[str, Any] = {name: getattr(DTensor, name) for name in ("to_local", "redistribute")}


def _forget_answers() -> None:
    """Empty the caches of what `DTensor` does about operators, on this thread."""
    _DISPATCHER.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def specs_of_answer(answer: Any) -> list[Any]:
    """The specs of arguments and results in what `DTensor` would do about an operator."""
    if not isinstance(answer, OutputSharding):
        return []
    found = [each for each in tree_leaves(answer.output_spec) if isinstance(each, DTensorSpec)]
    return found + specs_of_arguments(answer)


def specs_of_arguments(answer: Any) -> list[Any]:
    """The specs that `DTensor` would give the arguments of an operator first; none if they stay as they are."""
    schema = answer.redistribute_schema if isinstance(answer, OutputSharding) else None
    found = () if schema is None else tree_leaves((schema.args_schema, schema.kwargs_schema))
    return [each for each in found if isinstance(each, DTensorSpec)]


def decomposed(op: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator that torch composes of others, computed by these; `NotImplemented` for any other."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return NotImplemented
    return op.decompose(*args, **kwargs)


# -- weights that `fully_shard` gathers

_OF_STATE = (
    *("_lazy_init", "_pre_forward", "_post_forward", "_pre_backward", "_root_post_backward_final_callback"),
    *("_reset_iter_state", "_training_state", "_state_ctx", "_comm_ctx", "_fsdp_param_groups"),
)
_OF_GROUP = (
    *("fsdp_params", "is_unsharded", "wait_for_unshard", "post_backward", "_to_sharded"),
    *("_training_state", "_all_gather_result", "_post_forward_indices"),
)


class FullySharded:
    """The parts of `fully_shard` that work on the weights of a module, without its hooks.

    Args:
        module: The module.
        is_asynchronous: Whether gathers are waited for when they are needed.
    """

    def __init__(self, module: torch.nn.Module, *, is_asynchronous: bool) -> None:
        from torch.distributed.fsdp import fully_shard

        self._module = module
        self._state: Any = fully_shard.state(module)  # pyright: ignore[reportFunctionMemberAccess]
        self._group: Any = next(iter(self._state._fsdp_param_groups), None)
        if self._group is not None:
            self._group.unshard_async_op = is_asynchronous
        missing = [name for name in _OF_STATE if not hasattr(self._state, name)]
        missing += [name for name in _OF_GROUP if self._group is not None and not hasattr(self._group, name)]
        if missing:
            raise unsupported("torch", f"fully_shard: {', '.join(missing)}")
        self._state._root_post_backward_final_callback = plainly(
            self._state._root_post_backward_final_callback
        )

    def begin(self) -> None:
        """Get ready for the first call: all modules below it are known."""
        self._state._lazy_init()

    @property
    def gathered(self) -> list[Any]:
        """The gathered parameters; there are some from the first call on."""
        return [each.unsharded_param for each in self._group.fsdp_params] if self._group else []

    @property
    def is_called(self) -> bool:
        """Whether a call of it, or of a module above it, is open."""
        return self._state._state_ctx.iter_forward_root is not None

    @property
    def is_gathered(self) -> bool:
        """Whether the gathered parameters have values."""
        return self._group is not None and self._group.is_unsharded

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward pass has begun with it, and not ended."""
        both = (self._state, self._group)
        return all(each._training_state.name == "PRE_BACKWARD" for each in both if each is not None)

    @property
    def has_failed(self) -> bool:
        """Whether a backward pass has begun that did not end."""
        return self._state._state_ctx.post_backward_final_callback_queued

    def start_anew(self) -> None:
        """Drop what a pass has left that failed, for all modules."""
        states = self._state._state_ctx.all_states
        states[0]._reset_iter_state()
        for each in (p for state in states for group in state._fsdp_param_groups for p in group.fsdp_params):
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each.unsharded_param.grad = None

    def before_forward(self) -> None:
        """Gather the parameters."""
        self._state._pre_forward(self._module, (), {})

    def after_forward(self) -> None:
        """Free what was gathered, if it is not kept for the backward pass."""
        self._state._post_forward(self._module, (), None)

    def free(self) -> None:
        """Free what was gathered, also what is on its way."""
        if self._group is not None and (
            self._group.is_unsharded or self._group._all_gather_result is not None
        ):
            self._group.wait_for_unshard()
            self._group._to_sharded()

    def forget_order(self) -> None:
        """Forget in what order modules were called: no backward pass follows, which would."""
        for state in self._state._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                group._post_forward_indices.clear()
        self._state._comm_ctx.post_forward_order.clear()

    def before_backward(self) -> None:
        """Gather the parameters; to be called in a backward pass, at whose end gradients are reduced at the latest."""
        self._state._pre_backward(None)

    def after_backward(self) -> None:
        """Reduce the gradients and free what was gathered."""
        if self._group is not None:
            self._group.post_backward()


# -- compiling

_make_static = make_set_enable_dynamic(False)


def not_compiled(function: Any) -> None:
    """Have Dynamo leave a function as it is where it would begin with it."""
    skip_code(inspect.unwrap(function).__code__)


def stop_compiling() -> Any:
    """Have Dynamo compile nothing on this thread; returns what compiled what is called so far, or `None`."""
    return set_eval_frame(None)


def go_on_compiling(compiler: Any) -> None:
    """Have Dynamo compile again by what `stop_compiling` has returned."""
    set_eval_frame(compiler)


def call_compiled(compiler: Any, function: Callable[[Any], R], argument: Any) -> R:
    """Call a function, compiled by what `stop_compiling` has returned, for the shapes of its argument."""
    make_as_before = _make_static()
    set_eval_frame(compiler)
    try:
        return function(argument)
    finally:
        set_eval_frame(None)
        make_as_before()


def makes_one_graph(compiler: Any) -> bool:
    """Whether what `stop_compiling` has returned is to make one graph (`fullgraph=True`), or fail."""
    while compiler and not isinstance(compiler, ConvertFrameAssert):
        compiler = getattr(compiler, "_torchdynamo_orig_backend", None)
    return bool(compiler)


def has_dynamic_shapes() -> bool:
    """Whether what is compiled now is compiled for all shapes (`dynamic=True`)."""
    return not dynamo_config.assume_static_by_default


# -- modules, and the tensors in them

_NO_ATTRIBUTES = {"_is_param", "_is_buffer", "persistent"}


def members_of_module(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and the buffers that a module itself holds, by name; to be changed in place."""
    return module._parameters, module._buffers


def hooks_of_module(module: torch.nn.Module) -> list[list[Any]]:
    """The hooks that are called before and after a module, forward and backward."""
    kinds: Any = (
        *(module._forward_pre_hooks, module._forward_hooks),
        *(module._backward_pre_hooks, module._backward_hooks),
    )
    return [list(hooks.values()) for hooks in kinds]


def own_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that a program has set on a tensor."""
    ours = set(vars(tensor)) - _NO_ATTRIBUTES
    return {name: vars(tensor)[name] for name in ours - set(vars(tensor.detach()))} if ours else {}


def hooks_of_tensor(tensor: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """The hooks of a tensor's gradient, and those that are called when it has been added to `grad`."""
    return (
        list((tensor._backward_hooks or {}).values()),
        list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values()),
    )


def clear_sharding_caches() -> None:
    """Have DTensor forget how operations on device meshes come out, and with that the meshes."""
    _clear_sharding_prop_cache()
    for each in _of_meshes:
        each.cache_clear()


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two tensors that are alive if they are in the same memory."""
    return tensor.untyped_storage()._cdata


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; always 0 where torch does not count, under `inference_mode`."""
    return 0 if tensor.is_inference() else tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a tensor is a view of; itself if it is none."""
    return tensor if tensor._base is None else tensor._base


is_view_of_another = torch.Tensor._is_view
"""Whether a tensor is a view of another."""


def leave_mode(mode: Any) -> None:
    """Leave a mode on this thread, and just this one: torch leaves the innermost, whichever that is."""
    for modes in (function_modes(), dispatch_modes()):
        places = [place for place, each in enumerate(modes) if each is mode]
        for each in reversed(modes[places[-1] :] if places else []):
            each.__exit__(None, None, None)
        for each in modes[places[-1] + 1 :] if places else []:
            each.__enter__()


def saver() -> Any:
    """The hooks that decide which tensors autograd saves: an object with these methods, a function, or `None`."""
    hooks = _SAVING._top_saved_tensors_default_hooks(True)
    return None if hooks is None else getattr(hooks[0], "__self__", hooks[0])


def is_checkpoint(saver: Any) -> bool:
    """Whether an activation checkpoint decides: it keeps nothing, and computes once more."""
    return getattr(saver, "__qualname__", "").startswith("_checkpoint_hook.")


def checkpoints(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Sequence[Attribute]:
    """The patches that have activation checkpoints keep `wrap(function)` to compute once more."""

    def make_generator(generator: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(generator)
        def wrapped(function: Any, *args: Any, **kwargs: Any) -> Any:
            return generator(wrap(function), *args, **kwargs)

        return wrapped

    def make_function(reentrant: Any) -> Any:
        class Wrapped:
            @staticmethod
            def apply(function: Any, *args: Any) -> Any:
                return reentrant.apply(wrap(function), *args)

        return Wrapped

    return (
        Attribute(torch_checkpoint, "_checkpoint_without_reentrant_generator", make_generator),
        Attribute(torch_checkpoint, "CheckpointFunction", make_function),
    )
