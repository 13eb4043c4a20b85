"""The house as a table: which module may import which, and in which test process each file runs.

`test_imports.py` holds the source to the first half; `conftest.py` and `tools/run_tests.py` work by the second.
Both read the imports with `ast`, so that no framework is loaded to find out who loads one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "layoutmap"

# From the ground up: a value may import only values that stand before it.
VALUES = (
    "escaping",
    "errors",
    "proto",
    "wire",  # plain fields in and out, so it stands below the mesh and the layout that it writes
    "mesh_dims",
    "mesh",
    "layout",
    "fitting",
    "rule_index",
    "backtracking",
    "rules",
    "strict_yaml",
    "yaml_form",
    "tp_plan",
    "presets",
    "layout_map",
    "variables",
    "limits",
    "draws",
    "blocks",
    "checksums",
    "path_groups",
    "patches",
    "active",  # the one ContextVar
)
WORK = (
    "plan",
    "planning",
    "plan_diff",
    "plan_json",
    "plan_memory",
    "lint",
    "agreement",
    "report",
    "checkpoint",
)
# What an edge must do, and the registries of edges: they hold module names as strings and import no edge.
CONTRACTS = ("engines.protocol", "engines", "adapters.protocol", "adapters")
# Each edge and the frameworks that it may import. An edge is a file, files with its name in front, or a folder.
EDGES = {
    "engines.jax": {"jax"},
    "engines.jax_devices": {"jax"},
    "engines.jax_processes": {"jax"},
    "engines.jax_programs": {"jax"},
    "engines.tensorflow": {"tensorflow"},
    "engines.tensorflow_arrays": {"tensorflow"},
    "engines.tensorflow_canary": {"tensorflow"},
    "engines.tensorflow_devices": {"tensorflow"},
    "engines.tensorflow_processes": {"tensorflow"},
    "engines.tensorflow_programs": {"tensorflow"},
    "engines.tensorflow_variable": {"tensorflow"},
    "engines.torch": {"torch"},
    "engines.torch_arrays": {"torch"},
    "engines.torch_devices": {"torch"},
    "engines.torch_processes": {"torch"},
    "adapters.keras": {"keras"},
    # The files that know both Keras and its backend.
    "adapters.keras.ports.jax": {"keras", "jax"},
    "adapters.keras.ports.jax_limits": {"keras", "jax"},
    "adapters.keras.ports.jax_processes": {"keras", "jax"},
    "adapters.keras.ports.tensorflow": {"keras", "tensorflow"},
    "adapters.keras.ports.tensorflow_limits": {"keras", "tensorflow"},
    "adapters.keras.ports.tensorflow_functions": {"keras", "tensorflow"},
    "adapters.keras.ports.torch": {"keras", "torch"},
    "adapters.keras.ports.torch_calls": {"keras", "torch"},
    "adapters.keras.ports.torch_limits": {"keras", "torch"},
    "adapters.keras.ports.torch_steps": {"keras", "torch"},
    "adapters.nnx": {"flax", "jax"},
    "adapters.torch": {"torch"},
    "adapters.pytree": {"jax"},
}
# What the edges of one framework share: it knows values and that framework, and only those edges may import it.
SHARED = {"pytorch": {"torch"}}
FRONT = (
    "devices",
    "progress",
    "scope",
    "dtensor",
    "parity",
    "published",  # it imports the library of a model by name, when that is made
    "completion",
    "cli",
    "cli_models",
    "cli_output",
    "cli_plans",
    "cli_users_code",
    "__main__",
    "",
)  # "" is layoutmap/__init__.py
# What a module of the front needs that is installed with an extra of its own.
EXTRAS = {"completion": {"shtab"}}
SHIPPED_TESTS = {"testing": {"pytest", "hypothesis"}}

THIRD_PARTY = {"numpy", "google", "yaml", "ml_dtypes"}  # google: the package of protobuf

# Imports upwards, each one inside a function, so that it is made only when that function is called.
UPWARD_DOORS = {
    "rules": {"report"},  # the table of a map in a notebook
    "layout_map": {"scope"},  # LayoutMap.scope, build and apply; the dry run of from_tp_plan
}

FRAMEWORKS = {  # package -> the test process that loads it
    "jax": "jax",
    "flax": "jax",
    "keras": "jax",
    "tensorflow": "tensorflow",
    "tf_keras": "tensorflow",
    "torch": "torch",
}
PROCESSES = ("core", *dict.fromkeys(FRAMEWORKS.values()))


@dataclass(frozen=True)
class Import:
    """One import statement's target: a dotted name, and how it is reached."""

    target: str
    line: int
    for_types: bool = False
    in_function: bool = False


