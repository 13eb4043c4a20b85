"""A model built while a tape records is the plain model, bit for bit, and nothing else in the process has changed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import few
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from layoutmap.core.errors import EngineError
from layoutmap.engines.torch.deferred_init.tape import Tape, trace_recipe

pytestmark = pytest.mark.every_case


class Language(nn.Module):
    """Tied weights, buffers of both kinds, and initial values as transformers gives them."""

    def __init__(self, width: int = 32, words: int = 50, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(16, width, padding_idx=3)
        layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))
        self.register_buffer("rates", torch.tensor([rate.item() for rate in torch.linspace(0, 0.1, depth)]))
        frequencies = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.apply(self.initialize)

    @staticmethod
    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(0, 0.02)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()


INITIALIZERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "ones": nn.init.ones_,
    "constant": lambda t: nn.init.constant_(t, 0.3),
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "trunc_normal": nn.init.trunc_normal_,  # some numbers are drawn again
    "trunc_normal_narrow": lambda t: nn.init.trunc_normal_(t, std=0.02),  # none is
    "trunc_normal_far": lambda t: nn.init.trunc_normal_(t, 0.0, 1.0, 2.0, 3.0),  # drawn otherwise
    "orthogonal": nn.init.orthogonal_,
    "eye": nn.init.eye_,
    "sparse": lambda t: nn.init.sparse_(t, 0.3),
    "dirac": lambda t: nn.init.dirac_(t.view(*t.shape, 1)),
}


class Initialized(nn.Module):
    """One parameter for each function of torch.nn.init."""

    def __init__(self) -> None:
        super().__init__()
        for name, initialize in INITIALIZERS.items():
            weight = nn.Parameter(torch.empty(18, 33))
            initialize(weight.data if name == "dirac" else weight)
            self.register_parameter(name, weight)


class Drawn(nn.Module):
    """Parameters and buffers that a constructor computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(17, 33) * 0.02 + 1)
        self.broadcast = nn.Parameter(torch.randn(17, 33) * torch.arange(33) + torch.ones(17, 1))
        self.turned = nn.Parameter(torch.empty(33, 17).t().normal_())
        self.turned_after = nn.Parameter(torch.empty(33, 17).uniform_().t())
        self.joined = nn.Parameter(torch.cat([torch.randn(5, 7), torch.zeros(5, 7)]))
        self.shaped = nn.Parameter(torch.randn(6, 40).reshape(4, 60).view(2, 2, 60))
        self.narrow = nn.Parameter(torch.empty(17, 33, dtype=torch.bfloat16).normal_())
        self.wide = nn.Parameter(torch.rand(17, 33, dtype=torch.float64))
        self.cast = nn.Parameter(torch.randn(17, 33).half())
        rows, columns = torch.empty(33, 20), torch.empty(20, 33)
        for part in (*rows.chunk(3), *columns.chunk(3, 1)):
            nn.init.xavier_uniform_(part)
        self.rows, self.columns = nn.Parameter(rows), nn.Parameter(columns)
        self.written = nn.Parameter(torch.randn(30, 40))
        with torch.no_grad():
            self.written[[1, 5, 7]] = torch.ones(40)
            self.written[:, 3] = 0
            self.written[2:4].mul_(2.0)
            self.written[:, 8:20].sub_(1.0)
        if self.written.sum() > 0 and bool((self.written < 3).any()):
            self.written.data.add_(1)
        self.normed = nn.Parameter(torch.randn(17, 33))
        self.normed.data.div_(self.normed.data.norm(dim=1, keepdim=True))
        self.from_numpy = nn.Parameter(torch.from_numpy(torch.randn(20, 20).numpy() * 2))
        self.from_list = nn.Parameter(torch.tensor(torch.randn(20, 20).tolist()))
        self.register_buffer("integers", torch.randint(0, 9, (20, 20)))
        self.register_buffer("permutation", torch.randperm(100))
        self.register_buffer("truth", torch.empty(20, 20).bernoulli_(0.3))
        self.register_buffer("waits", torch.empty(20, 20).exponential_())
        self.register_buffer("steps", torch.linspace(0, 1, 100))
        self.register_buffer("picked", torch.rand(8, 9).multinomial(3))
        self.register_buffer("dropped", nn.functional.dropout(torch.ones(20, 20)))
        self.register_buffer("complex", torch.polar(torch.ones(20, 20), torch.rand(20, 20)))
        self.register_buffer(
            "seeded", torch.normal(0.0, 2.0, (30, 30), generator=torch.Generator().manual_seed(3))
        )
        # Has no generator
        self.register_buffer("fused", torch.native_dropout(torch.rand(20, 20), 0.5, True)[0])
        self.register_buffer("last", torch.rand(20, 20))  # the generator is where it should be


