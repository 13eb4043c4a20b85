"""`layoutmap checkpoint`: shows, verifies and writes anew what was saved; no framework is loaded for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import frameworks
import numpy as np
import pytest
from checkpoint.forged import manifest_in, write_manifest
from checkpoints import random_values, saved
from safetensors.numpy import load_file

import layoutmap as lm
from layoutmap.checkpoint import relayout
from layoutmap.cli.main import main
from layoutmap.core.blocks import compute_block_shape
from layoutmap.core.variables import Kind

PROCESSES = ("core",)

MESH = lm.Mesh(None, "batch=2,model=4")
VALUES = {
    "up.kernel": random_values((64, 128), "bfloat16", 1),
    "up.bias": random_values((128,), "float32", 2),
    "down.kernel": random_values((128, 64), "float32", 3),
    "step": random_values((), "int64", 4),
    "empty": random_values((0, 4), "float32", 5),
    "optimizer.up.kernel.momentum": random_values((64, 128), "float32", 6),
}
LAYOUTS = {
    path: lm.Layout((None, "model"), MESH)
    if path.endswith("kernel")
    else lm.Layout.replicated(MESH, array.ndim)
    for path, array in VALUES.items()
}
KINDS = {"optimizer.up.kernel.momentum": Kind.SLOT}
RULES = r"""
version: 1
mesh:
  dims: {batch: 2, model: 4}
rules:
  up\.kernel: [model, null]
  down\.kernel: [[batch, model], null]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which the commands run: steps 1 and 2 in `saved`, and a rules file."""
    for step in (1, 2):
        saved(str(tmp_path / "saved"), VALUES, LAYOUTS, step, kinds=KINDS, metadata={"loss": step})
    (tmp_path / "rules.yaml").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments):
    code = main(["checkpoint", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def data_file(folder: Path, step: int) -> Path:
    (found,) = (folder / f"saved/step-{step}").glob("*.safetensors")
    return found


def flip(folder: Path, path: str, number: int, step: int = 2) -> int:
    """Change one bit of a chunk of a variable; returns the byte at which the chunk begins."""
    chunk = lm.describe(folder / "saved", step=step).source.manifest.chunks[path][number]
    file = data_file(folder, step)
    data = bytearray(file.read_bytes())
    data[chunk.start] ^= 16
    file.write_bytes(data)
    return chunk.start


def test_describe_prints_what_the_library_prints(folder, capsys):
    """The last step or another one, all variables or those that match, and as JSON."""
    assert (0, f"{lm.describe('saved')}\n", "") == run(capsys, "describe", "saved")
    assert (0, f"{lm.describe('saved', step=1)}\n", "") == run(capsys, "describe", "saved", "--step", 1)
    code, out, err = run(capsys, "describe", "saved", "--match", r"\.kernel$", "--json", "-")
    assert (0, ["up.kernel", "down.kernel"]) == (code, [v["path"] for v in json.loads(out)["variables"]])
    assert "2 variables, 48.0 KiB" in err


def test_what_was_saved_is_a_page(folder, capsys):
    """That of the library; verify's says what is damaged."""
    code, out, err = run(capsys, "describe", "saved", "--html", "page.html")
    found = lm.describe("saved")
    assert (0, f"{found}\n", "written: page.html\n") == (code, out, err)
    assert found.to_html() == Path("page.html").read_text()

    flip(folder, "up.kernel", 1)
    assert 1 == run(capsys, "verify", "saved", "--html", "page.html")[0]
    assert found.to_html(found.verify()) == Path("page.html").read_text() != found.to_html()


def test_steps_are_printed_as_a_tree(folder, capsys):
    """Each under the one that it came from, what was left beside the line of the last save; a damaged one is named."""
    runs = {
        1: (1, {"a": 1}),
        2: (2, {"a": 2}),
        5: (4, {"a": 1, "b": 5}),
        3: (3, {"a": 2, "c": 3}),
        6: (5, {"b": 6}),
    }
    for step, (order, lines) in runs.items():
        if step > 2:
            saved(str(folder / "saved"), VALUES, LAYOUTS, step)
        found = manifest_in(folder / f"saved/step-{step}")
        known = {
            "order": order,
            "lines": lines,
            "created": "2026-11-24T10:00:00+00:00",
            "metrics": {"loss": 1 / step},
        }
        write_manifest(folder / f"saved/step-{step}", found | known)
    code, out, err = run(capsys, "history", "saved")
    tree = """
step   saved                 metrics
-----  --------------------  -------------
1      2026-11-24T10:00:00Z  loss 1
|-- 2  2026-11-24T10:00:00Z  loss 0.5
|   3  2026-11-24T10:00:00Z  loss 0.333333
5      2026-11-24T10:00:00Z  loss 0.2
6      2026-11-24T10:00:00Z  loss 0.166667
"""
    assert (0, f"{folder}/saved: 5 steps, the last save is step 6\n{tree}", "") == (code, out, err)
    assert (0, "step 6: ") == (run(capsys, "verify", "saved")[0], run(capsys, "verify", "saved")[1][:8])

    (folder / "saved/step-3/manifest.json").write_text("{")
    code, out, err = run(capsys, "history", "saved")
    said = "step 3: its manifest cannot be read; layoutmap checkpoint verify says why"
    assert (1, said) == (code, out.splitlines()[-1])
    code, out, err = run(capsys, "history", "nowhere")
    assert (2, "", f"layoutmap: {folder}/nowhere: there is no checkpoint") == (code, out, err.splitlines()[0])


