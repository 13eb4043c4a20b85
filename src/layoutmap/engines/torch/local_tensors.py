"""Compute with torch's `LocalTensor`, which stores the tensors of several simulated ranks.

`SimulationMode` serves one thread. `make_simulation_patches` makes the patches for all threads.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from layoutmap.engines.patches import Attribute
from layoutmap.engines.tested import Needed, check_names
from layoutmap.engines.torch.modes import TorchDispatchMode, list_dispatch_modes, skip_function_modes
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.per_rank import LocalIntNode as LocalIntNode
from layoutmap.engines.torch.per_rank import LocalTensor as LocalTensor
from layoutmap.engines.torch.per_rank import LocalTensorMode as LocalTensorMode
from layoutmap.engines.torch.per_rank import (
    cache_groups,
    can_run_directly,
    get_rank_sizes,
    list_leaves,
    local_collectives,
    local_tensors,
    make_meta_reader,
    make_rank_loop,
    read_common_size,
    run_operator,
)
from layoutmap.engines.torch.per_rank import enabled_local_tensor_mode as enabled_local_tensor_mode
from layoutmap.engines.torch.per_rank import get_rank_tensors as get_rank_tensors
from layoutmap.engines.torch.per_rank import get_ranks as get_ranks

with Needed("torch"):
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
    from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
    from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

check_names(
    "torch",
    (torch, "_disable_dynamo"),
    (DeviceMesh, "_rank_map"),
    (
        local_tensors,
        "_PROCESS_MODE _THREAD_LOCAL_TENSOR_MODE _for_each_rank_run_func _compute_local_tensor_meta",
    ),
    (local_tensors, "_LocalDeviceMesh _PATCHED_DEVICE_MESH_METHODS"),
    (local_collectives, "_get_default_group _prepare_collective_groups"),
    (LocalTensor, "__torch_dispatch__"),
    (Shard, "local_shard_size_and_offset"),
    (StridedShard, "_to_replicate_tensor local_shard_size_and_offset"),
    (LocalTensorMode, "_patch_device_mesh _unpatch_device_mesh _disable"),
    (LocalTensorMode, "_patch_random_functions _unpatch_random_functions enable_"),
    (local_tensors, "get_local_tensor_mode_list"),
)


def list_root_ranks(mesh: DeviceMesh) -> list[int]:
    """Return all ranks of the mesh that a mesh was sliced from."""
    return mesh._rank_map.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


@contextmanager
def _leave_modes_above(is_found: Callable[[object], bool]) -> Generator[None]:
    """Leave the program's dispatch modes above a mode that `is_found` accepts, while the context is open."""
    above: list[Any] = []
    for mode in reversed(list_dispatch_modes()):
        # Torch's modes are below the program's.
        if is_found(mode) or getattr(mode, "_mode_key", None) is not None:
            break
        above.append(_pop_dispatch_mode())
    try:
        yield
    finally:
        for mode in reversed(above):
            _push_dispatch_mode(mode)


class SimulationMode(LocalTensorMode):
    """A `LocalTensorMode` that is entered below the modes of the program.

    So these see what they would see of real devices, such as collectives.
    """

    @skip_function_modes
    def __enter__(self) -> Self:
        with _leave_modes_above(lambda mode: isinstance(mode, LocalTensorMode)):
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with _leave_modes_above(lambda mode: mode is self):
            super().__exit__(*error)


class _Modes(threading.local):
    """Keep the simulations of each thread separate, because torch has one list for all threads."""

    def __init__(self, first: object) -> None:
        self.value = [first]


_UNUSED_CHANGES = tuple(
    f"{prefix}_{changed}"
    for changed in ("device_mesh", "dist", "random_functions")
    for prefix in ("_patch", "_unpatch")
)


def _enter_mode(mode: LocalTensorMode) -> TorchDispatchMode:
    """Enter a mode, and let its ranks draw from the one generator of this process.

    Torch copies the state of the generator for each rank here, which takes longer than most operators.
    """
    local_tensors.get_local_tensor_mode_list().append(mode)
    mode.enable_()
    return TorchDispatchMode.__enter__(mode)


