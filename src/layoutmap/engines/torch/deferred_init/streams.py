"""Fill memory with random numbers in pieces of bounded size.

Torch's generator for the CPU gives one stream of numbers, and an operation that takes a fixed number of them for each
element can be done piece by piece, if pieces are multiples of 16 and the last one has at least 16: torch fills
contiguous memory in groups of 16, and does the last 16 again. Which operations that is true of depends on how torch was
built, so each is tried on a few numbers before it is believed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from layoutmap.engines.torch.deferred_init import jump
from layoutmap.engines.torch.deferred_init.operations import RANDOM_IN_PLACE
from layoutmap.engines.torch.deferred_init.readers import Reader
from layoutmap.engines.torch.deferred_init.runs import ApartError, Run
from layoutmap.engines.torch.deferred_init.steps import Recorded, View
from layoutmap.engines.torch.operators import (
    Args,
    Function,
    OpOverload,
    get_overload_name,
    list_argument_names,
)

PIECE = 1 << 18
"""The number of elements in a piece: 1 MiB of float32."""

_RNG_GROUP = 16  # torch fills groups of 16 elements and treats the remainder differently
_MIN_JUMP_WORDS = 1 << 22

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class RandomFill:
    """An in-place random operation that can fill any number of elements.

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

    def draw_next(self, numel: int, generator: torch.Generator) -> torch.Tensor:
        """Draw the next values of the stream."""
        if self.strided:
            # torch consumes the stream in another order for strided memory.
            values = torch.empty(2 * numel, dtype=self.dtype, device="cpu")[::2]
        else:
            values = torch.empty(numel, dtype=self.dtype, device="cpu")
        self.op(values, *self.args, generator=generator)
        return values.contiguous()

    def skip(self, numel: int, generator: torch.Generator) -> None:
        """Advance the generator by that many values."""
        words = _count_words(self)
        # The last group may cache the second number of a normal pair, so draw it.
        ahead = (numel - _RNG_GROUP) // _RNG_GROUP * _RNG_GROUP
        if ahead * words >= _MIN_JUMP_WORDS and jump.is_exact():  # drawing is faster for shorter distances
            jump.jump_ahead(generator, ahead * words)
            numel -= ahead
        room = _get_scratch_buffer((2 if self.strided else 1) * min(numel, PIECE + _RNG_GROUP), self.dtype)
        for start, stop in split_into_pieces(numel):
            values = room[: 2 * (stop - start) : 2] if self.strided else room[: stop - start]
            self.op(values, *self.args, generator=generator)


_scratch_buffers = threading.local()


