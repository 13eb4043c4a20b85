"""Two processes with four devices each make one array together."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from layoutmap.blocks import assemble
from layoutmap.testing.engine_contract import assert_same_bits

PROCESSES = ("jax",)

WORKER = Path(__file__).with_name("two_processes.py")
TIMEOUT_SECONDS = 120


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_two_processes(folder):
    """What each of two processes that run the worker wrote."""
    address = f"127.0.0.1:{free_port()}"
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(WORKER), address, str(i), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        texts = [worker.communicate(timeout=TIMEOUT_SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, text in zip(workers, texts, strict=True):
        assert 0 == worker.returncode, text[-4000:]
    return [
        (json.loads((folder / f"{i}.json").read_text()), dict(np.load(folder / f"{i}.npz"))) for i in range(2)
    ]


def test_two_processes_hold_one_array(tmp_path):
    """On two processes, values are those of one process, each element is held once, and wrong seeds are noticed."""
    (first, values), (second, more) = run_two_processes(tmp_path)

    assert ["CPU:0", "CPU:1", "CPU:2", "CPU:3"] == first["devices"][:4]
    assert first["devices"] == second["devices"]
    assert [0, 1, 2, 3] == first["local_device_ids"]
    assert [4, 5, 6, 7] == second["local_device_ids"]
    assert first["whole_of_other_seeds"] == second["whole_of_other_seeds"]
    assert "other: the processes drew different values" in first["whole_of_other_seeds"]
    for name in first["expected"]:
        shards: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
        for told, held in ((first, values), (second, more)):
            for i, ends in enumerate(told["shards"][name]):
                shard = held[f"{name}.{i}"]
                known = shards.setdefault(tuple(map(tuple, ends)), shard)
                assert_same_bits(known, shard)
        expected = values[f"{name}.expected"]
        blocks = [(tuple(slice(*pair) for pair in ends), shard) for ends, shard in shards.items()]

        assert_same_bits(expected, assemble(blocks, expected.shape, expected.dtype))
        assert first["layouts_equal"][name]
        assert second["layouts_equal"][name]
    assert first["unpacked"] == second["unpacked"] == 4
