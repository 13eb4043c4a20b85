"""Describe the devices that XLA can compile for: CPUs, and with JAX plugins GPUs and TPUs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from layoutmap.core.errors import EngineError
from layoutmap.core.mesh_dims import list_prime_factors

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
class CompileTarget:
    """Type of device that XLA can compile a step for."""

    platform: str  # JAX's name of the platform: "cpu", "cuda", or "tpu"
    extra: str = ""  # extra of layoutmap that installs the compiler; empty: the compiler comes with JAX
    packages: tuple[str, ...] = ()  # packages that the extra installs
    modules: tuple[str, ...] = ()  # the extra is installed if any of these can be imported
    config: str = ""  # XLA's description of a GPU, as protobuf text
    chip: str = ""  # name of a TPU chip, such as "v5p"

    def choose_tpu_slice_sides(self, num_devices: int) -> list[int]:
        """Return the sides of a TPU slice with `num_devices` chips, as close to a cube or a square as possible.

        Example:
            >>> TARGETS["v5p"].choose_tpu_slice_sides(256), TARGETS["v5e"].choose_tpu_slice_sides(24)
            ([8, 8, 4], [6, 4])
        """
        sides = [1, 1] if self.chip in ("v5e", "v6e") else [1, 1, 1]
        for each in sorted(list_prime_factors(num_devices), reverse=True):
            sides[sides.index(min(sides))] *= each
        return sides


def _make_gpu_target(name: str, **figures: float) -> CompileTarget:
    packages, modules = ("jax-cuda12-plugin", "jax-cuda12-pjrt"), ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return CompileTarget("cuda", "xla-gpu", packages, modules, _GPU.format(name=name, **figures))


_H100 = {
    "core_bytes": 233472,
    "block_bytes": 232448,
    "cores": 132,
    "cache": 52428800,
    "clock": 1.98,
    "major": 9,
}
_B200 = {
    "core_bytes": 233472,
    "block_bytes": 232448,
    "cores": 148,
    "cache": 132644864,
    "clock": 1.965,
    "major": 10,
}
_A100 = {
    "core_bytes": 167936,
    "block_bytes": 166912,
    "cores": 108,
    "cache": 41943040,
    "clock": 1.41,
    "major": 8,
}

# The numbers are from NVIDIA's data sheets, in the form of the files in target_config/specs of openxla/xla.
TARGETS = {
    "cpu": CompileTarget("cpu"),
    "h100": _make_gpu_target("NVIDIA H100 80GB HBM3", bandwidth=3352320000000, memory=84942979072, **_H100),
    "h200": _make_gpu_target("NVIDIA H200", bandwidth=4800000000000, memory=151397597184, **_H100),
    "b200": _make_gpu_target("NVIDIA B200", bandwidth=7672320000000, memory=191514411008, **_B200),
    "a100": _make_gpu_target("NVIDIA A100-SXM4-80GB", bandwidth=2039000000000, memory=85899345920, **_A100),
    **{
        chip: CompileTarget("tpu", "xla-tpu", ("libtpu",), ("libtpu",), chip=chip)
        for chip in ("v5e", "v5p", "v6e")
    },
}
"""The devices that XLA can compile for, by name."""


def is_gpu_target(name: str) -> bool:
    """Return whether `name` is the name of a GPU in `TARGETS`."""
    return name in TARGETS and TARGETS[name].platform == "cuda"


def has_gpu_compiler(name: str) -> bool:
    """Return whether `name` is the name of a GPU in `TARGETS`, and XLA's compiler for GPUs is installed."""
    return is_gpu_target(name) and any(map(_is_installed, TARGETS[name].modules))


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def find_target(name: str) -> CompileTarget:
    """Return the target with this name. Raise if it is unknown, or if its compiler is not installed."""
    if name not in TARGETS:
        raise EngineError(
            f"target {name!r} is not known",
            facts={"targets": ", ".join(TARGETS)},
            why="XLA needs a description of the device that it compiles for, and layoutmap has none of this device",
            fix='use the most similar of these targets, as in verify="h100", or "cpu", which needs no plugin',
        )
    target = TARGETS[name]
    if target.modules and not any(map(_is_installed, target.modules)):
        raise EngineError(
            f"XLA's compiler for {name!r} is not installed",
            facts={"missing": " ".join(target.packages)},
            why="JAX includes only the compiler for CPUs; compilers for GPUs and TPUs are plugins",
            fix=f'pip install "layoutmap[{target.extra}]"; the compiler works without such a device',
        )
    return target
