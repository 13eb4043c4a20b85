"""An interrupt at any line of what opens and closes a scope of Keras leaves nothing behind."""

import sys

import keras
import numpy as np
import pytest
from interrupts import Interrupter, run_alone
from keras.src.backend.common.variables import Variable
from keras.src.optimizers.base_optimizer import BaseOptimizer

import layoutmap as lm
from layoutmap.adapters.current import get_current_session
from layoutmap.adapters.keras import hooks, private

PROCESSES = ("jax",)
L = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
FILES = (
    "engines/patches.py",
    "adapters/current.py",
    "scope/scope.py",
    "scope/context.py",
    "keras/session.py",
    "keras/registry.py",
    "keras/materialize.py",
    "keras/hooks.py",
    "keras/private.py",
)
# Not where nothing is changed, nor in what runs when a variable dies: there Python ignores exceptions.
READING = (
    "_forget",
    "<lambda>",
    "check_private_names_exist",
    "_names_in",
    "_lineage",
    "_file_of",
    "<setcomp>",
    "<listcomp>",
    "<genexpr>",
)
PLACES = [(Variable, "__init__"), (L.Layer, "__new__"), (BaseOptimizer, "__init__")]
PLAIN = [vars(owner)[name] for owner, name in PLACES]


def classes():
    return [vars(owner)[name] for owner, name in PLACES]


def make_map():
    return lm.LayoutMap(lm.create_mesh("model=4"), {r"d\.kernel": (None, "model")})


def make_layer():
    layer = L.Dense(4, name="d")
    layer.build((None, 4))
    return layer


def values_of(variable):
    return np.asarray(variable.value)


def in_a_scope(layout_map):
    with layout_map.scope():
        return make_layer()


def sweep(function, step=1):
    """The numbers of lines after whose interrupt something was left, and how many lines there are."""
    interrupter, left, at = Interrupter(FILES, READING), [], 1
    while interrupter.interrupted(function, at):
        if (
            classes() != PLAIN
            or get_current_session() is not None
            or list(hooks._PATCHES._uses)
            or private.in_stateless_scope()
        ):
            left.append(at)
        at += step
    return left, at


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long), 67])
def test_an_interrupt_at_any_line_leaves_keras_plain(step):
    """Wherever a scope is interrupted, Keras's classes are plain, no scope is open, and the next one works."""
    run_alone(__file__, step)


def check(step):
    layout_map = make_map()
    keras.utils.set_random_seed(3)
    expected = values_of(make_layer().kernel)
    # Imports the adapters: Python's import system does not survive an interrupt in a finalizer
    in_a_scope(layout_map)
    left, lines = sweep(lambda: in_a_scope(layout_map), step)
    assert [] == left
    assert lines > 100
    keras.utils.set_random_seed(3)
    layer = in_a_scope(layout_map)
    np.testing.assert_array_equal(expected, values_of(layer.kernel))
    assert ("unsharded", "model") == layer.kernel.layout.sharding_specs
    assert classes() == PLAIN


def test_a_patch_of_another_library_that_ends_after_the_scope_poisons_nothing(monkeypatch):
    """What another library puts back after a scope is ours at worst, does nothing, and goes with the next scope."""
    layout_map = make_map()
    with layout_map.scope():
        found = Variable.__init__

        def theirs(self, *args, **kwargs):
            return found(self, *args, **kwargs)

        monkeypatch.setattr(Variable, "__init__", theirs)
        make_layer()
    assert Variable.__init__ is theirs
    in_a_scope(layout_map)  # wraps what is theirs, in which ours is still
    monkeypatch.undo()
    keras.utils.set_random_seed(3)
    plain = make_layer()
    assert getattr(plain.kernel, "layout", None) is None
    keras.utils.set_random_seed(3)
    layer = in_a_scope(layout_map)
    assert classes() == PLAIN
    np.testing.assert_array_equal(values_of(plain.kernel), values_of(layer.kernel))


def test_a_patch_without_wraps_is_no_other_keras(monkeypatch):
    """A constructor that another library has replaced, without `functools.wraps`, hides none of Keras's names."""
    plain = Variable.__init__
    monkeypatch.setattr(Variable, "__init__", lambda self, *args, **kwargs: plain(self, *args, **kwargs))
    layer = in_a_scope(make_map())
    assert ("unsharded", "model") == layer.kernel.layout.sharding_specs


if __name__ == "__main__":
    check(int(sys.argv[1]))
