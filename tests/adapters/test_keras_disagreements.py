"""Two processes of Keras that do not do the same get an error in both, or replicas that agree, on each backend."""

from pathlib import Path

import keras
import pytest
from cases import xla_settings
from disagreements import AGREE, outcomes
from engines import several_processes

PROCESSES = ("jax", "tensorflow", "torch")

WORKER = Path(__file__).with_name("keras_disagreement_process.py")

INITIALIZED = "up.kernel: the processes initialize it in different ways"
VALUES = "up.kernel: the processes have different values of it"
OPTIONS = "the processes open this scope with different options"
PROBLEMS = "the processes find different problems in one plan"
BATCHES = "the processes bring different batches"
# On JAX a process brings the rows of its devices, and here all devices hold the same.
ROWS = {
    "jax": {
        "rows": "fit: processes whose devices hold the same rows bring different ones",
        "split rows": AGREE,
        "masks": AGREE,
    },
    "tensorflow": {"rows": BATCHES, "split rows": BATCHES, "masks": AGREE},
    # Its layers draw from the generator of the process.
    "torch": {
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
    "existing": "own.held: the processes have different values of it",
    "strict": OPTIONS,
    "batch_dim": OPTIONS,
    "wrong batch_dim": OPTIONS,
    "unused rule": PROBLEMS,
    "rows that are not compared": AGREE,
    "same rows": AGREE,
}
APPLY = {
    **SCOPE,
    **dict.fromkeys(("seed", "seed of one", "argument", "kind", "constant", "constant array"), VALUES),
    **dict.fromkeys(("own initializer", "global init", "masks"), VALUES),
}


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
    return cases | {f"apply {name}": text for name, text in (rows | APPLY).items()}


def test_processes_that_disagree(tmp_path):
    """Other constants, values and options are an error in both processes, which says what."""
    few = ("scope constant", "apply constant", "scope existing", "scope wrong batch_dim", "scope same")

    assert {name: expected()[name] for name in few} == told(tmp_path, ",".join(few))


@pytest.mark.long
def test_all_ways_to_disagree(tmp_path):
    """Other seeds, initializers, values, rows or options are an error in both processes, or process 0's count."""
    assert expected() == told(tmp_path)
