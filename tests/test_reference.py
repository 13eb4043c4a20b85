"""The reference on the site has every name that users import."""

import ast
import functools
import importlib
import re

import frameworks
import pytest

import layoutmap as lm
from layoutmap.core.unsupported import UNKNOWN_ORDER_KIND, UnsupportedFeature

PAGES = sorted((frameworks.ROOT / "docs" / "reference").glob("*.md"))
SHOWN = [
    name
    for page in PAGES
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_listed_member_exists(page):
    """Each class on the page lists members that users call, and the class or its bases define each of them."""
    classes = _members_by_class()
    listed = re.findall(
        r"^::: ([\w.]+)\n    options: \{.*?members: \[(.*?)\]", page.read_text(encoding="utf-8"), re.M
    )
    members = [(path.split(".")[-1], name) for path, names in listed for name in re.findall(r"\w+", names)]

    assert page.read_text(encoding="utf-8").count("members: [") == len(listed)
    assert [] == [each for each in members if each[1] not in classes[each[0]]]
    assert [] == [name for _, name in members if name.startswith(("_", "warn_"))]


@functools.cache
def _members_by_class():
    """The methods and attributes of each class in the source, with those of its bases, by the name of the class."""
    nodes = {}
    for path in frameworks.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                nodes.setdefault(node.name, []).append(node)

    def find_members(name):
        found = set()
        for node in nodes.get(name, ()):
            for each in ast.walk(node):
                if isinstance(each, ast.FunctionDef):
                    found.add(each.name)
                elif isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Store):
                    found.add(each.id if isinstance(each, ast.Name) else each.attr)
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)} - {name}
            found |= {member for base in bases for member in find_members(base)}
        return found

    return {name: find_members(name) for name in nodes}


def _all_of(module):
    """The names that a module's source lists: to import it takes an engine."""
    path = importlib.util.find_spec(module).origin
    with open(path, encoding="utf-8") as source:
        found = re.search(r"^__all__ = \[(.*?)\]", source.read(), re.MULTILINE | re.DOTALL)
    return re.findall(r'"(\w+)"', found[1])


def test_every_error_and_every_kind_of_problem_has_its_cause_and_fix():
    """The page of errors has a heading for each public class, and for each kind that the source gives a problem."""
    page = (frameworks.ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    public = [getattr(lm, name) for name in lm.__all__ if name.endswith(("Error", "Warning"))]
    assert all(issubclass(each, (lm.LayoutMapError, lm.LayoutMapWarning)) for each in public)
    expected = {each.__name__ for each in public} | _kinds()
    assert sorted(expected) == sorted(re.findall(r"^### `(.+)`$", page, re.MULTILINE))


def _kinds():
    """The kinds of all problems: the first argument of `Problem`, and of functions that pass theirs on to it.

    `UnsupportedFeature` has a kind of its own, `part.kind`, which is "unsupported" unless a note of `core.unsupported`
    says otherwise.
    """
    calls = [
        call
        for path in frameworks.PACKAGE.rglob("*.py")
        if "roblem(" in (source := path.read_text(encoding="utf-8"))
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and call.args
        and ast.unparse(call.func)
        in ("Problem", "_make_contradiction_problem", "_make_weight_finding", "_make_problem_from_error")
    ]
    kinds = [
        kind
        for call in calls
        for kind in (
            [call.args[0].body, call.args[0].orelse] if isinstance(call.args[0], ast.IfExp) else call.args[:1]
        )
    ]
    assert {"kind", "part.kind"} == {
        ast.unparse(kind) for kind in kinds if not isinstance(kind, ast.Constant)
    }
    of_parts = {UnsupportedFeature("", "", "", "").kind, UNKNOWN_ORDER_KIND}
    return {kind.value for kind in kinds if isinstance(kind, ast.Constant)} | of_parts
