"""Tables of names: each reads both ways, bit for bit, in blocks that cost what they need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from layoutmap.checkpoint import foreign
from layoutmap.checkpoint.export import export_source
from layoutmap.checkpoint.foreign import open_checkpoint_source
from layoutmap.checkpoint.foreign.safetensors import SafetensorsSource
from layoutmap.checkpoint.name_tables import NamePattern, NameTable, list_name_tables, read_name_table
from layoutmap.checkpoint.renamed_source import RenamedSource, make_renamed_source
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.cli.main import main
from layoutmap.core.blocks import Index
from layoutmap.core.errors import CheckpointError, RuleError
from layoutmap.core.variables import Kind


class Arrays:
    """A source of arrays in memory; counts what is read."""

    def __init__(self, arrays: Mapping[str, np.ndarray], kinds: Mapping[str, Kind] | None = None):
        self.where = "memory"
        self.arrays = arrays
        self.variables = {
            n: SavedVariable(n, a.shape, a.dtype.name, (kinds or {}).get(n, Kind.WEIGHT))
            for n, a in arrays.items()
        }
        self.states: Mapping[str, Any] = {}
        self.elements = 0

    def read(self, path: str, index: Index | None = None) -> np.ndarray:
        values = self.arrays[path][() if index is None else index]
        self.elements += values.size
        return values.copy()

    def check(self, path: str, index: Index | None = None) -> None:
        self.read(path, index)


# A tensor of each line of a table, with its axes; sizes that differ, so that no mistake fits.
SIZES = {"heads": 2, "size": 6, "width": 5, "in": 7, "out": 3}


def theirs(names: NameTable) -> dict[str, np.ndarray]:
    """Random tensors of two layers, each that the table names."""
    random = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {}
    for entry in names.entries:
        for piece in entry.tensors:
            axes = piece.tensor_axes or (("width",),)
            shape = [int(np.prod([SIZES[str(atom)] for atom in axis])) for axis in axes]
            for layer in range(2 if entry.path.stars else 1):
                found[piece.name.make_name_from_stars([str(layer)] * len(entry.path.stars))] = random.normal(
                    size=shape
                )
    return found


def ours(names: NameTable) -> dict[str, tuple[int, ...]]:
    """The shapes of a model that has them."""
    found: dict[str, tuple[int, ...]] = {}
    for entry in names.entries:
        axes = entry.tensors[0].variable_axes or (("width",),)
        sizes = [len(entry.tensors) if not isinstance(atom, str) else SIZES[atom] for (atom,) in axes]
        for layer in range(2 if entry.path.stars else 1):
            found["model." + entry.path.make_name_from_stars([str(layer)] * len(entry.path.stars))] = tuple(
                sizes
            )
    return found


CASES = [
    (name, skip)
    for name in list_name_tables()
    for skip in (("qkv_", ".q_e kv_e") if name in ("gemma_nnx", "gemma2_nnx") else ("",))
]
"""Tables; the lines of Gemma's in flax.nnx are for one of two kinds of attention."""


def without(names: NameTable, skip: str) -> NameTable:
    """A table without the lines that have one of these texts in their path."""
    kept = [e for e in names.entries if not any(f".{t.lstrip('.')}" in e.path.text for t in skip.split())]
    return NameTable(names.where, tuple(kept))


@pytest.mark.parametrize(("name", "skip"), CASES)
def test_a_table_reads_both_ways(name: str, skip: str) -> None:
    """Of every table: tensors read as a model, and written under their names again, are what they were, all of them."""
    table = without(read_name_table(name), skip)
    there = Arrays(theirs(table))
    model = RenamedSource(there, read_name_table(name))
    for path, shape in ours(table).items():
        model.add_variable_from_table([path], shape)
    values = {path: model.read(path) for path in ours(table)}
    back = make_renamed_source(Arrays(values), read_name_table(name))

    assert ours(table) == {path: variable.shape for path, variable in model.variables.items()}
    assert {n: a.tobytes() for n, a in there.arrays.items()} == {
        n: back.read(n).tobytes() for n in back.variables
    }


