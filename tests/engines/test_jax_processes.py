"""Two processes of JAX with four devices each make arrays together."""

from pathlib import Path

from cases import xla_settings
from engines import several_processes

PROCESSES = ("jax",)

WORKER = Path(__file__).with_name("jax_process.py")


def test_two_processes_hold_one_array(tmp_path):
    """On two processes, values are those of one process, each element is held once, and wrong draws are noticed."""
    (port,) = several_processes.free_ports(1)

    several_processes.check(
        several_processes.run(WORKER, tmp_path, [xla_settings(4)] * 2, f"127.0.0.1:{port}")
    )
