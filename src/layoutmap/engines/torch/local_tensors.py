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

from layoutmap.engines.patches import AttributePatch, patch_method_context
from layoutmap.engines.tested import ImportErrorConverter, check_names_exist
from layoutmap.engines.torch.modes import TorchDispatchMode, list_dispatch_modes, skip_function_modes
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.per_rank import LocalIntNode as LocalIntNode
from layoutmap.engines.torch.per_rank import LocalTensor as LocalTensor
from layoutmap.engines.torch.per_rank import LocalTensorMode as LocalTensorMode
from layoutmap.engines.torch.per_rank import (
    can_run_without_simulation_mode,
    construct_local_tensor,
    flatten_args,
    get_rank_sizes,
    local_collectives,
    local_tensors,
    make_cached_group_finder,
    make_rank_loop,
    read_common_size,
    run_operator_for_ranks,
    update_layout,
)
from layoutmap.engines.torch.per_rank import enabled_local_tensor_mode as enabled_local_tensor_mode
from layoutmap.engines.torch.per_rank import get_rank_tensors as get_rank_tensors
from layoutmap.engines.torch.per_rank import get_ranks as get_ranks

with ImportErrorConverter("torch"):
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
    from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
    from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

check_names_exist(
    "torch",
    (torch, "_disable_dynamo"),
    (DeviceMesh, "_rank_map"),
    (
        local_tensors,
        "_PROCESS_MODE _THREAD_LOCAL_TENSOR_MODE _for_each_rank_run_func",
    ),
    (local_tensors, "_LocalDeviceMesh _PATCHED_DEVICE_MESH_METHODS"),
    (local_collectives, "_get_default_group _prepare_collective_groups"),
    (LocalTensor, "__new__ __torch_dispatch__ _sync_meta"),
    (Shard, "local_shard_size_and_offset"),
    (StridedShard, "_to_replicate_tensor local_shard_size_and_offset"),
    (LocalTensorMode, "_patch_device_mesh _unpatch_device_mesh _disable"),
    (LocalTensorMode, "_patch_random_functions _unpatch_random_functions enable_"),
    (local_tensors, "get_local_tensor_mode_list"),
)


def list_ranks_of_root_mesh(mesh: DeviceMesh) -> list[int]:
    """Return all ranks of a device mesh's root mesh: the mesh that it is a slice of, or the device mesh itself."""
    return mesh._rank_map.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


@contextmanager
def _suspend_modes_above(is_target: Callable[[object], bool]) -> Generator[None]:
    """Leave the program's dispatch modes above the mode that `is_target` accepts, while the `with` block runs."""
    above: list[Any] = []
    for mode in reversed(list_dispatch_modes()):
        # Torch's own modes are below the program's modes, so stop at the first mode of torch.
        if is_target(mode) or getattr(mode, "_mode_key", None) is not None:
            break
        above.append(_pop_dispatch_mode())
    try:
        yield
    finally:
        for mode in reversed(above):
            _push_dispatch_mode(mode)


class SimulationMode(LocalTensorMode):
    """Simulate ranks as a `LocalTensorMode` does, but below the dispatch modes of the program.

    So the program's modes see the same operators as on real devices, such as collectives.
    """

    @skip_function_modes
    def __enter__(self) -> Self:
        with _suspend_modes_above(lambda mode: isinstance(mode, LocalTensorMode)):
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with _suspend_modes_above(lambda mode: mode is self):
            super().__exit__(*error)


class _SimulationsPerThread(threading.local):
    """Store the active simulations of each thread, because torch stores those of all threads in one list."""

    def __init__(self, first: object) -> None:
        self.value = [first]


_UNUSED_METHODS = tuple(
    f"{prefix}_{changed}"
    for changed in ("device_mesh", "dist", "random_functions")
    for prefix in ("_patch", "_unpatch")
)


def _enter_simulation_mode(mode: LocalTensorMode) -> TorchDispatchMode:
    """Replace `LocalTensorMode.__enter__`: enter a mode, and let all ranks draw from one generator.

    Torch copies the state of the generator for each rank here, which takes longer than most operators.
    """
    local_tensors.get_local_tensor_mode_list().append(mode)
    mode.enable_()
    return TorchDispatchMode.__enter__(mode)


