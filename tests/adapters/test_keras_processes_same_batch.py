"""Keras on TensorFlow and on torch in two processes, each of which brings the whole batch."""

from pathlib import Path

import keras
import numpy as np
import pytest
from engines import several_processes

PROCESSES = ("tensorflow", "torch")
pytestmark = pytest.mark.every_backend

WORKER = Path(__file__).with_name("keras_same_batch_process.py")


def environments():
    """What the two processes find in their environment."""
    ports = several_processes.free_ports(2)
    backend = keras.backend.backend()
    if backend == "torch":
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
        return [{"KERAS_BACKEND": backend, "RANK": str(i)} | group for i in range(2)]
    jobs = {"DTENSOR_JOBS": ",".join(f"127.0.0.1:{port}" for port in ports), "DTENSOR_JOB_NAME": "worker"}
    return [{"KERAS_BACKEND": backend, "DTENSOR_CLIENT_ID": str(i)} | jobs for i in range(2)]


def test_two_processes_train_one_model(tmp_path):
    """Values, losses and predictions are those of one process; other rules, batches and activations are reported."""
    results = [told for told, _ in several_processes.run(WORKER, tmp_path, environments())]

    assert results[0]["unseeded"] == results[1]["unseeded"]
    for told in results:
        assert told["first"]
        for name, expected in told["expected"].items():
            np.testing.assert_allclose(told["actual"][name], expected, rtol=1e-5, atol=1e-6)
        assert "Dense \"up\": activation: 'relu' in process 0, 'gelu' in process 1\n" in told["program"]
        assert (
            "process 1 has a different plan from process 0\n  from process 0 to 1  up.bias  layout"
            in told["plan"]
        )
        assert (
            "the processes pass different batches\n  process 0  float32[8, 6], int32[8], checksum"
            in (told["batch"])
        )
