"""Provide the functions that lower packages use, through `layoutmap.plan.carried_cost`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from layoutmap.core.mesh import Mesh
from layoutmap.core.text_table import format_bytes
from layoutmap.cost.cost import Cost, format_duration
from layoutmap.cost.json import make_cost_fields, read_cost_fields
from layoutmap.cost.lint import CHECKS
from layoutmap.cost.plan_cost import add_cost, request_cost
from layoutmap.plan.lint.weights import Linted
from layoutmap.plan.problems import Problem

__all__ = [
    "add_cost",
    "explain_step",
    "lint",
    "list_figures",
    "make_json_fields",
    "make_page_fields",
    "read_cost",
    "request_cost",
]


def explain_step(*args: Any) -> object:
    """Explain a compiled step of JAX. See `layoutmap.cost.jax.explained_step.explain_step`."""
    return import_module("layoutmap.cost.jax.explained_step").explain_step(*args)


def lint(linted: Linted) -> Iterator[Problem]:
    """Yield the problems that the cost of a plan's step shows."""
    cost = linted.plan.cost
    assert isinstance(cost, Cost)
    for check in CHECKS if linted.batch_dim is not None else ():
        yield from check(cost, linted)


def read_cost(data: dict[str, Any], rows: list[Any], mesh: Mesh) -> Cost:
    """Read the cost of a step from a plan's file: its object, and the rows of its collectives."""
    step, machine, batch_dim, tried, untried = read_cost_fields(data, rows, mesh)
    return Cost(step, machine, batch_dim=batch_dim, tried=tried, untried=untried)


def make_json_fields(cost: Cost) -> tuple[Iterator[list[Any]], dict[str, Any]]:
    """Return the cost for a plan's file: one row per collective, and all other fields."""
    return make_cost_fields(cost.step, cost.machine, cost.batch_dim, cost.tried, cost.untried)


def list_figures(cost: Cost) -> dict[str, str]:
    """Return a cost's figures as texts by name, for comparing two plans."""
    sent: dict[str, list[float]] = {}
    for c in cost.step.collectives:
        reason = "weights" if cost.is_overlapped(c) else "activations"
        sums = sent.setdefault(f"{c.kind.replace('_', '-')} of {reason} over {', '.join(c.dims)}", [0, 0])
        sums[0] += c.count_sent_bytes(cost.step.mesh)
        sums[1] += cost.time_collective(c)
    return {
        "machine": str(cost.machine),
        "time of a step": format_duration(cost.step_seconds),
        **{wait.what: format_duration(wait.seconds) for wait in cost.time_parts},
        "sent": format_bytes(cost.step.sent_bytes),
        **{
            what: f"{format_bytes(num_bytes)}, {format_duration(seconds)}"
            for what, (num_bytes, seconds) in sent.items()
        },
        "memory at the peak": format_bytes(cost.step.peak_bytes),
    }


def make_page_fields(
    cost: Cost, resident_bytes: int, find_variable: Callable[[str], int | None]
) -> dict[str, object]:
    """Return the cost's fields for the HTML page of a plan.

    `resident_bytes` are those of weights, slots, and state on a device. `find_variable` returns the number of the first
    variable of a cause, or None for a layer.
    """
    return {
        "machine": str(cost.machine),
        "about": cost.machine.device.about,
        # Gradients exist for a part of the step only, so the page shows them on top of resident memory.
        "beside": max(0, cost.step.peak_bytes - resident_bytes),
        "parts": [
            [wait.what, wait.seconds, format_duration(wait.seconds), wait.kind] for wait in cost.time_parts
        ],
        "step": format_duration(cost.step_seconds),
        "serial": format_duration(cost.serial_seconds),
        "rows": [[*row.cells, row.is_overlapped, find_variable(row.first.cause)] for row in cost.rows],
        "networks": list(cost.networks.items()),
        "counts": cost.counts,
        "assumptions": cost.assumptions,
    }
