"""Which test process runs which file: none is forgotten, and none is run where its framework is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import frameworks
import pytest


@pytest.mark.parametrize(
    "path", frameworks.collected_files(), ids=lambda p: str(p.relative_to(frameworks.ROOT))
)
def test_every_file_is_run_by_some_process(path: Path):
    """`processes_of` has an answer for each file, and `make test` starts every process that is in one."""
    assert set() < set(frameworks.processes_of(path)) <= set(frameworks.PROCESSES)


def test_every_file_with_tests_has_a_name_that_pytest_collects():
    """A file of tests under another name would never run."""
    forgotten = [
        p.name
        for p in (frameworks.ROOT / "tests").rglob("*.py")
        if "def test_" in p.read_text(encoding="utf-8")
        and not p.name.startswith("test_")
        and not p.name.endswith("_laws.py")  # what classes of tests inherit
        and p != Path(frameworks.__file__)
    ]

    assert [] == forgotten


@pytest.mark.parametrize(
    ("source", "processes"),
    [
        ("import layoutmap as lm", ("core",)),
        ("from layoutmap.core.mesh import Mesh", ("core",)),
        ("import keras", ("jax",)),
        ("def test_it():\n    from jax import numpy", ("jax",)),
        ("from layoutmap.engines.jax.engine import engine", ("jax",)),
        ("from layoutmap.adapters import keras", ("jax",)),
        ("from tensorflow.experimental import dtensor", ("tensorflow",)),
        ("import keras\nPROCESSES = ('tensorflow',)", ("tensorflow",)),
        ("import keras\nPROCESSES = ('jax', 'tensorflow')", ("jax", "tensorflow")),
    ],
)
def test_a_file_runs_where_its_framework_is(tmp_path: Path, source: str, processes: tuple[str, ...]):
    """What a test file imports, or says, is what decides."""
    path = tmp_path / "test_it.py"
    path.write_text(source)

    assert processes == frameworks.processes_of(path)


def test_a_file_of_two_frameworks_is_refused(tmp_path: Path):
    """JAX and TensorFlow in one process is what the split is there to avoid."""
    path = tmp_path / "test_both.py"
    path.write_text("import jax\nimport tensorflow")

    with pytest.raises(
        frameworks.ProcessError, match=r"test_both\.py imports frameworks of jax and tensorflow; split it"
    ):
        frameworks.processes_of(path)


def test_the_core_process_cannot_load_a_framework(tmp_path: Path):
    """A framework that slips into a core test fails there, with what to write instead."""
    script = "import conftest, jax"
    env = {
        **os.environ,
        "LAYOUTMAP_TEST_PROCESS": "core",
        "PYTHONPATH": os.pathsep.join([str(frameworks.ROOT), str(frameworks.ROOT / "tests")]),
    }
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, cwd=tmp_path
    )

    assert 1 == run.returncode
    assert 'write PROCESSES = ("jax",) there' in run.stderr
