"""The readers on the page that documents the format read what was saved, without this library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import frameworks
import numpy as np
import pytest
from checkpoints import random_values, saved
from safetensors.numpy import load_file
from test_docs import read_blocks

import layoutmap as lm

PROCESSES = ("core",)

PAGE = frameworks.ROOT / "docs" / "checkpoint-format.md"
VALUES = {
    "sharded": random_values((24, 16), "float32", 1),
    "sharded_over_both": random_values((24, 16), "bfloat16", 2),
    "replicated": random_values((3, 5), "bool", 3),
    "in_chunks": random_values((512, 512), "float32", 4),
    "scalar": random_values((), "bfloat16", 5),
    "empty": random_values((0, 7), "float32", 6),
    "bytes": random_values((8,), "int8", 7),
    "in_no_type_of_safetensors": random_values((8, 2), "int4", 8),
    "ends with ]": random_values((4,), "int64", 9),
}
SPECS = {
    "sharded": (None, "model"),
    "sharded_over_both": ("batch", "model"),
    "in_chunks": ("batch", None),
}


def readers() -> dict[str, Callable[[Path], dict[str, np.ndarray]]]:
    """What the blocks of the page define, as far as they know nothing of this library."""
    found: dict[str, Any] = {}
    for block in read_blocks(PAGE.read_text(encoding="utf-8")):
        if "layoutmap as" not in block.code:
            exec(compile(block.code, str(PAGE), "exec"), found)
    return {name: value for name, value in found.items() if name.startswith("read_")}


@pytest.mark.parametrize("name", ["read_step", "read_step_with_safetensors"])
def test_the_reader_of_the_page_reads_every_bit(name: str, tmp_path: Path):
    """Of sharded and replicated variables, scalars and empty ones, in types that numpy does not have, too."""
    mesh = lm.Mesh(None, "batch=2,model=4")
    layouts = {
        path: lm.Layout(SPECS[path], mesh) if path in SPECS else lm.Layout.replicated(mesh, array.ndim)
        for path, array in VALUES.items()
    }
    step = saved(str(tmp_path), VALUES, layouts, 3)
    found = readers()[name](tmp_path / "step-3")

    assert 2 < len(step.manifest.chunks["in_chunks"])
    assert {path: (a.shape, a.dtype, a.tobytes()) for path, a in VALUES.items()} == {
        path: (a.shape, a.dtype, a.tobytes()) for path, a in found.items()
    }


def test_the_reader_of_the_page_reads_float8(tmp_path: Path):
    """Which the numpy reader of safetensors does not."""
    value = random_values((8, 2), "float8_e4m3fn", 8)
    saved(str(tmp_path), {"x": value}, {"x": lm.Layout.replicated(lm.Mesh(None, "x=1"), 2)}, 3)

    assert value.tobytes() == readers()["read_step"](tmp_path / "step-3")["x"].tobytes()


def test_the_reader_has_ten_lines():
    """As short as the page says: the format needs no library."""
    (code,) = (b.code for b in read_blocks(PAGE.read_text(encoding="utf-8")) if "def read_step(" in b.code)

    assert 10 == len(code.partition("def read_step")[2].strip().splitlines()) - 1


def test_safetensors_alone_reads_a_changed_value(tmp_path: Path):
    """Without a word; by the manifest it is found."""
    value = random_values((8, 2), "float32", 8)
    saved(str(tmp_path), {"x": value}, {"x": lm.Layout.replicated(lm.Mesh(None, "x=1"), 2)}, 3)
    file = tmp_path / "step-3" / "data-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 64
    file.write_bytes(data)

    assert value.tobytes() != load_file(file)["x"].tobytes()
    with pytest.raises(lm.CheckpointError, match="x: its values differ from the saved ones"):
        lm.describe(tmp_path).read("x")
