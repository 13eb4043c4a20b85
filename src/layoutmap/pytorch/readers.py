"""Values in one pass: readers that give a run of elements at a time, from the first to the last.

A reader stands for a one-dimensional tensor that never exists whole, in the order of its memory. `read(start, stop)`
asks for elements further on each time, or again for some of those that it gave last. What it gives must not be changed,
but by who is its only consumer; `own` copies if there are others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from layoutmap.pytorch.steps import Geometry
from layoutmap.pytorch.streams import Stream

__all__ = [
    "Computed",
    "Drawn",
    "Filled",
    "Fixed",
    "GridPatch",
    "Joined",
    "Patch",
    "Patched",
    "Picked",
    "PlacesPatch",
    "Reader",
    "Rows",
    "RunPatch",
    "Shifted",
    "boxes",
]


class Reader:
    """A run of values; subclasses say how they are computed."""

    shares = False  # whether what it gives is memory of somebody else

    def __init__(self) -> None:
        self.consumers = 0
        self._start = self._stop = 0
        self._values = torch.empty(0)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """The values from one element to another, not to be changed."""
        if self.consumers < 2:
            return self._compute(start, stop)
        if not self._start <= start <= stop <= self._stop:
            self._values = self._compute(start, stop)
            self._start, self._stop = start, stop
        return self._values[start - self._start : stop - self._start]

    def own(self, start: int, stop: int) -> torch.Tensor:
        """The same, in memory that the consumer may change."""
        values = self.read(start, stop)
        return values.clone() if self.shares or self.consumers > 1 else values

    def _compute(self, start: int, stop: int) -> torch.Tensor:
        raise NotImplementedError


class Filled(Reader):
    """One value everywhere."""

    def __init__(self, value: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self._value = value
        self._dtype = dtype

    def _compute(self, start: int, stop: int) -> torch.Tensor:
        return torch.empty(stop - start, dtype=self._dtype, device="cpu").fill_(self._value)


class Drawn(Reader):
    """Random numbers."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def _compute(self, start: int, stop: int) -> torch.Tensor:
        return self._stream.read(start, stop)


class Fixed(Reader):
    """The values of a real tensor, which may be broadcast or lie otherwise in memory.

    Args:
        values: The tensor, with its axes in the order of the memory that is read.
    """

    shares = True

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self._all = values

    def _compute(self, start: int, stop: int) -> torch.Tensor:
        if self._all.is_contiguous():
            return self._all.reshape(-1)[start:stop]
        return torch.cat([self._all[box].reshape(-1) for box in boxes(self._all.shape, start, stop)])


class Shifted(Reader):
    """Another reader, that counts its elements from elsewhere."""

    def __init__(self, reader: Reader, offset: int) -> None:
        super().__init__()
        self._reader = reader
        self._offset = offset

    def read(self, start: int, stop: int) -> torch.Tensor:
        """The values from one element to another, not to be changed."""
        return self._reader.read(start + self._offset, stop + self._offset)

    def own(self, start: int, stop: int) -> torch.Tensor:
        """The same, in memory that the consumer may change."""
        return self._reader.own(start + self._offset, stop + self._offset)


class Picked(Reader):
    """Some elements of another reader, that lie apart, in order."""

    def __init__(self, reader: Reader, geometry: Geometry) -> None:
        super().__init__()
        self._reader = reader
        self._geometry = geometry

    def _compute(self, start: int, stop: int) -> torch.Tensor:
        if start == stop:
            return self._reader.read(0, 0)
        places = self._geometry.places(start, stop)
        low, high = self._geometry.place(start), self._geometry.place(stop - 1) + 1
        return self._reader.read(low, high)[places - low]


class Joined(Reader):
    """Several runs, one after the other.

    Args:
        parts: Readers and the numbers of their elements.
    """

    def __init__(self, parts: Sequence[tuple[Reader, int]]) -> None:
        super().__init__()
        self._parts = parts

    def _compute(self, start: int, stop: int) -> torch.Tensor:
        found, begin = [], 0
        for reader, numel in self._parts:
            low, high = max(start - begin, 0), min(stop - begin, numel)
            if low < high:
                found.append(reader.read(low, high))
            begin += numel
        return torch.cat(found)


