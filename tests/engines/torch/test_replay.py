"""Blocks of a tensor are the values that plain code would have there, bit for bit, and are made in bounded pieces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from layoutmap.engines.torch.deferred_init import elementwise, jump
from layoutmap.engines.torch.deferred_init.recipes import Recipe
from layoutmap.engines.torch.deferred_init.spans import ElementSpan
from layoutmap.engines.torch.deferred_init.streams import RandomFill, RandomFillReader
from layoutmap.engines.torch.deferred_init.tape import Tape

pytestmark = pytest.mark.every_case

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

STARTS: dict[str, Callable[[Sequence[int], torch.dtype], torch.Tensor]] = {
    "uniform": lambda shape, dtype: torch.empty(shape, dtype=dtype).uniform_(-2, 3),
    "normal": lambda shape, dtype: torch.empty(shape, dtype=dtype).normal_(1, 2),
    "rand": lambda shape, dtype: torch.rand(shape, dtype=dtype),
    "randn": lambda shape, dtype: torch.randn(shape, dtype=dtype),
    "randint": lambda shape, dtype: torch.randint(3, 40, shape).to(dtype),
    "large_integers": lambda shape, dtype: torch.randint(1 << 40, shape).to(dtype),
    "bernoulli": lambda shape, dtype: torch.empty(shape, dtype=dtype).bernoulli_(0.4),
    "exponential": lambda shape, dtype: torch.empty(shape, dtype=dtype).exponential_(),
    "log_normal": lambda shape, dtype: torch.empty(shape, dtype=dtype).log_normal_(),
    "cauchy": lambda shape, dtype: torch.empty(shape, dtype=dtype).cauchy_(),
    "given_mean": lambda shape, dtype: torch.normal(1.0, 2.0, tuple(shape), dtype=dtype),
    "turned": lambda shape, dtype: (
        torch.empty(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape)))).normal_()
    ),
    "turned_after": lambda shape, dtype: torch.rand(shape[::-1], dtype=dtype).permute(
        *reversed(range(len(shape)))
    ),
    "every_other": lambda shape, dtype: torch.zeros(*shape[:-1], shape[-1] * 2, dtype=dtype)[
        ..., ::2
    ].normal_(),
    "zeros": lambda shape, dtype: torch.zeros(shape, dtype=dtype),
}


def first_row(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0].fill_(0)
    return tensor


def last_column(tensor: torch.Tensor) -> torch.Tensor:
    tensor[..., -1].normal_()
    return tensor


def some_columns(tensor: torch.Tensor) -> torch.Tensor:
    tensor[..., : tensor.shape[-1] // 2].mul_(3).uniform_()
    return tensor


def some_rows(tensor: torch.Tensor) -> torch.Tensor:
    new = torch.arange(tensor.shape[-1]).to(tensor.dtype) if tensor.dim() > 1 else 5.0
    tensor[[0, -1] if len(tensor) > 1 else [0]] = new
    return tensor


def joined(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, torch.ones_like(tensor), tensor * 2])


def largest_of_four(tensor: torch.Tensor) -> torch.Tensor:
    """As Keras draws truncated normal numbers."""
    drawn = torch.normal(0.0, 1.0, (*tensor.shape, 4), dtype=tensor.dtype)
    places = ((drawn > -0.5) & (drawn < 0.5)).max(-1, keepdim=True)[1]
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    made.data.copy_(drawn.gather(-1, places).squeeze(-1))
    return made.data.mul_(2).add_(tensor)


THEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mul_": lambda t: t.mul_(0.02),
    "add": lambda t: t + 1,
    "sub_": lambda t: t.sub_(3),
    "div": lambda t: t / 7,
    "clamp_": lambda t: t.clamp_(-1, 1),
    "square": lambda t: t**2,
    "erfinv_": lambda t: t.clamp_(-0.9, 0.9).erfinv_(),
    "double": lambda t: t.double(),
    "half": lambda t: t.half(),
    "clone": lambda t: t.clone(),
    "twice": lambda t: t + t * 2,
    "row": lambda t: t * torch.arange(1, t.shape[-1] + 1).to(t.dtype),
    "column": lambda t: t - torch.ones((t.shape[0],) + (1,) * (t.dim() - 1), dtype=t.dtype),
    "scalar": lambda t: t * torch.tensor(0.3),
    "where": lambda t: torch.where(t > 0, t, torch.empty_like(t).normal_()),
    "again": lambda t: t.uniform_(),
    "more": lambda t: t.add_(torch.randn_like(t)),
    "first_row": first_row,
    "last_column": last_column,
    "some_columns": some_columns,
    "some_rows": some_rows,
    "joined": joined,
    "stacked": lambda t: torch.stack([t, t * 2]),
    "beside": lambda t: torch.cat([t, t + 1, t], -1),
    "rows_of_four": largest_of_four,
    "view": lambda t: t.reshape(-1),
    "turned": lambda t: t.transpose(0, -1),
    "part": lambda t: t[len(t) // 2 :],
    "exp": lambda t: t.clamp(-3, 3).exp_(),
    "whole": lambda t: t.cumsum(0),
}


@st.composite
def programs(draw: st.DrawFn) -> tuple[Callable[[], torch.Tensor], str]:
    shape = draw(st.lists(st.integers(1, 13), min_size=1, max_size=3))
    shape[0] *= draw(st.sampled_from([1, 16, 30]))
    dtype = draw(st.sampled_from(FLOATS))
    start = draw(st.sampled_from(sorted(STARTS)))
    then = draw(st.lists(st.sampled_from(sorted(THEN)), max_size=4))

    def make() -> torch.Tensor:
        tensor = STARTS[start](shape, dtype)
        for name in then:
            tensor = THEN[name](tensor)
        return tensor

    return make, f"{start} {shape} {dtype} {then}"


def index_of(shape: Sequence[int], draw: st.DrawFn) -> tuple[slice, ...]:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple(slice(start, stop) for start, stop in ends)


def bits(tensor: torch.Tensor) -> bytes:
    return torch.cat([tensor.detach().reshape(-1), tensor.new_empty(0)]).view(torch.uint8).numpy().tobytes()


@settings(max_examples=examples(250), deadline=None)
@given(st.data(), programs(), st.sampled_from([16, 48, 1 << 18]))
def test_blocks_are_parts_of_the_plain_tensor(
    data: Any, program: tuple[Callable[[], torch.Tensor], str], piece: int
):
    """Blocks, the whole and the generator's state are those of plain code, for any history, index and piece."""
    make, text = program
    torch.manual_seed(3)
    torch.randn(3)
    plain = make()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    torch.randn(3)
    tape = Tape(1, piece)
    with tape.record_operations():
        tensor = make()
    assert torch.equal(state, torch.get_rng_state()), text
    indices = [index_of(plain.shape, data.draw) for _ in range(2)]
    with patch.object(elementwise, "_MIN_PERIOD", 1):
        recipe = tape.make_recipe(tensor)
        whole, blocks = recipe.compute_global_value(), recipe.compute_blocks(indices)
    assert (plain.shape, plain.dtype) == (whole.shape, whole.dtype), text
    assert bits(plain) == bits(whole), text
    for index, block in zip(indices, blocks, strict=True):
        assert bits(plain[index]) == bits(block), text


