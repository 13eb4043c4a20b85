"""Processes of JAX save a model, others load it and train on."""

import random
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint import chains
from checkpoint.jax_chain_process import Net
from flax import nnx

PROCESSES = ("jax",)

WORKER = Path(__file__).with_name("jax_chain_process.py")
STAGES = [(2, "batch=2,model=4"), (1, "batch=1,model=8"), (4, "batch=4,model=2")]
pytestmark = pytest.mark.long  # test_torch_chain.py tries the same of load and save with other processes


def ENVIRONMENT(size):
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    flags += f" --xla_force_host_platform_device_count={8 // size}"
    return {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def plain_losses(count):
    """The losses of the model on one device, without a layout."""
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda model: ((model(x) - 1) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return value

    return [float(step(model, optimizer, jnp.asarray(chains.BATCH(n)))) for n in range(count)]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the processes of three stages told: two of them, then one, then four."""
    return chains.chain(WORKER, tmp_path_factory.mktemp("chain"), STAGES, ENVIRONMENT)


def test_training_goes_on_as_on_one_device(told):
    """Over stages of two processes, one and four, with meshes of their own, losses are those of one plain model."""
    losses = [loss for stage in told for loss in stage[0]["losses"]]
    for stage in told:
        for each in stage:
            assert stage[0]["losses"] == each["losses"]
    np.testing.assert_allclose(losses, plain_losses(len(losses)), rtol=1e-4)


def test_a_process_reads_what_its_shards_need(told):
    """Loaded into a mesh of another shape, a process reads at most a twentieth more than its shards have."""
    for stage in told[1:]:
        for each in stage:
            assert each["needed"] <= each["read"] <= 1.05 * each["needed"]


def test_states_of_processes(told):
    """As many processes get their own states, another number those that all had, and no process that of another."""
    for number, each in enumerate(told[0]):
        assert [10 + number, random.Random(number).random()] == each["own"]
    for number, stage in enumerate(told[1:]):
        for each in stage:
            assert 5 + number == each["common"]
            assert np.random.RandomState(7).random_sample() == each["numpy"]
            assert "data['own']: each of the processes that saved has a state of its own" in each["refused"]


def test_a_chunk_that_one_process_reads_fails_all(told):
    """A flipped bit in a chunk that only the last process needs is an error in all, for new models and old ones."""
    for stage in told[1:]:
        first, last = stage[0], stage[-1]
        for each in stage:
            for text in each["damaged"]:
                assert "its values are not those that were saved" in text
        for text in last["damaged"]:
            assert text.splitlines()[0].endswith("its values are not those that were saved")
        for text in first["damaged"] if first is not last else ():
            assert f"process {len(stage) - 1}" in text
