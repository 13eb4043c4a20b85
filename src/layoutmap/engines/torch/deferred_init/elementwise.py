"""Replay recorded operations in one pass, if each element depends on few others at known positions.

A `ReaderBuilder` turns the steps that a tensor depends on into readers. If a step needs more than the elements at the
same position, it raises an error whose text is shown in plans.
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
    can_be_split,
    is_pointwise,
)
from layoutmap.engines.torch.deferred_init.readers import (
    ConcatenatedReader,
    ElementwiseReader,
    FillReader,
    InterleavedReader,
    OverwritingReader,
    Reader,
    RowReader,
    ShiftedReader,
    SpanWrite,
    StridedReader,
    TensorReader,
    make_offset_write,
    make_span_write,
    make_strided_write,
)
from layoutmap.engines.torch.deferred_init.replay import find_needed_indices
from layoutmap.engines.torch.deferred_init.steps import Constant, DeferredMemory, RecordedStep, View
from layoutmap.engines.torch.deferred_init.streams import PIECE, StreamReader, find_random_fill
from layoutmap.engines.torch.deferred_init.tiles import TileReader

aten = torch.ops.aten
_MAX_ROW_LENGTH = 64
_MAX_GAP = 16
_MAX_INDEXED_ELEMENTS = 1 << 16
_MAX_PARTIAL_WRITES = 64
_MIN_PERIOD = 1024


class NeedsWholeTensorError(Exception):
    """Raised if a tensor cannot be computed in one pass over its elements."""


class IndexMap(NamedTuple):
    """Tell which element of a source tensor is needed for element `t` of the requested tensor: `scale * t + shift`.

    `outer` is an earlier map, which need not be linear. A reader gives each element once, so only consumers with equal
    maps may share a reader.
    """

    outer: Any = None
    scale: int = 1
    shift: int = 0

    def map_to_view(self, view: View) -> IndexMap:
        """Convert this map to elements of a memory into the map to elements of a view of that memory."""
        if view.is_dense:
            return self._replace(shift=self.shift - view.offset)
        return IndexMap((view.geometry, "within", self))

    def map_to_memory(self, view: View) -> IndexMap:
        """Convert this map to elements of a view into the map to elements of the memory that it views."""
        if view.is_dense:
            return self._replace(shift=self.shift + view.offset)
        if self.outer and self[1:] == (1, 0) and self.outer[:2] == (view.geometry, "within"):
            return self.outer[2]
        return IndexMap((view.geometry, "around", self))

    def map_to_rows(self, length: int) -> IndexMap:
        """Convert this map to row numbers of a tensor into the map to the first elements of these rows."""
        return self._replace(scale=self.scale * length, shift=self.shift * length)


class ReaderBuilder:
    """Build readers that compute tensors in one pass over the recorded steps.

    Args:
        steps: The tape.
        piece_numel: The number of elements to draw at a time.
    """

    def __init__(self, steps: Sequence[RecordedStep], piece_numel: int = PIECE) -> None:
        self._steps = steps
        self._piece = piece_numel
        self._readers: dict[object, Reader] = {}

    def make_reader(self, view: View, until: int) -> Reader:
        """Return a reader of a tensor's elements in memory order, with their values before the step `until`.

        Raises:
            NeedsWholeTensorError: The elements cannot be computed in one pass.
        """
        reader = self._make_view_reader(view, until, IndexMap())
        if reader is None:
            raise NeedsWholeTensorError("the tensor's elements overlap or are far apart in memory")
        return reader

    def _make_view_reader(self, view: View, until: int, index_map: IndexMap) -> Reader | None:
        """Return a reader of a view's elements in memory order, or None if elements overlap or are far apart."""
        if view.is_dense:
            reader = self._make_memory_reader(view.memory, until, index_map.map_to_memory(view))
            return ShiftedReader(reader, view.offset) if view.offset else reader
        # Return None for a small view of a large storage, because a reader of the view would compute the whole storage.
        if not view.is_ordered or view.memory.numel > _MAX_GAP * view.numel:
            return None
        reader = self._make_memory_reader(view.memory, until, index_map.map_to_memory(view))
        return _register_consumer(StridedReader(reader, view.geometry))

    def _make_memory_reader(self, memory: DeferredMemory, until: int, index_map: IndexMap) -> Reader:
        """Return a reader of a memory's values before step `until`. Consumers with equal index maps share a reader."""
        version = bisect.bisect_left(memory.writes, until) - 1
        # Consumers with different maps read in different orders, so they need different readers.
        key = (memory, version, index_map)
        if key not in self._readers:
            self._readers[key] = self._make_version_reader(memory, version, index_map)
        return _register_consumer(self._readers[key])

    def _make_version_reader(self, memory: DeferredMemory, version: int, index_map: IndexMap) -> Reader:
        """Return a reader of a memory as it is after the write at position `version` in `memory.writes`."""
        partial_writes: list[tuple[RecordedStep, View]] = []
        while True:
            step = self._steps[memory.writes[version]]
            made = step.find_result_that_created(memory)
            written = [made] if made is not None else [each for each in step.writes if each.memory is memory]
            # Every partial write takes part in the computation of each span, so limit the number of partial writes.
            if len(written) != 1 or len(partial_writes) > _MAX_PARTIAL_WRITES:
                raise self._make_step_error(step)
            [view] = written
            if view.is_whole_memory and step.op.overloadpacket is not aten.index_put_:
                break
            if made is not None:
                raise self._make_step_error(step)
            partial_writes.append((step, view))
            version -= 1
        if not partial_writes:
            return self._make_result_reader(step, view, index_map.map_to_view(view))
        base = self._make_memory_reader(memory, step.number + 1, index_map)
        made = [self._make_partial_write(step, view, index_map) for step, view in reversed(partial_writes)]
        return OverwritingReader(base, made)

    # -- steps that write part of a storage

    def _make_partial_write(self, step: RecordedStep, view: View, index_map: IndexMap) -> SpanWrite:
        """Return a function that overwrites elements with the values that a step writes to a part of a memory."""
        if step.op.overloadpacket is aten.index_put_:
            return self._make_indexed_write(step, view)
        if not view.is_ordered:
            raise self._make_step_error(step)
        reader = _register_consumer(self._make_result_reader(step, view, index_map.map_to_view(view)))
        if view.is_dense:
            return make_span_write(view.offset, view.numel, reader)
        return make_strided_write(view.geometry, reader)

    def _make_indexed_write(self, step: RecordedStep, view: View) -> SpanWrite:
        """Return a function that writes as `tensor[indices] = values` does. Raise if an argument is deferred."""
        indices, values = step.args[1:3]
        accumulates = _get_positional_argument(step, 3, False)
        if accumulates or any(isinstance(each, View) for each in (*indices, values)):
            raise self._make_step_error(step)
        index = tuple(slice(None) if each is None else each.value for each in indices)
        shape = torch.empty(1, device="cpu").expand(view.shape)[index].shape
        if shape.numel() > _MAX_INDEXED_ELEMENTS:
            raise self._make_step_error(step)
        offsets = torch.full(shape, view.offset, device="cpu")
        for axis, (n, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
            along = torch.arange(n, device="cpu").view(
                [n if i == axis else 1 for i in range(len(view.shape))]
            )
            offsets += stride * along.expand(view.shape)[index]
        # torch does not define the result of duplicate indices, so refuse them.
        if offsets.unique().numel() < offsets.numel():  # pyright: ignore[reportUnknownMemberType]
            raise self._make_step_error(step)
        return make_offset_write(offsets.reshape(-1), values.value.expand(shape).reshape(-1))

    # -- steps that write a whole tensor

    def _make_result_reader(self, step: RecordedStep, view: View, index_map: IndexMap) -> Reader:
        """Return a reader of the elements that a step writes to a view."""
        packet = step.op.overloadpacket
        if step.state is not None:
            fill = find_random_fill(step, view)
            if fill is None:
                raise self._make_step_error(step)
            if step.seed is not None:
                return TileReader(fill, view.geometry.shape, step.seed)
            return StreamReader(fill, view.numel, step.state, self._piece)
        if packet in FILLED:
            return FillReader(FILLED[packet], view.dtype)
        if packet in FILLED_WITH:
            value = step.args[FILLED_WITH[packet]]
            if isinstance(value, View):
                raise self._make_step_error(step)
            return FillReader(value.value.item() if isinstance(value, Constant) else value, view.dtype)
        if packet in COPIES:
            source = self._make_operand_reader(step, step.args[packet is aten.copy_], view, index_map)
            return ElementwiseReader(methodcaller("to", view.dtype), [source], owns_first=True)
        if is_pointwise(step):
            return self._make_pointwise_reader(step, view, index_map)
        if packet in (aten.cat, aten.stack):
            return self._make_concatenated_reader(step, view, index_map)
        if packet in ROWS or packet is aten.gather:
            return self._make_row_reader(step, view, index_map)
        raise self._make_step_error(step)

    def _make_pointwise_reader(self, step: RecordedStep, view: View, index_map: IndexMap) -> Reader:
        if any(isinstance(each, View | Constant) for each in step.kwargs.values()):
            raise self._make_step_error(step)
        inputs: list[Reader] = []
        args, places = list(step.args), list[int]()
        for place, arg in enumerate(args):
            if isinstance(arg, Constant) and arg.value.numel() == 1:
                args[place] = arg.value.reshape(() if arg.value.dim() == 0 else (1,))
            elif isinstance(arg, View | Constant):
                places.append(place)
                inputs.append(self._make_operand_reader(step, arg, view, index_map))

        def compute_step(*values: torch.Tensor) -> torch.Tensor:
            arguments = {**dict(enumerate(args)), **dict(zip(places, values, strict=True))}
            return step.op(*arguments.values(), **step.kwargs)

        return ElementwiseReader(compute_step, inputs, owns_first=bool(step.writes))

    def _make_operand_reader(
        self, step: RecordedStep, arg: View | Constant, view: View, index_map: IndexMap
    ) -> Reader:
        """Return a reader of an argument's elements at the positions that a pointwise step writes."""
        if isinstance(arg, Constant):
            return _register_consumer(TensorReader(arg.value.expand(view.shape).permute(view.axis_order)))
        reader = self._make_view_reader(arg, step.number, index_map) if arg.has_same_order(view) else None
        if reader is None:
            raise self._make_step_error(step)
        return reader

    def _make_concatenated_reader(self, step: RecordedStep, view: View, index_map: IndexMap) -> Reader:
        """Return a reader of the result of a concatenation along an axis, or of a stack along a new first axis."""
        axis = _get_positional_argument(step, 1, 0) % max(1, len(view.shape))
        is_stack = step.op.overloadpacket is aten.stack
        outer = math.prod(view.shape[:axis])
        if not view.is_contiguous or (axis and (is_stack or view.numel // outer < _MIN_PERIOD)):
            raise self._make_step_error(step)
        parts: list[tuple[Reader, int]] = []
        begin = 0
        for part in step.args[0]:
            reader: Reader | None = None
            if isinstance(part, Constant):
                reader, numel, dtype = (
                    _register_consumer(TensorReader(part.value)),
                    part.value.numel(),
                    part.value.dtype,
                )
            else:
                numel, dtype = part.numel, part.dtype
                if part.is_contiguous:
                    within = index_map._replace(shift=index_map.shift - begin)
                    reader = self._make_view_reader(
                        part, step.number, IndexMap((step, begin, index_map)) if axis else within
                    )
            if reader is None or dtype != view.dtype:
                raise self._make_step_error(step)
            parts.append((reader, numel // outer))
            begin += numel // outer
        return InterleavedReader(parts) if axis else ConcatenatedReader(parts)

    def _make_row_reader(self, step: RecordedStep, view: View, index_map: IndexMap) -> Reader:
        """Return a reader of the results of an operation along short rows, such as the maximum of each row."""
        gathers = step.op.overloadpacket is aten.gather
        axis = _get_positional_argument(step, 1, None)
        which = next(
            (i for i, made in enumerate(step.results) if made is not None and made.memory is view.memory), -1
        )
        if not isinstance(axis, int) or not view.is_contiguous or which < 0:
            raise self._make_step_error(step)
        inputs: list[tuple[Reader, int]] = []
        for source in (step.args[0], step.args[2]) if gathers else (step.args[0],):
            n = source.shape[-1] if isinstance(source, View) and source.shape else 0
            if not 0 < n <= _MAX_ROW_LENGTH or axis not in (-1, len(source.shape) - 1):
                raise self._make_step_error(step)
            rows = index_map.map_to_rows(n)
            reader = self._make_view_reader(source, step.number, rows) if source.is_contiguous else None
            if reader is None or source.numel != n * view.numel:
                raise self._make_step_error(step)
            inputs.append((reader, n))

        def compute_from_rows(rows: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            made = step.op(rows, -1, *others)
            return made if isinstance(made, torch.Tensor) else made[which]

        return RowReader(compute_from_rows, inputs)

    def _make_step_error(self, step: RecordedStep) -> NeedsWholeTensorError:
        """Return the error that a step cannot be computed in one pass. It names the step that is the cause."""
        memories = {view.memory for view in step.iterate_inputs()}
        before = (self._steps[n] for n in find_needed_indices(self._steps, memories, step.number))
        cause = next((e for e in before if not can_be_split(e)), step) if can_be_split(step) else step
        caller, name = cause.caller or step.caller, cause.name
        return NeedsWholeTensorError(f"{caller or name} needs the whole tensor" + f": {name}" * bool(caller))


def _register_consumer(reader: Reader) -> Reader:
    reader.consumers += 1
    return reader


def _get_positional_argument(step: RecordedStep, position: int, default: object) -> Any:
    return step.args[position] if len(step.args) > position else default
