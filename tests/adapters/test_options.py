"""The options of a scope by name: those of every scope, and those of one model library."""

import re

import pytest

from layoutmap.adapters.options import NEUTRAL, check_names
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
        check_names(given, "keras")
    assert (", ".join(NEUTRAL), fix) == (caught.value.facts["options"], caught.value.fix)


def test_options_that_a_library_has():
    """Its own are accepted beside those that every scope has."""
    check_names({"gather": "own", "strict": True}, "torch", ["gather"])
