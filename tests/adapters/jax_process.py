"""One of two processes of JAX, with four devices each; run by test_jax_processes.py."""

import functools
import json
import sys
import zlib
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax_models import RULES, Feedforward
from optax_optimizers import MESH, laid_out, misplaced, plain_params
from test_jit_step import batch, make_step

import layoutmap as lm
from layoutmap.adapters import get_adapter
from layoutmap.core.errors import LayoutMapError
from layoutmap.engines import get_engine


def update(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def other_update(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.2 * g, params, gradients)


def refusals(number, mesh):
    """What is said where the processes run different steps, and nothing where they run one."""

    def run(step):
        params = laid_out({"kernel": np.ones((12, 8), np.float32)}, mesh)  # sharded over both dims
        try:
            lm.jit_step(step)(params, np.ones((2, 12), np.float32))
        except LayoutMapError as error:
            return str(error)
        return ""

    def step_of(activation=jax.nn.gelu, tx=None, update=update, log=None):
        def step(params, x):
            if log:
                log()
            gradients = jax.grad(lambda p: (activation(x @ p["kernel"]) ** 2).mean())(params)
            return (
                update(params, gradients) if tx is None else tx.update(gradients, tx.init(params), params)[0]
            )

        return step

    def scaled(params, x):
        return jax.tree.map(lambda p: p * (1.0 + jax.process_index()), params)

    def said():
        return f"process {number} traces"

    return {
        "activation": run(step_of((jax.nn.gelu, jax.nn.relu)[number])),
        "learning rate": run(step_of(tx=optax.sgd((0.1, 0.2)[number]))),
        "line": run(step_of(update=(update, other_update)[number])),
        "compiled": run(scaled),
        "alike": run(functools.partial(step_of(log=said, activation=lambda x: jax.nn.gelu(x)))),
    }


def values(model):
    """By path, gathered from all processes."""
    adapter = get_adapter("jax")
    return {path: adapter.read(variable) for path, variable in adapter.variables(model).items()}


def bits(arrays):
    return {path: zlib.crc32(np.ascontiguousarray(value).tobytes()) for path, value in arrays.items()}


def make_plain():
    return Feedforward(nnx.Rngs(params=1, dropout=2))


def restored(folder):
    """What comes back from a checkpoint, read into the layouts of a plan: no array existed before it."""
    layout_map = lm.LayoutMap(lm.create_mesh(MESH), RULES["feedforward"], rest="replicated")
    model = layout_map.build(make_plain, library="jax")
    weights = nnx.state(model, nnx.Param)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "weights", nnx.to_pure_dict(weights))
    plan = lm.plan(make_plain, layout_map, library="jax")
    layouts = {a.variable.path: a.layout for a in plan.assignments}

    def abstract(keys, leaf):
        layout = layouts[".".join(str(key.key) for key in keys)]
        sharding = get_engine("jax").make_native_layout(layout, layout.rank)
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
    jax.distributed.initialize(address, 2, number)
    layout_map, tx = lm.LayoutMap(lm.create_mesh(MESH)), optax.adamw(1e-2)
    params = laid_out(plain_params(), layout_map.mesh)
    state = layout_map.build_optimizer(tx, params, zero_dim="batch")
    step = lm.jit_step(make_step(tx), donate_argnums=(0, 1), batch_dim="batch")
    losses = []
    for at in range(2):
        params, state, metrics = step(params, state, batch(at)[2 * number : 2 * number + 2])
        losses.append(float(metrics["loss"]))
    told = {"losses": losses, "misplaced": misplaced(params), "refusals": refusals(number, layout_map.mesh)}
    told["restored"] = restored(folder)
    (folder / f"{number}.json").write_text(json.dumps(told))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
