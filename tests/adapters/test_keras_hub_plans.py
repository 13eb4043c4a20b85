"""Presets for real models: no problem in their plans, at any size; and each that is made is reported."""

import functools
import math
import re
from dataclasses import replace

import hub_families
import hub_models
import keras_hub
import pytest
from cases import few

import layoutmap as lm
from layoutmap.core.errors import RuleError
from layoutmap.core.variables import Kind
from layoutmap.rules import zoo
from layoutmap.scope.plan import make_plan

PROCESSES = ("jax",)
# keras-hub 0.32 has T5 pass masks to its attention, which takes none.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Layer '.*_attention' .* was passed an input with a mask:UserWarning"
)

HEADS = {"qwen2.5_7b": 4, "whisper_large_v3": 4, "gpt2_xl": 5}
"""How many devices their heads can be dealt out to; the others' to 8."""
TABLES = ("embeddings", "reverse_embeddings")
OF_KERAS_HUB = {
    "llama3_8b": "llama3_8b_en",
    "mistral_7b": "mistral_7b_en",
    "gemma_2b": "gemma_2b_en",
    "gemma_7b": "gemma_7b_en",
    "gemma2_9b": "gemma2_9b_en",
    "gemma2_27b": "gemma2_27b_en",
    "mixtral_8x7b": "mixtral_8_7b_en",
    "qwen2.5_7b": "qwen2.5_math_7b_en",  # for qwen2.5_7b_en it has another number than that model's weights have
    "qwen2.5_72b": "qwen2.5_instruct_72b_en",
    "vit_large": "vit_large_patch16_224_imagenet",
    "bert_large": "bert_large_en_uncased",
    "gpt2_xl": "gpt2_extra_large_en",
    "t5_xxl": "t5_1.1_xxl",
}
"""What keras-hub calls those that it has values for."""


@functools.cache
def specs(name):
    """The weights of a tiny model, as a dry run tells them."""
    plan = lm.plan(lambda: hub_models.make(name), hub_models.rules(name), strict=True)
    return tuple(a.variable for a in plan.assignments if a.variable.kind in (Kind.WEIGHT, Kind.STATE))


def renamed(variable, word, new):
    """The variable as it is called when what is called `word` in all its paths is renamed."""
    paths = (variable.path, *variable.aliases)
    first, *rest = (".".join(new if part == word else part for part in path.split(".")) for path in paths)
    return replace(variable, path=first, aliases=tuple(rest))


def with_rule(layout_map, old, new):
    """The map with one pattern in the place of another."""
    changed = lm.LayoutMap(layout_map.mesh)
    for rule in layout_map.rules:
        changed.add(new if rule.pattern == old else rule.pattern, rule.layout, uneven=rule.uneven)
    return changed


def winners(plan):
    """Which rule decides on each weight."""
    return [a.match.rule and a.match.rule.number for a in plan.assignments]


@functools.cache
def published_plan(name):
    """The plan of a published model with all that its preset shards, on a mesh that shards heads as far as may be."""
    model = zoo.find_model(name)
    mesh = lm.create_mesh(f"batch=64,model={HEADS.get(name, 8)}")
    return lm.plan(model.make, lm.LayoutMap.preset(model.preset, mesh, fsdp_dim="batch"), strict=True)


def num_parameters(plan):
    return sum(
        math.prod(a.variable.shape) for a in plan.assignments if a.variable.kind in (Kind.WEIGHT, Kind.STATE)
    )


@pytest.mark.parametrize("name", few(zoo.list_models(), "llama3_8b", "gemma_2b"))
def test_a_published_model_is_planned_without_a_problem(name):
    """Every weight has a rule and every rule a weight at full size, too; it has as many numbers as were published."""
    plan = published_plan(name)

    assert () == tuple(p for p in plan.problems if p.kind != "uneven")
    assert bool(plan.problems) == (name == "gemma_2b")  # its one head of keys and values is left whole
    assert zoo.find_model(name).num_parameters == num_parameters(plan)


def test_published_numbers_are_those_of_keras_hub():
    """Of those that it has values for; and each of its models has the preset of its family."""
    kinds = {
        name: getattr(hub_models.hub, zoo.find_model(name).kind.partition(":")[2]) for name in OF_KERAS_HUB
    }

    assert {
        name: kinds[name].presets[there]["metadata"]["params"] for name, there in OF_KERAS_HUB.items()
    } == {name: zoo.find_model(name).num_parameters for name in OF_KERAS_HUB}


def test_no_published_model_hides_something_of_keras_hub():
    """What `keras_hub:name` meant to the command line before there were published models, it means."""
    assert [] == [name for name in zoo.list_models() if hasattr(keras_hub, name)]


@pytest.mark.long
def test_the_largest_llama_fits():
    """405 billion numbers are 1,137 variables, of which 512 devices hold hardly more than a 512th each."""
    plan = published_plan("llama3_405b")

    assert 1137 == len(plan)
    assert 1 <= plan.device_bytes * plan.mesh.size / plan.global_bytes < 1.01


FITTED = ("Mistral", "OPT", "Roberta", "XLMRoberta", "DistilBert", "Electra")
VARIANTS = {
    "llama": {"tie_word_embeddings": True},
    "qwen": {"tie_word_embeddings": True},
    "gemma": {"use_post_ffw_norm": False, "use_post_attention_norm": False},
    "t5": {"tie_embedding_weights": True, "use_gated_activation": False},
}


