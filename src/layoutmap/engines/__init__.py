"""Create and store arrays of one framework per engine. An engine's module is imported on first use.

An engine knows its framework's arrays, devices, and shardings, and no model library. `layoutmap.engines.protocol`
defines its methods, and `layoutmap.testing.engine_contract` tests them.
"""

from __future__ import annotations

import importlib.util
import sys

from layoutmap.core.errors import EngineError
from layoutmap.engines.protocol import Engine
from layoutmap.engines.tested import import_module_needing_framework, warn_if_untested

__all__ = [
    "ENGINES",
    "Engine",
    "find_engine",
    "get_engine",
    "list_installed_engines",
]

ENGINES = {name: f"layoutmap.engines.{name}.engine" for name in ("jax", "tensorflow", "torch")}
"""The module of each engine, by name. The framework's package and layoutmap's extra for it have the same name."""


def list_installed_engines() -> list[str]:
    """Return the names of the engines with an installed framework. No framework is imported."""
    return [name for name in ENGINES if importlib.util.find_spec(name) is not None]


def get_engine(name: str) -> Engine:
    """Return the engine of a framework.

    Args:
        name: `"jax"`, `"tensorflow"` or `"torch"`.

    Raises:
        EngineError: There is no such engine, or its framework is not installed or of an unsupported release.
    """
    if name not in ENGINES:
        raise EngineError(
            f"there is no engine {name!r}",
            why=f"the engines are {', '.join(map(repr, ENGINES))}",
            fix="use one of these names",
        )
    loaded = sys.modules.get(ENGINES[name])
    # An import inside a trace fails, so use the module if it is loaded. While another thread is importing the module,
    # it has no `engine` yet.
    if loaded is not None and hasattr(loaded, "engine"):
        return loaded.engine()
    if importlib.util.find_spec(name) is None:
        raise EngineError(
            f"the {name} engine needs {name}, which is not installed",
            why=f"no package {name!r} is found in this environment",
            fix=f'pip install "layoutmap[{name}]"',
        )
    made = import_module_needing_framework(name, ENGINES[name]).engine()
    warn_if_untested(name)
    return made


def find_engine(array: object) -> Engine:
    """Return the engine of the framework that made an array.

    A framework that is not imported cannot have made the array, so this imports none.

    Raises:
        EngineError: No engine knows the array.
    """
    for name in ENGINES:
        if name in sys.modules:
            engine = get_engine(name)
            if isinstance(array, engine.array_types):
                return engine
    raise EngineError(
        f"no engine supports a {type(array).__module__}.{type(array).__qualname__}",
        why=f"the engines are {', '.join(map(repr, ENGINES))}",
        fix="pass an array of one of these frameworks",
    )
