"""Fill memory with random numbers in pieces of bounded size.

Torch's generator for the CPU is one stream of numbers. An operation that takes a fixed number of them per element can
be computed in pieces, if each piece is a multiple of 16 elements and the last one has at least 16, because torch fills
contiguous memory in groups of 16, and repeats the last 16 elements. Whether that holds for an operation depends on how
torch was built, so each operation is tested on a few numbers first.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from layoutmap.engines.torch.deferred_init import jump
from layoutmap.engines.torch.deferred_init.operations import RANDOM_IN_PLACE
from layoutmap.engines.torch.deferred_init.readers import ElementReader
from layoutmap.engines.torch.deferred_init.spans import ElementSpan, UnreadableSpanError
from layoutmap.engines.torch.deferred_init.steps import DeferredView, RecordedOperation
from layoutmap.engines.torch.operators import (
    Args,
    Function,
    OpOverload,
    get_overload_name,
    list_argument_names,
)

PIECE = 1 << 18
"""The number of elements in a piece: 1 MiB of float32."""

# torch draws groups of 16 elements, and the rest differently, so pieces consist of whole groups.
_RNG_GROUP = 16
_MIN_JUMP_WORDS = 1 << 22

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class RandomFill:
    """An in-place random operation that fills any number of elements with random numbers.

    Args:
        op: The operation in place.
        args: Its arguments after the tensor.
        dtype: The element type.
        strided: Whether the memory is not contiguous, for which torch uses other kernels.
    """

    op: Function
    args: Args
    dtype: torch.dtype
    strided: bool

    def draw_next_values(self, numel: int, generator: torch.Generator) -> torch.Tensor:
        """Return the next random values of a generator."""
        if self.strided:
            # The program draws into strided memory, which torch fills in a different order, so use strided memory here,
            # too.
            values = torch.empty(2 * numel, dtype=self.dtype, device="cpu")[::2]
        else:
            values = torch.empty(numel, dtype=self.dtype, device="cpu")
        self.op(values, *self.args, generator=generator)
        return values.contiguous()

    def skip_values(self, numel: int, generator: torch.Generator) -> None:
        """Advance a generator as if `numel` values were drawn."""
        words = _count_words_per_element(self)
        # Draw the last group and do not jump over it, because it may leave the second number of a normal pair in the
        # cache.
        ahead = (numel - _RNG_GROUP) // _RNG_GROUP * _RNG_GROUP
        # For few numbers, drawing and discarding them is faster than a jump.
        if ahead * words >= _MIN_JUMP_WORDS and jump.can_advance_generator_exactly():
            jump.jump_ahead(generator, ahead * words)
            numel -= ahead
        scratch = _get_scratch_buffer((2 if self.strided else 1) * min(numel, PIECE + _RNG_GROUP), self.dtype)
        for start, stop in split_range_into_pieces(numel):
            values = scratch[: 2 * (stop - start) : 2] if self.strided else scratch[: stop - start]
            self.op(values, *self.args, generator=generator)


_scratch_buffers = threading.local()


def _get_scratch_buffer(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return this thread's scratch buffer, which is reused because new allocations would fragment the heap."""
    num_bytes = numel * dtype.itemsize
    scratch = getattr(_scratch_buffers, "bytes", None)
    if scratch is None or scratch.numel() < num_bytes:
        scratch = _scratch_buffers.bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return scratch[:num_bytes].view(dtype)


def free_scratch_buffer() -> None:
    """Free this thread's scratch buffer, which is not needed once a model is created."""
    vars(_scratch_buffers).pop("bytes", None)


@functools.lru_cache(maxsize=4096)
def _can_draw_in_pieces(fill: RandomFill) -> bool:
    """Return whether drawing in pieces gives the same numbers and generator state as drawing at once."""
    # torch draws an incomplete last group differently, so try an incomplete and a complete group.
    for numel in (_RNG_GROUP * 50 + 5, _RNG_GROUP * 50):
        at_once, in_parts = torch.Generator("cpu"), torch.Generator("cpu")
        for generator in (at_once, in_parts):
            generator.manual_seed(20)
            # An odd count leaves the second number of a normal pair in the generator's cache, so the test includes this
            # state.
            torch.empty(5, device="cpu").normal_(generator=generator)
        expected = fill.draw_next_values(numel, at_once)
        parts = [
            fill.draw_next_values(n, in_parts)
            for n in (_RNG_GROUP * 3, _RNG_GROUP * 30, _RNG_GROUP, numel - _RNG_GROUP * 34)
        ]
        same = torch.equal(expected.view(torch.uint8), torch.cat(parts).view(torch.uint8))
        if not same or not torch.equal(at_once.get_state(), in_parts.get_state()):
            return False
    return True


