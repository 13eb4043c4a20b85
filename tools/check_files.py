"""Check what no linter does: the changelog's form, the decisions' form, links between pages, paths of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")  # Keep a Changelog 1.1.0
DECISION = ("Question", "Choice", "Why", "What was given up")
MOST_ANY = 25
"""Uses of `Any` in 1,000 lines of a room."""

_HALLS = ("adapters", "engines")
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


def naming_line(number: str, sources: Mapping[str, str]) -> str:
    """The line of a decision that says which files name it; empty if none does."""
    named = [name for name, text in sources.items() if f"decisions/{number}" in text]
    return f"Named in {', '.join(f'`{name}`' for name in sorted(named))}." if named else ""


def check_named(path: Path, text: str, sources: Mapping[str, str], *, write: bool) -> list[str]:
    """A decision says which files name it, and at least one does, unless it is superseded or closed."""
    expected, found = naming_line(path.name[:4], sources), re.search(r"^Named in .*\.$", text, re.MULTILINE)
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


def check_gaps(index: str, numbers: Set[str]) -> list[str]:
    """The index lists the numbers that no note has, up to the last one that it lists."""
    listed = re.findall(r"\b\d{4}\b", (re.search(r"^Numbers without a note[^.]*\.", index, re.M) or [""])[0])
    missing = [f"{n:04}" for n in range(1, int(max(listed, default="0")) + 1) if f"{n:04}" not in numbers]
    return [] if listed == missing else [f"it should list the numbers without a note: {', '.join(missing)}"]


def check_tree(text: str) -> list[str]:
    """CONTRIBUTING's tree has every room of the source, and no other one."""
    shown = set(re.findall(r"^  (\w+)/ ", text, re.MULTILINE))
    rooms = {path.parent.name for path in (ROOT / "src" / "layoutmap").glob("*/__init__.py")}
    return [f"its tree and src/layoutmap differ in {name}/" for name in sorted(shown ^ rooms)]


def check_links(page: Path, text: str) -> list[str]:
    """Every relative link leads to a file."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", prose)
    return [f"dead link: {t}" for t in targets if not (page.parent / t).exists()]


def check_any(sources: Mapping[str, str]) -> list[str]:
    """No room has more uses of `Any` in 1,000 lines than `MOST_ANY`."""
    counts: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for name, text in sources.items():
        names = sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(text)))
        for room in {name.rpartition("/")[0].rsplit("/", depth)[0] for depth in range(3)} - {"", *_HALLS}:
            counts[room] += names
            lines[room] += text.count("\n")
    return [
        f"{room}: {1000 * counts[room] / lines[room]:.1f} Any in 1,000 lines, of {MOST_ANY} allowed"
        for room in counts
        if 1000 * counts[room] > lines[room] * MOST_ANY
    ]


def check_first_words(text: str) -> list[str]:
    """A docstring begins with the thing that is returned or done; a test's is a law, which may be of anything."""
    return [
        f"{node.lineno}: a docstring begins with {found[0]!r}, which names no thing"
        for parent in ast.walk(ast.parse(text))
        if not str(getattr(parent, "name", "")).startswith("test_")
        for node in ast.iter_child_nodes(parent)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and (found := re.match(r"(What|Those|Its?)\b", node.value.value.strip()))
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
                f"{name}: {p}" for p in check_named(path, text, sources, write="--write" in sys.argv)
            ]
            other = numbers.setdefault(path.name[:4], name)
            if other != name:
                problems.append(f"{name}: {other} has this number")
        if name.startswith("src/") and path.suffix == ".py":
            problems += [f"{name}:{p}" for p in check_first_words(text)]
            of_source[name.removeprefix("src/layoutmap/")] = text
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
    problems += [f"docs/decisions/README.md: {p}" for p in check_gaps(index, numbers.keys())]
    print(*problems or ["changelog, decisions, links and paths are in order"], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
