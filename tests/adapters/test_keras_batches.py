"""A mesh dim that nothing uses, and batches of which none is sharded, are said."""

import warnings

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
    assert f"\n\nnote: {note.what}; {note.fix}\n\nLint: 1 finding" in str(plan)
    assert () == with_batches.problems


def test_fit_warns_if_no_batch_divides():
    """At its end, at the user's line; one batch that divides is enough, such as all but the last. JAX shards each."""
    model, _ = scoped(batch_dim="batch")
    x, y = np.ones((9, 8), "float32"), np.ones((9, 16), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
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
    ] * (keras.backend.backend() != "jax") == [str(w.message) for w in ours]
    assert {__file__} >= {w.filename for w in ours}


def caught_by(steps):
    """The warnings of this library while something runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps()
    return [each for each in caught if each.category is lm.LayoutMapWarning]


@pytest.mark.parametrize(
    ("rule", "options", "idle"),
    [
        ((None, "model"), {}, ["batch"]),
        ((None, "model"), {"batch_dim": "batch"}, []),
        (("batch", None), {"batch_dim": "batch"}, ["model"]),
        (("batch", "model"), {}, []),
        ((("batch", "model"), None), {}, []),
        ((None, None), {}, ["batch", "model"]),
    ],
)
def test_the_first_step_names_idle_dims_once(rule, options, idle):
    """At the user's line, with the argument to pass; lint says how batches are sharded, before a step and after it."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {"d1.kernel": rule}, rest="replicated")
    with warnings.catch_warnings(action="ignore"):  # weights along two axes are warned of, too
        model = layout_map.build(make_model, **options)
    x, y = np.ones((8, 8), "float32"), np.ones((8, 16), "float32")
    before = repr(lm.inspect(model).lint())
    first = caught_by(lambda: model.fit(x, y, verbose=0))
    said = "batches are sharded over batch" if options else "batches are replicated"

    assert [f"fit: mesh dim {', '.join(map(repr, idle))} is idle"] * bool(idle) == [
        str(each.message).splitlines()[0] for each in first
    ]
    assert all(each.filename == __file__ for each in first)
    assert all(("pass batch_dim='batch' to build" in str(each.message)) != bool(options) for each in first)
    assert [] == caught_by(lambda: (model.fit(x, y, verbose=0), model.train_on_batch(x, y)))
    assert [True, True] == [said in each for each in (before, repr(lm.inspect(model).lint()))]
    if not options and idle:
        assert set(idle) == {p.subject for p in lm.inspect(model).lint().problems if p.kind == "unused dim"}


def test_a_dim_of_size_one_or_of_activations_is_not_idle():
    """Nor do `predict` and `evaluate` warn, which take no step."""
    x, y = np.ones((8, 8), "float32"), np.ones((8, 16), "float32")
    single = lm.LayoutMap(
        lm.create_mesh("batch=1,model=8"), {"d1.kernel": (None, "model")}, rest="replicated"
    )
    outputs = lm.LayoutMap(
        lm.create_mesh("batch=2,model=4"), {"d1.kernel": (None, "model")}, rest="replicated"
    )
    outputs.activations["d1"] = ("batch", None)
    idle = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {"d1.kernel": (None, "model")}, rest="replicated")
    for layout_map in (single, outputs):
        assert [] == caught_by(lambda m=layout_map: m.build(make_model).fit(x, y, verbose=0))
    model = idle.build(make_model)
    assert [] == caught_by(lambda: (model.predict(x, verbose=0), model.evaluate(x, y, verbose=0)))
