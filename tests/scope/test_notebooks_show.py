"""What notebooks and viewers of pytrees show of plans, layouts and models in layouts."""

import nbformat
import pytest
import treescope
from flax import nnx
from nbclient import NotebookClient

import layoutmap as lm

PROCESSES = ("jax",)
RULES = {r"up\.kernel": (None, "model")}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, x):
        return self.up(x)


def layout_map():
    found = lm.LayoutMap("batch=2,model=4", RULES, rest="replicated")
    found.activations["up"] = ("batch", None)
    return found


@pytest.fixture(scope="module")
def shown():
    plan = lm.plan(lambda: Net(nnx.Rngs(0)), layout_map(), library="jax")
    net = layout_map().build(lambda: Net(nnx.Rngs(0)), batch_dim="batch", library="jax")
    return {
        "plan": plan,
        "layout": plan["up.kernel"].layout,
        "mesh": plan.mesh,
        "map": layout_map(),
        "net": net,
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plan", "up.kernel"),
        ("layout", "unsharded"),
        ("mesh", "batch"),
        ("map", "LayoutMap"),
        ("net", "kernel=Param("),
    ],
)
def test_treescope_shows_it(shown, name, words):
    """A plan, its parts and a module of nnx in layouts, as text and as a page, without an error in their place."""
    text = treescope.render_to_text(shown[name], ignore_exceptions=False)
    page = treescope.render_to_html(shown[name], ignore_exceptions=False)

    assert words in text
    assert "<" in page


CELLS = [
    """
import importlib, keras, layoutmap as lm
importlib.import_module("layoutmap.scope.progress")._DELAY_SECONDS = 0  # as if it took long

def make():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="up"), keras.layers.Dense(8, name="out")])

layout_map = lm.LayoutMap("batch=1,model=1", {r"up.kernel": (None, "model")}, rest="replicated")
model = layout_map.build(make)
""",
    "lm.plan(make, layout_map)",
    "layout_map",
]


@pytest.mark.long
def test_a_notebook_shows_progress_and_tables():
    """In a kernel of Jupyter's: a line that is written over while a model is built, and tables, not texts."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    built, *tables = [cell.outputs for cell in notebook.cells]
    said = "".join(output.text for output in built if output.output_type == "stream")

    assert "layoutmap: 1/4 variables" in said
    assert "" == said.split("\r")[-1].strip()
    assert "\x1b" not in said
    for (output,) in tables:
        assert output.data["text/html"].startswith(("<table", "<pre>Verdict: "))
        assert "<table" in output.data["text/html"]
