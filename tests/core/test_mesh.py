"""A mesh is a value: read from any spelling, checked, and the same after any journey."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutmap.core.errors import MeshError
from layoutmap.core.mesh import UNSHARDED, Mesh, MeshDimension
from layoutmap.core.mesh_dims import parse_mesh_dims, replace_unknown_size
from layoutmap.testing import strategies

TWINS = {
    "repr": lambda mesh: eval(repr(mesh), {"Mesh": Mesh}),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda mesh: pickle.loads(pickle.dumps(mesh)),
    "text": lambda mesh: Mesh.from_string(mesh.to_string()),
    "proto": lambda mesh: Mesh.from_proto(mesh.as_proto()),
    "bytes": lambda mesh: Mesh.from_proto(mesh.as_proto().SerializeToString()),
}


@st.composite
def partly_local_meshes(draw: st.DrawFn) -> Mesh:
    """Meshes of several processes: some devices are of others, and their names may be unknown."""
    mesh = draw(strategies.meshes(devices="tensorflow"))
    assert mesh.devices is not None
    local = draw(st.lists(st.integers(0, mesh.size - 1), unique=True).map(sorted))
    names = list(mesh.devices)
    if draw(st.booleans()):
        names = [name if i in local else "" for i, name in enumerate(names)]
    return Mesh(names, mesh.mesh_dims, mesh.name, local_device_ids=local)


@pytest.mark.parametrize("journey", TWINS)
@given(mesh=strategies.meshes(min_dims=0) | partly_local_meshes())
def test_a_mesh_is_the_same_after_any_journey(journey: str, mesh: Mesh):
    """A mesh that was written, sent or copied and is read again is equal, with an equal hash and text."""
    again = TWINS[journey](mesh)

    assert mesh == again
    assert hash(mesh) == hash(again)
    assert mesh.local_device_ids == again.local_device_ids
    assert repr(mesh) == repr(again)
    assert mesh.to_string() == again.to_string()


@given(strategies.meshes(min_dims=0))
def test_coordinates_count_row_major(mesh: Mesh):
    """A device's coordinates are those of numpy's row-major order, and the strides lead back to it."""
    for i in range(mesh.size):
        expected = tuple(int(n) for n in np.unravel_index(i, mesh.shape)) if mesh.shape else ()
        coords = mesh.coords(i)

        assert expected == coords
        assert i == sum(c * stride for c, stride in zip(coords, mesh.strides, strict=True))
        assert dict(zip(mesh.dim_names, coords, strict=True)) == mesh.unravel_index()[i]


@pytest.mark.parametrize(
    "spelling",
    [
        "batch=2,model=4",
        "batch=2, model=4",
        " batch = 2 ,model=4 ",
        {"batch": 2, "model": 4},
        [("batch", 2), ("model", 4)],
        (["batch", 2], ["model", 4]),
        [MeshDimension("batch", 2), ("model", np.int64(4))],
        [MeshDimension("batch", np.int32(2)), MeshDimension("model", 4)],
        iter([("batch", 2), ("model", 4)]),
    ],
    # No address, which differs from process to process.
    ids=lambda each: str(each).partition(" object at ")[0],
)
def test_mesh_dims_are_read_from_any_spelling(spelling):
    """Text with or without blanks, a dict, pairs and numpy's integers all mean the same, in plain ints."""
    dims = parse_mesh_dims(spelling)

    assert (MeshDimension("batch", 2), MeshDimension("model", 4)) == dims
    assert [int, int] == [type(dim.size) for dim in dims]


def test_a_mesh_without_dims_has_one_device():
    """No dims, however they are spelled, are the mesh of a single device."""
    for nothing in ("", " ", {}, []):
        mesh = Mesh(None, nothing)

        assert (1, (), ()) == (mesh.size, mesh.shape, mesh.coords(0))
        assert "no dims" == str(mesh)


def test_a_dim_is_found_by_its_name():
    """`mesh[name]`, `name in mesh` and `dim_size` speak of one dim."""
    mesh = Mesh(None, "batch=2,model=4")

    assert MeshDimension("model", 4) == mesh["model"]
    assert 4 == mesh.dim_size("model")
    assert "model" in mesh
    assert "x" not in mesh
    assert None not in mesh
    assert ("batch", "model") == mesh.dim_names


