"""Processes hear of each other's end, whatever it is, and go on if they need them no more."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("peers_process.py")
KILLED = (-signal.SIGKILL, "", "")
TO_THE_END = (0, "to the end", "")


def ended(number):
    return (1, "", f"layoutmap: process {number} of this program has ended")


def failed(first="Traceback (most recent call last):"):
    return (1, "", first)


CASES = {  # of each process its status, and the first lines of stdout and stderr
    "killed": [ended(2), ended(2), KILLED],
    "killed in two scopes": [ended(1), KILLED],
    "first killed": [KILLED, ended(0)],
    "killed with a child": [ended(1), KILLED],
    "raises": [ended(1), failed()],
    "fails at once": [failed(), KILLED],
    "exits": [ended(1), (3, "", "")],
    "has ended": [failed(), TO_THE_END],
    "staggered": [TO_THE_END] * 3,
    "busy": [TO_THE_END] * 2,
    "forgotten": [TO_THE_END, KILLED],
    "unreachable": [failed()] * 2,
    "stranger": [TO_THE_END] * 2,
    "late": [TO_THE_END] * 2,
    "given up": [TO_THE_END, failed()],
    "spawned": [TO_THE_END, (0, "", "")],
    "spawned raises": [ended(1), failed("Process ForkProcess-1:")],
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What came of each process in each case."""
    folder = tmp_path_factory.mktemp("peers")
    subprocess.run([sys.executable, WORKER, folder], check=True, timeout=60)
    return json.loads((folder / "told.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_a_process_ends_if_one_that_it_needs_has_ended(told, case):
    """Killed, exited or failed: the others name it and end with status 1; none does that needs it no more."""
    processes = [told[case][str(number)] for number in range(len(CASES[case]))]

    assert CASES[case] == [
        (status, *(text.partition("\n")[0] for text in said)) for status, *said in processes
    ]


def test_it_is_said_once(told):
    """However many scopes and steps are in use."""
    assert 1 == told["killed in two scopes"]["0"][2].count("has ended")


def test_whose_end_an_error_comes_from_is_said(told):
    """Also if the error ends the process before it hears of it."""
    assert "layoutmap: process 1 of this program has ended" in told["fails at once"]["0"][2]


def test_processes_that_cannot_reach_each_other_warn(told):
    """Each says whose end it would not hear of."""
    warned = (
        "LayoutMapWarning: if another process dies, this one may wait for it forever\n  no connection to  pid"
    )

    assert [True] * 2 == [warned in told["unreachable"][str(number)][2] for number in range(2)]


def test_it_is_said_why_a_process_has_ended(told):
    """The error that ended it is reported, or that it has done all that it had to do, or that nothing was heard."""
    done = "it has begun all that it had to do, and this process begins more"
    said = {
        "killed": "its connection was closed",
        "raises": "ValueError: no more disk",
        "spawned raises": "ValueError: no more disk",
        "exits": done,
        "has ended": done,
    }

    assert dict.fromkeys(said, True) == {case: text in told[case]["0"][2] for case, text in said.items()}
