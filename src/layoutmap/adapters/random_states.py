"""Save, restore, and seed the random states of Python and numpy."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def preserve_python_and_numpy_states() -> Generator[None]:
    """Restore the random states of Python and numpy when the block ends."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that programs seed
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def seed_python_and_numpy(seed: int) -> None:
    """Seed the random generators of Python and numpy."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def read_python_and_numpy_states() -> dict[str, Any]:
    """Return the random states of Python and numpy as numbers, texts, and arrays."""
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}  # noqa: NPY002


def restore_python_and_numpy_states(states: Mapping[str, Any]) -> None:
    """Restore the random states of Python and numpy, as far as they are in `states`."""
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])  # noqa: NPY002
