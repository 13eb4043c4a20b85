"""Every Python block and every console block of the documentation runs.

A file is one program: its blocks run in order in one namespace, in a process of its own with eight simulated devices,
unless it simulates them itself: then with no variable set.
A block that cannot run says why in its opening line: ```python no-run: needs two machines
A block that is a file has its name there, ```python title="train.py" or ```yaml title="rules.yaml", for a later block.

A ```text block is something that the program prints, in which "..." stands for anything. In a ```console block a line
that begins with `$ ` is a command, and those below it are what it prints, errors not counted. How many spaces there
are does not matter.
"""

# why: decisions/0089
from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import frameworks
import pytest
from cases import few, some

from layoutmap.cli.main import main

PROCESSES = ("jax",)
pytestmark = pytest.mark.every_case

FENCE = re.compile(r"^( *)(`{3,})([^`\n]*)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
PAGES = [frameworks.ROOT / "README.md", *sorted((frameworks.ROOT / "docs").rglob("*.md"))]


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
    def is_printed(self) -> bool:
        return self.info == "text"

    @property
    def is_console(self) -> bool:
        return self.info.split(maxsplit=1)[:1] == ["console"]

    @property
    def program(self) -> list[str]:
        """The lines to run; a console block or a file becomes one line that is as long as it needs to be."""
        if self.title:
            return [f"open({self.title!r}, 'w').write({self.code!r})"]
        return [f"run_console({self.code!r})"] if self.is_console else self.code.splitlines()

    @property
    def title(self) -> str | None:
        """The name of the file that it is."""
        match = re.fullmatch(r'\w+ title="(\w+\.\w+)"', self.info)
        return match and match[1]

    @property
    def reason_not_to_run(self) -> str | None:
        _, found, reason = self.info.partition("no-run:")
        return reason.strip() if found else None


def read_blocks(text: str) -> list[Block]:
    """The blocks of a page that can run, and what they print, in order."""
    blocks = [
        Block(
            line=text.count("\n", 0, m.start()) + 2,
            info=m[3].strip(),
            code=re.sub(rf"^{m[1]}", "", m[4], flags=re.MULTILINE),
        )
        for m in FENCE.finditer(text)
    ]
    return [b for b in blocks if b.is_python or b.is_console or b.is_printed or b.title]


def program_of(page: Path) -> str:
    """A page's blocks as one program, each on the lines where the page has it, so that a traceback points there."""
    lines: list[str] = []
    for block in read_blocks(page.read_text(encoding="utf-8")):
        if block.reason_not_to_run is None and not block.is_printed:
            lines += [""] * (block.line - 1 - len(lines)) + block.program
    return "\n".join(lines) + "\n"


def run_console(block: str) -> None:
    """Run the commands of a console block, in this folder, and compare what they print."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, wanted = re.split(r"(?<!\\)\n", part, maxsplit=1)
        run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        told = (
            f"$ {command}\nexit code {run.returncode}; the end of stderr:\n{run.stderr[-2000:]}\n{run.stdout}"
        )
        assert is_as_shown(wanted, run.stdout), told
        assert 0 == run.returncode, told


def is_as_shown(shown: str, printed: str) -> bool:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(shown, printed, options)


def environment(program: str) -> dict[str, str]:
    """Keras's backend and eight devices; neither for a program that simulates devices, which says all itself."""
    if "lm.simulate_devices(" not in program:
        return {**os.environ, "KERAS_BACKEND": "jax"}
    set_here = ("KERAS_BACKEND", "XLA_FLAGS", "JAX_PLATFORMS")
    return {name: value for name, value in os.environ.items() if name not in set_here}


def run_without_variables(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell command in a folder, with no variable set that a framework or Keras reads."""
    tools = Path(sys.executable).parent
    kept = {**environment("lm.simulate_devices("), "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=folder, env=kept)


def not_printed(page: Path, printed: str) -> list[str]:
    """What a page shows that its program did not print."""
    blocks = read_blocks(page.read_text(encoding="utf-8"))
    shown = [b.code for before, b in pairwise(blocks) if b.is_printed and not before.reason_not_to_run]
    return [text for text in shown if not is_as_shown(f"...\n{text}...", f"-\n{printed}\n-")]


def run_page(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a page's program in an empty folder."""
    script = (
        "import sys; from test_docs import run_console; "
        "exec(compile(sys.stdin.read(), sys.argv[1], 'exec'), {'__name__': '__main__', 'run_console': run_console})"
    )
    tools = Path(sys.executable).parent
    return subprocess.run(
        [sys.executable, "-c", script, str(page)],
        input=program_of(page),
        capture_output=True,
        text=True,
        cwd=folder,
        env={
            **environment(program_of(page)),
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(frameworks.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        },
    )


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder in which the program of the README has run, and what came of it."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "examples").symlink_to(frameworks.ROOT / "examples")
    return folder, run_page(PAGES[0], folder)


@pytest.mark.timeout(900)  # side by side, it is a dozen programs
@pytest.mark.parametrize("page", few(PAGES, PAGES[0]), ids=lambda p: str(p.relative_to(frameworks.ROOT)))
def test_every_block_of_the_page_runs(page: Path, tmp_path: Path, request: pytest.FixtureRequest):
    """What the documentation shows works as shown; the examples are beside it, as in a checkout."""
    (tmp_path / "examples").symlink_to(frameworks.ROOT / "examples")
    if page == PAGES[0]:
        _, run = request.getfixturevalue("readme")
    else:
        run = run_page(page, tmp_path) if program_of(page).strip() else None

    assert run is None or 0 == run.returncode, run.stderr
    assert [] == not_printed(page, run.stdout if run else "")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(frameworks.ROOT)))
def test_a_block_that_does_not_run_says_why(page: Path):
    """It says no-run: and a reason, and what it is otherwise is spelt right, so that no block drops out by accident."""
    odd = [
        f"line {b.line - 1}: {b.info}"
        for b in read_blocks(page.read_text(encoding="utf-8"))
        if b.info not in ("python", "console", "text") and not b.title and not b.reason_not_to_run
    ]

    assert [] == odd


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name == "get-started"], ids=lambda p: p.stem)
def test_a_first_page_begins_with_the_reasons(page: Path):
    """Its first line after the title links the page that says why an axis is sharded."""
    _, first, _ = page.read_text(encoding="utf-8").split("\n\n", 2)

    assert "](../why.md)" in first


