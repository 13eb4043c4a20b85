"""What a checkpoint says of itself is what was saved, and reading it needs no framework."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import random_values, saved
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.core.blocks import split_numpy_index
from layoutmap.core.text_table import format_bytes
from layoutmap.core.variables import Kind
from layoutmap.saving.describe import Checkpoint

MESH = lm.Mesh(None, "batch=2,model=4")
VALUES = {
    "blocks.0.kernel": random_values((8, 16), "float32", 1),
    "blocks.1.kernel": random_values((8, 16), "float32", 2),
    "head.kernel": random_values((16, 64), "bfloat16", 3),
    "head.scale": random_values((), "float32", 4),
    "optimizer.blocks.0.kernel.momentum": random_values((8, 16), "float32", 5),
    "optimizer.blocks.1.kernel.momentum": random_values((8, 16), "float32", 6),
    "optimizer.head.kernel.rows": random_values((16,), "float32", 7),
}
LAYOUTS = {
    path: lm.Layout((None, "model"), MESH) if array.ndim == 2 else lm.Layout.replicated(MESH, array.ndim)
    for path, array in VALUES.items()
}
KINDS = {path: Kind.SLOT for path in VALUES if path.startswith("optimizer")}
ALIASES = {"head.kernel": ["embedding.kernel"]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of two steps; nothing writes to it."""
    found = str(tmp_path_factory.mktemp("checkpoint"))
    for step in (20, 100):
        saved(found, VALUES, LAYOUTS, step, kinds=KINDS, aliases=ALIASES, metadata={"loss": 0.25 * step})
    return found


def test_the_table_has_every_variable_the_largest_first(directory: str):
    """Repeated blocks are one row, slots are as their weights, and what is in no row is in no total either."""
    num_bytes = sum(file.stat().st_size for file in Path(directory, "step-100").glob("*.safetensors"))
    assert (
        f"""
Checkpoint {directory}/step-100: 7 variables, 4.1 KiB
  step      100
  by        tests
  mesh      batch=2, model=4
  files     1, {format_bytes(num_bytes)}
  metadata  {{"loss": 25.0}}
  steps     20, 100

variable                    times  shape          dtype     kind    layout                bytes
--------------------------  -----  -------------  --------  ------  ------------------  -------
head.kernel                        16 x 64        bfloat16  weight  (unsharded, model)  2.0 KiB
blocks.{{0..1}}.kernel            2  8 x 16         float32   weight  (unsharded, model)  1.0 KiB
optimizer.*.momentum            2  as its weight  float32   slot    as its weight       1.0 KiB
optimizer.head.kernel.rows         16             float32   slot    replicated             64 B
head.scale                         scalar         float32   weight  replicated              4 B

weights 3.0 KiB, slots 1.1 KiB; 4.1 KiB in total
""".strip()
        == str(lm.describe(directory))
    )


def test_a_checkpoint_is_a_mapping_of_what_was_saved(directory: str):
    """By path and by alias; each of its values is read bit for bit, all of it and in blocks."""
    found = lm.describe(directory, step=20)

    assert (list(VALUES), len(VALUES)) == (list(found), len(found))
    assert found["head.kernel"] is found["embedding.kernel"]
    assert ("embedding.kernel" in found, "embedding" in found) == (True, False)
    assert {path: array.tobytes() for path, array in VALUES.items()} == {
        p: found.read(p).tobytes() for p in found
    }
    assert np.array_equal(VALUES["head.kernel"][2:5, 60:], found.read("embedding.kernel", np.s_[2:5, 60:]))
    assert (20, (20, 100), {"loss": 5.0}) == (found.step, found.steps, found.metadata)
    assert f"<Checkpoint {directory}/step-20: 7 variables, 4.1 KiB>" == repr(found)


SIZES = st.lists(st.integers(0, 5), max_size=3)
PARTS = st.integers(-6, 6) | st.slices(5) | st.just(...) | st.just(np.s_[7:2:-2])


@given(sizes=SIZES, index=PARTS | st.lists(PARTS, max_size=4).map(tuple))
def test_an_index_is_what_numpy_takes(sizes: list[int], index: object):
    """Integers, slices of any step and `...` take what numpy takes of the array; what numpy refuses is refused."""
    array = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
    try:
        expected = array[index].tolist()  # type: ignore[index]
    except IndexError:
        expected = "refused"
    try:
        block, inner = split_numpy_index(index, array.shape)
        found = array[block][inner].tolist()
    except lm.LayoutMapError:
        found = "refused"

    assert expected == found


