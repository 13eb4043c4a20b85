"""A process that has XLA compile a module for devices that are not there.

A process of its own, since the number of simulated CPU devices and the plugins of JAX are fixed when JAX starts. It is
given the name of a target and a file with the module, and writes what XLA made of it beside that, as JSON.

Private names, tested on jax 0.10, all but those of `shardy` in this file: `get_compile_options` and
`backend_compile_and_load` of `jax._src.compiler`, for modules that no `jax.jit` has made, and `jaxlib.xla_client`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from layoutmap.engines.jax.cost.targets import TARGETS, Target


def environment(target: Target, num_devices: int) -> dict[str, str]:
    """Return the variables of the environment that the process needs."""
    needed = {"JAX_PLATFORMS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if target.platform == "cpu":
        flags = f"--xla_force_host_platform_device_count={num_devices}"
        return needed | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    if target.platform == "cuda":
        # Tiles of Triton's are chosen by trying them on the GPU; without one XLA fails for shapes such as a ViT's.
        return needed | {
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false",
        }
    return needed | {"TPU_SKIP_MDS_QUERY": "1", "XLA_FLAGS": ""}


def _devices(target: Target, num_devices: int) -> list[Any]:
    import jax
    from jax.experimental import topologies

    if target.platform == "cpu":
        return jax.devices("cpu")
    if target.platform == "cuda":
        topology = f"1x{max(num_devices // 8, 1)}x{min(num_devices, 8)}"
        options = {"platform": "cuda", "topology": topology, "target_config": target.config}
        return topologies.get_topology_desc(topology_name="", **options).devices
    return topologies.get_topology_desc(platform="tpu", topology_name=target.topology(num_devices)).devices


def _compiled(target: Target, num_devices: int, module: str) -> dict[str, Any]:
    import numpy as np
    from jax._src import compiler
    from jaxlib import xla_client

    from layoutmap.engines.jax.cost import shardy

    devices = _devices(target, num_devices)[:num_devices]
    assignment = np.array([device.id for device in devices]).reshape(1, num_devices)
    options = compiler.get_compile_options(1, num_devices, assignment)
    with shardy.context():
        parsed = shardy.parsed(module)
        made = compiler.backend_compile_and_load(
            devices[0].client, parsed, xla_client.DeviceList(tuple(devices)), options, []
        )
    memory = made.get_compiled_memory_stats()
    return {
        "hlo": made.hlo_modules()[0].to_string(),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


if __name__ == "__main__":
    _name, _count, _file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    _found = _compiled(TARGETS[_name], _count, _file.read_text())
    _file.with_suffix(".json").write_text(json.dumps(_found))
