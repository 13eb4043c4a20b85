"""Tries laws on drawn cases of several subjects, in processes of their own, until a time or a number is reached.

Each subject gets the same time. A process that ends, or takes too long over a case, is a failure of that case.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from layoutmap.testing.laws import LAWS, Outcome
from layoutmap.testing.subjects import OF_A_PROCESS, started_together, subject_named

IN_ONE_PROCESS = 20
"""Cases that one process tries: frameworks keep compiled programs, so its memory grows."""
CASE_SECONDS = 300.0
"""Seconds after which a case counts as one that does not end."""
TURN_SECONDS = 60.0
"""Seconds that a subject may be ahead of the others before its process ends: frameworks take seconds to import."""
_GRACE_SECONDS = 5.0
"""How long a process has to end, so that others that it computes with do not wait for it."""


@dataclass(frozen=True)
class Tried:
    """The outcome of a law on a case of a subject.

    Args:
        subject: One of `SUBJECTS` or `WITHOUT_MODELS`.
        seed: The seed of the case.
        outcome: The law and what came of it.
        program: The case as a program, where the law did not hold.
    """

    subject: str
    seed: int
    outcome: Outcome
    program: str = ""


@dataclass
class Schedule:
    """Cases to be tried, and how far that is.

    Args:
        subjects: Names of `SUBJECTS` and `WITHOUT_MODELS`.
        seed: The first seed of each subject.
        seconds: When no new case is begun, and cases in work are left without an outcome.
        count: How many cases of each subject to try; `None`: as many as the time allows.
        laws: Names of laws; none: all.
        num_workers: How many processes work at a time; `None`: one for each core.
        simulate: How many devices each process simulates; 0: it has those that there are.
        mesh: The mesh of all cases; empty: each has one of its own.
        settings: Variables of the processes' environment.

    Attributes:
        devices: The devices of each engine whose processes have started.
        facts: What is known of these, for people.
    """

    subjects: Sequence[str]
    seed: int
    seconds: float = threading.TIMEOUT_MAX
    count: int | None = None
    laws: Sequence[str] = ()
    num_workers: int | None = None
    simulate: int = 8
    mesh: str = ""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    devices: dict[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]], init=False)
    facts: dict[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]], init=False)
    used: Counter[str] = field(default_factory=Counter[str], init=False)
    begun: Counter[str] = field(default_factory=Counter[str], init=False)
    _results: queue.SimpleQueue[Tried | None] = field(default_factory=queue.SimpleQueue, init=False)
    _stopped: set[str] = field(default_factory=set[str], init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _processes: set[_Process] = field(default_factory=set["_Process"], init=False)
    _deadline: float = field(default=0.0, init=False)

    def run(self) -> Iterator[Tried]:
        """Yield what came of each law on each case, as it is known; ends its processes when it is left."""
        self._deadline = time.monotonic() + self.seconds
        number = self.num_workers or os.cpu_count() or 1
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(number)]
        for worker in workers:
            worker.start()
        try:
            while number:
                tried = self._results.get()
                number -= tried is None
                if tried is not None:
                    yield tried
        finally:
            self._deadline = 0.0  # nothing new is begun
            for process in tuple(self._processes):
                process.kill()  # its worker reads to the end, and cleans up
            for worker in workers:
                worker.join()

    def run_together(self, first: bool) -> Iterator[Tried]:
        """Yield what came of cases that all processes of a program try together, each from a process of its own.

        Args:
            first: Whether this is the first process of the program, which says what is tried, and when that is over.
        """
        deadline = time.monotonic() + self.seconds
        with self._process(self.subjects[0], quick=True) as process:
            for seed in itertools.count(self.seed):
                for process.subject in self.subjects:
                    is_over = time.monotonic() >= deadline or seed - self.seed == self.count
                    if process.has_ended or (first and is_over):
                        return
                    yield from process.try_case(seed, float("inf"))

    def _work(self) -> None:
        try:
            while subject := self._next_subject():
                with self._process(subject, quick=True) as process:
                    for _ in range(IN_ONE_PROCESS):
                        if process.has_ended or (seed := self._next_seed(subject)) is None:
                            break
                        self._try(process, seed)
                        turn = min(TURN_SECONDS, self.seconds / len(self.subjects))  # each shall have one
                        if self.used[subject] > min(self.used[each] for each in self.subjects) + turn:
                            break
        finally:
            self._results.put(None)

    def _try(self, process: _Process, seed: int) -> None:
        """Try a case; what does not hold is tried again as users run it, and that counts."""
        started, subject = time.monotonic(), process.subject
        tried = process.try_case(seed, self._deadline)
        until = max((i + 1 for i, each in enumerate(tried) if each.outcome.is_suspicious), default=0)
        if process.is_quick and until:
            # A law goes on with the models of those before it; a process that has ended told only some.
            laws = [each.outcome.law for each in tried[:until]]
            with self._process(subject, quick=False, laws=laws if laws[-1] in LAWS else ()) as again:
                tried = [*again.try_case(seed, self._deadline), *tried[until:]]
        if (engine := subject_named(subject).engine) not in self.devices:  # it does not start
            self._stopped.add(engine)
        if time.monotonic() < self._deadline:  # else it was not tried to its end
            for each in tried:
                self._results.put(each)
        with self._lock:
            self.used[subject] += round(time.monotonic() - started)

    def _next_subject(self) -> str | None:
        """The subject that has had the least time."""
        with self._lock:
            left = [s for s in self.subjects if self.count is None or self.begun[s] < self.count]
            left = [s for s in left if subject_named(s).engine not in self._stopped]
            if not left or time.monotonic() >= self._deadline:
                return None
            subject = min(left, key=lambda each: (self.used[each], self.begun[each]))
            self.used[subject] += 1  # so that the next worker takes another one
            return subject

    def _next_seed(self, subject: str) -> int | None:
        with self._lock:
            if time.monotonic() >= self._deadline or self.begun[subject] == self.count:
                return None
            self.begun[subject] += 1
            return self.seed + self.begun[subject] - 1

    @contextlib.contextmanager
    def _process(self, subject: str, *, quick: bool, laws: Sequence[str] = ()) -> Iterator[_Process]:
        process = _Process(self, subject, quick=quick, laws=laws or self.laws)
        self._processes.add(process)
        try:
            yield process
        finally:
            process.end()
            self._processes.discard(process)


class _Process:
    """A process that tries cases, one at a time; or several that try each together, of which the first one answers.

    Args:
        schedule: Says what is tried, and where.
        subject: One of its subjects.
        quick: Whether XLA leaves its optimizations out, on JAX.
        laws: Names of laws; none: all.
    """

    def __init__(self, schedule: Schedule, subject: str, *, quick: bool, laws: Sequence[str]):
        tried, simulated = subject_named(subject), schedule.simulate > 0
        self.subject, self._engine, self._schedule = subject, tried.engine, schedule
        self.is_quick = quick and simulated and tried.engine == "jax"
        simulate = schedule.simulate
        if tried.num_processes > 1:  # JAX has them by a flag, and torch has one
            simulate = OF_A_PROCESS[tried.engine] if tried.engine == "tensorflow" else 0
        arguments = [tried.engine, str(simulate), schedule.mesh, *laws]
        command = [sys.executable, "-m", "layoutmap.testing.trying", *arguments]
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        environment = {**tried.environment(quick=self.is_quick, simulated=simulated), **schedule.settings}
        first, *others = started_together(tried.num_processes) if tried.num_processes > 1 else [{}]
        self._process = subprocess.Popen(
            command,
            env=environment | first,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            process_group=0,  # a group of its own, which ends with it
        )
        self._others = [
            subprocess.Popen(
                command,
                env=environment | each,
                stdin=subprocess.DEVNULL,  # they are told what to try by the first one, which answers for all
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                process_group=self._process.pid,
            )
            for each in others
        ]

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more cases."""
        return self._process.poll() is not None

    def try_case(self, seed: int, deadline: float) -> list[Tried]:
        """Return the outcomes of a case; where it ends the process, or takes too long, the last one says so."""
        tried: list[Tried] = []
        timer = threading.Timer(max(0.0, min(CASE_SECONDS, deadline - time.monotonic())), self.kill)
        timer.start()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(f"{self.subject} {seed}\n")
            self._process.stdin.flush()
            for line in self._process.stdout or ():
                facts = json.loads(line)
                if "ended" in facts:
                    return tried
                if "devices" in facts:
                    self._schedule.devices[self._engine] = facts["devices"]
                    self._schedule.facts[self._engine] = facts["facts"]
                    continue
                tried.append(
                    Tried(facts["subject"], facts["seed"], Outcome(**facts["outcome"]), facts["program"])
                )
        except BrokenPipeError:  # it ended before it read the seed
            pass
        finally:
            timer.cancel()
        self._errors.seek(0)
        why = f"status {self._process.wait()}, or over {CASE_SECONDS:.0f} s: {self._errors.read()[-2000:]}"
        return [
            *tried,
            Tried(self.subject, seed, Outcome("a case ends without its process", "failed", why, 0.0)),
        ]

    def end(self) -> None:
        """End the process and all that it started; called by who reads from it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_GRACE_SECONDS)  # it ends where its input does
        self.kill()
        self._process.communicate()
        for other in self._others:
            other.wait()
        self._errors.close()

    def kill(self) -> None:
        """Kill the processes and all that they started."""
        if any(each.poll() is None for each in (self._process, *self._others)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
