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

from layoutmap.core.blocks import BlockReader, Index, NumpyArray, get_starts_and_stops
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import EngineError
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment
from layoutmap.engines.agreement import check_same_initial_values
from layoutmap.engines.checks import (
    check_function_returns_one_array,
    check_initial_value,
    check_no_initializer_is_missing,
    check_random_mode,
    check_shard,
)
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.arrays import (
    check_and_convert_layout,
    check_layout_not_in_host_memory,
    convert_to_native_layout,
    create_from_blocks,
    find_local_shard_indices,
    find_placement,
    gather_tensor,
    get_layout,
    get_writable_memory,
    iterate_device_values,
    iterate_shards,
    record_layout,
    relayout_dtensor,
    shard_tensor,
)
from layoutmap.engines.torch.deferred_init import free_scratch_buffer, trace_recipe
from layoutmap.engines.torch.devices import bind_mesh, check_device_order, list_device_names
from layoutmap.engines.torch.dtensor_ops import enable_dtensor_ops_temporarily, has_local_tensor
from layoutmap.engines.torch.element_types import (
    canonicalize_values,
    find_torch_dtype,
    format_dtype,
    to_numpy,
    to_torch,
)
from layoutmap.engines.torch.malloc import return_freed_memory_to_system
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.moving import make_array_mover
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.processes import (
    broadcast_seeds,
    compute_rng_checksum,
    gather_values,
    has_other_processes,
)
from layoutmap.engines.torch.storages import is_view_of_another
from layoutmap.engines.torch.trees import tree_leaves, tree_map

_LARGE_BYTES = 1 << 20  # after a variable of at least so many bytes, return memory to the system


