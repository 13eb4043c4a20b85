"""The report of a self-test, as text for a terminal, as HTML, and as JSON."""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from layoutmap.core.errors import LayoutMapError
from layoutmap.core.text_table import format_html_pre, format_html_table, format_table
from layoutmap.testing.laws import Outcome
from layoutmap.testing.schedule import LawResult
from layoutmap.testing.selftest.speeds import COLUMNS as SPEED_COLUMNS
from layoutmap.testing.selftest.speeds import MeasuredSpeeds
from layoutmap.testing.subjects import get_subject

_COLUMNS = ("tried on", "law", "tried", "held", "failed", "seconds")
_FAULT_COLUMNS = ("on", "known fault", "state")
_MAX_WHY_LINES = 20
_FOLDER = re.compile(r"(?<![\w.:/])/(?:[^\s/'\",:;()]+/)+(?=[^\s/'\",:;()])")
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:80em;padding:0 1em;color:#1c2530}"
    "pre{background:#f3f5f7;padding:.8em;white-space:pre-wrap;border-radius:6px}td{border-top:1px solid #e3e7eb}"
    "table{margin:1.2em 0}.well{color:#0b6e3b}.wrong{color:#b3261e}"
)


@dataclass
class Report:
    """The report of a self-test."""

    facts: dict[str, str]  # facts by name: options, releases, and devices
    results: list[LawResult] = field(default_factory=list[LawResult])
    seconds: float = 0.0
    is_complete: bool = True  # False if the self-test was interrupted
    with_names: bool = False  # whether HTML and JSON keep names of hosts, users, and folders
    speeds: list[MeasuredSpeeds] = field(default_factory=list[MeasuredSpeeds])  # speeds of each engine

    def add_speeds(self, speeds: MeasuredSpeeds) -> None:
        """Add the speeds of an engine's devices, and the result of the law about slow collectives."""
        self.speeds.append(speeds)
        self.results.append(speeds.run_collectives_law())
        results = [*speeds.results, self.results[-1]]
        untried = [result.outcome for result in results if result.outcome.what == "not tried"]
        if untried:
            why = untried[0].why.partition("\n")[0]
            self.facts[f"{speeds.engine} speeds"] = f"not tried: {untried[0].law}: {why}"

    @property
    def failures(self) -> list[LawResult]:
        """The results of laws that did not hold."""
        return [result for result in self.results if result.outcome.is_failure]

    @property
    def missing_packages(self) -> dict[str, int]:
        """A dict from each missing package to the number of laws that could not be tried without it."""
        return dict(Counter(r.outcome.missing for r in self.results if r.outcome.missing))

    @property
    def headline(self) -> str:
        """A line that says whether all laws held, with the counts of laws and cases."""
        results = [result for result in self.results if not result.outcome.missing]
        cases = len({(result.subject, result.seed) for result in results})
        total = f"{len(results)} laws on {cases} cases in {self.seconds:.0f} s"
        missing = self.missing_packages.items()
        without = "".join(f"; {number} not tried without {name}" for name, number in missing)
        if not self.failures:
            return (f"well: {total}, and none failed" if cases else "nothing was tried") + without
        laws = dict.fromkeys(f"{failure.subject}: {failure.outcome.law}" for failure in self.failures)
        return f"WRONG: {len(self.failures)} of {total} failed: {'; '.join(laws)}{without}"

    def make_law_rows(self) -> list[list[str]]:
        """Return a table row for each tested library or engine and each law: counts of trials, and seconds."""
        outcomes: dict[tuple[str, str], list[Outcome]] = {}
        for result in self.results:
            key = get_subject(result.subject).title, result.outcome.law
            outcomes.setdefault(key, []).append(result.outcome)
        rows: list[list[str]] = []
        for key, tried in outcomes.items():
            held = sum(outcome.what == "held" for outcome in tried)
            failed = sum(outcome.is_failure for outcome in tried)
            seconds = sum(outcome.seconds for outcome in tried)
            rows.append([*key, str(held + failed), str(held or ""), str(failed or ""), f"{seconds:.1f}"])
        return rows

    def make_fault_rows(self) -> list[list[str]]:
        """Return a table row for each engine and known fault, with its state, such as "corrected" or "present"."""
        states = {
            (get_subject(result.subject).title, figure["fault"]): figure["state"]
            for result in self.results
            for figure in result.outcome.figures
            if "fault" in figure
        }
        return [[*key, state] for key, state in sorted(states.items())]

    def to_text(self, width: int | None = None) -> str:
        """Return a text with the headline in its first and last line, and all tables, facts, and the first failure."""
        tables = [
            "\n".join(format_table(columns, rows, columns[first_number:], width=width, drop=["seconds"]))
            for columns, rows, first_number in self._tables
        ]
        return "\n\n".join([self.headline, *tables, self._facts_text, *self._failure_texts, self.headline])

    def to_html(self) -> str:
        """Return the report as an HTML page without external resources."""
        texts = [*map(self._hide_names, (self.headline, self._facts_text, *self._failure_texts))]
        verdict, facts, *failure = map(format_html_pre, texts)
        head = f'<meta charset="utf-8"><title>layoutmap selftest</title><style>{_STYLE}</style>'
        body = f'<div class="{"wrong" if self.failures else "well"}">{verdict}</div>{facts}'
        tables = "".join(format_html_table("", columns, rows) for columns, rows, _ in self._tables)
        return f"<!doctype html><html lang=en>{head}<body>{body}{tables}{''.join(failure)}</html>\n"

    def to_json(self) -> str:
        """Return the report as JSON, with all failures."""
        facts: dict[str, Any] = {"format": "layoutmap selftest", "version": 1}
        facts |= {"says": self._hide_names(self.headline)}
        facts |= {"complete": self.is_complete, "seconds": round(self.seconds, 1)}
        facts["ran on"] = {name: self._hide_names(fact) for name, fact in self.facts.items()}
        rows = ([*row[:2], *(float(cell or 0) for cell in row[2:])] for row in self.make_law_rows())
        facts["laws"] = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
        facts["faults"] = [dict(zip(_FAULT_COLUMNS, row, strict=True)) for row in self.make_fault_rows()]
        facts["measured"] = {speeds.engine: speeds.measurements for speeds in self.speeds}
        facts["counted"] = {speeds.engine: speeds.predicted for speeds in self.speeds}
        facts["failures"] = [
            {"subject": failure.subject, "seed": failure.seed, "program": failure.program}
            | {name: self._hide_names(str(fact)) for name, fact in asdict(failure.outcome).items()}
            for failure in self.failures
        ]
        return f"{json.dumps(facts, indent=1)}\n"

    def to_machine_file(self) -> str:
        """Return a machine file with the speeds of the first measured engine."""
        for speeds in self.speeds:
            if speeds.has_enough_measurements:
                devices, topology = (
                    self.facts[f"{speeds.engine} {name}"] for name in ("devices", "topology")
                )
                on = f"{devices} on {speeds.engine} ({topology})"
                return speeds.to_machine_file(f"measured by layoutmap selftest: {on}")
        raise LayoutMapError(
            "no machine file can be written",
            why="no collective was measured among two devices or more",
            fix="start the self-test on several devices, as with torchrun or --simulate 8, and pass a larger --minutes",
        )

    @property
    def _tables(self) -> list[tuple[Sequence[str], list[list[str]], int]]:
        """The tables: column names, rows, and the index of the first column with numbers."""
        speed_rows = [row for speeds in self.speeds for row in speeds.make_table_rows()]
        tables = [
            (_COLUMNS, self.make_law_rows(), 2),
            (SPEED_COLUMNS, speed_rows, 3),
            (_FAULT_COLUMNS, self.make_fault_rows(), len(_FAULT_COLUMNS)),
        ]
        return [tables[0], *(table for table in tables[1:] if table[1])]

    def _hide_names(self, text: str) -> str:
        return text if self.with_names else remove_names_and_folders(text)

    @property
    def _facts_text(self) -> str:
        return "\n".join(f"{name:20} {fact}" for name, fact in self.facts.items())

    @property
    def _failure_texts(self) -> list[str]:
        """A text about the first failure and, if there is one, its program. The list is empty if no law failed."""
        if not self.failures:
            return []
        first = self.failures[0]
        why = "\n".join(first.outcome.why.strip().splitlines()[-_MAX_WHY_LINES:])
        text = f"The first failure: {first.subject}, seed {first.seed}: {first.outcome.law}\n{why}"
        return [text, f"As a program of its own:\n\n{first.program}"] if first.program else [text]


def remove_names_and_folders(text: str) -> str:
    """Return a text without the names of this host and user and without folders in paths.

    Example:
        >>> remove_names_and_folders('File "/usr/lib/layoutmap/core/mesh.py", line 3')
        'File "mesh.py", line 3'
    """
    text = _FOLDER.sub("", text)
    for name, replacement in ((socket.gethostname(), "HOST"), (getpass.getuser(), "USER")):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", replacement, text)
    return text
