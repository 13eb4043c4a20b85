"""A plan as HTML for notebooks: one table, no scripts, no outside files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from layoutmap.plan.diff import PlanDiff
from layoutmap.plan.lint import Findings
from layoutmap.plan.table import Plan, group_problems
from layoutmap.report.rows import plan_rows
from layoutmap.report.text import (
    ACTIVATION_COLUMNS,
    COLUMNS,
    activation_cells,
    diff_cells,
    diff_line,
    findings_line,
    plan_line,
    row_cells,
)

__all__ = ["diff_html", "findings_html", "plan_html", "table"]

_CELL = "padding:.15em .7em;text-align:left;font-family:monospace;white-space:nowrap"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of text as an HTML table; everything is escaped."""
    top = "".join(f'<th style="{_CELL}">{escape(cell)}</th>' for cell in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<table style="border-collapse:collapse"><caption style="text-align:left">{escape(caption)}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    )


def plan_html(plan: Plan) -> str:
    """A plan as a table, with its errors and warnings below."""
    rows = [row_cells(row) for row in plan_rows(plan)]
    found = "".join(
        f"<pre>{p.severity}: {escape(str(p))}</pre>" for p in group_problems(plan.errors + plan.warnings)
    )
    activations = table("", ACTIVATION_COLUMNS, activation_cells(plan)) if plan.activations else ""
    return table(f"Plan: {plan_line(plan)}", COLUMNS, rows) + activations + found


def diff_html(diff: PlanDiff) -> str:
    """What differs between two plans, as a table."""
    return table(f"Plan: {diff_line(diff)}", ("variable", "changed", "how"), diff_cells(diff))


def findings_html(findings: Findings) -> str:
    """What lint has found, as a table."""
    grouped = group_problems(findings.problems)
    rows = [(p.kind, p.what, p.why, p.fix) for p in grouped]
    return table(f"Lint: {findings_line(findings)}", ("kind", "what", "why", "fix"), rows)
