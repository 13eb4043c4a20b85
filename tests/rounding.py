"""Rounding told from a fault: a model that magnifies rounding does so on one device, too."""

import numpy as np

import layoutmap as lm
from layoutmap.adapters import get_adapter

ROUNDINGS = 30
"""How many times as far as by one rounding of the weights a model may differ: each operation rounds."""


def beyond(rows, make_model, batch):
    """The rows of a parity report that differ by more than the plain Keras model does when its weights are rounded."""
    if any(row.stage == "weights" for row in rows):
        return rows
    rounding = moved(make_model, batch) if rows else None
    return [
        row for row in rows if not row.error <= ROUNDINGS * rounding.worst(row.stage.replace("fit", "step"))
    ]


def moved(make_model, batch):
    """A parity report of the plain Keras model and itself, its weights moved by one rounding."""
    made, adapter = [], get_adapter("keras")

    def make_moved():
        made.append(make_model())
        if len(made) == 2:
            adapter.create_lazy_variables(made[1], batch)
            signs = np.random.default_rng(0)
            for variable in made[1].trainable_variables:
                value = np.asarray(variable)
                variable.assign(value * (1 + signs.choice([-1, 1], value.shape) * 2**-23).astype(value.dtype))
        return made[-1]

    return lm.check_parity(make_moved, lm.LayoutMap("one=1", rest="replicated"), batch, raises=False)
