"""What functions do is the same text wherever they were read, and another one for each change of what they do."""

import json
import os
import subprocess
import sys

import pytest

from layoutmap.adapters.programs import Program

SOURCE = """
import functools, time

FACTOR = 3

def called(x):
    return x in {"a", "b", "c", "d"}

def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

class Parent:
    def forward(self, x):
        return self.helper(x) + self.rate

    def unused(self):
        return time.time()

class Model(Parent):
    limit = staticmethod(lambda x: x - 1)

    @property
    def rate(self):
        return 0.5

    def helper(self, x):
        return [each * FACTOR for each in x if called(each)]

    @decorated
    def forward(self, x, scale=2.0, *, shift=1):
        return super().forward(self.limit(x)) * scale + shift

def closed(scale, first=None):
    def inner(x):
        return x * scale
    return inner

VALUES = {
    "closure": closed(4.0),
    "partial": functools.partial(called, x=[closed(5.0), 6]),
    "place": __file__,
    "device": "cuda:0",
    "names": frozenset(["one", "two", "three"]),
}
"""
PRINTED = """
import sys, json
from layoutmap.adapters.programs import Program
sys.path.insert(0, sys.argv[1])
import theirs
program = Program()
program.methods(theirs.Model, ["forward"])
program.value("all", theirs.VALUES)
print(json.dumps([part[:2] for part in program.settings + program.lines]))
"""


def test_it_is_the_same_wherever_and_whenever_it_was_read(tmp_path):
    """In processes that hash in other orders, from other folders, lines and byte code or text."""
    told = []
    for number in range(2):
        (path := tmp_path / f"host {number}").mkdir()
        (path / "theirs.py").write_text("\n" * number + SOURCE.replace("cuda:0", f"cuda:{number}"))
        command = [sys.executable, "-c", PRINTED, str(path)]
        environment = {**os.environ, "PYTHONHASHSEED": str(number + 1)}
        ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        told.append(json.loads(ran.stdout))

    assert told[0] == told[1]
    assert ["all.place", "a path"] in told[0]


def parts_of(source):
    """What is compared of the model and the values in a source."""
    held = {"__name__": "theirs", "__file__": "/theirs.py"}
    exec(compile(source, "theirs", "exec"), held)
    program = Program()
    program.methods(held["Model"], ["forward"])
    program.value("all", held["VALUES"])
    return program.settings + program.lines


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x - 1", "x - 2"),
        ("return 0.5", "return 0.6"),
        ("scale=2.0", "scale=2.5"),
        ("shift=1", "shift=2"),
        ("FACTOR = 3", "FACTOR = 4"),
        ('"a", "b"', '"a", "e"'),
        ("each * FACTOR", "FACTOR - each"),
        ("function(*args)", "function(*args) * 2"),
        ("closed(4.0)", "closed(4.5)"),
        ("closed(5.0)", "closed(5.5)"),
        (", 6]", ", 7]"),
        ("called, x", "len, x"),
        ('"one"', '"four"'),
        ("self.helper(x) + ", "self.helper(x) - "),
    ],
)
def test_each_change_of_what_it_does_is_seen(before, after):
    """In methods, what they read and call, decorators, defaults, closures and constants."""
    assert 1 == SOURCE.count(before)
    assert parts_of(SOURCE) != parts_of(SOURCE.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("time.time()", "0"),
        ("import functools, time", "import time, functools\n\n"),
        ("= 2.0, *", "= 2.0,  *"),
    ],
)
def test_changes_of_what_it_does_not_do_are_not(before, after):
    """Where it stands, and what is never called."""
    assert parts_of(SOURCE) == parts_of(SOURCE.replace(before, after))
