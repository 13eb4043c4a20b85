"""Processes of JAX, each with some of the devices, build and train models: the numbers of one process."""

from pathlib import Path

import jax_models_process as worker
import numpy as np
import pytest
from cases import xla_settings
from engines import several_processes
from jax_models import MODELS

PROCESSES = ("jax",)

ENVIRONMENT = xla_settings(4)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of two processes tells."""
    (port,) = several_processes.free_ports(1)
    folder = tmp_path_factory.mktemp("processes")
    file = Path(worker.__file__)
    results = several_processes.run(file, folder, [ENVIRONMENT] * 2, f"127.0.0.1:{port}")
    return [told for told, _ in results]


@pytest.mark.parametrize("name", worker.NAMES)
def test_models_have_the_values_and_the_steps_of_one_process(told, name):
    """First values bit for bit, each process holding its devices' shards; losses and weights of two steps."""
    plain = MODELS[name]()
    bits = worker.bits(worker.values(plain))
    alone = worker.trained(plain, name)

    for each in told:
        assert bits == each[name]["bits"]
        assert {4} == set(each[name]["shards"])
        np.testing.assert_allclose(each[name]["losses"], alone["losses"], rtol=1e-5)
        for path, expected in alone["after"].items():
            np.testing.assert_allclose(
                each[name]["after"][path], expected, rtol=2e-4, atol=2e-5, err_msg=path
            )
    assert told[0][name] == told[1][name]


def test_orbax_restores_into_the_layouts_of_a_plan(told):
    """Each process reads what its devices hold, and the values are those that were saved."""
    expected = worker.bits(worker.values(worker.make_plain()))

    for each in told:
        assert {"layouts": True, "bits": expected} == each["restored"]
