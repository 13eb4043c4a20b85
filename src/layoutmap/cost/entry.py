"""The one module of this package that the packages below it use, through `layoutmap.plan.carried_cost`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from layoutmap.core.mesh import Mesh
from layoutmap.core.text_table import format_bytes
from layoutmap.cost.cost import Cost, duration
from layoutmap.cost.json import cost_fields, read_cost_fields
from layoutmap.cost.lint import CHECKS
from layoutmap.cost.plan_cost import add_cost, request_cost
from layoutmap.plan.lint.weights import Linted
from layoutmap.plan.problems import Problem

__all__ = ["add_cost", "figures", "json_fields", "lint", "page_fields", "read_cost", "request_cost"]


def lint(linted: Linted) -> Iterator[Problem]:
    """Yield the problems that the cost of a plan's step shows."""
    cost = linted.plan.cost
    assert isinstance(cost, Cost)
    for check in CHECKS:
        yield from check(cost, linted)


def read_cost(data: dict[str, Any], rows: list[Any], mesh: Mesh) -> Cost:
    """Read the cost of a step from a plan's file: its object, and the rows of its collectives.

    Raises:
        PlanError: A field is missing, wrong or not known.
    """
    step, machine, batch_dim, tried, untried = read_cost_fields(data, rows, mesh)
    return Cost(step, machine, batch_dim=batch_dim, tried=tried, untried=untried)


def json_fields(cost: Cost) -> tuple[Iterator[list[Any]], dict[str, Any]]:
    """Return the fields of a plan's file for a cost: a row for each collective, and all else."""
    return cost_fields(cost.step, cost.machine, cost.batch_dim, cost.tried, cost.untried)


def figures(cost: Cost) -> dict[str, str]:
    """Return the figures of a cost by name, as the difference of two plans compares them."""
    sent: dict[str, list[float]] = {}
    for c in cost.step.collectives:
        reason = "weights" if cost.overlaps(c) else "activations"
        sums = sent.setdefault(f"{c.kind.replace('_', '-')} of {reason} over {', '.join(c.dims)}", [0, 0])
        sums[0] += c.sent_bytes(cost.step.mesh)
        sums[1] += cost.seconds_of(c)
    return {
        "machine": str(cost.machine),
        "time of a step": duration(cost.step_seconds),
        **{wait.what: duration(wait.seconds) for wait in cost.waits},
        "sent": format_bytes(cost.step.sent_bytes),
        **{
            what: f"{format_bytes(num_bytes)}, {duration(seconds)}"
            for what, (num_bytes, seconds) in sent.items()
        },
        "memory at the peak": format_bytes(cost.step.peak_bytes),
    }


def page_fields(
    cost: Cost, resident_bytes: int, find_variable: Callable[[str], int | None]
) -> dict[str, object]:
    """Return a cost as the page of a plan shows it.

    Args:
        cost: The cost.
        resident_bytes: Bytes of weights, slots and state on a device.
        find_variable: Returns the number of the first variable that a cause stands for, `None` for a layer.
    """
    return {
        "machine": str(cost.machine),
        "about": cost.machine.device.about,
        # Gradients live for a part of the step, so the page counts them among what comes on top of the rest.
        "beside": max(0, cost.step.peak_bytes - resident_bytes),
        "parts": [[wait.what, wait.seconds, duration(wait.seconds), wait.kind] for wait in cost.waits],
        "step": duration(cost.step_seconds),
        "serial": duration(cost.serial_seconds),
        "rows": [[*row.cells, row.overlaps, find_variable(row.first.cause)] for row in cost.rows],
        "networks": list(cost.networks.items()),
        "counts": cost.counts,
        "assumptions": cost.assumptions,
    }
