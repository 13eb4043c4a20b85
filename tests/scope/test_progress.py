"""What long work says on stderr: on one line of a terminal, and in a log a line each few seconds."""

from __future__ import annotations

import sys

import pytest

from layoutmap.scope import progress
from layoutmap.scope.progress import ElapsedTime, ProgressMode

PROCESSES = ("core",)


def said(capsys: pytest.CaptureFixture[str], enabled: ProgressMode, times: int = 3) -> str:
    """What work says that is asked so often how far it is."""
    with ElapsedTime("it takes", enabled=enabled) as shown:
        for _ in range(times):
            shown()
    return capsys.readouterr().err


def test_a_log_gets_whole_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not overwritten, and come where the work takes long and as often as a reader needs."""
    assert "" == said(capsys, "log")
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0)
    assert "layoutmap: it takes, 0 s\n" * 3 == said(capsys, "log")


def test_without_a_terminal_only_a_log_is_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing by default, and one line that is overwritten where the program asks for it."""
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0)
    assert "" == said(capsys, None) == said(capsys, False)
    assert "\rlayoutmap: it takes, 0 s" in said(capsys, True)


def test_on_a_terminal_a_log_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is overwritten as without."""
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert "\n" not in said(capsys, "log")
    assert "" != said(capsys, "log")
