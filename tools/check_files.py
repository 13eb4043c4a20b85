"""Check the changelog, the decisions, links, machine paths, and the language of the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path

from language import check_language

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")  # Keep a Changelog 1.1.0
DECISION = ("Question", "Choice", "Why", "What was given up")
MOST_ANY = 25
"""Uses of `Any` in 1,000 lines of a package."""

CHECKED = ("benchmarks/", "examples/", "src/", "tools/")
"""Folders whose names, docstrings, and comments follow the rules of language."""

_TOP_FOLDERS = ("adapters", "engines")
MACHINE_PATH = re.compile(r"(?<![\w.\-/*)}\]])/(?:work|root|home|tmp|opt)/\w")


def check_changelog(text: str) -> list[str]:
    """Check the changelog's title, versions, dates, and headings against Keep a Changelog."""
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
    """Check that a decision's title asks a question and that its four headings are in order."""
    found = [] if re.match(r"# \d{4}: .+\?\n", text) else ["the title is not '# NNNN: a question?'"]
    headings = tuple(re.findall(r"^## (.+)$", text, re.MULTILINE))
    return found if headings == DECISION else [*found, f"its headings are {headings}, not {DECISION}"]


def format_naming_line(number: str, sources: Mapping[str, str]) -> str:
    """Return a decision's line that lists the files citing it, or ""."""
    named = [name for name, text in sources.items() if f"decisions/{number}" in text]
    return f"Named in {', '.join(f'`{name}`' for name in sorted(named))}." if named else ""


def check_naming_line(path: Path, text: str, sources: Mapping[str, str], *, write: bool) -> list[str]:
    """Check that a decision lists the files citing it, and that at least one does unless it is superseded."""
    expected, found = (
        format_naming_line(path.name[:4], sources),
        re.search(r"^Named in .*\.$", text, re.MULTILINE),
    )
    if not expected and not re.search(r"^## Choice\n\n(Superseded by|Changed by|Closed)", text, re.MULTILINE):
        return [
            f"no code says 'why: decisions/{path.name[:4]}', and it is not said to be superseded or closed"
        ]
    if (found[0] if found else "") == expected:
        return []
    if write:
        plain = re.sub(r"^Named in .*\.\n\n", "", text, count=1, flags=re.MULTILINE)
        path.write_text(
            plain.replace("\n\n", f"\n\n{expected}\n\n" if expected else "\n\n", 1), encoding="utf-8"
        )
        return []
    return [f"it should say {expected or 'no file'}: python tools/check_files.py --write"]


def check_missing_numbers(index: str, numbers: Set[str]) -> list[str]:
    """Check that the index lists each number without a decision, up to its last."""
    listed = re.findall(r"\b\d{4}\b", (re.search(r"^Numbers without a note[^.]*\.", index, re.M) or [""])[0])
    missing = [f"{n:04}" for n in range(1, int(max(listed, default="0")) + 1) if f"{n:04}" not in numbers]
    return [] if listed == missing else [f"it should list the numbers without a note: {', '.join(missing)}"]


def check_tree(text: str) -> list[str]:
    """Check that CONTRIBUTING's tree lists exactly the packages of the source."""
    shown = set(re.findall(r"^  (\w+)/ ", text, re.MULTILINE))
    rooms = {path.parent.name for path in (ROOT / "src" / "layoutmap").glob("*/__init__.py")}
    return [f"its tree and src/layoutmap differ in {name}/" for name in sorted(shown ^ rooms)]


def check_links(page: Path, text: str) -> list[str]:
    """Check that each relative link leads to a file."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", prose)
    return [f"dead link: {t}" for t in targets if not (page.parent / t).exists()]


def check_any(sources: Mapping[str, str]) -> list[str]:
    """Check that no package has more than `MOST_ANY` uses of `Any` in 1,000 lines."""
    counts: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for name, text in sources.items():
        names = sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(text)))
        for package in {name.rpartition("/")[0].rsplit("/", depth)[0] for depth in range(3)} - {
            "",
            *_TOP_FOLDERS,
        }:
            counts[package] += names
            lines[package] += text.count("\n")
    return [
        f"{package}: {1000 * counts[package] / lines[package]:.1f} Any in 1,000 lines, of {MOST_ANY} allowed"
        for package in counts
        if 1000 * counts[package] > lines[package] * MOST_ANY
    ]


def main() -> int:
    if "--counts" in sys.argv:
        import structure  # late: it reads all imports

        table, missed = structure.count_structure(ROOT)
        print(table, *(f"missed: {each}" for each in missed), sep="\n")
        return 1 if missed else 0
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
    problems += [
        f"CONTRIBUTING.md: {p}" for p in check_tree((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    ]
    numbers: dict[str, str] = {}
    of_source: dict[str, str] = {}
    sources = {
        path.relative_to(ROOT).as_posix().removeprefix("src/layoutmap/"): path.read_text(encoding="utf-8")
        for path in paths
        if path.suffix in (".py", ".toml", ".yaml") and path.name != "check_files.py"
    }
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path.suffix == ".md" and not path.is_symlink():  # its links are from where it is
            problems += [f"{name}: {p}" for p in check_links(path, text)]
        if re.fullmatch(r"docs/decisions/\d{4}-.*\.md", name):
            problems += [f"{name}: {p}" for p in check_decision(text)]
            problems += [
                f"{name}: {p}" for p in check_naming_line(path, text, sources, write="--write" in sys.argv)
            ]
            other = numbers.setdefault(path.name[:4], name)
            if other != name:
                problems.append(f"{name}: {other} has this number")
        if name.startswith("src/") and path.suffix == ".py":
            of_source[name.removeprefix("src/layoutmap/")] = text
        if name.startswith(CHECKED) and path.suffix == ".py":
            problems += [f"{name}:{p}" for p in check_language(text)]
        problems += [
            f"{name}:{number}: a path of one machine: {line.strip()}"
            for number, line in enumerate(text.splitlines(), 1)
            if MACHINE_PATH.search(line)
        ]
    problems += [
        f"{name}: there is no decision {number}"
        for name, text in sources.items()
        for number in re.findall(r"decisions/(\d{4})", text)
        if number not in numbers
    ]
    problems += check_any(of_source)
    index = (ROOT / "docs/decisions/README.md").read_text(encoding="utf-8")
    problems += [f"docs/decisions/README.md: {p}" for p in check_missing_numbers(index, numbers.keys())]
    print(*problems or ["changelog, decisions, links, paths, and language are in order"], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
