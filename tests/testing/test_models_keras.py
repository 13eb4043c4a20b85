"""Drawn models are models, each kind and each pair of kinds of layers comes, and what is printed runs."""

import re
from collections import Counter

import keras
import pytest
from testing.drawn_kinds import counted, layouts_not_drawn, pairs_not_drawn

from layoutmap.testing import models
from layoutmap.testing.models.keras.layers import KINDS

PROCESSES = ("jax",)


def test_every_kind_and_every_pair_of_kinds_is_drawn():
    """Of 4,000 models none lacks, however many axes a layer has."""
    drawn = [models.draw_model(seed) for seed in range(4000)]
    kinds, pairs = counted({re.sub(r"\dD", "*D", kind) for kind in model.layer_kinds} for model in drawn)

    assert set(KINDS) < set(kinds)
    assert [] == pairs_not_drawn(kinds, pairs)
    assert min(Counter(model.style for model in drawn).values()) > 400


@pytest.mark.long
def test_every_kind_of_layout_is_drawn_for_every_kind_of_layer():
    """Weights of several axes are replicated, and sharded over one dim, two, and two along one axis."""

    def kinds_by_path(model):
        named = model.layers if model.named else []
        return {model.get_layer_path(layer.name): re.sub(r"\dD", "*D", layer.kind) for layer in named}

    assert [] == layouts_not_drawn(map(models.draw, range(800)), kinds_by_path)


@pytest.mark.parametrize("seed", range(8))
def test_outputs_have_the_shapes_that_are_described(seed):
    """So do targets, which a loss would broadcast without a word."""
    case = models.draw(seed)
    model, made = case.model, case.make_model()
    if model.is_subclassed:
        inputs = [keras.Input(each.shape, dtype="int32" if each.classes else None) for each in model.inputs]
        outputs = made(inputs if len(inputs) > 1 else inputs[0])
    else:
        outputs = made.outputs

    expected = [(*each.shape, each.classes) if each.classes else each.shape for each in model.outputs]
    assert expected == [each.shape[1:] for each in keras.tree.flatten(outputs)]