@pytest.mark.parametrize(("name", "skip"), CASES)
def test_a_block_costs_its_own_elements(name: str, skip: str) -> None:
    """Each half of each axis of each variable is read with as many elements as it has, and has its values."""
    table = without(read_name_table(name), skip)
    there = Arrays(theirs(table))
    model = RenamedSource(there, table)
    for path, shape in ours(table).items():
        model.add_variable_from_table([path], shape)
    wrong: list[str] = []
    for path, shape in ours(table).items():
        values = model.read(path)
        for axis, size in enumerate(shape):
            for part in (slice(0, size // 2), slice(size // 2, size)):
                index = tuple(part if n == axis else slice(0, m) for n, m in enumerate(shape))
                there.elements = 0
                block = model.read(path, index)
                if block.tobytes() != values[index].tobytes() or there.elements != block.size:
                    wrong.append(f"{path} {index}")

    assert [] == wrong


def test_bytes_of_files_that_are_read(tmp_path: Path) -> None:
    """A device's half of the heads is read from a file with the bytes of those heads, and nothing else of it."""
    save_file(
        {"q.weight": np.arange(8 * 256 * 64, dtype="float32").reshape(8 * 256, 64)},
        tmp_path / "m.safetensors",
    )
    source = SafetensorsSource(tmp_path)
    model = RenamedSource(
        source, read_name_table({"q": {"from": "q.weight", "axes": "(heads size) width -> width heads size"}})
    )
    model.add_variable_from_table(["q"], (64, 8, 256))
    before = source.bytes_read

    block = model.read("q", np.s_[0:64, 4:8, 0:256])

    assert block.nbytes == source.bytes_read - before


def test_an_end_of_a_path_is_enough_and_the_longest_wins() -> None:
    """A model within another has the same lines, after a dot; of several lines the one that says most is taken."""
    table = read_name_table({"norm.scale": "a", "blocks.*.norm.scale": "b.*"})
    found = [
        table.find_matching_line(path)
        for path in ("x.y.norm.scale", "x.blocks.12.norm.scale", "pre_norm.scale")
    ]

    assert [("norm.scale", ()), ("blocks.*.norm.scale", ("12",)), None] == [
        f and (f[0].path.text, f[1]) for f in found
    ]


def test_an_optional_part_is_found_with_and_without_it() -> None:
    """A base model has no `model.` before its names, and is read by the same line."""
    table = read_name_table({"e": "(model.)?embed.weight"})
    found: list[list[int]] = []
    for name in ("embed.weight", "model.embed.weight"):
        model = RenamedSource(Arrays({name: np.arange(3)}), table)
        model.add_variable_from_table(["e"], (3,))
        found.append(model.read("e").tolist())

    assert [[0, 1, 2]] * 2 == found
    assert ["model.embed.weight"] == list(make_renamed_source(Arrays({"e": np.arange(3)}), table).variables)


def test_two_stars_stand_for_any_text() -> None:
    """One line takes a prefix away from all names."""
    model = RenamedSource(Arrays({"model.a.b": np.arange(3)}), read_name_table({"**": "model.**"}))
    model.add_variable_from_table(["a.b"], (3,))

    assert ([0, 1, 2], ["a.b"]) == (model.read("a.b").tolist(), list(model.variables))
    assert ("a.1.b", ["*", "**"]) == (
        NamePattern("a.*.**").make_name_from_stars(["1", "b"]),
        NamePattern("a.*.**").stars,
    )


def test_fused_tensors_are_divided_and_joined() -> None:
    """Gate and up in one tensor are read as two variables, and written as one."""
    table = read_name_table(
        {
            "gate": {"from": "gate_up", "axes": "(0/2 out) in -> in out"},
            "up": {"from": "gate_up", "axes": "(1/2 out) in -> in out"},
        }
    )
    fused = np.arange(24).reshape(6, 4)
    model = RenamedSource(Arrays({"gate_up": fused}), table)
    for path in ("gate", "up"):
        model.add_variable_from_table([path], (4, 3))
    values = {path: model.read(path) for path in ("gate", "up")}

    assert [fused[:3].T.tolist(), fused[3:].T.tolist()] == [values["gate"].tolist(), values["up"].tolist()]
    assert fused.tolist() == make_renamed_source(Arrays(values), table).read("gate_up").tolist()
    with pytest.raises(
        CheckpointError,
        match=r"(?s)gate_up: it cannot be joined.*each of its 2 parts must occur exactly once",
    ):
        make_renamed_source(Arrays({"gate": values["gate"]}), table)


def test_what_does_not_fit_a_table_is_refused_by_name() -> None:
    """Two variables of one name, parts of several types, paths without a line and other ranks are each refused."""
    table = read_name_table(
        {"a": {"from": ["x", "y"], "axes": "n -> both n"}, "q": {"from": "z", "axes": "o i -> i o"}}
    )
    same = RenamedSource(Arrays({"x": np.zeros(3), "y": np.zeros(3)}), table)
    for path in ("a", "one.a"):
        same.add_variable_from_table([path], (2, 3))
    with pytest.raises(CheckpointError, match=r"a and one\.a are read from the same tensor"):
        same.check_parts_are_used_once(["a", "one.a"])
    with pytest.raises(CheckpointError, match="make up this variable have different dtypes"):
        RenamedSource(Arrays({"x": np.zeros(3), "y": np.zeros(3, "int8")}), table).add_variable_from_table(
            ["a"], (2, 3)
        )
    with pytest.raises(CheckpointError, match=r"(?s)no line for 1 variables.*b +not in the table"):
        make_renamed_source(Arrays({"b": np.zeros(3)}), table)
    with pytest.raises(CheckpointError, match="q: its shape contradicts the name table"):
        make_renamed_source(Arrays({"q": np.zeros(3)}), table)


WRONG: dict[str, tuple[str, str]] = {
    "no table": ("[1]", "this is not a name table of version 1"),
    "version": ("version: 2\nnames: {}", "this is not a name table of version 1"),
    "YAML": ("version: 1\nnames: {a: [b}", r"(?s)mine.yaml.*line  ?2"),
    "key": ("version: 1\nnames: {}\nrules: {}", r"(?s)'rules' is an unknown key.*line  3"),
    "names": ("version: 1\n\nnames: [a]", r"(?s)the key 'names' is not a mapping.*line  3"),
    "own key": (
        "version: 1\nnames:\n  a: b\n  c: {to: d}",
        r"(?s)'c' cannot be read.*line  4.*'to' is an unknown key",
    ),
    "no from": ("version: 1\nnames:\n  a: {axes: b -> b}", r"(?s)line  3.*from must be a name"),
    "stars": ("version: 1\nnames:\n  a.*: b", r"(?s)line  3.*'b' has the stars \[\], but the path"),
    "axes": (
        "version: 1\nnames:\n  a: {from: b, axes: (c d -> c d}",
        r"(?s)line  3.*a parenthesis is not closed",
    ),
    "other axes": ("version: 1\nnames:\n  a: {from: b, axes: c -> d}", r"(?s)line  3.*on only one side"),
    "no join": (
        "version: 1\nnames:\n  a: {from: [b, c]}",
        r"(?s)line  3.*'axes', which says how to join them",
    ),
    "two joins": ("version: 1\nnames:\n  a: {from: [b, c], axes: d -> e f d}", r"(?s)line  3.*not 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_table_that_cannot_be_read_says_where(tmp_path: Path, case: str) -> None:
    """What is wrong with a file is said with its name, the line, why, and the fix."""
    text, what = WRONG[case]
    (tmp_path / "mine.yaml").write_text(text)

    with pytest.raises(RuleError, match=what):
        read_name_table(tmp_path / "mine.yaml")


def test_an_unknown_table_is_refused_with_those_that_are_there() -> None:
    """A mistyped name is answered with the near one and with all."""
    with pytest.raises(RuleError, match=r"(?s)names='lama'.*near misses  llama.*gemma, gemma2"):
        read_name_table("lama")


def test_export_writes_what_the_library_safetensors_reads(tmp_path: Path) -> None:
    """Several files and their index, or one, have the bits of all weights; slots and random states are left out."""
    import ml_dtypes

    arrays = {
        "a": np.arange(12, dtype="float32").reshape(3, 4),
        "b": np.arange(5).astype(ml_dtypes.bfloat16),
        "flag": np.array(True),
        "empty": np.zeros((0, 3), "int8"),
        "adam": np.zeros(3),
        "seed": np.zeros(2, "uint32"),
    }
    source = Arrays(arrays, {"adam": Kind.SLOT, "seed": Kind.RNG, "b": Kind.STATE})
    written: list[str] = []
    folder = Path(export_source(source, tmp_path / "x", max_shard_bytes=50, progress=written.append))
    one = Path(export_source(source, tmp_path / "y"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = [load_file(folder / name) for name in sorted({*index["weight_map"].values()})]
    kept = {name: arrays[name].tobytes() for name in ("a", "b", "flag", "empty")}

    assert ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] == sorted(
        {*index["weight_map"].values()}
    )
    assert kept == {name: array.tobytes() for each in found for name, array in each.items()}
    assert kept == {name: array.tobytes() for name, array in load_file(one / "model.safetensors").items()}
    assert (["model.safetensors"], sorted(kept)) == ([p.name for p in one.iterdir()], sorted(written))
    assert kept == {
        n: open_checkpoint_source(folder).read(n).tobytes() for n in open_checkpoint_source(folder).variables
    }
    assert ["x", "y"] == sorted(path.name for path in tmp_path.iterdir())


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """If a value cannot be read, a type cannot be written or the folder is in use, there is no new file anywhere."""

    class Broken(Arrays):
        def read(self, path: str, index: Index | None = None) -> np.ndarray:
            raise CheckpointError("x: its values differ from the saved ones")

    with pytest.raises(CheckpointError, match="differ from the saved ones"):
        export_source(Broken({"x": np.zeros(3)}), tmp_path / "x")
    with pytest.raises(CheckpointError, match="dtype complex128 cannot be written"):
        export_source(Arrays({"x": np.zeros(3, "complex128")}), tmp_path / "x")
    assert [] == list(tmp_path.iterdir())
    export_source(Arrays({"x": np.zeros(3)}), tmp_path / "x")
    with pytest.raises(CheckpointError, match="the folder exists already"):
        export_source(Arrays({"x": np.ones(3)}), tmp_path / "x")
    assert [0.0] * 3 == open_checkpoint_source(tmp_path / "x").read("x").tolist()


def test_what_a_killed_export_left_is_deleted_by_the_next(tmp_path: Path) -> None:
    """The hidden folder of an export whose process has ended is deleted; other hidden folders are kept."""
    left, other = tmp_path / f".x.{'0' * 16}", tmp_path / ".x.notes"
    left.mkdir()
    other.mkdir()

    export_source(Arrays({"x": np.zeros(3)}), tmp_path / "x")

    assert [".x.notes", "x"] == sorted(path.name for path in tmp_path.iterdir())


def test_a_format_is_one_module_and_one_line_of_the_registry(tmp_path, monkeypatch):
    """`export` and the command line write a format that the registry names; another one is refused by name."""
    (tmp_path / "raw_export.py").write_text(
        "def write_variables(storage, folder, source, variables, max_shard_bytes, progress):\n"
        "    for each in variables:\n"
        "        with storage.create_file(folder, each.path) as sink:\n"
        "            sink.write(source.read(each.path).tobytes())\n"
        "        progress(each.path)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(foreign.WRITERS, "raw", "raw_export")
    values = np.arange(3.0)
    folder = Path(export_source(Arrays({"x": values}), tmp_path / "raw", format="raw"))
    source = export_source(Arrays({"x": values}), tmp_path / "source")
    code = main(["checkpoint", "export", source, str(tmp_path / "again"), "--format", "raw"])

    assert [values.tobytes()] == [each.read_bytes() for each in folder.iterdir()]
    assert (0, values.tobytes()) == (code, (tmp_path / "again" / "x").read_bytes())
    with pytest.raises(CheckpointError, match="format='gguf' is not an export format"):
        export_source(Arrays({"x": values}), tmp_path / "other", format="gguf")
    assert not (tmp_path / "other").exists()
