"""Keras on TensorFlow trains in layouts as on one device: some of the cases of `benchmarks/parity.py`.

That drawn models train is a law of the other backends alone: DTensor refuses some layouts only in the step. It compiles
slowly, so each optimizer meets a model once or twice here; the benchmark runs all of them on all meshes.
"""

import parity
import pytest
from cases import few

PROCESSES = ("tensorflow",)
MESHES = ("model=8", "batch=2,model=4", "batch=4,model=2")
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "adafactor", "lion", "muon")
CASES = [("embedding", optimizer, MESHES[i % 3]) for i, optimizer in enumerate(OPTIMIZERS)]
CASES += [("mlp", optimizer, MESHES[(i + 1) % 3]) for i, optimizer in enumerate(OPTIMIZERS)]
CASES += [("transformer", "adamw", "model=8"), ("transformer", "muon", "batch=2,model=4")]


@pytest.mark.parametrize(("model", "optimizer", "mesh"), few(CASES, ("embedding", "adam", "batch=2,model=4")))
def test_three_steps_give_the_numbers_of_one_device(model, optimizer, mesh):
    """First weights bit for bit; outputs, gradients, losses and weights of three steps within 1e-5."""
    report = parity.check(model, optimizer, mesh)

    assert report.agrees
    assert 0.0 == report.worst("weights")
    assert max(abs(plain - ours) for plain, ours in report.losses) <= 1e-5


def test_the_cases_are_all_optimizers():
    """An optimizer that is added to the benchmark is tested here."""
    assert set(OPTIMIZERS) == set(parity.optimizers())
