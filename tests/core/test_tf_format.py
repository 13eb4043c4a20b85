"""The text and protobuf forms: what they look like, and what is refused. TensorFlow need not be there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given

from layoutmap.core.errors import LayoutError, LayoutMapError, MeshError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.proto import layout_pb2
from layoutmap.testing import strategies

MESH = Mesh(["CPU:0", "CPU:1"], "x=2", "m")
FULL = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(2)]
MESH_TEXT = f"m|x=2|0,1|0,1|{FULL[0]},{FULL[1]}"
SHORT_TEXT = "m|x=2|0,1|0,1|CPU:0,CPU:1"


def test_the_protobuf_module_loads_without_a_warning():
    """The generated code fits the protobuf that is installed: no warning, which would be an error here."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", "from layoutmap.core.proto import layout_pb2"],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"},
    )

    assert (0, "") == (run.returncode, run.stderr)


def test_without_protobuf_the_text_form_works_and_the_other_names_the_extra():
    """Neither the package nor a layout's text needs protobuf; its message says what to install."""
    program = """
import sys
sys.modules["google.protobuf"] = None
import layoutmap as lm
layout = lm.Layout([None, "x"], lm.create_mesh("x=2", devices=["CPU:0", "CPU:1"]))
assert layout == lm.Layout.from_string(layout.to_string())
try:
    layout.as_proto()
except lm.LayoutMapError as error:
    print(error.fix)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert run.stdout.startswith('pip install "layoutmap[proto]"'), run.stderr


def test_the_forms_of_a_mesh():
    """A mesh's text has the fields that TensorFlow's has; an abstract one has the first two, and no device ids."""
    local = Mesh(["CPU:0", "CPU:1"], "x=2", local_device_ids=[1])

    assert MESH_TEXT == MESH.to_string()
    assert f"|x=2|0,1|1|{FULL[1]}|{FULL[0]},{FULL[1]}" == local.to_string()
    assert "|x=2,y=3" == Mesh(None, "x=2,y=3").to_string()
    assert "|" == Mesh(None, "").to_string()
    devices = b"".join(b"*%c%s" % (len(name), name.encode()) for name in FULL)
    fields = b'\n\x05\n\x01x\x10\x02\x12\x02\x00\x01\x1a\x01m"\x02\x00\x01'
    assert fields + devices == MESH.as_proto().SerializeToString()
    assert b"\n\x05\n\x01x\x10\x02" == Mesh(None, "x=2").as_proto().SerializeToString()


def test_short_and_full_device_names_are_read():
    """A text or message with short names, as older releases wrote, gives the mesh that one with full names gives."""
    short = MESH.as_proto()
    short.local_devices[:] = ["CPU:0", "CPU:1"]

    assert MESH == Mesh(FULL, "x=2", "m") == Mesh.from_string(MESH_TEXT)
    assert MESH == Mesh.from_string(SHORT_TEXT) == Mesh.from_proto(short)
    assert ("CPU:0", "CPU:1") == Mesh(FULL, "x=2").devices


def test_the_forms_of_a_layout():
    """A layout's text has a comma after every spec; an axis over several dims is `x:y`, major to minor."""
    mesh = Mesh(None, "x=2,y=3")

    assert f"sharding_specs:x,unsharded, mesh:{MESH_TEXT}" == Layout(["x", None], MESH).to_string()
    assert "sharding_specs: mesh:|x=2,y=3" == Layout([], mesh).to_string()
    assert "sharding_specs:y:x,unsharded, mesh:|x=2,y=3" == Layout([("y", "x"), None], mesh).to_string()
    assert b"\n\x05\x12\x03y:x\x12\x0e\n\x05\n\x01x\x10\x02\n\x05\n\x01y\x10\x03\x18\x01" == (
        Layout([("y", "x")], mesh).serialized_string()
    )


@given(strategies.layouts())
def test_the_bytes_of_a_layout_are_those_of_its_message(layout: Layout):
    """`serialized_string` is `as_proto` in bytes, the same each time, and `mesh_proto` is the mesh's message."""
    assert layout.as_proto().SerializeToString(deterministic=True) == layout.serialized_string()
    assert layout.serialized_string() == layout.serialized_string()
    assert layout.mesh.as_proto() == layout.mesh_proto()


