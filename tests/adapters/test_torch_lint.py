"""What torch's modules do with their weights, and lint of models of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import forked
import pytest
import torch
import transformers
from axis_roles import assert_right, random
from cases import some
from test_torch_transformers import make_map
from transformers_models import FULL, WITH_A_PLAN, WITHOUT

import layoutmap as lm
from layoutmap.adapters.torch.paths import list_model_tensors
from layoutmap.adapters.torch.roles import find_axis_roles_and_head_size, find_head_sizes_by_module_id

LAYERS = {
    "Linear": (lambda: torch.nn.Linear(4, 5), (3, 4)),
    "Conv1d": (lambda: torch.nn.Conv1d(3, 5, 2), (3, 3, 4)),
    "Conv2d": (lambda: torch.nn.Conv2d(3, 5, 2), (3, 3, 4, 4)),
    "transformers' Conv1D": (lambda: transformers.pytorch_utils.Conv1D(5, 4), (3, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_axes_do_what_their_roles_say(name):
    """Slices along an axis that is put out fill slices of the output; those along one that is summed over add up."""
    make, shape = LAYERS[name]
    layer, inputs = make(), torch.from_numpy(random(shape))
    tensors = dict(zip(("weight", "bias"), list_model_tensors(layer), strict=True))
    roles = {key: find_axis_roles_and_head_size(each, {}).roles for key, each in tensors.items()}

    def output(**weights):
        for key, value in weights.items():
            tensors[key].tensor.copy_(torch.from_numpy(value))
        return layer(inputs)

    assert_right(roles, {key: random(each.tensor.shape) for key, each in tensors.items()}, output)
    assert ("out.0",) == roles["bias"]


def test_the_size_of_a_head_is_known_for_what_attention_modules_hold():
    """By the names that transformers has for it; an MLP has none."""
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(WITH_A_PLAN["llama"][1]())
    sizes = find_head_sizes_by_module_id(model)
    found = {f.path: find_axis_roles_and_head_size(f, sizes) for f in list_model_tensors(model)}

    assert model.config.head_dim == found["layers.0.self_attn.q_proj.weight"].head_size
    assert found["layers.0.mlp.up_proj.weight"].head_size is None
    assert found["layers.0.input_layernorm.weight"] is None


class Reversed(torch.nn.Module):
    """Two layers with own names, of which the second is made first. It keeps the number of its calls."""

    def __init__(self, reads_values=False):
        super().__init__()
        self.later, self.first = torch.nn.Linear(256, 64), torch.nn.Linear(64, 256)
        self.norm, self.calls, self.reads_values = torch.nn.BatchNorm1d(64, affine=False), 0, reads_values

    def forward(self, x, scale=1):
        self.calls += 1
        hidden = torch.relu(self.first(input=self.norm(x)))
        if self.reads_values and hidden.sum() > 0:
            hidden = -hidden
        return x + scale * self.later(hidden)


class Ask(torch.nn.Module):
    """Attention with one head and own names. The output layer is made first."""

    def __init__(self):
        super().__init__()
        self.join, self.ask, self.hint, self.val = (torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        return self.join(torch.softmax(self.ask(x) @ self.hint(x).mT, -1) @ self.val(x))


def test_calls_show_which_kernel_takes_the_outputs_of_another():
    """They decide, and not the order in which the layers were made. Code that reads values leaves it unknown."""
    made = []

    def make(compiles=False, **options):
        made.append(Reversed(**options))
        if compiles:
            made[-1].compile(backend="eager")
        return made[-1]

    def list_specs(make, inputs):
        rules = lm.suggest(make, "batch=2,model=4", inputs=inputs, library="torch")
        plan = lm.plan(make, rules, inputs=inputs, library="torch")
        assert [] == [*plan.lint(), *(p for p in plan.problems if p.kind != "unknown order")]
        specs = {
            a.variable.path: a.layout.sharding_specs.index("model")
            for a in plan.assignments
            if "model" in a.layout.sharding_specs and "weight" in a.variable.path
        }
        return specs, [rule.reason for rule in rules.rules if "order" in rule.reason]

    seed = torch.random.get_rng_state()
    x = torch.zeros(8, 64)
    for inputs in (x, [x, 2], {"x": x}):
        assert ({"later.weight": 1, "first.weight": 0}, []) == list_specs(make, inputs)
    assert ({"later.weight": 1, "first.weight": 0}, []) == list_specs(lambda: make(compiles=True), x)
    with pytest.warns(lm.LayoutMapWarning, match="Reversed: its call with inputs= "):
        specs, guessed = list_specs(lambda: make(reads_values=True), x)
    assert ({"later.weight": 0, "first.weight": 1}, 2) == (specs, len(guessed))
    assert [0] * len(made) == [model.calls for model in made]
    assert not made[0].first._forward_pre_hooks
    assert torch.equal(seed, torch.random.get_rng_state())
    expected = {"join.weight": 1, "ask.weight": 0, "hint.weight": 0, "val.weight": 0}
    assert (expected, []) == list_specs(Ask, torch.zeros(2, 8, 64))


def test_a_failed_call_is_reported_with_its_error():
    """The plan has a note of it, lint's summary and the reasons of suggested rules do not ask for inputs."""

    class Failing(Ask):
        def forward(self, x):
            raise KeyError(f"no mask\nfor {len(x)}")

    inputs = torch.zeros(2, 8, 64)
    with pytest.warns(lm.LayoutMapWarning, match="KeyError: 'no mask"):
        rules = lm.suggest(Failing, "batch=2,model=4", inputs=inputs, library="torch")
    plan = lm.plan(Failing, rules, inputs=inputs, library="torch")
    (problem,) = plan.problems
    assert ("unknown order", "note", "Failing") == (problem.kind, problem.severity, problem.subject)
    assert problem.why.startswith("KeyError: 'no mask")
    told = [plan.lint().summary, *(rule.reason for rule in rules.rules if "order" in rule.reason)]
    assert 2 == len(told)
    assert all("failed: KeyError: 'no mask" in each and "--inputs" not in each for each in told)


