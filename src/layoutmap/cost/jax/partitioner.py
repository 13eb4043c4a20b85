"""Run XLA's partitioner in a separate process, and answer with the partitioned module.

`compiled.partition_modules` starts the process. It needs only jaxlib, and takes a fifth of the time of compiling,
because it exits as soon as the partitioned module is written.

Private names, tested on jaxlib 0.10.2: all of `jaxlib.xla_client`.
"""

from __future__ import annotations

import time
from pathlib import Path

from layoutmap.cost.jax.compiler_process import MODULE, answer_from_dump_file, exit_after_answering_parent

_MAX_WAIT_SECONDS = 10  # longest time to wait for XLA's dump after compilation
_MAX_CLIENT_DEVICES = 2048
_PRINTS = ("dump_to=.", "dump_hlo_pass_re=spmd-partitioning", "dump_hlo_as_text", "dump_large_constants")
ENVIRONMENT = {"XLA_FLAGS": " ".join(f"--xla_{each}" for each in _PRINTS), "TF_CPP_MIN_LOG_LEVEL": "2"}
"""Environment variables that the process needs."""


# XLA's partitioner chooses the collectives, so they are counted in its output, not predicted (decisions/0156).
def main(num_devices: str) -> None:
    """Partition the module in the current folder, write the result to stdout, and end this process."""
    with exit_after_answering_parent() as answer:
        # With one device, XLA does not partition the module, so the answer is the module before optimization.
        dump_name = "after_spmd-partitioning" if int(num_devices) > 1 else "before_optimizations.txt"

        answer_from_dump_file(answer, dump_name, _read_file_if_complete)
        _compile_module(Path(MODULE).read_bytes(), int(num_devices))
        time.sleep(_MAX_WAIT_SECONDS)


def _read_file_if_complete(file: Path) -> str:
    """Return the module in a file, or "" if the file is not yet complete."""
    text = file.read_text()
    return text if "\nENTRY" in text and text.rstrip().endswith("\n}") else ""


def _compile_module(module: bytes, num_devices: int) -> None:
    import numpy as np
    from jaxlib import xla_client

    # The client supports 2,048 devices. The module never runs, so one device may stand for several of the mesh.
    client = xla_client.make_cpu_client(num_devices=min(num_devices, _MAX_CLIENT_DEVICES))
    options = xla_client.CompileOptions()
    options.num_partitions = num_devices
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = True
    options.device_assignment = xla_client.DeviceAssignment.create(
        (np.arange(num_devices) % _MAX_CLIENT_DEVICES).reshape(1, -1)
    )
    devices = xla_client.DeviceList(tuple(client.devices()))
    client.compile_and_load(module, executable_devices=devices, compile_options=options)
