"""A manifest that was changed and given the right checksum is refused before a byte is read, or does no harm."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint.checkpoints import random_values, saved
from checkpoint.forged import DEEP, Place, forged, manifest_in, put, write_manifest

import layoutmap as lm
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Kind
from layoutmap.saving.describe import describe

PROCESSES = ("core",)

MESH = Mesh(None, "x=2,model=2")
STATES = {
    "settings": {"library": "torch", "optimizer": {"kind": "Adam", "groups": [{"lr": 0.1, "params": ["w"]}]}},
    "processes": [
        {"random": {"numpy": {"state": {"__array__": "AAAAAA==", "dtype": "float32", "shape": [1]}}}}
    ],
}


def save(folder: Path) -> Path:
    """Save a step that has something of all that a manifest can have; returns its folder."""
    values = {
        "w": random_values((8, 4), "float32"),
        "b": random_values((4,), "bfloat16"),
        "n": np.array(3, np.int64),
        "none": np.zeros((0, 2), np.int8),
        "optimizer.w.momentum": random_values((8, 4), "float32", 1),
    }
    specs = {"w": ["x", "model"], "optimizer.w.momentum": [("x", "model"), None]}
    layouts = {path: Layout(specs.get(path, [None] * v.ndim), MESH) for path, v in values.items()}
    kinds = {"optimizer.w.momentum": Kind.SLOT, "n": Kind.STATE}
    saved(str(folder), values, layouts, 1, kinds=kinds, aliases={"w": ["tied.w"]}, metadata={"a": [1, 0.5]})
    step = folder / "step-1"
    found = manifest_in(step)
    found |= {
        "states": STATES,
        "metrics": {"loss": 0.5},
        "created": "now",
        "library": "torch",
        "engine": "torch",
    }
    write_manifest(step, found)
    return step


def use(directory: Path) -> Any:
    """Do all that can be done with a step and no model; returns its values, or `None` if it is refused well."""
    try:
        found = describe(directory)
        texts = (
            str(found),
            repr(found),
            found.to_json(),
            found.to_html(found.verify()),
            found.states,
            found.metrics,
        )
        json.loads(texts[2])
        assert isinstance(found.source, StepSource)
        found.source.check_file_sizes()
        return found.metadata, found.plan, {path: found.read(path).tobytes() for path in found}
    except lm.CheckpointError as error:
        return None if error.why and error.fix else "an error without a reason or a fix"


def check(folder: Path, seeds: range) -> Counter[str]:
    """Forge a manifest once for each seed; returns how many were refused."""
    step = save(folder)
    right = manifest_in(step)
    assert use(folder) is not None
    was_refused = list[bool]()
    for seed in seeds:
        said, found = forged(right, seed)
        write_manifest(step, found)
        try:
            was_refused.append((used := use(folder)) is None)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {said}") from error
        assert not isinstance(used, str), f"seed {seed}: {said}: {used}"
    assert len(seeds) // 2 < sum(was_refused) < len(seeds)
    return Counter("refused" if refused else "read, and harmless" for refused in was_refused)


def test_a_forged_manifest_is_refused_or_does_no_harm(tmp_path: Path) -> None:
    """Whatever is changed in a manifest, no call raises anything but an error with its reason and a fix."""
    check(tmp_path, range(60))


@pytest.mark.long
def test_no_forged_manifest_does_harm(tmp_path: Path) -> None:
    """So it is with a thousand others."""
    check(tmp_path, range(1000, 2000))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("files", 0, "name"), "../step-1/secret"),
        (("files", 0, "name"), "/etc/hostname"),
        (("files", 0, "header_bytes"), 1 << 40),
        (("variables", 0, "chunks", 0, 0), 7),
        (("variables", 0, "chunks", 0, 0), -1),
        (("variables", 0, "chunks", 0, 1), -8),
        (("variables", 0, "chunks", 0, 1), 1 << 40),
        (("variables", 0, "chunks", 0, 2), [[0, 1 << 40]]),
        (("variables", 0, "chunks", 0, 2), [[0, 8], [0, 1 << 70]]),
        (("variables", 0, "chunks", 0, 2), [[0, 8], [0, 0.5]]),
        (("variables", 0, "chunks", 0, 2), [[0, 1], [0, 1], [0, 1]]),
        (("variables", 0, "chunks", 0, 1), "0"),
        (("variables", 0, "chunks"), 0),
        (("variables", 0, "shape"), [-1]),
        (("variables",), 5),
        (("files", 0, "bytes"), 10**30),
        (("files", 0, "header_bytes"), 0.5),
        (("files", 0, "name"), "a\0b"),
        (("files", 0, "name"), "a\ud800"),
        (("files", 0, "header"), 5),
        (("variables", 0, "shape"), [8.0, 4]),
        (("variables", 0, "shape"), [True, 4]),
        (("variables", 0, "shape"), {"8": 4}),
        (("variables", 0, "path"), "b"),
        (("variables", 0, "layout"), ["x"]),
        (("variables", 0, "layout"), ["y", None]),
        (("variables", 0, "aliases"), "w"),
        (("variables", 0, "chunks", 0, 3), 7),
        (("states",), []),
        (("states",), {"settings": []}),
        (("states",), {"processes": {"random": {}}}),
        (("states",), {"processes": [{"random": []}]}),
        (("states",), {"settings": {"x": DEEP}}),
        (("metadata",), DEEP),
        (("metadata",), {"__array__": "AAAAAA==", "dtype": "object", "shape": [1]}),
        (("mesh",), "x=2"),
        (("mesh",), {"x": 0, "model": 2}),
        (("metrics",), {"loss": "low"}),
        (("step",), 1.5),
        (("created",), 2026),
    ],
)
def test_what_is_not_of_its_form_is_refused_when_it_is_opened(
    tmp_path: Path, place: Place, value: object
) -> None:
    """It can name no file elsewhere, no byte that a file does not have, and nothing of another type."""
    step = save(tmp_path)
    found = manifest_in(step)
    put(found, place, value)
    write_manifest(step, found)
    with pytest.raises(lm.CheckpointError) as error:
        StepSource(LocalStorage(tmp_path))

    assert f"{step}/manifest.json: this is not a manifest of a checkpoint" == error.value.what
