"""Run the tests of all processes from one queue, and report failures, skips, and the slowest tests.

python tools/run_tests.py [--all] [process ...] [-- arguments for pytest ...]

A worker is pytest in one test process; there are as many at a time as cores, at most one for each process. A worker
that finds nothing left in its process ends, and the next one begins another process or helps in one that still has
tests (`tests/shared_queue.py`). With --all, what `make test` leaves out on JAX has workers of its own, `jax.long`, in
which XLA compiles quickly; what it has runs with all optimizations. So has what needs XLA's compiler for GPUs,
`jax.gpu`, where `make test-all` installed that: beside JAX's other tests, which find none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import shared_queue  # noqa: E402

RESULTS = ROOT / "results"
# The longest first, and `core` last: it starts in no time and its tests are short, so nobody waits at the end.
ORDER = ("jax", "torch", "tensorflow", "core")
LONG, GPU = "jax.long", "jax.gpu"
XLA_GPU = Path(sys.prefix) / "xla-gpu"  # where the Makefile installs it
# All cases take 40 minutes, so slow tests are shown in order to keep `make test` short (decisions/0039).
SLOWEST = 10
REPORT_SECONDS = 15
NOTHING_RAN = 5  # pytest's code for it


@dataclass
class Worker:
    part: str
    pytest: subprocess.Popen[str]
    log: Path
    results: Path

    @property
    def process(self) -> str:
        return _get_process(self.part)


def _get_process(part: str) -> str:
    """Return the test process of a part of the tests."""
    return part.partition(".")[0]


@dataclass(frozen=True)
class Case:
    """One test as pytest's JUnit file tells of it."""

    process: str
    name: str
    seconds: float
    outcome: str
    reason: str


