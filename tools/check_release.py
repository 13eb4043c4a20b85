"""Check that a tag, the package, the citation, the changelog, and the release notes name one version.

    python tools/check_release.py v0.2.0

Exit code 1, with a line for each file that names another version.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def find_differences(tag: str, root: Path = ROOT) -> list[str]:
    """Return a line for each file that does not name the version of a tag."""
    version = tag.removeprefix("v")
    lines = {
        "src/layoutmap/__init__.py": f'__version__ = "{version}"',
        "CITATION.cff": f"version: {version}",
        "CHANGELOG.md": f"## [{version}] - ",
        f"docs/releases/{version}.md": f"# layoutmap {version}",
    }
    found = (
        []
        if re.fullmatch(r"v\d+\.\d+\.\d+", tag)
        else [f"{tag}: the tag is not v and a version such as v0.2.0"]
    )
    for name, line in lines.items():
        file = root / name
        there = file.read_text(encoding="utf-8") if file.is_file() else ""
        if not any(each.startswith(line) for each in there.splitlines()):
            found.append(f"{name}: no line begins with {line!r}")
    return found


if __name__ == "__main__":
    differences = find_differences(sys.argv[1])
    print(*differences or [f"all files name {sys.argv[1]}"], sep="\n")
    sys.exit(bool(differences))
