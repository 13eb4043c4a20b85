"""Models of keras-hub under the presets of their families: made, trained, saved and restored."""

import runpy
import sys

import frameworks
import hub_models
import keras
import numpy as np
import pytest
from cases import few
from keras_models import ON_JAX, assert_held
from quiet import OF_ARRAYS

import layoutmap as lm
from layoutmap.adapters.keras import KerasAdapter, make_adapter
from layoutmap.adapters.keras.paths import find_variables

PROCESSES = ("jax", "tensorflow", "torch")
pytestmark = [
    pytest.mark.one_backend,  # the models of test_keras_contract_* have the same layers
    OF_ARRAYS,
    # Models of keras-hub compile themselves when they are loaded, with a new optimizer.
    pytest.mark.filterwarnings("ignore:`compile.*` was not called as part of model loading:UserWarning"),
    pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning"),
    # T5 of keras-hub 0.32 passes masks to its attention, which takes none.
    pytest.mark.filterwarnings("ignore:Layer '.*_attention' .* was passed an input with a mask:UserWarning"),
]
NAMES = list(hub_models.FAMILIES) if ON_JAX else ["qwen"]  # the others are quick on JAX only


def small(name, **more):
    """A model of one block, ready to train."""
    return hub_models.make(name, hub_models.TINY[name] | {"num_layers": 1} | more)


def layouts(model):
    return {path: v.layout for path, v in make_adapter().variables(model).items()}


def weights(model):
    for found in find_variables(model):
        assert_held(found.variable)
    return {found.path: found.variable.numpy() for found in find_variables(model)}


def assert_equal(expected, actual):
    assert expected.keys() == actual.keys()
    for path, value in expected.items():
        assert np.array_equal(value, actual[path]), path


@pytest.mark.parametrize("name", few([name for name in NAMES if name != "t5"], NAMES[0]))  # it takes long
def test_a_model_is_what_was_planned_and_is_restored_as_it_was(name, tmp_path):
    """Weights and slots lie where the plan says, also after loading, and have the values that were saved."""
    layout_map = hub_models.rules(name)
    plan = lm.plan(lambda: small(name), layout_map, strict=True)
    planned = {
        a.variable.path: a.layout for a in plan.assignments if a.variable.kind in ("weight", "state", "slot")
    }
    keras.utils.set_random_seed(1)
    model = layout_map.build(lambda: small(name), strict=True)
    expected = weights(model)
    assert planned.items() <= layouts(model).items()

    model.save_weights(tmp_path / "model.weights.h5")
    keras.utils.set_random_seed(2)
    other = layout_map.build(lambda: small(name), strict=True)
    other.load_weights(tmp_path / "model.weights.h5")
    assert_equal(expected, weights(other))
    assert planned.items() <= layouts(other).items()

    model.save(tmp_path / "model.keras")
    with layout_map.scope(strict=True):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_equal(expected, weights(loaded))
    assert {path: planned[path] for path in expected}.items() <= layouts(loaded).items()


if ON_JAX:
    import jax

    @pytest.fixture
    def quick_steps(monkeypatch):
        """XLA partitions a step as always, and leaves out what makes it fast: that takes most of the time."""
        plain = KerasAdapter.forward

        def forward(self, model, batch):
            jax.config.update("jax_disable_most_optimizations", True)
            return plain(self, model, batch)

        monkeypatch.setattr(KerasAdapter, "forward", forward)
        yield
        jax.config.update("jax_disable_most_optimizations", False)

    # benchmarks/hub.py tries every family both ways.
    WAYS = {name: {"fsdp_dim": "batch"} if name in ("llama", "t5") else {} for name in NAMES}
    # Gemma 2B has one head of keys and values, which no mesh divides: it is left whole.
    ONE_HEAD = {"gemma": {"num_key_value_heads": 1}}

    @pytest.mark.long  # that a model trains as on one device is a law of the contract
    @pytest.mark.parametrize("name", WAYS)
    @pytest.mark.usefixtures("quick_steps")
    def test_three_steps_give_the_numbers_of_one_device(name):
        """First weights bit for bit; outputs, gradients, losses, weights and slots of three steps within 1e-5."""
        report = lm.check_parity(
            lambda: small(name, **ONE_HEAD.get(name, {})),
            hub_models.rules(name, **WAYS[name]),
            hub_models.batch(name),
            batch_dim="batch",
        )
        plain = [loss for loss, _ in report.losses]

        assert 0.0 == report.worst("weights")
        assert report.worst() < 1e-5
        assert sorted(plain, reverse=True) == plain

    def test_the_example_runs(monkeypatch, capsys):
        """It shows the slip, the plan and the losses."""
        example = str(frameworks.ROOT / "examples" / "train_hub_llama.py")
        monkeypatch.setattr(sys, "argv", [example, "--steps", "2"])
        runpy.run_path(example, run_name="__main__")
        shown = capsys.readouterr().out

        assert "transformer_layer_0.feedforward_gate_dense.kernel: no rule matches" in shown
        assert "no problems" in shown
        assert "step   2   mean loss" in shown
