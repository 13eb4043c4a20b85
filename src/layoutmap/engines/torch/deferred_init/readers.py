"""Read a tensor's values run by run, from the first element to the last.

A reader stands for a one-dimensional tensor that never exists as one, in the order of its memory. `read` asks for
elements further on each time, or again for some of those that it gave last. What it gives must not be changed, but by
who is its only consumer; `own` copies if there are others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from layoutmap.engines.torch.deferred_init.runs import ApartError, Run
from layoutmap.engines.torch.deferred_init.steps import Geometry


class Reader:
    """Compute a tensor's elements run by run. Subclasses implement `_compute`."""

    shares = False  # whether the result may share memory with another object

    def __init__(self) -> None:
        self.consumers = 0
        self._run = Run(0, 0)
        self._values = torch.empty(0)

    def read(self, run: Run) -> torch.Tensor:
        """Return the elements of a run. The caller must not change them.

        Raises:
            ApartError: They are apart in a way that this reader does not know, or before those that it gave last.
        """
        if self.consumers < 2:  # with a single consumer, no other one reads this run
            return self._compute(run)
        if self._run == run:
            return self._values
        if self._run.start <= run.start and run.stop <= self._run.stop and self._run.rows == run.rows == 1:
            return self._values[run.start - self._run.start : run.stop - self._run.start]
        self._values = self._compute(run)  # other consumers read the run next, so cache it
        self._run = run
        return self._values

    def read_owned(self, run: Run) -> torch.Tensor:
        """Return the elements of a run in memory that the caller may change."""
        values = self.read(run)
        return values.clone() if self.shares or self.consumers > 1 else values

    def _compute(self, run: Run) -> torch.Tensor:
        raise NotImplementedError


class Filled(Reader):
    """Return one value for every element."""

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        super().__init__()
        self._value = value
        self._dtype = dtype

    def _compute(self, run: Run) -> torch.Tensor:
        return torch.empty(run.numel, dtype=self._dtype, device="cpu").fill_(self._value)


class Fixed(Reader):
    """Read a real tensor, which may be broadcast or have another memory order.

    Args:
        values: The tensor, with its axes in the order of the memory that is read.
    """

    shares = True

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self._all = values

    def _compute(self, run: Run) -> torch.Tensor:
        if self._all.is_contiguous():
            flat = self._all.reshape(-1)[run.start : run.stop]
            return (
                flat
                if run.rows == 1
                else flat.as_strided((run.rows, run.length), (run.stride, 1)).reshape(-1)
            )
        begins = range(run.start, run.stop, run.stride or run.length)
        found = [
            box for begin in begins for box in split_into_boxes(self._all.shape, begin, begin + run.length)
        ]
        return torch.cat([self._all[box].reshape(-1) for box in found])


class Shifted(Reader):
    """Read another reader with shifted element numbers."""

    def __init__(self, reader: Reader, offset: int) -> None:
        super().__init__()
        self._reader = reader
        self._offset = offset

    def read(self, run: Run) -> torch.Tensor:
        """Return the elements of a run. The caller must not change them."""
        return self._reader.read(run.move_by(self._offset))

    def read_owned(self, run: Run) -> torch.Tensor:
        """Return the elements of a run in memory that the caller may change."""
        return self._reader.read_owned(run.move_by(self._offset))


class Picked(Reader):
    """Read some separate elements of another reader, in order."""

    def __init__(self, reader: Reader, geometry: Geometry) -> None:
        super().__init__()
        self._reader = reader
        self._geometry = geometry

    def _compute(self, run: Run) -> torch.Tensor:
        if run.rows > 1:
            raise ApartError
        places = self._geometry.list_places(run.start, run.stop)
        low, high = self._geometry.find_place(run.start), self._geometry.find_place(run.stop - 1) + 1
        return self._reader.read(Run(low, high - low))[places - low]


class Joined(Reader):
    """Concatenate several readers.

    Args:
        parts: Readers and the numbers of their elements.
    """

    def __init__(self, parts: Sequence[tuple[Reader, int]]) -> None:
        super().__init__()
        self._parts = parts

    def _compute(self, run: Run) -> torch.Tensor:
        found, begin = list[torch.Tensor](), 0
        for reader, numel in self._parts:
            part = run.clip_to(begin, begin + numel)
            if part is not None:
                found.append(reader.read(part[0].move_by(-begin)))
            begin += numel
        return torch.cat(found)


