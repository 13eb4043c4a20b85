"""Compute the values of one deferred tensor: all, or only those at some indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from layoutmap.core.blocks import Index, compute_block_shape, make_full_index
from layoutmap.core.checksums import compute_checksum
from layoutmap.engines.torch.deferred_init.elementwise import ElementReaderBuilder, NeedsWholeTensorError
from layoutmap.engines.torch.deferred_init.passes import iterate_spans_by_tiles, iterate_spans_in_order
from layoutmap.engines.torch.deferred_init.replay import find_needed_operation_numbers, replay_operations
from layoutmap.engines.torch.deferred_init.spans import UnreadableSpanError
from layoutmap.engines.torch.deferred_init.steps import (
    DeferredMemory,
    DeferredView,
    RecordedConstant,
    RecordedOperation,
)
from layoutmap.engines.torch.deferred_init.streams import PIECE
from layoutmap.engines.torch.trees import tree_map

_NUM_COMPARED_ELEMENTS = (
    1024  # processes compare only so many elements of a file, because reading all is slow
)


class Recipe:
    """Describe how to compute the values of one tensor, bit for bit as in the unsharded program.

    Args:
        operations: The recorded operations.
        view: The tensor.
        end_number: The number of the first operation that does not affect the tensor.
        piece_numel: The number of elements to compute at a time, a multiple of 16.

    Attributes:
        shape: The global shape.
        dtype: The element type.
        why_global: Why blocks cannot be computed without the global value; empty if they can.
    """

    def __init__(
        self,
        operations: Sequence[RecordedOperation],
        view: DeferredView,
        end_number: int,
        piece_numel: int = PIECE,
    ) -> None:
        self._operations = operations
        self._view = view
        self._end_number = end_number
        self._piece = piece_numel
        self.shape = view.shape
        self.dtype = view.dtype
        self.why_global = ""
        past = [operations[n] for n in find_needed_operation_numbers(operations, {view.memory}, end_number)]
        by_blocks = any(operation.seed is not None or _is_read_from_file(operation) for operation in past)
        self._reads = iterate_spans_by_tiles if by_blocks else iterate_spans_in_order
        try:
            ElementReaderBuilder(operations).make_element_reader(view, end_number)
        except NeedsWholeTensorError as reason:
            self.why_global = str(reason)

    # The bits must be the unsharded program's, so replay all operations if pieces do not suffice (decisions/0006).
    def compute_global_value(self) -> torch.Tensor:
        """Return the unsharded tensor, with the strides that it has in the unsharded program."""
        if not self.why_global:
            tensor = torch.empty_strided(self.shape, self._view.strides, dtype=self.dtype, device="cpu")
            if self._try_to_fill_blocks([(make_full_index(self.shape), tensor)]):
                return tensor
        folded = self._compute_any_or_all_in_spans()
        if folded is not None:
            return folded
        return replay_operations(self._operations, [self._view], self._end_number)[0]

    def format_text(self) -> str:
        """Return the recipe as text, one line per operation. Equal texts mean equal values in any process."""
        names: dict[DeferredMemory, str] = {}

        def format_argument(leaf: object) -> Any:
            if isinstance(leaf, DeferredView):
                where = "" if leaf.is_whole_memory else f" at {leaf.offset} by {leaf.strides}"
                where += " conj" * leaf.conj + " neg" * leaf.neg
                name = names.setdefault(leaf.memory, f"#{len(names)}")
                return f"{name} {leaf.dtype}{list(leaf.shape)}{where}"
            if isinstance(leaf, RecordedConstant):
                few = (
                    leaf.value[-1:].reshape(-1)[-_NUM_COMPARED_ELEMENTS:]
                    if leaf.is_mapped_file
                    else leaf.value
                )
                return f"{leaf.value.dtype}{list(leaf.value.shape)} {_format_checksum(few)}"
            # The index of a device differs between processes, so compare only its type.
            return leaf.type if isinstance(leaf, torch.device) else leaf

        lines = [format_argument(self._view)]
        for number in find_needed_operation_numbers(self._operations, {self._view.memory}, self._end_number):
            operation = self._operations[number]
            given = [str(tree_map(format_argument, each)) for each in operation.args]
            named = sorted(operation.kwargs.items())
            given += [f"{name}={tree_map(format_argument, value)}" for name, value in named]
            if operation.state is not None:
                given.append(f"random state {_format_checksum(operation.state)}")
            if operation.seed is not None:
                given.append(f"seed {operation.seed}")
            made = [format_argument(view) for view in operation.results if view is not None]
            lines.append(f"{operation.op}({', '.join(given)}) gives {', '.join(made)}")
        return "\n".join(lines)

    def compute_blocks(self, indices: Sequence[Index]) -> list[torch.Tensor]:
        """Return one block per index. Each block is contiguous and has its own memory.

        The random numbers are drawn in one pass, in pieces of about 1 MiB, unless `why_global` says otherwise.
        """
        if not self.why_global:
            blocks = [
                torch.empty(compute_block_shape(index), dtype=self.dtype, device="cpu") for index in indices
            ]
            if self._try_to_fill_blocks(list(zip(indices, blocks, strict=True))):
                return blocks
        values = self.compute_global_value()
        return [values[index].clone(memory_format=torch.contiguous_format) for index in indices]

    @staticmethod
    def from_values(tensor: torch.Tensor) -> Recipe:
        """Return the recipe of a tensor that already has values."""
        memory = DeferredMemory(tensor.untyped_storage(), tensor.dtype, [0])
        view = DeferredView(
            memory, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype
        )
        clone, constant = torch.ops.aten.clone.default, RecordedConstant(tensor.detach())
        operation = RecordedOperation(0, clone, (constant,), {}, (view,), ())
        return Recipe([operation], view, 1)

    def _compute_any_or_all_in_spans(self) -> torch.Tensor | None:
        """Return the result of a recipe that ends in `any` or `all`, or None if one pass cannot compute it."""
        number = self._view.memory.writes[0]
        operation = self._operations[number]
        if operation.op not in (torch.ops.aten.any.default, torch.ops.aten.all.default):
            return None
        [source] = operation.args
        if not isinstance(source, DeferredView) or self._end_number <= self._view.memory.writes[-1]:
            return None
        decisive = operation.name == "any"  # element value that decides the result and ends the pass
        try:
            reader = ElementReaderBuilder(self._operations, self._piece).make_element_reader(source, number)
            shape = source.geometry.shape
            reads = self._reads(shape, [make_full_index(shape)], self._piece)
            values = (reader.read_span(span) for span, _ in reads)
            found = any(bool(piece.any() if decisive else not piece.all()) for piece in values)
        except (NeedsWholeTensorError, UnreadableSpanError):
            return None
        return torch.tensor(found == decisive, dtype=self.dtype, device="cpu")

    def _try_to_fill_blocks(self, blocks: Sequence[tuple[Index, torch.Tensor]]) -> bool:
        """Fill blocks with their values in one pass, and return whether one pass was enough."""
        # Elements are computed in memory order, so permute the axes of indices and blocks to this order.
        order = self._view.axis_order
        indices = [tuple(index[axis] for axis in order) for index, _ in blocks]
        permuted = [block.permute(order) for _, block in blocks]
        reader = ElementReaderBuilder(self._operations, self._piece).make_element_reader(
            self._view, self._end_number
        )
        try:
            with torch.no_grad():
                for span, parts in self._reads([self.shape[axis] for axis in order], indices, self._piece):
                    values = reader.read_span(span)
                    for part in parts:
                        part.copy_to_block(values, permuted)
        except UnreadableSpanError:
            return False
        return True


def _is_read_from_file(operation: RecordedOperation) -> bool:
    return any(isinstance(leaf, RecordedConstant) and leaf.is_mapped_file for leaf in operation.args)


def _format_checksum(tensor: torch.Tensor) -> str:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.is_sparse:
        return type(tensor).__name__
    bits = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    return f"checksum {compute_checksum(bits.numpy()):08x}"
