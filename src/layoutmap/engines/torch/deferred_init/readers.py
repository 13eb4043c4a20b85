"""Read a tensor's values in spans, from the first element to the last.

A reader represents a flattened tensor, in memory order, that is never stored as a whole. Each `read_span` must ask for
later elements than the last one, or for a part of the last span. Callers must not change its result.
`read_writable_span` returns a result that they may change, and copies if there are several consumers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from layoutmap.engines.torch.deferred_init.spans import ElementSpan, UnreadableSpanError
from layoutmap.engines.torch.deferred_init.steps import MemoryGeometry


class ElementReader:
    """Compute the elements of a tensor, one span at a time. Subclasses implement `_compute_elements`."""

    shares_memory = False  # whether the result may share memory with another object

    def __init__(self) -> None:
        self.consumers = 0
        self._span = ElementSpan(0, 0)
        self._values = torch.empty(0)

    def read_span(self, span: ElementSpan) -> torch.Tensor:
        """Return the elements of a span. The caller must not change them.

        Raises:
            UnreadableSpanError: The rows have a distance that this reader does not support, or the span is before the
                elements that were read last.
        """
        if self.consumers < 2:  # without other consumers, each span is read once, so do not cache it
            return self._compute_elements(span)
        if self._span == span:
            return self._values
        last = self._span
        if last.start <= span.start and span.stop <= last.stop and last.rows == span.rows == 1:
            return self._values[span.start - last.start : span.stop - last.start]
        self._values = self._compute_elements(span)  # the other consumers read this span next, so cache it
        self._span = span
        return self._values

    def read_writable_span(self, span: ElementSpan) -> torch.Tensor:
        """Return the elements of a span in memory that the caller may change."""
        values = self.read_span(span)
        return values.clone() if self.shares_memory or self.consumers > 1 else values

    def _compute_elements(self, span: ElementSpan) -> torch.Tensor:
        raise NotImplementedError


class FillReader(ElementReader):
    """Read a tensor of equal elements."""

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        super().__init__()
        self._value = value
        self._dtype = dtype

    def _compute_elements(self, span: ElementSpan) -> torch.Tensor:
        return torch.empty(span.numel, dtype=self._dtype, device="cpu").fill_(self._value)


class TensorReader(ElementReader):
    """Read a tensor that already has values, even if it is broadcast or not contiguous.

    Args:
        values: The tensor, with its axes in the order of the memory that is read.
    """

    shares_memory = True

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self._tensor = values

    def _compute_elements(self, span: ElementSpan) -> torch.Tensor:
        if self._tensor.is_contiguous():
            flat = self._tensor.reshape(-1)[span.start : span.stop]
            return (
                flat
                if span.rows == 1
                else flat.as_strided((span.rows, span.length), (span.stride, 1)).reshape(-1)
            )
        begins = range(span.start, span.stop, span.stride or span.length)
        found = [
            box
            for begin in begins
            for box in split_range_into_blocks(self._tensor.shape, begin, begin + span.length)
        ]
        return torch.cat([self._tensor[box].reshape(-1) for box in found])


class ShiftedReader(ElementReader):
    """Read from a wrapped reader, at positions that are shifted by a constant."""

    def __init__(self, reader: ElementReader, offset: int) -> None:
        super().__init__()
        self._reader = reader
        self._offset = offset

    def read_span(self, span: ElementSpan) -> torch.Tensor:
        """Return the elements of a span. The caller must not change them."""
        return self._reader.read_span(span.shift_by(self._offset))

    def read_writable_span(self, span: ElementSpan) -> torch.Tensor:
        """Return the elements of a span in memory that the caller may change."""
        return self._reader.read_writable_span(span.shift_by(self._offset))


class StridedReader(ElementReader):
    """Read the elements of a strided view from a reader of the whole memory."""

    def __init__(self, reader: ElementReader, geometry: MemoryGeometry) -> None:
        super().__init__()
        self._reader = reader
        self._geometry = geometry

    def _compute_elements(self, span: ElementSpan) -> torch.Tensor:
        if span.rows > 1:
            raise UnreadableSpanError
        offsets = self._geometry.list_offsets(span.start, span.stop)
        low, high = (self._geometry.find_offset(span.start), self._geometry.find_offset(span.stop - 1) + 1)
        return self._reader.read_span(ElementSpan(low, high - low))[offsets - low]


class ConcatenatedReader(ElementReader):
    """Read the elements of several readers, one reader after the other.

    Args:
        parts: Each reader with the number of its elements.
    """

    def __init__(self, parts: Sequence[tuple[ElementReader, int]]) -> None:
        super().__init__()
        self._parts = parts

    def _compute_elements(self, span: ElementSpan) -> torch.Tensor:
        found, begin = list[torch.Tensor](), 0
        for reader, numel in self._parts:
            part = span.clip_to(begin, begin + numel)
            if part is not None:
                found.append(reader.read_span(part[0].shift_by(-begin)))
            begin += numel
        return torch.cat(found)


class InterleavedReader(ElementReader):
    """Read a fixed number of elements of each reader in turn, repeatedly.

    Args:
        parts: Each reader with the number of elements to read from it in a turn.
    """

    def __init__(self, parts: Sequence[tuple[ElementReader, int]]) -> None:
        super().__init__()
        self._parts = parts
        self._period = sum(numel for _, numel in parts)

    def _compute_elements(self, span: ElementSpan) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for begin in range(span.start, span.stop, span.stride or span.length):
            for period in range(begin // self._period, -(-(begin + span.length) // self._period)):
                first = period * self._period
                for reader, numel in self._parts:
                    low, high = max(begin, first), min(begin + span.length, first + numel)
                    if low < high:
                        found.append(reader.read_span(ElementSpan(period * numel + low - first, high - low)))
                    first += numel
        return torch.cat(found)


class ElementwiseReader(ElementReader):
    """Read the results of an operation that is applied to each element of its inputs.

    Args:
        function: Computes the result from the inputs' values, and may modify the first if `owns_first`.
        inputs: The readers of the inputs.
        owns_first: Whether `function` modifies the first input.
    """

    def __init__(
        self, function: Callable[..., torch.Tensor], inputs: Sequence[ElementReader], owns_first: bool = False
    ) -> None:
        super().__init__()
        self._function = function
        self._inputs = inputs
        self._owns_first = owns_first

    def _compute_elements(self, span: ElementSpan) -> torch.Tensor:
        first = slice(0, int(self._owns_first))
        owned = [reader.read_writable_span(span) for reader in self._inputs[first]]
        rest = [reader.read_span(span) for reader in self._inputs[len(owned) :]]
        return self._function(*owned, *rest)


class RowReader(ElementReader):
    """Read the results of an operation that computes one element from each short row of its inputs.

    Args:
        function: Computes one element per row from the rows of each input.
        inputs: The readers of the inputs, with the lengths of their rows.
    """

    def __init__(
        self, function: Callable[..., torch.Tensor], inputs: Sequence[tuple[ElementReader, int]]
    ) -> None:
        super().__init__()
        self._function = function
        self._inputs = inputs

    def _compute_elements(self, span: ElementSpan) -> torch.Tensor:
        rows = [reader.read_span(span.scale_by(n)).view(span.numel, n) for reader, n in self._inputs]
        return self._function(*rows).reshape(span.numel)


SpanWriter = Callable[[torch.Tensor, ElementSpan], None]
"""Function that writes new values for some elements into the values of a span."""


def make_span_writer(offset: int, numel: int, reader: ElementReader) -> SpanWriter:
    """Return a function that overwrites consecutive elements with those of a reader."""

    def overwrite_values(values: torch.Tensor, span: ElementSpan) -> None:
        part = span.clip_to(offset, offset + numel)
        if part is not None:
            values[part[1]] = reader.read_span(part[0].shift_by(-offset))

    return overwrite_values


def make_strided_writer(geometry: MemoryGeometry, reader: ElementReader) -> SpanWriter:
    """Return a function that overwrites the elements of a strided view with those of a reader."""

    def overwrite_values(values: torch.Tensor, span: ElementSpan) -> None:
        low, high = geometry.count_elements_before(span.start), geometry.count_elements_before(span.stop)
        if low < high and span.rows > 1:
            raise UnreadableSpanError
        if low < high:
            new_values = reader.read_span(ElementSpan(low, high - low))
            values[geometry.list_offsets(low, high) - span.start] = new_values

    return overwrite_values


def make_offset_writer(offsets: torch.Tensor, values: torch.Tensor) -> SpanWriter:
    """Return a function that writes given values to the elements at given offsets.

    Args:
        offsets: Positions of elements, in any order, without duplicates.
        values: The new values of these elements.
    """
    in_order, order = offsets.sort()
    ordered = values[order]

    def overwrite_values(values: torch.Tensor, span: ElementSpan) -> None:
        ends = torch.tensor([span.start, span.stop], device="cpu")
        low, high = torch.searchsorted(in_order, ends).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        positions, new = in_order[low:high] - span.start, ordered[low:high]
        if span.rows > 1:
            row, column = positions // span.stride, positions % span.stride
            is_in_span = column < span.length
            positions, new = (row * span.length + column)[is_in_span], new[is_in_span]
        values[positions] = new.to(values.dtype)

    return overwrite_values


class OverwritingReader(ElementReader):
    """Read from a wrapped reader, and then let several functions overwrite some of the values in turn."""

    def __init__(self, reader: ElementReader, writes: Sequence[SpanWriter]) -> None:
        super().__init__()
        self._reader = reader
        self._writes = writes

    def _compute_elements(self, span: ElementSpan) -> torch.Tensor:
        values = self._reader.read_writable_span(span)
        for write in self._writes:
            write(values, span)
        return values


def split_range_into_blocks(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Yield the indices of blocks that together contain the elements from `start` to `stop`, in row-major order.

    Example:
        >>> list(split_range_into_blocks((4, 3), 2, 9))
        [(slice(0, 1, None), slice(2, 3, None)), (slice(1, 3, None), slice(0, 3, None))]
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    rest = shape[1:]
    inner = math.prod(rest)
    first, begin = divmod(start, inner)
    last, end = divmod(stop, inner)
    if first == last:
        yield from ((slice(first, first + 1), *box) for box in split_range_into_blocks(rest, begin, end))
        return
    if begin:
        yield from ((slice(first, first + 1), *box) for box in split_range_into_blocks(rest, begin, inner))
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, n) for n in rest))
    yield from ((slice(last, last + 1), *box) for box in split_range_into_blocks(rest, 0, end))