class Interleaved(Reader):
    """Interleave several readers: a stretch of each in turn, repeatedly.

    Args:
        parts: Readers and the numbers of the elements in their stretches.
    """

    def __init__(self, parts: Sequence[tuple[Reader, int]]) -> None:
        super().__init__()
        self._parts = parts
        self._period = sum(numel for _, numel in parts)

    def _compute(self, run: Run) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for begin in range(run.start, run.stop, run.stride or run.length):
            for period in range(begin // self._period, -(-(begin + run.length) // self._period)):
                first = period * self._period
                for reader, numel in self._parts:
                    low, high = max(begin, first), min(begin + run.length, first + numel)
                    if low < high:
                        found.append(reader.read(Run(period * numel + low - first, high - low)))
                    first += numel
        return torch.cat(found)


class Computed(Reader):
    """Apply an operation to each element.

    Args:
        function: Computes the result from the inputs' values, and may modify the first if `owns_first`.
        inputs: The readers of the inputs.
        owns_first: Whether it modifies the first input.
    """

    def __init__(
        self, function: Callable[..., torch.Tensor], inputs: Sequence[Reader], owns_first: bool = False
    ) -> None:
        super().__init__()
        self._function = function
        self._inputs = inputs
        self._owns_first = owns_first

    def _compute(self, run: Run) -> torch.Tensor:
        first = slice(0, int(self._owns_first))
        owned = [reader.read_owned(run) for reader in self._inputs[first]]
        rest = [reader.read(run) for reader in self._inputs[len(owned) :]]
        return self._function(*owned, *rest)


class Rows(Reader):
    """Apply an operation that computes one element from each short row.

    Args:
        function: Computes one element per row from the rows of each input.
        inputs: The readers of the inputs, with the lengths of their rows.
    """

    def __init__(self, function: Callable[..., torch.Tensor], inputs: Sequence[tuple[Reader, int]]) -> None:
        super().__init__()
        self._function = function
        self._inputs = inputs

    def _compute(self, run: Run) -> torch.Tensor:
        rows = [reader.read(run.multiply(n)).view(run.numel, n) for reader, n in self._inputs]
        return self._function(*rows).reshape(run.numel)


Patch = Callable[[torch.Tensor, Run], None]
"""Writes new values for some elements into the values of a run."""


def make_run_patch(offset: int, numel: int, reader: Reader) -> Patch:
    """Return a patch with new values for a contiguous run of elements."""

    def write_values(values: torch.Tensor, run: Run) -> None:
        part = run.clip_to(offset, offset + numel)
        if part is not None:
            values[part[1]] = reader.read(part[0].move_by(-offset))

    return write_values


def make_grid_patch(geometry: Geometry, reader: Reader) -> Patch:
    """Return a patch with new values for the elements of a strided view, in their order."""

    def write_values(values: torch.Tensor, run: Run) -> None:
        low, high = geometry.count_elements_before(run.start), geometry.count_elements_before(run.stop)
        if low < high and run.rows > 1:
            raise ApartError
        if low < high:
            values[geometry.list_places(low, high) - run.start] = reader.read(Run(low, high - low))

    return write_values


def make_place_patch(places: torch.Tensor, values: torch.Tensor) -> Patch:
    """Return a patch with new values for elements at arbitrary positions.

    Args:
        places: Which elements, in any order, each once.
        values: Their values.
    """
    in_order, order = places.sort()
    ordered = values[order]

    def write_values(values: torch.Tensor, run: Run) -> None:
        ends = torch.tensor([run.start, run.stop], device="cpu")
        low, high = torch.searchsorted(in_order, ends).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        at, new = in_order[low:high] - run.start, ordered[low:high]
        if run.rows > 1:
            row, column = at // run.stride, at % run.stride
            there = column < run.length
            at, new = (row * run.length + column)[there], new[there]
        values[at] = new.to(values.dtype)

    return write_values


class Patched(Reader):
    """Apply patches to the values of another reader, in order."""

    def __init__(self, reader: Reader, patches: Sequence[Patch]) -> None:
        super().__init__()
        self._reader = reader
        self._patches = patches

    def _compute(self, run: Run) -> torch.Tensor:
        values = self._reader.read_owned(run)
        for patch in self._patches:
            patch(values, run)
        return values


def split_into_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Split a run of elements into blocks, in row-major order.

    Example:
        >>> list(split_into_boxes((4, 3), 2, 9))
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
        yield from ((slice(first, first + 1), *box) for box in split_into_boxes(rest, begin, end))
        return
    if begin:
        yield from ((slice(first, first + 1), *box) for box in split_into_boxes(rest, begin, inner))
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, n) for n in rest))
    yield from ((slice(last, last + 1), *box) for box in split_into_boxes(rest, 0, end))
