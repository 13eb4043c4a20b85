"""Which part imports which, and that `import layoutmap` loads no framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import frameworks
import pytest
from importlinter.cli import EXIT_STATUS_ERROR, EXIT_STATUS_SUCCESS, lint_imports

import layoutmap

# numpy is none, but takes as long to load as all the rest.
LOADS_NO_FRAMEWORK = f"""
import sys
import layoutmap
loaded = sorted(set({sorted([*frameworks.FRAMEWORKS, "numpy"])}) & set(sys.modules))
print(*loaded)
sys.exit(1 if loaded else 0)
"""


def check_contracts(config: Path) -> int:
    """The exit code of import-linter with the contracts of a file."""
    return lint_imports(config_filename=str(config), cache_dir=None)


def test_every_part_imports_only_what_it_may():
    """Imports go down, at run time and for types, in no circle, and no edge knows another."""
    assert EXIT_STATUS_SUCCESS == check_contracts(frameworks.ROOT / "pyproject.toml")


def test_the_check_of_imports_can_fail(tmp_path: Path):
    """With two of the parts in the other order, the same check finds the imports that then go up."""
    contracts = (frameworks.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    swapped = contracts.replace('"layoutmap.core",\n]', "]").replace(
        "layers = [", 'layers = [\n  "layoutmap.core",'
    )
    (tmp_path / "pyproject.toml").write_text(swapped, encoding="utf-8")

    assert EXIT_STATUS_ERROR == check_contracts(tmp_path / "pyproject.toml")


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
    of_engines = {
        "DVariable",
        "jit_step",
        "microbatches",
    }  # which need their framework; they have docstrings that run
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
