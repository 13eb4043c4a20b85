"""A layout is a value, and its shard arithmetic is that of numpy's own splitting."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from layoutmap.core.errors import LayoutError, MeshError
from layoutmap.core.layout import MEMORY_KINDS, UNSHARDED, Layout
from layoutmap.core.mesh import Mesh
from layoutmap.testing import strategies

MESH = Mesh(None, "batch=2,model=4")
GRID = Mesh([f"CPU:{i}" for i in range(6)], [("x", 3), ("y", 2)])

TWINS = {
    "repr": lambda layout: eval(repr(layout), {"Layout": Layout, "Mesh": Mesh}),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda layout: pickle.loads(pickle.dumps(layout)),
    "text": lambda layout: Layout.from_string(layout.to_string()),
    "proto": lambda layout: Layout.from_proto(layout.as_proto()),
    "bytes": lambda layout: Layout.from_str(layout.serialized_string()),
}


@pytest.mark.parametrize("journey", TWINS)
@given(layout=strategies.layouts(), memory=st.sampled_from([None, *MEMORY_KINDS]))
def test_a_layout_is_the_same_after_any_journey(journey: str, layout: Layout, memory: str | None):
    """A layout that was written, sent or copied and is read again is equal, with an equal hash."""
    layout = layout.replace_memory(memory)
    again = TWINS[journey](layout)

    assert layout == again
    assert hash(layout) == hash(again)
    assert layout.mesh.devices == again.mesh.devices


def test_spellings_of_one_layout_are_equal():
    """`None`, an empty tuple and `UNSHARDED` are one spec; so are a dim and a tuple of that one dim."""
    layout = Layout([UNSHARDED, "model"], MESH)

    for specs in ([None, "model"], (None, ("model",)), ((), ["model"]), iter([None, "model"])):
        assert layout == Layout(specs, MESH)
    assert (UNSHARDED, "model") == layout.sharding_specs
    assert "(unsharded, model)" == str(layout)
    assert layout == layout.replace_memory("device")


def test_a_layout_in_host_memory_is_another_one_with_the_same_shards():
    """Its axes stay in host memory when some are deleted, and a wrong word is an error with the right ones."""
    layout = Layout(["batch", "model"], MESH, memory="pinned_host")
    assert layout not in (Layout(["batch", "model"], MESH), layout.replace_memory("unpinned_host"))
    assert Layout(["model"], MESH, memory="pinned_host") == layout.delete(0)
    assert (4, 2) == layout.shard_shape((8, 8))
    with pytest.raises(
        LayoutError, match=r'memory=\'host\'(?s:.*)"device"(?s:.*)"pinned_host" or "unpinned_host"'
    ):
        Layout([None], MESH, memory="host")


def test_a_layout_equals_no_other_type():
    """Comparing with another type is `False`, not an error; another mesh or spec makes another layout."""
    layout = Layout(["model"], MESH)

    for other in (
        "model",
        None,
        ("model",),
        MESH,
        Layout(["batch"], MESH),
        Layout(["model"], Mesh(None, "model=4")),
    ):
        assert layout != other


# -- the shards


@given(strategies.layouts(), st.data())
def test_shards_are_what_numpy_splits_off(layout: Layout, data: st.DataObject):
    """A device's shard is what is left when each axis is split evenly, dim by dim, major to minor."""
    shape = data.draw(strategies.shapes(layout, min_side=0).filter(lambda shape: np.prod(shape) <= 4096))
    device = data.draw(st.integers(0, layout.mesh.size - 1))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    at = layout.mesh.unravel_index()[device]
    expected = array
    for axis in range(layout.rank):
        for dim in layout.list_mesh_dims(axis):
            expected = np.split(expected, layout.mesh.dim_size(dim), axis)[at[dim]]

    index = layout.shard_slices(shape, device)

    np.testing.assert_array_equal(expected, array[index], strict=True)
    assert expected.shape == layout.shard_shape(shape) == layout.local_shape_from_global_shape(shape)
    assert shape == layout.global_shape_from_local_shape(expected.shape)
    assert all(None not in (part.start, part.stop) and part.step is None for part in index)


@given(strategies.layouts())
def test_offsets_number_the_shards(layout: Layout):
    """All shards are held equally often, and their numbers run row-major from 0 without a gap."""
    offsets = layout.offset_to_shard()
    numbers = [layout.offset_tuple_to_global_index(offset) for offset in offsets]
    copies = layout.mesh.size // layout.num_distinct_shards

    assert sorted(list(range(layout.num_distinct_shards)) * copies) == sorted(numbers)
    assert offsets == [layout.locate_shard(i) for i in range(layout.mesh.size)]
    for offset, number in zip(offsets, numbers, strict=True):
        expected = np.ravel_multi_index(offset, layout.shard_counts) if layout.rank else 0
        assert expected == number


