"""Move the weights of a trainer to a sampler with different layouts, sending only bytes that it lacks: `plan_sync`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.name_tables import read_name_table
from layoutmap.core.blocks import BlockReader, Index, NumpyArray, assemble_blocks, make_full_index
from layoutmap.core.errors import CheckpointError, format_count, join_names
from layoutmap.core.interrupts import delay_interrupts
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.pieces import ArrayMove
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines.agreement import call_and_share_errors
from layoutmap.engines.protocol import Array
from layoutmap.saving.sync_checksums import find_variables_with_wrong_values
from layoutmap.saving.sync_plan import SyncEndpoint, SyncMatcher, SyncPlan
from layoutmap.saving.sync_versions import (
    choose_and_record_sync_version,
    find_trainer_identity,
    has_stable_identity,
    record_sampler_version,
    record_tree_array_versions,
)

_STEP_BYTES = 1 << 28
"""Bytes of sampler weights, over all devices, that a sync with `donate=True` replaces at one time."""

Mover = Callable[[Sequence[Array]], list[Array]]


class Sync:
    """Copy the weights of a trainer to a sampler when called. `print` shows the plan.

    Attributes:
        plan: Variables, and the bytes that devices send each other.
        version: Version of the trainer's weights that the sampler has; 0 before the first sync.
    """

    def __init__(
        self, trainer: SyncEndpoint, sampler: SyncEndpoint, plan: SyncPlan, moves: Sequence[ArrayMove]
    ):
        self.plan = plan
        self.version = 0
        self._trainer, self._sampler, self._moves = trainer, sampler, moves
        self._identity = find_trainer_identity(trainer.model, (each.array for each in trainer.stored), None)
        self._mesh = _make_shared_mesh(trainer, sampler)
        self._movers: dict[bool, list[tuple[Sequence[int], Mover]]] = {}

    def __call__(
        self,
        trainer: object = None,
        sampler: object = None,
        *,
        verify: bool = False,
        donate: bool = False,
        version: int | None = None,
    ) -> Any:
        """Update the sampler's weights from the trainer. All processes must call this.

        All new arrays are made before the first one is replaced, and Ctrl-C waits while they are replaced. So after an
        error or an interrupt the sampler has the old weights or the new ones, and the old `version` or the new one.

        Args:
            trainer: The trainer, if an update has made another object: a pytree. `None`: the one before.
            sampler: The sampler, likewise.
            verify: Compare checksums of the values at both ends before anything is replaced. This reads all values,
                about a second for each GB.
            donate: Replace the sampler's arrays in steps of bounded size, so that memory is both ends and one step.
                After an interrupt the sampler may then have weights of two versions, and must be synced again.
            version: Number of the trainer's weights, such as its step. `None`: one more than this sampler has, or the
                newest version that another sampler of the trainer has. A guard of a sampler (`layoutmap.guard`) raises
                if its trainer has begun to sync a newer version. The version of a tree is that of its arrays, so a
                guard also finds an old tree that is still used.

        Returns:
            The sampler: the same object, or a new one if it is a pytree, which cannot be changed.

        Raises:
            PlanError: A model has changed since the plan. Nothing was moved.
            CheckpointError: A checksum differs. Nothing has changed, unless with `donate`.
        """
        arrays = list(self._trainer.read_arrays(trainer).values())
        self._identity = find_trainer_identity(self._trainer.model, arrays, self._identity)
        begun = choose_and_record_sync_version(self._identity, version, self.version)
        old = self._sampler.read_arrays(sampler)
        model = self._sampler.model
        is_tree = not has_stable_identity(model)
        # A program could continue to use the old arrays of a tree, so record their version: a guard then raises.
        if is_tree:
            record_tree_array_versions(
                self._identity, (old[row.variable.path] for row in self.plan.rows), self.version
            )
        for indices, move in self._get_movers_by_step(donate, arrays, old):
            paths = [self.plan.rows[n].variable.path for n in indices]

            def make_new_arrays(indices: Sequence[int] = indices, move: Mover = move) -> list[Array]:
                new = move(arrays)
                if verify:
                    self._verify_arrays(indices, arrays, new)
                return new

            new = self._run_in_all_processes(make_new_arrays)
            # An interrupt between two variables would mix two versions of the weights, so delay it (decisions/0241).
            with delay_interrupts():
                model, _ = self._sampler.adapter.restore_variables(model, None, zip(paths, new, strict=True))
                self._sampler.model = model
                if is_tree:
                    record_tree_array_versions(self._identity, new, begun)
                if indices and indices[-1] == len(self.plan.rows) - 1:
                    self.version = begun
                    record_sampler_version(self._identity, model, begun)
            del new
        return model

    def __str__(self) -> str:
        return str(self.plan)

    def __repr__(self) -> str:
        return f"<Sync {self.plan.summary}, version {self.version}>"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()  # pyright: ignore[reportPrivateUsage]

    def _get_movers_by_step(
        self, donate: bool, arrays: Sequence[Array], old_arrays: Mapping[str, Array]
    ) -> list[tuple[Sequence[int], Mover]]:
        """Return, for each step of a sync, indices of the plan's rows and a function that makes their new arrays."""
        if donate not in self._movers:
            steps = _group_rows_into_steps(self.plan, _STEP_BYTES) if donate else [range(len(self.plan.rows))]
            self._movers[donate] = [(step, self._make_mover(step, arrays, old_arrays)) for step in steps]
        return self._movers[donate]

    def _make_mover(
        self, indices: Sequence[int], arrays: Sequence[Array], old_arrays: Mapping[str, Array]
    ) -> Mover:
        """Return a function that makes the sampler's new arrays of plan rows `indices` from the trainer's arrays."""
        moves = [self._moves[n] for n in indices]
        variables = [self.plan.rows[n].variable for n in indices]
        own = [old_arrays[each.path] for each in variables]
        engine = self._sampler.engine
        # JAX programs accept neither padded arrays nor uneven shapes, so move these through the host (decisions/0230).
        is_padded = any(getattr(array, "is_padded", False) for array in (*arrays, *own))
        if engine is self._trainer.engine and engine.make_array_mover is not None and not is_padded:
            return engine.make_array_mover(moves, arrays, own)
        layouts = [engine.get_layout(each) for each in own]
        return lambda new: [
            _make_array_through_host(self._trainer, self._sampler, *each, new)
            for each in zip(moves, variables, layouts, strict=True)
        ]

    def _verify_arrays(
        self, indices: Sequence[int], arrays: Sequence[Array], new_arrays: Sequence[Array]
    ) -> None:
        """Raise if the checksums of new arrays differ from the checksums of the trainer's values."""
        rows = [self.plan.rows[n] for n in indices]
        wrong = find_variables_with_wrong_values(
            self._trainer, self._sampler, rows, arrays, new_arrays, self._sum_over_processes
        )
        if wrong:
            raise CheckpointError(
                f"{format_count(len(wrong), 'variable')} arrived with wrong values",
                facts={"variables": join_names(wrong)},
                why="the checksums of the trainer's and of the sampler's values differ",
                fix="sync again; if the error persists, report it with this plan",
            )

    def _run_in_all_processes(self, compute: Callable[[], list[Array]]) -> list[Array]:
        """Call a function, and return its result. If the function raises in one process, raise in all of them."""
        return (
            call_and_share_errors(compute, self._gather_values, "sync")
            if self._mesh is not None
            else compute()
        )

    def _gather_values(self, values: NumpyArray) -> NumpyArray:
        """Return the values of all processes, with one row per process."""
        assert self._mesh is not None
        return self._trainer.engine.gather_from_processes(values, self._mesh)

    def _sum_over_processes(self, values: NumpyArray) -> NumpyArray:
        """Return the sums of unsigned 64-bit numbers over all processes."""
        if self._mesh is None:
            return values
        return self._gather_values(values.view(np.uint32)).view(np.uint64).sum(axis=0)