def several() -> nn.Module:
    return nn.ModuleList(
        [
            nn.EmbeddingBag(30, 20, padding_idx=1),
            nn.Bilinear(7, 8, 9),
            nn.MultiheadAttention(32, 4, kdim=8, vdim=9),
            nn.AdaptiveLogSoftmaxWithLoss(20, 100, [10, 50]),
            nn.GRU(20, 30, 2),
            nn.LSTM(20, 30, 2, bidirectional=True, proj_size=7),
        ]
    )


def convolutions() -> nn.Module:
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.ConvTranspose1d(4, 5, 3), nn.PReLU(20)
    )
    return layers.to(memory_format=torch.channels_last)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "language": Language,
    "initialized": Initialized,
    "drawn": Drawn,
    "several": several,
    "convolutions": convolutions,
    "transformer": lambda: nn.Transformer(32, 4, 2, 2, 64, batch_first=True),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(20, 30)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(20, 30)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(20, 20)),
    "bfloat16": lambda: Language().to(torch.bfloat16),
    "back_and_forth": lambda: Language().half().float().double(),
    "copies": lambda: nn.ModuleList([copy.deepcopy(Language()) for _ in range(2)]),
}


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def record(tape: Tape, make: Callable[[], Any]) -> Any:
    with tape.record_operations():
        return make()


def values(tape: Tape, tensor: torch.Tensor) -> torch.Tensor:
    return tape.make_recipe(tensor).compute_global_value() if tape.is_deferred(tensor) else tensor.detach()


def facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.shape,
        tensor.dtype,
        tensor.requires_grad,
        isinstance(tensor, nn.Parameter),
        str(tensor.device),
    )