def test_what_cannot_be_described(folder, capsys):
    """A step, a directory or a regex that is none is an error with exit code 2 that says what there is."""
    for arguments, words in (
        (("saved", "--step", 3), "there is no step 3\n  steps  1, 2\n"),
        (("nowhere",), "nowhere: there is no checkpoint\n"),
        (("saved", "--match", "("), "--match '(' is not a regex\n"),
        (("saved", "--json", "nowhere/file"), "--json 'nowhere/file' cannot be written\n"),
    ):
        code, out, err = run(capsys, "describe", *arguments)
        assert (2, "") == (code, out)
        assert words in err


def test_verify_says_that_all_is_well(folder, capsys):
    """With exit code 0, of the last step or of all."""
    well = "step {}: 6 variables, 80.5 KiB, all as they were saved\n"
    assert (0, well.format(2), "") == run(capsys, "verify", "saved")
    assert (0, well.format(1) + well.format(2), "") == run(capsys, "verify", "saved", "--all")
    assert 2 == run(capsys, "verify", "saved", "--all", "--step", 1)[0]
    assert 2 == run(capsys, "verify", "saved", "--step", 3)[0]


def test_verify_names_each_damaged_chunk(folder, capsys):
    """With its variable, file and bytes; the exit code is 1."""
    starts = [flip(folder, "up.kernel", 0), flip(folder, "up.kernel", 2), flip(folder, "up.bias", 0)]
    code, out, _ = run(capsys, "verify", "saved", "--all")
    lines = [line.strip() for line in out.splitlines()]

    assert 1 == code
    assert [
        f"{path}: its values differ from the saved ones" for path in ("up.kernel", "up.kernel", "up.bias")
    ] == [line for line in lines if line.endswith("differ from the saved ones")]
    assert starts == [int(line.split()[1]) for line in lines if line.startswith("bytes")]
    assert [f"file   {data_file(folder, 2)}"] * 3 == [line for line in lines if line.startswith("file")]
    assert "step 2: 3 problems" == lines[-1]
    assert lines[0] == "step 1: 6 variables, 80.5 KiB, all as they were saved"
    assert 0 == run(capsys, "verify", "saved", "--step", 1)[0]


def test_relayout_writes_the_same_bits_in_other_layouts(folder, capsys):
    """Step, metadata and every value are kept, slots follow their weights, and no chunk crosses a shard's border."""
    arguments = ("relayout", "saved", "new", "--rules", "rules.yaml")
    assert 0 == run(capsys, *arguments, "--step", 1)[0]
    found = lm.describe("new")

    assert (1, {"loss": 1}, ()) == (found.step, found.metadata, found.verify())
    assert {path: array.tobytes() for path, array in VALUES.items()} == {
        p: found.read(p).tobytes() for p in found
    }
    assert {
        "up.kernel": ("model", None),
        "up.bias": (None,),
        "down.kernel": (("batch", "model"), None),
        "step": (),
        "empty": (None, None),
        "optimizer.up.kernel.momentum": ("model", None),
    } == {path: each.layout for path, each in found.items()}
    crossing = [
        path
        for path, chunks in found.source.manifest.chunks.items()
        for shards in [[found.plan[path].layout.shard_slices(found[path].shape, i) for i in range(8)]]
        for chunk in chunks
        if not any(
            all(s.start <= c.start and c.stop <= s.stop for c, s in zip(chunk.index, shard, strict=True))
            for shard in shards
        )
    ]
    assert [] == crossing
    assert 2 == run(capsys, *arguments, "--step", 1)[0]  # that step exists already


def test_relayout_holds_a_block_at_a_time(folder, capsys, monkeypatch):
    """However large a shard is, what is read at once has the size of a block at most."""
    monkeypatch.setattr(relayout, "MAX_BLOCK_BYTES", 2048)
    sizes = []
    read = lm.describe("saved").source.read
    kind = type(lm.describe("saved").source)

    def counted(self, path, index=None):
        values = read(path, index)
        sizes.append(values.nbytes)
        return values

    monkeypatch.setattr(kind, "read", counted)
    assert (
        0 == run(capsys, "relayout", "saved", "new", "--rules", "rules.yaml", "--mesh", "batch=1,model=1")[0]
    )
    monkeypatch.undo()

    assert (2048, True) == (max(sizes), sum(sizes) == sum(array.nbytes for array in VALUES.values()))
    assert () == lm.describe(folder / "new").verify()


