"""Which elements of a one-dimensional tensor are read at a time: some that follow each other, or rows of such."""

from __future__ import annotations

from typing import NamedTuple


class ApartError(Exception):
    """Raised if a run of elements cannot be computed by itself, so that the unsharded tensor is needed."""


class Run(NamedTuple):
    """Some elements.

    Args:
        start: The first.
        length: Number of consecutive elements of a run.
        rows: Number of runs.
        stride: How far apart the rows begin.
    """

    start: int
    length: int
    rows: int = 1
    stride: int = 0

    @property
    def stop(self) -> int:
        """One more than the last element."""
        return self.start + (self.rows - 1) * self.stride + self.length

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.rows * self.length

    def move_by(self, offset: int) -> Run:
        """Return the run moved by a number of elements."""
        return self._replace(start=self.start + offset)

    def multiply(self, number: int) -> Run:
        """Return the run of `number` elements for each element of this one."""
        return Run(self.start * number, self.length * number, self.rows, self.stride * number)

    def clip_to(self, low: int, high: int) -> tuple[Run, slice] | None:
        """Return the runs between two elements and their slice of this run, or None if there are none.

        Raises:
            ApartError: They are not full rows.
        """
        if self.stop <= low or self.start >= high or low >= high:
            return None
        if self.rows == 1:
            begin, end = max(self.start, low), min(self.stop, high)
            return Run(begin, end - begin), slice(begin - self.start, end - self.start)
        first = max(0, -((self.start - low) // self.stride))
        last = min(self.rows, (high - self.start - self.length) // self.stride + 1)
        rest = Run(self.start + first * self.stride, self.length, last - first, self.stride)
        cuts_before = first > 0 and rest.start - self.stride + self.length > low
        cuts_after = last < self.rows and self.start + last * self.stride < high
        if cuts_before or cuts_after:
            raise ApartError
        return (rest, slice(first * self.length, last * self.length)) if first < last else None