def test_a_mesh_differs_by_name_dims_and_devices():
    """Equal means the same grid of the same devices under the same name; other types are never equal."""
    mesh = Mesh(["CPU:0", "CPU:1"], "x=2", "m")

    assert mesh == Mesh(("CPU:0", "CPU:1"), {"x": 2}, "m")
    for other in (
        Mesh(["CPU:1", "CPU:0"], "x=2", "m"),
        Mesh(["CPU:0", "CPU:1"], "y=2", "m"),
        Mesh(["CPU:0", "CPU:1"], "x=2,y=1", "m"),
        Mesh(["CPU:0", "CPU:1"], "x=2"),
        Mesh(None, "x=2", "m"),
        "m",
        None,
    ):
        assert mesh != other


def test_the_processes_of_one_program_hold_equal_meshes():
    """Which devices are local is known, and not compared."""
    first, second = (Mesh(["CPU:0", "CPU:1"], "x=2", local_device_ids=[i]) for i in (0, 1))

    assert first == second
    assert hash(first) == hash(second)
    assert (0,) == first.local_device_ids
    assert "Mesh(['CPU:0', 'CPU:1'], [('x', 2)], local_device_ids=[1])" == repr(second)


def test_devices_without_a_name_are_of_other_processes():
    """Without `local_device_ids`, the devices whose names are known are the local ones."""
    mesh = Mesh(["", "GPU:1"], "x=2")

    assert (1,) == mesh.local_device_ids
    assert "GPU" == mesh.device_type


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("CPU:0", "CPU"),
        ("gpu:12", "GPU"),
        ("/job:worker/replica:0/task:1/device:TPU:3", "TPU"),
        ("/device:GPU:0", "GPU"),
    ],
)
def test_the_type_is_read_from_a_device_name(device: str, kind: str):
    """A short name and TensorFlow's full name both say the type."""
    assert kind == Mesh([device], "x=1").device_type


def test_an_abstract_mesh_of_thousands_of_devices_is_a_small_thing():
    """Planning for 4,096 devices needs none of them; devices can be bound later."""
    mesh = Mesh(None, "data=512,model=8")

    assert mesh.is_abstract
    assert mesh.device_type is None
    assert 4096 == mesh.size
    assert mesh != mesh.with_devices(f"TPU:{i}" for i in range(4096))
    assert mesh.mesh_dims == mesh.with_devices(f"TPU:{i}" for i in range(4096)).mesh_dims


SPELLINGS = 'write "batch=2,model=4", {"batch": 2, "model": 4} or [("batch", 2), ("model", 4)]'