def test_blocks_are_read_by_an_index(directory: str):
    """A slice alone, an integer, `...`, and steps, also backwards; a mask is refused with the fix."""
    found, kernel = lm.describe(directory), VALUES["head.kernel"]
    for index in (
        np.s_[0:4],
        np.s_[0],
        np.s_[...],
        np.s_[..., -1],
        np.s_[::-3, 1:60:7],
        np.s_[3, 5],
        np.s_[9:9],
    ):
        assert kernel[index].tobytes() == found.read("head.kernel", index).tobytes()
        assert kernel[index].shape == found.read("head.kernel", index).shape
    with pytest.raises(lm.LayoutMapError, match=r"is not an index of this variable\n  shape  \(16, 64\)"):
        found.read("head.kernel", np.ones(16, bool))


def test_a_misspelt_path_is_answered_with_those_that_come_near(directory: str):
    """Whether it is looked up or read."""
    found = lm.describe(directory)

    for ask in (found.__getitem__, found.read):
        with pytest.raises(KeyError) as caught:
            ask("blocks.1.kernal")
        message = "the checkpoint has no variable 'blocks.1.kernal'; near misses: blocks.1.kernel"
        assert message == caught.value.args[0]


def test_what_is_written_for_programs_is_what_was_saved(directory: str):
    """The JSON has each variable with its shape, type, layout and bytes."""
    found = json.loads(lm.describe(directory).to_json())

    assert (100, [20, 100], {"loss": 25.0}) == (found["step"], found["steps"], found["metadata"])
    assert {
        path: (list(array.shape), array.dtype.name, array.nbytes, "slot" if path in KINDS else "weight")
        for path, array in VALUES.items()
    } == {v["path"]: (v["shape"], v["dtype"], v["bytes"], v["kind"]) for v in found["variables"]}
    assert [None, "model"] == found["variables"][0]["layout"]
    assert sum(array.nbytes for array in VALUES.values()) == found["bytes"]


def test_html_has_the_rows_and_escapes_them(tmp_path: Path):
    """A path with a tag in it is text."""
    saved(str(tmp_path), {"<b>.kernel": np.zeros(3)}, {"<b>.kernel": lm.Layout.replicated(MESH, 1)})
    html = lm.describe(tmp_path)._repr_html_()

    assert ("&lt;b&gt;.kernel" in html, "<b>" in html, "24 B in total" in html) == (True, False, True)


def test_verify_names_each_damaged_variable_and_file(directory: str, tmp_path: Path):
    """Nothing where nothing is damaged; with one flipped bit, the chunk that has it."""
    step = saved(str(tmp_path), VALUES, LAYOUTS, 7)
    done: list[str] = []
    assert ((), list(VALUES)) == (lm.describe(tmp_path).verify(done.append), done)

    chunk = step.manifest.chunks["head.kernel"][2]
    file = tmp_path / "step-7" / step.manifest.files[chunk.file].name
    data = bytearray(file.read_bytes())
    data[chunk.start + 5] ^= 1
    file.write_bytes(data)
    (problem,) = lm.describe(tmp_path).verify()

    assert "head.kernel: its values differ from the saved ones" == problem.what
    assert str(file) == problem.facts["file"]
    assert f"{chunk.start} to {chunk.start + 512}" == problem.facts["bytes"]


class _Foreign:
    """The least that a source of values has."""

    where = "/data/model.safetensors"

    @property
    def states(self):
        return {}

    @property
    def variables(self):
        return {path: SavedVariable(path, array.shape, array.dtype.name) for path, array in VALUES.items()}

    def read(self, path, index=None):
        return VALUES[path] if index is None else VALUES[path][index]

    def verify_block(self, path, index=None):
        self.read(path, index)


def test_a_source_that_others_wrote_is_described_too():
    """Without steps, metadata and layouts: the table says what is known, and invents nothing."""
    found = Checkpoint(_Foreign())

    assert (
        """
Checkpoint /data/model.safetensors: 7 variables, 4.1 KiB
  checksums  none: a changed value is not found

variable                                 times  shape    dtype     kind    layout    bytes
---------------------------------------  -----  -------  --------  ------  ------  -------
head.kernel                                     16 x 64  bfloat16  weight          2.0 KiB
blocks.{0..1}.kernel                         2  8 x 16   float32   weight          1.0 KiB
optimizer.blocks.{0..1}.kernel.momentum      2  8 x 16   float32   weight          1.0 KiB
optimizer.head.kernel.rows                      16       float32   weight             64 B
head.scale                                      scalar   float32   weight              4 B

weights 4.1 KiB; 4.1 KiB in total
""".strip()
        == str(found)
    )
    assert (None, (), None, ()) == (found.step, found.steps, found.metadata, found.verify())
    assert np.array_equal(VALUES["head.kernel"], found.read("head.kernel"))
