"""The command that tries laws on drawn models."""

import json
import subprocess
import sys
from pathlib import Path

PROCESSES = ("torch",)
COMMAND = Path(__file__).parents[2] / "tools" / "fuzz.py"


def test_a_law_on_one_case(tmp_path):
    """The command ends well, and writes a line for each law and case."""
    law = "repeated plans are equal"
    options = ["--seed", "3", "--count", "1", "--workers", "1", "--law", law, "--results", str(tmp_path)]
    ended = subprocess.run([sys.executable, COMMAND, *options, "torch"], capture_output=True, text=True)
    (line,) = map(json.loads, (tmp_path / "fuzz.jsonl").read_text().splitlines())

    assert (0, "held", law) == (ended.returncode, line["what"], line["law"]), ended.stderr
