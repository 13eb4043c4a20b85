"""Simulate several devices in one process, for a program that was started as one process.

A program with a launcher or a process group uses that. Any other program gets a process group of eight simulated ranks,
or of the number that `set_number_of_simulated_devices` sets. The local tensor of a DTensor is then a `LocalTensor`,
which stores the tensors of all ranks, and each operation runs for one rank after the other.

A simulation begins with the first device mesh, and ends after the last tensor on one is gone (see `changes`). Functions
that compute with tensors of simulated ranks enter it. The simulated process group is the default group only while a
mesh is made. Functions that only ask for the number of devices start nothing.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from layoutmap.core.errors import EngineError, LayoutMapWarning
from layoutmap.engines.checks import check_devices_are_simulated
from layoutmap.engines.launchers import detect_launcher
from layoutmap.engines.tested import ImportErrorConverter
from layoutmap.engines.torch.changes import call_when_patches_are_removed, install_patches
from layoutmap.engines.torch.local_tensors import (
    LocalIntNode,
    LocalTensor,
    LocalTensorMode,
    SimulationMode,
    enabled_local_tensor_mode,
    get_rank_tensors,
    get_ranks,
    list_ranks_of_root_mesh,
    make_simulation_patches,
)
from layoutmap.engines.torch.modes import disable_modes, list_dispatch_modes, skip_function_modes
from layoutmap.engines.torch.operators import COLLECTIVES, Function
from layoutmap.engines.torch.per_rank import (
    can_run_without_simulation_mode,
    flatten_args,
    read_common_size,
    run_operator_for_ranks,
)
from layoutmap.engines.torch.specs import clear_sharding_caches, get_local

with ImportErrorConverter("torch"):
    from torch.distributed.distributed_c10d import GroupMember
    from torch.testing._internal.distributed.fake_pg import FakeStore

_num_devices = 8
_lock = threading.RLock()
_simulation: _Simulation | None = None
_group: dist.ProcessGroup | None = None


class _Simulation(SimulationMode):
    """Simulate ranks for operators with a `LocalTensor`, and run other operators unchanged."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if (size := read_common_size(func, args)) is not None:
            return size
        kwargs = kwargs or {}
        leaves = flatten_args(args, kwargs)
        locals_ = (get_local(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves)
        ranks = next((get_ranks(each) for each in locals_ if isinstance(each, LocalTensor)), self.ranks)
        if ranks != self.ranks:  # the mesh has only some of the simulated ranks
            with _Simulation(ranks):  # the results must have the ranks of the arguments
                return func(*args, **kwargs)
        if func.namespace not in COLLECTIVES and not any(map(_has_value_per_rank, leaves)):
            return func(*args, **kwargs)
        if can_run_without_simulation_mode(func, leaves):
            return run_operator_for_ranks(func, ranks, args, kwargs, leaves)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _find_rank_coordinates(find_coordinates: Function, mesh: DeviceMesh) -> object:
    """Return the mesh coordinates of the simulated ranks in a mesh. `find_coordinates` is torch's method."""
    now: Any = enabled_local_tensor_mode()
    return _compute_rank_coordinates(find_coordinates, mesh, now.ranks)


@functools.lru_cache(maxsize=256)  # DTensor reads them in every operator
@skip_function_modes  # torch holds a lock here, and would deadlock if a function mode called torch
def _compute_rank_coordinates(
    find_coordinates: Function, mesh: DeviceMesh, simulated: frozenset[int]
) -> object:
    """Return the mesh coordinates of those simulated ranks that are in a mesh."""
    with _Simulation(simulated & frozenset(list_ranks_of_root_mesh(mesh))):
        return find_coordinates(mesh)


def _has_value_per_rank(value: object) -> bool:
    """Return whether a value is a tensor or size that stores a value for each simulated rank."""
    return isinstance(value, LocalTensor) or (
        isinstance(value, torch.SymInt) and isinstance(value.node, LocalIntNode)  # pyright: ignore[reportUnknownMemberType]
    )


def ensure_process_group() -> None:
    """Create a process group if none exists: that of the launcher, or without a launcher a simulated one."""
    if has_process_group():
        return
    with _lock:  # read with the lock, because another thread may be starting the simulation
        if has_process_group():
            return
        if _count_launched_processes():
            dist.init_process_group()
        else:
            _start_simulation(get_world_size())


def has_process_group() -> bool:
    """Return whether a process group exists."""
    return _simulation is not None or dist.is_initialized()


def _start_simulation(num_ranks: int) -> None:
    """Create the process group of simulated ranks, and install the patches that simulate them."""
    global _simulation, _group
    _warn_of_other_processes(num_ranks)
    # init_process_group refuses to create a second default group, so hide the existing one during the call.
    with replace_default_group_temporarily(None):
        on_error = sys.excepthook
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        sys.excepthook = on_error  # restore the hook, because torch has installed one that prints a rank
        _group = dist.group.WORLD
    simulation = _Simulation(num_ranks)
    install_patches(
        *make_simulation_patches(
            simulation,
            _group,
            _find_rank_coordinates,
            functools.partial(functools.partialmethod, _reduce_for_pickle),
        )
    )
    call_when_patches_are_removed(_end_simulation)
    _simulation = simulation


def set_simulated_default_group_temporarily() -> AbstractContextManager[None]:
    """Make the group of simulated ranks (if any) torch's default process group, while the `with` block runs."""
    return replace_default_group_temporarily(_group) if _simulation is not None else nullcontext()


@contextmanager
def replace_default_group_temporarily(group: dist.ProcessGroup | None) -> Generator[None]:
    """Make `group` torch's default process group while the `with` block runs. `None`: there is no default group."""
    before = GroupMember.WORLD
    GroupMember.WORLD = group
    try:
        yield
    finally:
        GroupMember.WORLD = before


def _end_simulation() -> None:
    global _simulation, _group
    dist.destroy_process_group(_group)
    clear_sharding_caches()
    _simulation = _group = None


def get_global_group() -> dist.ProcessGroup | None:
    """Return the process group of all ranks, or None before it exists."""
    return _group if _simulation is not None else dist.group.WORLD


# In torch, each device has its own process, so a program without a launcher simulates ranks (decisions/0150).
def set_number_of_simulated_devices(number: int) -> None:
    """Set the number of devices that this process simulates (see `Engine.simulate_devices`)."""
    global _num_devices
    if not is_simulated():
        raise EngineError(
            f"{number} devices cannot be simulated: this program is one of {get_world_size()} processes",
            why="each process of a launcher or a process group is a device",
            fix="leave lm.simulate_devices out, or start the program without a launcher",
        )
    with _lock:
        if _simulation is not None:
            check_devices_are_simulated(
                "torch's simulation", number, [f"CPU:{each}" for each in range(get_world_size())]
            )
        _num_devices = number


def _reduce_for_pickle(tensor: DTensor, original: Function, protocol: object) -> object:
    """Return the pickle form of a DTensor. A DTensor of simulated ranks is pickled as an unsharded tensor."""
    if not isinstance(get_local(tensor), LocalTensor):
        return original(tensor, protocol)
    with simulate_ranks_of_mesh(tensor.device_mesh):
        detached: Any = tensor.detach()
        value: Any = get_first_local_tensor(detached.full_tensor())
    if isinstance(tensor, torch.nn.Parameter):
        value = torch.nn.Parameter(value, tensor.requires_grad)
    return value.__reduce_ex__(protocol)


def _warn_of_other_processes(num_devices: int) -> None:
    """Warn if a launcher started several processes, each of which would simulate all devices."""
    started_by = detect_launcher()
    if started_by is not None and started_by.num_processes > 1:
        warnings.warn(
            f"{num_devices} devices are simulated in each of {started_by.num_processes} processes that "
            f"{started_by.name} started, and each process trains alone\n"
            "  why   torch finds the other processes only by RANK and WORLD_SIZE, which are not set\n"
            "  fix   start the program with torchrun, as in srun torchrun ..., or set them",
            LayoutMapWarning,
            stacklevel=2,
        )


def _count_launched_processes() -> int:
    """Return the number of processes that a launcher started, or 0 without a launcher."""
    number = int(os.environ.get("WORLD_SIZE", "0"))
    # torchrun sets both variables. A shell may set WORLD_SIZE=1 alone, which does not start a process group.
    return number if number > 1 or "MASTER_ADDR" in os.environ else 0


def is_simulated() -> bool:
    """Return whether this process simulates ranks, or would if a mesh were made now. Nothing is started."""
    return _simulation is not None or not (dist.is_initialized() or _count_launched_processes())


def get_world_size() -> int:
    """Return the number of ranks, including simulated ones. Nothing is started."""
    if has_process_group():
        return dist.get_world_size(get_global_group())
    return _count_launched_processes() or _num_devices


def get_rank() -> int:
    """Return the rank of this process, or 0 in a simulation. Nothing is started."""
    if _simulation is not None:  # torch would read the default group, and a simulation has none
        return 0
    return dist.get_rank(get_global_group()) if has_process_group() else int(os.environ.get("RANK", "0"))


def filter_local_ranks(ranks: Iterable[int]) -> list[int]:
    """Return the ranks among `ranks` that belong to this process. In a simulation, all ranks do."""
    return list(ranks) if is_simulated() else [each for each in ranks if each == get_rank()]


@contextmanager
def simulate_ranks(ranks: Iterable[int]) -> Generator[None]:
    """Simulate only `ranks` on this thread while the `with` block runs. Without a simulation, do nothing."""
    wanted = frozenset(ranks)
    ensure_process_group()
    if not is_simulated():
        yield
        return
    inner = next(
        (mode for mode in reversed(list_dispatch_modes()) if isinstance(mode, LocalTensorMode)), None
    )
    if inner is not None and inner.ranks == wanted:
        yield
        return
    with _Simulation(wanted):
        yield


@functools.lru_cache(maxsize=256)  # torch recomputes the list at each call
def list_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of a device mesh in row-major order."""
    with disable_modes():  # a mode, such as that of fake tensors, would see the tensor of ranks
        return tuple(mesh.mesh.flatten().tolist())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType, reportUnknownVariableType]


def simulate_ranks_of_mesh(mesh: DeviceMesh) -> AbstractContextManager[None]:
    """Simulate only the ranks of a device mesh (see `simulate_ranks`)."""
    return simulate_ranks(list_ranks(mesh))


def make_local_tensor(pieces: Mapping[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the local tensor of a DTensor, from the tensor of each rank of this process.

    Args:
        pieces: The tensors by rank, each in its own memory.
        dtype: The element type of the empty tensor for a process without a piece.
    """
    if is_simulated():
        return LocalTensor(dict(pieces))
    return pieces[get_rank()] if pieces else torch.empty(0, dtype=dtype)


def get_tensors_by_rank(local: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the tensor of each rank of this process, from the local tensor of a DTensor."""
    if isinstance(local, LocalTensor):
        return get_rank_tensors(local)
    return {get_rank(): local}


def get_first_local_tensor(local: torch.Tensor) -> torch.Tensor:
    """Return the first simulated rank's tensor, without autograd. Other tensors are returned unchanged."""
    return next(iter(get_rank_tensors(local).values())) if isinstance(local, LocalTensor) else local


def copy_to_ranks(tensor: torch.Tensor, ranks: Iterable[int]) -> torch.Tensor:
    """Return an unsharded tensor as a local tensor without autograd. Each simulated rank gets a copy.

    The copies do not share memory, because each rank makes an in-place change once.
    """
    if not is_simulated():
        return tensor.detach()
    if isinstance(tensor, LocalTensor):
        return tensor.detach().clone()
    return LocalTensor({each: tensor.detach().clone() for each in ranks})
