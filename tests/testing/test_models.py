"""A drawn case is a text that needs no framework, runs as it is printed, and shrinks; test_models_*.py has the rest."""

import os
import subprocess
import sys
from dataclasses import replace

import forked
import pytest
from cases import examples, few, xla_settings
from testing.drawn_kinds import smallest_with

from layoutmap.core.variables import Kind
from layoutmap.plan.lint.inferred_roles import infer_axis_roles
from layoutmap.testing import models

PROCESSES = ("jax", "torch")
HERE = os.environ.get("LAYOUTMAP_TEST_PROCESS") or "jax"
LIBRARIES = {"jax": ("keras", "nnx", "pytree"), "torch": ("torch",)}[HERE]
PROGRAMS = {"keras": 5, "nnx": 44, "pytree": 12, "torch": 17}
"""The seeds of some small models."""
SHRUNK = {
    "keras": ("LSTM", 2000),
    "nnx": ("RNN", 500),
    "pytree": ("eqx.Conv", 500),
    "torch": ("LayerNorm", 200),
}
"""A kind of layer, and how many models are looked at."""
DRAWN = """
import sys
from layoutmap.testing import models
for library in {}:
    models.draw_model(3, library).make_code("sgd")
print(sorted({{"keras", "jax", "torch"}} & set(sys.modules)))
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_drawing_needs_no_framework(library):
    """A model is a text until its case is made; Keras alone is asked for its layers."""
    drawn = [] if library == "keras" else [library]
    run = subprocess.run([sys.executable, "-c", DRAWN.format(drawn)], capture_output=True, text=True)

    assert (0, "[]\n") == (run.returncode, run.stdout), run.stderr


@pytest.mark.every_case
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_seed_gives_the_same_case_for_ever(library):
    """Whatever was drawn and built before it."""
    program = str(models.draw(5, library))
    models.draw(6, library).make_model()

    assert program == str(models.draw(5, library))


@pytest.mark.parametrize("library", few(LIBRARIES, LIBRARIES[-1]))
def test_a_case_is_a_program(library):
    """It runs without this package's tests, and says whether parity holds."""
    run = forked.run(str(models.draw(PROGRAMS[library], library)), environment=xla_settings(8))

    assert run.stdout.startswith("parity holds"), run.stderr


@pytest.mark.parametrize("library", few(LIBRARIES, LIBRARIES[-1]))
def test_cases_shrink(library):
    """What fails is found in a model of few layers."""
    model = smallest_with(SHRUNK[library][0], library, SHRUNK[library][1])
    layers = {
        "keras": lambda: model.layers,
        "torch": lambda: [part for each in model.classes for part in each.parts],
    }

    assert len(layers.get(library, lambda: model.lines)()) <= (3 if library in layers else 4)


@pytest.mark.parametrize("library", [each for each in LIBRARIES if each != "pytree"])
def test_inferred_roles_are_those_of_the_library(library):
    """Roles that lint infers from names and shapes are what the adapter knows, or stay unknown."""
    for seed in range(20261201000, 20261201000 + examples(100)):
        weights = [a.variable for a in models.draw(seed, library).plan().assignments]
        weights = [v for v in weights if v.kind is Kind.WEIGHT]
        inferred = infer_axis_roles(tuple(replace(v, use=None) for v in weights))
        for v in weights:
            if v.key in inferred and v.use is not None and len(v.shape) > 1:
                pairs = zip(v.use.roles, inferred[v.key].use.roles, strict=True)
                # An axis such as the rank of LoRA is never sharded, and so has no role.
                known = [(role, found) for role, found in pairs if role]
                assert all(role[:2] == found[:2] for role, found in known), (seed, v.path, v.shape)
