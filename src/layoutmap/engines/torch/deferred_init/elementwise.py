"""Replay recorded operations in one pass, if each element depends on few others at known positions.

A `ElementReaderBuilder` turns the operations that a tensor depends on into readers. If an operation needs more than the
elements at the same position, it raises an error whose text is shown in plans.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from operator import methodcaller
from typing import Any, NamedTuple

import torch

from layoutmap.engines.torch.deferred_init.operations import (
    COPIES,
    FILLED,
    FILLED_WITH,
    ROWS,
    can_be_computed_in_spans,
    is_pointwise,
)
from layoutmap.engines.torch.deferred_init.readers import (
    ConcatenatedReader,
    ElementReader,
    ElementwiseReader,
    FillReader,
    InterleavedReader,
    OverwritingReader,
    RowReader,
    ShiftedReader,
    SpanWriter,
    StridedReader,
    TensorReader,
    make_offset_writer,
    make_span_writer,
    make_strided_writer,
)
from layoutmap.engines.torch.deferred_init.replay import find_needed_operation_numbers
from layoutmap.engines.torch.deferred_init.steps import (
    DeferredMemory,
    DeferredView,
    RecordedConstant,
    RecordedOperation,
)
from layoutmap.engines.torch.deferred_init.streams import PIECE, RandomFillReader, find_random_fill
from layoutmap.engines.torch.deferred_init.tiles import TiledRandomReader

aten = torch.ops.aten
_MAX_ROW_LENGTH = 64
_MAX_GAP = 16
_MAX_INDEXED_ELEMENTS = 1 << 16
_MAX_PARTIAL_WRITES = 64
_MIN_PERIOD = 1024


class NeedsWholeTensorError(Exception):
    """Raised if a tensor cannot be computed in one pass over its elements."""


class IndexMap(NamedTuple):
    """Map element `t` of the requested tensor to the element of a source tensor that it needs: `scale * t + shift`.

    `outer` is an earlier map, which need not be linear. A reader gives each element once, so only consumers with equal
    maps may share a reader.
    """

    outer: Any = None
    scale: int = 1
    shift: int = 0

    def convert_to_view_map(self, view: DeferredView) -> IndexMap:
        """Convert this map to elements of a view's memory into a map to elements of the view."""
        if view.is_dense:
            return self._replace(shift=self.shift - view.offset)
        return IndexMap((view.geometry, "within", self))

    def convert_to_memory_map(self, view: DeferredView) -> IndexMap:
        """Convert this map to elements of a view into a map to elements of the view's memory."""
        if view.is_dense:
            return self._replace(shift=self.shift + view.offset)
        if self.outer and self[1:] == (1, 0) and self.outer[:2] == (view.geometry, "within"):
            return self.outer[2]
        return IndexMap((view.geometry, "around", self))

    def convert_to_row_start_map(self, length: int) -> IndexMap:
        """Convert this map to row numbers into a map to the first element of each row."""
        return self._replace(scale=self.scale * length, shift=self.shift * length)