@given(strategies.layouts())
def test_a_layout_is_replicated_if_it_has_one_shard(layout: Layout):
    """Fully replicated means that each axis has one shard; mesh dims of size 1 shard nothing."""
    assert layout.is_fully_replicated() == all(layout.num_shards(axis) == 1 for axis in range(layout.rank))
    assert layout.is_fully_replicated() == (len(set(layout.offset_to_shard())) == 1)


@given(strategies.layouts(), st.data())
def test_unknown_sizes_stay_unknown(layout: Layout, data: st.DataObject):
    """`None` and -1 go through both shape functions as they are, and the known sizes are not affected."""
    shape = list(data.draw(strategies.shapes(layout)))
    known = layout.local_shape_from_global_shape(shape)
    for axis in data.draw(st.sets(st.integers(0, 4))) & set(range(layout.rank)):
        shape[axis] = data.draw(st.sampled_from([None, -1]))

    local = layout.local_shape_from_global_shape(shape)

    assert tuple(n if n in (None, -1) else known[i] for i, n in enumerate(shape)) == local
    assert tuple(shape) == layout.global_shape_from_local_shape(local)


# -- making layouts


@given(strategies.meshes(), st.integers(1, 5), st.data())
def test_the_makers_shard_the_axis_they_say(mesh: Mesh, rank: int, data: st.DataObject):
    """`batch_sharded` shards the given axis, `inner_sharded` the last, `replicated` none, `delete` takes axes out."""
    dim = data.draw(st.sampled_from(mesh.dim_names))
    axis = data.draw(st.integers(0, rank - 1))
    whole = Layout.replicated(mesh, rank)

    batch = Layout.batch_sharded(mesh, dim, rank, axis)

    assert Layout([dim if i == axis else None for i in range(rank)], mesh) == batch
    assert Layout.batch_sharded(mesh, dim, rank) == Layout.batch_sharded(mesh, dim, rank, axis=0)
    assert Layout.batch_sharded(mesh, dim, rank, rank - 1) == Layout.inner_sharded(mesh, dim, rank)
    assert Layout([None] * rank, mesh) == whole
    assert Layout.replicated(mesh, rank - 1) == batch.delete(axis) == batch.delete([np.int64(axis)])


@given(strategies.layouts(), st.data())
def test_delete_keeps_the_other_axes(layout: Layout, data: st.DataObject):
    """What is left after `delete` are the other specs in their order, whichever way the axes are listed."""
    gone = data.draw(st.lists(st.integers(0, layout.rank - 1), max_size=6) if layout.rank else st.just([]))
    expected = tuple(spec for i, spec in enumerate(layout.sharding_specs) if i not in gone)

    for given_as in (gone, tuple(gone), set(gone), iter(gone), np.array(gone, int)):
        assert expected == layout.delete(given_as).sharding_specs


# -- what is refused

