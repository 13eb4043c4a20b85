"""The names of the package: what `dir` shows, and what `help` says of the main call."""

import inspect

import layoutmap as lm


def test_dir_has_the_public_names_and_no_others():
    """Also those whose modules are loaded late; nothing that the package itself imports."""
    assert sorted(lm.__all__) == dir(lm)
    assert {"save", "load", "search", "check_parity"} <= {*dir(lm)}
    assert {"importlib", "Any", "TYPE_CHECKING"}.isdisjoint(dir(lm))


def test_each_argument_says_what_it_is():
    """In `help`, and not on another page."""
    for function in (lm.build, lm.plan, lm.scope, lm.apply):
        text = inspect.getdoc(function)
        for name in inspect.signature(function).parameters:
            assert f"    {name}: " in text, (function, name)
        assert ": See `scope`." not in text
