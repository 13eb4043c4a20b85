"""Two processes of Keras that do not do the same get an error in both, or replicas that agree, on each backend."""

from pathlib import Path

import keras
import pytest
from cases import xla_settings
from disagreements import AGREE, outcomes
from engines import several_processes

PROCESSES = ("jax", "tensorflow", "torch")
pytestmark = pytest.mark.one_backend  # on torch, the laws of its own adapter

WORKER = Path(__file__).with_name("keras_disagreement_process.py")

INITIALIZED = "up.kernel: the processes initialize it in different ways"
VALUES = "up.kernel: its values differ between processes"
OPTIONS = "the processes open this scope with different options"
PROBLEMS = "the processes find different problems in the same plan"
BATCHES = "the processes pass different batches"
LATE = {"rows of call 16": BATCHES, "rows of an epoch": BATCHES}
# On JAX a process brings the rows of its devices, and here all devices hold the same.
ROWS = {
    "jax": {
        **dict.fromkeys(
            ("rows", "rows of call 16", "rows of an epoch"),
            "fit: processes whose devices hold the same rows pass different rows",
        ),
        "split rows": AGREE,
        "masks": AGREE,
    },
    "tensorflow": LATE | {"rows": BATCHES, "split rows": BATCHES, "masks": AGREE},
    # Its layers draw from the generator of the process.
    "torch": LATE
    | {
        "rows": BATCHES,
        "split rows": BATCHES,
        "masks": "the processes draw different random numbers",
    },
}
SCOPE = {
    "same": AGREE,
    "seed": AGREE,  # process 0's counts
    "seed of one": AGREE,
    "argument": INITIALIZED,
    "kind": INITIALIZED,
    "constant": INITIALIZED,
    "constant array": INITIALIZED,
    "own initializer": "up.kernel: the processes have different values",
    "global init": INITIALIZED,
    "existing": "own.held: its values differ between processes",
    "strict": OPTIONS,
    "batch_dim": OPTIONS,
    "wrong batch_dim": OPTIONS,
    "unused rule": PROBLEMS,
    "rows that are not compared": AGREE,
    "rows by hand": AGREE,  # the ninth call of `train_on_batch` is not compared, since it begins no epoch
    "same rows": AGREE,
}
APPLY = {
    **SCOPE,
    **dict.fromkeys(("seed", "seed of one", "argument", "kind", "constant", "constant array"), VALUES),
    **dict.fromkeys(("own initializer", "global init", "masks"), VALUES),
}
PROGRAMS = {
    "activation": "Dense \"up\": activation: 'gelu' in process 0, 'relu' in process 1",
    "loss": "loss: 'mse' in process 0, 'mae' in process 1",
    "clipnorm": "SGD: clipnorm: None in process 0, 1.0 in process 1",
    "release": "keras: 3.0.0 in process 0, 3.1.0 in process 1",
    "evaluate": "Dense \"up\": activation: 'gelu' in process 0, 'relu' in process 1",
    "predict": "Dense \"up\": activation: 'gelu' in process 0, 'relu' in process 1",
    "rate": 'Dropout "dropout": rate: 0.1 in process 0, 0.2 in process 1',
    "way": "Functional: inputs of sum: ['down', 'up'] in process 0, ['down', 'down'] in process 1",
    "function": "loss: closed_over.<locals>.loss, source ",
    **dict.fromkeys(("alike", "names", "paths"), AGREE),
    "batch of check_parity": BATCHES,
}
if keras.backend.backend() == "jax":
    compiled = ("lambda", "closure", "attribute", "constant of a module", "variable of a module")
    PROGRAMS |= dict.fromkeys(compiled, "the lowered train_step: hash ")
"""What both processes say, or what that begins with."""


def environments():
    """What the two processes find in their environment, and an argument."""
    backend = keras.backend.backend()
    ports = several_processes.free_ports(2)
    jobs = ",".join(f"127.0.0.1:{port}" for port in ports)
    both = {
        "jax": xla_settings(1),
        "tensorflow": {"DTENSOR_JOBS": jobs, "DTENSOR_JOB_NAME": "worker"},
        "torch": {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[0]),
            "OMP_NUM_THREADS": "1",
        },
    }[backend]
    own = [{"KERAS_BACKEND": backend, "RANK": str(i), "DTENSOR_CLIENT_ID": str(i)} | both for i in range(2)]
    return own, f"127.0.0.1:{ports[0]}"


def told(folder, only=""):
    own, address = environments()
    return outcomes(several_processes.run(WORKER, folder, own, address, only))


def expected():
    rows = ROWS[keras.backend.backend()]
    cases = {f"scope {name}": text for name, text in (SCOPE | rows).items()}
    cases |= {f"program {name}": text for name, text in PROGRAMS.items()}
    return cases | {f"apply {name}": text for name, text in (rows | APPLY).items()}


def begins(told):
    """What processes say, up to what is expected of it."""
    wanted = expected()
    return {name: wanted[name] if text.startswith(wanted[name]) else text for name, text in told.items()}


def test_processes_that_disagree(tmp_path):
    """Other constants, values and options are an error in both processes, which says what."""
    few = ("scope constant", "scope existing", "scope wrong batch_dim", "scope same", "program activation")
    few += ("program alike", "program batch of check_parity", "scope rows of call 16")
    few += ("program variable of a module",) * (keras.backend.backend() == "jax")

    assert {name: expected()[name] for name in few} == begins(told(tmp_path, ",".join(few)))


@pytest.mark.long
def test_all_ways_to_disagree(tmp_path):
    """Other seeds, initializers, values, rows or options are an error in both processes, or process 0's count."""
    assert expected() == begins(told(tmp_path))
