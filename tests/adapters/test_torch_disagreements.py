"""Two processes of torch that do not do the same get an error in both, or replicas that agree."""

from pathlib import Path

from disagreements import AGREE, outcomes
from engines import several_processes

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("torch_disagreement_process.py")

OPTIONS = "the processes open this scope with different options"
BATCHES = "the processes bring different batches"
NUMBERS = "the processes draw different random numbers"
PROBLEMS = "the processes find different problems in one plan"


def initialized(path):
    return f"{path}: the processes initialize it in different ways"


def values(path):
    return f"{path}: the processes have different values of it"


SCOPE = {
    "same": AGREE,
    "seed": values("up.bias"),
    "seed of small ones": values("up.weight"),
    "argument": initialized("up.weight"),
    "argument of a small one": values("down.weight"),
    "constant": initialized("up.weight"),
    "constant in one place": initialized("up.weight"),
    "existing": initialized("up.weight"),
    "existing buffer": values("scale"),
    "deferred or not": values("up.weight"),
    "strict": OPTIONS,
    "batch_dim": OPTIONS,
    "wrong batch_dim": OPTIONS,
    "unused rule": PROBLEMS,
    "draws": OPTIONS,
    "tiles": AGREE,
    "seed of tiles": values("up.bias"),
    "rows None": BATCHES,
    "rows model": BATCHES,
    "same rows": AGREE,
    "rows that are not compared": AGREE,
    "masks": NUMBERS,
    "no masks": AGREE,
    "slots": values("up.bias.sum"),
}
# A model that exists has values, whatever they came from.
ONLY_IN_A_SCOPE = ("tiles", "seed of tiles", "draws", "slots")
APPLY = {name: expected for name, expected in SCOPE.items() if name not in ONLY_IN_A_SCOPE} | {
    "seed": values("up.weight"),
    "argument": values("up.weight"),
    "constant": values("up.weight"),
    "constant in one place": values("up.weight"),
    "existing": values("up.weight"),
    "gradients": values("up.weight.grad"),
}


def test_processes_that_disagree(tmp_path):
    """Other seeds, initializers, values, rows, masks or options are an error in both processes, which says what."""
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(WORKER, tmp_path, [{}] * 2, str(port))
    expected = {f"scope {name}": text for name, text in SCOPE.items()}
    expected |= {f"apply {name}": text for name, text in APPLY.items()}

    assert expected == outcomes(results)