def make_simulation_patches(
    mode: Any, group: dist.ProcessGroup | None, coordinate: Function, pickled: Function
) -> Sequence[Attribute]:
    """Return the patches that simulate the ranks of DTensors with a `LocalTensor`, on all threads.

    Args:
        mode: The simulation of all ranks, which is not entered: what computes with a `LocalTensor` enters one.
        group: The process group of all ranks.
        coordinate: Returns the coordinates of the simulated ranks in a mesh: called with what torch does, and the mesh.
        pickled: Returns `DTensor.__reduce_ex__`, of what that is.
    """
    mode._disable = False  # active for all threads, as if it had been entered
    of_mesh = vars(local_tensors._LocalDeviceMesh)
    methods = {name: of_mesh[name].__func__ for name in local_tensors._PATCHED_DEVICE_MESH_METHODS}
    methods["get_coordinate"] = functools.partial(coordinate, methods["get_coordinate"])
    return (
        # Meshes read the simulation of the thread, so modes need not patch them. Functions of torch such as
        # get_rank (from 2.14 on) stay unpatched for the rest of the program.
        *(
            Attribute(LocalTensorMode, name, lambda _: lambda _: None)  # pyright: ignore[reportUnknownLambdaType]
            for name in _UNUSED_CHANGES
            if hasattr(LocalTensorMode, name)
        ),
        *(
            Attribute(DeviceMesh, name, functools.partial(_choose_method, local))
            for name, local in methods.items()
        ),
        Attribute(local_tensors, "_THREAD_LOCAL_TENSOR_MODE", lambda _: _Modes(mode)),
        Attribute(LocalTensorMode, "__enter__", lambda _: _enter_mode),  # pyright: ignore[reportUnknownLambdaType]
        Attribute(local_tensors, "_PROCESS_MODE", lambda _: False),  # otherwise one mode serves all threads
        # Torch has no default group for simulated ranks.
        Attribute(local_collectives, "_get_default_group", lambda _: lambda: group),
        Attribute(local_collectives, "_prepare_collective_groups", cache_groups),
        Attribute(Shard, "local_shard_size_and_offset", _cache_sizes),
        Attribute(StridedShard, "local_shard_size_and_offset", _cache_sizes),
        Attribute(StridedShard, "_to_replicate_tensor", functools.partial(_wrap_uneven_gather, type(mode))),
        Attribute(local_tensors, "_for_each_rank_run_func", make_rank_loop),
        Attribute(local_tensors, "_compute_local_tensor_meta", make_meta_reader),
        Attribute(LocalTensor, "__torch_dispatch__", _skip_simulation),
        Attribute(DTensor, "__reduce_ex__", pickled),
    )


def _choose_method(local: Function, plain: Function) -> Function:
    """Return a mesh method that is simulated only while this thread simulates ranks."""

    @functools.wraps(plain)
    def call_method(*args: object, **kwargs: object) -> object:
        return (plain if enabled_local_tensor_mode() is None else local)(*args, **kwargs)

    return call_method


def _skip_simulation(dispatch: Any) -> object:
    """Run most operators without entering a simulation, which takes longer than the operator."""

    def dispatch_or_read(
        cls: Any, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if (size := read_common_size(func, args)) is not None:
            return size
        leaves = list_leaves(args, kwargs or {})
        if can_run_directly(func, leaves):
            ranks = next(get_ranks(leaf) for leaf in leaves if isinstance(leaf, LocalTensor))
            return run_operator(func, ranks, args, kwargs or {}, leaves)
        return dispatch.__func__(cls, func, types, args, kwargs)

    return cast(object, classmethod(cast(Any, exclude_from_compile(dispatch_or_read))))


def exclude_from_compile(function: Function) -> Function:
    """Return a function that `torch.compile` does not trace.

    Outside of `torch.compile` it takes no time, but torch's own wrapper takes as long as a small operator.
    """
    excluded: Function = torch._disable_dynamo(function)  # pyright: ignore[reportPrivateImportUsage]

    @functools.wraps(function)
    def call_untraced(*args: Any, **kwargs: Any) -> Any:
        return (function if get_eval_frame_callback() is None else excluded)(*args, **kwargs)

    return call_untraced


def _cache_sizes(find: Any) -> object:
    """Return the function that finds each rank's shard size, with a cache."""
    known: dict[tuple[object, ...], object] = {}
    is_static = isinstance(find, staticmethod)
    own = cast(Function, find.__func__ if is_static else find)  # pyright: ignore[reportUnknownMemberType]

    @functools.wraps(own)
    def find_size(*args: object, **named: object) -> object:
        nodes = [getattr(each, "node", each) for each in args]
        if named or not all(isinstance(node, (int, Placement, LocalIntNode)) for node in nodes):
            return own(*args, **named)  # also handles symbolic sizes
        ranks = getattr(enabled_local_tensor_mode(), "ranks", None)
        key = (
            ranks,
            *((*get_rank_sizes(each).items(),) if isinstance(each, LocalIntNode) else each for each in nodes),
        )
        if key not in known:
            known[key] = own(*args)
        return known[key]

    return staticmethod(find_size) if is_static else find_size


def _wrap_uneven_gather(
    simulation: Callable[[frozenset[int]], AbstractContextManager[Any]], gather: Function
) -> object:
    """Gather strided shards of ranks of equal sizes together, since torch makes one range for all ranks."""

    @functools.wraps(gather)
    def gather_by_size(
        placement: Placement, local: LocalTensor, mesh: DeviceMesh, mesh_dim: int, shape: Sequence[int]
    ) -> object:
        nodes = [getattr(size, "node", None) for size in shape]
        if not any(isinstance(node, LocalIntNode) for node in nodes):
            return gather(placement, local, mesh, mesh_dim, shape)
        pieces, ranks_of_shape = get_rank_tensors(local), dict[tuple[int, ...], list[int]]()
        for rank in pieces:
            sizes = [
                get_rank_sizes(node)[rank] if isinstance(node, LocalIntNode) else int(size)
                for node, size in zip(nodes, shape, strict=True)
            ]
            ranks_of_shape.setdefault(tuple(sizes), []).append(rank)
        gathered: dict[int, torch.Tensor] = {}
        for sizes, ranks in ranks_of_shape.items():
            with simulation(frozenset(ranks)):
                some = LocalTensor({rank: pieces[rank] for rank in ranks})
                gathered |= get_rank_tensors(gather(placement, some, mesh, mesh_dim, sizes))
        return LocalTensor(gathered)

    return gather_by_size
