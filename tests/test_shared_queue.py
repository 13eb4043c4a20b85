"""Several runs of pytest that share one queue of tests."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import shared_queue

TESTS = """
import time, pytest

@pytest.fixture(scope="module")
def made():
    yield "once"

@pytest.mark.parametrize("number", range(40))
def test_short(number, made):
    time.sleep(0.01)
    assert number != 13
"""


def test_each_test_is_run_once(tmp_path: Path):
    """Two runs at once do all tests, none of them twice, and a failure is seen."""
    (tmp_path / "test_it.py").write_text(TESTS)
    queue = tmp_path / "queue"
    queue.mkdir()

    def start(number: int) -> subprocess.Popen[bytes]:
        added = {
            "PYTHONPATH": str(Path(shared_queue.__file__).parent),
            shared_queue.FOLDER: str(queue),
            shared_queue.BACKWARDS: "1" if number else "",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "shared_queue", f"--junitxml={number}.xml", "test_it.py"],
            cwd=tmp_path,
            env={**os.environ, **added},
            stdout=subprocess.DEVNULL,
        )

    codes = [run.wait(120) for run in [start(0), start(1)]]
    cases = [case for n in (0, 1) for case in ET.parse(tmp_path / f"{n}.xml").getroot().iter("testcase")]

    assert [0, 1] == sorted(codes)
    assert sorted(f"test_short[{n}]" for n in range(40)) == sorted(case.get("name", "") for case in cases)
    assert ["test_short[13]"] == [c.get("name") for c in cases if c.find("failure") is not None]