@settings(max_examples=examples(50), deadline=None)
@given(st.data(), st.sampled_from([16, 48, 1 << 18]), st.sampled_from([0, 1, 2]))
def test_what_is_read_later_is_read_in_blocks(data: Any, piece: int, axis: int):
    """Tensors of a file, converted and joined as experts are, give the blocks that plain code would have."""
    shape = [data.draw(st.integers(1, 9)) for _ in range(3)]
    files = [torch.randn(shape) for _ in range(3)]
    plain = torch.cat([torch.stack([each.half() for each in files])] * 2, axis)
    tape = Tape(1, piece)
    with tape.record_operations():
        read = [tape.defer_file_read(lambda each=each: each).half() for each in files]
        tensor = torch.cat([torch.stack(read)] * 2, axis)
    indices = [index_of(plain.shape, data.draw) for _ in range(2)]
    with patch.object(elementwise, "_MIN_PERIOD", 1):
        blocks = tape.make_recipe(tensor).compute_blocks(indices)

    for index, block in zip(indices, blocks, strict=True):
        assert bits(plain[index]) == bits(block)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="says which pages of a file are in memory")
def test_of_a_mapped_file_only_what_a_block_has_is_read(tmp_path: Path):
    """A block of rows of a tensor in a file brings those rows into memory, and none of the others."""
    path = tmp_path / "weight"
    torch.arange(1 << 22, dtype=torch.float32).numpy().tofile(path)
    tape = Tape()
    with tape.record_operations():
        tensor = tape.defer_file_read(lambda: torch.from_file(str(path), size=1 << 22).view(1024, 4096))
        tensor = tensor.to(torch.bfloat16)
    before = resident(path)
    [block] = tape.make_recipe(tensor).compute_blocks([(slice(256, 384), slice(0, 4096))])

    assert torch.equal(torch.arange(1 << 20, 3 << 19).view(128, 4096).float().bfloat16(), block)
    assert 0 == before
    assert 128 * 4096 * 4 <= resident(path) <= 2 * 128 * 4096 * 4


def resident(path: Path) -> int:
    """The bytes of a mapped file that this process has in memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    found = (next(line for line in lines if line.startswith("Rss:")) for line in lines if str(path) in line)
    return sum(int(line.split()[1]) << 10 for line in found)


def recipe_of(make: Callable[[], torch.Tensor], piece: int = 1 << 10) -> Recipe:
    tape = Tape(1, piece)
    with tape.record_operations():
        tensor = make()
    return tape.make_recipe(tensor)


class Largest(TorchDispatchMode):
    """Sees how large the tensors are that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numel = max(self.numel, made.numel())
        return made