class Queue:
    """The tests of some processes, in parts, and the workers that run them."""

    def __init__(self, wanted: list[str], arguments: list[str], *, everything: bool, claims: Path) -> None:
        more = [LONG, *([GPU] if XLA_GPU.exists() else [])] if everything and "jax" in wanted else []
        self.wanted = [*more, *wanted]
        self.arguments = arguments
        self.everything = everything
        self.environment = {**os.environ, **({"LAYOUTMAP_TEST_ALL": "1"} if everything else {})}
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process compiles src and tests again
        self.claims = claims
        self.running: list[Worker] = []
        self.ended: list[Worker] = []

    def run(self) -> None:
        """Run all parts. Every worker and its child processes end with this call, even on an interrupt."""
        started = told = time.monotonic()
        try:
            while True:
                while len(self.running) < min(os.cpu_count() or 1, len(ORDER)) and (
                    part := self._choose_part()
                ):
                    self._start(part)
                if not self.running:
                    return
                time.sleep(0.2)
                for worker in [each for each in self.running if each.pytest.poll() is not None]:
                    self.running.remove(worker)
                    self.ended.append(worker)
                    _print_failures(worker)
                if time.monotonic() - told >= (1 if sys.stdout.isatty() else REPORT_SECONDS):
                    told = time.monotonic()
                    self._print_progress(told - started)
        finally:
            _end(self.running)
            if sys.stdout.isatty():
                print()

    def count_tests(self, part: str) -> tuple[int, int | None]:
        """Return how many tests of a part began, and how many it has, or None until they are collected."""
        begun = len(list((self.claims / part).iterdir())) if (self.claims / part).exists() else 0
        known = self._read_collection(part)
        return begun, known["selected"] if known else None

    def list_deselected(self) -> list[str]:
        """Return the ids of the tests that no part runs."""
        left_out: dict[str, list[str]] = {}
        for part in self.wanted:
            if known := self._read_collection(part):
                others = left_out.get(_get_process(part), known["deselected"])
                left_out[_get_process(part)] = [each for each in known["deselected"] if each in {*others}]
        return [each for ids in left_out.values() for each in ids]

    def _read_collection(self, part: str) -> dict | None:
        told = self.claims / f"{part}.json"
        return json.loads(told.read_text(encoding="utf-8")) if told.exists() else None

    def _choose_part(self) -> str | None:
        """Return a part that no worker has begun, or else the running part with the most tests left.

        Who leaves tests behind was told to stop at a failure, or died.
        """
        ended = {worker.part for worker in self.ended}
        begun = {worker.part for worker in self.running}
        for part in self.wanted:
            if part not in begun | ended:
                return part
        left: Counter[str] = Counter()
        for part in begun - ended:
            done, total = self.count_tests(part)
            left[part] = 1 if total is None else total - done
        part, number = next(iter(left.most_common(1)), ("", 0))
        return part if number > 0 else None

    def _start(self, part: str) -> None:
        number = sum(each.part == part for each in (*self.running, *self.ended))
        name = f"{part}.{number}"
        (self.claims / part).mkdir(exist_ok=True)
        environment = {
            **self.environment,
            "LAYOUTMAP_TEST_PROCESS": _get_process(part),
            shared_queue.FOLDER: str(self.claims / part),
            shared_queue.BACKWARDS: "1" if number % 2 else "",
            **({"LAYOUTMAP_TEST_QUICK": "1"} if part == LONG else {}),
        }
        marked = "long and not xla_gpu" if part == LONG else ""
        if part == "jax" or not self.everything:
            marked = "not long and not xla_gpu" if self.everything else "not long"
        if part == GPU:
            marked = "xla_gpu"
            environment["PYTHONPATH"] = os.pathsep.join(
                filter(None, (os.environ.get("PYTHONPATH"), str(XLA_GPU)))
            )
        log, results = RESULTS / f"{name}.log", RESULTS / f"{name}.xml"
        with log.open("w", encoding="utf-8") as output:
            pytest = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    f"--junitxml={results}",
                    *(["-m", marked] if marked else []),
                    *self.arguments,
                ],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # a group of its own: what its tests start ends with it
            )
        self.running.append(Worker(part, pytest, log, results))

    def _print_progress(self, seconds: float) -> None:
        parts: list[str] = []
        for part in self.wanted:
            begun, total = self.count_tests(part)
            parts.append(f"{part} {begun}/{total if total is not None else '?'}")
        line = f"[{seconds:4.0f} s] {'   '.join(parts)}"
        print(
            f"\r{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True
        )


def _end(workers: list[Worker]) -> None:
    """End workers and all that their tests started: as an interrupt would, and then whatever is left."""
    for how, seconds in ((signal.SIGINT, 10), (signal.SIGKILL, None)):
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):  # the whole group has ended
                os.killpg(worker.pytest.pid, how)
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.pytest.wait(seconds)


def _print_failures(worker: Worker) -> None:
    """Print pytest's output from the first failure on, or its whole output if pytest did not finish."""
    if worker.pytest.returncode in (0, NOTHING_RAN):
        return
    said = worker.log.read_text(encoding="utf-8", errors="replace")
    start = re.search(r"^=+ (FAILURES|ERRORS) =+$", said, re.MULTILINE)
    print(f"\n== {worker.part} ==\n{said[start.start() if start else 0 :]}", flush=True)


def read_cases(worker: Worker) -> Iterator[Case]:
    """Yield the outcome of each test in a worker's JUnit file."""
    if not worker.results.exists():
        return
    for case in ET.parse(worker.results).getroot().iter("testcase"):
        skipped = case.find("skipped")
        outcome, reason = "passed", ""
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
        elif skipped is not None:
            outcome = "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"
            reason = skipped.get("message", "")
        name = f"{case.get('classname')}::{case.get('name')}"
        yield Case(worker.process, name, float(case.get("time", 0)), outcome, reason)


