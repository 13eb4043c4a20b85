"""Directories of orbax: what its checkpointers write is read in blocks, without orbax."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import layoutmap as lm
from layoutmap.checkpoint.foreign import open_checkpoint_source
from layoutmap.core.errors import CheckpointError

TREE = {
    "a": {"b": jnp.arange(32.0).reshape(4, 8)},
    "list": [jnp.ones(3, jnp.bfloat16), {"x": np.int32(4)}],
    "number": 3,
    "none": None,
    "empty": {},
}
VALUES = {
    "a.b": np.arange(32, dtype="float32").reshape(4, 8),
    "list.0": np.ones(3, jnp.bfloat16),
    "list.1.x": np.asarray(4, "int32"),
    "number": np.asarray(3),
}


def bits(arrays: Any) -> dict[str, tuple[str, bytes]]:
    return {name: (str(array.dtype), array.tobytes()) for name, array in arrays.items()}


def save(path: Path, tree: Any, **options: Any) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, tree)
    return path


def test_what_orbax_saved_is_read(tmp_path: Path) -> None:
    """Arrays and numbers of a tree are read with their bits, in each of the forms that orbax has."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "standard", TREE)
    forms = [
        tmp_path / "standard",
        save(tmp_path / "folders", TREE, use_ocdbt=False),
        save(tmp_path / "zarr3", TREE, use_zarr3=True),
    ]
    found = [{n: source.read(n) for n in source.variables} for source in map(open_checkpoint_source, forms)]

    assert [bits(VALUES)] * 3 == [bits(each) for each in found]
    assert f"<Orbax {forms[0]}: 4 arrays, no checksums>" == repr(open_checkpoint_source(forms[0]))


def test_a_block_of_a_sharded_array_is_read(tmp_path: Path) -> None:
    """What orbax wrote in shards of eight devices is read in any block."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    source = open_checkpoint_source(
        save(tmp_path / "c", {"w": jax.device_put(jnp.arange(128.0).reshape(8, 16), sharding)})
    )
    values = np.arange(128, dtype="float32").reshape(8, 16)

    for index in (np.s_[0:8, 0:16], np.s_[1:5, 3:13], np.s_[7:8, 15:16], np.s_[0:0, 0:16]):
        assert values[index].tolist() == source.read("w", index).tolist()


def test_steps_of_a_manager(tmp_path: Path) -> None:
    """Of a manager's directory the last step is read, or the one that is named; items come before their paths."""
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.StandardSave({"w": jnp.zeros(2)}))
        both = {
            "model": ocp.args.StandardSave({"w": jnp.ones(2)}),
            "other": ocp.args.StandardSave({"w": jnp.ones(1)}),
        }
        manager.wait_until_finished()
    with ocp.CheckpointManager(tmp_path / "items") as manager:
        manager.save(10, args=ocp.args.Composite(**both, about=ocp.args.JsonSave({"a": 1})))
        manager.wait_until_finished()

    assert [0.0, 0.0] == open_checkpoint_source(tmp_path).read("w").tolist()
    assert [0.0, 0.0] == open_checkpoint_source(tmp_path, 5).read("w").tolist()
    assert ["model.w", "other.w"] == list(open_checkpoint_source(tmp_path / "items").variables)
    assert ["w"] == list(open_checkpoint_source(tmp_path / "items" / "10" / "model").variables)
    with pytest.raises(CheckpointError, match=r"(?s)there is no step 6.*steps  5"):
        open_checkpoint_source(tmp_path, 6)


def test_an_nnx_module_is_loaded_from_orbax(tmp_path: Path) -> None:
    """The state of a module, as orbax saves it, is loaded into a module in layouts."""
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(1))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", nnx.state(model))
    layout_map = lm.LayoutMap(
        lm.create_mesh("batch=2,model=4"), {".*kernel": (None, "model"), ".*bias": ("model",)}
    )

    found = lm.load(
        lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), tmp_path / "c", layout_map=layout_map, library="jax"
    )

    assert np.asarray(model.kernel[...]).tolist() == np.asarray(found.kernel[...]).tolist()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    """A step whose metadata or whose arrays are gone is refused with what is missing."""
    folder = save(tmp_path / "c", TREE)
    shutil.copytree(folder, tmp_path / "d")
    shutil.rmtree(folder / "d")
    shutil.rmtree(folder / "ocdbt.process_0")
    with pytest.raises(CheckpointError, match="its values cannot be read"):
        open_checkpoint_source(folder)
    (tmp_path / "d" / "_METADATA").write_text("{}")
    with pytest.raises(CheckpointError, match="the metadata cannot be read"):
        open_checkpoint_source(tmp_path / "d")
    (tmp_path / "d" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match="this orbax checkpoint has no arrays"):
        open_checkpoint_source(tmp_path / "d")
