"""The cost of a step: its parts add up to its time, and its text says what travels, why, and what waits."""

import textwrap
from dataclasses import replace

import costs
import pytest
from costs import GIB, MIB

from layoutmap.core.mesh import Mesh
from layoutmap.cost.cost import OVERLAP, PEAK, format_duration
from layoutmap.cost.machines import machine_named
from layoutmap.cost.table import Collective

COST = costs.plan().cost
COMPUTING = 8e12 / 989e12
ACTIVATIONS = 8 * 2 * 7 / 8 * 256 * MIB / 450e9
GATHERED = 2 * 4096 * 14336 / 8
WEIGHTS = 6 * 7 / 8 * GATHERED / 50e9


def test_the_time_of_a_step_is_worked_out_of_its_parts():
    """Reading memory takes longer than computing, the weights' collectives overlap, the activations' do not."""
    memory = 30 * GIB / 3.35232e12

    assert COMPUTING == pytest.approx(COST.flops_seconds)
    assert memory == pytest.approx(COST.memory_seconds)
    assert memory + ACTIVATIONS == pytest.approx(COST.step_seconds)
    assert memory + WEIGHTS + ACTIVATIONS == pytest.approx(COST.serial_seconds)


@pytest.mark.parametrize("flops", [10**9, 10**13, 10**15])
@pytest.mark.parametrize("traffic", [0, 30 * GIB])
def test_what_a_step_waits_for_adds_up_to_its_time(flops, traffic):
    """Whatever takes longest."""
    cost = replace(COST, step=replace(COST.step, flops={"bfloat16": flops}, traffic_bytes=traffic))

    assert cost.step_seconds == pytest.approx(sum(wait.seconds for wait in cost.time_parts))


def test_a_type_without_a_figure_counts_as_the_slowest_and_that_is_said():
    """Rather than as nothing."""
    cost = replace(COST, step=replace(COST.step, flops={"complex64": 10**12}))

    assert 10**12 / 66.9e12 == pytest.approx(cost.flops_seconds)
    assert "h100 has no figure for complex64: that of float64 counts" in cost.assumptions


def test_the_same_collective_takes_longer_over_the_slower_network():
    """As the order of the mesh's dims has it."""
    swapped = Mesh(None, "model=8,data=8")
    there = replace(COST, step=replace(COST.step, mesh=swapped))

    assert {"data": "NVLink", "model": "InfiniBand"} == there.networks
    assert 9 * ACTIVATIONS == pytest.approx(there.activation_collective_seconds)
    assert WEIGHTS / 9 == pytest.approx(there.weight_collective_seconds)


def test_more_than_the_memory_does_not_fit():
    """The peak counts, activations among it."""
    large = replace(COST, step=replace(COST.step, peak_bytes=80 * GIB))

    assert COST.fits
    assert not large.fits
    assert "80.0 GiB of 79.1 GiB per device at the peak" in large.line
    assert large.on_memory(80 * GIB).fits


@pytest.mark.parametrize(
    ("plenty", "least", "peak"),
    [(50, 20, 50), (90, 20, 60.3), (90, 70, 70)],
    ids=["free", "bounded", "least"],
)
def test_a_peak_is_bounded_by_the_memory_that_the_compiler_may_use(plenty, least, peak):
    """What is only convenient to hold is held within 95 % of what arguments leave of 80 % of the memory."""
    step = replace(COST.step, argument_bytes=4 * GIB, peak_bytes=plenty * GIB, least_peak_bytes=least * GIB)

    assert peak == pytest.approx(replace(COST, step=step).step.peak_bytes / GIB, rel=1e-3)


def test_the_text_says_what_travels_why_and_what_waits():
    """The whole of it, as a reader sees it."""
    assert textwrap.dedent("""\
        Cost: 18.0 ms a step on h100:64; 30.0 GiB of 79.1 GiB per device at the peak (estimate)
        NVIDIA H100 SXM, 80 GB; no overlap at all: 19.5 ms

        of the step                           takes  share
        ----------------------------------  -------  -----
        computing                           8.09 ms   45 %
        waiting for its own memory          1.52 ms    8 %
        waiting for activations over model  8.35 ms   46 %

        collective      times  over   network        tensor      sent    takes  because of               phase
        --------------  -----  -----  ----------  ---------  --------  -------  -----------------------  --------
        all-reduce          8  model  NVLink      256.0 MiB   3.5 GiB  8.35 ms  blocks.{0..1}.up         forward
        all-gather          4  data   InfiniBand   14.0 MiB  49.0 MiB  1.03 ms  blocks.{0..1}.up.kernel  forward
        reduce-scatter      2  data   InfiniBand   14.0 MiB  24.5 MiB   514 us  blocks.{0..1}.up.kernel  backward

        each device computes 8 TFLOP in bfloat16, sends 3.6 GiB, and reads and writes 30.0 GiB
        it holds 4.0 GiB of weights, state, slots and batch, and at the peak 26.0 GiB beside them
        devices in the order of the mesh: data over InfiniBand, model over NVLink
        """) + f"assumed: {OVERLAP}\nassumed: {PEAK}" == str(COST)
    assert f"<Cost: {COST.line}>" == repr(COST)
    assert all(f">{cell}<" in COST.to_html() for row in COST.collective_rows for cell in row.cells)


def test_a_collective_of_no_known_cause_is_shown_with_a_question_mark():
    """And its time counts as that of activations."""
    unknown = Collective("all_to_all", ("data", "model"), 1, 8 * MIB)
    cost = replace(COST, step=replace(COST.step, collectives=(unknown,)))

    (row,) = cost.collective_rows
    cells = ("all-to-all", "1", "data, model", "NVLink among 8, InfiniBand beyond", "8.0 MiB")
    assert (*cells, size_sent(cost), format_duration(row.seconds), "?", "") == row.cells
    assert cost.step_seconds == cost.local_seconds + row.seconds


def size_sent(cost):
    return f"{cost.step.sent_bytes / MIB:.1f} MiB"


def test_a_step_of_one_device_sends_nothing():
    """There is no network in it, and no row."""
    one = Mesh(None, "data=1")
    cost = replace(COST, step=replace(COST.step, mesh=one, collectives=()), machine=machine_named("h100:1"))

    assert ({}, (), 0) == (cost.networks, cost.collective_rows, cost.step.sent_bytes)
    assert "sends 0 B" in str(cost)
