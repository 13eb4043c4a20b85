"""Where an axis does not divide, what is taken is what was asked for, as far as it divides."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.core.uneven import derive_layout, fit_layout
from layoutmap.testing import strategies


@st.composite
def asked(draw):
    layout = draw(strategies.layouts())
    return layout, tuple(draw(st.integers(0, 24)) for _ in range(layout.rank))


@given(asked())
def test_what_is_taken_fits_and_is_part_of_what_was_asked(drawn):
    """Axes that divide stay as they were; of the others, "shrink" takes the most shards there are, "replicate" none."""
    layout, shape = drawn
    uneven = layout.find_uneven_axes(shape)
    shrunk, whole = (fit_layout(layout, shape, how) for how in ("shrink", "replicate"))

    assert layout == fit_layout(layout, shape, "error")
    assert ((), ()) == (shrunk.find_uneven_axes(shape), whole.find_uneven_axes(shape))
    for axis, size in enumerate(shape):
        dims = layout.list_mesh_dims(axis)
        taken = shrunk.list_mesh_dims(axis)
        if axis not in uneven:
            assert dims == taken == whole.list_mesh_dims(axis)
            continue
        subsets = itertools.chain.from_iterable(itertools.combinations(dims, n) for n in range(len(dims) + 1))
        counts = [math.prod(layout.mesh.dim_size(d) for d in subset) for subset in subsets]
        assert max(n for n in counts if size % n == 0) == shrunk.num_shards(axis)
        assert tuple(d for d in dims if d in taken) == taken
        assert () == whole.list_mesh_dims(axis)


def test_a_layout_of_another_rank_stays():
    """Its error is about the rank."""
    layout = lm.Layout(["model"], lm.Mesh(None, "model=4"))

    assert layout == fit_layout(layout, (3, 3), "shrink")


def test_an_axis_made_of_several_follows_the_first():
    """Heads and features that were made one axis are sharded along the heads."""
    kernel = lm.Layout([None, "model", "batch"], lm.Mesh(None, "batch=2,model=4"))

    assert ("unsharded", "model") == derive_layout(kernel, ((0,), (1, 2))).sharding_specs
    assert ("batch", "model", "unsharded") == derive_layout(kernel, ((2,), (1,), ())).sharding_specs


@pytest.mark.parametrize(
    "make",
    [
        lambda: lm.LayoutMap(lm.Mesh(None, "model=4"), uneven="pad"),
        lambda: lm.LayoutMap(lm.Mesh(None, "model=4")).add("d1", ("model",), uneven="pad"),
        lambda: lm.LayoutMap.from_yaml("{version: 1, uneven: pad}"),
        lambda: lm.LayoutMap.from_yaml("{version: 1, rules: {d1: {layout: [model], uneven: pad}}}"),
    ],
)
def test_another_policy_is_refused(make):
    """With those that there are."""
    with pytest.raises(lm.RuleError, match="uneven='pad'") as caught:
        make()

    assert "use one of 'error', 'replicate', 'shrink'" == caught.value.fix


def test_a_rule_that_cannot_be_added_is_not():
    """A policy that is none leaves the map as it was."""
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=4"))
    with pytest.raises(lm.RuleError):
        layout_map.add("d1", ("model",), uneven="pad")

    assert 0 == len(layout_map)
