"""Check what no linter does: the changelog's form, the decisions' form, links between pages, paths of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")  # Keep a Changelog 1.1.0
DECISION = ("Question", "Choice", "Why", "What was given up")
MACHINE_PATH = re.compile(r"(?<![\w.\-/*)}\]])/(?:work|root|home|tmp|opt)/\w")


def check_changelog(text: str) -> list[str]:
    """A title, `[Unreleased]` first, versions with dates, and no kind of change that readers do not know."""
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    kinds = re.findall(r"^### (.+)$", text, re.MULTILINE)
    found = [f"unknown kind of change: {kind}" for kind in kinds if kind not in KINDS]
    if not text.startswith("# Changelog\n"):
        found.append("does not start with '# Changelog'")
    if headings[:1] != ["[Unreleased]"]:
        found.append("has no [Unreleased] section on top")
    return found + [
        f"not '[version] - date': {h}"
        for h in headings[1:]
        if not re.fullmatch(r"\[\d+\.\d+\.\d+\S*\] - \d{4}-\d\d-\d\d", h)
    ]


def check_decision(text: str) -> list[str]:
    """Four headings in their order under a title that asks."""
    found = [] if re.match(r"# \d{4}: .+\?\n", text) else ["the title is not '# NNNN: a question?'"]
    headings = tuple(re.findall(r"^## (.+)$", text, re.MULTILINE))
    return found if headings == DECISION else [*found, f"its headings are {headings}, not {DECISION}"]


def check_links(page: Path, text: str) -> list[str]:
    """Every relative link leads to a file."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", prose)
    return [f"dead link: {t}" for t in targets if not (page.parent / t).exists()]


def check_first_words(text: str) -> list[str]:
    """A docstring begins with the thing that is returned or done; a test's is a law, which may be of anything."""
    return [
        f"{getattr(node, 'lineno', 1)}: a docstring begins with {found[0]!r}, which names no thing"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not getattr(node, "name", "").startswith("test_")
        and (found := re.match(r"(What|Those|Its?)\b", ast.get_docstring(node) or ""))
    ]


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    problems = [
        f"CHANGELOG.md: {p}" for p in check_changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    ]
    numbers: dict[str, str] = {}
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path.suffix == ".md":
            problems += [f"{name}: {p}" for p in check_links(path, text)]
        if re.fullmatch(r"docs/decisions/\d{4}-.*\.md", name):
            problems += [f"{name}: {p}" for p in check_decision(text)]
            other = numbers.setdefault(path.name[:4], name)
            if other != name:
                problems.append(f"{name}: {other} has this number")
        if name.startswith("src/") and path.suffix == ".py":
            problems += [f"{name}:{p}" for p in check_first_words(text)]
        problems += [
            f"{name}:{number}: a path of one machine: {line.strip()}"
            for number, line in enumerate(text.splitlines(), 1)
            if MACHINE_PATH.search(line)
        ]
    print(*problems or ["changelog, decisions, links and paths are in order"], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
