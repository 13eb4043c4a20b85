"""Paths of groups, as one text."""

import pytest

from layoutmap.core.paths import format_merged_paths

PROCESSES = ("core",)


@pytest.mark.parametrize(
    ("paths", "merged"),
    [
        (["a.1.b", "a.2.b", "a.4.b"], "a.{1..2,4}.b"),
        (["a.007.b"], "a.007.b"),
        (["a.3.b.0", "a.3.b.1"], "a.3.b.{0..1}"),
        ([f"a.{10**20}", "a.1"], f"a.{{{10**20},1}}"),
        (["9" * 5000], "9" * 5000),
    ],
)
def test_numbers_are_merged(paths, merged):
    """Those that differ, as ranges; a number that is longer than a reader of numbers takes stays as it is."""
    assert merged == format_merged_paths(paths)