MESH_FORM = "write NAME|x=4,y=2|ids|local ids|devices, as Mesh.to_string() does"
LAYOUT_FORM = "write sharding_specs:x,unsharded, mesh:<mesh>, as Layout.to_string() does"

BAD_MESH_TEXTS = {
    "": "bars split it into 1 fields, and a mesh has 2, 5 or 6",
    "x=2": "bars split it into 1 fields, and a mesh has 2, 5 or 6",
    "m|x=2|0,1": "bars split it into 3 fields, and a mesh has 2, 5 or 6",
    "m|x|0,1|0,1|CPU:0,CPU:1": "'x' is not name=size",
    "m|x=two": "'two' is not an integer",
    "m|x= 2": "' 2' is not an integer",
    "m|x=2|0,one|0,1|CPU:0,CPU:1": "'one' is not an integer",
}


@pytest.mark.parametrize("text", BAD_MESH_TEXTS)
def test_a_text_that_is_no_mesh_is_refused(text: str):
    """The message shows the text, what is wrong with it, and the form it should have."""
    with pytest.raises(MeshError) as raised:
        Mesh.from_string(text)

    assert f"mesh text {text!r} cannot be read\n  why   {BAD_MESH_TEXTS[text]}\n  fix   {MESH_FORM}" == str(
        raised.value
    )


BAD_LAYOUT_TEXTS = {
    "": "it does not start with 'sharding_specs:'",
    "x,unsharded": "it does not start with 'sharding_specs:'",
    f"parted:x, mesh:{SHORT_TEXT}": "it does not start with 'sharding_specs:'",
    f"maximal:true, mesh:{SHORT_TEXT}": "it does not start with 'sharding_specs:'",
    "sharding_specs:x,": "it has no ' mesh:'",
    f"sharding_specs:x,mesh:{SHORT_TEXT}": "it has no ' mesh:'",
    f"sharding_specs:unsharded,x mesh:{SHORT_TEXT}": "each spec is followed by a comma, the last one too",
}


@pytest.mark.parametrize("text", BAD_LAYOUT_TEXTS)
def test_a_text_that_is_no_layout_is_refused(text: str):
    """The message shows the text, what is wrong with it, and the form it should have."""
    with pytest.raises(LayoutError) as raised:
        Layout.from_string(text)

    assert (
        f"layout text {text!r} cannot be read\n  why   {BAD_LAYOUT_TEXTS[text]}\n  fix   {LAYOUT_FORM}"
        == str(raised.value)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "|x=2|1,2|0,1|CPU:0,CPU:1",
            """\
global device ids [1, 2] are not 0 to 1 in order
  why   device i of a mesh has the id i
  fix   number the devices from 0 in mesh order""",
        ),
        (
            "|x=2|0,1|0,1|CPU:0",
            f"""\
local device ids and local devices differ in number: 2 and 1
  why   each local id has one device
  fix   {MESH_FORM}""",
        ),
        (
            "|x=2|0,1|0,2|CPU:0,CPU:1",
            """\
local device ids [0, 2] are outside the mesh
  why   they are positions in the mesh, and it has 2 devices
  fix   use ids from 0 to 1""",
        ),
        (
            "|x=2|0,1|1|CPU:7|CPU:0,CPU:1",
            f"""\
local device 1 is 'CPU:7', but the list of all devices has 'CPU:1' there
  why   the list of all devices contains the devices of this process at their ids
  fix   {MESH_FORM}""",
        ),
    ],
)
def test_a_mesh_text_that_contradicts_itself_is_refused(text: str, message: str):
    """Ids and devices that do not fit each other are an error, not a guess."""
    with pytest.raises(MeshError) as raised:
        Mesh.from_string(text)

    assert message == str(raised.value)


