"""A queue of tests that several pytest runs of one test process share: each test is run by whoever claims it first.

`tools/run_tests.py` names a folder in LAYOUTMAP_TEST_QUEUE. A claim is a file in it that can be made
only once. Two runs begin at the two ends of the tests and meet somewhere, so that the set-up of
hardly more than one file is made twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

FOLDER, BACKWARDS = "LAYOUTMAP_TEST_QUEUE", "LAYOUTMAP_TEST_BACKWARDS"
_deselected: list[str] = []


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    _deselected.extend(item.nodeid for item in items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Say how much there is to do, for the line that shows progress."""
    known = {"selected": len(session.items), "deselected": _deselected}
    made = Path(f"{os.environ[FOLDER]}.{os.getpid()}")
    made.write_text(json.dumps(known), encoding="utf-8")
    made.replace(f"{os.environ[FOLDER]}.json")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if session.testsfailed or session.config.option.collectonly:
        return None  # files that cannot be imported: pytest says so
    items = session.items[::-1] if os.environ.get(BACKWARDS) else session.items
    mine = _claimed(items)
    item = next(mine, None)
    while item is not None:
        # What pytest asks for: it tells which fixtures the next test still needs
        following = next(mine, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def _claimed(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    for item in items:
        claim = Path(os.environ[FOLDER]) / hashlib.sha256(item.nodeid.encode()).hexdigest()
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            continue
        yield item
