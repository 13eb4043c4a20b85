"""Mesh and layout against those of TensorFlow 2.21: the same where TensorFlow is right, and each difference named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.experimental import dtensor

from layoutmap.core.errors import LayoutError, MeshError
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.mesh import Mesh
from layoutmap.testing import strategies

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:{}".format
TASK_1 = "/job:localhost/replica:0/task:1/device:CPU:{}".format


def cpu_mesh(dims: list[tuple[str, int]] | str, name: str = "") -> Mesh:
    size = Mesh(None, dims).size
    return Mesh([DEVICE(i) for i in range(size)], dims, name)


def theirs(mesh: Mesh) -> dtensor.Mesh:
    """The mesh made with TensorFlow's own constructor, from nothing of ours but plain values."""
    places = np.arange(mesh.size).reshape(mesh.shape)
    assert mesh.devices is not None
    names = [name if "/" in name else DEVICE("").replace("CPU:", name) for name in mesh.devices]
    local = [names[i] for i in mesh.local_device_ids]
    rest = {} if len(local) == mesh.size else {"global_devices": names}
    return dtensor.Mesh(
        list(mesh.dim_names), places, list(mesh.local_device_ids), local, mesh_name=mesh.name, **rest
    )


def their_layout(layout: Layout) -> dtensor.Layout:
    return dtensor.Layout(list(layout.sharding_specs), theirs(layout.mesh))


def layouts_of(meshes: st.SearchStrategy[Mesh]) -> st.SearchStrategy[Layout]:
    return meshes.flatmap(lambda mesh: strategies.layouts(mesh, tuples=False))


meshes = strategies.meshes(devices="tensorflow")
layouts = layouts_of(meshes)
GRID = cpu_mesh("x=4,y=2", "grid")
X_Y = Layout(["x", "y"], GRID)


# -- the same


@st.composite
def meshes_of_two_processes(draw: st.DrawFn) -> Mesh:
    """Meshes of which this process holds some devices and knows the others by name."""
    mesh = draw(strategies.meshes(devices="tensorflow").filter(lambda mesh: mesh.size % 2 == 0))
    half = mesh.size // 2
    names = [DEVICE(i) for i in range(half)] + [TASK_1(i) for i in range(mesh.size - half)]
    local = draw(st.sampled_from([range(half), range(half, mesh.size)]))
    return Mesh(names, mesh.mesh_dims, mesh.name, local_device_ids=local)


@given(meshes | meshes_of_two_processes())
def test_the_forms_of_a_mesh_are_tensorflows(mesh: Mesh):
    """Text and bytes of a mesh are TensorFlow's, of several processes too, and each side reads the other's."""
    tf_mesh = theirs(mesh)

    assert tf_mesh.to_string() == mesh.to_string()
    assert tf_mesh.as_proto().SerializeToString(deterministic=True) == (
        mesh.as_proto().SerializeToString(deterministic=True)
    )
    assert tf_mesh == dtensor.Mesh.from_string(mesh.to_string())
    for ours in (Mesh.from_string(tf_mesh.to_string()), Mesh.from_proto(tf_mesh.as_proto())):
        assert mesh == ours
        assert mesh.local_device_ids == ours.local_device_ids


@given(meshes)
def test_a_mesh_answers_as_tensorflows(mesh: Mesh):
    """Dims, sizes, strides, coordinates and device type of a mesh are TensorFlow's."""
    tf_mesh = theirs(mesh)

    assert tuple(tf_mesh.dim_names) == mesh.dim_names
    assert tuple(tf_mesh.shape()) == mesh.shape
    assert tf_mesh.size == mesh.size
    assert tf_mesh.name == mesh.name
    assert tuple(tf_mesh.strides) == mesh.strides
    assert tf_mesh.device_type() == mesh.device_type
    assert tuple(tf_mesh.local_device_ids()) == mesh.local_device_ids
    assert tuple(tf_mesh.local_devices()) == tuple(
        DEVICE("").replace("CPU:", name) for name in mesh.devices or ()
    )
    assert tf_mesh.unravel_index() == dict(enumerate(mesh.unravel_index()))
    for name in mesh.dim_names:
        assert tf_mesh.dim_size(name) == mesh.dim_size(name) == tf_mesh[name].size
        assert name in tf_mesh
        assert name in mesh


