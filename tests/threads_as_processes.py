"""Threads that stand for processes, and gather over a barrier."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import layoutmap as lm


def everywhere(number, act):
    """What each of some processes gets from `act(process, gather)`, or its error."""
    barrier, rows = threading.Barrier(number, timeout=240), [None] * number

    def process(i):
        def gather(values):
            assert values.size, "JAX gathers no empty arrays"
            rows[i] = values
            barrier.wait()
            gathered = np.stack(rows)
            barrier.wait()
            return gathered

        try:
            return act(i, gather)
        except lm.LayoutMapError as error:
            return error

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(process, range(number)))
