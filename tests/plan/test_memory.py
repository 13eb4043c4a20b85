"""What a plan says of a device's memory is what its shards come to."""

from hypothesis import given

import layoutmap as lm
from layoutmap.core.layout import Layout
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.scope.plan import make_plan
from layoutmap.testing import strategies


@given(strategies.plans())
def test_the_parts_are_all_that_a_device_holds(drawn):
    """Weights, slots and state are the device's bytes, and a gradient is as large as its weight."""
    _, _, plan = drawn
    memory = plan.memory

    assert plan.device_bytes == memory.weights + memory.slots + memory.state
    trained = [
        a for a in plan.assignments if a.fits and a.variable.kind is Kind.WEIGHT and a.variable.trainable
    ]
    assert sum(a.shard_bytes for a in trained) == memory.weights == memory.gradients
    assert memory.total == plan.device_bytes + memory.gradients


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
        assert () == layout.uneven_axes(variable.shape)
        shard = VariableSpec("shard", layout.shard_shape(variable.shape), variable.dtype)
        assert cut.saved_bytes == variable.global_bytes - shard.global_bytes
    assert sorted((cut.saved_bytes for cut in cuts), reverse=True) == [cut.saved_bytes for cut in cuts]
    told = {cut.assignment.variable.path for cut in cuts}
    for a in plan.assignments:
        if (
            a.fits
            and not a.variable.follows
            and a.layout.is_fully_replicated()
            and a.variable.path not in told
        ):
            assert all(
                not n or n % dim.size for n in a.variable.shape for dim in plan.mesh.mesh_dims if dim.size > 1
            )


def test_the_text():
    """Blocks are one line, and what is small comes last."""
    mesh = lm.Mesh(None, "batch=2,model=4")
    variables = [VariableSpec(f"blocks.{n}.norm", (64,), "float32", Kind.STATE) for n in range(3)]
    variables += [VariableSpec("head", (64, 512), "float32"), VariableSpec("up", (64, 64), "float32")]
    variables += [VariableSpec("optimizer.up.m", (64, 64), "float32", Kind.SLOT, parent="up")]
    plan = make_plan(variables, lm.LayoutMap(mesh, {"up": (None, "model")}))

    assert (
        str(plan.memory)
        == """\
per device: weights 132.0 KiB, gradients 132.0 KiB, slots 4.0 KiB, state 768 B; 268.8 KiB in total

replicated             saves  if sharded
------------------  --------  -----------------
head                96.0 KiB  axis 0 over model
blocks.{0..2}.norm     576 B  axis 0 over model"""
    )
    assert repr(plan.memory) == f"<Memory: {str(plan.memory).splitlines()[0]}>"
