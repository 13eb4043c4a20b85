"""`lm.inspect(..., across=True)` and a guard in two processes of JAX, with four devices each."""

from pathlib import Path

import pytest
from cases import xla_settings
from engines import several_processes

PROCESSES = ("jax",)

WORKER = Path(__file__).with_name("inspecting_jax_process.py")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What both processes tell alike."""
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(
        WORKER, tmp_path_factory.mktemp("told"), [xla_settings(4)] * 2, f"127.0.0.1:{port}"
    )
    (first, _), (second, _) = results
    assert first == second
    return first


def test_replicas_that_drift_apart_between_processes_are_named(told):
    """One value on one device of process 1: of replicated arrays the device is named; what is there once is right."""
    errors = [[subject, facts] for _, severity, subject, facts in told["drifted"] if severity == "error"]
    names, _ = told["devices"]
    whole = {tuple(facts.values()) for subject, facts in errors if subject == "whole"}

    assert [] == told["alike"] == told["alone"]
    assert ["columns", "whole"] == [subject for subject, _ in errors]
    assert {("all of it", ", ".join(n for n in names if n != names[5]), names[5])} == whole
    assert ["model=1", names[1], names[5]] == list(dict(errors)["columns"].values())


def test_both_processes_are_told_by_a_guard(told):
    """At the next step that is looked at."""
    assert [2, ["columns", "whole"]] == told["guarded"]


def test_processes_with_other_models_are_told(told):
    """What one of them does not have is named in both."""
    assert ["more"] == [subject for kind, _, subject, _ in told["other"] if kind == "differs"]
