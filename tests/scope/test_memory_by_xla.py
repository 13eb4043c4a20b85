"""The bytes of a plan and of an inspected model are those that XLA and the arrays themselves say."""

import warnings

import jax
import pytest
from cases import few
from flax import nnx

import layoutmap as lm
from layoutmap.core.variables import Kind
from layoutmap.testing import models

SEEDS = [(library, 20291000 + number) for number in range(50) for library in ("nnx", "pytree")]
SLOTS = (Kind.SLOT, Kind.METRIC)


@pytest.mark.parametrize(("library", "seed"), few(SEEDS, *SEEDS[:6]))
def test_a_plan_has_the_bytes_that_xla_says(library, seed):
    """XLA's memory analysis of a program that takes the model has the bytes that the plan says of a device."""
    case = models.draw(seed, library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lm.LayoutMapWarning)
        plan = lm.plan(case.make_model, case.layout_map, inputs=case.inputs, library=library)
        if plan.errors:
            pytest.skip("the plan refuses it")
        model = lm.build(
            case.make_model, case.layout_map, inputs=case.inputs, library=library, progress=False
        )
        inspected = lm.inspect(model)
    leaves = jax.tree.leaves(nnx.state(model) if library == "nnx" else model)
    arrays = [
        jax.random.key_data(each) if jax.dtypes.issubdtype(each.dtype, jax.dtypes.prng_key) else each
        for each in leaves
        if isinstance(each, jax.Array)
    ]
    program = jax.jit(lambda leaves: leaves, keep_unused=True).lower(
        [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding) for each in arrays]
    )
    by_xla = program.compile().memory_analysis().argument_size_in_bytes
    of_one = sum(
        shard.data.nbytes for each in arrays for shard in each.addressable_shards if shard.device.id == 0
    )
    planned = sum(a.shard_bytes for a in plan.assignments if a.variable.kind not in SLOTS)
    held = sum(a.shard_bytes for a in inspected.assignments if a.variable.kind not in SLOTS)
    assert (by_xla, by_xla, by_xla) == (of_one, planned, held)