def make_simulation_patches(
    mode: Any, group: dist.ProcessGroup | None, find_coordinates: Function, make_reduce_ex: Function
) -> Sequence[AttributePatch]:
    """Return the patches with which DTensors simulate ranks by a `LocalTensor`, on all threads.

    Args:
        mode: The simulation of all ranks. It is not entered, because functions that compute enter one.
        group: The process group of all ranks.
        find_coordinates: Called with torch's own method and a mesh. Returns the mesh coordinates of simulated ranks.
        make_reduce_ex: Returns a `DTensor.__reduce_ex__` for torch's own.
    """
    mode._disable = False  # threads use this mode without entering it, so it must be enabled here
    of_mesh = vars(local_tensors._LocalDeviceMesh)
    methods = {name: of_mesh[name].__func__ for name in local_tensors._PATCHED_DEVICE_MESH_METHODS}
    methods["get_coordinate"] = functools.partial(find_coordinates, methods["get_coordinate"])
    return (
        # These methods would patch meshes, and from torch 2.14 on also functions such as get_rank. Meshes read the
        # thread's simulation, so they need no patch, and functions must stay unchanged for the program.
        *(
            AttributePatch(LocalTensorMode, name, lambda _: lambda _: None)  # pyright: ignore[reportUnknownLambdaType]
            for name in _UNUSED_METHODS
            if hasattr(LocalTensorMode, name)
        ),
        *(
            AttributePatch(DeviceMesh, name, functools.partial(_wrap_mesh_method, local))
            for name, local in methods.items()
        ),
        AttributePatch(local_tensors, "_THREAD_LOCAL_TENSOR_MODE", lambda _: _SimulationsPerThread(mode)),
        AttributePatch(LocalTensorMode, "__enter__", lambda _: _enter_simulation_mode),  # pyright: ignore[reportUnknownLambdaType]
        # If this is True, torch uses one mode for the whole process, and not one for each thread.
        AttributePatch(local_tensors, "_PROCESS_MODE", lambda _: False),
        # While ranks are simulated, torch has no default group, so return the group of the simulated ranks.
        AttributePatch(local_collectives, "_get_default_group", lambda _: lambda: group),
        AttributePatch(local_collectives, "_prepare_collective_groups", make_cached_group_finder),
        AttributePatch(Shard, "local_shard_size_and_offset", _make_cached_shard_size_function),
        AttributePatch(StridedShard, "local_shard_size_and_offset", _make_cached_shard_size_function),
        AttributePatch(
            StridedShard,
            "_to_replicate_tensor",
            functools.partial(_make_gather_of_unequal_shards, type(mode)),
        ),
        AttributePatch(local_tensors, "_for_each_rank_run_func", make_rank_loop),
        AttributePatch(LocalTensor, "__new__", lambda _: staticmethod(construct_local_tensor)),
        AttributePatch(LocalTensor, "_sync_meta", lambda _: update_layout),
        AttributePatch(LocalTensor, "__torch_dispatch__", _make_dispatch_without_simulation_mode),
        AttributePatch(DTensor, "__reduce_ex__", make_reduce_ex),
    )


def _wrap_mesh_method(simulated: Function, original: Function) -> Function:
    """Return a mesh method that calls `simulated` while this thread simulates ranks, and otherwise `original`."""

    @functools.wraps(original)
    def call_simulated_or_original(*args: object, **kwargs: object) -> object:
        return (original if enabled_local_tensor_mode() is None else simulated)(*args, **kwargs)

    return call_simulated_or_original


def _make_dispatch_without_simulation_mode(dispatch: Any) -> object:
    """Return a `__torch_dispatch__` that runs most operators without entering a simulation, which would be slower."""

    def dispatch_operator_directly(
        cls: Any, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if (size := read_common_size(func, args)) is not None:
            return size
        leaves = flatten_args(args, kwargs or {})
        if can_run_without_simulation_mode(func, leaves):
            ranks = next(get_ranks(leaf) for leaf in leaves if isinstance(leaf, LocalTensor))
            return run_operator_for_ranks(func, ranks, args, kwargs or {}, leaves)
        return dispatch.__func__(cls, func, types, args, kwargs)

    # Torch excludes the function that this one replaces from torch.compile, so exclude this one, too.
    excluded: Any = torch._disable_dynamo(dispatch_operator_directly)  # pyright: ignore[reportPrivateImportUsage]
    return cast(object, classmethod(excluded))


def _make_cached_shard_size_function(find_size_and_offset: Any) -> object:
    """Return a `local_shard_size_and_offset` that caches its results."""
    known: dict[tuple[object, ...], object] = {}
    is_static = isinstance(find_size_and_offset, staticmethod)
    original = cast(Function, find_size_and_offset.__func__ if is_static else find_size_and_offset)  # pyright: ignore[reportUnknownMemberType]

    @functools.wraps(original)
    def find_cached_shard_size(*args: object, **named: object) -> object:
        nodes = [getattr(each, "node", each) for each in args]
        if named or not all(isinstance(node, (int, Placement, LocalIntNode)) for node in nodes):
            return original(*args, **named)  # symbolic sizes cannot be keys, so do not cache
        ranks = getattr(enabled_local_tensor_mode(), "ranks", None)
        key = (
            ranks,
            *((*get_rank_sizes(each).items(),) if isinstance(each, LocalIntNode) else each for each in nodes),
        )
        if key not in known:
            known[key] = original(*args)
        return known[key]

    return staticmethod(find_cached_shard_size) if is_static else find_cached_shard_size


def compute_strided_shards_in(
    make_context: Callable[[], AbstractContextManager[object]],
) -> AbstractContextManager[object]:
    """Let DTensor compute the sizes of strided shards in a context of this kind until the block ends."""
    return patch_method_context(StridedShard, "local_shard_size_and_offset", make_context)


def _make_gather_of_unequal_shards(
    make_simulation: Callable[[frozenset[int]], AbstractContextManager[Any]], gather: Function
) -> object:
    """Return a gather of strided shards, separate for each size, because torch assumes one size for all ranks."""

    @functools.wraps(gather)
    def gather_per_shard_size(
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
            with make_simulation(frozenset(ranks)):
                some = LocalTensor({rank: pieces[rank] for rank in ranks})
                gathered |= get_rank_tensors(gather(placement, some, mesh, mesh_dim, sizes))
        return LocalTensor(gathered)

    return gather_per_shard_size
