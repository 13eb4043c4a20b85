"""A release of a framework that the tests have not run with: one warning, or an error if it lacks a name."""

import sys
import types
import warnings

import pytest

from layoutmap.core.errors import EngineError, LayoutMapWarning
from layoutmap.engines.tested import TESTED, import_module_needing_framework, warn_if_untested


@pytest.fixture
def release_of_jax(monkeypatch):
    """A function that has a release of JAX imported, without anything in it."""

    def made(version):
        module = types.ModuleType("jax")
        module.__version__ = version
        monkeypatch.setitem(sys.modules, "jax", module)

    warn_if_untested.cache_clear()
    yield made
    warn_if_untested.cache_clear()


def said_of_two_uses():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_untested("jax")
        warn_if_untested("jax")
    return [(each.category, each.filename, str(each.message).splitlines()[0]) for each in caught]


@pytest.mark.parametrize("version", ["99.0.0", "0.1.0", "99.0.0.dev20300101+abc"])
def test_a_release_that_was_not_tested_warns_once(version, release_of_jax):
    """Newer or older: the first use warns at the user's line, and names the release."""
    release_of_jax(version)
    what = f"jax {version} is not a release that layoutmap was tested with"

    assert [(LayoutMapWarning, __file__, what)] == said_of_two_uses()


@pytest.mark.parametrize(
    "version", [TESTED["jax"][0] + ".0", TESTED["jax"][1] + ".99", TESTED["jax"][1] + ".9+cpu"]
)
def test_a_release_that_was_tested_does_not_warn(version, release_of_jax):
    """From the oldest one to any patch of the newest."""
    release_of_jax(version)

    assert [] == said_of_two_uses()


def test_a_release_without_a_name_is_refused_by_name(release_of_jax, tmp_path, monkeypatch):
    """The error has the release, the name, what was tested and what to install."""
    release_of_jax("99.0.0")
    (tmp_path / "needs_a_name.py").write_text("import jax\njax.gone\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineError) as caught:
        import_module_needing_framework("jax", "needs_a_name")

    tested = " to ".join(dict.fromkeys(TESTED["jax"]))
    assert [
        "jax 99.0.0 is not supported",
        "  missing  module 'jax' has no attribute 'gone'",
        f"  tested   jax {tested}",
        "  why      layoutmap needs names of jax that this release does not have",
        f'  fix      pip install "jax=={TESTED["jax"][1]}.*"',
    ] == str(caught.value).splitlines()


def test_another_fault_is_not_the_release(release_of_jax, tmp_path, monkeypatch):
    """With a release that was tested, or where another package is missing, the fault is raised as it is."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_a_name.py").write_text("import jax\njax.gone\n")
    (tmp_path / "needs_a_package.py").write_text("import no_such_package\n")
    release_of_jax(TESTED["jax"][1])
    with pytest.raises(AttributeError, match="gone"):
        import_module_needing_framework("jax", "needs_a_name")
    release_of_jax("99.0.0")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import_module_needing_framework("jax", "needs_a_package")
