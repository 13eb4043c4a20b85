"""A release is published only if its tag and all files name one version."""

from __future__ import annotations

import frameworks
import pytest

import layoutmap as lm


@pytest.fixture
def check_release(monkeypatch):
    """Import the tool that the workflow runs."""
    monkeypatch.syspath_prepend(frameworks.ROOT / "tools")
    import check_release

    return check_release


def test_a_tag_of_another_version_is_refused(check_release):
    """Each file that names another version has a line."""
    found = check_release.find_differences("v9.8.7")
    assert ["src/layoutmap/__init__.py", "CITATION.cff", "CHANGELOG.md", "docs/releases/9.8.7.md"] == [
        line.partition(":")[0] for line in found
    ]
    assert 1 == sum("the tag is not" in line for line in check_release.find_differences("release"))


def test_a_tag_of_the_same_version_is_accepted(check_release, tmp_path):
    """The lines are those of the files in the repository."""
    version = lm.__version__
    for name in ("src/layoutmap/__init__.py", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((frameworks.ROOT / name).read_bytes())
    (tmp_path / "docs/releases").mkdir(parents=True)
    (tmp_path / f"docs/releases/{version}.md").write_text(f"# layoutmap {version}\n")
    assert [] == check_release.find_differences(f"v{version}", tmp_path)
