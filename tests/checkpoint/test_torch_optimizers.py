"""A torch model, its optimizer and what else trains go on where they were saved."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter, OrderedDict
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import few
from checkpoint.forged import Place, manifest_in, put, write_manifest
from torch import nn
from torch.optim import lr_scheduler

import layoutmap as lm
from layoutmap.adapters import random_states
from layoutmap.checkpoint import reader
from layoutmap.core.errors import CheckpointError
from layoutmap.engines import get_engine

RULES = {
    r"(up|down|again)\.weight": ("model", None),
    r".*bias|norm\.(weight|running.*)|frozen|passing": ("model",),
    r"scale|norm\.num_batches_tracked": (),
    "empty": (None, None),
}
REPLICATED = {pattern: (None,) * len(specs) for pattern, specs in RULES.items()}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "tensor lr": partial(torch.optim.AdamW, lr=torch.tensor(0.01)),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01),
    "lbfgs": partial(torch.optim.LBFGS, lr=0.1, max_iter=2),
}
SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [1, 4], 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
}


class Net(nn.Module):
    """Tied weights, buffers that are and are not saved, a frozen weight, a scalar, an empty one."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.up = nn.Linear(8, 16, dtype=dtype)
        self.norm = nn.BatchNorm1d(16, dtype=dtype)
        self.down = nn.Linear(16, 8, dtype=dtype)
        self.again = nn.Linear(8, 16, dtype=dtype)
        self.again.weight = self.up.weight
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.empty = nn.Parameter(torch.zeros((0, 4), dtype=dtype))
        self.frozen = nn.Parameter(torch.randn(8, dtype=dtype), requires_grad=False)
        self.register_buffer("passing", torch.randn(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.up(x)))
        return self.again(self.down(x) * self.scale + self.frozen)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.numel()]


def made(seed: int, name: str = "adamw", dtype: torch.dtype = torch.float32):
    torch.manual_seed(seed)
    model = Net(dtype)
    return model, OPTIMIZERS[name](trained(model))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The losses of some steps, each on a batch of its own."""

    def loss(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        x = torch.randn((4, 8), generator=torch.Generator().manual_seed(step)).to(model.scale.dtype)
        value = model(x).square().mean()
        value.backward()
        return value.detach()

    return [float(optimizer.step(partial(loss, step))) for step in steps]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return get_engine("torch").to_numpy(tensor) if isinstance(tensor, torch.Tensor) else tensor


def values(model: nn.Module) -> dict[str, bytes]:
    return {name: plain(tensor).tobytes() for name, tensor in model.state_dict().items()}


def slots(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{names[id(p)]}.{name}": plain(slot).tobytes() if isinstance(slot, torch.Tensor) else repr(slot)
        for p, state in optimizer.state.items()
        for name, slot in state.items()
    }


@pytest.mark.parametrize(
    ("name", "is_laid_out"),
    few(itertools.product(OPTIMIZERS, (False, True)), ("adamw", False), ("lbfgs", True), ("adafactor", True)),
)
def test_training_goes_on_bit_for_bit(tmp_path: Path, name: str, is_laid_out: bool) -> None:
    """What is loaded into a new model and a new optimizer trains on as if never interrupted, with any optimizer."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES)
    how = {"layout_map": layout_map, "batch_dim": "batch", "library": "torch"}
    model, optimizer = made(0, name)
    on_one = losses = train(model, optimizer, range(2))
    if is_laid_out:
        torch.manual_seed(0)
        model = layout_map.build(Net, batch_dim="batch", library="torch")
        optimizer = OPTIMIZERS[name](trained(model))
        losses = train(model, optimizer, range(2))
    lm.save(model, tmp_path, optimizer=optimizer)
    after = values(model), {} if name == "lbfgs" and is_laid_out else slots(model, optimizer)
    target, options = (Net, how) if is_laid_out else (made(1, name)[0], {})
    other, fresh = lm.load(target, tmp_path, optimizer=lambda m: OPTIMIZERS[name](trained(m)), **options)

    assert pytest.approx(on_one, rel=1e-5) == losses
    assert after == (values(other), after[1] and slots(other, fresh))
    assert train(model, optimizer, range(2, 4)) == train(other, fresh, range(2, 4))
    assert values(model) == values(other)


