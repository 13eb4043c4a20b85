"""One of two processes; run by test_jax_processes.py."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import layoutmap.dtensor
from layoutmap.draws import Draw, Program
from layoutmap.engines.jax import engine
from layoutmap.errors import EngineError
from layoutmap.layout import Layout
from layoutmap.mesh import Mesh
from layoutmap.variables import Assignment, VariableSpec


def main():
    address, number, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    jax.distributed.initialize(address, num_processes=2, process_id=number)
    jax_engine = engine()
    mesh = jax_engine.bind(Mesh(None, "x=2,y=4"))
    SHAPE = (16, 8)

    def assignment(name, *specs):
        return Assignment(VariableSpec(name, SHAPE, "float32"), Layout(specs, mesh))

    def normal(seed):
        return jax.random.normal(seed, SHAPE) * 0.3 + 0.1

    def seed_of(process):
        return jnp.array([process, 0], jnp.uint32)

    def drawn(function, name):
        """A draw with another seed in each process: that of process 0 counts."""
        seed = seed_of(number)
        return Draw(whole=lambda: function(seed), program=Program(name, seed, function))

    def summed(seed):
        return normal(seed) / jnp.linalg.norm(normal(seed))

    values = np.arange(128, dtype=np.float32).reshape(SHAPE)
    assignments = {
        "program": assignment("program", "x", "y"),
        "crossed": assignment("crossed", "y", "x"),
        "tuple": assignment("tuple", ("y", "x"), None),
        "replicated": assignment("replicated", None, None),
        "summed": assignment("summed", "x", None),
        "whole": assignment("whole", None, "x"),
    }
    draws = {
        **dict.fromkeys(("program", "crossed", "tuple", "replicated"), drawn(normal, "normal")),
        "summed": drawn(summed, "summed"),
        "whole": Draw(whole=lambda: values),
    }
    arrays = jax_engine.create(assignments, draws)
    expected = {
        **dict.fromkeys(("program", "crossed", "tuple", "replicated"), np.asarray(normal(seed_of(0)))),
        "summed": np.asarray(summed(seed_of(0))),
        "whole": values,
    }
    layouts = {name: each.layout for name, each in assignments.items()}

    arrays["from_numpy"] = jax_engine.relayout(values, Layout(["x", "y"], mesh))
    arrays["moved"] = jax_engine.relayout(arrays["from_numpy"], Layout([None, ("y", "x")], mesh))
    arrays["plain"] = jax_engine.relayout(jnp.asarray(values), Layout(["y", None], mesh))
    arrays["packed"] = layoutmap.dtensor.pack(
        layoutmap.dtensor.unpack(arrays["from_numpy"]), Layout(["x", "y"], mesh)
    )
    layouts |= {
        "from_numpy": Layout(["x", "y"], mesh),
        "moved": Layout([None, ("y", "x")], mesh),
        "plain": Layout(["y", None], mesh),
        "packed": Layout(["x", "y"], mesh),
    }
    expected |= dict.fromkeys(("from_numpy", "moved", "plain", "packed"), values)

    try:
        jax_engine.create(
            {"other": assignment("other", "x", None)},
            {"other": Draw(whole=lambda: np.full(SHAPE, number, np.float32))},
        )
        said = ""
    except EngineError as error:
        said = str(error)

    held, shards = {}, {}
    for name, array in arrays.items():
        held[f"{name}.expected"] = expected[name]
        shards[name] = []
        for i, (index, shard) in enumerate(jax_engine.to_shards(array)):
            held[f"{name}.{i}"] = shard
            shards[name].append([(part.start, part.stop) for part in index])
    np.savez(folder / f"{number}.npz", **held)
    told = {
        "devices": jax_engine.devices(),
        "local_device_ids": mesh.local_device_ids,
        "layouts_equal": {
            name: jax_engine.layout_of(array) == layouts[name] for name, array in arrays.items()
        },
        "shards": shards,
        "expected": list(expected),
        "whole_of_other_seeds": said,
        "unpacked": len(layoutmap.dtensor.unpack(arrays["tuple"])),
    }
    (folder / f"{number}.json").write_text(json.dumps(told))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
