"""Run Keras on JAX in several processes: each passes its own rows of a batch, and one of them writes a file.

A process passes the rows that its devices store. If the batch's dim does not span the processes, their devices store
the same rows, and each process passes all of them. Before each step, the processes compare their batches, because
processes with batches that do not fit together would wait for each other forever.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental.sparse import JAXSparse

from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.core.blocks import NumpyArray
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import EngineError, ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.agreement import (
    CallComparisonSchedule,
    gather_unequal_texts_and_checksums,
    map_process_names_to_texts,
)

GATHERED = "_layoutmap_gathered"  # attribute of a variable with its global value on the host, during a save
_REPORTED = "_layoutmap_reported"
_VERBS = {"train": "fit", "test": "evaluate", "predict": "predict"}


# A process has only some of the devices, so it passes only its own rows (decisions/0019).
class RowDivider:
    """Divide a batch's rows between the processes of a mesh."""

    def __init__(self, session: KerasSession, step_name: str, schedule: CallComparisonSchedule):
        self._context, self._policy, self._engine = session.context, session.policy, session.engine
        self._verb = _VERBS[step_name]
        self._schedule = schedule
        layout = self._policy.make_replicated_layout(0)
        devices: NumpyArray = self._engine.make_native_layout(layout, 0).mesh.devices
        self._processes = _list_process_indices(session)
        self.is_on_cpus = devices.flat[0].platform == "cpu"
        blocks = _find_batch_blocks_by_process(self._policy.derive_batch_layout((layout.mesh.size,)), devices)
        self._parts = sorted(set(blocks.values()))
        _check_row_division(self._parts, blocks, layout.mesh)
        self._part_of = [self._parts.index(blocks[process]) for process in self._processes]
        self._own = self._part_of[self._processes.index(jax.process_index())]
        self.num_placed_rows: list[int] = []  # global number of rows of each batch of the current step

    def assemble_batches(self, batches: Iterator[object]) -> Generator[object]:
        """Yield global batches on the mesh, each assembled from the rows that all processes pass."""
        for batch in batches:
            self._check_batch_and_record_num_rows(batch)
            yield keras.tree.map_structure(self._assemble_global_array, batch, none_is_leaf=True)
        self._check_processes_agree("no more batches", 0)

    def extract_own_rows(self, outputs: object) -> object:
        """Return this process's rows of a model's outputs in numpy. Outputs without rows are returned whole."""
        return keras.tree.map_structure(self._extract_own_rows, outputs)

    # -- comparing batches

    def _check_batch_and_record_num_rows(self, batch: object) -> None:
        """Raise if the processes' batches do not fit together. Otherwise record the global number of rows."""
        if any(isinstance(each, JAXSparse) for each in keras.tree.flatten(batch)):
            raise ScopeError(
                f"{self._verb}: sparse batches cannot be divided between processes",
                why="a sparse array is one list of elements, which cannot be split into rows",
                fix="pass dense arrays, such as matrix.toarray() of each batch",
            )
        arrays = [np.asarray(each) for each in keras.tree.flatten(batch) if _is_on_devices_of_process(each)]
        batch_text = ", ".join(f"{a.dtype}{list(a.shape)}" if a.ndim else f"{a.dtype} {a}" for a in arrays)
        shared = len(self._parts) < len(self._processes) and self._context.options.check_batches
        # If a process has a batch of a different shape, or none, all would hang, so compare shapes in each step.
        self._check_processes_agree(
            batch_text,
            compute_checksum(*arrays) if shared and self._schedule.count_call_and_check_due() else 0,
        )
        self.num_placed_rows.append(next((len(a) for a in arrays if a.ndim), 0) * len(self._parts))

    def _check_processes_agree(self, batch_text: str, checksum: int) -> None:
        """Raise if processes pass different texts, or different checksums where their devices store the same rows."""
        texts, checksums = gather_unequal_texts_and_checksums(
            f"{self._verb}: {batch_text}", self._context.gather_from_processes, checksum
        )
        of: dict[int, set[int]] = {}
        for part, each in zip(self._part_of, checksums, strict=True):
            of.setdefault(part, set()).add(each)
        if texts:
            error = _make_process_disagreement_error(
                self._verb, dict(zip(self._processes, texts, strict=True))
            )
        elif any(len(sums) > 1 for sums in of.values()):
            error = ScopeError(
                f"{self._verb}: processes whose devices hold the same rows pass different rows",
                facts={"mesh": str(self._policy.mesh), "parts": len(self._parts)}
                | map_process_names_to_texts([f"checksum {each:08x}" for each in checksums])
                | {"in call": self._schedule.calls},
                why="the batch is not sharded over these processes, so each of them passes all of its rows",
                fix="read the same data in the same order: use shuffle=False, or call "
                "keras.utils.set_random_seed(0) first; or shard the batch: scope(batch_dim=..) with a "
                "dim that goes over the processes",
            )
        else:
            return
        setattr(error, _REPORTED, True)  # all processes raise this error, so none has to report it
        raise error

    # -- placing batches

    def _assemble_global_array(self, array: Any) -> object:
        """Return an array on the mesh, made of the rows of all processes. Values without a shape are unchanged."""
        if array is None or not hasattr(array, "shape"):
            return array
        if not _is_on_devices_of_process(array):
            return self._engine.relayout(array, self._policy.derive_batch_layout(array.shape))
        own = np.asarray(array)
        if not own.ndim:
            return self._engine.relayout(own, self._policy.make_replicated_layout(0))
        shape = (len(own) * len(self._parts), *own.shape[1:])
        layout = self._policy.derive_batch_layout(shape)
        if len(self._parts) == 1:
            return self._engine.relayout(own, layout)
        if layout.is_fully_replicated():
            rows = self._engine.gather_from_processes(own, self._policy.mesh)
            parts = [rows[self._part_of.index(part)] for part in range(len(self._parts))]
            return self._engine.relayout(np.concatenate(parts), layout)
        blocks = self._parts[self._own]
        size = len(own) // len(blocks)
        own = own.astype(jax.dtypes.canonicalize_dtype(own.dtype), copy=False)

        def read_block(index: Any) -> NumpyArray:
            position = blocks.index((index[0].start or 0) // size)
            return own[position * size : (position + 1) * size]

        return jax.make_array_from_callback(
            shape, self._engine.make_native_layout(layout, own.ndim), read_block
        )

    # -- reading outputs

    def _extract_own_rows(self, output: jax.Array) -> object:
        rows, number = self.num_placed_rows, sum(self.num_placed_rows)
        if not np.ndim(output) or len(output) != number:
            return self._engine.to_numpy(output)
        if len(rows) == 1 and not output.is_fully_replicated:
            shards = {shard.index[0].start or 0: shard for shard in output.addressable_shards}
            return np.concatenate([np.asarray(shards[start].data) for start in sorted(shards)])
        # The output joins several batches or is replicated, so gather it and select this process's rows.
        values = self._engine.to_numpy(output)
        starts = np.cumsum([0, *rows[:-1]])
        return np.concatenate(
            [
                values[part]
                for n, start in zip(rows, starts, strict=True)
                for part in self._list_own_row_slices(n, start)
            ]
        )

    def _list_own_row_slices(self, num_rows: int, start: int) -> list[slice]:
        """Return the slices of this process's rows in a batch that starts at row `start`."""
        num_blocks = sum(map(len, self._parts))
        if num_rows % num_blocks:
            # This batch is replicated: it consists of the rows of each process group in `_parts`, one after the other.
            size = num_rows // len(self._parts)
            return [slice(start + self._own * size, start + (self._own + 1) * size)]
        size = num_rows // num_blocks
        return [slice(start + b * size, start + (b + 1) * size) for b in self._parts[self._own]]


def _list_process_indices(session: KerasSession) -> list[int]:
    """Return the indices of the mesh's processes, sorted, as `gather_from_processes` orders them."""
    devices: NumpyArray = session.engine.make_native_layout(
        session.policy.make_replicated_layout(0), 0
    ).mesh.devices
    return sorted({device.process_index for device in devices.flat})


def _find_batch_blocks_by_process(layout: Layout, devices: object) -> dict[int, tuple[int, ...]]:
    """Return a dict from process index to the indices of the batch's blocks of rows that its devices store."""
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(devices)
    dims = layout.list_mesh_dims(0)
    if not dims:
        return dict.fromkeys(processes.flat, (0,))
    positions = [layout.mesh.dim_names.index(dim) for dim in dims]
    rows = np.moveaxis(processes, positions, range(len(dims)))
    rows = rows.reshape(layout.num_shards(0), -1)
    return {
        process: tuple(i for i, row in enumerate(rows) if process in np.ravel(row))
        for process in np.unique(processes).tolist()
    }


def _check_row_division(
    parts: Sequence[tuple[int, ...]], blocks: dict[int, tuple[int, ...]], mesh: Mesh
) -> None:
    """Raise if parts overlap or differ in size. A part is the tuple of blocks that the devices of a process store."""
    held = [block for part in parts for block in part]
    if len(held) == len(set(held)) and len({len(part) for part in parts}) == 1:
        return
    raise ScopeError(
        "the rows of a batch cannot be divided between the processes",
        facts={"mesh": str(mesh)}
        | {f"process {p}": f"holds the blocks {list(b)}" for p, b in blocks.items()},
        why="some processes share a part of their rows, or have unequal numbers of rows",
        fix="order the mesh's dims or devices so that each process has whole rows of its own, or leave "
        "batch_dim out",
    )


def _is_on_devices_of_process(array: object) -> bool:
    """Return whether a value is an array with all of its elements on devices of this process."""
    return hasattr(array, "shape") and getattr(array, "is_fully_addressable", True)


# -- failures in one process


_FAILED = "has failed: "


def _make_process_disagreement_error(method_name: str, texts_by_process: dict[int, str]) -> ScopeError:
    """Return the error for processes that sent different texts, one of which may report a failure."""
    facts = {f"process {process}": each for process, each in texts_by_process.items()}
    failed = [process for process, each in texts_by_process.items() if _FAILED in each]
    if failed:
        return ScopeError(
            f"{method_name}: process {failed[0]} of this program has failed",
            facts=facts,
            why="computing on the mesh needs all of its processes",
            fix="fix the error that this process reports, and restart all processes",
        )
    return ScopeError(
        f"{method_name}: the processes call different methods or pass different shapes or types",
        facts=facts,
        why="all processes must make the same calls, with equally many batches and rows",
        fix="make equal calls with equally many rows in each process: drop or repeat rows",
    )


def wrap_to_report_failure(
    original: Callable[..., object], session: KerasSession, method_name: str
) -> Callable[..., object]:
    """Wrap `fit`, `evaluate`, or `predict` to report an exception to other processes, which would wait forever."""

    @functools.wraps(original)
    def call_and_report_failure(*args: object, **kwargs: object) -> object:
        try:
            return original(*args, **kwargs)
        except (EngineError, jax.errors.JaxRuntimeError):
            raise  # the other processes are unreachable or raise the same error, so do not report it
        except Exception as error:
            # A marked error is raised by all processes, or was reported by an inner `evaluate`, so do not report it.
            if not hasattr(error, _REPORTED):
                setattr(error, _REPORTED, True)
                with suppress(EngineError):  # the other processes may be gone
                    gather_unequal_texts_and_checksums(
                        f"{method_name}: {_FAILED}{type(error).__name__}: {error}",
                        session.context.gather_from_processes,
                    )
            raise

    return call_and_report_failure


# -- saving variables


def make_write_once_save_wrapper(
    model: keras.Model, session: KerasSession, method_name: str
) -> Callable[..., object]:
    """Return a wrapper of `save` or `save_weights`. Of processes with the same path, only the first one writes."""
    original = getattr(model, method_name)

    @functools.wraps(original)
    def save_once_per_path(filepath: str | os.PathLike[str], *args: object, **kwargs: object) -> object:
        path = os.path.abspath(os.fspath(filepath))
        numbers = _list_process_indices(session)
        paths = gather_unequal_texts_and_checksums(
            f"{method_name}: {path}", session.context.gather_from_processes
        )[0] or [f"{method_name}: {path}"] * len(numbers)
        writes = numbers[paths.index(f"{method_name}: {path}")] == jax.process_index()
        result = error = None
        variables = [*model.variables, *getattr(getattr(model, "optimizer", None), "variables", ())]
        try:
            for variable in variables:
                if not variable.value.is_fully_replicated:
                    value = session.engine.to_numpy(variable.value)
                    if writes:
                        variable.__dict__[GATHERED] = value
            if writes:
                result = original(filepath, *args, **kwargs)
        except Exception as raised:  # report it to the other processes before it is raised
            error = raised
        finally:
            for variable in variables:
                variable.__dict__.pop(GATHERED, None)
        errors, _ = gather_unequal_texts_and_checksums(
            "" if error is None else f"{type(error).__name__}: {error}", session.context.gather_from_processes
        )
        if error is not None:
            raise error
        if any(errors):
            raise ScopeError(
                f"{method_name}: another process could not write its file",
                facts={f"process {n}": each for n, each in zip(numbers, errors, strict=True) if each},
                why="of the processes that save to the same path, the first writes the file for all",
                fix="fix the error of each process above, and save again in all processes",
            )
        return result

    return save_once_per_path