@given(layouts)
def test_the_forms_of_a_layout_are_tensorflows(layout: Layout):
    """Text and protobuf bytes of a layout are TensorFlow's, and each side reads the other's."""
    tf_layout = their_layout(layout)

    assert tf_layout.to_string() == layout.to_string()
    assert tf_layout.as_proto().SerializeToString(deterministic=True) == layout.serialized_string()
    assert tf_layout == dtensor.Layout.from_string(layout.to_string())
    assert layout == Layout.from_string(tf_layout.to_string())
    assert layout == Layout.from_proto(tf_layout.as_proto())
    assert layout == Layout.from_str(tf_layout.as_proto().SerializeToString())


def test_tensorflow_refuses_a_layout_in_host_memory():
    """It has no form for one, and must not read it as another layout."""
    layout = X_Y.replace_memory("pinned_host")
    message = type(their_layout(X_Y).as_proto()).FromString(layout.serialized_string())
    for read in (
        lambda: dtensor.Layout.from_string(layout.to_string()),
        lambda: dtensor.Layout.from_proto(message),
    ):
        with pytest.raises(Exception, match="memory::pinned_host"):
            read()


def test_tensorflow_reads_our_message():
    """`dtensor.Layout.from_proto` takes our bytes, parsed into TensorFlow's class of message."""
    message = type(their_layout(X_Y).as_proto()).FromString(X_Y.serialized_string())

    assert their_layout(X_Y) == dtensor.Layout.from_proto(message)


@given(layouts)
def test_a_layout_answers_as_tensorflows(layout: Layout):
    """Rank, specs, shards and offsets of a layout are TensorFlow's."""
    tf_layout = their_layout(layout)
    offsets = layout.offset_to_shard()

    assert tf_layout.rank == layout.rank
    assert tuple(tf_layout.sharding_specs) == layout.sharding_specs
    assert [tf_layout.num_shards(axis) for axis in range(layout.rank)] == list(layout.shard_counts)
    assert [tuple(offset) for offset in tf_layout.offset_to_shard()] == offsets
    assert theirs(layout.mesh) == tf_layout.mesh
    for offset in offsets:
        assert tf_layout.offset_tuple_to_global_index(offset) == layout.offset_tuple_to_global_index(offset)


@given(layouts, st.data())
def test_shapes_go_through_a_layout_as_in_tensorflow(layout: Layout, data: st.DataObject):
    """Shapes of shards and of wholes are TensorFlow's, -1 included."""
    shape = list(data.draw(strategies.shapes(layout, min_side=0)))
    for axis in data.draw(st.sets(st.integers(0, 4), max_size=2)) & set(range(layout.rank)):
        shape[axis] = -1
    tf_layout = their_layout(layout)

    local = layout.local_shape_from_global_shape(shape)

    assert tuple(tf_layout.local_shape_from_global_shape(shape)) == local
    if -1 not in local:
        assert tuple(tf_layout.global_shape_from_local_shape(list(local))) == (
            layout.global_shape_from_local_shape(local)
        )


@given(meshes, st.integers(1, 5), st.data())
def test_layouts_are_made_as_in_tensorflow(mesh: Mesh, rank: int, data: st.DataObject):
    """`batch_sharded`, `inner_sharded` and `replicated` make TensorFlow's layouts."""
    dim = data.draw(st.sampled_from(mesh.dim_names))
    axis = data.draw(st.integers(0, rank - 1))
    tf_mesh = theirs(mesh)

    assert dtensor.Layout.batch_sharded(tf_mesh, dim, rank, axis).to_string() == (
        Layout.batch_sharded(mesh, dim, rank, axis).to_string()
    )
    assert dtensor.Layout.inner_sharded(tf_mesh, dim, rank).to_string() == (
        Layout.inner_sharded(mesh, dim, rank).to_string()
    )
    assert dtensor.Layout.replicated(tf_mesh, rank).to_string() == Layout.replicated(mesh, rank).to_string()


@given(layouts, st.data())
def test_delete_takes_out_what_tensorflow_takes_out(layout: Layout, data: st.DataObject):
    """`delete` with a list of axes, in any order, leaves what TensorFlow leaves."""
    gone = data.draw(st.lists(st.integers(0, layout.rank - 1), unique=True) if layout.rank else st.just([]))

    assert their_layout(layout).delete(gone).to_string() == layout.delete(gone).to_string()


@given(layouts, layouts)
def test_layouts_are_equal_as_in_tensorflow(one: Layout, other: Layout):
    """Two layouts are equal just if TensorFlow's are: specs, mesh, mesh name and devices."""
    assert (their_layout(one) == their_layout(other)) == (one == other)
    assert their_layout(one) == their_layout(one)