BAD_LAYOUTS = {
    "an unknown dim": (
        lambda: Layout([None, "modle"], MESH),
        """\
layout (unsharded, modle): spec 'modle' of axis 1 is not allowed
  mesh  batch=2, model=4
  why   the mesh has no dim 'modle'
  fix   use one of 'batch', 'model', 'unsharded'""",
    ),
    "a repeated dim": (
        lambda: Layout(["model", "model"], MESH),
        """\
layout (model, model): spec 'model' of axis 1 is not allowed
  mesh  batch=2, model=4
  why   mesh dim 'model' is used twice, and one dim can shard only one axis
  fix   leave axis 1 unsharded, or shard it over another dim""",
    ),
    "a dim repeated in a tuple": (
        lambda: Layout([("batch", "batch")], MESH),
        """\
layout ((batch, batch),): spec 'batch' of axis 0 is not allowed
  mesh  batch=2, model=4
  why   mesh dim 'batch' is used twice, and one dim can shard only one axis
  fix   leave axis 0 unsharded, or shard it over another dim""",
    ),
    "unsharded among dims": (
        lambda: Layout([("batch", UNSHARDED)], MESH),
        """\
layout ((batch, unsharded),): spec 'unsharded' of axis 0 is not allowed
  mesh  batch=2, model=4
  why   an axis that is sharded over a mesh dim is not unsharded
  fix   name mesh dims only, or 'unsharded' alone""",
    ),
    "match": (
        lambda: Layout(["match"], MESH),
        """\
layout (match,): spec 'match' of axis 0 is not allowed
  mesh  batch=2, model=4
  why   'match' is reserved for TensorFlow and shards nothing
  fix   use one of 'batch', 'model', 'unsharded'""",
    ),
    "a number as a spec": (
        lambda: Layout([0, 1], MESH),
        """\
sharding spec 0 cannot be read
  mesh  batch=2, model=4
  why   a spec is a mesh dim, a tuple of mesh dims, or UNSHARDED
  fix   use one of 'batch', 'model', 'unsharded'""",
    ),
    "one text": (
        lambda: Layout("model", MESH),
        """\
sharding specs 'model' are one text
  mesh  batch=2, model=4
  why   a layout has one sharding spec for each axis
  fix   write a list: ['model']""",
    ),
    "no specs": (
        lambda: Layout(None, MESH),
        """\
sharding specs None are no list
  mesh  batch=2, model=4
  why   they are None
  fix   write one spec for each axis, as in [None, None], or use Layout.replicated(mesh, rank)""",
    ),
    "a set": (
        lambda: Layout({"model"}, MESH),
        """\
sharding specs {'model'} have no order
  mesh  batch=2, model=4
  why   they are of type set, but each spec is for the axis at its position
  fix   write a list or a tuple""",
    ),
    "text for a mesh": (
        lambda: Layout(["x"], "x=2"),
        """\
a layout needs a mesh, not 'x=2'
  why   it is of type str, not a layoutmap.Mesh
  fix   make one: layoutmap.create_mesh("batch=2,model=4")""",
    ),
    "no mesh": (
        lambda: Layout(["x"], None),
        """\
a layout needs a mesh, not None
  why   it is None, not a layoutmap.Mesh
  fix   make one: layoutmap.create_mesh("batch=2,model=4")""",
    ),
    "a negative rank": (
        lambda: Layout.replicated(MESH, -1),
        """\
a layout cannot have the rank -1
  why   the rank is the number of a tensor's axes, 0 or more
  fix   pass the tensor's number of axes""",
    ),
    "a shape as a rank": (
        lambda: Layout.replicated(MESH, (2, 3)),
        """\
a layout cannot have the rank (2, 3)
  why   the rank is the number of a tensor's axes, 0 or more
  fix   pass the tensor's number of axes""",
    ),
    "an axis beyond the last": (
        lambda: Layout.batch_sharded(MESH, "batch", 2, axis=2),
        """\
a layout of rank 2 has no axis 2
  why   its axes are 0 to 1
  fix   count axes upwards from 0""",
    ),
    "a negative axis": (
        lambda: Layout(["batch"], MESH).num_shards(-1),
        """\
a layout of rank 1 has no axis -1
  why   its only axis is 0
  fix   count axes upwards from 0""",
    ),
    "an axis of a scalar": (
        lambda: Layout.batch_sharded(MESH, "batch", 0),
        """\
a layout of rank 0 has no axis 0
  why   it has no axes
  fix   use Layout.replicated(mesh, 0)""",
    ),
    "the inner axis of a scalar": (
        lambda: Layout.inner_sharded(MESH, "batch", 0),
        """\
a layout of rank 0 has no inner axis
  why   a scalar has no axes to shard
  fix   use Layout.replicated(mesh, 0)""",
    ),
    "a name for an axis": (
        lambda: Layout(["batch"], MESH).num_shards("batch"),
        """\
a layout of rank 1 has no axis 'batch'
  why   the axis is of type str, and axes are integers
  fix   pass the axis's number, from 0""",
    ),
    "an axis to delete that is not there": (
        lambda: Layout(["batch", None], MESH).delete([0, 2]),
        """\
a layout of rank 2 has no axis 2
  why   its axes are 0 to 1
  fix   count axes upwards from 0""",
    ),
    "a shard that is not there": (
        lambda: Layout(["batch", None], MESH).offset_tuple_to_global_index((2, 0)),
        """\
there is no shard (2, 0)
  layout  (batch, unsharded)
  mesh    batch=2, model=4
  why     axis 0 is split into 2 shards
  fix     give one number for each axis; the last shard is (1, 0)""",
    ),
    "a shard of an axis that is not sharded": (
        lambda: Layout(["batch", None], MESH).offset_tuple_to_global_index((0, 1)),
        """\
there is no shard (0, 1)
  layout  (batch, unsharded)
  mesh    batch=2, model=4
  why     axis 1 is not sharded
  fix     give one number for each axis; the last shard is (1, 0)""",
    ),
    "a shard of another rank": (
        lambda: Layout(["batch", None], MESH).offset_tuple_to_global_index((1,)),
        """\
there is no shard (1,)
  layout  (batch, unsharded)
  mesh    batch=2, model=4
  why     the layout has rank 2, not 1
  fix     give one number for each axis; the last shard is (1, 0)""",
    ),
    "an axis that does not divide": (
        lambda: Layout([None, "model"], MESH).check_fits((512, 1365)),
        """\
layout: axis 1 cannot be split evenly
  shape   (512, 1365)
  layout  (unsharded, model)
  mesh    batch=2, model=4
  why     1365 is not a multiple of 4
  fix     pad axis 1 to 1368, or leave it unsharded: (unsharded, unsharded)""",
    ),
    "a shape of another rank": (
        lambda: Layout([None, "model"], MESH).global_shape_from_local_shape((8,)),
        """\
layout: a layout of rank 2 does not fit a tensor of rank 1
  shape   (8,)
  layout  (unsharded, model)
  mesh    batch=2, model=4
  why     a layout has one sharding spec for each axis
  fix     use (unsharded,), or change the rule so that it does not match this tensor""",
    ),
    "a negative size": (
        lambda: Layout([None], MESH).local_shape_from_global_shape((-4,)),
        """\
the shape (-4,) has a negative size
  why   an axis has 0 elements or more; None or -1 stands for a size that is not known
  fix   give the sizes of the tensor""",
    ),
    "a shard of a shape that is not known": (
        lambda: Layout([None, "model"], MESH).shard_slices((None, 8), 0),
        """\
the shape (None, 8) is not fully known
  layout  (unsharded, model)
  mesh    batch=2, model=4
  why     None and -1 stand for a size that is not known yet
  fix     give all sizes, or call local_shape_from_global_shape, which accepts unknown sizes""",
    ),
}


