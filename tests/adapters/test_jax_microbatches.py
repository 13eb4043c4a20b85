"""Microbatches of a step have rows of every device, and a step whose microbatches do not is told."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import layoutmap as lm

X = np.random.default_rng(0).normal(size=(64, 32)).astype("float32")


@pytest.fixture
def kernel():
    mesh = lm.create_mesh("batch=4,model=2")
    return lm.dtensor.relayout(np.ones((32, 16), np.float32), lm.Layout([None, "model"], mesh), engine="jax")


def make_step(split, transform=lambda function: function):
    @lm.jit_step(batch_dim="batch")
    def step(kernel, x):
        def compute_loss(kernel):
            def add(total, rows):
                return total + jnp.tanh(rows @ kernel).sum(), None

            return jax.lax.scan(add, 0.0, split(x))[0]

        return kernel, transform(compute_loss)(kernel)

    return step


def count_rows(step, *args):
    """The rows of the products of a step on each device, from the program that XLA compiles."""
    text = step.lower(*args).compile().as_text()
    return {int(rows) for rows in re.findall(r"f32\[(\d+),8\]\S* dot\(", text)}


def test_each_device_computes_with_its_own_rows(kernel):
    step = make_step(lambda x: lm.microbatches(x, 4))
    assert {64 // 4 // 4} == count_rows(step, kernel, X)
    assert "all-gather" not in step.lower(kernel, X).compile().as_text()
    np.testing.assert_allclose(np.tanh(X @ np.ones((32, 16))).sum(), step(kernel, X)[1], rtol=1e-5)


@pytest.mark.parametrize("transform", [lambda f: f, jax.value_and_grad, jax.checkpoint, jax.jit])
def test_consecutive_rows_are_told_at_the_first_call(kernel, transform):
    step = make_step(lambda x: x.reshape(4, -1, 32), transform)
    with pytest.warns(lm.LayoutMapWarning, match=r"scan goes over 4 microbatches of args\[1\]") as caught:
        step(kernel, X)
    assert "layoutmap.microbatches(x, 4)" in str(caught[0].message)
    assert caught[0].filename == __file__
    step(kernel, X)  # a warning would be an error


@pytest.mark.parametrize("transform", [lambda f: f, jax.value_and_grad])
def test_steps_that_split_otherwise_are_not_told(kernel, transform):
    make_step(lambda x: lm.microbatches(x, 4), transform)(kernel, X)
    make_step(lambda x: x.reshape(64, 1, 32), transform)(kernel, X)
    make_step(lambda x: x[:8].reshape(2, 4, 32), transform)(kernel, X)


def test_rows_of_one_device_are_not_told():
    """A batch dim of size 1 shards nothing."""
    mesh = lm.create_mesh("batch=1,model=8")
    kernel = lm.dtensor.relayout(
        np.ones((32, 16), np.float32), lm.Layout([None, "model"], mesh), engine="jax"
    )
    make_step(lambda x: x.reshape(4, -1, 32))(kernel, X)


def test_trees_are_split_row_by_row():
    batch = {"x": X, "t": jnp.arange(64)}
    made = lm.microbatches(batch, 8)
    assert {"x": (8, 8, 32), "t": (8, 8)} == {name: value.shape for name, value in made.items()}
    np.testing.assert_array_equal(X[3::8], made["x"][3])
    np.testing.assert_array_equal(np.arange(64)[5::8], made["t"][5])


@pytest.mark.parametrize(
    ("shape", "num", "why"), [((6,), 4, "does not divide"), ((), 2, "no rows"), ((6,), 0, "divide")]
)
def test_rows_that_do_not_divide_are_refused(shape, num, why):
    with pytest.raises(lm.LayoutError, match=rf"(?s)batch\['x'\] cannot be split into {num}.*{why}"):
        lm.microbatches({"x": np.zeros(shape)}, num)


def test_keys_of_rows_are_sharded_as_the_rows(kernel):
    seen = []

    @lm.jit_step(batch_dim="batch")
    def step(kernel, x, keys):
        jax.debug.inspect_array_sharding(
            keys, callback=lambda sharding: seen.append(sharding.shard_shape((64,)))
        )
        mask = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (32,)))(keys)
        return kernel, (x * mask).sum()

    keys = jax.random.split(jax.random.key(0), 64)
    _, total = step(kernel, X, keys)
    mask = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (32,)))(keys)
    np.testing.assert_allclose((X * mask).sum(), total, rtol=1e-5)
    assert [(16,)] == seen


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, lambda f: jax.vmap(f, in_axes=(None, 0))])
def test_a_step_inside_of_a_transformation_is_refused(kernel, transform):
    step = lm.jit_step(lambda kernel, x: (kernel * x.mean()).sum(), batch_dim="batch")
    step(kernel, X)
    with pytest.raises(lm.ScopeError, match=r"inside another traced function(?s:.*)__wrapped__"):
        transform(step)(kernel, X)
