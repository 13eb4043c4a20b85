"""Compile a module with XLA in a separate process, for devices that need not exist.

`compiled.compile_modules` starts the process with the name of a target and the number of devices. The process answers
with the compiled module's text and its buffer sizes as JSON.

Private names, tested on jax 0.10, all but those of `shardy` in this file: `get_compile_options` and
`backend_compile_and_load` of `jax._src.compiler`, for modules that no `jax.jit` has made, and `jaxlib.xla_client`.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from layoutmap.cost.jax.compiler_process import (
    MODULE,
    TargetDevicesError,
    answer_from_dump_file,
    exit_after_answering_parent,
)
from layoutmap.cost.jax.targets import TARGETS, CompileTarget


def make_compiler_environment(target: CompileTarget, num_devices: int) -> dict[str, str]:
    """Return the environment variables that the compiling process needs in addition to those of this process."""
    # Let JAX start only CPU devices, so that other programs can use the accelerators of this machine.
    needed = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    needed |= dict.fromkeys(("JAX_ENABLE_COMPILATION_CACHE", "JAX_DISABLE_MOST_OPTIMIZATIONS"), "false")
    if target.platform == "cpu":
        return needed | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"}
    if target.platform == "cuda":
        # XLA tunes the tiles of Triton kernels on a GPU, and fails for some shapes if there is none, so disable Triton.
        return needed | {
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false --xla_dump_to=. --xla_dump_hlo_as_text",
        }
    # libtpu would query the cloud's metadata server, lock local TPUs, and write logs to /tmp, so turn all of this off.
    return needed | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_LOG_DIR": "disabled"}


def _list_target_devices(target: CompileTarget, num_devices: int) -> list[object]:
    import jax
    from jax.experimental import topologies

    if target.platform == "cpu":
        return jax.devices("cpu")
    if target.platform == "cuda":
        chips_per_host = num_devices if num_devices < 8 else math.gcd(num_devices, 8)
        topology = f"1x{num_devices // chips_per_host}x{chips_per_host}"
        options = {"platform": "cuda", "topology": topology, "target_config": target.config}
        return topologies.get_topology_desc(topology_name="", **options).devices
    sides = target.choose_tpu_slice_sides(num_devices)
    # A host has 2 x 2 chips, which do not divide an odd side, so use hosts with one chip along an odd side.
    hosts = [2 - each % 2 for each in sides[:2]]
    return topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{target.chip}:{'x'.join(map(str, sides))}",
        chips_per_host_bounds=[*hosts, 1],
    ).devices


_LAST = "_gpu_after_optimizations-memory-usage-report.txt"
"""End of the name of the file that XLA for GPUs writes last before code generation."""


def _read_dumped_module_as_json(file: Path) -> str:
    """Return the module and its buffer sizes as JSON, from the files that XLA wrote before code generation."""
    name = file.name.removesuffix("-memory-usage-report.txt")
    sizes = dict.fromkeys(("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes"), 0)
    with open(f"{name}-buffer-assignment.txt") as lines:
        for line in lines:
            if found := re.match(r"allocation \d+: size (\d+), (.*)", line):
                is_given, is_returned = "parameter " in found[2], "maybe-live-out" in found[2]
                sizes["argument_bytes"] += int(found[1]) * is_given
                sizes["output_bytes"] += int(found[1]) * is_returned
                sizes["alias_bytes"] += int(found[1]) * (is_given and is_returned)
                sizes["temp_bytes"] += int(found[1]) * ("preallocated-temp" in found[2])
    return json.dumps({"text": Path(f"{name}.txt").read_text(), **sizes})


def _compile_module(devices: list[Any], module: bytes) -> dict[str, Any]:
    import numpy as np
    from jax._src import compiler
    from jaxlib import xla_client

    from layoutmap.engines.jax import shardy

    assignment = np.array([device.id for device in devices]).reshape(1, len(devices))
    options = compiler.get_compile_options(1, len(devices), assignment)
    with shardy.make_mlir_context():
        parsed = shardy.parse_module(module)
        compiled_module = compiler.backend_compile_and_load(
            devices[0].client, parsed, xla_client.DeviceList(tuple(devices)), options, []
        )
    memory = compiled_module.get_compiled_memory_stats()
    return {
        "text": compiled_module.hlo_modules()[0].to_string(),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


# Only XLA's results before code generation are needed, so the process ends once they are written (decisions/0156).
def main(target_name: str, num_devices: str) -> None:
    """Compile the module in the current folder, write the result to stdout, and end this process."""
    with exit_after_answering_parent() as answer:
        try:
            devices = _list_target_devices(TARGETS[target_name], int(num_devices))[: int(num_devices)]
        except Exception as error:
            raise TargetDevicesError from error
        answer_from_dump_file(answer, _LAST, _read_dumped_module_as_json)
        answer(json.dumps(_compile_module(devices, Path(MODULE).read_bytes())))