@given(
    layouts_of(st.sampled_from([GRID, cpu_mesh("x=2,y=2,z=2"), cpu_mesh("x=8,y=1"), cpu_mesh("x=3")])),
    st.data(),
)
def test_tensorflow_puts_on_each_device_the_shard_that_we_name(layout: Layout, data: st.DataObject):
    """Component by component, a tensor that TensorFlow laid out is sharded where `shard_slices` shards it."""
    shape = data.draw(strategies.shapes(layout, max_side=2).filter(lambda shape: np.prod(shape) <= 1024))
    values = np.arange(np.prod(shape, dtype=np.int32), dtype=np.int32).reshape(shape)

    components = dtensor.unpack(dtensor.relayout(values, their_layout(layout)))

    assert layout.mesh.size == len(components)
    for i, component in enumerate(components):
        np.testing.assert_array_equal(component.numpy(), values[layout.shard_slices(shape, i)], strict=True)


def test_a_mesh_of_which_only_the_local_devices_are_named_goes_both_ways():
    """In TensorFlow's shorter form the devices of other processes have no names; ours keeps that they are unknown."""
    places = np.arange(4).reshape(2, 2)
    tf_mesh = dtensor.Mesh(["x", "y"], places, [0, 1], [DEVICE(0), DEVICE(1)])

    mesh = Mesh.from_string(tf_mesh.to_string())

    assert ("CPU:0", "CPU:1", "", "") == mesh.devices
    assert (0, 1) == mesh.local_device_ids
    assert tf_mesh.to_string() == mesh.to_string()
    assert mesh == Mesh.from_proto(tf_mesh.as_proto())
    assert tf_mesh.as_proto().SerializeToString(deterministic=True) == (
        mesh.as_proto().SerializeToString(deterministic=True)
    )


def test_the_devices_of_a_mesh_may_be_said_twice():
    """TensorFlow writes all devices once more when asked to; the mesh is the same."""
    mesh = cpu_mesh("x=2")
    assert mesh.devices is not None
    devices = list(mesh.devices)
    tf_mesh = dtensor.Mesh(["x"], np.arange(2), [0, 1], devices, global_devices=devices)

    assert mesh == Mesh.from_string(tf_mesh.to_string()) == Mesh.from_proto(tf_mesh.as_proto())


# -- different, on purpose


def test_a_dim_of_size_1_counts_as_replicated():
    """TensorFlow calls a layout over a dim of size 1 sharded; it has one shard, so here it is replicated."""
    layout = Layout(["y"], cpu_mesh("x=8,y=1"))

    assert not their_layout(layout).is_fully_replicated()
    assert layout.is_fully_replicated()
    assert 1 == their_layout(layout).num_shards(0) == layout.num_shards(0)


@given(layouts)
def test_apart_from_dims_of_size_1_the_same_layouts_are_replicated(layout: Layout):
    """Where no dim of size 1 is used, both sides say the same of `is_fully_replicated`."""
    if all(
        layout.mesh.dim_size(dim) > 1 for spec in layout.sharding_specs for dim in [spec] if dim != UNSHARDED
    ):
        assert their_layout(layout).is_fully_replicated() == layout.is_fully_replicated()


def test_a_spec_list_without_its_last_comma_is_refused():
    """TensorFlow drops the last spec without a word; here the text is an error."""
    text = f"sharding_specs:x,y mesh:{GRID.to_string()}"

    assert ["x"] == dtensor.Layout.from_string(text).sharding_specs
    with pytest.raises(LayoutError, match="each spec is followed by a comma, the last one too"):
        Layout.from_string(text)


@pytest.mark.parametrize("gone", [[2], [-1], [0, 9]])
def test_deleting_an_axis_that_is_not_there_is_an_error(gone: list[int]):
    """TensorFlow ignores such an axis, also a negative one; here it is an error."""
    kept = [spec for i, spec in enumerate(["x", "y"]) if i not in gone]

    assert kept == their_layout(X_Y).delete(gone).sharding_specs
    with pytest.raises(LayoutError, match="a layout of rank 2 has no axis"):
        X_Y.delete(gone)


def test_a_tuple_of_axes_is_deleted():
    """TensorFlow deletes nothing when the axes are a tuple; here a tuple is as good as a list."""
    assert ["x", "y"] == their_layout(X_Y).delete((0,)).sharding_specs
    assert ("y",) == X_Y.delete((0,)).sharding_specs


