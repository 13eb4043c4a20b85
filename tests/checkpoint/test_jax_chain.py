"""Processes of JAX save a model, others load it and train on."""

from pathlib import Path

import jax.numpy as jnp
import optax
import pytest
from cases import xla_settings
from checkpoint import chain_laws
from checkpoint.chains import BATCH
from checkpoint.jax_chain_process import Net
from flax import nnx

PROCESSES = ("jax",)


@pytest.mark.long  # test_torch_chain.py tries the same of load and save with other processes
class TestJax(chain_laws.Laws):
    worker = Path(__file__).with_name("jax_chain_process.py")
    stages = ((2, "batch=2,model=4"), (1, "batch=1,model=8"), (4, "batch=4,model=2"))

    @classmethod
    def environment(cls, num_processes):
        return xla_settings(8 // num_processes)

    def plain_losses(self, count):
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            value, gradients = nnx.value_and_grad(lambda model: ((model(x) - 1) ** 2).mean())(model)
            optimizer.update(model, gradients)
            return value

        return [float(step(model, optimizer, jnp.asarray(BATCH(n)))) for n in range(count)]