@pytest.mark.parametrize(("min_numel", "piece"), few([(1, 16), (300, 112), (4096, 1 << 18)], (300, 112)))
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_plain_model(name: str, min_numel: int, piece: int):
    """Values, strides, element types, ties and the generator's state are those of plain code, whatever is deferred."""
    torch.manual_seed(7)
    plain = tensors_of(MODELS[name]())
    state = torch.get_rng_state()
    torch.manual_seed(7)
    tape = Tape(min_numel, piece)
    deferred = tensors_of(record(tape, MODELS[name]))
    assert torch.equal(state, torch.get_rng_state())
    assert list(plain) == list(deferred)
    for key, expected in plain.items():
        actual = deferred[key]
        whole = values(tape, actual)
        assert facts(expected) == facts(actual), key
        assert expected.stride() == actual.stride() == whole.stride(), key
        assert bits(expected) == bits(whole), key
        if tape.is_deferred(actual):
            index = tuple(slice(n // 3, n) for n in expected.shape)
            [block] = tape.make_recipe(actual).compute_blocks([index])
            assert block.is_contiguous(), key
            assert bits(expected[index]) == bits(block), key
    for key in plain:
        assert [k for k in plain if plain[k] is plain[key]] == [
            k for k in deferred if deferred[k] is deferred[key]
        ]


def test_what_is_deferred_depends_on_the_size():
    """A tensor is deferred if it has at least the smallest number of elements."""
    tape = Tape(min_numel=100)
    many, few, follows = record(tape, lambda: ((a := torch.zeros(100)), torch.zeros(99), a[:3] + 1))
    assert [True, False, True] == [tape.is_deferred(each) for each in (many, few, follows)]
    assert [False, False] == [Tape().is_deferred(many), tape.is_deferred(torch.zeros(100))]
    assert torch.device("cpu") == many.device
    assert not many.is_meta


def test_large_from_small_is_deferred():
    """A large tensor that is computed from small real ones is not made either."""
    tape = Tape(min_numel=1000)
    small, large = record(tape, lambda: ((a := torch.arange(100.0)), a[:, None] * a))
    assert (False, True) == (tape.is_deferred(small), tape.is_deferred(large))
    assert torch.equal(small[:, None] * small, tape.make_recipe(large).compute_global_value())


def test_memory_of_nothing_is_deferred():
    """A model made on the meta device and then given memory is deferred, and its own initialization fills it."""

    def make() -> nn.Module:
        with torch.device("meta"):
            layer = nn.Linear(40, 30)
        layer.to_empty(device="cpu")
        layer.reset_parameters()
        return layer

    torch.manual_seed(2)
    plain = make()
    torch.manual_seed(2)
    tape = Tape(100)
    deferred = record(tape, make)
    assert tape.is_deferred(deferred.weight)
    assert bits(plain.weight) == bits(values(tape, deferred.weight))
    assert bits(plain.bias) == bits(deferred.bias)


def test_a_move_to_another_device_is_refused():
    """A module with deferred parameters is not moved: that would make them all, on one device."""
    tape = Tape(1)
    with tape.record_operations():
        layer = nn.Linear(4, 3)
        with pytest.raises(
            EngineError, match=r"Linear\.weight is moved to meta(?s:.*)the mesh determines the devices"
        ):
            layer.to("meta")
        assert layer.to("cpu") is layer
    assert ["weight", "bias"] == list(dict(layer.named_parameters()))
    assert tape.is_deferred(layer.bias)


def test_only_what_a_tape_holds_has_a_recipe():
    """A recipe is refused for a tensor of somebody else, with the fix."""
    with pytest.raises(EngineError, match=r"did not record this tensor(?s:.*)tape\.is_deferred"):
        Tape().make_recipe(torch.zeros(3))


def attributes() -> list[object]:
    return [nn.Module._apply, torch.Tensor.numpy, torch.Tensor.__deepcopy__, torch.manual_seed, torch.empty]


@pytest.mark.parametrize("fails", [False, True])
def test_recording_leaves_no_trace(fails: bool):
    """When it ends, also by an exception, torch is as it was, and the next tensors are real."""
    before, modes = attributes(), _get_current_function_mode_stack()
    operations = _get_current_dispatch_mode_stack()
    tape = Tape(1)
    try:
        with tape.record_operations():
            nn.Linear(3, 4).half()
            if fails:
                raise KeyError("the model's own")
    except KeyError:
        assert fails
    assert before == attributes()
    assert modes == _get_current_function_mode_stack()
    assert operations == _get_current_dispatch_mode_stack()
    assert not tape.is_deferred(torch.zeros(5))


def test_a_recording_that_another_thread_ends():
    """Torch's modes are those of a thread: what could not be left there is left when this one records again."""
    before = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    recording = Tape(1).record_operations()
    recording.__enter__()
    thread = threading.Thread(target=recording.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    with Tape(1).record_operations():
        pass

    assert before == [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def test_recording_may_be_entered_again():
    """A tape goes on after a pause, and what was deferred before may change."""
    tape = Tape(1)
    with tape.record_operations(), tape.record_operations():
        tensor = torch.ones(5)
    early = tape.make_recipe(tensor)
    plain = torch.ones(5)
    with tape.record_operations():
        tensor.add_(2)
    assert (False, True) == (tape.is_deferred(plain), tape.is_deferred(tensor))
    assert [1.0] * 5 == early.compute_global_value().tolist()
    assert [3.0] * 5 == tape.make_recipe(tensor).compute_global_value().tolist()


def test_a_tape_records_its_own_thread_only():
    """Two threads that record at once have each their own model; a third one, that does not, has a plain one."""
    plain = bits(torch.empty(40, 50).normal_(generator=torch.Generator().manual_seed(1)))
    tapes = [Tape(1), Tape(1), None]
    barrier = threading.Barrier(3)
    made: list[Any] = [None] * 3

    def build(place: int) -> None:
        tape = tapes[place]

        def make() -> torch.Tensor:
            barrier.wait(240)
            layer = nn.Linear(50, 40, dtype=torch.float64).float()
            layer.weight.data.normal_(generator=torch.Generator().manual_seed(1))
            barrier.wait(240)
            return layer.weight

        made[place] = make() if tape is None else record(tape, make)

    threads = [threading.Thread(target=build, args=(place,)) for place in range(3)]
    original = nn.Module._apply
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert original is nn.Module._apply
    for place, tape in enumerate(tapes):
        assert (place < 2) == (tape is not None and tape.is_deferred(made[place]))
        assert plain == bits(made[place] if tape is None else values(tape, made[place]))
    assert tapes[0] is not None
    assert not tapes[0].is_deferred(made[1])


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t[3].item(),
    "float": lambda t: float(t.sum()),
    "bool": lambda t: bool(t[0] > 0),
    "any": lambda t: bool((t > 2.5).any()),
    "all": lambda t: bool((t < 2.5).all()),
    "numpy": lambda t: t.numpy().copy(),
    "array": lambda t: np.asarray(t),
    "tolist": lambda t: t.tolist(),
    "equal": lambda t: torch.equal(t, t + 0),
    "nonzero": lambda t: (t > 1).nonzero().tolist(),
    "into_real": lambda t: torch.zeros(50).copy_(t[:50]).tolist(),
    "masked": lambda t: t[t > 1].tolist(),
}


@pytest.mark.parametrize("name", READS)
def test_reads_while_recording_give_the_values(name: str):
    """Whatever takes values out of a deferred tensor gives those of the plain one, and recording goes on."""
    torch.manual_seed(5)
    first = torch.randn(200)
    expected = READS[name](first)
    second = torch.randn(200)
    torch.manual_seed(5)
    tape = Tape(100)
    with tape.record_operations():
        tensor = torch.randn(200)
        actual = READS[name](tensor)
        after = torch.randn(200)
    assert np.array_equal(expected, actual)
    assert bits(first) == bits(values(tape, tensor))
    assert bits(second) == bits(values(tape, after))


@pytest.mark.parametrize("numel", [10, 1 << 17])
def test_real_operands_count_as_they_were(numel: int):
    """A real tensor that is changed after a step has read it was, for the step, what it was then."""
    real = torch.ones(numel)
    tape = Tape(1)
    with tape.record_operations():
        tensor = torch.zeros(3, numel) + real
        real.add_(5)
        later = torch.zeros(3, numel) + real
    assert 1.0 == values(tape, tensor).mean()
    assert 6.0 == values(tape, later).mean()


@pytest.mark.parametrize("min_numel", [1, 300])
def test_new_data_for_a_parameter(min_numel: int):
    """Data that a parameter is given counts, whichever of both is deferred, and both go on as plain ones would."""

    def make() -> nn.Module:
        layer = nn.Linear(30, 40)
        vector = nn.utils.parameters_to_vector(layer.parameters())
        nn.utils.vector_to_parameters(vector * 2, layer.parameters())
        other = nn.Linear(30, 40)
        other.weight.data = torch.from_numpy(np.ones((40, 30), np.float32))
        other.weight.data.mul_(layer.weight.data)
        return nn.ModuleList([layer, other])

    torch.manual_seed(2)
    plain = tensors_of(make())
    torch.manual_seed(2)
    tape = Tape(min_numel)
    deferred = tensors_of(record(tape, make))
    assert {key: bits(each) for key, each in plain.items()} == {
        key: bits(values(tape, each)) for key, each in deferred.items()
    }


def test_defaults_count_as_they_were():
    """The default element type of the time of recording is that of the values."""
    tape = Tape(1)
    torch.set_default_dtype(torch.float64)
    try:
        tensors = record(
            tape, lambda: (torch.ones(9), torch.rand(9), torch.full((9,), 1.5), torch.linspace(0, 1, 9))
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert [torch.float64] * 4 == [values(tape, each).dtype for each in tensors]
    assert [torch.float64] * 4 == [tape.make_recipe(each).dtype for each in tensors]


def test_generators_of_ones_own_move_on():
    """A generator that is passed draws on from where a plain program would."""
    plain, taped = (torch.Generator().manual_seed(4) for _ in range(2))
    expected = [torch.randn(50, generator=plain), torch.randperm(30, generator=plain)]
    tape = Tape(1)
    with tape.record_operations():
        actual = [torch.randn(50, generator=taped), torch.randperm(30, generator=taped)]
    assert [bits(each) for each in expected] == [bits(values(tape, each)) for each in actual]
    assert torch.equal(plain.get_state(), taped.get_state())


def test_seeds_set_while_recording_count():
    """`manual_seed` and `fork_rng` inside of a model do what they do in plain code."""

    def make() -> list[torch.Tensor]:
        first = torch.randn(50)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            forked = torch.randn(50)
        return [first, forked, torch.randn(50)]

    torch.manual_seed(3)
    expected = make()
    torch.manual_seed(3)
    tape = Tape(1)
    assert [bits(each) for each in expected] == [bits(values(tape, each)) for each in record(tape, make)]


def test_a_dry_tape_draws_nothing():
    """For shapes alone, the generator is left as it was, and nothing is drawn to find out whether any is too large."""
    state = torch.get_rng_state()
    tape = Tape(1, shapes_only=True)
    layer = record(tape, lambda: nn.Linear(1 << 20, 1 << 20, bias=False))
    with tape.record_operations():
        nn.init.trunc_normal_(layer.weight)
    assert torch.equal(state, torch.get_rng_state())
    assert (1 << 20, 1 << 20) == tape.make_recipe(layer.weight).shape
    assert "" == tape.make_recipe(layer.weight).why_global


def test_deferred_memory_has_an_identity():
    """Where plain code compares addresses to find tied weights, it finds them."""
    tape = Tape(1)
    with tape.record_operations():
        first, second = torch.ones(9), torch.ones(9)
        addresses = [each.data_ptr() for each in (first, first.view(3, 3), first.detach(), first[1:], second)]
    assert addresses[0] == addresses[1] == addresses[2]
    assert 4 == addresses[3] - addresses[0]
    assert addresses[4] not in addresses[:4]


def test_a_trace_is_the_recipe_of_what_a_function_returns():
    """Large or small, with a generator made inside, as Keras does."""

    def make(rows: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(11)
        return 2.0 * torch.rand((rows, 50), generator=generator) - 1.0

    for rows in (2, 500):
        recipe = trace_recipe(make, rows)
        assert ((rows, 50), torch.float32, "") == (recipe.shape, recipe.dtype, recipe.why_global)
        assert bits(make(rows)) == bits(recipe.compute_global_value())
        [block] = recipe.compute_blocks([(slice(1, 2), slice(3, 20))])
        assert bits(make(rows)[1:2, 3:20]) == bits(block)
    with pytest.raises(EngineError, match="returns no tensor"):
        trace_recipe(lambda: [torch.ones(3)])


def test_the_text_of_a_recipe_determines_its_values():
    """Recorded again it is the same; with another seed, argument, place, constant or operation it is another."""

    def text(change: Callable[[torch.Tensor], Any] = lambda w: w, seed: int = 0, tiles: bool = False) -> str:
        torch.manual_seed(seed)
        tape = Tape(tiles=tiles)
        with tape.record_operations(), torch.no_grad():
            weight = torch.empty(64, 64).normal_(0.0, 0.5)
            change(weight)
        return tape.make_recipe(weight).format_text()

    others: list[Callable[[torch.Tensor], Any]] = [
        lambda w: w.mul_(2.0),
        lambda w: w.mul_(3.0),
        lambda w: w[3].zero_(),
        lambda w: w[4].zero_(),
        lambda w: w[:, 4].zero_(),
        lambda w: w.add_(torch.arange(64)),
        lambda w: w.add_(torch.arange(1, 65)),
        lambda w: w.uniform_(),
    ]
    texts = [
        *map(text, others),
        *(text(seed=seed, tiles=tiles) for seed in (0, 1) for tiles in (False, True)),
    ]

    assert texts == [
        *map(text, others),
        *(text(seed=s, tiles=tiles) for s in (0, 1) for tiles in (False, True)),
    ]
    assert len(texts) == len(set(texts))
