"""Drawn models of JAX are models, each kind and each pair of kinds of layers comes, and what is printed runs."""

import re
from collections import Counter

import jax
import pytest
from cases import few
from testing.drawn_kinds import counted, layouts_not_drawn, pairs_not_drawn

from layoutmap.adapters.jax.training import call_model, get_batch_inputs
from layoutmap.testing import models
from layoutmap.testing.models.jax.drawing import WRAPPERS
from layoutmap.testing.models.jax.functions import FUNCTIONS

PROCESSES = ("jax",)
LIBRARIES = ("nnx", "pytree")


@pytest.mark.every_case
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_kind_and_every_pair_of_kinds_is_drawn(library):
    """Of 6,000 models none lacks, alone or with something around it."""
    drawn = [models.draw_model(seed, library) for seed in range(6000)]
    kinds, pairs = counted({*model.layer_kinds} for model in drawn)

    assert {*FUNCTIONS, *WRAPPERS} - {""} < {*kinds}
    assert [] == pairs_not_drawn(kinds, pairs)
    assert (
        min(Counter(kind for model in drawn for kind in kinds_of_containers(model.parameters)).values()) > 400
    )


def kinds_of_containers(held):
    inner = (item for _, item in held.items if not isinstance(item, str))
    return {held.kind, *(kind for each in inner for kind in kinds_of_containers(each))}


@pytest.mark.long
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_kind_of_layout_is_drawn_for_every_kind_of_layer(library):
    """Weights of several axes are replicated, and sharded over one dim, two, and two along one axis."""

    def kinds_by_path(model):
        return {
            model.layer_paths[name]: line.kinds[0]
            for line in reversed(model.lines)
            for name in re.findall(r"{(l\d+)}", line.call)
            if line.kinds
        }

    assert [] == layouts_not_drawn((models.draw(seed, library) for seed in range(1200)), kinds_by_path)


@pytest.mark.parametrize("seed", few(range(16), 0, 1, 2, 3))
@pytest.mark.parametrize("library", LIBRARIES)
def test_outputs_have_the_shapes_that_are_described(library, seed):
    """So do targets, which a loss would broadcast without a word."""
    case = models.draw(seed, library)

    def outputs():
        state = case.make_model()
        return call_model(state.model, state.forward, get_batch_inputs(case.batch))

    expected = [
        (case.rows, *each.shape, *([each.classes] * bool(each.classes))) for each in case.model.outputs
    ]
    assert expected == [each.shape for each in jax.tree.leaves(jax.eval_shape(outputs))]
