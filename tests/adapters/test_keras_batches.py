"""A mesh dim that nothing uses, and batches of which none is sharded, are said."""

import keras
import numpy as np
import pytest

import layoutmap as lm

PROCESSES = ("jax", "tensorflow", "torch")
# Keras's own: it hands variables to numpy in its own way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def make_model():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")])
    model.compile("sgd", "mse")
    return model


def scoped(**options):
    layout_map = lm.LayoutMap(
        lm.create_mesh("batch=2,model=4"), {"d1.kernel": (None, "model")}, rest="replicated"
    )
    with layout_map.scope(strict=True, **options) as scope:
        model = make_model()
    return model, scope.plan


def test_a_batch_dim_that_was_forgotten_is_noted():
    """The plan of a scope notes a dim that neither weights nor batches are sharded over; the note has the fix."""
    _, plan = scoped()
    (note,) = plan.problems
    _, with_batches = scoped(batch_dim="batch")

    assert ("unused dim", "note", "batch") == (note.kind, note.severity, note.subject)
    assert """\
mesh dim 'batch' is not used
  mesh       batch=2, model=4
  batch_dim  None
  why        no weight, layer output or batch is sharded over it: groups of 2 devices compute the same
  fix        pass batch_dim='batch' to the scope, or add rules that shard weights over it""" == str(note)
    assert str(plan).endswith(f"\n\nnote: {note.what}; {note.fix}")
    assert () == with_batches.problems


def test_fit_warns_if_no_batch_divides():
    """At its end, at the user's line; one batch that divides is enough, such as all but the last."""
    model, _ = scoped(batch_dim="batch")
    x, y = np.ones((9, 8), "float32"), np.ones((9, 16), "float32")
    with pytest.warns(lm.LayoutMapWarning) as caught:
        model.fit(x, y, batch_size=3, verbose=0)
    model.fit(x, y, batch_size=4, verbose=0)
    ours = [w for w in caught if w.category is lm.LayoutMapWarning]

    assert [
        """\
fit: no batch was sharded over mesh dim 'batch'
  rows  3
  mesh  batch=2, model=4
  why   3 is not a multiple of 2, so every device computed with all rows
  fix   use a batch_size that is a multiple of 2"""
    ] == [str(w.message) for w in ours]
    assert [__file__] == [w.filename for w in ours]
