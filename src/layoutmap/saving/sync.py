"""Move the weights of a trainer to a sampler with other layouts, and send only bytes that it lacks: `plan_sync`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.name_tables import read_names
from layoutmap.core.blocks import BlockReader, Index, NumpyArray, assemble_blocks, make_full_index
from layoutmap.core.errors import CheckpointError, format_count, join_names
from layoutmap.core.interrupts import delay_interrupts
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.pieces import Move
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines.agreement import run_together
from layoutmap.engines.protocol import Array
from layoutmap.saving.sync_checksums import find_wrong_variables
from layoutmap.saving.sync_plan import End, Matching, SyncPlan
from layoutmap.saving.sync_versions import (
    begin_version,
    find_identity,
    has_identity,
    record_arrays,
    record_version,
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

    def __init__(self, trainer: End, sampler: End, plan: SyncPlan, moves: Sequence[Move]):
        self.plan = plan
        self.version = 0
        self._trainer, self._sampler, self._moves = trainer, sampler, moves
        self._identity = find_identity(trainer.model, (each.array for each in trainer.stored), None)
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
        arrays = list(self._trainer.read(trainer).values())
        self._identity = find_identity(self._trainer.model, arrays, self._identity)
        begun = begin_version(self._identity, version, self.version)
        likes = self._sampler.read(sampler)
        model = self._sampler.model
        is_tree = not has_identity(model)
        if is_tree:  # so that a guard finds a sampler of which the new tree was dropped
            record_arrays(self._identity, (likes[row.variable.path] for row in self.plan.rows), self.version)
        for numbers, move in self._get_movers(donate, arrays, likes):
            paths = [self.plan.rows[n].variable.path for n in numbers]

            def compute(numbers: Sequence[int] = numbers, move: Mover = move) -> list[Array]:
                new = move(arrays)
                if verify:
                    self._verify(numbers, arrays, new)
                return new

            new = self._run_together(compute)
            # An interrupt between two variables would mix two versions of the weights (decisions/0241).
            with delay_interrupts():
                model, _ = self._sampler.adapter.restore_variables(model, None, zip(paths, new, strict=True))
                self._sampler.model = model
                if is_tree:
                    record_arrays(self._identity, new, begun)
                if numbers and numbers[-1] == len(self.plan.rows) - 1:
                    self.version = begun
                    record_version(self._identity, model, begun)
            del new
        return model

    def __str__(self) -> str:
        return str(self.plan)

    def __repr__(self) -> str:
        return f"<Sync {self.plan.summary}, version {self.version}>"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()  # pyright: ignore[reportPrivateUsage]

    def _get_movers(
        self, donate: bool, arrays: Sequence[Array], likes: Mapping[str, Array]
    ) -> list[tuple[Sequence[int], Mover]]:
        """Return functions that each make the new arrays of some rows. The first sync compiles them."""
        if donate not in self._movers:
            steps = _split_rows(self.plan, _STEP_BYTES) if donate else [range(len(self.plan.rows))]
            self._movers[donate] = [(step, self._make_mover(step, arrays, likes)) for step in steps]
        return self._movers[donate]

    def _make_mover(
        self, numbers: Sequence[int], arrays: Sequence[Array], likes: Mapping[str, Array]
    ) -> Mover:
        moves = [self._moves[n] for n in numbers]
        variables = [self.plan.rows[n].variable for n in numbers]
        own = [likes[each.path] for each in variables]
        engine = self._sampler.engine
        # JAX programs accept neither padded arrays nor uneven shapes, so these move through the host (decisions/0230).
        is_padded = any(getattr(array, "is_padded", False) for array in (*arrays, *own))
        if engine is self._trainer.engine and engine.make_mover is not None and not is_padded:
            return engine.make_mover(moves, arrays, own)
        layouts = [engine.get_layout(each) for each in own]
        return lambda new: [
            _move_through_host(self._trainer, self._sampler, *each, new)
            for each in zip(moves, variables, layouts, strict=True)
        ]

    def _verify(self, numbers: Sequence[int], arrays: Sequence[Array], new: Sequence[Array]) -> None:
        rows = [self.plan.rows[n] for n in numbers]
        wrong = find_wrong_variables(self._trainer, self._sampler, rows, arrays, new, self._add_processes)
        if wrong:
            raise CheckpointError(
                f"{format_count(len(wrong), 'variable')} arrived with wrong values",
                facts={"variables": join_names(wrong)},
                why="the checksums of the trainer's and the sampler's values differ",
                fix="sync again; if the error persists, report it with this plan",
            )

    def _run_together(self, compute: Callable[[], list[Array]]) -> list[Array]:
        return run_together(compute, self._gather, "sync") if self._mesh is not None else compute()

    def _gather(self, values: NumpyArray) -> NumpyArray:
        """Gather the values of all processes. 64-bit numbers are sent as bytes."""
        assert self._mesh is not None
        return self._trainer.engine.all_gather(values, self._mesh)

    def _add_processes(self, values: NumpyArray) -> NumpyArray:
        if self._mesh is None:
            return values
        return self._gather(values.view(np.uint32)).view(np.uint64).sum(axis=0)


def plan_sync(
    trainer: object,
    sampler: object,
    *,
    names: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    ignore: str | Sequence[str] = (),
) -> Sync:
    """Plan how a sampler with other devices and layouts gets the weights of a trainer. Nothing moves yet.

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
        sampler: Another one, of the same or another library. Its arrays keep their layouts and dtypes.
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
    ends = End("trainer", trainer), End("sampler", sampler)
    table = None if names is None else read_names(names)
    matching = Matching(*ends, table, [ignore] if isinstance(ignore, str) else ignore)
    matching.check()
    return Sync(*ends, matching.plan, matching.moves)