@pytest.fixture(scope="module")
def trained_on_mesh(tmp_path_factory: pytest.TempPathFactory):
    """A model in layouts after two steps of AdamW, and where it is saved."""
    directory = tmp_path_factory.mktemp("saved")
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES)
    torch.manual_seed(0)
    model = layout_map.build(Net, batch_dim="batch", library="torch")
    optimizer = OPTIMIZERS["adamw"](trained(model))
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.5
    lm.save(model, directory, optimizer=optimizer)
    return model, optimizer, directory


@pytest.mark.parametrize("rules", [RULES, REPLICATED, None], ids=["sharded", "replicated", "plain"])
def test_slots_that_do_not_exist_yet_are_made_in_the_layouts_of_their_parameters(
    trained_on_mesh, rules
) -> None:
    """A new optimizer gets the slots that were saved, bit for bit, each in the layout of the parameter as it is now."""
    model, optimizer, directory = trained_on_mesh
    torch.manual_seed(7)
    other = Net()
    layout_map = rules and lm.LayoutMap(lm.create_mesh("model=8"), rules)
    if layout_map:
        layout_map.apply(other)
    fresh = OPTIMIZERS["adamw"](trained(other))
    with pytest.warns(lm.LayoutMapWarning, match="the saved settings"):
        loaded = lm.load(other, directory, optimizer=fresh)

    assert (other, fresh) == loaded
    assert slots(model, optimizer) == slots(other, fresh)
    assert values(model) == values(other)
    assert 0.5 == fresh.param_groups[0]["lr"]
    layout_of = get_engine("torch").get_layout
    for parameter, state in fresh.state.items():
        assert layout_of(parameter) == layout_of(state["exp_avg"]) == layout_of(state["exp_avg_sq"])
        assert layout_of(state["step"]) is None
    assert all(loss > 0 for loss in train(other, fresh, range(2, 3)))


@pytest.mark.parametrize("mesh", ["model=8", None], ids=["another mesh", "plain"])
def test_rows_and_columns_of_adafactor_are_in_the_layouts_of_their_weights(tmp_path: Path, mesh) -> None:
    """Loaded anywhere they have the same bits, and each axis of a weight that they keep is sharded as in the weight."""
    rules = {**RULES, r"(up|down|again)\.weight": (None, "model")}
    layout_map = lm.LayoutMap("batch=2,model=4", rules)
    torch.manual_seed(0)
    model = layout_map.build(Net, batch_dim="batch", library="torch")
    optimizer = OPTIMIZERS["adafactor"](trained(model))
    train(model, optimizer, range(2))
    lm.save(model, tmp_path, optimizer=optimizer)
    other = Net() if mesh is None else lm.LayoutMap(mesh, rules).apply(Net())
    _, fresh = lm.load(other, tmp_path, optimizer=OPTIMIZERS["adafactor"](trained(other)))

    assert slots(model, optimizer) == slots(other, fresh)
    for each, its in ((model, optimizer), (other, fresh) if mesh else (model, optimizer)):
        slots_of_weight = its.state[each.up.weight]
        specs = [
            lm.dtensor.fetch_layout(slots_of_weight[name]).sharding_specs for name in ("row_var", "col_var")
        ]
        assert [("unsharded", "unsharded"), ("unsharded", "model")] == specs
    assert pytest.approx(train(model, optimizer, range(2, 4))) == train(other, fresh, range(2, 4))


def test_a_model_is_built_and_its_optimizer_made_in_one_call(trained_on_mesh) -> None:
    """With functions for both, the model is read into its shards, no initializer runs, and the optimizer goes on."""
    model, optimizer, directory = trained_on_mesh
    state = torch.get_rng_state()
    layout_map = lm.LayoutMap(lm.create_mesh("model=2,batch=4"), RULES)
    other, fresh = lm.load(
        Net,
        directory,
        layout_map=layout_map,
        library="torch",
        batch_dim="batch",
        optimizer=lambda model: OPTIMIZERS["adamw"](trained(model)),
        override={"lr": 0.25},
    )
    assert 0.25 == fresh.param_groups[0]["lr"]
    assert values(model) == values(other)
    assert slots(model, optimizer) == slots(other, fresh)
    assert ("model", "unsharded") == lm.dtensor.fetch_layout(other.up.weight).sharding_specs
    assert other.again.weight is other.up.weight
    torch.set_rng_state(state)


