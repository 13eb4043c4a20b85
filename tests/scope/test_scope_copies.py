"""What a scope and a plan know of a model is fixed when they are made: the rules, and which weights are trained."""

from __future__ import annotations

import os
from typing import Any

import pytest

import layoutmap as lm
from layoutmap.scope.plan import Plan

PROCESSES = ("jax", "tensorflow", "torch")
RUNNING = os.environ.get("LAYOUTMAP_TEST_PROCESS", "")
LIBRARIES = ("keras", "torch") if RUNNING == "torch" else ("keras",)
MESH = lm.Mesh(None, "batch=2,model=4")


def half_frozen(library):
    """A model with two weights of 64 x 64 and their biases, the first pair of them frozen."""
    if library == "torch":
        import torch

        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        model[0].requires_grad_(False)
        return model
    import keras

    layers = [keras.layers.Dense(64, name=name) for name in ("0", "1")]
    model = keras.Sequential([keras.Input((64,)), *layers])
    layers[0].trainable = False
    return model


def with_lora(library):
    """A weight of 64 x 64 that is frozen, with factors of rank 2 that are trained, and a bias that is trained."""
    if library == "torch":
        import torch

        class Lora(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.base = torch.nn.Linear(64, 64)
                self.base.weight.requires_grad_(False)
                self.a = torch.nn.Parameter(torch.zeros(2, 64))
                self.b = torch.nn.Parameter(torch.zeros(64, 2))

        return Lora()
    import keras

    layer = keras.layers.Dense(64, name="base")
    model = keras.Sequential([keras.Input((64,)), layer])
    layer.enable_lora(2)
    return model


@pytest.mark.parametrize("library", LIBRARIES)
def test_only_what_is_trained_has_gradients(library):
    """A frozen weight has no gradient, LoRA's kernel neither; the plan's file says so too."""
    frozen = lm.plan(lambda: half_frozen(library), lm.LayoutMap(MESH), library=library)
    lora = lm.plan(lambda: with_lora(library), lm.LayoutMap(MESH), library=library)

    for plan, trained, state in ((frozen, 64 * 64 + 64, 64 * 64 + 64), (lora, 2 * 2 * 64 + 64, 64 * 64)):
        for memory in (plan.memory, Plan.from_json(plan.to_json()).memory):
            assert (4 * trained, 4 * trained, 4 * state) == (memory.weights, memory.gradients, memory.state)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_scope_works_with_the_rules_as_they_were(library):
    """A map that is changed after its scope was opened changes nothing of what was built in it, nor of its slots."""
    pattern = r".*1\.(kernel|weight)$"
    rest = {r".*bias$": (None,), r".*0\.(kernel|weight)$": (None, None)}
    layout_map = lm.LayoutMap(MESH, {pattern: (None, "model"), **rest})
    with layout_map.scope(library=library) as opened:
        model: Any = half_frozen(library)
        del layout_map[pattern]
        layout_map[pattern] = ("model", None)
    before = {a.variable.path: a.layout for a in opened.plan.assignments}
    if library == "keras":
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        held = {a.variable.path: a.layout for a in opened.plan.assignments if a.variable.path in before}
        slots = [a.layout for a in opened.plan.assignments if a.variable.parent == "1.kernel"]
        assert [lm.Layout([None, "model"], MESH)] * 2 == slots
    else:
        held = {path: lm.dtensor.fetch_layout(p) for path, p in model.named_parameters()}

    assert lm.Layout([None, "model"], MESH) in before.values()
    assert before == held
    assert lm.Layout(["model", None], MESH) == layout_map["1.kernel"]
