"""Measured speeds are read back as the machine that they were measured on, and a slow collective is named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.core.mesh import Mesh
from layoutmap.cost.machine import Machine
from layoutmap.cost.machines import load_built_in_devices, machine_named, parse_devices, resolve_machine
from layoutmap.testing.laws import Outcome
from layoutmap.testing.products import format_product_precision
from layoutmap.testing.schedule import LawResult
from layoutmap.testing.selftest.speeds import MeasuredSpeeds
from layoutmap.testing.speeds import MEASURED_COLLECTIVES

SWITCHED = [name for name, device in load_built_in_devices().items() if not device.fast.ring_from]


def measured(machine, dims, slower=None):
    """What would be measured on a machine that is as fast as its file says, but for one collective."""
    mesh = Mesh(None, dims)
    figures = [
        {
            "kind": kind,
            "mesh": dims,
            "dim": dim.name,
            "bytes": 2**28,
            "seconds": machine.estimate_seconds(kind, 2**28, machine.group(mesh, [dim.name]))
            * (4 if (kind, dim.name) == slower else 1),
        }
        for dim in mesh.mesh_dims
        for kind in MEASURED_COLLECTIVES
        if dim.size > 1
    ]
    device = machine.device
    figures += [{"dtype": dtype, "flops": number} for dtype, number in device.flops.items()]
    figures += [{"memory_bandwidth": device.memory_bandwidth}, {"memory": device.memory_bytes}]
    outcome = Outcome("speeds are measured", "held", "", 1.0, figures)
    return [LawResult("speeds-jax", 1, outcome)]


@given(st.sampled_from(SWITCHED), st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 4, 8]))
def test_a_machine_file_has_the_machine_that_was_measured(name, hosts, near):
    """From the seconds of collectives on a machine follow its bandwidths, inside of hosts and between them."""
    machine = Machine(load_built_in_devices()[name], hosts * 8)
    dims = f"far={hosts},near={near},x={8 // near}"
    speeds = MeasuredSpeeds("jax", 8, measured(machine, dims))
    text = speeds.to_machine_file("a test")
    written = parse_devices(text, "mine.yaml")["here"]

    assert machine.device.fast.bandwidth == pytest.approx(written.fast.bandwidth)
    if hosts > 1:
        assert machine.device.slow.bandwidth == pytest.approx(written.slow.bandwidth)
    else:
        assert "between hosts (not measured)" == written.slow.name
    assert machine.device.flops == pytest.approx(written.flops)
    assert (machine.device.memory_bytes, 8) == (written.memory_bytes, written.node_size)


def test_a_file_with_one_device_needs_no_name(tmp_path):
    """`on=` is a file with one device, without its name; of a file with two it asks which one."""
    path = tmp_path / "mine.yaml"
    text = MeasuredSpeeds("jax", 8, measured(machine_named("h100:8"), "x=2,model=4")).to_machine_file(
        "a test"
    )
    path.write_text(text)

    assert "here:8" == str(resolve_machine(str(path), Mesh(None, "x=2,model=4")))
    path.write_text(f"{text}  there:{text.partition('here:')[2]}")
    with pytest.raises(lm.LayoutMapError, match="the name does not say which device of the file") as caught:
        machine_named(str(path))

    assert "describes several devices" in caught.value.why
    assert caught.value.fix.startswith("name one of them, as in on=")


@pytest.mark.parametrize("slower", [None, *((kind, "model") for kind in MEASURED_COLLECTIVES)], ids=str)
def test_a_collective_below_the_machine_file_is_named(slower):
    """One that takes four times as long as the file says fails the law, by name, with both figures."""
    machine = machine_named("h100:16")
    speeds = MeasuredSpeeds("jax", 8, measured(machine, "data=2,model=8", slower), machine.device)
    outcome = speeds.run_collectives_law().outcome

    assert ("held" if slower is None else "wrong") == outcome.what
    if slower is not None:
        kind = slower[0].replace("_", "-")
        assert f"{kind} over model of data=2,model=8: 112 GB/s, and h100 has 450 GB/s" in outcome.why
    assert ["jax", "all-gather of 256.0 MiB", "data of data=2,model=8, 2 hosts", "50 GB/s", "50 GB/s"] in (
        speeds.make_table_rows()
    )


def test_nothing_to_compare_with():
    """Of one dim, without a machine file, the law has nothing to say; nor of an engine that was not measured."""
    alone = MeasuredSpeeds("jax", 8, measured(machine_named("h100:8"), "model=8"))
    none = [LawResult("speeds-tensorflow", 1, Outcome("speeds are measured", "not tried", "a compiler", 0.0))]

    assert ["not tried"] * 2 == [
        each.run_collectives_law().outcome.what for each in (alone, MeasuredSpeeds("tensorflow", 8, none))
    ]
    assert [["tensorflow", "not measured", "", "", ""]] == MeasuredSpeeds(
        "tensorflow", 8, none
    ).make_table_rows()


def test_devices_that_share_cores_are_not_judged():
    """Of simulated devices the figures are there, and no collective is called slow."""
    slow = measured(machine_named("h100:8"), "x=2,model=4", ("all_gather", "model"))
    machine = machine_named("h100:8").device

    assert "wrong" == MeasuredSpeeds("jax", 8, slow, machine).run_collectives_law().outcome.what
    assert (
        "not tried"
        == MeasuredSpeeds("jax", 8, slow, machine, share_cores=True).run_collectives_law().outcome.what
    )


def rounded(values, bits):
    """Values of float32 with fewer bits, as products in TF32 (10 of the fraction) and in bfloat16 (7) take them."""
    step = np.uint32(1 << (23 - bits))
    return ((values.view(np.uint32) + step // 2) & ~(step - np.uint32(1))).view(np.float32)


@pytest.mark.parametrize(("bits", "said"), [(23, "in float32"), (10, "in TF32"), (7, "in TF32 or bfloat16")])
def test_products_in_fewer_bits_are_noticed(bits, said):
    """The report says whether products of float32 are computed in float32, by comparing one with the exact one."""
    assert format_product_precision(lambda a, b: rounded(a, bits) @ rounded(b, bits)).startswith(said)
