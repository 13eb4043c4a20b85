"""The outcome of a self-test, as text for a terminal, as a page and as JSON."""

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
from layoutmap.core.text_table import format_pre, html_table, text_table
from layoutmap.testing.schedule import Tried
from layoutmap.testing.selftest import measured
from layoutmap.testing.selftest.measured import Speeds
from layoutmap.testing.subjects import subject_named

_COLUMNS = ("tried on", "law", "tried", "held", "failed", "seconds")
_FAULTS = ("on", "known fault", "state")
_LINES_OF_WHY = 20
_FOLDER = re.compile(r"(?<![\w.:/])/(?:[^\s/'\",:;()]+/)+(?=[^\s/'\",:;()])")
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:80em;padding:0 1em;color:#1c2530}"
    "pre{background:#f3f5f7;padding:.8em;white-space:pre-wrap;border-radius:6px}td{border-top:1px solid #e3e7eb}"
    "table{margin:1.2em 0}.well{color:#0b6e3b}.wrong{color:#b3261e}"
)


@dataclass
class Report:
    """The outcome of a self-test.

    Args:
        facts: What was asked for, releases, and devices, by name.
        tried: What came of each law on each case.
        seconds: How long it took.
        is_complete: Whether it was not interrupted.
        with_names: Whether names of hosts, users and folders stay in the page and in the JSON.
        speeds: What was measured, of each engine.
    """

    facts: dict[str, str]
    tried: list[Tried] = field(default_factory=list[Tried])
    seconds: float = 0.0
    is_complete: bool = True
    with_names: bool = False
    speeds: list[Speeds] = field(default_factory=list[Speeds])

    def add_speeds(self, speeds: Speeds) -> None:
        """Add the speeds of an engine's devices, and the law that none is far below what it should be."""
        self.speeds.append(speeds)
        self.tried.append(speeds.judged())
        untried = [t.outcome for t in (*speeds.tried, self.tried[-1]) if t.outcome.what == "not tried"]
        if untried:
            why = untried[0].why.partition("\n")[0]
            self.facts[f"{speeds.engine} speeds"] = f"not tried: {untried[0].law}: {why}"

    @property
    def failures(self) -> list[Tried]:
        """The cases of laws that did not hold."""
        return [each for each in self.tried if each.outcome.is_suspicious]

    @property
    def missing(self) -> dict[str, int]:
        """How many laws could not be tried for want of a package, by its name."""
        return dict(Counter(each.outcome.missing for each in self.tried if each.outcome.missing))

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        tried = [each for each in self.tried if not each.outcome.missing]
        cases = len({(each.subject, each.seed) for each in tried})
        begun = f"{len(tried)} laws on {cases} cases in {self.seconds:.0f} s"
        without = "".join(f"; {number} not tried without {name}" for name, number in self.missing.items())
        if not self.failures:
            return (f"well: {begun}, and none failed" if cases else "nothing was tried") + without
        laws = dict.fromkeys(f"{each.subject}: {each.outcome.law}" for each in self.failures)
        return f"WRONG: {len(self.failures)} of {begun} failed: {'; '.join(laws)}{without}"

    def rows(self) -> list[list[str]]:
        """A row for each law and subject: how often it was tried, held and failed; seconds."""
        of_law: dict[tuple[str, str], list[Tried]] = {}
        for each in self.tried:
            of_law.setdefault((subject_named(each.subject).title, each.outcome.law), []).append(each)
        rows: list[list[str]] = []
        for key, tried in of_law.items():
            failed = sum(each.outcome.is_suspicious for each in tried)
            numbers = [sum(each.outcome.what == "held" for each in tried), failed]
            seconds = sum(each.outcome.seconds for each in tried)
            rows.append([*key, str(sum(numbers)), *(str(each or "") for each in numbers), f"{seconds:.1f}"])
        return rows

    def faults(self) -> list[list[str]]:
        """A row for each known fault: whether it is corrected, gone from the engine, or present nevertheless."""
        found = {
            (subject_named(each.subject).title, figure["fault"]): figure["state"]
            for each in self.tried
            for figure in each.outcome.figures
            if "fault" in figure
        }
        return [[*key, state] for key, state in sorted(found.items())]

    def to_text(self, width: int | None = None) -> str:
        """Return the tables, what the test ran on and the first failure; the verdict comes first and last."""
        tables = [
            "\n".join(text_table(head, rows, head[numbers:], width=width, drop=["seconds"]))
            for head, rows, numbers in self._tables
        ]
        return "\n\n".join([self.headline, *tables, self._ran_on, *self._first_failure, self.headline])

    def to_html(self) -> str:
        """Return the same as a page that loads nothing."""
        told = [self._named(part) for part in (self.headline, self._ran_on, *self._first_failure)]
        verdict, ran_on, *failure = map(format_pre, told)
        head = f'<meta charset="utf-8"><title>layoutmap selftest</title><style>{_STYLE}</style>'
        body = f'<div class="{"wrong" if self.failures else "well"}">{verdict}</div>{ran_on}'
        tables = "".join(html_table("", columns, rows) for columns, rows, _ in self._tables)
        return f"<!doctype html><html lang=en>{head}<body>{body}{tables}{''.join(failure)}</html>\n"

    def to_json(self) -> str:
        """Return all that is known as JSON, with every failure."""
        facts: dict[str, Any] = {"format": "layoutmap selftest", "version": 1}
        facts |= {"says": self._named(self.headline)}
        facts |= {"complete": self.is_complete, "seconds": round(self.seconds, 1)}
        facts["ran on"] = {name: self._named(fact) for name, fact in self.facts.items()}
        rows = ([*row[:2], *(float(cell or 0) for cell in row[2:])] for row in self.rows())
        facts["laws"] = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
        facts["faults"] = [dict(zip(_FAULTS, row, strict=True)) for row in self.faults()]
        facts["measured"] = {each.engine: each.figures for each in self.speeds}
        facts["counted"] = {each.engine: each.counted for each in self.speeds}
        facts["failures"] = [
            {"subject": t.subject, "seed": t.seed, "program": t.program}
            | {name: self._named(str(fact)) for name, fact in asdict(t.outcome).items()}
            for t in self.failures
        ]
        return f"{json.dumps(facts, indent=1)}\n"

    def to_machine_file(self) -> str:
        """Return a machine file of the first engine whose devices were measured.

        Raises:
            LayoutMapError: None was.
        """
        for speeds in self.speeds:
            if speeds.is_enough:
                devices, topology = (self.facts[f"{speeds.engine} {of}"] for of in ("devices", "topology"))
                on = f"{devices} on {speeds.engine} ({topology})"
                return speeds.to_machine_file(f"measured by layoutmap selftest: {on}")
        raise LayoutMapError(
            "no machine file can be written",
            why="no collective was measured among two devices or more",
            fix="start it on several devices, as with torchrun or --simulate 8, and give it more --minutes",
        )

    @property
    def _tables(self) -> list[tuple[Sequence[str], list[list[str]], int]]:
        """The tables: their heads, their rows, and from which column on there are numbers."""
        speeds, faults = [row for each in self.speeds for row in each.rows()], self.faults()
        others = (measured.COLUMNS, speeds, 3), (_FAULTS, faults, len(_FAULTS))
        return [(_COLUMNS, self.rows(), 2), *(each for each in others if each[1])]

    def _named(self, text: str) -> str:
        return text if self.with_names else without_names(text)

    @property
    def _ran_on(self) -> str:
        return "\n".join(f"{name:20} {fact}" for name, fact in self.facts.items())

    @property
    def _first_failure(self) -> list[str]:
        """The first failure, and its program; nothing if there is none."""
        if not self.failures:
            return []
        first = self.failures[0]
        why = "\n".join(first.outcome.why.strip().splitlines()[-_LINES_OF_WHY:])
        told = f"The first failure: {first.subject}, seed {first.seed}: {first.outcome.law}\n{why}"
        return [told, f"As a program of its own:\n\n{first.program}"] if first.program else [told]


def without_names(text: str) -> str:
    """Return a text without the names of this host and user, and without the folders of paths.

    Example:
        >>> without_names('File "/usr/lib/layoutmap/core/mesh.py", line 3')
        'File "mesh.py", line 3'
    """
    text = _FOLDER.sub("", text)
    for name, instead in ((socket.gethostname(), "HOST"), (getpass.getuser(), "USER")):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text)
    return text
