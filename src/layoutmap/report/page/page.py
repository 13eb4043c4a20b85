"""A plan as one page of HTML that loads nothing: for a browser, offline, to be kept and sent on.

The parts are in `assets`: a frame, a style sheet, and scripts, each one idea. They are put into one file with
the plan's data as JSON. The data are never markup or script: a `<` in them is written as an escape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files

from layoutmap.core.escaping import escape_html
from layoutmap.plan.problems import Problem
from layoutmap.plan.table import PlanTable
from layoutmap.plan.verdict import verdict_of
from layoutmap.report.contents import Contents, contents_line
from layoutmap.report.page.data import page_data, verdict_data
from layoutmap.report.text import plan_line

# In the order in which they build on each other; they share one scope, which nothing outside can reach.
_SCRIPTS = (
    *(
        "slices",
        "words",
        "model",
        "squarify",
        "drawing",
        "mesh_tiles",
        "mesh_view",
        "slices_view",
        "details_view",
        "verdict_view",
    ),
    *("memory_view", "cost_view", "checkpoint_view", "treemap_view", "table_view", "problems_view", "page"),
)


def plan_page(plan: PlanTable, findings: Sequence[Problem] = ()) -> str:
    """A plan as a page that holds all it needs; equal plans give equal pages.

    Args:
        plan: The plan.
        findings: More problems to show beside those of the plan.
    """
    data = {"verdict": verdict_data(verdict_of(plan)), **page_data(plan, findings)}
    return _page("plan", f"Plan: {plan_line(plan)}", data)


def checkpoint_page(contents: Contents, problems: Sequence[Problem] | None) -> str:
    """The page of a checkpoint: the layouts in which its variables were saved, and its facts.

    Args:
        contents: The checkpoint.
        problems: What is damaged; `None`: nobody has looked.
    """
    data = page_data(contents.table, problems or ())
    data["checkpoint"] = {
        "where": contents.where,
        "facts": list(contents.facts.items()),
        "verified": problems is not None,
    }
    return _page("checkpoint", f"Checkpoint {contents_line(contents)}", data)


def _page(kind: str, title: str, data: Mapping[str, object]) -> str:  # why: decisions/0021
    scripts = "\n".join(_part(f"{name}.js") for name in _SCRIPTS)
    parts = {
        "kind": kind,
        "title": escape_html(title),
        "style": _part("page.css"),
        "data": _json(data),
        "script": f'(() => {{\n"use strict";\n{scripts}\n}})();',
    }
    # One pass, so that a path that reads like one of the places is only a path.
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _part("page.html"))
    # Paths may hold half a surrogate pair, which no encoding can write.
    return page.encode("utf-8", "replace").decode("utf-8")


def _part(name: str) -> str:
    return files("layoutmap.report").joinpath("page/assets", name).read_text(encoding="utf-8")


def _json(data: object) -> str:
    """JSON that is safe inside a script element: pure ASCII, and without a `<` no tag or comment can begin in it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