# Which the plan that is written for BERT leaves whole
TABLE = {("replicated table", "bert.embeddings.word_embeddings")}
KEYS = {("heads", "self_attn.k_proj"), ("heads", "self_attn.v_proj")}


@pytest.mark.parametrize(
    ("name", "on_4", "on_16"),
    [
        (
            "llama",
            set(),
            KEYS,
        ),  # 8 heads of keys of 128 each: 16 devices divide their 1,024 columns, and not the heads
        (
            "whisper",
            set(),
            KEYS | {("heads", "self_attn.q_proj"), ("heads", "self_attn.out_proj")},
        ),  # 20 heads
        ("vit", set(), set()),  # 16 heads
        ("bert", TABLE, TABLE),
    ],
)
@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_published_models_are_passed_unless_sharding_splits_their_heads(name, on_4, on_16):
    """Under the plans that transformers ships, or that are written for those without one."""
    kind, _, _ = {**WITH_A_PLAN, **WITHOUT}[name]

    def found(model):
        layout_map = make_map(name, lm.Mesh(None, f"batch=64,model={model}"), FULL[name])
        plan = lm.plan(lambda: getattr(transformers, kind)(FULL[name]()), layout_map, library="torch")
        return {
            (p.kind, re.sub(r".*\.\d+\.", "", p.subject).removesuffix(".weight"))
            for p in plan.lint().problems
            if p not in plan.problems
        }

    assert on_4 == found(4)
    assert on_16 == found(16)


@pytest.mark.parametrize(
    ("weight", "bias", "kind"),
    [("model", "batch", "contradicts its kernel"), (None, "model", "replicated partner")],
)
def test_the_kind_of_a_finding_does_not_depend_on_the_name_of_the_weight(weight, bias, kind):
    """Torch calls a kernel `weight`; a bias over another dim is the one that contradicts."""
    layout_map = lm.LayoutMap("batch=2,model=4", {r"0\.weight": (weight, None), r"0\.bias": (bias,)})
    layout_map[r"2\.weight"] = (None, "model")

    def make():
        return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))

    plan = lm.plan(make, layout_map, library="torch")
    assert [kind] == [each.kind for each in plan.lint(batch_dim="batch").problems if each.kind != "no rule"]


def test_parallelize_module_and_fully_shard_are_passed_and_a_block_left_out_is_found():
    """Drawn meshes, names, heads and blocks: no finding, and of one block that was not parallelized exactly one."""
    seeds = map(str, some(range(20261128_100, 20261128_150), *range(20261128_100, 20261128_105)))
    worker = Path(__file__).with_name("torch_lint_process.py")
    result = forked.run(worker, [*seeds])

    assert 0 == result.returncode, result.stderr
    for actual, expected in json.loads(result.stdout.splitlines()[-1]):
        assert expected == actual
