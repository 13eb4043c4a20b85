"""Two processes of one JAX program save and load models on several meshes."""

from pathlib import Path

import forked
from cases import xla_settings
from engines.several_processes import free_ports

PROCESSES = ("jax",)
WORKER = Path(__file__).with_name("jax_meshes_process.py")


def test_models_on_several_meshes(tmp_path):
    """On meshes of all and of some devices; who has none of a model's devices cannot save it."""
    (port,) = free_ports(1)
    running = [
        forked.start(WORKER, [str(number), str(tmp_path), str(port)], xla_settings(4)) for number in (0, 1)
    ]

    for ended in forked.wait_for_all(running):
        assert 0 == ended.returncode, ended.stdout + ended.stderr[-4000:]
