"""Two processes of TensorFlow with four devices each make arrays together, and train."""

from pathlib import Path

import numpy as np
from engines import several_processes

PROCESSES = ("tensorflow",)

WORKER = Path(__file__).with_name("tensorflow_process.py")


def test_two_processes_hold_one_array(tmp_path):
    """On two processes, values and training steps are those of one, and wrong draws are noticed."""
    jobs = ",".join(f"127.0.0.1:{port}" for port in several_processes.free_ports(2))
    environments = [
        {"DTENSOR_JOBS": jobs, "DTENSOR_CLIENT_ID": str(i), "DTENSOR_JOB_NAME": "worker"} for i in range(2)
    ]
    results = several_processes.run(WORKER, tmp_path, environments)
    several_processes.check(results)
    gradient = np.arange(16.0).reshape(8, 2).sum(0)

    for told, _ in results:
        assert ["the processes create different variables"] * 2 == [
            text.splitlines()[0] for text in told["other_numbers"]
        ]
        weight, momentum, bias, bias_momentum, steps = map(np.array, told["trained"])

        # The gradient is the same in both steps, so the momentum is 1 and then 1.5 times that.
        assert (np.outer(-2.5 * gradient, np.ones(4)) == weight).all()
        assert (np.outer(1.5 * gradient, np.ones(4)) == momentum).all()
        assert ([-20.0] * 4, [12.0] * 4, 2) == (bias.tolist(), bias_momentum.tolist(), steps)
