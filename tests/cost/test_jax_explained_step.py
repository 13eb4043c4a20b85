"""`step.explain`: collectives, lines, and causes of a compiled step, next to an independent reader and to paper."""

import inspect
import json

import hlo_proto
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.core.escaping import escape_text
from layoutmap.cost.jax.explained_step import ExplainedCollective, ExplainedProducts, StepExplanation

ROWS, WIDTH, HIDDEN, BLOCKS = 16, 64, 256, 2


def make_blocks():
    keys = jax.random.split(jax.random.key(0), 2 * BLOCKS)
    return [
        {
            "up": jax.random.normal(keys[2 * i], (WIDTH, HIDDEN)),
            "down": jax.random.normal(keys[2 * i + 1], (HIDDEN, WIDTH)),
        }
        for i in range(BLOCKS)
    ]


def compute_block(weights, x):
    hidden = x @ weights["up"]  # up
    return x + hidden @ weights["down"]  # down


def find_line(mark):
    """Return the line of `compute_block` that ends with a mark, as explanations write it."""
    lines, first = inspect.getsourcelines(compute_block)
    number = next(n for n, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}"))
    return f"test_jax_explained_step.py:{first + number}"


def make_step(num=1, split=lambda x, num: lm.microbatches(x, num)):
    @lm.jit_step(batch_dim="batch")
    def step(params, x):
        def compute_loss(params, x):
            for weights in params:
                x = compute_block(weights, x)
            return (x**2).mean()

        def add(sums, rows):
            return jax.tree.map(jnp.add, sums, jax.grad(compute_loss)(params, rows)), None

        sums, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), split(x, num))
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, sums)

    return step


@pytest.fixture(scope="module")
def params():
    rules = {r"\d+\.up": (None, "model"), r"\d+\.down": ("model", None)}
    return lm.LayoutMap("batch=2,model=4", rules).build(make_blocks, library="jax")


@pytest.fixture
def x():
    return np.ones((ROWS, WIDTH), np.float32)


def test_bytes_are_those_of_the_second_reader(params, x):
    """All collectives of the step, in a loop too, send what a reader of XLA's protobuf counts."""
    for num in (1, 4):
        step = make_step(num)
        text = step.lower(params, x).compile().as_text()
        assert sum(hlo_proto.sent_by_text(text, 8).values()) == step.explain(params, x).sent_bytes


def test_products_are_those_on_paper(params, x):
    """Each device computes its share, which is the products of a line divided by the number of devices."""
    explanation = make_step().explain(params, x)
    products = {each.line: each for each in explanation.products}
    forward = 2 * ROWS * WIDTH * HIDDEN * BLOCKS
    assert {find_line("up"), find_line("down")} == {*products}
    assert 3 * forward / 8 == products[find_line("down")].flops == products[find_line("down")].ideal_flops
    assert [] == [each for each in str(explanation).splitlines() if "its share," in each]


@pytest.mark.filterwarnings("ignore:step. a scan goes over")
def test_repeated_work_is_reported(params, x):
    """Consecutive rows in a microbatch make all devices of the batch dim compute all rows."""
    explanation = make_step(4, lambda x, num: x.reshape(num, -1, WIDTH)).explain(params, x)
    assert {2.0} == {each.ratio for each in explanation.products}
    assert f"{find_line('up')}: each device computes 2.0 times its share" in str(explanation)


