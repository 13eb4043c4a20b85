"""The first step names a mesh dim exactly if it shards nothing: on drawn meshes, rules and batches."""

import random
import re
import warnings
from dataclasses import dataclass

import keras
import numpy as np
import pytest
from cases import EVERYTHING

import layoutmap as lm

PROCESSES = ("jax", "torch")
ON_JAX = keras.backend.backend() == "jax"
if ON_JAX:
    import jax
else:
    import torch

ROWS, WIDTH = 256, 8
X = np.ones((ROWS, WIDTH), "float32")
SEEDS = range(100 if EVERYTHING else 8)

pytestmark = pytest.mark.every_backend


@dataclass(frozen=True)
class Case:
    """Which dims shard the axes of two kernels, of what the first layer returns, and of batches."""

    sizes: dict[str, int]
    kernels: tuple[tuple[object, object], ...]
    outputs: tuple[object, object] | None
    batch_dim: str | None

    @property
    def mesh(self):
        return lm.create_mesh(",".join(f"{name}={size}" for name, size in self.sizes.items()))

    @property
    def idle(self):
        """The names that no part of the case has."""
        parts = repr((self.kernels, self.outputs, self.batch_dim))
        return [name for name, size in self.sizes.items() if size > 1 and f"'{name}'" not in parts]


def draw_case(seed):
    """Draw a case: one, two or three dims of sizes 1, 2 and 4, on at most 8 devices."""
    draw = random.Random(seed)
    sizes = {}
    for name in draw.sample(["batch", "model", "expert"], draw.randint(1, 3)):
        sizes[name] = draw.choice([size for size in (1, 2, 4) if size * np.prod([*sizes.values()]) <= 8])

    def draw_sharding_specs():
        left = draw.sample(list(sizes), draw.randint(0, len(sizes)))
        axes = [[], []]
        for name in left:
            if draw.random() < 0.5:
                draw.choice(axes).append(name)
        return tuple(None if not axis else axis[0] if len(axis) == 1 else tuple(axis) for axis in axes)

    return Case(
        sizes,
        (draw_sharding_specs(), draw_sharding_specs()),
        draw_sharding_specs() if draw.random() < 0.5 else None,
        draw.choice([None, *sizes]),
    )


def named_by(steps):
    """The dims that each warning of an idle dim names, while something runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps()
    first = [str(each.message).splitlines()[0] for each in caught if each.category is lm.LayoutMapWarning]
    return [re.findall(r"'(\w+)'", line) for line in first if line.endswith("is idle")]


def options_of(case):
    return {} if case.batch_dim is None else {"batch_dim": case.batch_dim}


def map_of(case, names, first):
    layout_map = lm.LayoutMap(case.mesh, dict(zip(names, case.kernels, strict=True)), rest="replicated")
    if case.outputs is not None:
        layout_map.activations[first] = case.outputs
    return layout_map


def train_keras(case):
    """Take two steps of a Keras model."""

    def make_model():
        layers = [keras.layers.Dense(WIDTH, name=name) for name in ("d1", "d2")]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile("sgd", "mse")
        return model

    model = map_of(case, (r"d1\.kernel", r"d2\.kernel"), "d1").build(make_model, **options_of(case))
    for _ in range(2):
        model.fit(X, X, batch_size=ROWS, verbose=0)


def train_pytree(case):
    """Take two steps of a function of JAX, compiled by `lm.jit_step`."""
    mesh = case.mesh
    params = [lm.dtensor.relayout(X[:WIDTH], lm.Layout(specs, mesh)) for specs in case.kernels]
    native = params[0].sharding.mesh

    def step(params, x):
        hidden = x @ params[0]
        if case.outputs is not None:
            over = jax.sharding.NamedSharding(native, jax.sharding.PartitionSpec(*case.outputs))
            hidden = jax.lax.with_sharding_constraint(hidden, over)
        loss = (hidden @ params[1]).mean()
        return [each - loss for each in params]

    compiled = lm.jit_step(step, batch_dim=case.batch_dim)
    for _ in range(2):
        params = compiled(params, X)


def train_torch(case):
    """Take two steps of a torch module."""

    def make_model():
        return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))

    model = map_of(case, (r"0\.weight", r"1\.weight"), "0").build(
        make_model, library="torch", **options_of(case)
    )
    for _ in range(2):
        model(torch.ones(ROWS, WIDTH)).sum().backward()


@pytest.mark.parametrize("train", [train_keras, train_pytree] if ON_JAX else [train_torch, train_keras])
@pytest.mark.every_case
def test_a_dim_is_named_exactly_if_it_shards_nothing(train):
    """Once, whichever library trains; a dim of size 1 is never named."""
    cases = [draw_case(seed) for seed in SEEDS]

    assert {bool(case.idle) for case in cases} == {True, False}
    expected = {seed: [case.idle] * bool(case.idle) for seed, case in enumerate(cases)}
    actual = {seed: named_by(lambda case=case: train(case)) for seed, case in enumerate(cases)}
    assert expected == actual