@pytest.mark.timeout(900)
def test_the_commands_of_the_readme_run_as_printed(
    readme: tuple[Path, subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
):
    """In the folder of its Python, with no variable set.

    `make test` counts no step, and starts a program only for what loads a model without and with arrays.
    """
    text = PAGES[0].read_text(encoding="utf-8")
    (block,) = (m[4] for m in FENCE.finditer(text) if m[3] == "bash" and "my_models:" in m[4])
    folder, _ = readme
    lines = block.splitlines()
    commands = some(lines, *(line for line in lines if "--on" not in line))
    started = some(commands, *(line for line in commands if re.match("layoutmap (plan|inspect) ", line)))
    run = run_without_variables("\n".join(["set -e", *started]), folder)

    assert 0 == run.returncode, run.stdout[-2000:] + run.stderr[-2000:]
    monkeypatch.chdir(folder)
    for line in commands:
        assert line in started or 0 == main(shlex.split(line, comments=True)[1:]), line
    written = {name for name in ("plan.html", "found.yaml") if any(name in each for each in commands)}
    assert "plan.html" in written <= {path.name for path in folder.iterdir()}


@pytest.mark.long
@pytest.mark.parametrize(
    "command", re.findall(r"^layoutmap plan keras_hub:(?:.*\\\n)*.*", PAGES[0].read_text(), re.M)
)
def test_published_models_of_the_readme_fit_as_they_are_copied(command: str, tmp_path: Path):
    """Exit code 0, and the verdict says so."""
    run = run_without_variables(command, tmp_path)

    assert 0 == run.returncode, run.stderr
    assert run.stdout.startswith("Verdict: fits: ")


def test_each_task_takes_fewer_lines_than_with_the_frameworks_own_tools():
    """The tables of the page and of the README have the lines of code of each pair, in order, and ours are fewer."""
    page = (frameworks.ROOT / "docs" / "side-by-side.md").read_text(encoding="utf-8")
    lines = {b.title: len([*filter(str.strip, b.code.splitlines())]) for b in read_blocks(page) if b.title}
    tasks = [title.removesuffix("_before.py") for title in lines if title.endswith("_before.py")]
    pairs = [(lines[f"{task}_before.py"], lines[f"{task}_after.py"]) for task in tasks]

    assert all(ours < theirs for theirs, ours in pairs)
    assert pairs == [
        (int(a), int(b)) for a, b in re.findall(r"^\| \[.* \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    ]
    (a, b), (c, d) = ((min(each), max(each)) for each in zip(*pairs, strict=True))
    readme = (frameworks.ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{a} to {b} lines ([side by side](docs/side-by-side.md)) | {c} to {d} |" in readme


def test_blocks_share_a_page_and_a_failing_one_is_seen(tmp_path: Path):
    """The tests above can fail, and the traceback names the page and its line."""
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n```python\nx = 1\n```\n\ntext\n\n- item\n\n  ```python\n  y = x\n  assert y == 2\n  ```\n"
    )
    run = run_page(page, tmp_path)

    assert 1 == run.returncode
    assert f'File "{page}", line 13' in run.stderr


def test_commands_run_between_the_blocks_and_print_what_is_shown(tmp_path: Path):
    """In the page's folder, in order; other output than is shown, or another exit code, is a failure."""
    page = tmp_path / "page.md"
    start = "```python\nopen('file', 'w').write('one two\\nthree')\n```\n\n```console\n$ cat file\none   two\n...\n"
    page.write_text(f"{start}$ ls nowhere || echo failed\nfailed\n```\n")
    assert 0 == run_page(page, tmp_path).returncode

    page.write_text(f"{start}$ echo four\nfive\n```\n")
    said = run_page(page, tmp_path).stderr
    assert "AssertionError: $ echo four\nexit code 0" in said
    assert "\nfour\n" in said
    page.write_text(f"{start}$ false\n```\n")
    assert "AssertionError: $ false" in run_page(page, tmp_path).stderr


def test_a_block_marked_no_run_is_left_out(tmp_path: Path):
    """A reason takes a block out, and only that one; other languages are never run."""
    page = tmp_path / "page.md"
    page.write_text(
        "```python no-run: needs two machines\n1 / 0\n```\n\n```python\nprint('ran')\n```\n\n```sh\nfalse\n```\n"
    )

    assert "ran\n" == run_page(page, tmp_path).stdout