def read_imports(source: str) -> list[Import]:
    """Every import of a module; `from a import b` counts as `a.b`, which may name a module or something in it."""
    return list(_walk(ast.parse(source), for_types=False, in_function=False))


def _walk(node: ast.AST, *, for_types: bool, in_function: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, for_types, in_function)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield Import(
                f"{'.' * node.level}{node.module or ''}.{alias.name}", node.lineno, for_types, in_function
            )
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.body:
            yield from _walk(child, for_types=True, in_function=in_function)
        for child in node.orelse:
            yield from _walk(child, for_types=for_types, in_function=in_function)
    else:
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, for_types=for_types, in_function=inside)


def module_of(path: Path) -> str:
    """A source file's module, without `layoutmap.`; the package itself is `""`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str | None:
    """The part of the house that a module belongs to: the longest name in the table that it is or is inside."""
    listed = (*VALUES, *WORK, *CONTRACTS, *EDGES, *SHARED, *FRONT, *SHIPPED_TESTS)
    # A registry is its own file only: an edge that nobody has listed must not pass as part of it.
    holders = [p for p in listed if module == p or (p and p not in CONTRACTS and module.startswith(f"{p}."))]
    return max(holders, key=len, default=None)


def edge_of(part: str) -> str | None:
    """The whole edge that a part is of: `adapters.keras` for `adapters.keras.ports`, `engines.jax` for its programs."""
    return ".".join(part.split(".")[:2]).partition("_")[0] if part in EDGES else None


class ProcessError(Exception):
    """A file that no test process, or more than one, can run."""


def processes_of(path: Path) -> tuple[str, ...]:
    """The test processes that run a file: `core`, or those that load the framework that the file needs.

    A test file says so with `PROCESSES = ("jax", "tensorflow")`, or else by what it imports, at any depth. Doctests of
    an edge run where its framework is, and those of the front with JAX: the front joins a map with an engine.

    Raises:
        ProcessError: It imports frameworks of two processes, or names one that does not exist; or it is a module that
            the table above does not know.
    """
    if PACKAGE in path.parents:
        part = part_of(module_of(path))
        if part is None:
            raise ProcessError(f"{path.name} is in no part of the house: list it in tests/house.py")
        if part in EDGES or part in SHARED:
            return (_process_of_edge(part),)
        return ("jax",) if part in FRONT or part in SHIPPED_TESTS else ("core",)
    source = path.read_text(encoding="utf-8")
    said = _processes_said(source)
    for process in said:
        if process not in PROCESSES:
            raise ProcessError(
                f"{path.name}: there is no test process {process!r}; there are {', '.join(PROCESSES)}"
            )
    if said:
        return said
    found = {_process_imported(i.target) for i in read_imports(source)} - {None}
    if len(found) > 1:
        raise ProcessError(
            f"{path.name} imports frameworks of {' and '.join(sorted(map(str, found)))}; split it"
        )
    return tuple(map(str, found)) or ("core",)


def _processes_said(source: str) -> tuple[str, ...]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["PROCESSES"]:
            return tuple(ast.literal_eval(node.value))
    return ()


def _process_imported(target: str) -> str | None:
    package, _, inner = target.partition(".")
    if package == "layoutmap":
        part = part_of(inner) or part_of(inner.rpartition(".")[0])
        return _process_of_edge(part) if part in EDGES or part in SHARED else None
    return FRAMEWORKS.get(package)


def _process_of_edge(part: str) -> str:
    """The process of an edge's framework; an edge that knows Keras and its backend runs where the backend does."""
    frameworks = {**EDGES, **SHARED}[part]
    return FRAMEWORKS[min(frameworks - {"keras"} or frameworks)]


def is_collected(path: Path) -> bool:
    """Whether pytest collects something from a file: it is one of the tests, or source with its doctests."""
    return path.suffix == ".py" and (path.name.startswith("test_") or PACKAGE in path.parents)


def collected_files() -> list[Path]:
    """Every file that pytest collects something from, doctests only where there are some."""
    tests = [p for p in sorted((ROOT / "tests").rglob("*.py")) if is_collected(p)]
    return tests + [p for p in sorted(PACKAGE.rglob("*.py")) if ">>>" in p.read_text(encoding="utf-8")]