def plan_sync(
    trainer: object,
    sampler: object,
    *,
    names: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    ignore: str | Sequence[str] = (),
) -> Sync:
    """Plan how a sampler with different devices and layouts gets the weights of a trainer. Nothing moves yet.

    After a sync, both have the same logical values. Each device receives only the part of its new shard that it does
    not hold, from one device that holds it. Nothing is gathered in full. Values are cast to the sampler's dtypes.
    Weights and moving statistics are synced. Random states, metrics, optimizers, and buffers that are not persistent
    are not. A tied weight moves once.

    On JAX, the first sync compiles the programs: one program if both meshes have the same devices, else three, for the
    trainer's devices, all devices, and the sampler's devices. Processes with devices of either mesh all call the sync.
    On torch, both models are in one process group, and all of its processes call the sync. Between two engines, and for
    padded arrays on JAX, values go through the memory of one process.

    Args:
        trainer: Model or tree of sharded arrays, of any supported library.
        sampler: Model or tree, too, of the same or a different library. Its arrays keep their layouts and dtypes.
        names: Names of the sampler's variables in the trainer, and axes to permute, split, or join, as of fused query,
            key, and value kernels; see `load`. `None`: the same names.
        ignore: Regexes that match the start of the paths of variables that are not synced, such as a frozen base of
            adapters. The sampler keeps its values.

    Returns:
        The sync. `print(sync)` shows its table, and `sync()` moves the weights.

    Raises:
        PlanError: Variables have no counterpart, a different shape or kind of dtype, or no layout. The error lists all.
        RuleError: `names` cannot be read.

    Example:
        >>> import jax, jax.numpy as jnp, layoutmap as lm
        >>> mesh = jax.make_mesh((2, 4), ("batch", "model"))
        >>> def place(value, *dims):
        ...     return jax.device_put(value, jax.NamedSharding(mesh, jax.P(*dims)))
        >>> trainer = {"w": place(jnp.ones((8, 8)), "batch"), "b": place(jnp.ones(8))}
        >>> sampler = {"w": place(jnp.zeros((8, 8), jnp.bfloat16), None, "model"), "b": place(jnp.zeros(8))}
        >>> sync = lm.plan_sync(trainer, sampler)
        >>> sync.plan.num_bytes, sync.plan.casts
        (128, ('w',))
        >>> sampler = sync()
        >>> float(sampler["w"].sum()), sampler["w"].dtype.name, sync.version
        (64.0, 'bfloat16', 1)
    """
    ends = SyncEndpoint("trainer", trainer), SyncEndpoint("sampler", sampler)
    table = None if names is None else read_name_table(names)
    matching = SyncMatcher(*ends, table, [ignore] if isinstance(ignore, str) else ignore)
    matching.raise_problems()
    return Sync(*ends, matching.plan, matching.moves)


