"""The torch engine: `DTensor`s of `torch.distributed.tensor`.

A layout is `(DeviceMesh, placements)`. A process started by `torchrun` is one device; a program started as one process
has eight simulated ones.

References:
    https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.overrides import TorchFunctionMode

from layoutmap.core.blocks import BlockReader, Index, NumpyArray, get_slice_ends
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import EngineError
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment
from layoutmap.engines.agreement import check_computed
from layoutmap.engines.checks import (
    check_draws,
    check_initial_value,
    check_initializers,
    check_one_result,
    check_shard,
)
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.arrays import (
    by_device,
    check_placed,
    found,
    from_blocks,
    gather,
    layout_indices,
    layout_of,
    mark,
    move,
    native_of,
    own_memory,
    shard,
    shards_of,
)
from layoutmap.engines.torch.deferred_init import free_room, trace
from layoutmap.engines.torch.devices import bound_mesh, check_order, device_names
from layoutmap.engines.torch.dtensor_ops import computing, is_marked
from layoutmap.engines.torch.element_types import canonical, dtype_name, to_numpy, to_torch, torch_dtype
from layoutmap.engines.torch.malloc import give_back
from layoutmap.engines.torch.modes import plainly
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.processes import across, common_seeds, gathered, random_state
from layoutmap.engines.torch.storages import is_view_of_another
from layoutmap.engines.torch.trees import tree_leaves, tree_map

_LARGE = 1 << 20  # bytes: the least variable after which memory is given back to the system


class TorchEngine:
    """Holds DTensors. There is one of them: `engine()`. What its methods raise is in `Engine`."""

    name = "torch"
    array_types: tuple[type, ...] = (torch.Tensor,)
    several_dims = True
    devices = staticmethod(device_names)
    bind = staticmethod(bound_mesh)
    simulate = staticmethod(simulation.simulate)
    layout_of = staticmethod(layout_of)
    found = staticmethod(found)
    to_shards = staticmethod(shards_of)
    own_memory = staticmethod(own_memory)
    by_device = staticmethod(by_device)
    canonical = staticmethod(canonical)
    check_dtype = staticmethod(torch_dtype)

    # -- devices and layouts

    def check_layout(self, layout: Layout) -> None:
        """Refuse a layout that no DTensor can have, on any machine. Nothing is started.

        Raises:
            EngineError: The mesh's devices come in an order that torch does not keep.
        """
        check_order(layout.mesh)

    @plainly
    def native(self, layout: Layout, rank: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return the `(DeviceMesh, placements)` of a layout."""
        layout.check_rank((None,) * rank)
        return native_of(layout)

    # -- arrays

    @plainly
    def create(
        self,
        assignments: Mapping[str, Assignment],
        initializers: Mapping[str, Initializer],
        progress: Callable[[str], object] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Compute initial values, each straight in its layout, with the bits of `initializer.global_value()`.

        An initializer that can return blocks, or whose program can be computed in pieces, is: each process computes
        only what it holds. The global value of any other is computed, sharded, and freed before the next.
        """
        for assignment in assignments.values():
            self._checked(assignment)
        check_initializers(assignments, initializers)
        made: dict[str, torch.Tensor] = {}
        checksums: list[tuple[str, int]] = []
        try:
            used = {key: initializers[key] for key in assignments}
            seeds = common_seeds(used)
            # Blocks differ between processes, so the random state that they come from is compared; a recipe names that
            # state where it draws, and the scope has compared it.
            if across() and any(each.blocks is not None and each.recipe is None for each in used.values()):
                check_computed([("the random state", random_state())], gathered)
            with torch.no_grad():
                for key, assignment in assignments.items():
                    made[key], computed = _created(assignment, used[key], seeds.get(key))
                    checksums.append((assignment.variable.path, computed))
                    if assignment.variable.global_bytes >= _LARGE:
                        give_back()
                    if progress is not None:
                        progress(key)
            free_room()
            if across() and checksums:
                check_computed(checksums, gathered)
        except BaseException:
            made.clear()
            raise
        return made

    @plainly
    def from_shards(self, assignment: Assignment, read: BlockReader, *, copy: bool = True) -> object:
        """Make a DTensor whose shards are read one by one; see `Engine.from_shards`."""
        dtype = self._checked(assignment)
        variable = assignment.variable

        def checked(index: Index) -> torch.Tensor:
            block = to_torch(np.asarray(read(index)), copy=copy)
            check_shard(variable, index, block.shape, dtype_name(block.dtype))
            return block

        return from_blocks(variable.shape, dtype, assignment.layout, checked)

    @plainly
    def relayout(self, array: object, layout: Layout) -> object:
        """Return the same values in another layout; also takes plain tensors, and what numpy makes arrays of.

        Gradients pass through it, unless the array moves to another mesh. A plain tensor is the same in all processes.
        """
        if isinstance(array, DTensor):
            return move(array, layout)
        return shard(array if isinstance(array, torch.Tensor) else to_torch(np.asarray(array)), layout)

    @plainly
    def variable(self, array: torch.Tensor, *, name: str = "", trainable: bool = True) -> torch.nn.Parameter:
        """A `torch.nn.Parameter` that holds the tensor; only floating numbers can be trained."""
        floating = array.is_floating_point() or array.is_complex()
        parameter = torch.nn.Parameter(array.detach(), requires_grad=trainable and floating)
        layout = layout_of(array)
        if layout is not None:
            mark(parameter, layout)
        return parameter

    @plainly
    def to_numpy(self, array: torch.Tensor) -> NumpyArray:
        """Return all values of a tensor, gathered from all processes that hold some; they must all ask."""
        return to_numpy(gather(array))

    def all_gather(self, values: NumpyArray, mesh: Mesh) -> NumpyArray:
        """Return the values of each process, one row each; they must all ask."""
        return gathered(values)

    @contextmanager
    def run_on(self, mesh: Mesh, draws: str = "exact") -> Generator[None]:
        """While open, what is computed from plain tensors is on the mesh, replicated.

        What DTensor alone would compute wrongly is computed right, or refused: see `dtensor_ops.mode`.
        """
        check_draws(self.name, draws, ("exact", "tiles"))
        native = self.native(Layout.replicated(mesh, 0), 0)[0]
        by_shards = draws == "tiles"
        with simulation.on_mesh(native), _OnMesh(mesh), computing(native, by_shards=by_shards):
            yield

    def call(self, function: Function, layout: Layout, args: Args, kwargs: Kwargs) -> object:
        """Return the result of a function in a layout, with the bits of the plain call.

        A function that fills a tensor or draws random numbers, and takes no tensor, is computed in pieces. Any other is
        called as it is, and its result sharded.
        """
        leaves = tree_leaves((list(args), dict(kwargs)))
        if not any(isinstance(leaf, (torch.Tensor, np.ndarray)) for leaf in leaves):
            recipe = None
            with contextlib.suppress(EngineError):  # it returns something else than a tensor: refused below
                recipe = trace(lambda: function(*args, **kwargs))
            if recipe is not None and not recipe.why_global:
                check_placed(layout, recipe.shape)
                return _in_blocks(recipe.blocks, recipe.shape, recipe.dtype, layout)
        results = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if leaf is not None]
        check_one_result(function, len(results))
        return self.relayout(results[0], layout)

    # -- parts

    def _checked(self, assignment: Assignment) -> torch.dtype:
        """The element type of an assignment, after all checks that need no tensor."""
        variable = assignment.variable
        dtype = torch_dtype(variable.dtype, variable.path)
        check_placed(assignment.layout, variable.shape, variable.path)
        return dtype


@functools.cache
def engine() -> TorchEngine:
    """The one torch engine of this process."""
    return TorchEngine()


_meshes = threading.local()


# What functions and attributes give most often, and what cannot hold a plain tensor.
_NOT_PLAIN = frozenset((DTensor, torch.Size, torch.dtype, torch.device, int, bool, float, str, type(None)))


class _OnMesh(TorchFunctionMode):
    """Places new tensors that come of plain ones on a mesh, replicated; the innermost mesh counts."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self._mesh = mesh

    def __enter__(self) -> _OnMesh:
        self._around = getattr(_meshes, "innermost", None)
        _meshes.innermost = self
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _meshes.innermost = self._around
        super().__exit__(*error)  # pyright: ignore[reportUnknownMemberType]

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if is_marked((args, kwargs)):  # each device goes on with its own
            return result
        if type(result) in _NOT_PLAIN or _meshes.innermost is not self:
            return result
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        return tree_map(lambda value: self._placed(value, given), result)

    def _placed(self, value: object, given: set[int]) -> object:
        if type(value) is not torch.Tensor or id(value) in given or is_view_of_another(value):
            return value
        return plainly(shard)(value, Layout.replicated(self._mesh, value.ndim))


def _created(assignment: Assignment, initializer: Initializer, seed: object) -> tuple[torch.Tensor, int]:
    """Return an initial value, and the checksum of a global value, which all processes must compute alike."""
    variable, layout = assignment.variable, assignment.layout
    dtype = torch_dtype(variable.dtype, variable.path)
    if initializer.blocks is not None:
        return _in_blocks(initializer.blocks, variable.shape, dtype, layout, assignment), 0
    if initializer.program is not None:
        recipe = trace(initializer.program.function, seed)
        check_initial_value(variable, recipe.shape, dtype_name(recipe.dtype))
        if not recipe.why_global:
            return _in_blocks(recipe.blocks, recipe.shape, dtype, layout), 0
        value = recipe.global_value()
    else:
        value = initializer.global_value()
    tensor = gather(value) if isinstance(value, torch.Tensor) else to_torch(np.asarray(value))
    check_initial_value(variable, tensor.shape, dtype_name(tensor.dtype))
    return shard(tensor, layout), compute_checksum(to_numpy(tensor)) if across() else 0


def _in_blocks(
    blocks: Callable[[Sequence[Index]], Sequence[torch.Tensor]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: Layout,
    assignment: Assignment | None = None,
) -> DTensor:
    indices = layout_indices(layout, shape)
    made = dict(zip(indices, blocks(list(indices.values())), strict=True))
    for ends, block in made.items():
        if assignment is not None and block.dtype != dtype:
            check_initial_value(assignment.variable, shape, dtype_name(block.dtype))
        assert tuple(block.shape) == tuple(stop - start for start, stop in ends)
    return from_blocks(shape, dtype, layout, lambda index: made.pop(get_slice_ends(index)))
