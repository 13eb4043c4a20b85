"""Streams of weights of JAX models between layouts and kinds of models, and to a torch process and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forked
import jax
import keras
import keras_hub
import numpy as np
import pytest
from adapters.jax_models import RULES, Language, make_dict
from flax import nnx
from safetensors.numpy import load_file
from streams import exchange, record, replay, send

import layoutmap as lm
from layoutmap.core.errors import CheckpointError

PROCESSES = ("jax",)
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")

WORKER = Path(__file__).with_name("stream_torch_process.py")


def make_keras(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, name="up"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.5, name="drop"),
            keras.layers.Dense(4, name="down", dtype="bfloat16"),
        ]
    )
    for variable in model.weights:
        variable.assign(keras.random.normal(variable.shape, seed=seed))
    return model


MODELS: dict[str, Any] = {
    "keras": (make_keras, {r".*\.kernel": ("model", None)}),
    "nnx": (lambda seed: Language(nnx.Rngs(seed)), RULES["language"]),
    "pytree": (lambda seed: jax.tree.map(lambda leaf: leaf * (1 + seed), make_dict()), RULES["dict"]),
}


def read(model: Any) -> dict[str, Any]:
    return {name: np.asarray(array) for name, array in lm.stream(model)}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name, array in one.items():
        assert (array.dtype, array.shape) == (other[name].dtype, other[name].shape)
        assert array.tobytes() == other[name].tobytes(), name


@pytest.mark.every_case
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_in_other_layouts_receives_all_weights(kind: str, tmp_path: Path) -> None:
    """Values are those of the unsharded model, over sockets and folders; an immutable model comes back as a copy."""
    make, rules = MODELS[kind]
    library = "keras" if kind == "keras" else "jax"
    layout_map = lm.LayoutMap("batch=2,model=4", rules, rest="replicated")
    trainer = layout_map.build(lambda: make(0), library=library)
    plain = make(0)
    assert_equal(read(plain), read(trainer))
    sampler = lm.LayoutMap("batch=1,model=2", rules, rest="replicated").build(
        lambda: make(1), library=library
    )
    before = read(sampler)
    received = send(lm.stream(trainer), sampler)
    assert (received is sampler) == (kind != "pytree")
    assert_equal(read(plain), read(received))
    if kind == "pytree":
        assert_equal(before, read(sampler))
    again, errors = exchange(lm.stream(trainer), lambda: lm.receive(make(2), tmp_path), tmp_path)
    assert not errors
    assert_equal(read(plain), read(again))


@pytest.mark.every_case
@pytest.mark.parametrize("kind", MODELS)
def test_a_damaged_stream_changes_no_model(kind: str) -> None:
    make, _ = MODELS[kind]
    data, _ = record(lm.stream(make(0)))
    model = make(1)
    before = read(model)
    for part in data[:-1], data[: len(data) // 2], data[:-100] + b"x" + data[-99:]:
        error, _ = replay(part, model)
        assert isinstance(error, CheckpointError)
        assert_equal(before, read(model))


def test_a_compiled_model_keeps_its_optimizer() -> None:
    """Slots are no weights: they are not sent, and those of the receiver are as they were."""
    trainer, sampler = make_keras(0), make_keras(1)
    for model in (trainer, sampler):
        model.compile("adam", "mse")
        model.train_on_batch(np.ones((2, 8), "float32"), np.ones((2, 4), "float32"))
    slots = [np.asarray(each) for each in sampler.optimizer.variables]
    send(lm.stream(trainer), sampler)
    assert_equal(read(trainer), read(sampler))
    assert all(
        np.array_equal(one, each) for one, each in zip(slots, sampler.optimizer.variables, strict=True)
    )


def test_arrays_are_copies() -> None:
    """A consumer that changes what it got changes no weight."""
    model = make_keras(0)
    before = read(model)
    for _, array in lm.stream(model):
        array[...] = 0
    assert_equal(before, read(model))


def test_a_llama_goes_to_torch_and_comes_back(tmp_path: Path) -> None:
    """keras-hub's model in layouts on JAX, and a plain one of transformers in another process; bit for bit."""
    options: dict[str, Any] = {
        "vocabulary_size": 64,
        "num_layers": 2,
        "hidden_dim": 32,
        "intermediate_dim": 64,
    }
    heads: dict[str, Any] = {"num_query_heads": 8, "num_key_value_heads": 4}
    rules = {
        r".*(query|key|value)_dense\.kernel": (None, "model", None),
        r".*intermediate_dense\.kernel": (None, "model"),
    }
    layout_map = lm.LayoutMap("batch=2,model=4", rules, rest="replicated")
    backbone: Any = keras_hub.models.Llama3Backbone  # its head is a matrix of its own
    model = layout_map.build(lambda: backbone(**options, **heads), library="keras")
    other = forked.start(WORKER, [str(tmp_path)], {})
    lm.stream(model, names="llama").write(tmp_path / "there", timeout_seconds=200)
    lm.export(model, tmp_path / "expected", names="llama")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    lm.receive(model, tmp_path / "back", names="llama", timeout_seconds=200)
    [ended] = forked.wait_for_all([other])
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert_equal(
        dict(sorted(expected.items())),
        dict(sorted(load_file(tmp_path / "received" / "model.safetensors").items())),
    )
    assert_equal({name: -array for name, array in expected.items()}, dict(lm.stream(model, names="llama")))


def test_the_checkpoint_names_of_keras_models_are_not_known() -> None:
    with pytest.raises(CheckpointError, match="Sequential has no checkpoint format"):
        lm.stream(make_keras(0), names="checkpoint")
