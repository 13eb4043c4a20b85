"""Counts of what came of drawn cases, and docs/evidence.md, which `tools/fuzz.py --publish` makes of them.

docs/evidence.json keeps the counts by subject; a run replaces those of the subjects that it tried.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from layoutmap.core.text_table import text_table
from layoutmap.testing.laws import LAWS
from layoutmap.testing.schedule import LawResult
from layoutmap.testing.subjects import SUBJECTS, get_subject

ROOT = Path(__file__).resolve().parents[1]
PAGE, KEPT = ROOT / "docs" / "evidence.md", ROOT / "docs" / "evidence.json"
OUTCOMES = ("held", "wrong", "failed", "not tried")
Counts = dict[str, dict[str, Any]]


def counted(tried: Iterable[LawResult]) -> Counts:
    """Return the counts by subject: cases, those that the plan refused, seeds, and the outcomes of each law."""
    counts: Counts = {}
    cases: dict[str, dict[int, list[str]]] = {}
    for each in tried:
        of_subject = counts.setdefault(each.subject, {"cases": 0, "refused": 0, "all held": 0, "laws": {}})
        cases.setdefault(each.subject, {}).setdefault(each.seed, []).append(each.outcome.what)
        if each.outcome.what != "refused":
            of_law = of_subject["laws"].setdefault(each.outcome.law, dict.fromkeys(OUTCOMES, 0))
            of_law[each.outcome.what] += 1
    for subject, by_seed in cases.items():
        refused = sum("refused" in found for found in by_seed.values())
        right = sum({*found} <= {"held", "not tried"} for found in by_seed.values())
        seeds = [min(by_seed), max(by_seed)]
        counts[subject] |= {"cases": len(by_seed), "refused": refused, "all held": right, "seeds": seeds}
    return counts


def summary(counts: Counts) -> str:
    """Return the counts as a table for a terminal: a line for each subject and law."""
    rows: list[list[str]] = []
    for subject, of_subject in counts.items():
        cases = f"{of_subject['cases']} cases, {of_subject['refused']} refused by the plan"
        rows.append([get_subject(subject).title, cases, "", "", "", ""])
        for law, outcomes in of_subject["laws"].items():
            rows.append(["", law, *(str(outcomes[each] or "") for each in OUTCOMES)])
    return "\n".join(text_table(["", "law", *OUTCOMES], rows, OUTCOMES))


def publish(counts: Counts, command: str) -> None:
    """Write the counts into docs/evidence.json, and the tables of docs/evidence.md from all that it has.

    Args:
        counts: What `counted` returned.
        command: The command that tried the cases.
    """
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    kept: Counts = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    known = {"date": date.today().isoformat(), "commit": commit, "command": command}
    kept |= {subject: of_subject | known for subject, of_subject in counts.items()}
    kept = {subject: kept[subject] for subject in SUBJECTS if subject in kept}
    KEPT.write_text(f"{json.dumps(kept, indent=1)}\n", encoding="utf-8")
    _write("drawn", tables(kept))


def publish_faults(rows: Iterable[Sequence[str]], minutes: float) -> None:
    """Write faults that were put in by hand into the table of docs/evidence.md, which keeps its other rows.

    Args:
        rows: Number, fault, file, law and case that found it, and seconds.
        minutes: How long each was looked for.
    """
    head = ["", "fault", "file", f"found within {minutes:g} minutes by", "seconds"]
    lines = {
        int(found[1]): found[0]
        for found in re.finditer(r"^\| (\d+) \|.*$", _parts("faults")[1], re.MULTILINE)
    }
    lines |= {int(row[0]): _row(row) for row in rows}
    table = [
        _row(head),
        _row(["--:", "---", "---", "---", "--:"]),
        *(lines[number] for number in sorted(lines)),
    ]
    _write("faults", "\n".join(table))


def _parts(part: str) -> tuple[str, str, str]:
    """The page before a table, the table, and the rest."""
    start, end = f"<!-- {part}: made by a command of tools/ -->", f"<!-- /{part} -->"
    before, rest = PAGE.read_text(encoding="utf-8").split(start)
    table, after = rest.split(end)
    return before + start, table, end + after


def _write(part: str, table: str) -> None:
    before, _, after = _parts(part)
    PAGE.write_text(f"{before}\n\n{table}\n\n{after}", encoding="utf-8")


def tables(kept: Counts) -> str:
    """Return the tables of the page: how many cases of each subject, and what came of each law."""
    lines = [
        "| models | drawn | refused by the plan | every law held | wrong or failed | seeds | date, commit | command |",
        "| --- | --: | --: | --: | --: | --- | --- | --- |",
    ]
    for subject, found in kept.items():
        rest = found["cases"] - found["refused"] - found["all held"]
        first, last = found["seeds"]
        cells = [SUBJECTS[subject].title, *(found[each] for each in ("cases", "refused", "all held")), rest]
        cells += [f"{first} to {last}", f"{found['date']}, {found['commit']}", f"`{found['command']}`"]
        lines.append(_row(cells))
    titles = [SUBJECTS[subject].title for subject in kept]
    lines += ["", _row(["law: held of tried", *titles]), _row(["---", *("--:" for _ in kept)])]
    for law in LAWS:
        cells: list[str] = []
        for found in kept.values():
            outcomes = found["laws"].get(law, dict.fromkeys(OUTCOMES, 0))
            cells.append(f"{outcomes['held']} of {sum(outcomes[each] for each in OUTCOMES[:3])}")
        lines.append(_row([law, *cells]))
    return "\n".join(lines)


def _row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
