"""Run models in which each process passes its own rows, with `scope(rows="own")`.

The rows of all processes are the global batch, in the order of their places along `batch_dim`. A process gets its own
rows of an output, and what is no row, such as a loss, covers all of them (why: decisions/0267).
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
from layoutmap.engines.agreement import gather_texts, label_processes
from layoutmap.engines.torch.backward import AutogradFunction, Ctx
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.placing import from_shards, move_to_placements
from layoutmap.engines.torch.specs import get_local
from layoutmap.engines.torch.trees import tree_leaves

_PADDING = "drop the last batch, or pad it with rows whose labels are ignored"


def has_own_rows(context: ScopeContext) -> bool:
    """Return whether each process passes its own rows to the models of a scope."""
    return context.across and context.options.own.rows == "own"


def find_row_place(context: ScopeContext) -> int:
    """Return the place of this process along the batch dims, major to minor."""
    mesh = context.engine.native(context.policy.replicated(0), 0)[0]
    place = 0
    for dim in list_batch_dims(context.options.batch_dim):
        place = place * mesh[dim].size() + mesh.get_local_rank(dim)
    return place


def gather_rows(tensor: torch.Tensor, context: ScopeContext) -> torch.Tensor:
    """Return the rows of all processes in the order of their places, of a scalar a vector."""
    own = tensor.detach() if tensor.ndim else tensor.detach()[None]
    num_shards = count_batch_shards(context.options.batch_dim, context.policy.mesh)
    layout = context.policy.derive_batch_layout((own.shape[0] * num_shards, *own.shape[1:]))
    return unshard_tensors(from_shards(own, *context.engine.native(layout, own.ndim)))


class OwnRows:
    """The rows of the global batch that this process passes in one call.

    Args:
        values: The arguments of the call.
        context: The scope.

    Attributes:
        num: The number of rows of this process: the length of the first argument that has an axis.
    """

    def __init__(self, values: object, context: ScopeContext) -> None:
        self._context = context
        self._num_shards = count_batch_shards(context.options.batch_dim, context.policy.mesh)
        self._plain = [each for each in list_tensors(values) if not isinstance(each, DTensor)]
        self._numbers = [each for each in tree_leaves(values) if isinstance(each, (int, float))]
        self.num = next((int(each.shape[0]) for each in self._plain if each.ndim), 0)

    # A process with fewer rows would send smaller shards than others expect, so compare the numbers in each call.
    def check(self, *, is_due: bool) -> None:
        """Refuse different numbers of rows, and in calls that are due, rows that do not belong together.

        Args:
            is_due: Whether values are compared, too.

        Raises:
            ScopeError: The processes pass different numbers or lengths of rows, or the rows of the global batch.
        """
        gather, numpy = self._context.gather, self._context.engine.to_numpy
        shapes = str([tuple(each.shape) for each in self._plain if self._is_row(each)])
        found = gather(np.array([self.num, zlib.crc32(shapes.encode())], np.int64))
        counts = found[:, 0].tolist()
        if len(set(counts)) > 1:
            raise ScopeError(
                f"the processes pass different numbers of rows: {join_names([str(each) for each in counts])}",
                why='with rows="own", they are the shards of one batch, which must have equal sizes',
                fix=_PADDING,
            )
        if len(set(found[:, 1].tolist())) > 1:
            raise ScopeError(
                "the processes pass rows of different lengths",
                facts=label_processes(gather_texts(f"tensors of {shapes[1:-1]}", gather)),
                why='with rows="own" they are shards of one batch, whose rows have one length',
                fix='pad all rows to one length, as with padding="max_length" of a tokenizer',
            )
        if not is_due:
            return
        others = [numpy(each) for each in self._plain if not self._is_row(each)]
        texts = gather_texts(
            f"{self._numbers}, {len(others)} tensors, checksum {compute_checksum(*others):08x}", gather
        )
        if len(set(texts)) > 1:
            raise ScopeError(
                "the processes pass different values of an argument that has no rows",
                facts=label_processes(texts) | {"rows": self.num},
                why=f"a tensor is one of rows if its first axis has {self.num}, as that of the first tensor; any other "
                "argument is the same in all processes",
                fix="pass the sum of all processes, as for a number of tokens",
            )
        rows = [numpy(each) for each in self._plain if self._is_row(each)]
        found = gather(np.array([find_row_place(self._context), compute_checksum(*rows)], np.int64)).tolist()
        self._compare_places(found)

    def _compare_places(self, found: Sequence[tuple[int, int]]) -> None:
        """Raise if processes at one position along the batch dim pass different rows, or all pass the same."""
        by_place: dict[int, set[int]] = {}
        for place, checksum in found:
            by_place.setdefault(place, set()).add(checksum)
        facts = label_processes([f"rows {place}, checksum {checksum:08x}" for place, checksum in found])
        if any(len(checksums) > 1 for checksums in by_place.values()):
            raise ScopeError(
                "processes that compute the same rows pass different rows",
                facts=facts,
                why=f"those at one place along {self._context.options.batch_dim!r} share their rows",
                fix="choose the rows by mesh.get_local_rank(batch_dim) instead of the rank of the process",
            )
        if self.num and len(by_place) > 1 and len({checksum for _, checksum in found}) == 1:
            raise ScopeError(
                "all processes pass the same rows",
                facts=facts,
                why='with rows="own", each process must pass different rows, and these would count several times',
                fix='leave rows="own" out if every process passes the global batch, else use a DistributedSampler',
            )

    def _is_row(self, tensor: torch.Tensor, num_shards: int = 1) -> bool:
        return tensor.ndim > 0 and tensor.shape[0] == self.num * num_shards > 0

    def _find_placements(self, shape: Sequence[int]) -> tuple[Placement, ...]:
        layout = self._context.policy.derive_batch_layout(shape)
        return self._context.engine.native(layout, len(shape))[1]

    def place(self, values: object) -> Any:
        """Convert the arguments so that each process's rows are shards of the global batch."""
        mesh = self._context.engine.native(self._context.policy.replicated(0), 0)[0]

        def place(tensor: torch.Tensor) -> object:
            if isinstance(tensor, DTensor) or not self._is_row(tensor):
                return tensor
            shape = (self.num * self._num_shards, *tensor.shape[1:])
            return from_shards(tensor, mesh, self._find_placements(shape))

        return map_tensors(place, values)

    @skip_function_modes
    def take(self, values: object) -> Any:
        """Convert outputs to unsharded tensors: this process's rows, or all of an output without rows."""

        def take(tensor: torch.Tensor) -> object:
            if not isinstance(tensor, DTensor) or not tensor.ndim or tensor.shape[0] % self._num_shards:
                return unshard_tensors(tensor)
            batch = self._find_placements(tuple(tensor.shape))
            is_sharded = all(
                mine == wanted
                for mine, wanted in zip(tensor.placements, batch, strict=True)
                if wanted.is_shard()
            )
            if not is_sharded and not self._is_row(tensor, self._num_shards):
                return unshard_tensors(tensor)
            rows = get_local(move_to_placements(cast(DTensor, tensor.detach()), batch))
            return _Taken.apply(tensor, rows) if tensor.requires_grad else rows

        return map_tensors(take, values)


class _Taken(AutogradFunction):
    """Raise for gradients of one process's rows, because a mean over them does not cover all rows."""

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
