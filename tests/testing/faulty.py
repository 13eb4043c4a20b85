"""Faults that are put into a copy of the source by hand."""

import shutil

import frameworks


def with_fault(tmp_path, file, right, wrong):
    """A copy of the source with one place changed."""
    copy = tmp_path / "src"
    shutil.copytree(frameworks.ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    changed = copy / "layoutmap" / file
    assert 1 == changed.read_text().count(right)
    changed.write_text(changed.read_text().replace(right, wrong))
    return copy
