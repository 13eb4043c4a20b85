"""A model as a search knows it, and what its steps cost by a formula."""

from layoutmap.core.variables import AxisRoles, VariableSpec
from layoutmap.cost.search.loop import MapCost
from layoutmap.cost.search.space import SearchedModel, find_block_stacks
from layoutmap.plan.planner import make_plan_table

_KERNELS = {
    "attention.query.kernel": ((64, 8, 8), ("in.0", "out.0", "out.1")),
    "attention.output.kernel": ((8, 8, 64), ("in.0", "in.1", "out.0")),
    "mlp.up.kernel": ((64, 256), ("in.0", "out.0")),
    "mlp.down.kernel": ((256, 64), ("in.0", "out.0")),
}


def variables(num_blocks=2):
    """The variables of a small transformer."""
    found = [VariableSpec("embedding.table", (512, 64), "float32", use=AxisRoles(("rows", "out.0")))]
    for n in range(num_blocks):
        for name, (shape, roles) in _KERNELS.items():
            found.append(VariableSpec(f"blocks.{n}.{name}", shape, "float32", use=AxisRoles(roles)))
        found.append(VariableSpec(f"blocks.{n}.mlp.up.bias", (256,), "float32", use=AxisRoles(("out.0",))))
        found.append(VariableSpec(f"blocks.{n}.norm.scale", (64,), "float32"))
    return found


def model(kept=None):
    """The model of these variables, with its blocks."""
    found = variables()
    outputs = {f"blocks.{n}": (16, 32, 64) for n in range(2)}
    return SearchedModel(tuple(found), find_block_stacks(outputs, found), kept)


def costs(of):
    """A function that gives what a step costs: weights that are sharded over data are gathered, over model not."""

    def evaluate(layout_map):
        table = make_plan_table(of.variables, layout_map).check()
        held = sum(a.shard_bytes for a in table.assignments)
        seconds = 1e-9 * sum(
            a.shard_bytes
            + (3 * a.variable.global_bytes if "data" in str(a.layout) else 0)
            + 700 * a.layout.rank
            for a in table.assignments
            if not a.layout.is_fully_replicated()
        )
        replicated = sum(a.shard_bytes for a in table.assignments if a.layout.is_fully_replicated())
        return MapCost(1e-3 + seconds + 5e-9 * replicated - 1e-5 * len(layout_map.activations), held)

    return evaluate
