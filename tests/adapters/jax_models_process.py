"""One of two processes of JAX, with four devices each, for test_jax_models_processes.py."""

import json
import sys
import warnings
import zlib
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax_models import MODELS, RULES, Feedforward, batch

import layoutmap as lm
from layoutmap.adapters import get_adapter
from layoutmap.engines import get_engine

NAMES = ("feedforward", "dict")
MESH = "batch=2,model=4"


def values(model):
    """By path, gathered from all processes."""
    adapter = get_adapter("jax")
    return {path: adapter.read(variable) for path, variable in adapter.variables(model).items()}


def bits(arrays):
    return {path: zlib.crc32(np.ascontiguousarray(value).tobytes()) for path, value in arrays.items()}


def trained(model, name):
    """The loss before a step, and the values after it."""
    adapter = get_adapter("jax")
    losses = [adapter.train_step(model, batch(name))["loss"] for _ in range(2)]
    return {"losses": losses, "after": {p: v.tolist() for p, v in values(model).items() if v.size < 100}}


def make_map(name):
    return lm.LayoutMap(lm.create_mesh(MESH), RULES[name], rest="replicated")


def make_plain():
    return Feedforward(nnx.Rngs(params=1, dropout=2))


def restored(folder):
    """What comes back from a checkpoint, read into the layouts of a plan: no array existed before it."""
    layout_map = make_map("feedforward")
    model = layout_map.build(make_plain, library="jax")
    weights = nnx.state(model, nnx.Param)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "weights", nnx.to_pure_dict(weights))
    plan = lm.plan(make_plain, layout_map, library="jax")
    layouts = {a.variable.path: a.layout for a in plan.assignments}

    def abstract(keys, leaf):
        layout = layouts[".".join(str(key.key) for key in keys)]
        sharding = get_engine("jax").native(layout, layout.rank)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(make_plain), nnx.Param))
    target = jax.tree_util.tree_map_with_path(abstract, shapes)
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(folder / "weights", target)
    nnx.update(model, arrays)
    back = get_adapter("jax").variables(model)
    return {
        "layouts": all(layouts[path] == variable.layout for path, variable in back.items()),
        "bits": bits({path: variable.read() for path, variable in back.items()}),
    }


def main():
    number, folder, address = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    jax.distributed.initialize(address, num_processes=2, process_id=number)
    told = {}
    for name in NAMES:
        model = make_map(name).build(MODELS[name], batch_dim="batch", library="jax")
        shards = [len(v.array.addressable_shards) for v in get_adapter("jax").variables(model).values()]
        told[name] = {"bits": bits(values(model)), "shards": shards} | trained(model, name)
    told["restored"] = restored(folder)
    (folder / f"{number}.json").write_text(json.dumps(told))
    np.savez(folder / f"{number}.npz")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
