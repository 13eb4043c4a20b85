"""The random states of Python and of numpy, which programs of every library seed and draw from."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np


@contextmanager
def put_back() -> Generator[None]:
    """Put the states back afterwards, as if what happens in here had drawn nothing."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that programs seed
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def seed_both(seed: int) -> None:
    """Seed Python and numpy."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