def test_causes_and_full_gathers(x):
    """An all-gather names the weight that it gathers in full, and an all-reduce the weight whose gradient it sums."""
    params = lm.LayoutMap("batch=8", {".*": ("batch", None)}).build(make_blocks, library="jax")
    explanation = make_step().explain(params, x)
    gathered = {each.cause for each in explanation.collectives if each.is_full_gather}
    assert gathered <= {f"params[{n}]['{name}']" for n in range(BLOCKS) for name in ("up", "down")}
    assert gathered
    tx = optax.adam(1e-3)
    layout_map = lm.LayoutMap("batch=2,model=4", {r"\d+\.up": (None, "model"), r"\d+\.down": ("model", None)})
    params = layout_map.build(make_blocks, library="jax")

    @lm.jit_step(batch_dim="batch", donate_argnums=(0, 1))
    def step(params, state, x):
        gradients = jax.grad(lambda params: (compute_block(params[0], x) ** 2).mean())(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    lines = {
        each.cause: each.line
        for each in step.explain(params, layout_map.build_optimizer(tx, params), x).collectives
        if each.dims == ("batch",)
    }
    # XLA combines both, and gives them one line.
    assert lines == {"params[0]['up']": find_line("up"), "params[0]['down']": find_line("down")}


def attend(weights, x):
    query, key, value = (x @ weights[name] for name in ("query", "key", "value"))
    scores = jax.nn.softmax(jnp.einsum("bqf,bkf->bqk", query, key))
    return x + scores @ value @ weights["out"]


def test_no_line_seems_to_repeat_work_if_xla_mixes_lines_up():
    """XLA gives gradients of the query, key, and value the line of the output."""
    shapes = dict.fromkeys(("query", "key", "value"), (WIDTH, WIDTH)) | {"out": (WIDTH, WIDTH)}
    rules = {"(query|key|value)": (None, "model"), "out": ("model", None)}
    weights = lm.LayoutMap("batch=2,model=4", rules).build(
        lambda: {name: jnp.ones(shape) for name, shape in shapes.items()}, library="jax"
    )
    step = lm.jit_step(
        jax.grad(lambda weights, x: (attend(weights, attend(weights, attend(weights, x))) ** 2).mean()),
        batch_dim="batch",
    )
    explanation = step.explain(weights, np.ones((8, ROWS, WIDTH), np.float32))
    flops, ideal = (
        sum(getattr(each, name) for each in explanation.products) for name in ("flops", "ideal_flops")
    )

    assert flops == ideal
    assert {1.0} == {each.ratio for each in explanation.products}
    assert "repeat" not in str(explanation)


class Feedforward(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        hidden = self.up(self.norm(x))  # up
        return x + self.down(hidden)  # down


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adamw(1e-3), optax.lion(1e-3, weight_decay=0.1)])
def test_code_of_a_library_has_the_line_that_calls_it(x, tx):
    """Its cause is never a slot, and no scale of a norm causes the sum of an activation."""
    layout_map = lm.LayoutMap(
        "batch=2,model=4",
        {r"up\.kernel": (None, "model"), r"down\.kernel": ("model", None)},
        rest="replicated",
    )
    model = layout_map.build(lambda: Feedforward(nnx.Rngs(0)), library="jax")

    @lm.jit_step(batch_dim="batch")
    def step(model, optimizer, x):
        gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, gradients)

    found = step.explain(model, layout_map.build_optimizer(tx, model), x).collectives
    lines, first = inspect.getsourcelines(Feedforward.__call__)
    down = next(n for n, line in enumerate(lines, first) if line.endswith("# down\n"))
    activations = [each for each in found if each.dims == ("model",) and each.shape == (ROWS // 2, WIDTH)]
    gradients = {each.cause for each in found if each.dims == ("batch",) and len(each.shape) > 0}

    assert f"test_jax_explained_step.py:{down}" in {each.line for each in activations}
    assert {""} == {each.cause for each in activations}
    assert "" not in {each.line for each in activations}  # XLA tells no line of some joined gradients
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}
    assert gradients - {""} == paths


def test_recompilations_have_their_reason(params, x):
    """Each compilation after the first names the argument that changed."""

    @lm.jit_step(batch_dim="batch", static_argnums=2)
    def step(params, x, scale):
        return (compute_block(params[0], x) * scale).sum()

    for arguments in ((x, 1), (x[:8], 1), (x[:8], 2), (x[:8].astype(np.float16), 2)):
        step(params, *arguments)
    again = lm.dtensor.relayout(params[0]["up"], lm.Layout.replicated(lm.create_mesh("batch=2,model=4"), 2))
    explanation = step.explain([{**params[0], "up": again}, *params[1:]], x[:8].astype(np.float16), 2)
    first, second, third, fourth = explanation.recompilations
    assert "x: shape (16, 64) -> (8, 64)" == first
    assert "argument 2: 1 -> 2" == second
    assert "x: dtype float32 -> float16" == third
    assert fourth.startswith("params[0]['up']: layout ")


def test_an_explanation_is_data_and_text(params, x):
    """It can be written as JSON, and shown in a notebook."""
    explanation = make_step().explain(params, x)
    data = json.loads(json.dumps(explanation.to_json()))
    assert explanation.sent_bytes == data["sent_bytes"] == sum(c["sent_bytes"] for c in data["collectives"])
    assert explanation._repr_html_().startswith("<pre>step on batch=2, model=4: each device sends ")


def test_a_parameter_may_be_called_as_its_place(params, x):
    """Names of arrays begin with the parameter's own name, also if that is `args`."""

    @lm.jit_step(batch_dim="batch")
    def step(args, x):
        return (compute_block(args[1], x) ** 2).sum() + args[0]["up"].sum()

    step(params, x)
    step(params, x[:8])
    shorter = [params[0], {**params[1], "up": params[1]["up"].astype(jnp.bfloat16)}]
    assert "args[1]['up']: dtype float32 -> bfloat16" == step.explain(shorter, x[:8]).recompilations[1]


def explain_named(name):
    collective = ExplainedCollective("all_gather", (name,), 1, (8,), 8, name, name, True)
    products = ExplainedProducts(name, 80, 8.0)
    return StepExplanation(name, lm.Mesh(None, "x=8"), (collective,), (products,), 1, 1, (name,))


@given(name=st.text(st.characters(exclude_categories=()), min_size=1).map(lambda name: f"a{name}b"))
def test_a_drawn_name_is_escaped(name):
    """Neither the text nor the HTML of a notebook has a character of it that ends lines, controls, or turns text."""
    step = explain_named(name)

    for text in (str(step), step._repr_html_()):
        assert text == escape_text(text, keep="\n")
        assert text.count("\n") == str(explain_named("ab")).count("\n")
