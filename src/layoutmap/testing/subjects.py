"""Define the subjects of laws: a model library on an engine, or an engine alone, with the environment of processes."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from layoutmap.engines.launchers import detect_launcher


def _make_quick_compilation_flags() -> str:
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    flags += " --xla_cpu_parallel_codegen_split_count=1"
    with suppress(PackageNotFoundError):
        # XLA ends the process if it does not know a flag. jaxlib 0.11 does not know this one, so check the version.
        if version("jaxlib").startswith(("0.9.", "0.10.")):
            flags += " --xla_cpu_use_fusion_emitters=false"
    return flags


QUICK_XLA = _make_quick_compilation_flags()
"""XLA flags that cut the compile time to a fifth, for programs that run once.

They cause faults of their own, such as 0 / 0 in the gradient of some maxima, also on one device. So a law that does
not hold runs again without them.
"""
_ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""Variables with which torch uses a device of the machine in one process without a launcher."""
DEVICES_PER_PROCESS = {"jax": 4, "tensorflow": 4, "torch": 1}
"""The devices of each process where several processes try a case together, by engine."""
_LAUNCHER_PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "DTENSOR_")


def make_cpu_environment() -> dict[str, str]:
    """Return this process's environment variables, without those of a launcher, and with only CPU devices."""
    inherited = {k: value for k, value in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES)}
    return inherited | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}


def make_launcher_environments(count: int) -> list[dict[str, str]]:
    """Return the variables that a launcher would set for each of `count` processes on this host."""
    with ExitStack() as probes:
        addresses: list[str] = []
        for probe in (probes.enter_context(socket.socket()) for _ in range(count)):
            probe.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{probe.getsockname()[1]}")
    first = addresses[0]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": first.rpartition(":")[2],
        "JAX_COORDINATOR_ADDRESS": first,
    }
    if count == 1:
        return [common]
    common |= {"WORLD_SIZE": str(count), "DTENSOR_JOBS": ",".join(addresses), "DTENSOR_JOB_NAME": "worker"}
    return [common | {"RANK": str(rank), "DTENSOR_CLIENT_ID": str(rank)} for rank in range(count)]


@dataclass(frozen=True)
class Subject:
    """A model library on an engine, or an engine alone, that laws test."""

    title: str  # title in reports
    library: str  # key of the library in `layoutmap.testing.models.LIBRARIES`; empty: no models
    engine: str
    num_processes: int = 1  # number of processes that try a case together, each with its own devices
    is_padded: bool = False  # whether each case pads a variable

    def make_environment(self, *, quick: bool, simulated: bool = True) -> dict[str, str]:
        """Return the environment variables of the subject's processes."""
        flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_XLA}" if quick else os.environ.get("XLA_FLAGS", "")
        settings = {
            "XLA_FLAGS": flags.strip(),
            "KERAS_BACKEND": self.engine,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_ENABLE_ONEDNN_OPTS": "0",
            "OMP_NUM_THREADS": "1",
        }
        if self.num_processes > 1:
            settings["XLA_FLAGS"] += (
                f" --xla_force_host_platform_device_count={DEVICES_PER_PROCESS[self.engine]}"
            )
            return make_cpu_environment() | settings
        if simulated:
            return {"JAX_PLATFORMS": "cpu"} | os.environ | settings
        return (_ONE_PROCESS if detect_launcher() is None else {}) | os.environ | settings


# Most faults depend on features of one library, so each library has its own random models (decisions/0140).
SUBJECTS = {
    "keras-jax": Subject("Keras 3 on JAX", "keras", "jax"),
    "keras-jax-processes": Subject("Keras 3 on JAX in two processes", "keras", "jax", num_processes=2),
    "keras-torch": Subject("Keras 3 on PyTorch", "keras", "torch"),
    "keras-torch-processes": Subject(
        "Keras 3 on PyTorch in two processes", "keras", "torch", num_processes=2
    ),
    "keras-tensorflow": Subject("Keras 3 on TensorFlow", "keras", "tensorflow"),
    "keras-tensorflow-processes": Subject(
        "Keras 3 on TensorFlow in two processes", "keras", "tensorflow", num_processes=2
    ),
    "torch": Subject("torch.nn", "torch", "torch"),
    "torch-processes": Subject("torch.nn in two processes", "torch", "torch", num_processes=2),
    "torch-4-processes": Subject("torch.nn in four processes", "torch", "torch", num_processes=4),
    "nnx": Subject("flax.nnx", "nnx", "jax"),
    "nnx-processes": Subject("flax.nnx in two processes", "nnx", "jax", num_processes=2),
    "pytree": Subject("pytrees of JAX", "pytree", "jax"),
    "pytree-processes": Subject("pytrees of JAX in two processes", "pytree", "jax", num_processes=2),
}
"""All subjects with models, by the name in commands."""

PADDED = {
    f"{name}-padded": replace(SUBJECTS[name], title=f"{SUBJECTS[name].title}, padded", is_padded=True)
    for name in ("keras-jax", "keras-torch", "torch", "nnx", "pytree")
}
"""Subjects whose cases all have a padded axis. Of the cases of other subjects, a third have a padded axis."""
_TITLES = {"jax": "JAX", "torch": "PyTorch", "tensorflow": "TensorFlow"}
_KINDS = {"speeds": "speeds of", "arrays": "arrays of", "saves": "killed saves on", "faults": "faults of"}
WITHOUT_MODELS = {
    f"{kind}-{name}": Subject(f"{words} {title}", "", name)
    for kind, words in _KINDS.items()
    for name, title in _TITLES.items()
}
"""Subjects without models: speeds, arrays, killed saves, and known faults."""


def get_subject(name: str) -> Subject:
    """Return an entry of `SUBJECTS`, `PADDED`, or `WITHOUT_MODELS`."""
    return (SUBJECTS | PADDED | WITHOUT_MODELS)[name]
