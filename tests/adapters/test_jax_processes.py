"""Two processes of JAX, each with some of the devices, in steps of a program's own and with its checkpoints.

That they build and train models is tried on drawn ones: `layoutmap.testing.laws`.
"""

from pathlib import Path

import jax
import jax_process
import numpy as np
import optax
import pytest
from cases import xla_settings
from engines import several_processes
from optax_optimizers import plain_params
from test_jit_step import batch, make_step

PROCESSES = ("jax",)


@pytest.fixture(scope="module")
def of_processes(tmp_path_factory):
    """What each of two processes tells."""
    (port,) = several_processes.free_ports(1)
    folder, file = tmp_path_factory.mktemp("processes"), Path(jax_process.__file__)
    results = several_processes.run(file, folder, [xla_settings(4)] * 2, f"127.0.0.1:{port}")
    return [told for told, _ in results]


def test_processes_that_run_different_steps_are_refused(of_processes):
    """Where what is lowered differs, both name the step; nowhere else."""
    said = dict.fromkeys(("activation", "learning rate", "line"), "the lowered step: hash ")
    said |= {"compiled": "the lowered scaled: hash ", "alike": ""}

    for told in of_processes:
        assert said == {name: told["refusals"][name][: len(text)] for name, text in said.items()}
        assert "" == told["refusals"]["alike"]


def test_each_process_brings_its_rows(of_processes):
    """Two processes, each with its rows of the batches, get the losses of one device, and move nothing."""
    tx, losses = optax.adamw(1e-2), []
    params = plain_params()
    state = tx.init(params)
    for number in range(2):
        params, state, metrics = jax.jit(make_step(tx))(params, state, batch(number))
        losses.append(float(metrics["loss"]))
    for told in of_processes:
        np.testing.assert_allclose(losses, told["losses"], rtol=1e-5)
        assert [] == told["misplaced"]


def test_orbax_restores_into_the_layouts_of_a_plan(of_processes):
    """Each process reads what its devices hold, and the values are those that were saved."""
    expected = jax_process.bits(jax_process.values(jax_process.make_plain()))

    for told in of_processes:
        assert {"layouts": True, "bits": expected} == told["restored"]
