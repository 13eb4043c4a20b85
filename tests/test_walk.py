"""docs/how-it-works.md follows one weight through the code: each call that it names happens, in its order."""

import os
import re
import sys

import frameworks
import pytest

import layoutmap as lm

PROCESSES = ("jax", "torch")
HERE = os.environ.get("LAYOUTMAP_TEST_PROCESS") or "jax"
PAGE = (frameworks.ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
WALK = PAGE.partition("## One weight")[2].partition("\n## ")[0]


def rows(title):
    """The calls of a table: files and functions."""
    table = WALK.partition(f"\n{title}:\n\n")[2].partition("\n\n")[0]
    return re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", table, re.MULTILINE)


def keras_model():
    import keras

    up, down = keras.layers.Dense(1024, name="up"), keras.layers.Dense(512, name="down")
    return keras.Sequential([keras.Input((512,)), up, down])


def nnx_model():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.up, self.down = nnx.Linear(512, 1024, rngs=rngs), nnx.Linear(1024, 512, rngs=rngs)

    return Net()


def torch_model():
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512)

    return Net()


WALKS = {
    "Keras on JAX": ("keras", keras_model, {r"up\.kernel": (None, "model")}),
    "A module of flax.nnx": ("jax", nnx_model, {r"up\.kernel": (None, "model")}),
    "A module of torch": ("torch", torch_model, {r"up\.weight": ("model", None)}),
}


def calls_of(function):
    """The functions of the package in the order of their first calls, while a function runs."""
    found = {}

    def note(frame, event, _):
        if event == "call" and "/layoutmap/" in frame.f_code.co_filename:
            path = frame.f_code.co_filename.rpartition("/layoutmap/")[2]
            found.setdefault((path, frame.f_code.co_qualname), None)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return [*found]


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
@pytest.mark.parametrize(
    "title", [t for t, (lib, *_) in WALKS.items() if (lib == "torch") == (HERE == "torch")]
)
def test_the_walk_of_one_weight_is_the_one_that_it_takes(title):
    """The rows of the library, and those that all have, are calls of a build, in the order of the page."""
    library, make_model, rules = WALKS[title]
    layout_map = lm.LayoutMap(lm.create_mesh("model=4"), rules)
    calls = calls_of(lambda: layout_map.build(make_model, library=library))

    for named in (rows("All three begin and plan alike"), rows(title)):
        assert len(named) > 5
        assert [] == [row for row in named if row not in calls]
        assert named == sorted(named, key=calls.index)
