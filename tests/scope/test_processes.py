"""What the processes of one program must do alike; here each is a thread, and they gather over a barrier."""

import numpy as np
import pytest
from threads_as_processes import everywhere

import layoutmap as lm
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.variables import VariableSpec
from layoutmap.engines.agreement import check_same_batch, check_same_values
from layoutmap.plan.problems import Problem
from layoutmap.scope.plan import make_plan
from layoutmap.scope.process_group import check_same_initializers, check_same_options, check_same_plans


def plan_of(specs, devices=None):
    layout_map = lm.LayoutMap(lm.Mesh(devices, "x=2"), {"kernel": specs})
    return make_plan([VariableSpec("kernel", (4, 2), "float32")], layout_map)


def test_plans_are_compared_by_what_they_place():
    """Equal plans pass; in another one the variable that differs is named, in all processes."""
    assert [None] * 2 == everywhere(2, lambda i, gather: check_same_plans(plan_of(("x", None)), gather))
    errors = everywhere(
        3, lambda i, gather: check_same_plans(plan_of(("x", None) if i < 2 else (None, "x")), gather)
    )

    assert 1 == len({str(error) for error in errors})
    assert isinstance(errors[0], lm.PlanError)
    assert "process 2 has a different plan from process 0" == errors[0].what
    assert "kernel  layout  (x, unsharded) -> (unsharded, x)" in str(errors[0])


def test_meshes_are_compared_by_their_devices():
    """The same layouts on devices in another order are another plan, and the orders are reported."""
    orders = [["CPU:0", "CPU:1"], ["CPU:1", "CPU:0"]]
    errors = everywhere(2, lambda i, gather: check_same_plans(plan_of(("x", None), orders[i]), gather))

    assert "CPU:0, CPU:1\nCPU:1, CPU:0" == errors[0].facts["from process 0 to 1"]


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool"])
def test_values_are_compared_bit_for_bit(dtype):
    """Values that differ are named, in all processes, also where one of them has a value more."""
    values = [
        [
            ("same", compute_checksum(np.zeros((), dtype))),
            ("other", compute_checksum(np.full((2, 3), i, dtype))),
        ]
        for i in range(2)
    ]
    errors = everywhere(2, lambda i, gather: check_same_values(values[i], gather))
    more = everywhere(2, lambda i, gather: check_same_values(values[0] if i else values[0][1:], gather))

    assert ["other: its values differ between processes"] * 2 == [error.what for error in errors]
    assert ["same: its values differ between processes"] * 2 == [error.what for error in more]
    assert [None] * 2 == everywhere(2, lambda i, gather: check_same_values([("same", 1)], gather))
    assert [None] * 2 == everywhere(2, lambda i, gather: check_same_values([], gather))


def test_recipes_are_compared_by_their_text():
    """Of the first variable with another recipe the line that differs is reported, shortened, or that there is none."""
    recipes = [[("a", "same"), ("b", f"same\n{'x' * 300} {i}")] for i in range(2)]
    errors = everywhere(2, lambda i, gather: check_same_initializers(recipes[i], gather))
    fewer = everywhere(2, lambda i, gather: check_same_initializers(recipes[0][: 2 - i], gather))

    assert ["b: the processes initialize it in different ways"] * 2 == [error.what for error in errors]
    lines = [str(line) for line in errors[0].facts.values()]
    assert [True, True] == [line.startswith("x" * 200 + "... checksum ") for line in lines]
    assert 2 == len(set(lines))
    assert [{"process 0": "same", "process 1": "nothing"}] * 2 == [error.facts for error in fewer]
    assert [None] * 2 == everywhere(2, lambda i, gather: check_same_initializers(recipes[0], gather))
    unknown = everywhere(2, lambda i, gather: check_same_initializers([("a", "")] * i, gather))
    assert [{"process 0": "nothing", "process 1": "nothing more"}] * 2 == [error.facts for error in unknown]


def test_options_are_compared():
    """Options that differ are an error in all processes, with those of each."""
    errors = everywhere(2, lambda i, gather: check_same_options(f"batch_dim={'ab'[i]!r}", gather))

    assert {"process 0": "batch_dim='a'", "process 1": "batch_dim='b'"} == errors[0].facts
    assert str(errors[0]) == str(errors[1])
    assert [None] * 2 == everywhere(2, lambda i, gather: check_same_options("strict=True", gather))


def test_batches_are_compared():
    """Rows, shapes or types that differ are an error in all processes, with what each brings."""
    for others in (np.ones(3, np.float32), np.zeros((1, 3), np.float32), np.zeros(3, np.int32)):
        arrays = [np.zeros(3, np.float32), others]
        errors = everywhere(2, lambda i, gather, arrays=arrays: check_same_batch([arrays[i]], gather))

        assert ["the processes pass different batches"] * 2 == [error.what for error in errors]
    assert [None] * 2 == everywhere(2, lambda i, gather: check_same_batch([np.zeros(3)], gather))


def test_all_processes_refuse_a_plan_or_none():
    """Where only one process finds a problem in the plan that all have, all are reported."""
    problem = Problem("unused", "warning", "none", "rule 2  none: matches no variable")
    plans = [plan_of(("x", None)), plan_of(("x", None)).add_problem(problem)]
    errors = everywhere(2, lambda i, gather: check_same_plans(plans[i], gather, strict=True))

    assert [{"process 0": "no problem", "process 1": problem.what}] * 2 == [error.facts for error in errors]
    assert [None] * 2 == everywhere(2, lambda i, gather: check_same_plans(plans[i], gather))
