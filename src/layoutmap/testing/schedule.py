"""A schedule that tries laws in processes until a time or a number of cases is reached.

All subjects get equal time. If a process ends or takes too long, its case fails.
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
from functools import partial
from typing import IO

from layoutmap.testing.laws import LAWS, Outcome
from layoutmap.testing.subjects import DEVICES_PER_PROCESS, get_subject, make_launcher_environments

CASES_PER_PROCESS = 20
"""Each process tries this many cases, because its compiled programs fill the memory. Then a new process starts."""
CASE_SECONDS = 300.0  # number of seconds after which a case is stopped
TURN_SECONDS = 60.0
"""A process ends if its subject has used this many seconds more than a different subject. Then a process of that
subject starts and imports its framework, so a smaller limit causes more imports."""
_GRACE_SECONDS = 5.0  # wait this long before a kill, because other processes may wait for a killed one


@dataclass(frozen=True)
class LawResult:
    """The outcome of a law for one case of a subject."""

    subject: str
    seed: int
    outcome: Outcome
    program: str = ""  # program of the case, if the law failed


@dataclass
class Schedule:
    """Try cases of several subjects in worker processes, until a limit of time or number is reached."""

    subjects: Sequence[str]  # subjects to try: keys of `SUBJECTS` and `WITHOUT_MODELS`
    seed: int  # first seed of each subject
    seconds: float = threading.TIMEOUT_MAX  # time limit; cases that are not finished by then have no outcome
    count: int | None = None  # number of cases of each subject; None: no limit
    laws: Sequence[str] = ()  # names of the laws to try; empty: all laws
    num_workers: int | None = None  # number of processes at a time; None: one for each core
    simulate: int = 8  # number of devices that each process simulates; 0: use the devices of the machine
    mesh: str = ""  # mesh of all cases; empty: drawn for each case
    settings: Mapping[str, str] = field(default_factory=dict[str, str])  # environment variables
    # device names of each engine that a process has started
    devices: dict[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]], init=False)
    # facts about these devices for a report, of each engine
    facts: dict[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]], init=False)
    used_seconds: Counter[str] = field(default_factory=Counter[str], init=False)  # seconds by subject
    num_begun: Counter[str] = field(default_factory=Counter[str], init=False)  # number of cases by subject
    _results: queue.SimpleQueue[LawResult | None] = field(default_factory=queue.SimpleQueue, init=False)
    _stopped: set[str] = field(default_factory=set[str], init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _processes: set[_WorkerProcess] = field(default_factory=set["_WorkerProcess"], init=False)
    _deadline: float = field(default=0.0, init=False)

    def run_cases(self) -> Iterator[LawResult]:
        """Try cases in worker processes, and yield results as they arrive. Closing the iterator ends all processes."""
        self._deadline = time.monotonic() + self.seconds
        num_running = self.num_workers or os.cpu_count() or 1
        threads = [
            threading.Thread(target=self._try_cases_in_worker, daemon=True) for _ in range(num_running)
        ]
        for thread in threads:
            thread.start()
        try:
            while num_running:
                result = self._results.get()
                num_running -= result is None
                if result is not None:
                    yield result
        finally:
            self._deadline = 0.0  # workers begin no new case after the deadline, so set it to the past
            for process in tuple(self._processes):
                process.kill_processes()  # the worker of the process then reads the rest of its output, and cleans up
            for thread in threads:
                thread.join()

    def run_cases_together(self, is_first_process: bool) -> Iterator[LawResult]:
        """Yield results of cases that all processes of a job try together, each with its own worker process.

        The first process chooses the cases, and when to stop.
        """
        deadline = time.monotonic() + self.seconds
        with self._run_worker_temporarily(self.subjects[0], quick=True) as process:
            for seed in itertools.count(self.seed):
                for process.subject in self.subjects:
                    is_over = time.monotonic() >= deadline or seed - self.seed == self.count
                    if process.has_ended or (is_first_process and is_over):
                        return
                    yield from process.send_case_and_read_results(seed, float("inf"))

    def _try_cases_in_worker(self) -> None:
        try:
            while subject := self._choose_next_subject():
                with self._run_worker_temporarily(subject, quick=True) as process:
                    for _ in range(CASES_PER_PROCESS):
                        if process.has_ended or (seed := self._take_next_seed(subject)) is None:
                            break
                        self._try_case_and_queue_results(process, seed)
                        turn = min(TURN_SECONDS, self.seconds / len(self.subjects))
                        least = min(self.used_seconds[other] for other in self.subjects)
                        if self.used_seconds[subject] > least + turn:
                            break
        finally:
            self._results.put(None)

    def _try_case_and_queue_results(self, process: _WorkerProcess, seed: int) -> None:
        """Try a case and queue its results. If a law fails, queue results of a run without quick compilation."""
        start, subject = time.monotonic(), process.subject
        results = process.send_case_and_read_results(seed, self._deadline)
        num_laws = max((i + 1 for i, result in enumerate(results) if result.outcome.is_failure), default=0)
        if process.is_quick and num_laws:
            # Try all laws up to the last failed one again, because laws share models. If the process ended early,
            # or no case could be drawn, the last result is of no law in LAWS. Then try all laws again.
            laws = [result.outcome.law for result in results[:num_laws]]
            with self._run_worker_temporarily(
                subject, quick=False, laws=laws if laws[-1] in LAWS else ()
            ) as slow:
                results = [*slow.send_case_and_read_results(seed, self._deadline), *results[num_laws:]]
        if (engine := get_subject(subject).engine) not in self.devices:  # no process could start the engine
            self._stopped.add(engine)
        if time.monotonic() < self._deadline:  # else drop the results, because the case may be unfinished
            for result in results:
                self._results.put(result)
        with self._lock:
            self.used_seconds[subject] += round(time.monotonic() - start)

    def _choose_next_subject(self) -> str | None:
        """Return the subject that used the least time so far, or None if no cases or no time are left."""
        with self._lock:
            left = [s for s in self.subjects if self.count is None or self.num_begun[s] < self.count]
            left = [s for s in left if get_subject(s).engine not in self._stopped]
            if not left or time.monotonic() >= self._deadline:
                return None
            subject = min(left, key=lambda name: (self.used_seconds[name], self.num_begun[name]))
            self.used_seconds[subject] += 1  # so that the next worker takes a different subject
            return subject

    def _take_next_seed(self, subject: str) -> int | None:
        """Return the next seed of a subject, or None if no cases or no time are left."""
        with self._lock:
            if time.monotonic() >= self._deadline or self.num_begun[subject] == self.count:
                return None
            self.num_begun[subject] += 1
            return self.seed + self.num_begun[subject] - 1

    @contextlib.contextmanager
    def _run_worker_temporarily(
        self, subject: str, *, quick: bool, laws: Sequence[str] = ()
    ) -> Iterator[_WorkerProcess]:
        process = _WorkerProcess(self, subject, quick=quick, laws=laws or self.laws)
        self._processes.add(process)
        try:
            yield process
        finally:
            process.end_processes()
            self._processes.discard(process)


class _WorkerProcess:
    """A worker process that tries one case at a time, or several processes that try each case together.

    The first of several processes reads cases and writes results for all. With `quick`, XLA skips most optimizations.
    """

    def __init__(self, schedule: Schedule, name: str, *, quick: bool, laws: Sequence[str]):
        subject, simulated = get_subject(name), schedule.simulate > 0
        self.subject, self._engine, self._schedule = name, subject.engine, schedule
        self.is_quick = quick and simulated and subject.engine == "jax"
        num_simulated, environments = schedule.simulate, [dict[str, str]()]
        if subject.num_processes > 1:  # JAX simulates by a flag here, and torch has one device per process
            num_simulated = DEVICES_PER_PROCESS[subject.engine] if subject.engine == "tensorflow" else 0
            environments = make_launcher_environments(subject.num_processes)
        arguments = [subject.engine, str(num_simulated), schedule.mesh, *laws]
        command = [sys.executable, "-m", "layoutmap.testing.worker", *arguments]
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        common = subject.make_environment(quick=self.is_quick, simulated=simulated)
        first, *others = ({**common, **schedule.settings, **environment} for environment in environments)
        popen = partial(subprocess.Popen[str], command, stderr=self._errors, text=True)
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        # Start all processes in one new process group, so that they can be killed together with their children.
        self._process = popen(env=first, stdin=pipe, stdout=pipe, process_group=0)
        self._others = [
            popen(env=environment, stdin=null, stdout=null, process_group=self._process.pid)
            for environment in others
        ]

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def send_case_and_read_results(self, seed: int, deadline: float) -> list[LawResult]:
        """Try a case and return its results. If the process ends or takes too long, the last result is a failure."""
        results: list[LawResult] = []
        timer = threading.Timer(max(0.0, min(CASE_SECONDS, deadline - time.monotonic())), self.kill_processes)
        timer.start()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(f"{self.subject} {seed}\n")
            self._process.stdin.flush()
            for line in self._process.stdout or ():
                message = json.loads(line)
                if "ended" in message:
                    return results
                if "devices" in message:
                    self._schedule.devices[self._engine] = message["devices"]
                    self._schedule.facts[self._engine] = message["facts"]
                    continue
                outcome = Outcome(**message["outcome"])
                results.append(LawResult(message["subject"], message["seed"], outcome, message["program"]))
        except BrokenPipeError:  # the process ended before it read the seed
            pass
        finally:
            timer.cancel()
        self._errors.seek(0)
        why = f"status {self._process.wait()}, or over {CASE_SECONDS:.0f} s: {self._errors.read()[-2000:]}"
        failure = Outcome("a case ends without its process", "failed", why, 0.0)
        return [*results, LawResult(self.subject, seed, failure)]

    def end_processes(self) -> None:
        """End all processes and their children. Only the thread that reads results may call it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_GRACE_SECONDS)  # close stdin, so that the process ends
        self.kill_processes()
        self._process.communicate()
        for other in self._others:
            other.wait()
        self._errors.close()

    def kill_processes(self) -> None:
        """Kill all processes and their children."""
        if any(process.poll() is None for process in (self._process, *self._others)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
