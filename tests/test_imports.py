"""The dependency rule of the house, and that `import layoutmap` loads no framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import house
import pytest

import layoutmap

SOURCES = sorted(house.PACKAGE.rglob("*.py"))

# numpy is none, but takes as long to load as all the rest.
LOADS_NO_FRAMEWORK = f"""
import sys
import layoutmap
loaded = sorted(set({sorted([*house.FRAMEWORKS, "numpy"])}) & set(sys.modules))
print(*loaded)
sys.exit(1 if loaded else 0)
"""


def allowed(part: str) -> set[str]:
    """The parts of layoutmap that a part may import when it is loaded: the rule."""
    values, contracts = set(house.VALUES), set(house.CONTRACTS)
    everything = values | set(house.WORK) | contracts | set(house.FRONT)
    if part in house.VALUES:
        return set(house.VALUES[: house.VALUES.index(part)])
    if part in house.WORK:
        return values | set(house.WORK)
    if part in house.CONTRACTS:
        return values | contracts
    if part in house.SHARED:
        return values
    if part in house.EDGES:
        shared = {name for name, known in house.SHARED.items() if known & house.EDGES[part]}
        return values | contracts | shared
    return everything | set(house.SHIPPED_TESTS if part in house.SHIPPED_TESTS else ())


def third_party(part: str) -> set[str]:
    """The packages outside the standard library that a part may import: the other half of the rule."""
    return (
        house.THIRD_PARTY
        | {**house.EDGES, **house.SHARED}.get(part, set())
        | house.SHIPPED_TESTS.get(part, set())
        | house.EXTRAS.get(part, set())
    )


def violations(module: str, source: str) -> list[str]:
    """What a module imports and may not, one line each.

    Under `if TYPE_CHECKING:` a module may name any part of layoutmap that is no edge, since nothing is loaded; the
    frameworks stay out of reach even there, so that a reader of the core needs none.
    """
    part = house.part_of(module)
    if part is None:
        return [f"{module} is in no part of the house: list it in tests/house.py"]
    found: list[str] = []
    for each in house.read_imports(source):
        package, _, inner = each.target.partition(".")
        if package == "layoutmap":
            reached = house.part_of(inner)
            if reached in (None, ""):  # `from layoutmap.mesh import Mesh`: the last name is no module
                reached = house.part_of(inner.rpartition(".")[0])
            own_edge = reached in house.EDGES and house.edge_of(part) == house.edge_of(str(reached))
            door = each.in_function and reached in house.UPWARD_DOORS.get(part, ())
            for_types = each.for_types and reached not in {**house.EDGES, **house.SHARED}
            if reached != part and reached not in allowed(part) and not (own_edge or door or for_types):
                found.append(f"line {each.line}: {module or 'layoutmap'} may not import {each.target}")
        elif package not in sys.stdlib_module_names and package not in third_party(part):
            found.append(
                f"line {each.line}: {module or 'layoutmap'} may not import {package or 'relatively'}"
            )
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: house.module_of(p) or "layoutmap")
def test_every_module_imports_only_what_its_part_of_the_house_may(path: Path):
    """Values below, work and edges above them, the front on top, and no edge knows another."""
    assert [] == violations(house.module_of(path), path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mesh", "from layoutmap.layout import Layout"),  # a value that stands above it
        ("wire", "from layoutmap import mesh"),
        ("layout", "import jax"),
        ("layout", "def f():\n    import jax"),
        ("layout", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax"),
        ("layout_map", "from layoutmap.scope import scope"),  # the door is open only inside a function
        ("variables", "def f():\n    from layoutmap.scope import scope"),  # not its door
        ("plan", "from layoutmap.engines import get_engine"),
        ("engines.jax", "from layoutmap.plan import Plan"),
        ("engines.jax", "import keras"),
        ("engines.jax", "from layoutmap.engines.torch import engine"),
        ("engines.jax", "from layoutmap.adapters.keras import adapter"),
        ("engines", "from layoutmap.engines import jax"),
        ("adapters.keras", "import jax"),  # only its ports know the backend
        ("adapters.keras", "from layoutmap.scope import plan"),
        (
            "engines.jax",
            "from layoutmap.pytorch.drawing import tape",
        ),  # shared by the edges of another framework
        ("pytorch.drawing.tape", "from layoutmap.engines.torch import engine"),
        ("engines.mlx", ""),  # an edge that the table does not know
        ("scope", "import keras"),
        ("scope", "from .mesh import Mesh"),
    ],
)
def test_the_rule_refuses(module: str, source: str):
    """The check above can fail: each of these lines is refused where it stands."""
    assert 1 == len(violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("layout", "from layoutmap.mesh import Mesh\nimport numpy as np\nimport math"),
        ("layout_map", "def f():\n    from layoutmap.scope import scope"),
        (
            "layout_map",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from layoutmap.scope import Scope",
        ),
        (
            "engines.jax",
            "import jax\nfrom jax.sharding import NamedSharding\nfrom layoutmap.variables import Assignment",
        ),
        ("adapters.keras.draws", "import keras\nfrom layoutmap.adapters.keras import hooks"),
        ("adapters.torch", "import torch\nfrom layoutmap.pytorch.drawing import tape"),
        ("scope", "from layoutmap.engines import get_engine\nfrom layoutmap.plan import Plan"),
    ],
)
def test_the_rule_allows(module: str, source: str):
    """And what the house is built on is not refused by mistake."""
    assert [] == violations(module, source)


def test_importing_layoutmap_loads_no_framework():
    """`import layoutmap` works, and stays fast, where no framework is installed."""
    run = subprocess.run([sys.executable, "-c", LOADS_NO_FRAMEWORK], capture_output=True, text=True)

    assert (0, "\n", "") == (run.returncode, run.stdout, run.stderr)


def test_a_loaded_framework_would_be_seen(tmp_path: Path):
    """The test above can fail: with a framework loaded, here an empty one named jax, the same check exits with 1."""
    (tmp_path / "jax.py").touch()
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import jax" + LOADS_NO_FRAMEWORK
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert (1, "jax\n") == (run.returncode, run.stdout)


def test_every_public_name_has_a_docstring():
    """Nothing is public without a word on what it is; constants have theirs in the source, where ast sees no link."""
    constants = {"UNSHARDED", "__version__"}
    of_engines = {"DVariable"}  # which needs its framework; it has a docstring that runs
    bare = [
        n
        for n in layoutmap.__all__
        if n not in constants | of_engines and not (getattr(layoutmap, n).__doc__ or "").strip()
    ]

    assert [] == bare


def test_a_name_whose_framework_is_missing_says_so():
    """`DVariable` without TensorFlow is an attribute that is not there, and the message says what installs it."""
    with pytest.raises(AttributeError, match=r'pip install "layoutmap\[tensorflow\]"'):
        _ = layoutmap.DVariable
