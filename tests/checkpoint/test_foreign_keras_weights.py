"""Weight files of Keras: each block of each variable, and no values of other files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import h5py
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest

import layoutmap as lm
from layoutmap.checkpoint.foreign import open_checkpoint_source
from layoutmap.core.errors import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras's own
    pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning"),  # of weights without a rule
]


def trained() -> Any:
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, name="d1", dtype="bfloat16"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("name", ["x.weights.h5", "x.weights.json", "x.keras"])
def test_all_that_keras_saved_is_there(tmp_path: Path, name: str) -> None:
    """Weights, moving statistics, bfloat16 and slots are read as they were, of one file or several."""
    model = trained()
    sharded = {"max_shard_size": 1e-6} if name.endswith("json") else {}
    save = model.save if name.endswith(".keras") else model.save_weights
    save(tmp_path / name, **sharded)
    source = open_checkpoint_source(tmp_path / name)
    layers = ["dense"] * 2 + ["batch_normalization"] * 4 + ["dense_1"] * 2
    numbers = [0, 1, 0, 1, 2, 3, 0, 1]
    expected = {
        f"layers.{layer}.vars.{n}": np.asarray(v.value)
        for layer, n, v in zip(layers, numbers, model.weights, strict=True)
    } | {f"optimizer.vars.{n}": np.asarray(v.value) for n, v in enumerate(model.optimizer.variables)}

    assert {n: (v.dtype.name, v.shape, v.tobytes()) for n, v in expected.items()} == {
        n: (v.dtype, v.shape, source.read(n).tobytes()) for n, v in source.variables.items()
    }
    assert {"weight", "slot"} == {str(v.kind) for v in source.variables.values()}
    assert f"<KerasWeightsSource {tmp_path / name}: 22 variables, no checksums>" == repr(source)


def test_a_block_is_read_by_itself(tmp_path: Path) -> None:
    """A block has its own values, in bfloat16 as well."""
    model = trained()
    model.save_weights(tmp_path / "x.weights.h5")
    kernel = np.asarray(model.layers[0].kernel.value)

    found = open_checkpoint_source(tmp_path / "x.weights.h5").read("layers.dense.vars.0", np.s_[2:5, 8:16])

    assert (ml_dtypes.bfloat16, kernel[2:5, 8:16].tobytes()) == (found.dtype, found.tobytes())


def test_what_leads_out_of_the_file_is_refused(tmp_path: Path) -> None:
    """A link, and values that are in another file, are refused by name: a checkpoint cannot read other files."""
    for name, make in {
        "a": lambda f: f.__setitem__("vars", h5py.ExternalLink("other.h5", "/x")),
        "b": lambda f: f.create_dataset("vars/0", (3,), "f4", external=[("secret", 0, 12)]),
    }.items():
        with h5py.File(tmp_path / f"{name}.weights.h5", "w") as file:
            make(file)
    with pytest.raises(CheckpointError, match="/vars: it is a link"):
        open_checkpoint_source(tmp_path / "a.weights.h5")
    with pytest.raises(CheckpointError, match=r"vars\.0: its values are in another file"):
        open_checkpoint_source(tmp_path / "b.weights.h5")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """A truncated file, and an index that names a file that is not there, are refused with what HDF5 says."""
    trained().save_weights(tmp_path / "x.weights.json", max_shard_size=1e-6)
    (tmp_path / "x_00001.weights.h5").unlink()
    with pytest.raises(CheckpointError, match=r"x_00001\.weights\.h5: the file is missing"):
        open_checkpoint_source(tmp_path / "x.weights.json")
    file = tmp_path / "x_00000.weights.h5"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="the file cannot be read"):
        open_checkpoint_source(file)


def test_what_would_become_larger_is_refused(tmp_path: Path) -> None:
    """Neither a compressed archive is read, nor values that are compressed or not there: a KB could become a TB."""
    model = trained()
    model.save(tmp_path / "x.keras")
    with (
        zipfile.ZipFile(tmp_path / "x.keras") as there,
        zipfile.ZipFile(tmp_path / "y.keras", "w", zipfile.ZIP_DEFLATED) as other,
        zipfile.ZipFile(tmp_path / "z.keras", "w") as empty,
    ):
        for name in there.namelist():
            other.writestr(name, there.read(name))
        empty.writestr("config.json", there.read("config.json"))
    for name, how in {
        "a": {"compression": "gzip", "data": np.zeros(1 << 20)},
        "b": {"shape": (1 << 40,)},
    }.items():
        with h5py.File(tmp_path / f"{name}.weights.h5", "w") as file:
            file.create_dataset("vars/0", **how)
    refused = {
        "y.keras": "is compressed",
        "z.keras": "it has no weights",
        "a.weights.h5": r"vars\.0: its values are missing or compressed",
        "b.weights.h5": r"vars\.0: its values are missing or compressed",
    }
    for name, said in refused.items():
        with pytest.raises(CheckpointError, match=said):
            lm.load(model, tmp_path / name)


@pytest.mark.parametrize("name", ["x.weights.h5", "x.keras"])
def test_a_model_is_loaded_from_its_weight_file(tmp_path: Path, name: str) -> None:
    """A model of Keras in layouts takes its weights from a file, by Keras's places or by a table of names."""
    model = trained()
    (model.save if name.endswith(".keras") else model.save_weights)(tmp_path / name)
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {r"d1\.kernel": (None, "model")})
    table = {"d1.kernel": "layers.dense.vars.0"}
    found = lm.load(trained, tmp_path / name, layout_map=layout_map)
    how = {"layout_map": layout_map, "names": table, "missing": "keep", "extra": "ignore"}
    named = lm.load(trained, tmp_path / name, **how)

    kernel = np.asarray(model.layers[0].kernel.value).tolist()
    assert [kernel] * 2 == [np.asarray(each.layers[0].kernel.value).tolist() for each in (found, named)]
    assert ("unsharded", "model") == found.layers[0].kernel.layout.sharding_specs
    with pytest.raises(CheckpointError, match=r"this is a Keras weight file, but the model is a dict"):
        lm.load({"w": jnp.zeros(3)}, tmp_path / name)


@pytest.mark.parametrize("name", ["optimizer", "data", "missing", "extra", "cast"])
def test_what_a_weight_file_cannot_be_told_is_refused(tmp_path: Path, name: str) -> None:
    """Keras reads such a file itself, so what would have no effect is an error, and the model is as it was."""
    model = trained()
    model.save_weights(tmp_path / "x.weights.h5")
    model.layers[0].kernel.assign(model.layers[0].kernel + 1)
    expected = np.asarray(model.layers[0].kernel)
    value = {"missing": "keep", "extra": "ignore"}.get(name, True)
    with pytest.raises(
        CheckpointError, match=rf"(?s)x\.weights\.h5: {name}= has no effect.*fix  +leave the argument out"
    ):
        lm.load(model, tmp_path / "x.weights.h5", **{name: value})
    assert np.array_equal(expected, model.layers[0].kernel)
