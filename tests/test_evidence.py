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