class ElementReaderBuilder:
    """Build readers that compute tensors in one pass over the recorded operations.

    Args:
        operations: The tape.
        piece_numel: The number of elements to draw at a time.
    """

    def __init__(self, operations: Sequence[RecordedOperation], piece_numel: int = PIECE) -> None:
        self._operations = operations
        self._piece = piece_numel
        self._readers: dict[object, ElementReader] = {}

    def make_element_reader(self, view: DeferredView, end_number: int) -> ElementReader:
        """Return a reader of a tensor's elements in memory order, with their values before operation `end_number`.

        Raises:
            NeedsWholeTensorError: The elements cannot be computed in one pass.
        """
        reader = self._make_view_reader(view, end_number, IndexMap())
        if reader is None:
            raise NeedsWholeTensorError(
                "one pass cannot compute elements that overlap or are far apart in memory"
            )
        return reader

    def _make_view_reader(
        self, view: DeferredView, end_number: int, index_map: IndexMap
    ) -> ElementReader | None:
        """Return a reader of a view's elements in memory order, or None if elements overlap or are far apart."""
        if view.is_dense:
            reader = self._make_memory_reader(view.memory, end_number, index_map.convert_to_memory_map(view))
            return ShiftedReader(reader, view.offset) if view.offset else reader
        # Return None for a small view of a large storage, because a reader of the view would compute the whole storage.
        if not view.has_ascending_offsets or view.memory.numel > _MAX_GAP * view.numel:
            return None
        reader = self._make_memory_reader(view.memory, end_number, index_map.convert_to_memory_map(view))
        return _increment_consumers(StridedReader(reader, view.geometry))

    def _make_memory_reader(
        self, memory: DeferredMemory, end_number: int, index_map: IndexMap
    ) -> ElementReader:
        """Return a reader of a memory's values before operation `end_number`. Equal index maps share a reader."""
        write_index = bisect.bisect_left(memory.writes, end_number) - 1
        # Consumers with different maps read in different orders, so they need different readers.
        key = (memory, write_index, index_map)
        if key not in self._readers:
            self._readers[key] = self._make_reader_after_write(memory, write_index, index_map)
        return _increment_consumers(self._readers[key])

    def _make_reader_after_write(
        self, memory: DeferredMemory, write_index: int, index_map: IndexMap
    ) -> ElementReader:
        """Return a reader of a memory as it is after the write at position `write_index` in `memory.writes`."""
        partial_writes: list[tuple[RecordedOperation, DeferredView]] = []
        while True:
            operation = self._operations[memory.writes[write_index]]
            made = operation.find_result_with_new_memory(memory)
            written = [v for v in (operation.writes if made is None else [made]) if v.memory is memory]
            # Every partial write takes part in the computation of each span, so limit the number of partial writes.
            if len(written) != 1 or len(partial_writes) > _MAX_PARTIAL_WRITES:
                raise self._make_needs_whole_tensor_error(operation)
            [view] = written
            if view.is_whole_memory and operation.op.overloadpacket is not aten.index_put_:
                break
            if made is not None:
                raise self._make_needs_whole_tensor_error(operation)
            partial_writes.append((operation, view))
            write_index -= 1
        if not partial_writes:
            return self._make_result_reader(operation, view, index_map.convert_to_view_map(view))
        base = self._make_memory_reader(memory, operation.number + 1, index_map)
        writers = [self._make_view_writer(*each, index_map) for each in reversed(partial_writes)]
        return OverwritingReader(base, writers)

    # -- operations that write part of a storage

    def _make_view_writer(
        self, operation: RecordedOperation, view: DeferredView, index_map: IndexMap
    ) -> SpanWriter:
        """Return a function that repeats an operation's write to a view, within a given span of the view's memory."""
        if operation.op.overloadpacket is aten.index_put_:
            return self._make_indexed_writer(operation, view)
        if not view.has_ascending_offsets:
            raise self._make_needs_whole_tensor_error(operation)
        result_reader = self._make_result_reader(operation, view, index_map.convert_to_view_map(view))
        reader = _increment_consumers(result_reader)
        if view.is_dense:
            return make_span_writer(view.offset, view.numel, reader)
        return make_strided_writer(view.geometry, reader)

    def _make_indexed_writer(self, operation: RecordedOperation, view: DeferredView) -> SpanWriter:
        """Return a function that writes as `tensor[indices] = values` does. Raise if an argument is deferred."""
        indices, values = operation.args[1:3]
        accumulates = _get_positional_argument(operation, 3, False)
        if accumulates or any(isinstance(each, DeferredView) for each in (*indices, values)):
            raise self._make_needs_whole_tensor_error(operation)
        index = tuple(slice(None) if each is None else each.value for each in indices)
        shape = torch.empty(1, device="cpu").expand(view.shape)[index].shape
        if shape.numel() > _MAX_INDEXED_ELEMENTS:
            raise self._make_needs_whole_tensor_error(operation)
        offsets = torch.full(shape, view.offset, device="cpu")
        for axis, (n, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
            along = torch.arange(n, device="cpu").view(
                [n if i == axis else 1 for i in range(len(view.shape))]
            )
            offsets += stride * along.expand(view.shape)[index]
        # torch does not define the result of duplicate indices, so refuse them.
        if offsets.unique().numel() < offsets.numel():  # pyright: ignore[reportUnknownMemberType]
            raise self._make_needs_whole_tensor_error(operation)
        return make_offset_writer(offsets.reshape(-1), values.value.expand(shape).reshape(-1))

    # -- operations that write a whole tensor

    def _make_result_reader(
        self, operation: RecordedOperation, view: DeferredView, index_map: IndexMap
    ) -> ElementReader:
        """Return a reader of the elements that an operation writes to a view."""
        packet = operation.op.overloadpacket
        if operation.state is not None:
            fill = find_random_fill(operation, view)
            if fill is None:
                raise self._make_needs_whole_tensor_error(operation)
            if operation.seed is not None:
                return TiledRandomReader(fill, view.geometry.shape, operation.seed)
            return RandomFillReader(fill, view.numel, operation.state, self._piece)
        if packet in FILLED:
            return FillReader(FILLED[packet], view.dtype)
        if packet in FILLED_WITH:
            value = operation.args[FILLED_WITH[packet]]
            if isinstance(value, DeferredView):
                raise self._make_needs_whole_tensor_error(operation)
            return FillReader(
                value.value.item() if isinstance(value, RecordedConstant) else value, view.dtype
            )
        if packet in COPIES:
            source_arg = operation.args[packet is aten.copy_]
            source = self._make_operand_reader(operation, source_arg, view, index_map)
            return ElementwiseReader(methodcaller("to", view.dtype), [source], owns_first=True)
        if is_pointwise(operation):
            return self._make_pointwise_reader(operation, view, index_map)
        if packet in (aten.cat, aten.stack):
            return self._make_concat_reader(operation, view, index_map)
        if packet in ROWS or packet is aten.gather:
            return self._make_row_reader(operation, view, index_map)
        raise self._make_needs_whole_tensor_error(operation)

    def _make_pointwise_reader(
        self, operation: RecordedOperation, view: DeferredView, index_map: IndexMap
    ) -> ElementReader:
        if any(isinstance(each, DeferredView | RecordedConstant) for each in operation.kwargs.values()):
            raise self._make_needs_whole_tensor_error(operation)
        inputs: list[ElementReader] = []
        args, places = list(operation.args), list[int]()
        for place, arg in enumerate(args):
            if isinstance(arg, RecordedConstant) and arg.value.numel() == 1:
                args[place] = arg.value.reshape(() if arg.value.dim() == 0 else (1,))
            elif isinstance(arg, DeferredView | RecordedConstant):
                places.append(place)
                inputs.append(self._make_operand_reader(operation, arg, view, index_map))

        def compute_elements(*values: torch.Tensor) -> torch.Tensor:
            arguments = {**dict(enumerate(args)), **dict(zip(places, values, strict=True))}
            return operation.op(*arguments.values(), **operation.kwargs)

        return ElementwiseReader(compute_elements, inputs, owns_first=bool(operation.writes))

    def _make_operand_reader(
        self,
        operation: RecordedOperation,
        arg: DeferredView | RecordedConstant,
        view: DeferredView,
        index_map: IndexMap,
    ) -> ElementReader:
        """Return a reader of an argument's elements at the positions that a pointwise operation writes."""
        if isinstance(arg, RecordedConstant):
            return _increment_consumers(TensorReader(arg.value.expand(view.shape).permute(view.axis_order)))
        is_alike = arg.has_same_memory_order(view)
        reader = self._make_view_reader(arg, operation.number, index_map) if is_alike else None
        if reader is None:
            raise self._make_needs_whole_tensor_error(operation)
        return reader

    def _make_concat_reader(
        self, operation: RecordedOperation, view: DeferredView, index_map: IndexMap
    ) -> ElementReader:
        """Return a reader of the result of a concatenation along an axis, or of a stack along a new first axis."""
        axis = _get_positional_argument(operation, 1, 0) % max(1, len(view.shape))
        is_stack = operation.op.overloadpacket is aten.stack
        outer = math.prod(view.shape[:axis])
        if not view.is_contiguous or (axis and (is_stack or view.numel // outer < _MIN_PERIOD)):
            raise self._make_needs_whole_tensor_error(operation)
        parts: list[tuple[ElementReader, int]] = []
        begin = 0
        for part in operation.args[0]:
            reader: ElementReader | None = None
            if isinstance(part, RecordedConstant):
                reader, numel, dtype = (
                    _increment_consumers(TensorReader(part.value)),
                    part.value.numel(),
                    part.value.dtype,
                )
            else:
                numel, dtype = part.numel, part.dtype
                if part.is_contiguous:
                    within = index_map._replace(shift=index_map.shift - begin)
                    reader = self._make_view_reader(
                        part, operation.number, IndexMap((operation, begin, index_map)) if axis else within
                    )
            if reader is None or dtype != view.dtype:
                raise self._make_needs_whole_tensor_error(operation)
            parts.append((reader, numel // outer))
            begin += numel // outer
        return InterleavedReader(parts) if axis else ConcatenatedReader(parts)

    def _make_row_reader(
        self, operation: RecordedOperation, view: DeferredView, index_map: IndexMap
    ) -> ElementReader:
        """Return a reader of the results of an operation along short rows, such as the maximum of each row."""
        gathers = operation.op.overloadpacket is aten.gather
        axis = _get_positional_argument(operation, 1, None)
        memories = [None if made is None else made.memory for made in operation.results]
        which = memories.index(view.memory) if view.memory in memories else -1
        if not isinstance(axis, int) or not view.is_contiguous or which < 0:
            raise self._make_needs_whole_tensor_error(operation)
        inputs: list[tuple[ElementReader, int]] = []
        for source in (operation.args[0], operation.args[2]) if gathers else (operation.args[0],):
            n = source.shape[-1] if isinstance(source, DeferredView) and source.shape else 0
            if not 0 < n <= _MAX_ROW_LENGTH or axis not in (-1, len(source.shape) - 1):
                raise self._make_needs_whole_tensor_error(operation)
            rows = index_map.convert_to_row_start_map(n)
            reader = self._make_view_reader(source, operation.number, rows) if source.is_contiguous else None
            if reader is None or source.numel != n * view.numel:
                raise self._make_needs_whole_tensor_error(operation)
            inputs.append((reader, n))

        def compute_from_rows(rows: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            made = operation.op(rows, -1, *others)
            return made if isinstance(made, torch.Tensor) else made[which]

        return RowReader(compute_from_rows, inputs)

    def _make_needs_whole_tensor_error(self, operation: RecordedOperation) -> NeedsWholeTensorError:
        """Return the error for an operation that cannot be computed in spans. The error names the operation."""
        memories = {view.memory for view in operation.iterate_deferred_inputs()}
        numbers = find_needed_operation_numbers(self._operations, memories, operation.number)
        causes = [*(self._operations[n] for n in numbers), operation]
        causes = causes if can_be_computed_in_spans(operation) else [operation]
        cause = next((each for each in causes if not can_be_computed_in_spans(each)), operation)
        caller, name = cause.caller or operation.caller, cause.name
        return NeedsWholeTensorError(f"{caller or name} needs the whole tensor" + f": {name}" * bool(caller))


def _increment_consumers(reader: ElementReader) -> ElementReader:
    reader.consumers += 1
    return reader


def _get_positional_argument(operation: RecordedOperation, position: int, default: object) -> Any:
    return operation.args[position] if len(operation.args) > position else default
