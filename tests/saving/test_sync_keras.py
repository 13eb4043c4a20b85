"""A sync of Keras models moves weights and moving statistics into the same variables, on JAX and on torch."""

import keras
import numpy as np
import pytest

import layoutmap as lm

PROCESSES = ("jax", "torch")


def make_model(seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, name="up"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.1, name="drop"),
            keras.layers.Dense(8, name="down"),
        ]
    )


@pytest.mark.every_backend
def test_weights_and_statistics_move_into_the_same_variables():
    """After training and a sync, both models have equal values, and variables keep their objects and layouts."""
    rules = (
        {r".*\.kernel": ("batch", None)},
        {r"up\.kernel": (None, "model"), r"down\.kernel": ("model", None)},
    )
    maps = [
        lm.LayoutMap(lm.create_mesh(dims), each, rest="replicated")
        for dims, each in zip(("batch=8", "model=8"), rules, strict=True)
    ]
    trainer, sampler = (each.build(lambda n=n: make_model(n), progress=False) for n, each in enumerate(maps))
    trainer.compile("sgd", "mse")
    inputs = np.random.default_rng(0).normal(size=(16, 16)).astype("float32")
    trainer.fit(inputs, inputs[:, :8], verbose=0)
    variables = {id(variable) for variable in sampler.variables}
    layouts = [variable.layout for variable in sampler.variables]
    sync = lm.plan_sync(trainer, sampler)

    assert sampler is sync(verify=True)
    assert variables == {id(variable) for variable in sampler.variables}
    assert layouts == [variable.layout for variable in sampler.variables]
    assert ["moving_mean", "moving_variance"] == [
        row.variable.path.rpartition(".")[2] for row in sync.plan.rows if "moving" in row.variable.path
    ]
    for source, target in zip(trainer.weights, sampler.weights, strict=True):
        if "seed" not in source.path:
            assert np.array_equal(keras.ops.convert_to_numpy(source), keras.ops.convert_to_numpy(target)), (
                source.path
            )
