"""Run every test process, one after the other, and say at the end what ran, what was skipped and how long it took.

python tools/run_tests.py [process ...] [-- arguments for pytest ...]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import house  # noqa: E402

RESULTS = ROOT / "results"
# Two files at a time: tests are Python and compiling, each mostly on one core.
SIDE_BY_SIDE = ("--numprocesses=2", "--dist=loadfile")
COUNTED = ("passed", "failed", "skipped", "xfailed", "error")


@dataclass(frozen=True)
class Outcome:
    process: str
    returncode: int
    counts: Counter[str]
    skips: tuple[str, ...]
    seconds: float

    @property
    def went_well(self) -> bool:
        # pytest exits with 5 when it ran nothing: a process that has files and runs none of them has failed.
        return self.returncode == 0 and self.counts["passed"] > 0


def run(process: str, arguments: list[str]) -> Outcome:
    print(f"\n== {process} ==", flush=True)
    started = time.monotonic()
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", f"--junitxml={RESULTS / process}.xml"),
            *SIDE_BY_SIDE,
            *arguments,
        ],
        cwd=ROOT,
        env={**os.environ, "LAYOUTMAP_TEST_PROCESS": process},
        stdout=subprocess.PIPE,
        text=True,
    ) as pytest:
        assert pytest.stdout is not None
        lines: list[str] = []
        for line in pytest.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    closing = next((line for line in reversed(lines) if re.search(r" in [\d.]+s", line)), "")
    counts = Counter({_singular(word): int(n) for n, word in re.findall(r"(\d+) (\w+)", closing)})
    skips = tuple(line.removeprefix("SKIPPED ") for line in lines if line.startswith("SKIPPED ["))
    return Outcome(process, pytest.returncode, counts, skips, time.monotonic() - started)


def _singular(word: str) -> str:
    return "error" if word == "errors" else word


def main(arguments: list[str]) -> int:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    asked, for_pytest = arguments[:cut], arguments[cut + 1 :]
    files = Counter(process for p in house.collected_files() for process in house.processes_of(p))
    wanted = asked or [p for p in house.PROCESSES if files[p]]
    started = time.monotonic()
    outcomes = [run(process, for_pytest) for process in wanted]

    print("\n== summary ==")
    for o in outcomes:
        told = ", ".join(f"{o.counts[word]} {word}" for word in COUNTED if o.counts[word]) or "ran nothing"
        verdict = "ok  " if o.went_well else "FAIL"
        print(f"{o.process:<11} {verdict} {told} in {o.seconds:.0f} s ({files[o.process]} files)")
    for process in house.PROCESSES:
        if process not in wanted:
            print(f"{process:<11} not run: {'not asked for' if files[process] else 'it has no test file'}")
    skips = [f"{o.process}: {skip}" for o in outcomes for skip in o.skips]
    print(f"skipped: {len(skips) or 'nothing'}", *skips, sep="\n  ")
    print(f"wall time: {time.monotonic() - started:.0f} s")
    total = sum((o.counts for o in outcomes), Counter[str]())
    failed = (
        total["failed"] + total["error"] + sum(not o.went_well and o.counts.total() == 0 for o in outcomes)
    )
    print(f"{total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    well = all(o.went_well for o in outcomes)
    if well and not arguments:  # all of it ran: README's table must say what came of it
        files = [str(RESULTS / f"{o.process}.xml") for o in outcomes]
        well = not subprocess.run([sys.executable, ROOT / "tools" / "works.py", "--check", *files]).returncode
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