def test_a_vocabulary_that_does_not_divide_is_padded():
    """A preset pads token tables, the plan shows the bytes, and all other layouts stay as they are."""
    even, odd = (
        lm.plan(
            lambda n=n: hub_models.make("llama", hub_models.TINY["llama"] | {"vocabulary_size": n}),
            hub_models.rules("llama"),
        )
        for n in (64, 67)
    )
    padded = {a.variable.path.rpartition("token_embedding.")[2] for a in odd.assignments if a.is_padded}

    assert {name + slot for name in TABLES for slot in ("", ".momentum")} == padded
    assert [a.layout for a in even.assignments] == [a.layout for a in odd.assignments]
    assert odd["llama3_backbone.token_embedding.embeddings"].padding_bytes > 0


@pytest.mark.parametrize("name", few(VARIANTS, "llama"))
def test_a_family_has_one_preset(name):
    """Whatever of it a member has not, such as a second table of tokens, leaves no rule unused."""
    config = hub_models.TINY[name] | VARIANTS[name]

    assert () == lm.plan(lambda: hub_models.make(name, config), hub_models.rules(name)).problems


@pytest.mark.parametrize("family", few(FITTED, "OPT"))
def test_a_preset_of_another_name_that_is_named_fits(family):
    """Where a family has no preset of its own, the one that the error names has no problem with it."""
    with pytest.raises(RuleError) as refused:
        lm.LayoutMap.preset(family, lm.Mesh(None, "model=2"))
    (fits,) = re.findall(r"use '(\w+)'", refused.value.fix)
    layout_map = lm.LayoutMap.preset(fits, lm.Mesh(None, "model=2"))

    assert () == lm.plan(lambda: hub_families.make(family), layout_map).warnings


@pytest.mark.parametrize("name", few(["llama", "gemma", "mixtral", "qwen"], "llama"))
def test_heads_of_keys_that_are_too_few_are_replicated(name):
    """Four of them on eight devices: the plan notes it, also of biases, and all else is sharded."""
    config = hub_models.TINY[name] | ({"num_experts": 8} if name == "mixtral" else {})
    plan = lm.plan(lambda: hub_models.make(name, config), hub_models.rules(name, "model=8"), strict=True)
    whole = [
        a.variable.path
        for a in plan.assignments
        if a.match and a.match.rule and a.match.layout != a.layout and a.layout.is_fully_replicated()
    ]

    assert whole == [p.subject for p in plan.problems]
    assert {"key_dense", "value_dense"} == {path.split(".")[-2] for path in whole}


@pytest.mark.parametrize("name", few(hub_models.FAMILIES, "llama"))
def test_no_two_rules_speak_of_one_weight(name):
    """The order of a file's rules does not matter."""
    plan = make_plan(specs(name), hub_models.rules(name))

    assert [] == [a.match for a in plan.assignments if a.match.others]


@pytest.mark.parametrize("name", few(hub_models.FAMILIES, "llama"))
def test_every_rename_is_reported(name):
    """Whichever word of whichever path changes, the plan names that weight; the name of the backbone is left open."""
    layout_map, variables = hub_models.rules(name), specs(name)
    missed, told = [], 0
    for number, variable in enumerate(variables):
        words = [w for w in variable.path.split(".") if not w.endswith("backbone")]
        for word, new in [(w, changed) for w in words for changed in (f"{w}_x", w[1:])]:
            wrong = renamed(variable, word, new)
            plan = make_plan([*variables[:number], wrong, *variables[number + 1 :]], layout_map)
            subjects = {p.subject for p in plan.warnings + plan.errors}
            told += wrong.path in subjects
            missed += [wrong.path] * (wrong.path not in subjects)

    assert [] == missed
    assert told >= 2 * len(variables)


def slips(pattern):
    """The pattern with one slip: a letter of a word or a sign left out, or a rule for all blocks written for one."""
    for part in re.finditer(r"\w+|\W", pattern):
        middle = (part.start() + part.end()) // 2
        yield pattern[:middle] + pattern[middle + 1 :]
    if r"\d+" in pattern:
        yield from (pattern.replace(r"\d+", index, 1) for index in ("0", "2"))


@pytest.mark.parametrize("name", few(hub_models.FAMILIES, "llama"))
def test_every_broken_rule_is_reported(name):
    """A slip in a pattern is in the plan if it moves anything, and no alarm is raised where it moves nothing."""
    layout_map, variables = hub_models.rules(name), specs(name)
    right = make_plan(variables, layout_map)
    missed, false, told = [], [], dict.fromkeys(layout_map, 0)
    for pattern in layout_map:
        for slip in slips(pattern):
            try:
                plan = make_plan(variables, with_rule(layout_map, pattern, slip))
            except RuleError:  # it is not a regex any more
                told[pattern] += 1
                continue
            moves, alarm = winners(plan) != winners(right), bool(plan.warnings + plan.errors)
            told[pattern] += moves and alarm
            (missed if moves else false).extend([slip] * (moves != alarm))

    assert [] == missed
    assert [] == false
    assert () == right.problems
    assert all(told.values())


@pytest.mark.parametrize("name", few(hub_models.FAMILIES, "llama"))
def test_every_missing_rule_is_reported(name):
    """Without one of its rules, each weight of that rule is named."""
    variables = specs(name)
    for number, pattern in enumerate(hub_models.rules(name), 1):
        layout_map = hub_models.rules(name)
        expected = {
            a.variable.path
            for a in make_plan(variables, layout_map).assignments
            if a.match.rule.number == number
        }
        del layout_map[pattern]

        assert expected == {p.subject for p in make_plan(variables, layout_map).problems}


@pytest.mark.parametrize("name", few(hub_models.FAMILIES, "gpt2"))
def test_a_task_has_one_plan(name):
    """Planned three times, a task has one fingerprint; many compile themselves first, and have samplers with seeds."""
    plans = [lm.plan(lambda: hub_models.make(name), hub_models.rules(name)) for _ in range(3)]

    assert [plans[0].fingerprint] * 3 == [plan.fingerprint for plan in plans]
