"""Two processes of torch that do not do the same get an error in both, or replicas that agree."""

from pathlib import Path

from disagreements import AGREE, outcomes
from engines import several_processes

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("torch_disagreement_process.py")

OPTIONS = "the processes open this scope with different options"
BATCHES = "the processes pass different batches"
NUMBERS = "the processes draw different random numbers"
PROBLEMS = "the processes find different problems in the same plan"


def initialized(path):
    return f"{path}: the processes initialize it in different ways"


def values(path):
    return f"{path}: its values differ between processes"


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
    "rows of call 15": AGREE,  # of the first eight, and of each power of two, they are compared
    "rows of call 16": BATCHES,
    "rows of call 32": BATCHES,
    "same rows": AGREE,
    "seed of constants": AGREE,
    "rules": "rules: ",
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
PROGRAMS = {
    "module": "more.0: GELU in process 0, ReLU in process 1",
    "setting": "GELU \"more.0\": settings: approximate='none' in process 0, approximate='tanh' in process 1",
    "forward": "forward: doubling.<locals>.Doubling.forward, source ",
    "learning rate": "SGD, group 0: lr: 0.1 in process 0, 0.2 in process 1",
    "optimizer": "optimizer: SGD in process 0, AdamW in process 1",
    "training": "Model: training: True in process 0, False in process 1",
    "frozen": "Linear \"up\": trainable: ['weight', 'bias'] in process 0, ['weight'] in process 1",
    "release": "torch: 3.0 in process 0, 3.1 in process 1",
    "gradients": "gradients: True in process 0, False in process 1",
    "another mode": 'Sequential "more": training: False in process 0, True in process 1',
    **dict.fromkeys(("alike", "paths", "optimizers alike"), AGREE),
}
"""What both processes say, or what that begins with."""


def test_processes_that_disagree(tmp_path):
    """Other seeds, initializers, values, rows, masks or options are an error in both processes, which says what."""
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(WORKER, tmp_path, [{}] * 2, str(port))
    expected = {f"scope {name}": text for name, text in SCOPE.items()}
    expected |= {f"apply {name}": text for name, text in APPLY.items()}
    expected |= {f"program {name}": text for name, text in PROGRAMS.items()}

    told = outcomes(results)
    assert expected == {n: expected[n] if t.startswith(expected[n]) else t for n, t in told.items()}
