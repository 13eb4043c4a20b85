"""A plan as HTML for notebooks: one table, no scripts, no outside files."""

from __future__ import annotations

from layoutmap.core.text_table import html_table
from layoutmap.plan.problems import group_problems
from layoutmap.plan.table import PlanTable
from layoutmap.plan.verdict import verdict_of
from layoutmap.report.rows import plan_rows
from layoutmap.report.text import ACTIVATION_COLUMNS, COLUMNS, activation_cells, plan_line, row_cells


def plan_html(plan: PlanTable) -> str:
    """The verdict on a plan and its table, with its errors and warnings below."""
    from html import escape

    rows = [row_cells(row) for row in plan_rows(plan)]
    found = "".join(
        f"<pre>{p.severity}: {escape(str(p))}</pre>" for p in group_problems(plan.errors + plan.warnings)
    )
    activations = html_table("", ACTIVATION_COLUMNS, activation_cells(plan)) if plan.activations else ""
    cost = plan.cost.to_html() if plan.cost else ""
    verdict = f"<pre>{escape(str(verdict_of(plan)))}</pre>"
    return verdict + html_table(f"Plan: {plan_line(plan)}", COLUMNS, rows) + activations + cost + found