def test_an_object_store_is_a_directory(folder, capsys):
    """By its URL, for each command."""
    url = "memory://test_checkpoint/new"
    assert 0 == run(capsys, "relayout", "saved", url, "--rules", "rules.yaml")[0]
    assert (0, f"{lm.describe(url)}\n") == run(capsys, "describe", url)[:2]
    assert (0, "step 2: 6 variables, 80.5 KiB, all as they were saved\n") == run(
        capsys, "verify", url, "--all"
    )[:2]
    assert 0 == run(capsys, "export", url, "out")[0]


def test_a_damaged_step_is_not_relaid(folder, capsys):
    """It fails with what is damaged, and leaves no step, nor the beginning of one."""
    flip(folder, "down.kernel", 1)
    code, out, err = run(capsys, "relayout", "saved", "new", "--rules", "rules.yaml")

    assert (2, "", []) == (code, out, list((folder / "new").iterdir()))
    assert "down.kernel: its values differ from the saved ones" in err


def test_export_writes_what_others_read(folder, capsys):
    """Files of safetensors of the size that was asked for, under other names, with the same bits; no slots."""
    weights = {path: array for path, array in VALUES.items() if path not in KINDS}
    Path("names.yaml").write_text("version: 1\nnames:\n  '**.kernel': '**.weight'\n  '**': '**'\n")
    arguments = ("export", "saved", "out", "--names", "names.yaml", "--max-shard", "20KiB")
    code, out, _ = run(capsys, *arguments)
    files = sorted(Path("out").glob("*.safetensors"))
    found = {name: value.tobytes() for file in files for name, value in load_file(file).items()}

    assert (0, f"{lm.describe(folder / 'out')!r}\n") == (code, out)
    assert 3 == len(files)
    assert {path.replace("kernel", "weight"): a.tobytes() for path, a in weights.items()} == found
    assert 2 == run(capsys, *arguments)[0]  # it is there, and not empty
    assert 2 == run(capsys, "export", "saved", "other", "--names", "nowhere.yaml")[0]


def test_files_of_others_are_described_verified_and_taken_over(folder, capsys):
    """As far as they go: they have no steps and no checksums; what is written in layouts has both."""
    assert 0 == run(capsys, "export", "saved", "out")[0]
    code, out, _ = run(capsys, "describe", "out")
    assert (0, f"{lm.describe('out')}\n", True) == (code, out, "checksums  none" in out)
    code, out, _ = run(capsys, "verify", "out")
    assert (0, "out: 5 variables, 48.5 KiB, all are there; their files have no checksums\n") == (code, out)

    assert 0 == run(capsys, "relayout", "out", "new", "--rules", "rules.yaml")[0]
    found = lm.describe("new")
    assert (0, (), ("model", None)) == (found.step, found.verify(), found["up.kernel"].layout)
    assert VALUES["up.kernel"].tobytes() == found.read("up.kernel").tobytes()


def test_rules_that_do_not_fit_are_an_error(folder, capsys):
    """Before a byte is written; a rule that matches nothing is only said."""
    arguments = ("relayout", "saved", "new", "--rules", "rules.yaml", "--mesh")
    code, _, err = run(capsys, *arguments, "batch=3,model=1")
    assert (2, True, False) == (
        code,
        "down.kernel: axis 0 cannot be split evenly" in err,
        Path("new").exists(),
    )

    Path("rules.yaml").write_text(RULES.replace("down", "dwon"))
    code, _, err = run(capsys, *arguments, "batch=2,model=2")
    assert (0, True) == (code, r"dwon\.kernel" in err)


def test_other_commands_load_no_numpy():
    """What only the commands of checkpoints need is loaded by them."""
    script = "import sys, layoutmap.cli.main; sys.exit('numpy' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", script]).returncode


NO_FRAMEWORK = f"""
import sys
from layoutmap.cli.main import main
for arguments in {{}}:
    code = main(["checkpoint", *arguments])
    loaded = sorted(set({sorted(frameworks.FRAMEWORKS)}) & set(sys.modules))
    assert (0, []) == (code, loaded), (arguments, code, loaded)
"""


def test_no_framework_is_loaded(folder):
    """A checkpoint is described, verified and written anew on a machine that has none."""
    commands = [
        ["describe", "saved"],
        ["verify", "saved", "--all"],
        ["relayout", "saved", "new", "--rules", "rules.yaml"],
        ["export", "saved", "exported"],
        ["verify", "exported"],
    ]
    ran = subprocess.run(
        [sys.executable, "-c", NO_FRAMEWORK.format(commands)], capture_output=True, text=True, cwd=folder
    )

    assert (0, "") == (ran.returncode, ran.stderr)


def test_the_blocks_of_values_are_those_of_the_new_shards(folder, capsys):
    """A device of the new mesh finds its shard in chunks that are all its own."""
    assert 0 == run(capsys, "relayout", "saved", "new", "--rules", "rules.yaml")[0]
    found = lm.describe("new")
    index = found.plan["down.kernel"].layout.shard_slices((128, 64), 3)
    found.read("down.kernel", index)

    assert (16, 64) == compute_block_shape(index)
    assert np.prod(compute_block_shape(index)) * 4 == found.source.bytes_read
