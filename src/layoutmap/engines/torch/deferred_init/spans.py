"""Describe the elements of a one-dimensional tensor that are read at a time: a row, or several rows."""

from __future__ import annotations

from typing import NamedTuple


class UnreadableSpanError(Exception):
    """Raised if a reader cannot compute a span alone, so that the unsharded tensor is needed."""


class ElementSpan(NamedTuple):
    """Consecutive elements of a flattened tensor, or several rows of them at a constant distance.

    Args:
        start: The position of the first element.
        length: Number of consecutive elements in a row.
        rows: Number of rows.
        stride: The distance between the starts of rows.
    """

    start: int
    length: int
    rows: int = 1
    stride: int = 0

    @property
    def stop(self) -> int:
        """The position after the last element."""
        return self.start + (self.rows - 1) * self.stride + self.length

    @property
    def numel(self) -> int:
        """The number of elements in all rows, without elements between rows."""
        return self.rows * self.length

    def shift_by(self, offset: int) -> ElementSpan:
        """Return the span that starts `offset` elements later."""
        return self._replace(start=self.start + offset)

    def scale_by(self, factor: int) -> ElementSpan:
        """Return the span that has `factor` elements in place of each element."""
        return ElementSpan(self.start * factor, self.length * factor, self.rows, self.stride * factor)

    def clip_to(self, low: int, high: int) -> tuple[ElementSpan, slice] | None:
        """Return the part from `low` to `high`, and its slice of this span's values. Return None if the part is empty.

        Raises:
            UnreadableSpanError: The part does not consist of full rows.
        """
        if self.stop <= low or self.start >= high or low >= high:
            return None
        if self.rows == 1:
            begin, end = max(self.start, low), min(self.stop, high)
            return ElementSpan(begin, end - begin), slice(begin - self.start, end - self.start)
        first = max(0, -((self.start - low) // self.stride))
        last = min(self.rows, (high - self.start - self.length) // self.stride + 1)
        rest = ElementSpan(self.start + first * self.stride, self.length, last - first, self.stride)
        cuts_before = first > 0 and rest.start - self.stride + self.length > low
        cuts_after = last < self.rows and self.start + last * self.stride < high
        if cuts_before or cuts_after:
            raise UnreadableSpanError
        return (rest, slice(first * self.length, last * self.length)) if first < last else None