def padded() -> torch.Tensor:
    return nn.Embedding(1000, 64, padding_idx=5).weight


def truncated() -> torch.Tensor:
    return nn.init.trunc_normal_(torch.empty(1000, 64))


def in_bfloat16() -> torch.Tensor:
    return nn.Linear(64, 1000).to(torch.bfloat16).weight


def columns() -> torch.Tensor:
    weight = torch.empty(1000, 64)
    for part in weight.chunk(2, 1):
        nn.init.xavier_uniform_(part)
    return weight


IN_PIECES: dict[str, Callable[[], torch.Tensor]] = {
    "padding_idx": padded,
    "trunc_normal": truncated,
    "bfloat16": in_bfloat16,
    "keras": lambda: largest_of_four(torch.zeros(1000, 64)),
    "turned": lambda: torch.empty(1000, 64).t().normal_(),
    "columns": columns,
    "scaled": lambda: nn.Parameter(torch.randn(1000, 64) * 0.02),
}


@pytest.mark.parametrize("name", IN_PIECES)
def test_blocks_never_make_the_global_tensor(name: str):
    """What is made on the way to a block is no larger than the block or a few pieces."""
    recipe = recipe_of(IN_PIECES[name])
    index = tuple(slice(0, n // 8) for n in recipe.shape)
    assert "" == recipe.why_global
    with Largest() as largest:
        recipe.compute_blocks([index])
    assert largest.numel <= 8 << 10 < 64_000


WHOLE: dict[str, Callable[[], torch.Tensor]] = {
    "nn.init.orthogonal_ needs the whole tensor: linalg_qr": lambda: nn.init.orthogonal_(torch.empty(20, 30)),
    "nn.init.eye_ needs the whole tensor: eye": lambda: nn.init.eye_(torch.empty(20, 30)),
    "nn.utils.parametrizations.weight_norm needs the whole tensor: norm": lambda: (
        nn.utils.parametrizations.weight_norm(nn.Linear(20, 30)).parametrizations.weight.original0
    ),
    "linalg_vector_norm needs the whole tensor": lambda: (t := torch.randn(20, 30)) / t.norm(),
    "randperm needs the whole tensor": lambda: torch.randperm(50),
    "sigmoid needs the whole tensor": lambda: torch.randn(20, 30).sigmoid(),
}


@pytest.mark.parametrize("why", WHOLE)
def test_what_needs_the_global_tensor_says_why(why: str):
    """A recipe that must draw the global tensor names the operation that needs it."""
    assert why == recipe_of(WHOLE[why]).why_global


DRAWS = [
    RandomFill(op, args, dtype, strided)
    for op, args in ((aten.uniform_, (-1.0, 2.0)), (aten.normal_, (0.0, 1.0)), (aten.random_, (7,)))
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    for strided in (False, True)
]


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_skipping_leaves_the_generator_as_drawing_does(draw: RandomFill):
    """Far enough for a jump, or not, to the last bit of the state."""
    for numel in (3, 16, 5_003, (1 << 22) + 37):
        drawn, skipped = (torch.Generator().manual_seed(6) for _ in range(2))
        draw.draw_next_values(numel, drawn)
        draw.skip_values(numel, skipped)
        assert torch.equal(drawn.get_state(), skipped.get_state())
        assert bits(draw.draw_next_values(20, drawn)) == bits(draw.draw_next_values(20, skipped))


def test_this_torch_lets_its_generator_jump():
    """The state is written as we know it, so that skipping costs no drawing."""
    assert jump.can_advance_generator_exactly()


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2000), st.integers(1, 100_000))
def test_a_jump_is_as_many_words_ahead(before: int, words: int):
    """From any place of the stream, a jump over some words leaves the state that drawing them leaves."""
    drawn, jumped = (torch.Generator().manual_seed(before) for _ in range(2))
    for generator in (drawn, jumped):
        torch.empty(before).uniform_(generator=generator)
    torch.empty(words).uniform_(generator=drawn)
    jump.jump_ahead(jumped, words)
    assert torch.equal(drawn.get_state(), jumped.get_state())


@settings(max_examples=examples(60), deadline=None)
@given(st.data(), st.sampled_from(DRAWS), st.integers(1, 400), st.sampled_from([16, 64, 1 << 18]))
def test_a_stream_gives_the_numbers_of_one_draw(data: Any, draw: RandomFill, numel: int, piece: int):
    """Any runs, further on each time, are those of one draw of all."""
    generator = torch.Generator().manual_seed(8)
    stream = RandomFillReader(draw, numel, generator.get_state(), piece)
    whole = draw.draw_next_values(numel, generator)
    ends = sorted(data.draw(st.lists(st.integers(0, numel), min_size=2, max_size=6)))
    for start, stop in itertools.pairwise(ends):
        if start < stop:
            assert bits(whole[start:stop]) == bits(stream.read_span(ElementSpan(start, stop - start)))