BAD_MESHES = {
    "text without a size": (
        lambda: Mesh(None, "batch=2,model"),
        (
            "mesh dims 'batch=2,model' cannot be read\n"
            "  why   'model' is not name=size, with an integer as the size\n"
            f"  fix   {SPELLINGS}"
        ),
    ),
    "text with a float": (
        lambda: Mesh(None, "batch=2.5"),
        (
            "mesh dims 'batch=2.5' cannot be read\n"
            "  why   'batch=2.5' is not name=size, with an integer as the size\n"
            f"  fix   {SPELLINGS}"
        ),
    ),
    "a trailing comma": (
        lambda: Mesh(None, "batch=2,"),
        (
            "mesh dims 'batch=2,' cannot be read\n"
            "  why   '' is not name=size, with an integer as the size\n"
            f"  fix   {SPELLINGS}"
        ),
    ),
    "a number": (
        lambda: Mesh(None, 8),
        f"mesh dims 8 cannot be read\n  why   they are of type int\n  fix   {SPELLINGS}",
    ),
    "names without sizes": (
        lambda: Mesh(None, ["x", "y"]),
        (
            "mesh dim 'x' cannot be read\n"
            "  why   a mesh dim is a pair of a name and a size\n"
            f"  fix   {SPELLINGS}"
        ),
    ),
    "size and name the wrong way round": (
        lambda: Mesh(None, [(2, "x")]),
        f"mesh dim (2, 'x') cannot be read\n  why   its name is of type int, not text\n  fix   {SPELLINGS}",
    ),
    "a float size": (
        lambda: Mesh(None, {"x": 2.0}),
        (
            "mesh dim ('x', 2.0) cannot be read\n"
            "  why   its size is of type float, not an integer\n"
            f"  fix   {SPELLINGS}"
        ),
    ),
    "a bool size": (
        lambda: Mesh(None, {"x": True}),
        (
            "mesh dim ('x', True) cannot be read\n"
            "  why   its size is of type bool, not an integer\n"
            f"  fix   {SPELLINGS}"
        ),
    ),
    "a dimension with a float size": (
        lambda: Mesh(None, [MeshDimension("x", 2.5)]),  # type: ignore[arg-type]
        (
            "mesh dim MeshDimension(name='x', size=2.5) cannot be read\n"
            "  why   its size is of type float, not an integer\n"
            f"  fix   {SPELLINGS}"
        ),
    ),
    "size 0": (
        lambda: Mesh(None, "batch=2,model=0"),
        (
            "mesh dim 'model' of size 0 is not allowed\n"
            "  mesh  batch=2, model=0\n"
            "  why   a dim has at least one device\n"
            "  fix   use size 1, ('model', 1), for a dim that shards nothing"
        ),
    ),
    "size -1": (
        lambda: Mesh(None, "batch=2,model=-1"),
        (
            "mesh dim 'model' of size -1 is not allowed\n"
            "  mesh  batch=2, model=-1\n"
            "  why   a dim has at least one device\n"
            "  fix   call create_mesh, which computes a size of -1 from the number of devices"
        ),
    ),
    "a mistake in a size": (
        lambda: Mesh(None, "batch=2,model=4000000000"),
        (
            "mesh of 8000000000 devices is not allowed\n"
            "  mesh  batch=2, model=4000000000\n"
            "  why   a mesh has at most 1048576 devices\n"
            "  fix   check the sizes: one of them may be a mistake"
        ),
    ),
    "a repeated name": (
        lambda: Mesh(None, "x=2,x=4"),
        (
            "mesh dim 'x' of size 4 is not allowed\n"
            "  mesh  x=2, x=4\n"
            "  why   a layout could not tell the two dims of that name apart\n"
            "  fix   rename one of them, to 'x_2' for instance"
        ),
    ),
    "no name": (
        lambda: Mesh(None, [("", 2)]),
        (
            "mesh dim '' of size 2 is not allowed\n"
            "  mesh  =2\n"
            "  why   layouts refer to a dim by its name\n"
            '  fix   name it, as in ("model", 4)'
        ),
    ),
    "a word of layouts": (
        lambda: Mesh(None, [(UNSHARDED, 2)]),
        (
            "mesh dim 'unsharded' of size 2 is not allowed\n"
            "  mesh  unsharded=2\n"
            "  why   layouts reserve 'unsharded' for axes that are not sharded\n"
            "  fix   use another name"
        ),
    ),
    "a name with a bar": (
        lambda: Mesh(None, [("x|y", 2)]),
        (
            "mesh dim 'x|y' of size 2 is not allowed\n"
            "  mesh  x|y=2\n"
            "  why   blanks and the characters , | = : separate the parts of a mesh written as text\n"
            "  fix   name it 'x_y'"
        ),
    ),
    "too few devices": (
        lambda: Mesh(["CPU:0", "CPU:1", "CPU:2"], "x=2,y=2"),
        (
            "a mesh of 4 devices cannot have 3\n"
            "  mesh     x=2, y=2\n"
            "  devices  CPU:0, CPU:1, CPU:2\n"
            "  why      2 x 2 is 4, not 3\n"
            "  fix      pass 4 devices, or sizes whose product is 3"
        ),
    ),
    "no devices": (
        lambda: Mesh([], "x=2"),
        "a mesh of 2 devices cannot have 0\n  mesh     x=2\n  devices  none\n  fix      pass 2 devices, or None",
    ),
    "a device twice": (
        lambda: Mesh(["CPU:0", "CPU:1", "CPU:0"], "x=3"),
        (
            "device 'CPU:0' appears twice in a mesh\n"
            "  mesh     x=3\n"
            "  devices  CPU:0, CPU:1, CPU:0\n"
            "  why      each position of a mesh has a different device\n"
            "  fix      list each device once"
        ),
    ),
    "mixed types": (
        lambda: Mesh(["CPU:0", "GPU:0"], "x=2"),
        (
            "a mesh cannot mix the device types CPU, GPU\n"
            "  mesh     x=2\n"
            "  devices  CPU:0, GPU:0\n"
            "  why      one program runs on all devices of a mesh, so they are of one type\n"
            "  fix      make one mesh for each type"
        ),
    ),
    "a device without a type": (
        lambda: Mesh(["0", "1"], "x=2"),
        (
            "device '0' does not name a type\n"
            "  why   a device name ends in TYPE:NUMBER\n"
            '  fix   write "CPU:0", "GPU:3" or "/job:worker/replica:0/task:1/device:TPU:0"'
        ),
    ),
    "numbers for devices": (
        lambda: Mesh([0, 1], "x=2"),  # type: ignore[list-item]
        (
            "device 0 is not a name\n"
            "  mesh  x=2\n"
            "  why   it is of type int; a mesh holds the names of devices, such as CPU:0\n"
            '  fix   pass names, as in ["CPU:0", "CPU:1"], or None for an abstract mesh'
        ),
    ),
    "one text for devices": (
        lambda: Mesh("CPU:0", "x=1"),
        (
            "mesh devices 'CPU:0' cannot be read\n"
            "  why   a mesh has one name for each device\n"
            "  fix   write a list: ['CPU:0']"
        ),
    ),
    "a device with a comma": (
        lambda: Mesh(["/job:a,b/device:CPU:0"], "x=1"),
        (
            "device '/job:a,b/device:CPU:0' has a comma, a bar or a blank\n"
            "  mesh     x=1\n"
            "  devices  /job:a,b/device:CPU:0\n"
            "  why      they separate the fields of a mesh's text form\n"
            "  fix      name it '/job:a_b/device:CPU:0'"
        ),
    ),
    "a mesh name with a blank": (
        lambda: Mesh(None, "x=2", "my mesh"),
        (
            "mesh name 'my mesh' has a bar or a blank\n"
            "  why   they separate the fields of a mesh's text form\n"
            "  fix   name it 'my_mesh'"
        ),
    ),
    "a mesh name that is not text": (
        lambda: Mesh(None, "x=2", None),  # type: ignore[arg-type]
        'mesh name None is not text\n  why   it is None\n  fix   leave it out, or pass ""',
    ),
    "local ids out of range": (
        lambda: Mesh(None, "x=2", local_device_ids=[1, 2]),
        (
            "local device ids 1, 2 do not fit the mesh\n"
            "  mesh  x=2\n"
            "  why   they are positions in the mesh, 0 to 1, each once and in ascending order\n"
            "  fix   list the positions of this process's devices in ascending order, or leave the argument out"
        ),
    ),
    "a local device without a name": (
        lambda: Mesh(["CPU:0", ""], "x=2", local_device_ids=[0, 1]),
        (
            "the local device at position 1 of the mesh has no name\n"
            "  mesh  x=2\n"
            "  why   only the devices of other processes may be unknown\n"
            "  fix   name the device, or remove its position from local_device_ids"
        ),
    ),
    "an unknown dim": (
        lambda: Mesh(None, "batch=2,model=4")["modle"],
        (
            "mesh dim 'modle' does not exist\n"
            "  mesh  batch=2, model=4\n"
            "  why   the mesh has no dim of that name\n"
            "  fix   use one of 'batch', 'model'"
        ),
    ),
    "a dim of a mesh without dims": (
        lambda: Mesh(None, "").dim_size("x"),
        (
            "mesh dim 'x' does not exist\n"
            "  mesh  no dims\n"
            "  why   the mesh has no dim of that name\n"
            "  fix   make the mesh with it, as in Mesh(None, [('x', 1)])"
        ),
    ),
    "a device that is not there": (
        lambda: Mesh(None, "x=2").coords(-1),
        (
            "device index -1 is outside the mesh\n"
            "  mesh  x=2\n"
            "  why   the mesh has 2 devices\n"
            "  fix   use an index from 0 to 1"
        ),
    ),
    "two open sizes": (
        lambda: replace_unknown_size(parse_mesh_dims("x=-1,y=-1"), 8),
        (
            "mesh dims x, y all have size -1\n"
            "  why   the number of devices determines only one unknown size\n"
            "  fix   write the sizes of all dims but one"
        ),
    ),
    "an open size that does not divide": (
        lambda: replace_unknown_size(parse_mesh_dims("x=-1,y=3"), 8),
        (
            "the size -1 of mesh dim 'x' cannot be determined\n"
            "  mesh     x=-1, y=3\n"
            "  devices  8\n"
            "  why      8 devices are not a multiple of 3\n"
            "  fix      change the other sizes, or pass devices="
        ),
    ),
}


@pytest.mark.parametrize("mistake", BAD_MESHES)
def test_a_mesh_that_cannot_be_is_refused_with_the_fix(mistake: str):
    """Every mistake has its whole message: what, where, why and the fix."""
    make, message = BAD_MESHES[mistake]

    with pytest.raises(MeshError) as raised:
        make()

    assert message == str(raised.value)


@given(st.integers(1, 8), st.integers(1, 8))
def test_an_open_size_takes_what_the_devices_leave(known: int, open_size: int):
    """One size of -1 is the number of devices divided by the other sizes."""
    dims = replace_unknown_size(parse_mesh_dims([("x", known), ("y", -1)]), known * open_size)

    assert (("x", known), ("y", open_size)) == tuple((dim.name, dim.size) for dim in dims)
