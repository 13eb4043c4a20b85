"""In which test process each file runs: `core`, where no framework can be imported, or that of its framework.

`conftest.py` and `tools/run_tests.py` work by it. Imports are read with `ast`, so that no framework is loaded to find
out who loads one. Which part of the source may import which is in pyproject.toml, `[tool.importlinter]`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "layoutmap"

FRAMEWORKS = {  # package -> the test process that loads it
    "jax": "jax",
    "flax": "jax",
    "optax": "jax",
    "equinox": "jax",
    "haiku": "jax",
    "keras": "jax",
    "tensorflow": "tensorflow",
    "tf_keras": "tensorflow",
    "torch": "torch",
}
PROCESSES = ("core", *dict.fromkeys(FRAMEWORKS.values()))
# Folders and files of the source that need no framework; engines and adapters have one each, and all others join a
# map with an engine, which their doctests do with JAX.
PURE = ("core", "cost", "rules", "plan", "report", "checkpoint")


class ProcessError(Exception):
    """A file that no test process, or more than one, can run."""


@functools.cache
def processes_of(path: Path) -> tuple[str, ...]:
    """The test processes that run a file."""
    if PACKAGE in path.parents:
        return (_process_of_source(path.relative_to(PACKAGE).with_suffix("").parts) or "jax",)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = _named(tree)
    for process in named:
        if process not in PROCESSES:
            raise ProcessError(
                f"{path.name}: there is no test process {process!r}; there are {', '.join(PROCESSES)}"
            )
    if named:
        return named
    found = {process for target in imports(tree) if (process := _process_imported(target))}
    if len(found) > 1:
        raise ProcessError(f"{path.name} imports frameworks of {' and '.join(sorted(found))}; split it")
    return tuple(found) or ("core",)


def _process_of_source(parts: tuple[str, ...]) -> str | None:
    """The process of a module; `None` for one that joins a map with any engine."""
    if not parts:
        return None
    if parts == ("rules", "zoo") or parts[:2] in (("cost", "lower_step"), ("cost", "layout_map_search")):
        return None  # their models are those of libraries
    if parts[:2] == ("cost", "jax"):
        return "jax"
    if parts[0] == "cost" and parts[1:2] and parts[1].startswith("torch_"):
        return "torch"
    if parts[0] in PURE or (
        parts[0] in ("engines", "adapters") and parts[1:] in ((), ("protocol",), ("__init__",))
    ):
        return "core"
    if parts[0] == "engines":
        return FRAMEWORKS.get(parts[1], "core")
    if parts[0] == "adapters":
        # What knows Keras and its backend runs where the backend does: backends/tensorflow_functions.py.
        backend = parts[3].partition("_")[0] if parts[1:3] == ("keras", "backends") and parts[3:] else ""
        return FRAMEWORKS.get(backend) or FRAMEWORKS.get(parts[1], "core")
    return None


def imports(tree: ast.AST) -> Iterator[str]:
    """What a module imports; `from a import b` counts as `a.b`, which may name a module or something in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


def _named(tree: ast.Module) -> tuple[str, ...]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["PROCESSES"]:
            return tuple(ast.literal_eval(node.value))
    return ()


def _process_imported(target: str) -> str | None:
    package, *inner = target.split(".")
    if package == "layoutmap":
        process = _process_of_source(tuple(inner))
        return process if process != "core" else None
    return FRAMEWORKS.get(package)


def is_collected(path: Path) -> bool:
    """Return whether pytest collects something from a file: it is one of the tests, or source with doctests."""
    if path.suffix != ".py" or PACKAGE not in path.parents:
        return path.suffix == ".py" and is_test(path)
    return ">>>" in path.read_text(encoding="utf-8")


def is_test(path: Path) -> bool:
    return path.name.startswith("test_")


def collected_files() -> list[Path]:
    """Return every file that pytest collects something from."""
    return [
        p for folder in (ROOT / "tests", PACKAGE) for p in sorted(folder.rglob("*.py")) if is_collected(p)
    ]
