"""The options of a scope by name: those of every scope, and those of one model library."""

import ast
import inspect
import re
from dataclasses import fields
from typing import Unpack, get_type_hints

import frameworks
import pytest

import layoutmap as lm
from layoutmap.adapters.options import COMMON_OPTIONS, OptionsByName, ScopeOptions, check_option_names
from layoutmap.core.errors import ScopeError


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"stict": True}, "write strict="),
        ({"gather": "own"}, "leave it out"),
        ({"own": None}, "leave it out"),
    ],
)
def test_an_option_that_a_library_does_not_have(given, fix):
    """It is refused with those there are, and not ignored; a misspelled one with the one that is meant."""
    ((name, value),) = given.items()

    with pytest.raises(
        ScopeError, match=re.escape(f"{name}={value!r}: a scope for keras models has no")
    ) as caught:
        check_option_names(given, "keras")
    assert (", ".join(COMMON_OPTIONS), fix) == (caught.value.facts["options"], caught.value.fix)


def test_options_that_a_library_has():
    """Its own are accepted beside those that every scope has."""
    check_option_names({"gather": "own", "strict": True}, "torch", ["gather"])


def test_editors_know_the_options():
    """The options by name are those of every scope and of torch, each with its type; another one is no option."""
    every = {field.name: field.type for field in fields(ScopeOptions) if field.name != "own"}
    # Read, since torch is not in this process
    source = frameworks.ROOT / "src/layoutmap/adapters/torch/options.py"
    (torchs,) = (n for n in ast.parse(source.read_text()).body if getattr(n, "name", "") == "TorchOptions")
    own = {n.target.id: ast.unparse(n.annotation) for n in torchs.body if isinstance(n, ast.AnnAssign)}
    known = {name: each.__forward_arg__ for name, each in OptionsByName.__annotations__.items()}

    assert every | own == known
    late = {"SavedModelValues": object}  # imported for types only, since it imports numpy
    functions = (inspect.unwrap(lm.scope), lm.build, lm.apply)
    hints = [get_type_hints(each, localns=late)["options"] for each in functions]
    assert [Unpack[OptionsByName]] * 3 == hints
