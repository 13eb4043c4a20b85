"""One of two processes of JAX that inspect and guard what they hold together: test_inspecting_jax_processes.py."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import layoutmap as lm


def told(plan):
    return [[p.kind, p.severity, p.subject, dict(p.facts)] for p in plan.problems]


def main():
    number, folder, address = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    jax.distributed.initialize(address, num_processes=2, process_id=number)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    values = np.arange(32, dtype=np.float32).reshape(4, 8)
    specs = {"whole": P(), "columns": P(None, "model"), "both": P("data", "model")}

    def make(changed=()):
        """The arrays; of those that are named, process 1 has one other value on its second device."""
        arrays = {}
        for name, spec in specs.items():
            sharding = NamedSharding(mesh, spec)
            pieces = []
            for place, (device, index) in enumerate(
                sharding.addressable_devices_indices_map(values.shape).items()
            ):
                piece = values[index].copy()
                piece[0, 0] += 1e-6 * (number == 1 and place == 1 and name in changed)
                pieces.append(jax.device_put(piece, device))
            arrays[name] = jax.make_array_from_single_device_arrays(values.shape, sharding, pieces)
        return arrays

    results = {"devices": [lm.inspect(make()).mesh.devices, len(jax.local_devices())]}
    results["alike"] = told(lm.inspect(make(), across=True))
    drifted = make(("whole", "columns", "both"))
    results["drifted"] = told(lm.inspect(drifted, across=True))
    results["alone"] = told(lm.inspect(drifted))
    guard = lm.guard(make(), every=2)
    for step, arrays in enumerate((make(), drifted, drifted)):
        try:
            guard(arrays)
        except lm.PlanError as error:
            results["guarded"] = [step, [problem.subject for problem in error.problems]]
    other = {**make(), "more": jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P()))}
    results["other"] = told(lm.inspect(other if number else make(), across=True))
    (folder / f"{number}.json").write_text(json.dumps(results))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
