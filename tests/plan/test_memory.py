"""What a plan says of a device's memory is what its shards come to."""

from decoders import make_dense, make_weight
from hypothesis import given

from layoutmap import LayoutMap
from layoutmap.core.layout import Layout
from layoutmap.core.variables import AxisRoles, Kind, VariableSpec
from layoutmap.scope.plan import make_plan
from layoutmap.testing import strategies


@given(strategies.plans())
def test_the_parts_are_all_that_a_device_holds(drawn):
    """Weights, slots and state are the device's bytes. The gradient of a weight in the host is on the device."""
    _, _, plan = drawn
    memory = plan.memory

    assert plan.device_bytes == memory.weights + memory.slots + memory.state
    trained = [
        a for a in plan.assignments if a.fits and a.variable.kind is Kind.WEIGHT and a.variable.trainable
    ]
    assert sum(a.device_bytes for a in trained) == memory.weights
    assert sum(a.shard_bytes for a in trained) == memory.gradients
    assert memory.total == plan.device_bytes + memory.gradients


def test_a_table_is_sharded_along_its_rows():
    """Whichever axis they are, as in a reversed table; a kernel after a sharded one along the axis that they share."""
    table = VariableSpec("table.reverse", (16, 64), "float32", use=AxisRoles(("out.0", "rows")))
    up = VariableSpec("block.up", (16, 64), "float32", use=AxisRoles(("in.0", "out.0")))
    down = VariableSpec("block.down", (64, 16), "float32", use=AxisRoles(("in.0", "out.0")))
    plan = make_plan([table, up, down], LayoutMap("model=4", {r"block\.up": (None, "model")}))

    assert {"table.reverse": 1, "block.down": 0} == {row.path: row.axis for row in plan.memory.rows}


def test_what_the_roles_say_to_replicate_is_not_listed():
    """A norm, the bias of a row kernel, also one that lint calls swapped, and the router of experts."""
    variables = [
        make_weight("block.norm.gamma", (64,)),
        *make_dense("block.up", (64, 256)),
        *make_dense("block.down", (256, 64)),
        make_weight("moe.router.kernel", (64, 8), "in.0", "out.0"),
        *(make_weight(f"moe.{name}", (8, *shape)) for name, shape in (("up", (64, 32)), ("down", (32, 64)))),
    ]
    rules = {r"block\.up\.kernel": (None, "model"), r"block\.down\.kernel": (None, "model")}
    plan = make_plan(variables, LayoutMap("batch=2,model=4", rules, rest="replicated"))

    assert {"block.up.bias": 0, "moe.up": 0, "moe.down": 0} == {
        row.path: row.axis for row in plan.memory.rows
    }
    assert ["block.down.kernel"] == [problem.subject for problem in plan.lint()]


@given(strategies.plans())
def test_what_could_be_sharded_can_be(drawn):
    """Each is replicated, the axis divides, the bytes are what a device would save, and the most come first."""
    _, _, plan = drawn
    cuts = plan.memory.could_be_sharded

    for cut in cuts:
        variable = cut.assignment.variable
        specs = [None] * len(variable.shape)
        specs[cut.axis] = cut.dim
        layout = Layout(specs, plan.mesh)
        assert cut.assignment.layout.is_fully_replicated()
        assert () == layout.find_uneven_axes(variable.shape)
        shard = VariableSpec("shard", layout.shard_shape(variable.shape), variable.dtype)
        assert cut.saved_bytes == variable.global_bytes - shard.global_bytes
    assert sorted((cut.saved_bytes for cut in cuts), reverse=True) == [cut.saved_bytes for cut in cuts]
    told = {cut.assignment.variable.path for cut in cuts}
    weights = sum(a.variable.global_bytes for a in plan.assignments if a.variable.kind is Kind.WEIGHT)
    for a in plan.assignments:
        use, size = a.variable.use, a.variable.global_bytes
        # A table may be too small, and its role may be inferred.
        is_small = (use is None or "rows" in use.roles) and size < min(16 * 1024, 0.05 * weights)
        if (
            not is_small
            and a.fits
            and not a.variable.is_derived
            and a.layout.is_fully_replicated()
            and a.variable.path not in told
            # The only vectors in the table are biases of kernels, whose axis has a role
            and (a.variable.use or len(a.variable.shape) > 1)
        ):
            assert all(
                not n or n % dim.size for n in a.variable.shape for dim in plan.mesh.mesh_dims if dim.size > 1
            )
