"""A checkpoint of another model is refused with all differences, and the model stays as it was; Ctrl-C in a save."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters.interrupts import Interrupter
from checkpoint.saves import names_in
from flax import nnx

import layoutmap as lm
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.core.errors import CheckpointError

PROCESSES = ("jax",)

FILES = ("checkpoint/step_writer.py", "saving/save.py", "saving/manager.py")


class Block(nnx.Module):
    def __init__(self, *, names: tuple[str, ...], width: int, dtype: Any, seed: int):
        rngs = nnx.Rngs(seed)
        for name in names:
            setattr(self, name, nnx.Linear(4, width, param_dtype=dtype, rngs=rngs))


def make(
    names: tuple[str, ...] = ("query", "value"), width: int = 4, dtype: Any = jnp.float32, seed: int = 0
) -> Block:
    return Block(names=names, width=width, dtype=dtype, seed=seed)


def values_of(model: Block) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


OTHERS = {
    "renamed": (
        {"names": ("queries", "value")},
        {
            "queries.bias": "not in the checkpoint; it has query.bias",
            "queries.kernel": "not in the checkpoint; it has query.kernel",
            "query.bias": "in the checkpoint, but not in the model",
            "query.kernel": "in the checkpoint, but not in the model",
        },
    ),
    "extra": (
        {"names": ("query",)},
        {
            "value.bias": "in the checkpoint, but not in the model",
            "value.kernel": "in the checkpoint, but not in the model",
        },
    ),
    "missing": (
        {"names": ("query", "value", "gate")},
        {"gate.bias": "not in the checkpoint", "gate.kernel": "not in the checkpoint"},
    ),
    "shape": (
        {"width": 6},
        {
            **{f"{name}.bias": "shape (6,), in the checkpoint (4,)" for name in ("query", "value")},
            **{f"{name}.kernel": "shape (4, 6), in the checkpoint (4, 4)" for name in ("query", "value")},
        },
    ),
    "dtype": (
        {"dtype": jnp.bfloat16},
        {
            f"{name}.{part}": "dtype bfloat16, in the checkpoint float32"
            for name in ("query", "value")
            for part in ("bias", "kernel")
        },
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_checkpoint_of_another_model_is_refused(tmp_path: Path, other: str) -> None:
    """All variables that differ are named at once, with the nearest names; the model that exists keeps its values."""
    lm.save(make(), tmp_path)
    arguments, expected = OTHERS[other]
    model = make(**arguments, seed=1)
    before = values_of(model)
    with pytest.raises(CheckpointError) as error:
        lm.load(model, tmp_path)

    lines = str(error.value).splitlines()
    assert f"{tmp_path}/step-0: the checkpoint does not match this model" == lines[0]
    rows = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in lines[1:]}
    assert expected == {name: text for name, text in rows.items() if name not in ("why", "fix")}
    assert f"{len(expected)} variables differ; nothing was loaded" == rows["why"]
    assert all(np.array_equal(a, b) for a, b in zip(before, values_of(model), strict=True))


def make_blocks(*names: str) -> dict[str, Any]:
    """Return a model with two layers in each of three blocks, which differ in a number only."""
    return {"h": [{name: {"kernel": np.full((4, 4), n, np.float32)} for name in names} for n in range(3)]}


@pytest.mark.parametrize("names", [("up", "fc2"), ("fc1", "fc3"), ("fc1", "up")], ids="-".join)
def test_a_renamed_layer_is_compared_with_that_of_the_same_block(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    """Of the layers that only the checkpoint has, not of others that differ in a number."""
    lm.save(make_blocks("fc1", "fc2"), tmp_path)
    ((new, old),) = ((new, old) for new, old in zip(names, ("fc1", "fc2"), strict=True) if new != old)
    with pytest.raises(CheckpointError) as error:
        lm.load(make_blocks(*names), tmp_path)

    assert {f"h.{n}.{new}.kernel": f"not in the checkpoint; it has h.{n}.{old}.kernel" for n in range(3)} == {
        path: text for path, text in error.value.facts.items() if "it has" in str(text)
    }


def test_the_fix_for_a_renamed_layer_is_a_name_table_that_loads_it(tmp_path: Path) -> None:
    """The counterpart has the same shape, though another name is more similar."""
    up, down = np.ones((4, 8), np.float32), np.ones((8, 4), np.float32)
    lm.save({"up.kernel": up, "down.kernel": down}, tmp_path)
    model = {"wide.kernel": np.zeros_like(up), "narrow.kernel": np.zeros_like(down)}
    with pytest.raises(CheckpointError) as error:
        lm.load(model, tmp_path)
    (names,) = re.findall(r"names=(\{.*?\})", error.value.fix)
    loaded = lm.load(model, tmp_path, names=ast.literal_eval(names))

    assert {"wide.kernel": "up.kernel", "narrow.kernel": "down.kernel"} == ast.literal_eval(names)
    assert np.array_equal(up, loaded["wide.kernel"])


def test_lines_of_a_name_table_that_match_nothing_are_named(tmp_path: Path) -> None:
    """Such as those of a table the wrong way around."""
    lm.save({"up": np.ones(4, np.float32)}, tmp_path)
    with pytest.raises(CheckpointError) as error:
        lm.load({"wide": np.ones(4, np.float32)}, tmp_path, names={"up": "wide"})

    assert (
        "matches no path of the model; a line is path of the model: name in the checkpoint"
        == (error.value.facts["names 'up'"])
    )


def test_a_name_table_may_swap_names(tmp_path: Path) -> None:
    """Each of two layers gets the values that the other one had."""
    model = {"a": np.zeros(4, np.float32), "b": np.ones(4, np.float32)}
    lm.save(model, tmp_path)
    loaded = lm.load(
        {name: np.full(4, 2, np.float32) for name in model}, tmp_path, names={"a": "b", "b": "a"}
    )

    assert {"a": [1.0] * 4, "b": [0.0] * 4} == {name: [*map(float, array)] for name, array in loaded.items()}


@pytest.mark.parametrize("name", ["data-00000.safetensors", "manifest.json"])
def test_a_damaged_step_changes_nothing(tmp_path: Path, name: str) -> None:
    """Whichever of some bits is flipped, a model that exists keeps all of its values."""
    lm.save(make(), tmp_path)
    file = tmp_path / "step-0" / name
    data = bytearray(file.read_bytes())
    model = make(seed=1)
    before = values_of(model)
    for place in range(len(data) - 1, max(0, len(data) - 160), -7):
        data[place] ^= 1 << place % 8
        file.write_bytes(data)
        with pytest.raises(CheckpointError):
            lm.load(model, tmp_path)
        assert all(np.array_equal(a, b) for a, b in zip(before, values_of(model), strict=True))
        data[place] ^= 1 << place % 8
    file.write_bytes(data)
    lm.load(model, tmp_path)
    assert all(np.array_equal(a, b) for a, b in zip(values_of(make()), values_of(model), strict=True))


@pytest.mark.parametrize(("how", "times"), [({}, 1), ({"room_bytes": 0}, 2), ({"verify": "while"}, 1)])
def test_what_has_no_room_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], times: int
) -> None:
    """What is compared before a model changes is kept up to a limit, and read again beyond it."""
    lm.save(make(), tmp_path)
    data = tmp_path / "step-0" / "data-00000.safetensors"
    header = 8 + int.from_bytes(data.read_bytes()[:8], "little")
    read, counts = LocalStorage.read_file_into, list[int]()

    def counted(self: LocalStorage, folder: str, name: str, start: int, buffer: memoryview) -> int:
        counts.append(0 if name == "manifest.json" else len(buffer))
        return read(self, folder, name, start, buffer)

    monkeypatch.setattr(LocalStorage, "read_file_into", counted)
    loaded = values_of(lm.load(make(seed=1), tmp_path, **how))

    assert all(np.array_equal(a, b) for a, b in zip(values_of(make()), loaded, strict=True))
    assert times * (data.stat().st_size - header) == sum(counts)


def test_a_damaged_step_is_found_while_it_is_loaded(tmp_path: Path) -> None:
    """With verify="while" nothing is read twice, a flipped bit is found, and the error says what the model is then."""
    lm.save(make(), tmp_path)
    file = tmp_path / "step-0" / "data-00000.safetensors"
    data = bytearray(file.read_bytes())
    loaded = values_of(lm.load(make(seed=1), tmp_path, verify="while"))
    assert all(np.array_equal(a, b) for a, b in zip(values_of(make()), loaded, strict=True))

    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        lm.load(make(seed=1), tmp_path, verify="while")
    assert "its values differ from the saved ones" in error.value.what
    assert error.value.why.endswith("; the model may have been loaded in part, and must not be used")


def test_nothing_is_verified_where_others_see_to_it(tmp_path: Path) -> None:
    """With verify="no" a flipped bit is a value like others; a file of another length is refused all the same."""
    lm.save(make(), tmp_path)
    file = tmp_path / "step-0" / "data-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    loaded = values_of(lm.load(make(seed=1), tmp_path, verify="no"))
    changed = [not np.array_equal(a, b) for a, b in zip(values_of(make()), loaded, strict=True)]
    file.write_bytes(data[:-1])

    assert 1 == sum(changed)
    with pytest.raises(CheckpointError, match="the size of the file has changed"):
        lm.load(make(seed=1), tmp_path, verify="no")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"verify": "later"}, "verify='later': this value is not allowed"),
        ({"missing": "kepp"}, "missing='kepp': this value is not allowed"),
        ({"extra": "keep"}, "extra='keep': this value is not allowed"),
        ({"batch_dim": "batch"}, "load: batch_dim= has no effect without layout_map="),
        (
            {"layout_map": lm.LayoutMap("model=4")},
            "load: Block is a model, and layout_map= needs a function",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    """A misspelled choice, and an argument of another way to load, are errors that say so; nothing is loaded."""
    lm.save(make(), tmp_path)
    model = make(seed=1)
    expected = values_of(model)
    with pytest.raises(CheckpointError, match=text):
        lm.load(model, tmp_path, **options)
    assert all(map(np.array_equal, expected, values_of(model)))


@pytest.mark.parametrize("step", [-1, True, 1.5, "3", None, 10**18, np.float32(2)])
def test_what_is_no_step_is_refused(tmp_path: Path, step: Any) -> None:
    """A number that cannot be a step is refused by name, and nothing is written."""
    with pytest.raises(CheckpointError) as error:
        lm.save(make(), tmp_path / "new", step=step)

    assert f"step={step!r} is not a step number" == str(error.value).splitlines()[0]
    assert [] == names_in(tmp_path)


def test_an_interrupt_before_any_line_of_a_save_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C before any line of `save`, of a manager's too, leaves the directory as it was or the step complete."""
    model = {"w": jnp.ones((4, 4))}
    manager = lm.CheckpointManager(tmp_path / "managed", wait=True)
    saves = {
        "saved": lambda step: lm.save(model, tmp_path / "saved", step=step),
        "managed": lambda step: manager.save(model, step),
    }
    for name, save in saves.items():
        save(0)
        interrupter, line = Interrupter(FILES, ["__del__", "_discard_unfinished_step"]), 0
        while True:
            line += 3  # each line of what these call: test_killed_saves.py
            was_interrupted = interrupter.interrupted(lambda save=save, step=line: save(step), line)
            is_there = line in lm.CheckpointManager(tmp_path / name).steps
            assert ["step-0", *[f"step-{line}"] * is_there] == names_in(tmp_path / name)
            if is_there:
                assert [] == list(StepSource(LocalStorage(tmp_path / name), line).iterate_damage())
                for each in (tmp_path / name / f"step-{line}").iterdir():
                    each.unlink()
                (tmp_path / name / f"step-{line}").rmdir()
            if not was_interrupted:
                break
        assert line > 50