class TorchEngine:
    """The `Engine` of torch. Its arrays are DTensors, and `engine()` returns its only instance."""

    name = "torch"
    array_types: tuple[type, ...] = (torch.Tensor,)
    several_dims = True
    list_device_names = staticmethod(list_device_names)
    bind_mesh = staticmethod(bind_mesh)
    simulate_devices = staticmethod(simulation.set_number_of_simulated_devices)
    get_layout = staticmethod(get_layout)
    find_placement = staticmethod(find_placement)
    iterate_shards = staticmethod(iterate_shards)
    get_writable_memory = staticmethod(get_writable_memory)
    iterate_device_values = staticmethod(iterate_device_values)
    canonicalize_values = staticmethod(canonicalize_values)
    check_dtype = staticmethod(find_torch_dtype)
    make_array_mover = staticmethod(make_array_mover)

    # -- devices and layouts

    def check_layout(self, layout: Layout) -> None:
        """Raise for a layout that no DTensor can have. This uses no device and no process group.

        Raises:
            EngineError: It is in host memory, or the mesh's devices come in an order that torch does not keep.
        """
        check_layout_not_in_host_memory(layout)
        check_device_order(layout.mesh)

    @skip_function_modes
    def make_native_layout(self, layout: Layout, rank: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return the `(DeviceMesh, placements)` of a layout."""
        layout.check_rank((None,) * rank)
        return convert_to_native_layout(layout)

    # -- arrays

    @skip_function_modes
    def create_initial_values(
        self,
        assignments: Mapping[str, Assignment],
        initializers: Mapping[str, Initializer],
        progress: Callable[[str], object] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Create DTensors in their layouts, with values equal to `initializer.global_value()` bit for bit.

        If an initializer can return blocks, or its program can be computed in pieces, each process computes only its
        own blocks. Otherwise the global value is computed, sharded, and freed before the next value.
        """
        for assignment in assignments.values():
            self._check_assignment_and_get_dtype(assignment)
        check_no_initializer_is_missing(assignments, initializers)
        made: dict[str, torch.Tensor] = {}
        checksums: list[tuple[str, int]] = []
        try:
            used = {key: initializers[key] for key in assignments}
            seeds = broadcast_seeds(used)
            # Processes compute different blocks, so compare the random state that the blocks come from. Skip this if
            # all have recipes, because recipes contain that state, and the scope has compared them.
            if has_other_processes() and any(
                each.blocks is not None and each.recipe is None for each in used.values()
            ):
                check_same_initial_values([("the random state", compute_rng_checksum())], gather_values)
            with torch.no_grad():
                for key, assignment in assignments.items():
                    made[key], computed = _create_value_and_checksum(assignment, used[key], seeds.get(key))
                    checksums.append((assignment.variable.path, computed))
                    if assignment.variable.global_bytes >= _LARGE_BYTES:
                        return_freed_memory_to_system()
                    if progress is not None:
                        progress(key)
            free_scratch_buffer()
            if has_other_processes() and checksums:
                check_same_initial_values(checksums, gather_values)
        except BaseException:
            made.clear()
            raise
        return made

    @skip_function_modes
    def create_from_shards(self, assignment: Assignment, read: BlockReader, *, copy: bool = True) -> object:
        """Read shards one by one, and return a DTensor of them (see `Engine.create_from_shards`)."""
        dtype = self._check_assignment_and_get_dtype(assignment)
        variable = assignment.variable

        def read_block(index: Index) -> torch.Tensor:
            block = to_torch(np.asarray(read(index)), copy=copy)
            check_shard(variable, index, block.shape, format_dtype(block.dtype))
            return block

        return create_from_blocks(variable.shape, dtype, assignment.layout, read_block)

    @skip_function_modes
    def relayout(self, array: object, layout: Layout, *, pad: bool = False) -> object:
        """Return the same values in a layout. Also accepts unsharded tensors and values that numpy converts.

        Gradients pass through it, unless the array moves to another mesh. A plain tensor is the same in all processes.
        """
        if isinstance(array, DTensor):
            return relayout_dtensor(array, layout, pad=pad)
        tensor = array if isinstance(array, torch.Tensor) else to_torch(canonicalize_values(array))
        return shard_tensor(tensor, layout, pad=pad)

    @skip_function_modes
    def make_variable(
        self, array: torch.Tensor, *, name: str = "", trainable: bool = True
    ) -> torch.nn.Parameter:
        """Return a `torch.nn.Parameter` with the tensor. Only floating-point tensors can be trained."""
        floating = array.is_floating_point() or array.is_complex()
        parameter = torch.nn.Parameter(array.detach(), requires_grad=trainable and floating)
        layout = get_layout(array)
        if layout is not None:
            record_layout(parameter, layout)
        return parameter

    @skip_function_modes
    def to_numpy(self, array: torch.Tensor) -> NumpyArray:
        """Return all values of a tensor, gathered from all processes. Each of these processes must call it."""
        return to_numpy(gather_tensor(array))

    def gather_from_processes(self, values: NumpyArray, mesh: Mesh) -> NumpyArray:
        """Gather the values of all processes, one row per process. All processes must call this."""
        return gather_values(values)

    @contextmanager
    def run_on(self, mesh: Mesh, draws: str = "exact") -> Generator[None]:
        """Replicate on the mesh each new unsharded tensor that a function returns, while the `with` block runs.

        What DTensor would compute incorrectly is computed correctly, or refused: see `dtensor_ops.mode`.
        """
        check_random_mode(self.name, draws, ("exact", "tiles"))
        native = self.make_native_layout(Layout.replicated(mesh, 0), 0)[0]
        draws_by_shards = draws == "tiles"
        with (
            simulation.simulate_ranks_of_mesh(native),
            _ReplicationMode(mesh),
            enable_dtensor_ops_temporarily(native, draws_by_shards=draws_by_shards),
        ):
            yield

    def call_with_layout(self, function: Function, layout: Layout, args: Args, kwargs: Kwargs) -> object:
        """Call a function, and return its result in a layout, with the same bits as an unsharded call.

        A function that fills a tensor or draws random numbers, and takes no tensor, is computed in pieces. Any other
        function is called as it is, and its result is sharded.
        """
        leaves = tree_leaves((list(args), dict(kwargs)))
        if not any(isinstance(leaf, (torch.Tensor, np.ndarray)) for leaf in leaves):
            recipe = None
            with contextlib.suppress(EngineError):  # if the result is not a tensor, the code below refuses it
                recipe = trace_recipe(lambda: function(*args, **kwargs))
            if recipe is not None and not recipe.why_global:
                check_and_convert_layout(layout, recipe.shape)
                made = _create_from_computed_blocks(recipe.compute_blocks, recipe.shape, recipe.dtype, layout)
                return made.requires_grad_(bool(kwargs.get("requires_grad")))
        results = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if leaf is not None]
        check_function_returns_one_array(function, len(results))
        return self.relayout(results[0], layout)

    # -- helpers

    def _check_assignment_and_get_dtype(self, assignment: Assignment) -> torch.dtype:
        """Return the dtype of an assignment, after checks that torch supports it and that the layout fits."""
        variable = assignment.variable
        dtype = find_torch_dtype(variable.dtype, variable.path)
        check_and_convert_layout(assignment.layout, variable.shape, variable.path, pad=assignment.is_padded)
        return dtype


