"""Engines hold arrays: one module for each framework, loaded when first asked for.

An engine knows its framework's arrays, devices and shardings, and no model library. What it must do is written in
`layoutmap.engines.protocol` and checked by `layoutmap.testing.engine_contract`.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from layoutmap.core.errors import EngineError
from layoutmap.engines.protocol import Engine
from layoutmap.engines.tested import import_for, warn_if_untested

__all__ = [
    "ENGINES",
    "Engine",
    "engine_of_array",
    "get_engine",
    "installed_engines",
    "speeds_of",
    "step_counter",
]

ENGINES = {name: f"layoutmap.engines.{name}.engine" for name in ("jax", "tensorflow", "torch")}
"""Engine name -> its module. The name is also that of the framework's package and of the extra that installs it."""

_STEP_COUNTERS = {"jax": "layoutmap.engines.jax.cost.lowered", "torch": "layoutmap.engines.torch.cost"}

_SPEEDS = {"jax": "layoutmap.engines.jax.speeds", "torch": "layoutmap.engines.torch.speeds"}


def installed_engines() -> list[str]:
    """The names of the engines whose framework is installed; nothing is imported."""
    return [name for name in ENGINES if importlib.util.find_spec(name) is not None]


def get_engine(name: str) -> Engine:
    """The engine of a framework.

    Args:
        name: `"jax"`, `"tensorflow"` or `"torch"`.

    Raises:
        EngineError: There is no such engine, or its framework is not installed, or it lacks names that are needed.
    """
    if name not in ENGINES:
        raise EngineError(
            f"there is no engine {name!r}",
            why=f"the engines are {', '.join(map(repr, ENGINES))}",
            fix="use one of them",
        )
    loaded = sys.modules.get(ENGINES[name])
    # The usual case, and inside a trace no import may happen; unless another thread is still importing it.
    if loaded is not None and hasattr(loaded, "engine"):
        return loaded.engine()
    if importlib.util.find_spec(name) is None:
        raise EngineError(
            f"the {name} engine needs {name}, which is not installed",
            why=f"no package {name!r} is found in this environment",
            fix=f'pip install "layoutmap[{name}]"',
        )
    made = import_for(name, ENGINES[name]).engine()
    warn_if_untested(name)
    return made


def engine_of_array(array: object) -> Engine:
    """The engine whose framework made an array.

    A framework that is not imported cannot have made one, so nothing is imported to find out.

    Raises:
        EngineError: No engine knows the array.
    """
    for name in ENGINES:
        if name in sys.modules:
            engine = get_engine(name)
            if isinstance(array, engine.array_types):
                return engine
    raise EngineError(
        f"no engine holds a {type(array).__module__}.{type(array).__qualname__}",
        why=f"the engines are {', '.join(map(repr, ENGINES))}",
        fix="pass an array of one of these frameworks",
    )


def step_counter(name: str) -> Any:
    """Return what counts the training steps of a framework: called with a `TrainingStep`, it has a method `count`.

    Raises:
        EngineError: Steps of that framework cannot be counted.
    """
    if name not in _STEP_COUNTERS:
        raise EngineError(
            f"the cost of a step cannot be counted on {name}",
            facts={"counted on": ", ".join(_STEP_COUNTERS)},
            why=f"what {name} sends between devices is decided by a compiler that needs the devices",
            fix="plan the same rules with the model on JAX: the layouts are the same (KERAS_BACKEND=jax)",
        )
    return importlib.import_module(_STEP_COUNTERS[name]).LoweredStep


def speeds_of(name: str) -> Any:
    """Return the module that runs what is measured on the devices of a framework: collectives, products, copies.

    A collective has the mesh, a dim of it, and the bytes of its tensor where that is largest, as `Machine.seconds`
    takes them. `wait` returns when what a function has begun is done.

    Raises:
        EngineError: Nothing is measured on that framework.
    """
    if name not in _SPEEDS:
        raise EngineError(
            f"the devices of {name} are not measured",
            facts={"measured": ", ".join(_SPEEDS)},
            why=f"what {name} sends between devices is decided by a compiler, which has no name for a collective",
            fix="measure them with another framework: the devices are the same",
        )
    return importlib.import_module(_SPEEDS[name])
