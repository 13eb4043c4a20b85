"""Run models in which each process passes its own rows, with `scope(rows="own")`.

The rows of all processes are the global batch, in the order of their shards along `batch_dim`. A process gets its own
rows of an output. An output without rows, such as a loss, covers the rows of all processes (decisions/0267).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Placement

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.adapters.torch.boundary import list_tensors, map_tensors, unshard_tensors
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import ScopeError, join_names
from layoutmap.core.specs import count_batch_shards, list_batch_dims
from layoutmap.engines.agreement import gather_texts, map_process_names_to_texts
from layoutmap.engines.torch.backward import Ctx, TypedAutogradFunction
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.placing import make_dtensor_from_shards, redistribute_if_needed
from layoutmap.engines.torch.specs import get_local
from layoutmap.engines.torch.trees import tree_leaves

_PADDING = "drop the last batch, or pad it with rows whose labels are ignored"


def has_own_rows_per_process(context: ScopeContext) -> bool:
    """Return whether each process passes its own rows to the models of a scope."""
    return context.spans_processes and context.options.own.rows == "own"


def find_row_shard_index(context: ScopeContext) -> int:
    """Return the index of this process's rows among the shards of the global batch."""
    mesh = context.engine.make_native_layout(context.policy.make_replicated_layout(0), 0)[0]
    shard_index = 0
    for dim in list_batch_dims(context.options.batch_dim):
        shard_index = shard_index * mesh[dim].size() + mesh.get_local_rank(dim)
    return shard_index


def gather_rows(tensor: torch.Tensor, context: ScopeContext) -> torch.Tensor:
    """Return the rows of all processes in the order of their shards. Scalars of all processes become one vector."""
    local_rows = tensor.detach() if tensor.ndim else tensor.detach()[None]
    num_shards = count_batch_shards(context.options.batch_dim, context.policy.mesh)
    layout = context.policy.derive_batch_layout((local_rows.shape[0] * num_shards, *local_rows.shape[1:]))
    mesh, placements = context.engine.make_native_layout(layout, local_rows.ndim)
    return unshard_tensors(make_dtensor_from_shards(local_rows, mesh, placements))