@functools.lru_cache(maxsize=4096)
def _count_words_per_element(fill: RandomFill) -> int:
    """Return how many 32-bit words of the generator each element takes, or 0 if the number varies."""
    generator = torch.Generator("cpu")
    generator.manual_seed(20)
    fill.draw_next_values(_RNG_GROUP, generator)
    begin = jump.count_used_block_words(generator)
    fill.draw_next_values(_RNG_GROUP * 8, generator)
    middle = jump.count_used_block_words(generator)
    fill.draw_next_values(_RNG_GROUP * 4, generator)
    each, rest = divmod(middle - begin, _RNG_GROUP * 8)
    last = jump.count_used_block_words(generator) - middle
    return each if not rest and last == _RNG_GROUP * 4 * each > 0 else 0


def split_range_into_pieces(numel: int, size: int = PIECE) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each piece of a range. The last piece has at least `_RNG_GROUP` elements."""
    start = 0
    while start < numel:
        stop = start + size
        stop = numel if numel - stop < _RNG_GROUP else stop
        yield start, stop
        start = stop


def find_random_fill(operation: RecordedOperation, view: DeferredView) -> RandomFill | None:
    """Return the `RandomFill` that draws an operation's values, or None if they cannot be drawn in pieces."""
    packet, args = operation.op.overloadpacket, operation.args
    if not view.has_ascending_offsets or any(isinstance(arg, DeferredView) for arg in args[1:]):
        return None
    found: tuple[Function, Args] | None = None
    if packet in RANDOM_IN_PLACE:
        found = (packet, (*args[1:], *operation.kwargs.values()))
    elif packet in (aten.rand, aten.rand_like):
        found = (aten.uniform_, (0.0, 1.0))
    elif packet in (aten.randn, aten.randn_like):
        found = (aten.normal_, (0.0, 1.0))
    elif packet is aten.normal and "float_float" in get_overload_name(operation.op):
        found = (aten.normal_, (args[0], args[1] if len(args) > 1 else 1.0))
    elif packet is aten.randint:
        low = "low" in get_overload_name(operation.op)
        found = (aten.random_, (args[0], args[1]) if low else (0, args[0]))
    elif packet is aten.randint_like and "Tensor" not in get_overload_name(operation.op):
        low = "low" in get_overload_name(operation.op)
        found = (aten.random_, (args[1], args[2]) if low else (0, args[1]))
    if found is None or not all(isinstance(arg, int | float | bool | None) for arg in found[1]):
        return None
    fill = RandomFill(found[0], tuple(found[1]), view.dtype, strided=not view.is_contiguous)
    return fill if _can_draw_in_pieces(fill) else None


class RandomFillReader(ElementReader):
    """Read the values of one random fill, from the first to the last."""

    def __init__(self, fill: RandomFill, numel: int, state: torch.Tensor, piece_numel: int = PIECE) -> None:
        super().__init__()
        self._fill = fill
        self._numel = numel
        self._size = piece_numel
        self._generator = torch.Generator("cpu")
        self._generator.set_state(state)
        self._start = self._stop = 0
        self._piece = torch.empty(0)

    def _compute_elements(self, span: ElementSpan) -> torch.Tensor:
        if span.rows > 1:
            raise UnreadableSpanError
        start, stop = span.start, span.stop
        parts: list[torch.Tensor] = []
        while start < stop:
            if start >= self._stop:
                self._draw_piece_containing(start)
            if start < self._start:
                raise UnreadableSpanError
            end = min(stop, self._stop)
            parts.append(self._piece[start - self._start : end - self._start])
            start = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _draw_piece_containing(self, index: int) -> None:
        begin = min(index, max(self._numel - _RNG_GROUP, 0)) // self._size * self._size
        if begin > self._stop:
            self._fill.skip_values(begin - self._stop, self._generator)
        end = begin + self._size
        self._start, self._stop = begin, self._numel if self._numel - end < _RNG_GROUP else end
        self._piece = self._fill.draw_next_values(self._stop - begin, self._generator)


@functools.cache
def find_generator_overload(op: OpOverload) -> OpOverload | None:
    """Return the overload of a random operation that takes a generator, or None if there is none, as for dropout."""
    names = list_argument_names(op)
    if "generator" in names:
        return op
    for overload in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, overload)
        if sorted(list_argument_names(other)) == sorted([*names, "generator"]):
            return other
    return None
