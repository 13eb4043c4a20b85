"""Count the outcomes of drawn cases, and write docs/evidence.md from docs/evidence.json.

`tools/fuzz.py --publish` replaces the counts of the subjects that it tried, and `--add` adds to them.
docs/evidence.json also has the seeds, commits, and commands of each subject.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from layoutmap.core.text_table import format_table
from layoutmap.testing.laws import LAWS
from layoutmap.testing.schedule import LawResult
from layoutmap.testing.subjects import PADDED, SUBJECTS, get_subject

ROOT = Path(__file__).resolve().parents[1]
PAGE, KEPT = ROOT / "docs" / "evidence.md", ROOT / "docs" / "evidence.json"
OUTCOMES = ("held", "wrong", "failed", "not tried")
Counts = dict[str, dict[str, Any]]


def count_outcomes(tried: Iterable[LawResult]) -> Counts:
    """Count, for each subject, the cases, the refused plans, and the outcomes of each law."""
    counts: Counts = {}
    cases: dict[str, dict[int, list[str]]] = {}
    for each in tried:
        subject_counts = counts.setdefault(
            each.subject, {"cases": 0, "refused": 0, "all held": 0, "laws": {}}
        )
        cases.setdefault(each.subject, {}).setdefault(each.seed, []).append(each.outcome.what)
        if each.outcome.what != "refused":
            law_counts = subject_counts["laws"].setdefault(each.outcome.law, dict.fromkeys(OUTCOMES, 0))
            law_counts[each.outcome.what] += 1
    for subject, by_seed in cases.items():
        refused = sum("refused" in found for found in by_seed.values())
        right = sum({*found} <= {"held", "not tried"} for found in by_seed.values())
        seeds = [min(by_seed), max(by_seed)]
        counts[subject] |= {"cases": len(by_seed), "refused": refused, "all held": right, "seeds": seeds}
    return counts


def format_summary(counts: Counts) -> str:
    """Return the counts as a table for a terminal, with a line for each subject and law."""
    rows: list[list[str]] = []
    for subject, subject_counts in counts.items():
        cases = f"{subject_counts['cases']} cases, {subject_counts['refused']} refused by the plan"
        rows.append([get_subject(subject).title, cases, "", "", "", ""])
        for law, outcomes in subject_counts["laws"].items():
            rows.append(["", law, *(str(outcomes[each] or "") for each in OUTCOMES)])
    return "\n".join(format_table(["", "law", *OUTCOMES], rows, OUTCOMES))


def publish(counts: Counts, command: str, *, adds: bool = False) -> None:
    """Write the counts into docs/evidence.json and the tables of docs/evidence.md.

    Args:
        counts: Counts from `count_outcomes`.
        command: Command that tried the cases.
        adds: Whether to add to the counts of earlier commands, instead of replacing them.
    """
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    kept: Counts = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    known = {"date": date.today().isoformat(), "commits": [commit], "commands": [command]}
    for subject, subject_counts in counts.items():
        new = subject_counts | known
        kept[subject] = add_counts(kept[subject], new) if adds and subject in kept else new
    kept = {subject: kept[subject] for subject in SUBJECTS | PADDED if subject in kept}
    KEPT.write_text(f"{json.dumps(kept, indent=1)}\n", encoding="utf-8")
    _write_table("drawn", make_tables(kept))


def check_seeds_are_new(subjects: Iterable[str], first_seed: int) -> None:
    """Raise if a case from `first_seed` on can be one that docs/evidence.json counts already.

    Raises:
        SystemExit: A subject has published seeds of this size or above.
    """
    kept: Counts = json.loads(KEPT.read_text(encoding="utf-8"))
    for subject in subjects:
        if subject in kept and first_seed <= (last := kept[subject]["seeds"][1]):
            raise SystemExit(
                f"{subject}: docs/evidence.json counts seeds up to {last}, so cases from {first_seed} on could be "
                f"counted twice: pass --seed {last + 1}, or replace its counts with --publish alone"
            )


def add_counts(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of two counts of a subject, with the seeds, commits, and commands of both."""
    total = {name: old[name] + new[name] for name in ("cases", "refused", "all held", "commits", "commands")}
    total["laws"] = {
        law: {
            outcome: sum(each["laws"].get(law, {}).get(outcome, 0) for each in (old, new))
            for outcome in OUTCOMES
        }
        for law in old["laws"] | new["laws"]
    }
    seeds = [min(old["seeds"][0], new["seeds"][0]), max(old["seeds"][1], new["seeds"][1])]
    return new | total | {"seeds": seeds, "commits": [*dict.fromkeys(total["commits"])]}


def publish_faults(rows: Iterable[Sequence[str]], minutes: float) -> None:
    """Write inserted faults into the table of docs/evidence.md and keep its other rows.

    Args:
        rows: Number, fault, file, law and case that found it, and seconds.
        minutes: Time limit of the search for each fault.
    """
    head = ["", "fault", "file", f"found within {minutes:g} minutes by", "seconds"]
    lines = {
        int(found[1]): found[0]
        for found in re.finditer(r"^\| (\d+) \|.*$", _split_page("faults")[1], re.MULTILINE)
    }
    lines |= {int(row[0]): _format_row(row) for row in rows}
    table = [
        _format_row(head),
        _format_row(["--:", "---", "---", "---", "--:"]),
        *(lines[number] for number in sorted(lines)),
    ]
    _write_table("faults", "\n".join(table))


def _split_page(part: str) -> tuple[str, str, str]:
    """Split the page into the text before a table, the table, and the rest."""
    start, end = f"<!-- {part}: made by a command of tools/ -->", f"<!-- /{part} -->"
    before, rest = PAGE.read_text(encoding="utf-8").split(start)
    table, after = rest.split(end)
    return before + start, table, end + after


def _write_table(part: str, table: str) -> None:
    before, _, after = _split_page(part)
    PAGE.write_text(f"{before}\n\n{table}\n\n{after}", encoding="utf-8")


def make_tables(kept: Counts) -> str:
    """Return the tables of the page: cases by library, the runs behind them in a collapsed block, and the laws."""
    rows = ["| Library | Cases | All held | Refused | Wrong |", "| --- | --: | --: | --: | --: |"]
    runs: list[str] = []
    for subject, found in kept.items():
        title, (first, last) = get_subject(subject).title, found["seeds"]
        wrong = found["cases"] - found["refused"] - found["all held"]
        rows.append(_format_row([title, found["cases"], found["all held"], found["refused"], wrong]))
        commits = ", ".join(f"`{commit}`" for commit in found["commits"])
        runs.append(f"**{title}**: seeds {first} to {last}, {found['date']}, commits {commits}")
        runs.append(f"```sh\n{found['commands'][0]}\n```")
    laws = ["| Law | Held | Tried |", "| --- | --: | --: |"]
    for law in LAWS:
        outcomes = [found["laws"].get(law, dict.fromkeys(OUTCOMES, 0)) for found in kept.values()]
        tried = sum(each[outcome] for each in outcomes for outcome in OUTCOMES[:3])
        if tried:
            laws.append(_format_row([law, sum(each["held"] for each in outcomes), tried]))
    collapsed = collapse_block("Seeds, commits, and commands of each row", "\n\n".join(runs))
    return "\n\n".join(["\n".join(rows), collapsed, "## Results by law", "\n".join(laws)])


def collapse_block(summary: str, text: str) -> str:
    """Return Markdown that shows only a summary until the reader opens it, on the site and on GitHub."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>'


def _format_row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
