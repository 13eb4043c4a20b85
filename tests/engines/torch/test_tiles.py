"""Numbers drawn by tiles are the same whatever part is asked for, and a part costs what the part costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from layoutmap.engines.torch.deferred_init.recipes import Recipe
from layoutmap.engines.torch.deferred_init.spans import ElementSpan, UnreadableSpanError
from layoutmap.engines.torch.deferred_init.tape import Tape, trace_recipe

pytestmark = pytest.mark.every_case


def columns() -> torch.Tensor:
    weight = torch.empty(300, 600)
    for part in weight.chunk(2, 1):
        nn.init.xavier_uniform_(part)
    return weight


def several(shape: Sequence[int]) -> torch.Tensor:
    tensor = torch.randn(shape) * torch.arange(shape[-1]) + torch.rand(shape)
    tensor[0].zero_()
    tensor[[-1]] = 5.0
    return tensor.add_(torch.ones((shape[0],) + (1,) * (len(shape) - 1)))


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "linear": lambda: nn.Linear(700, 300).weight,
    "padding_idx": lambda: nn.Embedding(300, 70, padding_idx=5).weight,
    "convolution": lambda: nn.Conv2d(40, 50, 3).weight,
    "vector": lambda: torch.randn(70_000),
    "experts": lambda: torch.empty(3, 300, 100).normal_(),
    "narrow": lambda: torch.randn(5, 700, 3),
    "bfloat16": lambda: nn.Linear(300, 70).to(torch.bfloat16).weight,
    "turned": lambda: torch.empty(300, 70).t().normal_(),
    "fused": lambda: nn.MultiheadAttention(64, 4).in_proj_weight,
    "columns": columns,
    "trunc_normal": lambda: nn.init.trunc_normal_(torch.empty(300, 70)),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(30, 70)),
    "permutation": lambda: torch.randperm(5000),
    "joined": lambda: torch.cat([torch.randn(100, 70), torch.zeros(5, 70), torch.randn(77, 70)]),
    "several": lambda: several((300, 100)),
    "four_axes": lambda: several((3, 4, 5, 80)),
}


def recipe_of(make: Callable[[], torch.Tensor], piece: int = 1 << 18, seed: int = 3) -> Recipe:
    torch.manual_seed(seed)
    tape = Tape(1, piece, tiles=True)
    with tape.record_operations():
        tensor = make()
    return tape.make_recipe(tensor)


@settings(max_examples=examples(60), deadline=None)
@given(st.data(), st.sampled_from(sorted(MAKERS)), st.sampled_from([1 << 10, 1 << 18]))
def test_any_part_is_a_part_of_the_same_tensor(data: Any, name: str, piece: int):
    """Blocks at any index, made in any order and piece, agree with the whole."""
    whole = recipe_of(MAKERS[name]).compute_global_value()
    ends = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in whole.shape]
    index = tuple(slice(start, stop) for start, stop in ends)
    [block] = recipe_of(MAKERS[name], piece).compute_blocks([index])
    assert torch.equal(whole[index], block)


@pytest.mark.parametrize("name", MAKERS)
def test_the_seed_decides(name: str):
    """The same seed gives the same values, and leaves the generator in the same state; another gives others."""
    first, again, other = (
        (recipe_of(MAKERS[name], seed=seed).compute_global_value(), torch.get_rng_state())
        for seed in (3, 3, 4)
    )
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_no_tile_is_like_another():
    """Tiles of one tensor, and the same tiles of two tensors, are different numbers."""
    made = [recipe_of(lambda: torch.randn(2, 512, 512)).compute_global_value()]
    made.append(
        recipe_of(lambda: (torch.randn(2, 512, 512), torch.randn(2, 512, 512))[1]).compute_global_value()
    )
    tiles = [tile for each in made for half in each.chunk(2, 1) for tile in half.chunk(2, 2)]
    assert 8 == len({tile.numpy().tobytes() for tile in tiles})


def test_numbers_are_distributed_as_asked():
    """Normal numbers have the mean and deviation that were asked for, and truncated ones stay within their bounds."""
    normal = recipe_of(lambda: nn.init.normal_(torch.empty(1000, 1000), 1.0, 0.5)).compute_global_value()
    assert normal.mean().item() == pytest.approx(1.0, abs=0.003)
    assert normal.std().item() == pytest.approx(0.5, abs=0.003)
    assert recipe_of(MAKERS["trunc_normal"]).compute_global_value().abs().max() <= 2


class Made(TorchDispatchMode):
    """Counts the elements of what operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.normal_ and type(made) is torch.Tensor:
            self.numel += made.numel()
        return made


@pytest.mark.parametrize("axis", [0, 1])
def test_a_part_costs_what_the_part_costs(axis: int):
    """To make an eighth of a tensor, along either axis, an eighth of the numbers is drawn."""
    torch.manual_seed(1)
    with Made() as recording:
        recipe = trace_recipe(lambda: torch.empty(4096, 4096).normal_(), tiles=True)
    with Made() as replaying:
        recipe.compute_blocks([tuple(slice(512, 1024) if i == axis else slice(0, 4096) for i in range(2))])
    assert recording.numel < 10_000
    assert 4096 * 512 == replaying.numel


def test_the_rest_of_the_program_draws_on():
    """What is drawn for small tensors afterwards does not depend on how large the tensors before were."""

    def after(rows: int) -> list[float]:
        torch.manual_seed(2)
        with Tape(1000, tiles=True).record_operations():
            torch.randn(rows, 100)
            return torch.rand(3).tolist()

    assert after(100) == after(10_000)


RUNS = st.builds(
    lambda start, length, rows, gap: ElementSpan(start, length, rows, length + gap if rows > 1 else 0),
    *(st.integers(0, 9), st.integers(1, 5), st.integers(1, 4), st.integers(0, 4)),
)


def places_of(run: ElementSpan) -> list[int]:
    return [run.start + row * run.stride + place for row in range(run.rows) for place in range(run.length)]


@settings(max_examples=examples(200), deadline=None)
@given(RUNS, st.integers(0, 30), st.integers(0, 30))
def test_part_of_a_run(run: ElementSpan, low: int, high: int):
    """The part of a run between two elements is those of its elements that are there; parts of rows are refused."""
    places = places_of(run)
    assert run.numel == len(places)
    between = [place for place in places if low <= place < high]
    kept = [
        sum(place in between for place in places[i : i + run.length]) for i in range(0, run.numel, run.length)
    ]
    if run.rows > 1 and not set(kept) <= {0, run.length}:
        with pytest.raises(UnreadableSpanError):
            run.clip_to(low, high)
    else:
        part = run.clip_to(low, high)
        assert between == (places_of(part[0]) if part else [])
        assert between == (places[part[1]] if part else [])
