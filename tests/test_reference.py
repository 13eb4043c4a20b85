"""The reference on the site has every name that users import."""

import importlib
import re

import frameworks
import pytest

import layoutmap as lm

SHOWN = [
    name
    for page in (frameworks.ROOT / "docs" / "reference").glob("*.md")
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]
OTHERWISE = {  # public name -> what the reference shows for it
    "layoutmap.plan": "layoutmap.scope.scope.plan",  # a folder has this name, too
    "layoutmap.scope": "layoutmap.scope.scope.scope",
    "layoutmap.DVariable": "layoutmap.engines.tensorflow.variable.DVariable",
}
NO_PAGE = {"layoutmap.dtensor", "layoutmap.__version__"}  # a module with a page of its own; a text


@pytest.mark.parametrize("module", ["layoutmap", "layoutmap.dtensor"])
def test_every_public_name_is_in_the_reference(module):
    """Each once; and nothing is named there that does not exist."""
    names = lm.__all__ if module == "layoutmap" else _all_of(module)
    full = [f"{module}.{name}" for name in names]
    expected = {OTHERWISE.get(name, name) for name in full} - NO_PAGE
    assert len(SHOWN) == len({*SHOWN})
    assert [] == sorted(expected - {*SHOWN})
    assert [] == sorted(n for n in SHOWN if n.rpartition(".")[0] == module and n not in expected)


def _all_of(module):
    """The names that a module's source lists: to import it takes an engine."""
    path = importlib.util.find_spec(module).origin
    with open(path, encoding="utf-8") as source:
        found = re.search(r"^__all__ = \[(.*?)\]", source.read(), re.MULTILINE | re.DOTALL)
    return re.findall(r'"(\w+)"', found[1])
