"""The evidence page shows the counts of docs/evidence.json."""

import json
import re

import frameworks
import pytest


@pytest.fixture
def evidence(monkeypatch):
    """Import the tool that writes the page."""
    monkeypatch.syspath_prepend(frameworks.ROOT / "tools")
    import evidence

    return evidence


def test_the_page_has_the_tables_of_the_counts(evidence):
    """The tables on the page equal the tables that the tool makes of the counts."""
    page = evidence.PAGE.read_text(encoding="utf-8")
    kept = json.loads(evidence.KEPT.read_text(encoding="utf-8"))

    assert evidence.make_tables(kept) == page.partition("tools/ -->\n\n")[2].partition("\n\n<!-- /drawn")[0]


def test_the_first_table_fits_a_phone(evidence):
    """The first table has five columns; seeds, commits, and commands are in a collapsed block."""
    page = evidence.PAGE.read_text(encoding="utf-8")
    first = page[page.index("| Library") :]
    shown = re.sub(r"<details.*?</details>", "", page, flags=re.DOTALL)

    assert 6 == first.splitlines()[0].count("|")
    assert [] == re.findall(r"seeds \d|commits? `|tools/fuzz\.py", shown)


def test_counts_of_two_runs_are_added(evidence):
    """`--add` adds cases and outcomes, names both commands, and refuses seeds that are already counted."""
    run = {"cases": 2, "refused": 0, "all held": 2, "seeds": [10, 11], "date": "2026-11-29", "commits": ["a"]}
    old = run | {"laws": {"plans": dict.fromkeys(evidence.OUTCOMES, 1)}, "commands": ["first"]}
    laws = {law: dict.fromkeys(evidence.OUTCOMES, 2) for law in ("plans", "syncs")}
    new = run | {"all held": 1, "seeds": [12, 13], "date": "2026-11-30", "laws": laws, "commands": ["second"]}

    total = evidence.add_counts(old, new)

    assert (4, 3, [10, 13], "2026-11-30") == tuple(total[k] for k in ("cases", "all held", "seeds", "date"))
    assert {"plans": 3, "syncs": 2} == {law: outcomes["held"] for law, outcomes in total["laws"].items()}
    assert (["a"], ["first", "second"]) == (total["commits"], total["commands"])
    last = json.loads(evidence.KEPT.read_text(encoding="utf-8"))["torch"]["seeds"][1]
    with pytest.raises(SystemExit, match=f"torch: docs/evidence.json counts seeds up to {last}"):
        evidence.check_seeds_are_new(["torch"], last)
    evidence.check_seeds_are_new(["torch"], last + 1)
