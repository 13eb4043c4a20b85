"""Provide the functions that plans and scopes call through `layoutmap.plan.carried_cost`, which loads this module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from layoutmap.core.mesh import Mesh
from layoutmap.core.text_table import format_bytes
from layoutmap.cost.cost import Cost, format_duration
from layoutmap.cost.json import make_cost_fields, read_cost_fields
from layoutmap.cost.lint import COST_CHECKS
from layoutmap.cost.plan_cost import make_cost_request, make_plan_with_step_cost
from layoutmap.plan.lint.linted_plan import LintedPlan
from layoutmap.plan.problems import Problem

__all__ = [
    "make_plan_with_step_cost",
    "explain_step",
    "find_cost_problems",
    "format_costs_by_name",
    "make_json_fields",
    "make_page_fields",
    "read_cost",
    "make_cost_request",
]


def explain_step(*args: Any) -> object:
    """Call `layoutmap.cost.jax.explained_step.explain_step`. Its module is imported only here, as it imports JAX."""
    return import_module("layoutmap.cost.jax.explained_step").explain_step(*args)


def find_cost_problems(linted: LintedPlan) -> Iterator[Problem]:
    """Yield problems for collectives that a better layout would avoid, or none if the batch dim is unknown."""
    cost = linted.plan.cost
    assert isinstance(cost, Cost)
    for check in COST_CHECKS if linted.batch_dim is not None else ():
        yield from check(cost, linted)


def read_cost(data: dict[str, Any], rows: list[Any], mesh: Mesh) -> Cost:
    """Return the cost that a plan's file stores: `rows` are its collectives, and `data` has all other fields."""
    step, machine, batch_dim, tried, untried = read_cost_fields(data, rows, mesh)
    return Cost(step, machine, batch_dim=batch_dim, tried=tried, untried=untried)


def make_json_fields(cost: Cost) -> tuple[Iterator[list[Any]], dict[str, Any]]:
    """Return a cost as a plan's file stores it: rows of collectives, and an object with all other fields."""
    return make_cost_fields(cost.step, cost.machine, cost.batch_dim, cost.tried, cost.untried)


def format_costs_by_name(cost: Cost) -> dict[str, str]:
    """Return a dict from the name of each time and size of a cost to its text. `Plan.diff` compares these texts."""
    sent: dict[str, list[float]] = {}
    for c in cost.step.collectives:
        reason = "weights" if cost.is_overlapped(c) else "activations"
        sums = sent.setdefault(f"{c.kind.replace('_', '-')} of {reason} over {', '.join(c.dims)}", [0, 0])
        sums[0] += c.count_sent_bytes(cost.step.mesh)
        sums[1] += cost.sum_call_seconds(c)
    return {
        "machine": str(cost.machine),
        "time of a step": format_duration(cost.step_seconds),
        **{part.label: format_duration(part.seconds) for part in cost.time_parts},
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

    `resident_bytes` are the bytes of weights, slots, and state on a device. `find_variable` returns the row index of
    the variable that causes a collective, or None if a layer causes it.
    """
    return {
        "machine": str(cost.machine),
        "about": cost.machine.device.about,
        # Gradients and activations exist only during a step, so the page adds them to the memory of resident arrays.
        "beside": max(0, cost.step.peak_bytes - resident_bytes),
        "parts": [
            [part.label, part.seconds, format_duration(part.seconds), part.kind] for part in cost.time_parts
        ],
        "step": format_duration(cost.step_seconds),
        "serial": format_duration(cost.serial_seconds),
        "rows": [
            [*row.cells, row.is_overlapped, find_variable(row.first.cause)] for row in cost.collective_rows
        ],
        "networks": list(cost.networks.items()),
        "counts": cost.work_and_memory_sentences,
        "assumptions": cost.assumptions,
    }
