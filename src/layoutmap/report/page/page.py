"""Write a plan as one self-contained HTML page that works offline.

`assets` has an HTML template, a style sheet, and scripts. They are written into one file with the plan's data as JSON.
The data cannot become markup or script, because a `<` in them is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from layoutmap.core.errors import PlanError
from layoutmap.core.escaping import escape_html
from layoutmap.plan.problems import Problem
from layoutmap.plan.table import PlanTable
from layoutmap.plan.verdict import Verdict, judge_plan
from layoutmap.report.contents import CheckpointContents, format_checkpoint_summary
from layoutmap.report.page.data import make_page_data, make_verdict_data
from layoutmap.report.text import format_plan_summary

# Each script uses the ones before it, so keep this order. All run in one scope that other scripts cannot access.
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
    *(
        "memory_view",
        "cost_view",
        "explained_view",
        "checkpoint_view",
        "treemap_view",
        "table_view",
        "problems_view",
        "page",
    ),
)


def make_plan_page(
    plan: PlanTable,
    findings: Sequence[Problem] = (),
    explained: Mapping[str, object] | None = None,
    verdict: Verdict | None = None,
) -> str:
    """Return a plan as a self-contained HTML page. Equal plans give equal pages.

    Args:
        plan: The plan.
        findings: More problems to show beside those of the plan.
        explained: The explanation of a compiled step, as `to_json` of `step.explain(..)` returns it.
        verdict: The verdict, with the number of findings; `None`: that on the plan alone.
    """
    data = {
        "verdict": make_verdict_data(verdict or judge_plan(plan)),
        **make_page_data(plan, findings),
        "explained": explained,
    }
    return _fill_template("plan", f"Plan: {format_plan_summary(plan)}", data)


def validate_step_explanation(explained: Any) -> Mapping[str, object]:
    """Return the explanation of a compiled step, which may come from a file, after checking its fields.

    Raises:
        PlanError: A field is missing, or of another type.
    """
    fields: dict[str, Any] = {**explained} if isinstance(explained, Mapping) else {}
    types = {"step": str, "mesh": dict, "collectives": list, "products": list, "recompilations": list}
    types |= dict.fromkeys(("sent_bytes", "argument_bytes", "temporary_bytes"), int)
    rows = {
        "collectives": {"kind", "dims", "calls", "shape", "sent_bytes", "line", "cause", "is_full_gather"},
        "products": {"line", "flops", "ideal_flops"},
    }
    wrong = [name for name, kind in types.items() if not isinstance(fields.get(name), kind)]
    wrong = wrong or [name for name, keys in rows.items() if not all(keys <= {*row} for row in fields[name])]
    if wrong:
        raise PlanError(
            "explained= is not the explanation of a compiled step",
            facts={"missing or of another type": ", ".join(wrong)},
            why="the page shows collectives, products, and bytes of a compiled step",
            fix="pass the result of step.explain(..).to_json(), or a file of it",
        )
    return fields


def make_checkpoint_page(contents: CheckpointContents, problems: Sequence[Problem] | None) -> str:
    """Return a checkpoint as a self-contained HTML page with its variables, saved layouts, and facts.

    Args:
        contents: The checkpoint.
        problems: The damage that was found; `None`: the checkpoint was not verified.
    """
    data = make_page_data(contents.table, problems or ())
    data["checkpoint"] = {
        "where": contents.where,
        "facts": list(contents.facts.items()),
        "verified": problems is not None,
    }
    return _fill_template("checkpoint", f"Checkpoint {format_checkpoint_summary(contents)}", data)


# A page must work offline, so it contains its styles, scripts, and data (decisions/0021).
def _fill_template(kind: str, title: str, data: Mapping[str, object]) -> str:
    scripts = "\n".join(_read_asset(f"{name}.js") for name in _SCRIPTS)
    parts = {
        "kind": kind,
        "title": escape_html(title),
        "style": _read_asset("page.css"),
        "data": _dump_script_safe_json(data),
        "script": f'(() => {{\n"use strict";\n{scripts}\n}})();',
    }
    # A path in the data may look like a placeholder, so replace all placeholders in one pass.
    page = re.sub(r"\{\{(\w+)\}\}", lambda placeholder: parts[placeholder[1]], _read_asset("page.html"))
    # Paths may contain unpaired surrogates, which no encoding can write, so replace these.
    return page.encode("utf-8", "replace").decode("utf-8")


def _read_asset(name: str) -> str:
    return files("layoutmap.report").joinpath("page/assets", name).read_text(encoding="utf-8")


def _dump_script_safe_json(data: object) -> str:
    """Return data as JSON that is safe inside a script element: ASCII only, with `<` escaped."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