@pytest.mark.parametrize("has_slots", [True, False])
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_name_table_of_weights_is_for_their_optimizer_too(
    tmp_path: Path, name: str, has_slots: bool
) -> None:
    """Training goes on bit for bit with renamed layers, whose slots and groups have the old names in the checkpoint."""

    def make(first: str, second: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        layers = {first: nn.Linear(8, 8), "tanh": nn.Tanh(), second: nn.Linear(8, 8)}
        model = nn.Sequential(OrderedDict(layers))
        optimizer = OPTIMIZERS[name](trained(model))
        optimizer.param_groups[0]["lr"] = 0.03
        return model, optimizer

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
        optimizer.zero_grad()
        loss = model(torch.randn((4, 8), generator=torch.Generator().manual_seed(seed))).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    model, optimizer = make("up", "down")
    step(model, optimizer, 0)
    lm.save(model, tmp_path, optimizer=optimizer)
    other, fresh = make("down", "fc")
    if has_slots:
        step(other, fresh, 1)
    names = {
        "down.weight": "up.weight",
        "down.bias": "up.bias",
        "fc.weight": "down.weight",
        "fc.bias": "down.bias",
    }
    lm.load(other, tmp_path, names=names, optimizer=fresh)

    assert [step(model, optimizer, n) for n in range(4)] == [step(other, fresh, n) for n in range(4)]


def test_no_initializer_computes_what_is_loaded(trained_on_mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is built while it is loaded, only what is not in the checkpoint is initialized."""
    *_, directory = trained_on_mesh
    created: list[str] = []
    engine = get_engine("torch")
    create = type(engine).create_initial_values

    def noting(self, assignments, initializers, progress=None):
        created.extend(assignment.variable.path for assignment in assignments.values())
        return create(self, assignments, initializers, progress)

    monkeypatch.setattr(type(engine), "create_initial_values", noting)
    rules = lm.LayoutMap(lm.create_mesh("model=8"), RULES)
    lm.load(Net, directory, layout_map=rules, extra="ignore", library="torch")
    assert {"passing"} >= set(created)


def test_an_optimizer_that_has_stepped_is_set_back_to_before_its_first_step(tmp_path: Path) -> None:
    """What was saved before the first step has no slots, and the optimizer that it is loaded into then has none."""
    model, optimizer = made(0)
    lm.save(model, tmp_path, optimizer=optimizer)
    train(model, optimizer, range(2))
    assert {} != slots(model, optimizer)
    lm.load(model, tmp_path, optimizer=optimizer)
    assert {} == slots(model, optimizer)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_and_loaders_go_on(tmp_path: Path, name: str) -> None:
    """Schedules of learning rates and whatever has a state go on where they were, with values of their own types."""
    model, optimizer = made(0)
    schedule, generator = SCHEDULES[name](optimizer), torch.Generator().manual_seed(3)
    torch.rand(3, generator=generator)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    lm.save(model, tmp_path, optimizer=optimizer, data={"schedule": schedule, "draws": generator})
    other, fresh = made(1)
    again, draws = SCHEDULES[name](fresh), torch.Generator()
    lm.load(other, tmp_path, optimizer=fresh, data={"schedule": again, "draws": draws})

    assert schedule.state_dict() == again.state_dict()
    assert generator.get_state().tolist() == draws.get_state().tolist()
    if name == "multi step":
        assert Counter({1: 1, 4: 1}) == again.milestones
        assert [type(schedule.milestones)] == [type(again.milestones)]
    for each, of in ((schedule, optimizer), (again, fresh)):
        of.step()
        each.step()
    assert schedule.get_last_lr() == again.get_last_lr()


def test_a_compiled_model_has_the_paths_of_the_plain_one(tmp_path: Path) -> None:
    """What `torch.compile` returns, and a model after `compile()`, are saved and loaded as the model itself."""
    model, optimizer = made(0)
    lm.save(torch.compile(model, backend="eager"), tmp_path, optimizer=optimizer)
    other, _ = made(1)
    other.compile(backend="eager")
    saved = lm.describe(tmp_path).variables.values()
    assert {*model.state_dict()} == {path for each in saved for path in (each.path, *each.aliases)}
    assert values(model) == values(lm.load(other, tmp_path))
    assert values(model) == values(lm.load(torch.compile(made(1)[0], backend="eager"), tmp_path)._orig_mod)


def test_dtensors_that_torch_made_are_saved_and_loaded(trained_on_mesh) -> None:
    """A model that nobody has laid out by rules, whose parameters are DTensors, takes values in its own placements."""
    from torch.distributed.tensor import DTensor

    model, _, directory = trained_on_mesh
    layout_map = lm.LayoutMap(lm.create_mesh("model=8"), REPLICATED)
    other = layout_map.apply(Net())
    for module in other.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            made_by_torch = DTensor.from_local(
                parameter.to_local(), parameter.device_mesh, parameter.placements, run_check=False
            )
            assert not hasattr(made_by_torch, "_layoutmap_layout")
            setattr(module, name, nn.Parameter(made_by_torch, requires_grad=parameter.requires_grad))
    other.again.weight = other.up.weight
    before = [p.placements for p in other.parameters()]
    assert values(model) == values(lm.load(other, directory, extra="ignore"))
    assert before == [p.placements for p in other.parameters()]


def test_tensors_that_numpy_does_not_reach_are_saved(tmp_path: Path) -> None:
    """Scales of eight bits, and what torch conjugates or negates only when it is read, come back as they were."""
    numbers = torch.randn(4, 4, dtype=torch.complex64)
    tensors = {
        "scale": torch.arange(1, 9, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
    }
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    lm.save(model, tmp_path)
    other = nn.Module()
    for name, tensor in tensors.items():
        other.register_buffer(name, torch.empty_like(tensor))
    lm.load(other, tmp_path)

    assert values(model) == values(other)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(4).to_sparse(), "of torch.sparse_coo"),
        (lambda: torch.empty(4, device="meta"), "on the meta device"),
        (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "quantized"),
    ],
)
def test_tensors_without_dense_values_are_refused(tmp_path: Path, make, kind: str) -> None:
    """A sparse tensor, one without values, one of quantized numbers: each is named, with what it is."""
    model = nn.Module()
    with warnings.catch_warnings(action="ignore"):  # torch's own, of quantized tensors
        model.register_buffer("w", make())
        with pytest.raises(
            CheckpointError, match=f"^w: a tensor that is {kind} can be neither saved nor loaded"
        ):
            lm.save(model, tmp_path)

    assert [] == [*tmp_path.iterdir()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_element_type_of_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    """A plain model of any type that is trained comes back bit for bit, with the slots of that type."""
    model, optimizer = made(0, dtype=dtype)
    train(model, optimizer, range(2))
    lm.save(model, tmp_path, optimizer=optimizer)
    other, fresh = made(1, dtype=dtype)
    lm.load(other, tmp_path, optimizer=fresh)
    assert (values(model), slots(model, optimizer)) == (values(other), slots(other, fresh))


def test_an_optimizer_of_a_sharded_model_and_an_unsharded_head(tmp_path: Path) -> None:
    """It is saved with a module of both. With the model alone it is refused, and the fix names such a module."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES)

    def make_both(seed: int):
        torch.manual_seed(seed)
        body = layout_map.build(Net, batch_dim="batch", library="torch")
        both = nn.ModuleList([body, nn.Linear(16, 4)])
        both.scale, both.forward = body.scale, lambda x: both[1](both[0](x).tanh())
        return both, torch.optim.AdamW(trained(both), lr=0.01, foreach=True)

    both, optimizer = make_both(0)
    train(both, optimizer, range(2))
    lm.save(both, tmp_path, optimizer=optimizer)
    other, fresh = make_both(1)
    lm.load(other, tmp_path, optimizer=fresh)

    assert (values(both), slots(both, optimizer)) == (values(other), slots(other, fresh))
    with pytest.raises(CheckpointError, match=r"or a module .*torch\.nn\.ModuleList\(\[model, head\]\)"):
        lm.save(both[0], tmp_path / "model", optimizer=optimizer)


# -- what is refused


def unchanged_by(function, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the first line of what an error says; fail if the model or its optimizer are changed."""

    def read_state():
        groups = repr(optimizer.param_groups)
        return values(model), slots(model, optimizer), groups, torch.get_rng_state().tolist()

    before = read_state()
    with pytest.raises(CheckpointError) as raised:
        function()
    assert before == read_state()
    return str(raised.value).partition("\n")[0]


def test_another_optimizer_is_refused(trained_on_mesh) -> None:
    """An optimizer of another kind, of another model or with other groups is refused, and nothing is changed."""
    *_, directory = trained_on_mesh
    model, optimizer = made(1)
    momentum = OPTIMIZERS["momentum"](trained(model))
    assert "the checkpoint has no state of SGD" == unchanged_by(
        lambda: lm.load(model, directory, optimizer=momentum), model, momentum
    )
    _, others = made(2)
    assert "AdamW is not the optimizer of this model" == unchanged_by(
        lambda: lm.load(model, directory, optimizer=others), model, optimizer
    )


def test_groups_are_found_by_their_parameters(tmp_path: Path) -> None:
    """Each group gets the settings of the one that had its parameters, in any order; one of several is refused."""
    torch.manual_seed(0)
    model = Net()
    by_rank = [[p for p in trained(model) if p.ndim > 1], [p for p in trained(model) if p.ndim < 2]]
    groups = [{"params": by_rank[0], "lr": 0.25}, {"params": by_rank[1], "lr": 0.5}]
    lm.save(model, tmp_path, optimizer=torch.optim.AdamW(groups))
    swapped = torch.optim.AdamW([{"params": by_rank[1]}, {"params": by_rank[0]}])
    with pytest.warns(lm.LayoutMapWarning, match="the saved settings"):
        lm.load(model, tmp_path, optimizer=swapped)
    assert [0.5, 0.25] == [group["lr"] for group in swapped.param_groups]
    one = torch.optim.AdamW(trained(model))
    assert "group 0 of the optimizer has parameters of several saved groups" == unchanged_by(
        lambda: lm.load(model, tmp_path, optimizer=one), model, one
    )


ADAM = {"lr": 0.01, "betas": (0.9, 0.999), "amsgrad": False}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ""),
        ({"lr": torch.tensor(0.01)}, ""),
        ({"foreach": True}, ""),
        ({"lr": 0.5}, "lr    0.5 in code, 0.01 saved"),
        ({"lr": torch.tensor(0.5)}, "lr    0.5 in code, 0.01 saved"),
        ({"betas": (0.8, 0.9)}, "betas  (0.8, 0.9) in code, (0.9, 0.999) saved"),
        ({"amsgrad": True}, "amsgrad  True in code, False saved"),
    ],
)
def test_settings_that_are_replaced_are_told(tmp_path: Path, settings: dict[str, object], said: str) -> None:
    """What was saved takes the place of what the optimizer was made with, with a warning that names both."""
    model = Net()
    optimizer = torch.optim.Adam(trained(model), **ADAM)
    train(model, optimizer, range(1))
    lm.save(model, tmp_path, optimizer=optimizer)
    fresh = torch.optim.Adam(trained(model), **ADAM | settings)
    with warnings.catch_warnings(record=True, action="always") as warned:
        lm.load(model, tmp_path, optimizer=fresh)

    assert [said] == ([str(each.message).splitlines()[1].strip() for each in warned] or [""])
    assert ADAM == {name: plain(fresh.param_groups[0][name]) for name in ADAM} | {"lr": 0.01}
    train(model, fresh, range(1))


@pytest.mark.parametrize(("own", "is_told"), [([(0,), (1, 2)], False), ([(0,), (1, 3)], True), (None, True)])
def test_settings_of_any_form_are_compared(tmp_path: Path, own: object, is_told: bool) -> None:
    """A group may have settings that are no arrays, as lists of different lengths."""
    model, _ = made(0)
    saved = torch.optim.AdamW([{"params": trained(model), "phases": [(0,), (1, 2)]}])
    lm.save(model, tmp_path, optimizer=saved)
    optimizer = torch.optim.AdamW([{"params": trained(model), "phases": own}])
    with warnings.catch_warnings(record=True, action="always") as warned:
        lm.load(model, tmp_path, optimizer=optimizer)

    assert is_told == any("phases" in str(each.message) for each in warned)
    assert [(0,), (1, 2)] == optimizer.param_groups[0]["phases"]


def test_a_schedule_is_no_other_setting(tmp_path: Path) -> None:
    """A learning rate that a schedule has changed is compared by what it began with, wherever the schedule is made."""
    model, optimizer = made(0)
    schedule = SCHEDULES["step"](optimizer)
    for _ in range(5):
        optimizer.step()
        schedule.step()
    lm.save(model, tmp_path, optimizer=optimizer)
    for begin in (lambda o: o, lambda o: SCHEDULES["step"](o).optimizer):
        other, fresh = made(1)
        lm.load(other, tmp_path, optimizer=begin(fresh))
        assert optimizer.param_groups[0]["lr"] == fresh.param_groups[0]["lr"]


def test_what_is_overridden_is_as_it_is_passed(tmp_path: Path) -> None:
    """`override` wins in all groups without a warning; a name that no group has, or that needs slots, is refused."""
    model, optimizer = made(0, "adamw")
    train(model, optimizer, range(1))
    lm.save(model, tmp_path, optimizer=optimizer)
    other, fresh = made(1, "adamw")
    override = {"lr": 0.125, "weight_decay": 0.5}
    lm.load(other, tmp_path, optimizer=fresh, override=override)
    assert override == {name: fresh.param_groups[0][name] for name in override}

    for name, said in (
        ("rate", "override={'rate': True}: the saved optimizer has no setting 'rate'"),
        ("amsgrad", "the checkpoint has no slots max_exp_avg_sq, which amsgrad needs"),
    ):
        assert said == unchanged_by(
            lambda name=name: lm.load(other, tmp_path, optimizer=fresh, override={name: True}), other, fresh
        )


class Loader:
    """Data that may not take up a state."""

    def __init__(self, row: int, refuses: bool = False):
        self.row, self.refuses = row, refuses

    def state_dict(self) -> dict[str, int]:
        return vars(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses and state["row"] == 1:
            raise ValueError("of another data set")
        self.row = state["row"]


def test_data_that_does_not_take_up_its_state_changes_nothing(tmp_path: Path) -> None:
    """Not the model, the optimizer, a random state, nor the data that was given its state before it."""
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    data = {"first": Loader(1), "second": Loader(1)}
    lm.save(model, tmp_path, optimizer=optimizer, data=data)
    train(model, optimizer, range(1, 2))
    data = {"first": Loader(5), "second": Loader(6, refuses=True)}
    torch.manual_seed(99)
    said = unchanged_by(lambda: lm.load(model, tmp_path, optimizer=optimizer, data=data), model, optimizer)

    assert f"{tmp_path}/step-0: data cannot restore the saved state" == said
    assert [5, 6] == [each.row for each in data.values()]


@pytest.mark.parametrize("name", ["torch", "numpy", "python"])
def test_a_random_state_that_cannot_be_set_changes_nothing(tmp_path: Path, name: str) -> None:
    """Whichever generator refuses its state, the model, the optimizer, all generators and the data are as they were."""
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    lm.save(model, tmp_path, optimizer=optimizer, data=Loader(1))
    step = tmp_path / "step-0"
    found = manifest_in(step)
    put(
        found,
        ("states", "processes", 0, "random", name),
        {"__array__": "AAAA", "dtype": "uint8", "shape": [3]},
    )
    write_manifest(step, found)
    train(model, optimizer, range(1, 2))
    data, drawn = Loader(5), repr(random_states.read_python_and_numpy_states())
    said = unchanged_by(lambda: lm.load(model, tmp_path, optimizer=optimizer, data=data), model, optimizer)

    assert f"{tmp_path}/step-0: the random states cannot restore the saved state" == said
    assert (5, drawn) == (data.row, repr(random_states.read_python_and_numpy_states()))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((), []),
        (("kind",), 5),
        (("groups",), [[]]),
        (("groups", 0, "params"), 5),
        (("state",), {"up.weight": 5}),
        (("state",), {"up.weight": {"exp_avg": 3}}),
    ],
)
def test_forged_settings_change_nothing(tmp_path: Path, place: Place, value: object) -> None:
    """Settings that are none of an optimizer are refused before anything is made of them."""
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    lm.save(model, tmp_path, optimizer=optimizer)
    step = tmp_path / "step-0"
    found = manifest_in(step)
    put(found, ("states", "settings", "optimizer", *place), value or [1])
    write_manifest(step, found)
    said = unchanged_by(lambda: lm.load(model, tmp_path, optimizer=optimizer), model, optimizer)

    assert "the checkpoint has no settings of an optimizer" == said or value == 5


def test_a_forged_override_is_none(tmp_path: Path) -> None:
    """What is overridden is said by who loads, and nothing else."""
    model, optimizer = made(0)
    lm.save(model, tmp_path, optimizer=optimizer)
    found = manifest_in(tmp_path / "step-0")
    put(found, ("states", "settings", "override"), {"lr": 5.0})
    write_manifest(tmp_path / "step-0", found)
    lm.load(model, tmp_path, optimizer=optimizer)

    assert 0.01 == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("second", [{"data": 5}, {"data": {"draws": 1}}, {}])
def test_states_of_processes_that_differ_in_form_are_refused(
    tmp_path: Path, second: dict[str, object]
) -> None:
    """Each process has the same names in its `data`; a second one whose state is something else is an error."""
    model, _ = made(0)
    data = {"draws": torch.Generator(), "rows": Loader(3)}
    lm.save(model, tmp_path, data=data)
    found = manifest_in(tmp_path / "step-0")
    found["states"]["processes"].append(second)
    write_manifest(tmp_path / "step-0", found)
    with pytest.raises(CheckpointError, match="data: its names differ") if second else nullcontext():
        lm.load(model, tmp_path, data=data)


@pytest.mark.parametrize("is_laid_out", [True, False])
def test_values_are_read_into_the_memory_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_laid_out: bool
) -> None:
    """Tensors of a model and slots of its optimizer get their values in their own memory, without another array."""

    def model_of(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model: nn.Module = nn.Linear(16, 24)
        if is_laid_out:
            rules = {"weight": (("x", "y"), None), "bias": (("x", "y"),)}
            model = lm.LayoutMap(lm.create_mesh("x=2,y=4"), rules).apply(model)
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * seed
        optimizer.step()
        return model, optimizer

    def bits(tensor: torch.Tensor) -> bytes:
        return get_engine("torch").to_numpy(tensor).tobytes()

    def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        slots = [slot for parameter in model.parameters() for slot in optimizer.state[parameter].values()]
        return [*model.parameters(), *slots]

    saved, other = model_of(1), model_of(2)
    lm.save(saved[0], tmp_path, step=1, optimizer=saved[1])
    before = held(*other)
    versions = [each._version for each in before]
    sizes = list[int]()
    empty = reader._allocate_aligned_array
    monkeypatch.setattr(
        reader, "_allocate_aligned_array", lambda *args: (array := empty(*args), sizes.append(array.size))[0]
    )
    lm.load(other[0], tmp_path, optimizer=other[1], verify="while")
    fresh = torch.optim.Adam(other[0].parameters())
    lm.load(other[0], tmp_path, optimizer=fresh, verify="while")

    after = held(*other)
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert all(old < each._version for old, each in zip(versions, after, strict=True))
    expected, *loaded = ([*map(bits, held(*each))] for each in (saved, other, (other[0], fresh)))
    assert [expected] * 2 == loaded
    num_slots = 4 * (8 if is_laid_out else 1)  # of the optimizer that had none
    assert num_slots == sum(size > 1 for size in sizes)


def test_an_optimizer_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    """A checkpoint of a model alone has nothing for an optimizer, which keeps what it has if that is asked for."""
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    lm.save(model, tmp_path)
    said = unchanged_by(lambda: lm.load(model, tmp_path, optimizer=optimizer), model, optimizer)
    assert f"{tmp_path}/step-0: no optimizer state for torch was saved" == said
    before = slots(model, optimizer)
    lm.load(model, tmp_path, optimizer=optimizer, missing="keep")
    assert before == slots(model, optimizer)


def test_state_that_is_no_data_is_refused(tmp_path: Path) -> None:
    """What an optimizer keeps that is not a number, text or array is refused by name."""
    model, optimizer = made(0)
    optimizer.state[model.scale]["look"] = print
    with pytest.raises(CheckpointError, match="'look'"):
        lm.save(model, tmp_path, optimizer=optimizer)
    assert [] == [*tmp_path.iterdir()]


def test_a_mesh_whose_devices_are_named_elsewhere(tmp_path):
    """A model on a mesh without names of devices is saved with its slots, though another mesh names the same ones."""
    mesh = lm.create_mesh("named=4", engine="torch")
    lm.dtensor.relayout(torch.zeros(4), lm.Layout(["named"], mesh))
    layout_map = lm.LayoutMap("named=4", {"weight": ("named", None)}, rest="replicated")
    model = layout_map.build(lambda: nn.Linear(8, 8), library="torch")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    lm.save(model, tmp_path, optimizer=optimizer, progress=False)

    assert "optimizer.weight.momentum_buffer" in lm.describe(tmp_path)
