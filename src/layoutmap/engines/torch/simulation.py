"""Several devices in one process, for a program that was started as one process.

A program that `torchrun` has started, or that has a process group, uses that. Any other gets a process group of
simulated ranks, eight unless `simulate` was told another number. A DTensor then holds a `LocalTensor`:
the pieces of all ranks, on which each operation runs for one rank after the other.

A simulation begins with the first device mesh, and lasts as long as the process: DTensors of simulated ranks compute
rightly only while it runs. Plain tensors stay plain in it. Questions about devices start nothing: they are answered as
things will be, should the program not begin a process group of its own before.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from layoutmap.core.errors import EngineError, LayoutMapWarning
from layoutmap.engines.checks import check_simulated
from layoutmap.engines.launchers import launcher
from layoutmap.engines.torch.one_process import refuse_collective, split_nothing
from layoutmap.engines.torch.private import (
    COLLECTIVES,
    FakeStore,
    LocalIntNode,
    LocalTensor,
    LocalTensorMode,
    SimulationMode,
    dispatch_modes,
    enabled_local_tensor_mode,
    gather_strided_shards_by_size,
    local_of,
    pieces_by_rank,
    ranks_around,
    ranks_of_local,
    run_for_ranks_of_arguments,
    simulate_on_all_threads,
    tree_leaves,
)

_num_devices = 8
_lock = threading.RLock()
_simulation: _Simulation | None = None
_has_begun = False


class _Simulation(SimulationMode):
    """A simulation in which what has nothing to do with simulated ranks is left alone."""

    def meshes_patched(self, plain_methods: Mapping[str, Any]) -> None:
        """Have methods of meshes answer for the ranks that are simulated now, and as torch does without any."""
        patched: Any = DeviceMesh
        of_all = patched.get_coordinate

        def get_coordinate(mesh: DeviceMesh) -> Any:
            """The coordinates of the ranks in a mesh, which may have fewer than are simulated now on this thread."""
            ranks = frozenset(ranks_around(mesh))
            now: Any = enabled_local_tensor_mode() or _simulation
            if now.ranks <= ranks:
                return of_all(mesh)
            with _Simulation(now.ranks & ranks):
                return mesh.get_coordinate()

        patched.get_coordinate = get_coordinate
        for name, plain in plain_methods.items():
            setattr(patched, name, _either(plain, getattr(patched, name)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        locals_ = (local_of(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves)
        ranks = next((ranks_of_local(each) for each in locals_ if isinstance(each, LocalTensor)), self.ranks)
        if ranks != self.ranks:  # a tensor on another mesh than that of all ranks
            with _Simulation(ranks):
                return func(*args, **kwargs)
        if not any(map(_is_per_rank, leaves)):
            if func.namespace not in COLLECTIVES:
                return func(*args, **kwargs)
            refuse_collective(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _either(plain: Any, local: Any) -> Any:
    """A method of a mesh where ranks are simulated on this thread, and where they are not, as in parts of torch."""

    @functools.wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        return (plain if enabled_local_tensor_mode() is None else local)(*args, **kwargs)

    return method


def _is_per_rank(value: Any) -> bool:
    return isinstance(value, LocalTensor) or (
        isinstance(value, torch.SymInt) and isinstance(value.node, LocalIntNode)
    )


def start() -> None:
    """Make sure that there is a process group: the one there is, that of the launcher, or a simulated one.

    Raises:
        EngineError: A simulation would begin inside of a dispatch mode, which would end it.
    """
    global _simulation, _has_begun
    if _has_begun and dist.is_initialized():
        return
    with _lock:  # also to look: another thread may have begun, and not be done
        if dist.is_initialized():
            _has_begun = True
            return
        if _num_launched() > 1:
            dist.init_process_group()
            _has_begun = True
            return
        if dispatch_modes():
            raise EngineError(
                "simulated devices were asked for first inside of a dispatch mode",
                facts={"mode": type(dispatch_modes()[-1]).__name__},
                why="the simulation lasts as long as the process, and that mode ends before",
                fix="open a scope, or place an array with layoutmap.dtensor, before the mode begins",
            )
        number = world_size()
        _warn_of_processes(number)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
        split_nothing()
        _simulation = _Simulation(number)
        _simulation.__enter__()
        simulate_on_all_threads(_simulation)
        run_for_ranks_of_arguments()
        gather_strided_shards_by_size(_Simulation)
        pickled: Any = DTensor
        pickled.__reduce_ex__ = _reduced
        _has_begun = True


def simulate(number: int) -> None:  # why: decisions/0013
    """Set how many ranks are simulated; see `Engine.simulate`."""
    global _num_devices
    if not is_simulated():
        raise EngineError(
            f"{number} devices cannot be simulated: this program is one of {world_size()} processes",
            why="each process of a launcher or a process group is a device",
            fix="leave lm.simulate_devices out, or start the program alone",
        )
    with _lock:
        if _simulation is not None:
            check_simulated("torch's simulation", number, [f"CPU:{each}" for each in range(world_size())])
        _num_devices = number


def _reduced(tensor: Any, protocol: Any) -> Any:
    """How a DTensor is pickled: one of simulated ranks as a plain tensor, since those end with the process."""
    if not isinstance(local_of(tensor), LocalTensor):
        return super(DTensor, tensor).__reduce_ex__(protocol)
    with on_mesh(tensor.device_mesh):
        value: Any = plain(tensor.detach().full_tensor())
    if isinstance(tensor, torch.nn.Parameter):
        value = torch.nn.Parameter(value, tensor.requires_grad)
    return value.__reduce_ex__(protocol)


def _warn_of_processes(number: int) -> None:
    """Warn if there are other processes, which a simulation knows nothing of."""
    started_by = launcher()
    if started_by is not None and started_by.num_processes > 1:
        warnings.warn(
            f"{number} devices are simulated in each of {started_by.num_processes} processes that {started_by.name} "
            "started, and they do not know of each other\n"
            "  why   torch reads RANK and WORLD_SIZE, which are not set\n"
            "  fix   start the program with torchrun, as in srun torchrun ..., or set them",
            LayoutMapWarning,
            stacklevel=2,
        )


def _num_launched() -> int:
    """The number of processes that the launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_simulated() -> bool:
    """Whether the ranks are simulated in this process, or will be; nothing is started."""
    return _simulation is not None or not (dist.is_initialized() or _num_launched() > 1)


