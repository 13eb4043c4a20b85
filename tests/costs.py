"""A plan with the cost of a step, made by hand: figures that a reader can work out."""

import layoutmap as lm
from layoutmap.core.variables import AxisRoles, VariableSpec
from layoutmap.cost.cost import Cost
from layoutmap.cost.machines import resolve_machine
from layoutmap.cost.table import Collective, StepCost
from layoutmap.scope.plan import make_plan

MESH = lm.Mesh(None, "data=8,model=8")
MIB, GIB = 2**20, 2**30
UP = (4096, 14336)


def weights(blocks=2):
    """A table, and blocks of one kernel each, in bfloat16."""
    kernels = [
        VariableSpec(f"blocks.{i}.up.kernel", UP, "bfloat16", use=AxisRoles(("in.0", "out.0")))
        for i in range(blocks)
    ]
    return [VariableSpec("tokens.embeddings", (128256, 4096), "bfloat16"), *kernels]


def collectives(blocks=2):
    """Weights are gathered over data and their gradients summed; activations are summed over model."""
    gathered = 2 * UP[0] * UP[1] // 8
    for i in range(blocks):
        kernel = f"blocks.{i}.up.kernel"
        yield Collective("all_gather", ("data",), 2, gathered, kernel, "forward")
        yield Collective("reduce_scatter", ("data",), 1, gathered, kernel, "backward")
        yield Collective("all_reduce", ("model",), 4, 256 * MIB, f"blocks.{i}.up", "forward")


def step(found=None, mesh=MESH, **changes):
    """The counts of a step of the model."""
    counts = {"traffic_bytes": 30 * GIB, "argument_bytes": 4 * GIB, "peak_bytes": 30 * GIB} | changes
    return StepCost(
        mesh, tuple(collectives() if found is None else found), {"bfloat16": 8 * 10**12}, **counts
    )


def plan(rules=None, found=None, mesh=MESH, on="h100:64", variables=None, **changes):
    """The plan of the model, with its cost."""
    rules = rules or {r".*up\.kernel": ("data", "model"), "tokens": ("model", None)}
    made = make_plan(variables or weights(), lm.LayoutMap(mesh, rules))
    return made.add_cost(Cost(step(found, mesh, **changes), resolve_machine(on, mesh)))
