"""Presets of keras-hub, from a directory into layouts: what is read, generated, trained, adapted and quantized."""

import hub_models
import keras
import keras_hub
import numpy as np
import pytest
from cases import few
from keras_models import assert_held, is_traced

import layoutmap as lm
from layoutmap.adapters.keras.paths import find_variables

PROCESSES = ("jax", "tensorflow", "torch")
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
pytestmark = [
    pytest.mark.one_backend,  # the models of test_keras_contract_* have the same layers
    # Keras 3.15's own variables know only the older form of __array__.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning"),
    pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning"),  # what torch gathers to compute
]
BACKBONE = hub_models.DECODER | {"num_layers": 1}
TOKENS = np.random.default_rng(0).integers(1, hub_models.VOCABULARY, (4, 8), "int32")
MASK = np.ones_like(TOKENS)


@pytest.fixture(scope="module")
def presets(tmp_path_factory):
    """The directories of a task and of its backbone, whose weights are in one file and in several."""
    folder = tmp_path_factory.mktemp("presets")
    keras.utils.set_random_seed(1)
    task = keras_hub.models.Llama3CausalLM(keras_hub.models.Llama3Backbone(**BACKBONE), preprocessor=None)
    task.save_to_preset(folder / "one")
    task.backbone.save_to_preset(folder / "several", max_shard_size=1e-5)
    assert (folder / "several" / "model.weights.json").exists()
    return folder


def load(folder):
    """A task, from numbers that are equal each time."""
    keras.utils.set_random_seed(2)
    task = keras_hub.models.CausalLM.from_preset(str(folder), preprocessor=None)
    task.compile(keras.optimizers.SGD(0.1, momentum=0.9), sampler="greedy")
    return task


def in_layouts(folder, change=lambda task: None, **options):
    with hub_models.rules("llama").scope(batch_dim="batch", **options) as scope:
        task = load(folder)
        change(task)
    return task, scope.plan


def generated(task):
    """The tokens that follow those of a prompt."""
    prompt = {
        "token_ids": np.pad(TOKENS[:, :4], ((0, 0), (0, 6))),
        "padding_mask": np.pad(MASK[:, :4], ((0, 0), (0, 6))),
    }
    return task.generate(prompt, stop_token_ids=None)["token_ids"]


def trained(task):
    """The losses of two steps."""
    inputs = {"token_ids": TOKENS, "padding_mask": MASK}
    return task.fit(inputs, np.roll(TOKENS, -1, 1), batch_size=2, shuffle=False, verbose=0).history["loss"]


def assert_same(plain, task, tolerance=0.0):
    for ours, theirs in zip(find_variables(task), find_variables(plain), strict=True):
        assert_held(ours.variable)
        error = np.abs(ours.variable.numpy().astype("float64") - theirs.variable.numpy().astype("float64"))
        assert error.max(initial=0.0) <= tolerance, ours.path


@pytest.fixture
def draws(monkeypatch):
    """How often an initializer runs."""
    drawn = []

    def noted(value):
        if not is_traced(value):  # as Keras does to find out shapes
            drawn.append(value)
        return value

    for kind in {
        kind for kind in vars(keras.initializers).values() if "__call__" in getattr(kind, "__dict__", {})
    }:
        plain = kind.__call__
        monkeypatch.setattr(kind, "__call__", lambda *a, plain=plain, **k: noted(plain(*a, **k)))
    return drawn


@pytest.mark.parametrize("name", few(("several", "one"), "several"))
def test_a_preset_is_read_straight_into_its_layouts(name, presets, draws):
    """No initializer runs; each weight has the values of the file, in the layout that a plan of the preset says."""
    planned = lm.plan(lambda: load(presets / name), hub_models.rules("llama"), strict=True)
    task, plan = in_layouts(presets / name, strict=True)

    assert [] == draws
    assert {path: planned[path].layout for path in plan} == {path: a.layout for path, a in plan.items()}
    assert ("model", "unsharded") == task.backbone.token_embedding.embeddings.layout.sharding_specs
    assert_same(load(presets / name), task)
    assert [] != draws


if ON_TENSORFLOW:

    @pytest.mark.long
    def test_generate_is_refused(presets):
        """DTensor cannot update a cache: the error says so by the name of the task, before anything is compiled."""
        task, _ = in_layouts(presets / "one")
        with pytest.raises(lm.EngineError, match=r"causal_lm.*: generate cannot run") as refused:
            generated(task)
        assert "fix" in str(refused.value)

else:

    @pytest.mark.long
    def test_a_task_generates_the_tokens_of_one_device(presets):
        """The tokens of `generate`, in a scope's layouts and plainly, are equal."""
        assert generated(load(presets / "one")).tolist() == generated(in_layouts(presets / "one")[0]).tolist()

    @pytest.mark.long
    @pytest.mark.parametrize("when", ["in", "after"])
    def test_a_task_in_int8_generates_the_tokens_of_one_device(when, presets, tmp_path):
        """Quantized in the scope or after it: the integers, their scales and the tokens are those of one device."""

        def quantize(task):
            task.quantize("int8")

        plain = load(presets / "one")
        quantize(plain)
        task, _ = in_layouts(presets / "one", *([quantize] if when == "in" else []))
        if when == "after":
            quantize(task)
        dense = task.backbone.transformer_layers[0]._feedforward_gate_dense

        assert ("int8", ("unsharded", "model")) == (dense._kernel.dtype, dense._kernel.layout.sharding_specs)
        assert ("model",) == dense.kernel_scale.layout.sharding_specs
        assert_same(plain, task)
        assert generated(plain).tolist() == generated(task).tolist()
        task.save_to_preset(tmp_path)
        assert_same(plain, in_layouts(tmp_path)[0])


def lora(task):
    keras.utils.set_random_seed(3)
    task.backbone.enable_lora(2)


@pytest.mark.long
@pytest.mark.parametrize("change", ["nothing", "lora in the scope", "lora after the scope"])
def test_a_task_trains_as_on_one_device(change, presets):
    """`fit` of all weights, or of LoRA's factors alone, gives the losses and the weights of one device."""
    plain = load(presets / "one")
    task, _ = in_layouts(presets / "one", *([lora] if "in the" in change else []))
    for each in (plain, task) if "after" in change else (plain,) if "in the" in change else ():
        lora(each)
    factors = {
        f.path.rpartition(".")[2]: f.variable.layout.sharding_specs
        for f in find_variables(task)
        if "query" in f.path
    }
    np.testing.assert_allclose(trained(plain), trained(task), rtol=1e-5)

    assert_same(plain, task, 1e-5)
    if change != "nothing":
        assert ("unsharded", "model", "unsharded") == factors["lora_kernel_a"]
        assert ("unsharded", "unsharded") == factors["lora_kernel_b"]
        assert 4 == len(task.trainable_variables)
        assert {True} == {"lora" in v.name for v in task.trainable_variables}


@pytest.mark.long
def test_a_new_head_on_a_preset_is_that_of_one_device(tmp_path):
    """Of a classifier on a backbone's preset the backbone is read and its head initialized, both as plainly."""
    backbone = keras_hub.models.BertBackbone(**hub_models.TINY["bert"] | {"num_layers": 1})
    backbone.save_to_preset(tmp_path)

    def make():
        keras.utils.set_random_seed(3)
        return keras_hub.models.TextClassifier.from_preset(str(tmp_path), num_classes=4, preprocessor=None)

    assert_same(make(), hub_models.rules("bert").build(make))
