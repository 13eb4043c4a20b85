"""The subjects of laws: model libraries on engines, and arrays of engines; and a process's settings for each."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from layoutmap.engines.launchers import launcher


def _list_quick_flags() -> str:
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    flags += " --xla_cpu_parallel_codegen_split_count=1"
    with suppress(PackageNotFoundError):
        # XLA ends the process for a flag that it does not know, and that of jaxlib 0.11 does not know this one.
        if version("jaxlib").startswith(("0.9.", "0.10.")):
            flags += " --xla_cpu_use_fusion_emitters=false"
    return flags


QUICK_XLA = _list_quick_flags()
"""Flags with which XLA compiles in a fifth of the time, for programs that run once.

It then has faults of its own: it divides 0 by 0 in the gradient of some maxima, on one device, too. A difference that
is found so is tried again without them.
"""
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""The environment in which torch takes a device of the machine where no launcher has started several processes."""
OF_A_PROCESS = {"jax": 4, "tensorflow": 4, "torch": 1}
"""The devices of each process that tries cases with others."""
_OF_OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "DTENSOR_")


def alone_on_cpus() -> dict[str, str]:
    """Return the environment of a program on CPU devices that no launcher has started, whatever this process has."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHERS)}
    return own | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}


def started_together(count: int) -> list[dict[str, str]]:
    """Return what a launcher would set for each of so many processes of this host that compute together."""
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
    """A model library on an engine.

    Args:
        title: Its name for people.
        library: The kind of models, of `layoutmap.testing.models.LIBRARIES`; empty: arrays alone.
        engine: The engine's name.
        num_processes: How many processes, each with devices of its own, try a case together; 1: one has all devices.
    """

    title: str
    library: str
    engine: str
    num_processes: int = 1

    def environment(self, *, quick: bool, simulated: bool = True) -> dict[str, str]:
        """Return the environment of a process that tries it.

        Args:
            quick: Whether XLA leaves its optimizations out.
            simulated: Whether it leaves the machine's own devices alone.
        """
        flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_XLA}" if quick else os.environ.get("XLA_FLAGS", "")
        settings = {
            "XLA_FLAGS": flags.strip(),
            "KERAS_BACKEND": self.engine,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_ENABLE_ONEDNN_OPTS": "0",
            "OMP_NUM_THREADS": "1",
        }
        if self.num_processes > 1:
            settings["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={OF_A_PROCESS[self.engine]}"
            return alone_on_cpus() | settings
        if simulated:
            return {"JAX_PLATFORMS": "cpu"} | os.environ | settings
        return (_ALONE if launcher() is None else {}) | os.environ | settings


SUBJECTS = {  # why: decisions/0140
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
"""All subjects with models, by the names that commands take."""

_TITLES = {"jax": "JAX", "torch": "PyTorch", "tensorflow": "TensorFlow"}
_KINDS = {"speeds": "speeds of", "arrays": "arrays of", "saves": "killed saves on", "faults": "faults of"}
WITHOUT_MODELS = {
    f"{kind}-{name}": Subject(f"{words} {title}", "", name)
    for kind, words in _KINDS.items()
    for name, title in _TITLES.items()
}
"""Subjects without a model library: how fast they are, arrays, saves that are killed, and known faults."""


def subject_named(name: str) -> Subject:
    """Return the subject of a name of `SUBJECTS` or `WITHOUT_MODELS`."""
    return (SUBJECTS | WITHOUT_MODELS)[name]
