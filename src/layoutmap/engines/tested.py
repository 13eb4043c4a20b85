"""List the framework releases that the tests cover, and warn about other releases.

The extras in pyproject.toml begin at the same releases and have no upper limit (decisions/0098).
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from types import FunctionType, ModuleType

from layoutmap.core.errors import EngineError, LayoutMapError, LayoutMapWarning
from layoutmap.core.users_line import find_user_stacklevel

TESTED = {
    "jax": ("0.10", "0.10"),
    "keras": ("3.14.1", "3.15"),
    "tensorflow": ("2.21", "2.21"),
    "torch": ("2.13", "2.15"),
    "flax": ("0.12.7", "0.12"),
}
"""The oldest and the newest minor release of each package with which the tests passed."""


def _parse_version(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def _get_imported_version(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", ""))


def _is_tested_release(package: str) -> bool:
    oldest, newest = map(_parse_version, TESTED[package])
    found = _parse_version(_get_imported_version(package))
    return oldest <= found and found[:2] <= newest[:2]


@functools.cache
def warn_if_untested(package: str) -> None:
    """Warn once per process about a release that the tests do not cover.

    Args:
        package: A key of `TESTED`. The package is imported, and every name that is probed exists.
    """
    if _is_tested_release(package):
        return
    warning = LayoutMapWarning(
        f"{package} {_get_imported_version(package)} is not a release that layoutmap was tested with",
        facts={
            "tested": f"{package} {_format_tested_releases(package)}",
            "probed": f"all names of {package} that layoutmap needs exist",
        },
        why="functions that layoutmap uses may behave differently",
        fix=f'compare the model with one device: lm.check_parity(...); or pip install "{_format_pip_version(package)}"',
    )
    warnings.warn(warning, stacklevel=find_user_stacklevel(TESTED.keys()))


def make_unsupported_release_error(
    package: str, missing: object, error_class: type[LayoutMapError] = EngineError
) -> LayoutMapError:
    """Return the error for a release without names that layoutmap needs."""
    return error_class(
        f"{package} {_get_imported_version(package)} is not supported",
        facts={"missing": missing, "tested": f"{package} {_format_tested_releases(package)}"},
        why=f"layoutmap needs names of {package} that this release does not have",
        fix=f'pip install "{_format_pip_version(package)}"',
    )


# Private names change between releases, so the error for a missing one lists the tested releases (decisions/0149).
class ImportErrorConverter:
    """Convert errors of imports in a `with` block to an error that names the tested releases of a framework."""

    def __init__(self, package: str, error_class: type[LayoutMapError] = EngineError) -> None:
        self._package, self._error_class = package, error_class

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, (ImportError, AttributeError)):
            raise make_unsupported_release_error(self._package, error, self._error_class) from error


def check_names_exist(package: str, *owners_and_names: tuple[object, str]) -> None:
    """Raise an `EngineError` if the installed release of a package lacks private names that layoutmap needs.

    Args:
        package: A key of `TESTED`.
        owners_and_names: Pairs of a module or class, and names of its attributes with spaces between them. Names of
            a class may be attributes of its instances.
    """
    missing = [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, names in owners_and_names
        for name in names.split()
        if not _has_or_uses_attribute(owner, name)
    ]
    if missing:
        raise make_unsupported_release_error(package, ", ".join(missing))


def _has_or_uses_attribute(owner: object, name: str) -> bool:
    """Return whether an object has an attribute, or one of its methods uses an attribute of this name."""
    methods = (each for each in vars(owner).values() if isinstance(each, FunctionType))
    return hasattr(owner, name) or any(name in each.__code__.co_names for each in methods)


def is_older_than(package: str, version: str) -> bool:
    """Return whether a framework is older than a version, such as one that fixes a fault."""
    return _parse_version(_get_imported_version(package)) < _parse_version(version)


def import_module_needing_framework(package: str, module: str) -> ModuleType:
    """Import a module of layoutmap that needs a framework.

    Raises:
        EngineError: The import fails, and the framework's release was not tested.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        of_another = isinstance(error, ModuleNotFoundError) and not str(error.name).startswith(package)
        if of_another or _is_tested_release(package):
            raise
        raise make_unsupported_release_error(package, error) from error


def _format_tested_releases(package: str) -> str:
    return " to ".join(dict.fromkeys(TESTED[package]))


def _format_pip_version(package: str) -> str:
    return f"{package}=={TESTED[package][1]}.*"