@functools.cache
def engine() -> TorchEngine:
    """Return the torch engine of this process."""
    return TorchEngine()


_meshes = threading.local()


# Results of these frequent types contain no unsharded tensor, so there is nothing to replicate.
_SAFE_TYPES = frozenset((DTensor, torch.Size, torch.dtype, torch.device, int, bool, float, str, type(None)))


class _ReplicationMode(TorchFunctionMode):
    """Function mode that replicates new unsharded tensors on a mesh. Only the innermost active mode does so."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self._mesh = mesh

    def __enter__(self) -> _ReplicationMode:
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
        if has_local_tensor((args, kwargs)):  # each device has its own local tensor, so do not replicate it
            return result
        if type(result) in _SAFE_TYPES or _meshes.innermost is not self:
            return result
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        return tree_map(lambda value: self._replicate_result(value, given), result)

    def _replicate_result(self, value: object, argument_ids: set[int]) -> object:
        if type(value) is not torch.Tensor or id(value) in argument_ids or is_view_of_another(value):
            return value
        return skip_function_modes(shard_tensor)(value, Layout.replicated(self._mesh, value.ndim))


def _create_value_and_checksum(
    assignment: Assignment, initializer: Initializer, seed: object
) -> tuple[torch.Tensor, int]:
    """Return an initial value, and the checksum of its global value, or 0 if processes need not compare it."""
    variable, layout = assignment.variable, assignment.layout
    dtype = find_torch_dtype(variable.dtype, variable.path)
    if initializer.blocks is not None:
        return _create_from_computed_blocks(initializer.blocks, variable.shape, dtype, layout, assignment), 0
    if initializer.program is not None:
        recipe = trace_recipe(initializer.program.function, seed)
        check_initial_value(variable, recipe.shape, format_dtype(recipe.dtype))
        if not recipe.why_global:
            return _create_from_computed_blocks(recipe.compute_blocks, recipe.shape, dtype, layout), 0
        value = recipe.compute_global_value()
    else:
        value = initializer.global_value()
    tensor = gather_tensor(value) if isinstance(value, torch.Tensor) else to_torch(np.asarray(value))
    check_initial_value(variable, tensor.shape, format_dtype(tensor.dtype))
    made = shard_tensor(tensor, layout, pad=assignment.is_padded)
    return made, compute_checksum(to_numpy(tensor)) if has_other_processes() else 0


def _create_from_computed_blocks(
    compute_blocks: Callable[[Sequence[Index]], Sequence[torch.Tensor]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: Layout,
    assignment: Assignment | None = None,
) -> DTensor:
    """Create a DTensor from the blocks of this process, which `compute_blocks` returns for a list of indices."""
    indices = find_local_shard_indices(layout, shape)
    made = dict(zip(indices, compute_blocks(list(indices.values())), strict=True))
    for ends, block in made.items():
        if assignment is not None and block.dtype != dtype:
            check_initial_value(assignment.variable, shape, format_dtype(block.dtype))
        assert tuple(block.shape) == tuple(stop - start for start, stop in ends)
    return create_from_blocks(shape, dtype, layout, lambda index: made.pop(get_starts_and_stops(index)))
