"""What XLA can compile for where none is there: CPU devices always, GPUs and TPUs by plugins of JAX."""

from __future__ import annotations

from dataclasses import dataclass

_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {core_bytes}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {block_bytes}
  cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True)
class Target:
    """What a step is compiled for.

    Args:
        platform: JAX's name of it.
        package: What must be installed for it; empty: nothing.
        config: Of a GPU: what XLA has to know of it, as text of a protobuf.
        chip: Of a TPU: its name, as in `"v5p"`.
    """

    platform: str
    package: str = ""
    config: str = ""
    chip: str = ""

    def topology(self, num_devices: int) -> str:
        """Return the name of a slice of so many TPUs: as near to a cube, or to a square, as it can be."""
        sides, axes = [1, 1, 1], 2 if self.chip in ("v5e", "v6e") else 3
        rest, axis = num_devices, 0
        while rest > 1 and rest % 2 == 0:
            sides[axis % axes] *= 2
            rest, axis = rest // 2, axis + 1
        sides[0] *= rest
        return f"{self.chip}:{'x'.join(map(str, sides[:axes]))}"


def _gpu(name: str, **facts: float) -> Target:
    return Target("cuda", "jax-cuda12-plugin jax-cuda12-pjrt", _GPU.format(name=name, **facts))


_H100 = {
    "core_bytes": 233472,
    "block_bytes": 232448,
    "cores": 132,
    "cache": 52428800,
    "clock": 1.98,
    "major": 9,
}
_A100 = {
    "core_bytes": 167936,
    "block_bytes": 166912,
    "cores": 108,
    "cache": 41943040,
    "clock": 1.41,
    "major": 8,
}

# The figures of GPUs are those of NVIDIA's data sheets, in the form of openxla/xla's target_config/specs.
TARGETS = {
    "cpu": Target("cpu"),
    "h100": _gpu("NVIDIA H100 80GB HBM3", bandwidth=3352320000000, memory=84942979072, **_H100),
    "h200": _gpu("NVIDIA H200", bandwidth=4800000000000, memory=151397597184, **_H100),
    "a100": _gpu("NVIDIA A100-SXM4-80GB", bandwidth=2039000000000, memory=85899345920, **_A100),
    **{chip: Target("tpu", "libtpu", chip=chip) for chip in ("v5e", "v5p", "v6e")},
}
"""The targets by name."""
