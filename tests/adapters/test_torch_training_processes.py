"""Processes of torch, each one device, train one model together, with the program's own loop."""

from pathlib import Path

from engines import several_processes

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("torch_training_process.py")


def test_processes_train_one_model(tmp_path):
    """Weights begin bit-equal, each process holds its shards alone, and steps, norms and saved states are right."""
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(WORKER, tmp_path, [{}] * 4, str(port), "4")

    for told, _ in results:
        for what in told.values():
            assert what["first values"]
            assert what["random state"]
            assert what["planned"] == what["held"]
            assert what["losses"] < 1e-5
            assert what["norms"] < 1e-5
            assert what["weights"] < 1e-5
            assert what["gradients"]
            assert what["saved"]