def _group_rows_into_steps(plan: SyncPlan, step_bytes: int) -> Iterator[range]:
    """Yield ranges of row indices, each with at most `step_bytes` of values. A larger row is a range of its own."""
    begin, total = 0, 0
    for number, row in enumerate(plan.rows):
        if number > begin and total + row.variable.global_bytes > step_bytes:
            yield range(begin, number)
            begin, total = number, 0
        total += row.variable.global_bytes
    yield range(begin, len(plan.rows))


def _make_shared_mesh(trainer: SyncEndpoint, sampler: SyncEndpoint) -> Mesh | None:
    """Return a mesh of the devices of both ends, or None if all of them are in this process.

    A process may have devices of one end only, so the mesh of one end cannot reach all processes.
    """
    engine = trainer.engine
    stored = [*trainer.stored, *(sampler.stored if sampler.engine is engine else ())]
    layouts = (engine.get_layout(each.array) for each in stored)
    meshes = dict.fromkeys(engine.bind_mesh(layout.mesh) for layout in layouts if layout is not None)
    if all(len(mesh.local_device_ids) == mesh.size for mesh in meshes):
        return None
    devices = sorted({device for mesh in meshes for device in mesh.devices or ()})
    return engine.bind_mesh(Mesh(devices, {"all": len(devices)}))


def _make_array_through_host(
    trainer: SyncEndpoint,
    sampler: SyncEndpoint,
    move: ArrayMove,
    variable: VariableSpec,
    layout: Layout | None,
    arrays: Sequence[Array],
) -> Array:
    """Return a new array of the sampler, made of the trainer's shards in the memory of this process."""
    dtype = get_numpy_dtype(variable.dtype, variable.path)
    readers = [_make_read_block_function(trainer, number, arrays) for number in move.sources]

    def read_block(index: Index) -> NumpyArray:
        if move.conversion is None:
            return readers[0](index).astype(dtype, copy=False)
        spec = trainer.stored[move.sources[0]].variable
        return move.conversion.compute_block(index, readers, get_numpy_dtype(spec.dtype, spec.path)).astype(
            dtype, copy=False
        )

    if layout is None:
        return read_block(make_full_index(variable.shape))
    is_padded = bool(layout.find_uneven_axes(variable.shape))
    return sampler.engine.create_from_shards(Assignment(variable, layout, is_padded=is_padded), read_block)


def _make_read_block_function(
    trainer: SyncEndpoint, source_index: int, arrays: Sequence[Array]
) -> BlockReader:
    """Return a function that reads any block of one of the trainer's arrays."""
    variable = trainer.stored[source_index].variable
    shards = [
        (index, np.asarray(v)) for index, v in trainer.engine.iterate_shards(arrays[source_index], copy=False)
    ]
    dtype = get_numpy_dtype(variable.dtype, variable.path)
    return lambda index: np.asarray(assemble_blocks(shards, variable.shape, dtype, index))