def _split_rows(plan: SyncPlan, step_bytes: int) -> Iterator[range]:
    """Split the rows into steps of bounded size. A large variable is a step of its own."""
    begin, total = 0, 0
    for number, row in enumerate(plan.rows):
        if number > begin and total + row.variable.global_bytes > step_bytes:
            yield range(begin, number)
            begin, total = number, 0
        total += row.variable.global_bytes
    yield range(begin, len(plan.rows))


def _make_shared_mesh(trainer: End, sampler: End) -> Mesh | None:
    """Return a mesh of the devices of both ends, or `None` if all of them are in this process.

    A process may have devices of one end only, so the mesh of one end cannot reach all processes.
    """
    engine = trainer.engine
    stored = [*trainer.stored, *(sampler.stored if sampler.engine is engine else ())]
    layouts = (engine.get_layout(each.array) for each in stored)
    meshes = dict.fromkeys(engine.bind(layout.mesh) for layout in layouts if layout is not None)
    if all(len(mesh.local_device_ids) == mesh.size for mesh in meshes):
        return None
    devices = sorted({device for mesh in meshes for device in mesh.devices or ()})
    return engine.bind(Mesh(devices, {"all": len(devices)}))


def _move_through_host(
    trainer: End,
    sampler: End,
    move: Move,
    variable: VariableSpec,
    layout: Layout | None,
    arrays: Sequence[Array],
) -> Array:
    """Make one new array from the shards of this process."""
    dtype = get_numpy_dtype(variable.dtype, variable.path)
    readers = [_make_reader(trainer, number, arrays) for number in move.sources]

    def read(index: Index) -> NumpyArray:
        if move.conversion is None:
            return readers[0](index).astype(dtype, copy=False)
        spec = trainer.stored[move.sources[0]].variable
        return move.conversion.fill(index, readers, get_numpy_dtype(spec.dtype, spec.path)).astype(
            dtype, copy=False
        )

    if layout is None:
        return read(make_full_index(variable.shape))
    is_padded = bool(layout.find_uneven_axes(variable.shape))
    return sampler.engine.from_shards(Assignment(variable, layout, is_padded=is_padded), read)


def _make_reader(trainer: End, number: int, arrays: Sequence[Array]) -> BlockReader:
    variable = trainer.stored[number].variable
    shards = [(index, np.asarray(v)) for index, v in trainer.engine.to_shards(arrays[number], copy=False)]
    dtype = get_numpy_dtype(variable.dtype, variable.path)
    return lambda index: np.asarray(assemble_blocks(shards, variable.shape, dtype, index))