def world_size() -> int:
    """The number of ranks; nothing is started."""
    if dist.is_initialized():
        return dist.get_world_size()
    if _num_launched() > 1:
        return _num_launched()
    return _num_devices


def rank() -> int:
    """The rank of this process; 0 in a simulation. Nothing is started."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def ranks_here(ranks: Iterable[int]) -> list[int]:
    """The ranks of a list whose shards this process holds."""
    return list(ranks) if is_simulated() else [each for each in ranks if each == rank()]


@contextmanager
def on_ranks(ranks: Iterable[int]) -> Generator[None]:
    """Simulate just these ranks for a while, on this thread; without a simulation nothing is done."""
    wanted = frozenset(ranks)
    start()
    if not is_simulated():
        yield
        return
    inner = next((mode for mode in reversed(dispatch_modes()) if isinstance(mode, LocalTensorMode)), None)
    if inner is not None and inner.ranks == wanted:
        yield
        return
    with _Simulation(wanted):
        yield


@functools.lru_cache(maxsize=256)  # torch works it out anew each time
def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of a device mesh, row-major."""
    return tuple(mesh.mesh.flatten().tolist())


def on_mesh(mesh: DeviceMesh) -> AbstractContextManager[None]:
    """`on_ranks` for the ranks of a device mesh."""
    return on_ranks(ranks_of(mesh))


def join(pieces: Mapping[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The local tensor of a DTensor, from the piece of each rank that is here.

    Args:
        pieces: The pieces by rank; each must have memory of its own.
        dtype: The type, for a process that holds none.
    """
    if is_simulated():
        return LocalTensor(dict(pieces))
    return pieces[rank()] if pieces else torch.empty(0, dtype=dtype)


def pieces_of(local: torch.Tensor) -> dict[int, torch.Tensor]:
    """The piece of each rank that is here, of the local tensor of a DTensor."""
    if isinstance(local, LocalTensor):
        return pieces_by_rank(local)
    return {rank(): local}


def plain(local: torch.Tensor) -> torch.Tensor:
    """The one tensor of which all ranks hold the same, without a step of autograd."""
    return next(iter(pieces_by_rank(local).values())) if isinstance(local, LocalTensor) else local


def every_rank(tensor: torch.Tensor, ranks: Iterable[int]) -> torch.Tensor:
    """A plain tensor as the local tensor of which every rank has all, without a step of autograd.

    Simulated ranks get memory of their own each: an update in place happens once on each of them.
    """
    if not is_simulated():
        return tensor.detach()
    return LocalTensor({each: tensor.detach().clone() for each in ranks})