BAD_LAYOUT_MESSAGES = {
    "a number": (
        lambda: 7,
        """\
7 is not a LayoutProto
  why   it is of type int
  fix   pass the message of as_proto(), or its bytes""",
    ),
    "text": (
        lambda: "sharding_specs:",
        """\
'sharding_specs:' is not a LayoutProto
  why   it is of type str
  fix   pass the message of as_proto(), or its bytes""",
    ),
    "the message of a mesh": (
        lambda: Mesh(None, "x=2").as_proto(),
        """\
mesh_dimensions { name: "x" size: 2 } is not a LayoutProto
  why   it is a MeshProto message
  fix   pass the message of as_proto(), or its bytes""",
    ),
    "nothing": (
        lambda: b"",
        """\
the LayoutProto has no mesh
  why   it is empty
  fix   pass the message of as_proto(), or its bytes""",
    ),
    "a layout without a mesh": (
        lambda: layout_pb2.LayoutProto(sharding_specs=[layout_pb2.ShardingSpec(sharding_spec="x")]),
        """\
the LayoutProto has no mesh
  why   its mesh_config is not set
  fix   pass the message of as_proto(), or its bytes""",
    ),
    "a parted layout": (
        lambda: layout_pb2.LayoutProto(type="PARTED", mesh_config=MESH.as_proto()),
        """\
the LayoutProto is of type PARTED
  why   only static layouts are supported: each axis sharded over named mesh dims or replicated
  fix   use Layout(sharding_specs, mesh)""",
    ),
    "a type of the future": (
        lambda: b"\x12\x00\x18\x07",
        """\
the LayoutProto is of type 7
  why   only static layouts are supported: each axis sharded over named mesh dims or replicated
  fix   use Layout(sharding_specs, mesh)""",
    ),
}


@pytest.mark.parametrize("mistake", BAD_LAYOUT_MESSAGES)
def test_a_message_that_is_no_layout_is_refused(mistake: str):
    """What is not a layout is refused by what it is, where protobuf would read nonsense out of it."""
    make, message = BAD_LAYOUT_MESSAGES[mistake]

    with pytest.raises(LayoutError) as raised:
        Layout.from_proto(make())

    assert message == str(raised.value)


@pytest.mark.parametrize("field", [{"use_xla_spmd": True}, {"single_device": "CPU:0"}])
def test_a_mesh_message_of_another_kind_is_refused(field):
    """A mesh that is no grid of named dims is refused by the field that says so."""
    with pytest.raises(MeshError) as raised:
        Mesh.from_proto(layout_pb2.MeshProto(**field))

    (name,) = field
    assert f"""\
the MeshProto has {name} set
  why   only meshes of named dims are supported
  fix   make the mesh from dims and devices""" == str(raised.value)


HOSTILE_MESHES = {
    "digits": f"|x={'9' * 5000}",
    "a product of digits": "|" + ",".join(f"x{i}=999999999999999999" for i in range(400)) + "|0|0|CPU:0",
    "digits of another script": "|x=٢",
    "an id of digits": f"|x=1|{'0' * 5000}|0|CPU:0",
    "half a surrogate pair in a dim": "|\ud800=2",
    "half a surrogate pair in the name": "\udc00|x=2",
    "half a surrogate pair in a device": "|x=1|0|0|CPU\ud800:0",
    "no types": "|x=1|0|0|" + "a" * 5000,
}


@pytest.mark.parametrize("text", HOSTILE_MESHES.values(), ids=HOSTILE_MESHES)
def test_a_hostile_text_is_refused_in_a_short_message(text: str):
    """Numbers of any length and what no encoding can write: the error can be written, and does not repeat the input."""
    for read, whole in ((Mesh.from_string, text), (Layout.from_string, f"sharding_specs: mesh:{text}")):
        with pytest.raises(LayoutMapError) as caught:
            read(whole)
        assert str(caught.value).encode()
        assert caught.value.why


def test_a_hostile_message_is_refused():
    """Sizes whose product has more digits than Python writes are reported, as is a size that is none."""
    for size in (2**63 - 1, -(2**63), 0):
        dims = [layout_pb2.MeshDimensionProto(name=f"x{i}", size=size) for i in range(400)]
        for ids in ([], [0]):
            with pytest.raises(MeshError):
                Mesh.from_proto(layout_pb2.MeshProto(mesh_dimensions=dims, global_device_ids=ids))


@pytest.mark.parametrize("size", [10**5000, -(10**5000), 2**64], ids=["long", "negative", "64 bits"])
def test_a_size_of_any_length_is_refused(size: int):
    """Python refuses to write a number of more than 4,300 digits, so no message may try."""
    for dims in ({"x": size}, [("x", size)], [("x", 2), ("y", size)]):
        with pytest.raises(MeshError):
            Mesh(None, dims)