@pytest.mark.parametrize("mistake", BAD_LAYOUTS)
def test_a_layout_that_cannot_be_is_refused_with_the_fix(mistake: str):
    """Every mistake has its whole message: what, where, why and the fix."""
    make, message = BAD_LAYOUTS[mistake]

    with pytest.raises(LayoutError) as raised:
        make()

    assert message == str(raised.value)


def test_a_device_that_is_not_there_has_no_shard():
    """A device index is checked against the mesh."""
    with pytest.raises(MeshError, match="device index 8 is outside the mesh"):
        Layout(["batch"], MESH).shard_slices((8,), 8)


@given(strategies.layouts(), st.data())
def test_an_axis_that_does_not_divide_is_named(layout: Layout, data: st.DataObject):
    """An uneven axis is an error that names it, and the sizes it fixes to do divide."""
    shape = list(data.draw(strategies.shapes(layout)))
    cut = [axis for axis in range(layout.rank) if layout.num_shards(axis) > 1]
    assume(cut)
    axis = data.draw(st.sampled_from(cut))
    shape[axis] += data.draw(st.integers(1, layout.num_shards(axis) - 1))

    with pytest.raises(LayoutError) as raised:
        layout.check_fits(tuple(shape))

    assert (axis,) == layout.find_uneven_axes(shape)
    assert f"layout: axis {axis} cannot be split evenly" == raised.value.what
    padded = int(raised.value.fix.split(",")[0].rsplit(" ", 1)[1])
    assert 0 == padded % layout.num_shards(axis)
    assert 0 < padded - shape[axis] < layout.num_shards(axis)


@given(strategies.layouts(), st.data())
def test_uneven_shards_are_chunks_of_equal_size_but_the_last(layout: Layout, data: st.DataObject):
    """Shards are consecutive and cover an axis once; one that is not full is the last with elements."""
    shape = tuple(data.draw(st.integers(0, 24)) for _ in range(layout.rank))
    largest, padded = layout.shard_shape(shape), layout.pad_shape(shape)
    values = np.arange(math.prod(shape)).reshape(shape)
    counts = np.zeros(shape, int)

    for device in range(layout.mesh.size):
        index = layout.shard_slices(shape, device)
        counts[index] += 1
        for axis, (at, part) in enumerate(zip(layout.locate_shard(device), index, strict=True)):
            chunks = np.split(np.arange(shape[axis]), range(largest[axis], shape[axis], largest[axis] or 1))
            expected = chunks[at] if at < len(chunks) else chunks[0][:0]
            assert [*expected] == [*range(part.start, part.stop)]
    copies = layout.mesh.size // layout.num_distinct_shards
    assert (values.size == 0) or (counts == copies).all()
    for size, whole, part, count in zip(shape, padded, largest, layout.shard_counts, strict=True):
        assert whole == part * count
        assert 0 <= whole - size < count