def _get_scratch_buffer(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the same scratch buffer each time, because repeated allocations would fragment the heap."""
    num_bytes = numel * dtype.itemsize
    room = getattr(_scratch_buffers, "bytes", None)
    if room is None or room.numel() < num_bytes:
        room = _scratch_buffers.bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return room[:num_bytes].view(dtype)


def free_scratch_buffer() -> None:
    """Free the scratch buffer after a model is created."""
    vars(_scratch_buffers).pop("bytes", None)


@functools.lru_cache(maxsize=4096)
def _can_split(fill: RandomFill) -> bool:
    """Return whether drawing in pieces gives the same bits and generator state as drawing at once."""
    for numel in (_RNG_GROUP * 50 + 5, _RNG_GROUP * 50):  # with and without a remainder
        at_once, in_parts = torch.Generator("cpu"), torch.Generator("cpu")
        for generator in (at_once, in_parts):
            generator.manual_seed(20)
            # An odd count leaves the second number of a normal pair in the cache.
            torch.empty(5, device="cpu").normal_(generator=generator)
        expected = fill.draw_next(numel, at_once)
        parts = [
            fill.draw_next(n, in_parts)
            for n in (_RNG_GROUP * 3, _RNG_GROUP * 30, _RNG_GROUP, numel - _RNG_GROUP * 34)
        ]
        same = torch.equal(expected.view(torch.uint8), torch.cat(parts).view(torch.uint8))
        if not same or not torch.equal(at_once.get_state(), in_parts.get_state()):
            return False
    return True


@functools.lru_cache(maxsize=4096)
def _count_words(fill: RandomFill) -> int:
    """Return the number of generator words per element, or 0 if it varies or is unknown."""
    generator = torch.Generator("cpu")
    generator.manual_seed(20)
    fill.draw_next(_RNG_GROUP, generator)
    begin = jump.get_position(generator)
    fill.draw_next(_RNG_GROUP * 8, generator)
    middle = jump.get_position(generator)
    fill.draw_next(_RNG_GROUP * 4, generator)
    each, rest = divmod(middle - begin, _RNG_GROUP * 8)
    return each if not rest and jump.get_position(generator) - middle == _RNG_GROUP * 4 * each > 0 else 0


def split_into_pieces(numel: int, size: int = PIECE) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each piece of a run. The last piece is not shorter than `_RNG_GROUP`."""
    start = 0
    while start < numel:
        stop = start + size
        stop = numel if numel - stop < _RNG_GROUP else stop
        yield start, stop
        start = stop


def find_random_fill(step: Recorded, view: View) -> RandomFill | None:
    """Return how to draw a step's values in pieces in memory order, or None if that is impossible."""
    packet, args = step.op.overloadpacket, step.args
    if not view.is_ordered or any(isinstance(arg, View) for arg in args[1:]):
        return None
    found: tuple[Function, Args] | None = None
    if packet in RANDOM_IN_PLACE:
        found = (packet, (*args[1:], *step.kwargs.values()))
    elif packet in (aten.rand, aten.rand_like):
        found = (aten.uniform_, (0.0, 1.0))
    elif packet in (aten.randn, aten.randn_like):
        found = (aten.normal_, (0.0, 1.0))
    elif packet is aten.normal and "float_float" in get_overload_name(step.op):
        found = (aten.normal_, (args[0], args[1] if len(args) > 1 else 1.0))
    elif packet is aten.randint:
        low = "low" in get_overload_name(step.op)
        found = (aten.random_, (args[0], args[1]) if low else (0, args[0]))
    elif packet is aten.randint_like and "Tensor" not in get_overload_name(step.op):
        low = "low" in get_overload_name(step.op)
        found = (aten.random_, (args[1], args[2]) if low else (0, args[1]))
    if found is None or not all(isinstance(arg, int | float | bool | None) for arg in found[1]):
        return None
    fill = RandomFill(found[0], tuple(found[1]), view.dtype, strided=not view.is_contiguous)
    return fill if _can_split(fill) else None


class Stream(Reader):
    """Read the values of one fill, from the first to the last."""

    def __init__(self, fill: RandomFill, numel: int, state: torch.Tensor, piece: int = PIECE) -> None:
        super().__init__()
        self._fill = fill
        self._numel = numel
        self._size = piece
        self._generator = torch.Generator("cpu")
        self._generator.set_state(state)
        self._start = self._stop = 0
        self._piece = torch.empty(0)

    def _compute(self, run: Run) -> torch.Tensor:
        if run.rows > 1:
            raise ApartError
        start, stop = run.start, run.stop
        parts: list[torch.Tensor] = []
        while start < stop:
            if start >= self._stop:
                self._draw_piece_with(start)
            if start < self._start:
                raise ApartError
            upto = min(stop, self._stop)
            parts.append(self._piece[start - self._start : upto - self._start])
            start = upto
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _draw_piece_with(self, element: int) -> None:
        begin = min(element, max(self._numel - _RNG_GROUP, 0)) // self._size * self._size
        if begin > self._stop:
            self._fill.skip(begin - self._stop, self._generator)
        end = begin + self._size
        self._start, self._stop = begin, self._numel if self._numel - end < _RNG_GROUP else end
        self._piece = self._fill.draw_next(self._stop - begin, self._generator)


@functools.cache
def find_generator_overload(op: OpOverload) -> OpOverload | None:
    """Return the overload of a random operation with a generator, or None if there is none, as for dropout."""
    names = list_argument_names(op)
    if "generator" in names:
        return op
    for overload in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, overload)
        if sorted(list_argument_names(other)) == sorted([*names, "generator"]):
            return other
    return None
