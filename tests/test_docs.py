"""Every Python block of the documentation runs.

A file is one program: its blocks run in order in one namespace, in a process of its own with eight simulated devices.
A block that cannot run says why in its opening line: ```python no-run: needs two machines
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import house
import pytest

PROCESSES = ("jax",)

FENCE = re.compile(r"^( *)(`{3,})([^`\n]*)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
PAGES = [house.ROOT / "README.md", *sorted((house.ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """One fenced block: the line of its first line of code, what its opening line says, and the code."""

    line: int
    info: str
    code: str

    @property
    def is_python(self) -> bool:
        return self.info.split(maxsplit=1)[:1] in (["python"], ["py"], ["python3"])

    @property
    def reason_not_to_run(self) -> str | None:
        _, found, reason = self.info.partition("no-run:")
        return reason.strip() if found else None


def read_blocks(text: str) -> list[Block]:
    """The Python blocks of a page, in order."""
    blocks = [
        Block(
            line=text.count("\n", 0, m.start()) + 2,
            info=m[3].strip(),
            code=re.sub(rf"^{m[1]}", "", m[4], flags=re.MULTILINE),
        )
        for m in FENCE.finditer(text)
    ]
    return [b for b in blocks if b.is_python]


def program_of(page: Path) -> str:
    """A page's blocks as one program, each on the lines where the page has it, so that a traceback points there."""
    lines: list[str] = []
    for block in read_blocks(page.read_text(encoding="utf-8")):
        if block.reason_not_to_run is None:
            lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def run_page(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a page's program in an empty folder."""
    script = "import sys; exec(compile(sys.stdin.read(), sys.argv[1], 'exec'), {'__name__': '__main__'})"
    return subprocess.run(
        [sys.executable, "-c", script, str(page)],
        input=program_of(page),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "KERAS_BACKEND": "jax"},
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(house.ROOT)))
def test_every_block_of_the_page_runs(page: Path, tmp_path: Path):
    """What the documentation shows works as shown."""
    run = run_page(page, tmp_path) if program_of(page).strip() else None

    assert run is None or 0 == run.returncode, run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(house.ROOT)))
def test_a_block_that_does_not_run_says_why(page: Path):
    """`python` alone, or `python no-run: <reason>`; nothing else, so that no block drops out by a misspelling."""
    odd = [
        f"line {b.line - 1}: {b.info}"
        for b in read_blocks(page.read_text(encoding="utf-8"))
        if b.info != "python" and not b.reason_not_to_run
    ]

    assert [] == odd


def test_blocks_share_a_page_and_a_failing_one_is_seen(tmp_path: Path):
    """The tests above can fail, and the traceback names the page and its line."""
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n```python\nx = 1\n```\n\ntext\n\n- item\n\n  ```python\n  y = x\n  assert y == 2\n  ```\n"
    )
    run = run_page(page, tmp_path)

    assert 1 == run.returncode
    assert f'File "{page}", line 13' in run.stderr


def test_a_block_marked_no_run_is_left_out(tmp_path: Path):
    """A reason takes a block out, and only that one; other languages are never run."""
    page = tmp_path / "page.md"
    page.write_text(
        "```python no-run: needs two machines\n1 / 0\n```\n\n```python\nprint('ran')\n```\n\n```sh\nfalse\n```\n"
    )

    assert "ran\n" == run_page(page, tmp_path).stdout