def main(arguments: list[str]) -> int:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    asked, for_pytest = arguments[:cut], arguments[cut + 1 :]
    everything = "--all" in asked
    asked = [each for each in asked if each != "--all"]
    if unknown := sorted(set(asked) - set(ORDER)):
        raise SystemExit(f"there is no test process {', '.join(unknown)}; there are {', '.join(ORDER)}")
    RESULTS.mkdir(exist_ok=True)
    for old in (*RESULTS.glob("*.xml"), *RESULTS.glob("*.log")):
        old.unlink()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as claims:
        wanted = [process for process in ORDER if process in (asked or ORDER)]
        queue = Queue(wanted, for_pytest, everything=everything, claims=Path(claims))
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the workers, as Ctrl-C does
        try:
            queue.run()
        except KeyboardInterrupt:
            print("\ninterrupted: every worker was ended", file=sys.stderr)
            return 130
        cases = [case for worker in queue.ended for case in read_cases(worker)]
        deselected = queue.list_deselected()

    print("\n== summary ==")
    broken: list[str] = []
    for process in wanted:
        counts = Counter(case.outcome for case in cases if case.process == process)
        codes = [worker.pytest.returncode for worker in queue.ended if worker.process == process]
        if died := [code for code in codes if code not in (0, 1, NOTHING_RAN)]:
            broken.append(f"{process}: pytest ended with {died[0]}")
        elif 1 in codes and not counts["failed"]:
            broken.append(
                f"{process}: pytest ended with 1, and none of its tests failed; see {RESULTS.name}/"
            )
        elif not counts["passed"] + counts["failed"] and not for_pytest:
            broken.append(f"{process}: it has files and ran nothing")
        print(
            f"{process:<11} {', '.join(f'{n} {word}' for word, n in sorted(counts.items())) or 'ran nothing'}"
        )
    _print_skipped(cases, deselected, for_pytest)
    print(f"the {SLOWEST} slowest:")
    for case in sorted(cases, key=lambda case: -case.seconds)[:SLOWEST]:
        print(f"  {case.seconds:5.1f} s  {case.process}: {case.name}")
    for case in cases:
        if case.outcome == "failed":
            print(f"FAILED {case.process}: {case.name}")
    print(*(f"FAILED {each}" for each in broken), sep="\n", end="\n" if broken else "")
    total = Counter(case.outcome for case in cases)
    failed = total["failed"] + len(broken)
    codes = {worker.pytest.returncode for worker in queue.ended}
    well = not failed and codes <= {0, NOTHING_RAN} and total["passed"] > 0
    if (
        well and everything and not asked and not for_pytest
    ):  # the tables of what works must say what came of it
        files = sorted(RESULTS.glob("*.xml"))
        well = not subprocess.run([sys.executable, ROOT / "tools" / "works.py", "--check", *files]).returncode
    print(f"wall time: {time.monotonic() - started:.0f} s")
    print(f"{total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return 0 if well else 1


def _print_skipped(cases: list[Case], deselected: list[str], for_pytest: list[str]) -> None:
    """Print the skipped tests with reasons, and the tests that only `make test-all` runs."""
    skips = Counter((c.process, c.name.partition("::")[0], c.reason) for c in cases if c.outcome == "skipped")
    print(f"skipped: {skips.total() or 'nothing'}")
    for (process, where, reason), number in skips.items():
        print(f"  {number} of {where} on {process}: {reason}")
    if deselected:
        why = "" if for_pytest else ", which make test-all runs"
        print(f"left out: {len(deselected)}{why}")
        for where, number in Counter(each.partition("::")[0] for each in deselected).items():
            laws = {
                each.rpartition("::")[2].partition("[")[0] for each in deselected if each.startswith(where)
            }
            print(f"  {number} of {where}: {', '.join(sorted(laws))}")
    # In a whole run, what no process tried in any case.
    if deselected and not for_pytest and {each.process for each in cases} == set(ORDER):
        untried = sorted({_get_law(each) for each in deselected} - {_get_law(each.name) for each in cases})
        print(f"laws that only make test-all tries: {len(untried)}", *untried, sep="\n  ")


def _get_law(test: str) -> str:
    """Return a test's name without its case, from pytest's id or from a JUnit file."""
    return re.sub(r"\.py::|::|/", ".", test.partition("[")[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