class Computed(Reader):
    """An operation on each element.

    Args:
        function: Takes the values of the inputs at the elements; those that it changes it owns.
        inputs: What it reads.
        owns_first: Whether it changes the first.
    """

    def __init__(
        self, function: Callable[..., torch.Tensor], inputs: Sequence[Reader], owns_first: bool = False
    ) -> None:
        super().__init__()
        self._function = function
        self._inputs = inputs
        self._owns_first = owns_first

    def _compute(self, start: int, stop: int) -> torch.Tensor:
        first = slice(0, int(self._owns_first))
        owned = [reader.own(start, stop) for reader in self._inputs[first]]
        rest = [reader.read(start, stop) for reader in self._inputs[len(owned) :]]
        return self._function(*owned, *rest)


class Rows(Reader):
    """An operation that makes one element of each row of a few elements.

    Args:
        function: Takes the rows of each input, and gives one element for each.
        inputs: What it reads, and how long its rows are.
    """

    def __init__(self, function: Callable[..., torch.Tensor], inputs: Sequence[tuple[Reader, int]]) -> None:
        super().__init__()
        self._function = function
        self._inputs = inputs

    def _compute(self, start: int, stop: int) -> torch.Tensor:
        rows = [reader.read(start * n, stop * n).view(stop - start, n) for reader, n in self._inputs]
        return self._function(*rows).reshape(stop - start)


class Patch:
    """New values for some of the elements."""

    def apply(self, values: torch.Tensor, start: int, stop: int) -> None:
        """Put them into the values from one element to another."""
        self._apply(values, start, stop)

    def _apply(self, values: torch.Tensor, start: int, stop: int) -> None:
        raise NotImplementedError


class RunPatch(Patch):
    """New values for an unbroken run of elements."""

    def __init__(self, offset: int, numel: int, reader: Reader) -> None:
        self._offset = offset
        self._end = offset + numel
        self._reader = reader

    def _apply(self, values: torch.Tensor, start: int, stop: int) -> None:
        low, high = max(start, self._offset), min(stop, self._end)
        if low < high:
            values[low - start : high - start] = self._reader.read(low - self._offset, high - self._offset)


class GridPatch(Patch):
    """New values for elements that lie apart, in order."""

    def __init__(self, geometry: Geometry, reader: Reader) -> None:
        self._geometry = geometry
        self._reader = reader

    def _apply(self, values: torch.Tensor, start: int, stop: int) -> None:
        low, high = self._geometry.elements_before(start), self._geometry.elements_before(stop)
        if low < high:
            places = self._geometry.places(low, high) - start
            values[places] = self._reader.read(low, high)


class PlacesPatch(Patch):
    """New values for elements here and there.

    Args:
        places: Which elements, in any order, each once.
        values: Their values, or one for all.
    """

    def __init__(self, places: torch.Tensor, values: torch.Tensor) -> None:
        self._places, order = places.sort()
        self._values = values if values.numel() == 1 else values[order]

    def _apply(self, values: torch.Tensor, start: int, stop: int) -> None:
        low, high = torch.searchsorted(self._places, torch.tensor([start, stop], device="cpu")).tolist()
        if low < high:
            new = self._values if self._values.numel() == 1 else self._values[low:high]
            values[self._places[low:high] - start] = new.to(values.dtype)


class Patched(Reader):
    """Values of which some are replaced, one patch after the other."""

    def __init__(self, reader: Reader, patches: Sequence[Patch]) -> None:
        super().__init__()
        self._reader = reader
        self._patches = patches

    def _compute(self, start: int, stop: int) -> torch.Tensor:
        values = self._reader.own(start, stop)
        for patch in self._patches:
            patch.apply(values, start, stop)
        return values


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Blocks that together are a run of elements, in row-major order.

    Example:
        >>> list(boxes((4, 3), 2, 9))
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
        yield from ((slice(first, first + 1), *box) for box in boxes(rest, begin, end))
        return
    if begin:
        yield from ((slice(first, first + 1), *box) for box in boxes(rest, begin, inner))
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, n) for n in rest))
    yield from ((slice(last, last + 1), *box) for box in boxes(rest, 0, end))