class RowsOfThisProcess:
    """The rows of the global batch that this process passes in one call.

    Args:
        values: The arguments of the call.
        context: The scope.

    Attributes:
        num_rows: The number of rows of this process: the length of the first argument that has an axis.
    """

    def __init__(self, values: object, context: ScopeContext) -> None:
        self._context = context
        self._num_shards = count_batch_shards(context.options.batch_dim, context.policy.mesh)
        self._tensors = [each for each in list_tensors(values) if not isinstance(each, DTensor)]
        self._scalars = [each for each in tree_leaves(values) if isinstance(each, (int, float))]
        self.num_rows = next((int(each.shape[0]) for each in self._tensors if each.ndim), 0)

    # A process with fewer rows would send smaller shards than others expect, so compare the row counts in each call.
    def check_rows_of_processes(self, *, compare_values: bool) -> None:
        """Raise if the processes pass different numbers or shapes of rows. If `compare_values`, also compare values.

        Arguments without rows and rows of one shard must be equal, and the rows of all shards must not be equal.

        Args:
            compare_values: Whether values are compared, too.
        """
        gather, to_numpy = self._context.gather_from_processes, self._context.engine.to_numpy
        shapes = str([tuple(each.shape) for each in self._tensors if self._has_batch_rows(each)])
        found = gather(np.array([self.num_rows, zlib.crc32(shapes.encode())], np.int64))
        counts = found[:, 0].tolist()
        if len(set(counts)) > 1:
            raise ScopeError(
                f"the processes pass different numbers of rows: {join_names([str(each) for each in counts])}",
                why='with rows="own", the rows of the processes are shards of one batch, which must have equal sizes',
                fix=_PADDING,
            )
        if len(set(found[:, 1].tolist())) > 1:
            raise ScopeError(
                "the processes pass rows of different lengths",
                facts=map_process_names_to_texts(gather_texts(f"tensors of {shapes[1:-1]}", gather)),
                why='with rows="own", the rows of all processes form one batch, whose rows must have one length',
                fix='pad all rows to one length, as with padding="max_length" of a tokenizer',
            )
        if not compare_values:
            return
        others = [to_numpy(each) for each in self._tensors if not self._has_batch_rows(each)]
        texts = gather_texts(
            f"{self._scalars}, {len(others)} tensors, checksum {compute_checksum(*others):08x}", gather
        )
        if len(set(texts)) > 1:
            raise ScopeError(
                "the processes pass different values of an argument that has no rows",
                facts=map_process_names_to_texts(texts) | {"rows": self.num_rows},
                why=f"a tensor counts as rows if its first axis has {self.num_rows} elements, like that of the "
                "first tensor; all other arguments must be equal in all processes",
                fix="pass one value in all processes, such as the number of tokens in all of their rows",
            )
        rows = [to_numpy(each) for each in self._tensors if self._has_batch_rows(each)]
        local = np.array([find_row_shard_index(self._context), compute_checksum(*rows)], np.int64)
        self._check_rows_by_shard(gather(local).tolist())

    def _check_rows_by_shard(self, row_checksums: Sequence[tuple[int, int]]) -> None:
        """Raise if rows differ between processes with one shard index, or are the same in all processes."""
        by_shard: dict[int, set[int]] = {}
        for shard_index, checksum in row_checksums:
            by_shard.setdefault(shard_index, set()).add(checksum)
        facts = map_process_names_to_texts(
            [f"rows {n}, checksum {checksum:08x}" for n, checksum in row_checksums]
        )
        if any(len(checksums) > 1 for checksums in by_shard.values()):
            raise ScopeError(
                "processes that compute the same rows pass different rows",
                facts=facts,
                why=f"processes with the same index along {self._context.options.batch_dim!r} compute the same rows",
                fix="choose the rows by mesh.get_local_rank(batch_dim) instead of the rank of the process",
            )
        if self.num_rows and len(by_shard) > 1 and len({checksum for _, checksum in row_checksums}) == 1:
            raise ScopeError(
                "all processes pass the same rows",
                facts=facts,
                why='with rows="own", each process must pass different rows, and equal rows would count several times',
                fix='leave rows="own" out if every process passes the global batch, else use a DistributedSampler',
            )

    def _has_batch_rows(self, tensor: torch.Tensor, num_shards: int = 1) -> bool:
        return tensor.ndim > 0 and tensor.shape[0] == self.num_rows * num_shards > 0

    def _find_batch_placements(self, shape: Sequence[int]) -> tuple[Placement, ...]:
        layout = self._context.policy.derive_batch_layout(shape)
        return self._context.engine.make_native_layout(layout, len(shape))[1]

    def convert_rows_to_dtensors(self, values: object) -> Any:
        """Return the arguments with each tensor of rows as a local shard of a DTensor of the global batch."""
        mesh = self._context.engine.make_native_layout(self._context.policy.make_replicated_layout(0), 0)[0]

        def shard_rows(tensor: torch.Tensor) -> object:
            if isinstance(tensor, DTensor) or not self._has_batch_rows(tensor):
                return tensor
            shape = (self.num_rows * self._num_shards, *tensor.shape[1:])
            return make_dtensor_from_shards(tensor, mesh, self._find_batch_placements(shape))

        return map_tensors(shard_rows, values)

    @skip_function_modes
    def extract_outputs_for_own_rows(self, values: object) -> Any:
        """Return unsharded outputs. Of an output with rows of the batch, only the rows of this process are returned."""

        def extract_output_for_own_rows(tensor: torch.Tensor) -> object:
            if not isinstance(tensor, DTensor) or not tensor.ndim or tensor.shape[0] % self._num_shards:
                return unshard_tensors(tensor)
            batch = self._find_batch_placements(tuple(tensor.shape))
            is_sharded = all(
                actual == expected
                for actual, expected in zip(tensor.placements, batch, strict=True)
                if expected.is_shard()
            )
            if not is_sharded and not self._has_batch_rows(tensor, self._num_shards):
                return unshard_tensors(tensor)
            rows = get_local(redistribute_if_needed(cast(DTensor, tensor.detach()), batch))
            return _RowsOfThisProcessWithoutBackward.apply(tensor, rows) if tensor.requires_grad else rows

        return map_tensors(extract_output_for_own_rows, values)


class _RowsOfThisProcessWithoutBackward(TypedAutogradFunction):
    """Return one process's rows, and raise in backward, because a loss of these rows lacks all other rows."""

    @staticmethod
    def forward(ctx: Ctx, tensor: DTensor, rows: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        raise ScopeError(
            "a loss is computed from the rows of one process",
            why='with rows="own", a model returns only the rows of its process, not all rows that the mean needs',
            fix="compute the loss in the forward of a module that is created in the scope, and pass the "
            "targets to it",
        )
