"""Describe the elements of a one-dimensional tensor that are read at a time: a run, or rows of runs."""

from __future__ import annotations

from typing import NamedTuple


class ApartError(Exception):
    """Raised if a run cannot be computed separately, so that the unsharded tensor is needed."""


class Run(NamedTuple):
    """Consecutive elements, or several rows of them.

    Args:
        start: The first.
        length: Number of consecutive elements of a run.
        rows: Number of runs.
        stride: The distance between the starts of rows.
    """

    start: int
    length: int
    rows: int = 1
    stride: int = 0

    @property
    def stop(self) -> int:
        """The number after the last element."""
        return self.start + (self.rows - 1) * self.stride + self.length

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.rows * self.length

    def move_by(self, offset: int) -> Run:
        """Return the run moved by a number of elements."""
        return self._replace(start=self.start + offset)

    def multiply(self, number: int) -> Run:
        """Return the run with `number` elements for each element of this one."""
        return Run(self.start * number, self.length * number, self.rows, self.stride * number)

    def clip_to(self, low: int, high: int) -> tuple[Run, slice] | None:
        """Return the part between two elements and its slice of this run, or None if it is empty.

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