@pytest.mark.parametrize("offset", [(9, 9), (4, 0), (-1, 0)])
def test_a_shard_that_is_not_there_has_no_number(offset: tuple[int, ...]):
    """TensorFlow computes a number for any offset; here it is an error."""
    assert isinstance(their_layout(X_Y).offset_tuple_to_global_index(offset), int)
    with pytest.raises(LayoutError, match="there is no shard"):
        X_Y.offset_tuple_to_global_index(offset)


def test_an_axis_that_does_not_divide_is_rounded_up_and_refused_where_it_must_divide():
    """TensorFlow rounds the shard's shape down, and loses rows; here the axis, the size and the fix are named."""
    assert [2, 2] == list(their_layout(X_Y).local_shape_from_global_shape([9, 4]))
    assert (3, 2) == X_Y.local_shape_from_global_shape([9, 4])
    with pytest.raises(LayoutError, match="axis 0 cannot be split evenly"):
        X_Y.check_fits([9, 4])


def test_an_unknown_size_stays_unknown():
    """TensorFlow multiplies -1 by the number of shards; here it stays unknown, both ways."""
    assert [-4, 4] == list(their_layout(X_Y).global_shape_from_local_shape([-1, 2]))
    assert (-1, 4) == X_Y.global_shape_from_local_shape([-1, 2])


def test_a_mesh_without_dims_reads_its_own_text():
    """TensorFlow writes the mesh of one device and no dims as we do, and cannot read it; here it goes both ways."""
    mesh = cpu_mesh("")

    assert theirs(mesh).to_string() == mesh.to_string()
    with pytest.raises(ValueError, match="mesh size doesn't match number of devices"):
        dtensor.Mesh.from_string(mesh.to_string())
    assert mesh == Mesh.from_string(mesh.to_string())


def test_processes_may_hold_unequal_numbers_of_devices():
    """TensorFlow makes and writes such a mesh, and cannot read it; here it goes both ways."""
    names = [DEVICE(0), TASK_1(0), TASK_1(1)]
    mesh = Mesh(names, "x=3", local_device_ids=[1, 2])

    assert theirs(mesh).to_string() == mesh.to_string()
    with pytest.raises(ValueError, match="Uneven local clusters"):
        dtensor.Mesh.from_string(mesh.to_string())
    assert mesh == Mesh.from_string(mesh.to_string())


def test_match_is_no_layout_of_a_tensor():
    """TensorFlow accepts "match" and then counts 2**64 - 1 shards; here it is refused."""
    assert 2**64 - 1 == dtensor.Layout(["match", "x"], theirs(GRID)).num_shards(0)
    with pytest.raises(LayoutError, match="'match' is reserved for TensorFlow"):
        Layout(["match", "x"], GRID)


def test_what_is_no_static_layout_is_refused():
    """Parted and single-device layouts, which lay out no variable, are refused by name."""
    parted = dtensor.Layout.from_string(f"parted:x, mesh:{GRID.to_string()}")
    single = dtensor.Layout.from_string(f"maximal:true, mesh:{DEVICE(0)}")

    with pytest.raises(LayoutError, match="is of type PARTED"):
        Layout.from_proto(parted.as_proto())
    with pytest.raises(LayoutError, match="is of type SINGLE_DEVICE"):
        Layout.from_proto(single.as_proto())
    for tf_layout in (parted, single):
        with pytest.raises(LayoutError, match="it does not start with 'sharding_specs:'"):
            Layout.from_string(tf_layout.to_string())


def test_an_axis_over_several_dims_is_ours_alone():
    """TensorFlow cannot say it and refuses our text for it, by the dim's name; nothing is lost without a word."""
    layout = Layout([("x", "y")], GRID)

    with pytest.raises(ValueError, match="x:y"):
        dtensor.Layout.from_string(layout.to_string())
    assert layout == Layout.from_string(layout.to_string())


def test_device_ids_that_start_elsewhere_are_refused():
    """TensorFlow accepts ids from 4 on; device i of a mesh has the id i here, so its text is an error."""
    tf_mesh = dtensor.Mesh(["x"], np.arange(4, 6), [4, 5], [DEVICE(0), DEVICE(1)])

    with pytest.raises(MeshError, match=r"global device ids \[4, 5\] are not 0 to 1 in order"):
        Mesh.from_string(tf_mesh.to_string())
    with pytest.raises(MeshError, match=r"global device ids \[4, 5\] are not 0 to 1 in order"):
        Mesh.from_proto(tf_mesh.as_proto())
