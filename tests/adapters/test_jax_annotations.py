"""What a model of flax.nnx says of its own layouts shards nothing, and is in the plan."""

import contextlib
import threading

import jax
import numpy as np
import pytest
from flax import nnx

import layoutmap as lm
from layoutmap.plan.problems import merge_problems


class Block(nnx.Module):
    """Annotated in both of flax's ways."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tensor"))
        self.up = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)
        self.table = nnx.Param(jax.random.normal(rngs.params(), (16, 8)), out_sharding=("fsdp", None))
        self.plain = nnx.Linear(8, 8, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs), Block(rngs)])


def make_model():
    return Model(nnx.Rngs(0))


def make_map():
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"))
    layout_map[r".*\.up\.kernel"] = ("model", None)
    layout_map.rest = "replicated"
    return layout_map


def values(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("fsdp", "tensor"))


@pytest.fixture(scope="module")
def plain(mesh):
    """Made as flax wants it, where a mesh is set."""
    with jax.set_mesh(mesh):
        return make_model()


def test_the_layout_map_wins(plain):
    """A model with annotations is built with no mesh set, each weight in the layout of its rule, with equal values."""
    model = make_map().build(make_model, library="jax")
    block = model.blocks[1]

    assert ("model", "unsharded") == lm.dtensor.fetch_layout(block.up.kernel[...]).sharding_specs
    assert lm.dtensor.fetch_layout(block.table[...]).is_fully_replicated()
    for expected, actual in zip(values(plain), values(model), strict=True):
        assert np.array_equal(expected, actual)


def test_metadata_stays_on_the_variables(plain):
    """The annotations, and the setting under which they were made, are those of the plain model."""
    model = make_map().build(make_model, library="jax")

    for expected, actual in zip(
        *(
            jax.tree.leaves(nnx.state(m), is_leaf=lambda x: isinstance(x, nnx.Variable))
            for m in (plain, model)
        ),
        strict=True,
    ):
        assert expected.get_metadata() == actual.get_metadata()
    assert nnx.graphdef(plain) == nnx.graphdef(model)


def test_the_plan_notes_each_annotation():
    """Blocks that say the same are one note, which names the rule to write; without a rule a weight is replicated."""
    plan = lm.plan(make_model, make_map(), library="jax")
    notes = [p for p in merge_problems(plan.problems) if p.kind == "unsupported"]

    assert ["note", "note"] == [p.severity for p in notes]
    assert ["blocks.{0..1}.table", "blocks.{0..1}.up.kernel"] == sorted(p.subject for p in notes)
    (table,) = (p for p in notes if p.subject.endswith("table"))
    assert "its annotation ('fsdp', None) has no effect" in table.what
    assert r"""layout_map[r"blocks\.\d+\.table$"] = ('fsdp', None)""" in table.fix


def test_a_mesh_that_is_set_does_not_count(mesh, plain):
    """Also one of explicit axes: the arrays are on the mesh of the layout map."""
    with jax.set_mesh(mesh):
        model = make_map().build(make_model, library="jax")

    assert ("model", "unsharded") == lm.dtensor.fetch_layout(model.blocks[0].up.kernel[...]).sharding_specs
    for expected, actual in zip(values(plain), values(model), strict=True):
        assert np.array_equal(expected, actual)


@pytest.mark.parametrize("fails", [False, True])
def test_flax_shards_again_afterwards(fails):
    """Its setting is what it was, after a model and after an error, and other threads never see another."""
    seen = []

    def make():
        other = threading.Thread(target=lambda: seen.append(nnx.using_eager_sharding()))
        other.start()
        other.join()
        if fails:
            raise KeyError
        return make_model()

    before = nnx.using_eager_sharding()
    with contextlib.suppress(KeyError):
        make_map().build(make, library="jax")

    assert ([before], before) == (seen, nnx.using_eager_sharding())
