"""The faults that tools/faults.py puts into the source by hand can be put in."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_fault_has_its_place_in_the_source(monkeypatch):
    """The text that a fault changes is in its file, once."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    spec = importlib.util.spec_from_file_location("faults", ROOT / "tools" / "faults.py")
    faults = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "faults", faults)  # its dataclasses look for their module
    spec.loader.exec_module(faults)
    files = {each.file: (ROOT / "src" / "layoutmap" / each.file).read_text("utf-8") for each in faults.FAULTS}

    assert {} == {each.title: n for each in faults.FAULTS if (n := files[each.file].count(each.right)) != 1}
