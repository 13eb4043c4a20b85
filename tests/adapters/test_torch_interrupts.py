"""An interrupt at any line of what opens and closes a scope of torch leaves nothing behind."""

import sys

import keras
import pytest
import torch
from interrupts import Interrupter, run_alone
from torch.nn.modules import module as of_modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import layoutmap as lm
from layoutmap.adapters.current import get_current_session
from layoutmap.engines.torch.deferred_init import interception

PROCESSES = ("torch",)
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
FILES = (
    "engines/patches.py",
    "adapters/current.py",
    "scope/scope.py",
    "torch/session.py",
    "torch/module_hooks.py",
    "deferred_init/interception.py",
    "deferred_init/tape.py",
)
READING = ("<setcomp>", "<listcomp>", "<genexpr>")  # longer with each patch that an interrupt left noted
PLACES = [(torch.nn.Module, "__setstate__"), (torch.nn.Module, "_apply")]
PLACES += [(torch.optim.Optimizer, "add_param_group")]
HOOKS = [
    getattr(of_modules, f"_global_{kind}_registration_hooks") for kind in ("module", "parameter", "buffer")
]


def state():
    """All that a scope changes while it is open."""
    return (
        [vars(owner)[name] for owner, name in PLACES],
        [list(hooks) for hooks in HOOKS],
        list(_get_current_function_mode_stack()),
        list(_get_current_dispatch_mode_stack()),
        get_current_session(),
        interception._list_recording_tapes(),
    )


def make_map():
    return lm.LayoutMap(lm.create_mesh("model=4"), {"weight": (None, "model")})


def in_a_scope(layout_map):
    with layout_map.scope(library="torch"):
        return torch.nn.Linear(64, 64)


# Some hundreds of interrupts in one process are too many for torch's C++: objects turn into others, or it crashes.
@pytest.mark.parametrize(
    ("first", "step"), [(1, 41), *(pytest.param(first, 32, marks=pytest.mark.long) for first in range(1, 33))]
)
def test_an_interrupt_at_any_line_leaves_torch_plain(first, step):
    """Wherever a scope is interrupted, torch's classes, hooks and modes are as before, and the next scope works."""
    run_alone(__file__, first, step)


def check(first, step):
    layout_map = make_map()
    torch.manual_seed(3)
    expected = torch.nn.Linear(64, 64).weight
    in_a_scope(layout_map)
    before = state()
    interrupter, left, at = Interrupter(FILES, READING), [], first
    while interrupter.interrupted(lambda: in_a_scope(layout_map), at):
        if state() != before:
            left.append(at)
        at += step
    assert [] == left
    assert at > 100
    torch.manual_seed(3)
    actual = in_a_scope(layout_map).weight
    assert torch.equal(expected, actual.full_tensor())
    assert before == state()


def test_a_keras_model_in_a_scope_for_torch_is_refused():
    """A Keras model that is built in a scope for torch would stay plain, so it is refused, and after it is not."""
    refused = pytest.raises(lm.ScopeError, match="Dense: a Keras layer is built in a scope for torch models")
    with refused, make_map().scope(library="torch"):
        keras.layers.Dense(4)
    keras.layers.Dense(4).build((None, 4))


if __name__ == "__main__":
    check(int(sys.argv[1]), int(sys.argv[2]))
