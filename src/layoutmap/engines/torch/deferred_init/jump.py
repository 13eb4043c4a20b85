"""Advance torch's CPU generator without drawing.

The generator is the Mersenne twister MT19937: its words follow a linear recurrence over bits, so the words n steps
ahead are sums of words near by, and which ones is x^n modulo the polynomial of the recurrence. That costs about 10 ms
for any n (and 50 ms more the first time for each n), in which torch draws about two million numbers.

Sources: M. Matsumoto and T. Nishimura, "Mersenne Twister", 1998, for the recurrence and its polynomial; H. Haramoto and
others, "Efficient jump ahead for F2-linear random number generators", 2008, for the method. How torch writes a state is
tried out once before it is believed.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_N, _M, _A = 624, 397, 0x9908B0DF  # constants of MT19937: words per block, offset of the recurrence, mask
_DEGREE = 19937
_ROWS = 256
_MIN_JUMP_BLOCKS = 32  # for fewer blocks, stepping is faster than a jump

# Offsets in torch's state: seed, words left (32 bits), seeded flag (32 bits), next word, the block with 64 bits per
# word, and the cached second number of a normal pair.
_LEFT, _NEXT, _WORDS = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _N)

Block = npt.NDArray[np.uint32]


def count_used_block_words(generator: torch.Generator) -> int:
    """Return how many words of its current block a generator has used."""
    state = generator.get_state().numpy()
    left, following = int(state[_LEFT].view(np.int32)[0]), int(state[_NEXT].view(np.uint64)[0])
    return _N if left == 1 and following == 0 else following


def jump_ahead(generator: torch.Generator, num_words: int) -> None:
    """Advance a generator by a number of 32-bit words. The cached second number of a normal pair stays cached."""
    state = generator.get_state().numpy().copy()
    blocks, place = divmod(count_used_block_words(generator) + num_words - 1, _N)
    place += 1
    block: Block = state[_WORDS].view(np.uint64).astype(np.uint32)
    # The first block after seeding does not follow the recurrence of MT19937, so step one block before the jump. The
    # length of the jump depends only on `num_words`, so equal jumps share one cached polynomial.
    far = num_words // _N - 2
    if far > _MIN_JUMP_BLOCKS:
        block = _compute_word_block_ahead(_compute_next_word_block(block), far)
        blocks -= far + 1
    for _ in range(blocks):
        block = _compute_next_word_block(block)
    state[_WORDS].view(np.uint64)[:] = block
    state[_LEFT].view(np.int32)[0] = _N + 1 - place
    state[_NEXT].view(np.uint64)[0] = place
    generator.set_state(torch.from_numpy(state))  # pyright: ignore[reportUnknownMemberType]


@functools.cache
def can_advance_generator_exactly() -> bool:
    """Return whether `jump_ahead` leaves a generator of this torch version in the same state as drawing numbers."""
    drawn, jumped = torch.Generator("cpu"), torch.Generator("cpu")
    try:
        for generator in (drawn, jumped):
            generator.manual_seed(20)
            _draw_32_bit_words(generator, 5)
        for words in (41 * _N + 7, 2 * _N, 1, 100):
            _draw_32_bit_words(drawn, words)
            jump_ahead(jumped, words)
            if not torch.equal(drawn.get_state(), jumped.get_state()):
                return False
    except (ValueError, RuntimeError):  # this version of torch has a different format of the state
        return False
    return True


def _draw_32_bit_words(generator: torch.Generator, num_words: int) -> None:
    torch.empty(num_words, dtype=torch.int32, device="cpu").random_(generator=generator)


def _compute_next_word_block(block: Block) -> Block:
    """Return the block of 624 words that follows a block."""
    made = np.empty_like(block)
    old = np.append(block, np.uint32(0))
    for start, stop in ((0, _N - _M), (_N - _M, 2 * (_N - _M)), (2 * (_N - _M), _N)):
        if stop == _N:
            old[_N] = made[0]
        mixed = (old[start:stop] & np.uint32(0x80000000)) | (
            old[start + 1 : stop + 1] & np.uint32(0x7FFFFFFF)
        )
        other = old[start + _M : stop + _M] if not start else made[start - (_N - _M) : stop - (_N - _M)]
        made[start:stop] = (
            other ^ (mixed >> np.uint32(1)) ^ np.where(mixed & np.uint32(1), np.uint32(_A), np.uint32(0))
        )
    return made


def _compute_word_block_ahead(block: Block, num_blocks: int) -> Block:
    """Return the block that is `num_blocks` blocks after a block."""
    run = [block]
    for _ in range(_DEGREE // _N + 1):
        run.append(_compute_next_word_block(run[-1]))
    windows = np.lib.stride_tricks.sliding_window_view(np.concatenate(run), _N)
    terms = np.flatnonzero(_unpack_polynomial_bits(_compute_power_of_x(num_blocks * _N)))
    made = np.zeros_like(block)
    for start in range(0, len(terms), _ROWS):
        made ^= np.bitwise_xor.reduce(windows[terms[start : start + _ROWS]], axis=0)
    return made


# -- polynomials over bits: the bit i of an integer is the coefficient of x^i


@functools.lru_cache(maxsize=256)
def _compute_power_of_x(exponent: int) -> int:
    """Return x^exponent modulo the polynomial of the recurrence."""
    made = 1
    for bit in bin(exponent)[2:]:
        made = _reduce_modulo_recurrence(_compute_square(made) << int(bit))
    return made


def _reduce_modulo_recurrence(polynomial: int) -> int:
    """Return a polynomial modulo the polynomial of the recurrence."""
    # The polynomial is x u^32 + sum of a_k x u^(31-k) + a_31, with u = x^623 + x^396 and a_k the bits of the mask. So
    # its highest power, x^19937, equals the sum of the other terms, and is replaced by these.
    mask = (1 << _DEGREE) - 1
    while high := polynomial >> _DEGREE:
        polynomial = (polynomial & mask) ^ _multiply_by_remainder_polynomial(high)
    return polynomial


def _multiply_by_remainder_polynomial(factor: int) -> int:
    """Return a polynomial times the remainder of x^19937 modulo the polynomial of the recurrence."""
    total = 0
    for k in range(31):
        total = (total << (_N - 1)) ^ (total << (_M - 1)) ^ (factor if _A >> k & 1 else 0)
    total = (total << (_N - 1)) ^ (total << (_M - 1))
    return (total << 1) ^ (factor if _A >> 31 & 1 else 0) ^ (factor << (32 * (_M - 1) + 1))


_SPREAD = np.array([sum((byte >> i & 1) << (2 * i) for i in range(8)) for byte in range(256)], np.uint16)


def _compute_square(polynomial: int) -> int:
    """Return the square of a polynomial over bits."""
    data = polynomial.to_bytes(polynomial.bit_length() // 8 + 1, "little")
    return int.from_bytes(_SPREAD[np.frombuffer(data, np.uint8)].astype("<u2").tobytes(), "little")


def _unpack_polynomial_bits(polynomial: int) -> Any:
    data = polynomial.to_bytes(_DEGREE // 8 + 1, "little")
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
