"""Machines: figures with a source, networks that follow from the order of devices, and times by the formulas."""

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutmap.core.errors import LayoutMapError
from layoutmap.core.mesh import Mesh
from layoutmap.cost.machine import DeviceGroup
from layoutmap.cost.machines import load_built_in_devices, machine_named, parse_devices, resolve_machine

MINE = textwrap.dedent("""\
    version: 1
    devices:
      big:
        about: a device of ours
        memory: 48 GiB
        memory_bandwidth: 900 GB/s
        flops: {bfloat16: 180 TFLOP/s}
        fast: {name: NVLink, bandwidth: 100 GB/s, devices: 4}
        slow: {name: Ethernet, bandwidth: 12.5 GB/s}
    """)


def test_each_device_has_figures_and_a_source_for_them():
    """And each multiplies bfloat16 and float32 at a known rate."""
    for device in load_built_in_devices().values():
        assert device.sources
        assert {"bfloat16", "float32"} <= set(device.flops)
        assert device.slow.bandwidth < device.fast.bandwidth < device.memory_bandwidth


@pytest.mark.parametrize(
    ("mesh", "networks"),
    [
        ("data=8,model=8", {"data": "InfiniBand", "model": "NVLink"}),
        ("model=8,data=8", {"model": "InfiniBand", "data": "NVLink"}),
        ("data=64,model=1", {"data": "NVLink among 8, InfiniBand beyond", "model": "NVLink"}),
        ("data=16,model=4", {"data": "NVLink among 2, InfiniBand beyond", "model": "NVLink"}),
        (
            "pipe=2,data=2,model=16",
            {"pipe": "InfiniBand", "data": "InfiniBand", "model": "NVLink among 8, InfiniBand beyond"},
        ),
    ],
)
def test_the_order_of_devices_says_which_dim_runs_over_which_network(mesh, networks):
    """The last dim runs fastest, so its devices are neighbours."""
    mesh, machine = Mesh(None, mesh), machine_named("h100:64")

    assert networks == {dim: machine.network_text(machine.group(mesh, [dim])) for dim in mesh.dim_names}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_a_group_reaches_as_many_nodes_as_its_devices_are_in(sizes, data):
    """Counted over all devices of all groups, the group of most nodes decides."""
    mesh = Mesh(None, [(f"d{i}", n) for i, n in enumerate(sizes)])
    dims = data.draw(st.lists(st.sampled_from(mesh.dim_names), unique=True))
    groups = {}
    for number, coords in enumerate(mesh.unravel_index()):
        rest = tuple(at for name, at in coords.items() if name not in dims)
        groups.setdefault(rest, []).append(number // 8)

    found = machine_named("h100").group(mesh, dims)

    assert (len(groups[rest]), max(len(set(nodes)) for nodes in groups.values())) == (found.size, found.nodes)


H100, V5E = machine_named("h100:64"), machine_named("v5e:64")
GB = 10**9


@pytest.mark.parametrize(
    ("machine", "kind", "group", "seconds"),
    [
        # In a node: (n - 1) / n of it through each device's NVLink; an all-reduce does that twice.
        (H100, "all_gather", DeviceGroup(8, 1), 7 / 8 * GB / 450e9),
        (H100, "reduce_scatter", DeviceGroup(8, 1), 7 / 8 * GB / 450e9),
        (H100, "all_reduce", DeviceGroup(8, 1), 2 * 7 / 8 * GB / 450e9),
        # Between nodes: the network cards of all devices of a node send at the same time.
        (H100, "all_gather", DeviceGroup(64, 8), 7 / 8 * GB / 400e9),
        (H100, "all_gather", DeviceGroup(8, 8), 7 / 8 * GB / 50e9),
        (H100, "all_to_all", DeviceGroup(8, 1), 7 / 8 * GB / 450e9),
        (H100, "all_to_all", DeviceGroup(16, 2), 8 / 16 * GB / 50e9),
        (H100, "permute", DeviceGroup(8, 1), GB / 450e9),
        (H100, "permute", DeviceGroup(8, 8), GB / 50e9),
        (H100, "all_reduce", DeviceGroup(1, 1), 0.0),
        # A ring sends both ways, a line of less than 16 one way; an all-to-all a quarter of an all-gather of all.
        (V5E, "all_gather", DeviceGroup(16, 1), 15 / 16 * GB / 90e9),
        (V5E, "all_gather", DeviceGroup(8, 1), 7 / 8 * GB / 45e9),
        (V5E, "all_to_all", DeviceGroup(16, 1), 15 / 16 * 16 * GB / 90e9 / 4),
        (V5E, "permute", DeviceGroup(16, 1), GB / 45e9),
        (V5E, "permute", DeviceGroup(8, 1), GB / 45e9),
    ],
)
def test_the_time_of_a_collective_is_that_of_the_formula(machine, kind, group, seconds):
    """Those of "How to Scale Your Model", for a tensor of 1 GB on a device."""
    assert seconds == pytest.approx(machine.estimate_seconds(kind, GB, group), rel=1e-12)


def test_a_file_of_ones_own_describes_a_device(tmp_path):
    """Named with the file before it; its figures are read with their units."""
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    machine = machine_named(f"{path}:big:8")

    assert ("big:8", 48 * 2**30, 180e12, 4) == (
        str(machine),
        machine.device.memory_bytes,
        machine.device.get_flops_rate("bfloat16"),
        machine.device.node_size,
    )


def test_a_machine_without_a_number_has_the_devices_of_the_mesh():
    """And one with another number is refused, with both numbers and the fix."""
    mesh = Mesh(None, "data=4,model=8")

    assert 32 == resolve_machine("h100", mesh).num_devices
    for number in (16, 64):
        with pytest.raises(LayoutMapError) as caught:
            resolve_machine(f"h100:{number}", mesh)
        assert textwrap.dedent(f"""\
            on='h100:{number}': the machine has {number} devices, but the mesh has 32
              mesh  data=4, model=8
              why   each device of the machine is at one position of the mesh
              fix   use h100:32, or a mesh of {number} devices""") == str(caught.value)


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("h10:64", "there is no device 'h10'", "did you mean 'h100'?"),
        ("tpu-v5p:64", "there is no device 'tpu-v5p'", "did you mean 'v5p'?"),
        (
            "abacus:2",
            "there is no device 'abacus'",
            "describe the device in a file, as in on='mine.yaml:my_device:64'",
        ),
        ("h100:0", "does not name a machine", "write it as in h100:64"),
        ("h100:8:8", "does not name a machine", "write it as in h100:64"),
        ("", "does not name a machine", "write it as in h100:64"),
        ("nowhere.yaml:big:8", "nowhere.yaml cannot be read", "name a UTF-8 file that describes devices"),
    ],
)
def test_a_name_of_no_machine_is_refused(name, what, fix):
    """With what was probably meant."""
    with pytest.raises(LayoutMapError) as caught:
        machine_named(name)
    assert what in caught.value.what
    assert caught.value.fix.startswith(fix)
    assert caught.value.why


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory:", "memery:", "mine: big: key 'memery' is not known"),
        ("fast: {name", "fast: {nam", "mine: big.fast: key 'nam' is not known"),
        ("        memory: 48 GiB\n".removeprefix("    "), "", "mine: big: the key 'memory' is missing"),
        ("48 GiB", "48", "mine: big: memory is not a positive number with the unit B"),
        (
            "180 TFLOP/s",
            "180 TB/s",
            "mine: big.flops: bfloat16 is not a positive number with the unit FLOP/s",
        ),
        ("900 GB/s", "0 GB/s", "mine: big: memory_bandwidth is not a positive number with the unit B/s"),
        ("devices: 4", "devices: 0", "mine: big.fast: devices is not a number of devices"),
        ("{bfloat16: 180 TFLOP/s}", "{}", "mine: big: flops lists no element type"),
        ("version: 1", "version: 2", "mine: version 2 is not known"),
        ("about: a device of ours", "about: [1]", "mine: big: about is not text"),
        (MINE, "[]", "mine: the value is not a mapping"),
        (MINE, "a: [", "mine cannot be read"),
    ],
)
def test_a_file_that_says_something_else_is_refused(old, new, message):
    """With its place, why, and a fix."""
    assert old in MINE
    with pytest.raises(LayoutMapError) as caught:
        parse_devices(MINE.replace(old, new), "mine")
    assert message == caught.value.what
    assert caught.value.fix
