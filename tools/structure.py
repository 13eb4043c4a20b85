"""Count the lines of each package and of the tests, import cycles, and imports that go up."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp

TARGETS = {"library": 50_000, "library, cost and testing": 64_000, "tests": 54_000}
"""The most lines that each part may have."""
_EXTRA = ("cost", "testing")


def count_structure(root: Path) -> tuple[str, list[str]]:
    """Return a table of the structure of a checkout, and a text for each target that it misses."""
    source = root / "src" / "layoutmap"
    lines = {
        package: sum(map(_count_lines, _list_modules(source, package)))
        for package in sorted({path.relative_to(source).parts[0] for path in source.rglob("*.py")})
    }
    extra = sum(lines[name] for name in _EXTRA)
    totals = {
        "library": sum(lines.values()) - extra,
        "library, cost and testing": sum(lines.values()),
        "tests": sum(map(_count_lines, (root / "tests").rglob("*.py"))),
    }
    imports = _count_imports()
    cycles = sorted({" <-> ".join(sorted(pair)) for pair in imports if (pair[1], pair[0]) in imports})
    upward = sorted(f"{a} -> {b}" for a, b in imports if _find_level(root, a) > _find_level(root, b))
    rows = [f"{number:>7,}  {name}" for name, number in lines.items()]
    rows += ["", *(f"{number:>7,}  {name} (at most {TARGETS[name]:,})" for name, number in totals.items())]
    rows += [f"{len(cycles):>7}  cycles of packages {', '.join(cycles)}".rstrip()]
    rows += [f"{len(upward):>7}  imports that go up {', '.join(upward)}".rstrip()]
    missed = [f"{name}: {n:,} lines, of {TARGETS[name]:,}" for name, n in totals.items() if n > TARGETS[name]]
    missed += [f"cycle of packages: {each}" for each in cycles] + [
        f"import goes up: {each}" for each in upward
    ]
    return "\n".join(rows), missed


def _list_modules(source: Path, package: str) -> Iterator[Path]:
    path = source / package
    yield from path.rglob("*.py") if path.is_dir() else [path]


def _count_lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def _count_imports() -> Mapping[tuple[str, str], int]:
    """Return how often each package imports another one, for run time and for types."""
    graph = grimp.build_graph("layoutmap")
    found: dict[tuple[str, str], int] = {}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            pair = module.split(".")[1:2], imported.split(".")[1:2]
            if pair[0] and pair[1] and pair[0] != pair[1]:
                found[pair[0][0], pair[1][0]] = found.get((pair[0][0], pair[1][0]), 0) + 1
    return found


def _find_level(root: Path, package: str) -> int:
    """Return a package's level in the layers of import-linter, 0 for the top."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["type"] == "layers")
    for level, names in enumerate(layers):
        if f"layoutmap.{package}" in (name.strip() for name in names.split("|")):
            return level
    return -1  # a module of the top, such as __init__
