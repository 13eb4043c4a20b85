"""A plan as JSON: to be kept beside the model, and compared with the plan of the next change.

    {"format": "layoutmap plan", "version": 1,
     "mesh": {"dims": {"batch": 2, "model": 4}},
     "variables": [
      {"path": "head.kernel", "shape": [64, 32], "dtype": "float32", "layout": [null, "model"], "rule": [1, ".*kernel"]}
     ],
     "activations": [],
     "problems": []}

Each variable has a line of its own, so that a version control system shows what moved. What is as usual is left out:
the kind of a weight, aliases that there are none of. Where a variable's layout is not the one that its rule asks for,
since an axis does not divide, that one is there as `asked`. Which of a mesh's devices are this process's is not written
down.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from layoutmap.errors import LayoutMapError, PlanError
from layoutmap.fitting import Uneven, as_uneven
from layoutmap.layout import UNSHARDED, Layout
from layoutmap.mesh import Mesh
from layoutmap.plan import Plan, Problem
from layoutmap.rules import Match, Rule
from layoutmap.variables import Assignment, Kind, Use, VariableSpec

__all__ = ["FORMAT", "VERSION", "fingerprint", "plan_from_json", "plan_to_json"]

FORMAT = "layoutmap plan"
VERSION = 1
_OTHERWISE = Match("", None).otherwise
_ERROR: Uneven = "error"  # what a rule says of an axis that does not divide, if it says nothing

T = TypeVar("T")


def plan_to_json(plan: Plan) -> str:
    """The text of a plan; equal plans give equal texts."""
    mesh: dict[str, Any] = {"dims": _dims(plan.mesh)}
    if plan.mesh.name:
        mesh["name"] = plan.mesh.name
    if plan.mesh.devices is not None:
        mesh["devices"] = plan.mesh.devices
    lists = {
        "variables": map(_variable, plan.assignments),
        "activations": map(_match, plan.activations),
        "problems": map(_problem, plan.problems),
    }
    head = [f'"format": {_line(FORMAT)}, "version": {VERSION}', f'"mesh": {_line(mesh)}']
    if plan.free_activations:
        head.append('"free_activations": true')
    parts = head + [f'"{name}": {_lines([_line(each) for each in items])}' for name, items in lists.items()]
    return "{" + ",\n ".join(parts) + "}\n"


def plan_from_json(text: str) -> Plan:
    """Read a plan.

    Raises:
        PlanError: The text is no plan, or of a newer version; says where.
    """
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        raise _refused("it is no JSON", str(error)) from error
    top = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    if top.get("format") != FORMAT:
        raise _refused("it is no plan", f'it does not say "format": "{FORMAT}"')
    if top.get("version") != VERSION:
        why = f"this layoutmap reads version {VERSION}"
        raise _refused(f"version {top.get('version')!r}", why, "write it again with this layoutmap")
    mesh = _read("mesh", top.get("mesh"), lambda m: Mesh(m.get("devices"), m["dims"], m.get("name", "")))
    return Plan(
        mesh,
        _read_all("variables", top.get("variables", []), lambda each: _read_variable(each, mesh)),
        _read_all("problems", top.get("problems", []), _read_problem),
        _read_all(
            "activations", top.get("activations", []), lambda each: _read_match(each["path"], each, mesh)
        ),
        bool(top.get("free_activations", False)),
    )


def fingerprint(plan: Plan) -> str:
    """A short text that is the same for plans that put the same variables in the same places.

    It changes with the sizes of the mesh's dims, with a variable's path, shape, dtype or layout, and with the layout of
    a layer's output. Devices' names, the order of the variables, what kind they are, and which rule gave a layout have
    no part in it: two plans on one mesh have the same one exactly if their `diff` has no change but of kinds.
    """
    variables = sorted(
        (a.variable.model, a.variable.path, a.variable.shape, a.variable.dtype, _specs(a.layout))
        for a in plan
    )
    outputs = sorted((m.path, _specs(m.layout)) for m in plan.activations if m.layout is not None)
    told = _line([list(_dims(plan.mesh).items()), variables, outputs])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


# -- writing


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _lines(items: Sequence[str]) -> str:
    return "[" + ",".join(f"\n  {each}" for each in items) + ("\n ]" if items else "]")


def _dims(mesh: Mesh) -> dict[str, int]:
    return dict(zip(mesh.dim_names, mesh.shape, strict=True))


def _specs(layout: Layout) -> list[Any]:
    return [None if spec == UNSHARDED else spec for spec in layout.sharding_specs]


def _variable(assignment: Assignment) -> dict[str, Any]:
    variable = assignment.variable
    usual = VariableSpec(variable.path, variable.shape, variable.dtype)
    written: dict[str, Any] = {"path": variable.path, "shape": variable.shape, "dtype": variable.dtype}
    for field in ("kind", "aliases", "parent", "axes", "parent_shape", "model", "trainable"):
        if getattr(variable, field) != getattr(usual, field):
            written[field] = getattr(variable, field)
    if variable.use is not None:
        written["use"] = variable.use.roles
        if variable.use.head_size is not None:
            written["head_size"] = variable.use.head_size
    written["layout"] = _specs(assignment.layout)
    if assignment.match is not None:
        told = _match(assignment.match)
        if told.get("layout", written["layout"]) != written["layout"]:
            written["asked"] = told["layout"]
        written |= {name: value for name, value in told.items() if name not in written}
    if assignment.drawn_whole:
        written["drawn_whole"] = assignment.drawn_whole
    return written


def _match(match: Match) -> dict[str, Any]:
    written: dict[str, Any] = {"path": match.path, "rule": None}
    if match.rule is not None:
        written |= {"layout": _specs(match.rule.layout), "rule": [match.rule.number, match.rule.pattern]}
        if match.rule.uneven != _ERROR:
            written["uneven"] = match.rule.uneven
    if match.others:
        written["others"] = [
            [r.number, r.pattern, _specs(r.layout), *([r.uneven] if r.uneven != _ERROR else [])]
            for r in match.others
        ]
    if match.near_misses:
        written["near_misses"] = match.near_misses
    if match.otherwise != _OTHERWISE:
        written["otherwise"] = match.otherwise
    return written


def _problem(problem: Problem) -> dict[str, Any]:
    written = dataclasses.asdict(problem)
    return {name: value for name, value in written.items() if value or name in ("subject", "what")}


# -- reading


def _refused(what: str, why: str, mend: str = "write it with plan.to_json()") -> PlanError:
    return PlanError(f"plan file: {what}", why=why, mend=mend)


def _read(where: str, item: Any, read: Callable[[Any], T]) -> T:
    """What `read` makes of a part of the file; what goes wrong is told with the place."""
    if not isinstance(item, dict):
        raise _refused(f"{where} is no object", f"it is {_line(item)[:60]}")
    try:
        return read(item)
    except KeyError as error:
        raise _refused(f"{where} has no {error.args[0]!r}", "a plan cannot be told without it") from None
    except LayoutMapError as error:
        raise _refused(f"{where}: {error.what}", error.why, error.mend) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise _refused(f"{where} is not as plans are written", str(error)) from error


def _read_all(name: str, items: Any, read: Callable[[Any], T]) -> tuple[T, ...]:
    if not isinstance(items, list):
        raise _refused(f"{name} is no list", f"it is {_line(items)[:60]}")
    listed = cast("list[Any]", items)
    return tuple(_read(f"{name}[{i}]", item, read) for i, item in enumerate(listed))


def _layout(specs: Any, mesh: Mesh) -> Layout:
    return Layout(
        [tuple(cast("list[str]", spec)) if isinstance(spec, list) else spec for spec in specs], mesh
    )


def _read_variable(item: Any, mesh: Mesh) -> Assignment:
    variable = VariableSpec(
        item["path"],
        tuple(map(int, item["shape"])),
        item["dtype"],
        Kind(item.get("kind", Kind.WEIGHT)),
        tuple(item.get("aliases", ())),
        item.get("parent"),
        None if item.get("axes") is None else tuple(tuple(map(int, of)) for of in item["axes"]),
        None if item.get("parent_shape") is None else tuple(map(int, item["parent_shape"])),
        item.get("model", ""),
        Use(tuple(map(str, item["use"])), item.get("head_size")) if "use" in item else None,
        item.get("trainable", True),
    )
    match = _read_match(variable.path, item, mesh) if "rule" in item else None
    return Assignment(variable, _layout(item["layout"], mesh), match, item.get("drawn_whole", ""))


def _read_match(path: str, item: Any, mesh: Mesh) -> Match:
    rule = None
    if item["rule"] is not None:
        number, pattern = item["rule"]
        asked = _layout(item.get("asked", item["layout"]), mesh)
        rule = Rule(number, pattern, asked, as_uneven(item.get("uneven", _ERROR), pattern))
    others = tuple(
        Rule(number, pattern, _layout(specs, mesh), as_uneven(uneven[0] if uneven else _ERROR, pattern))
        for number, pattern, specs, *uneven in item.get("others", ())
    )
    return Match(path, rule, others, tuple(item.get("near_misses", ())), item.get("otherwise", _OTHERWISE))


def _read_problem(item: Any) -> Problem:
    facts = tuple((name, value) for name, value in item.get("facts", ()))
    texts = {name: item.get(name, "") for name in ("why", "mend")}
    return Problem(item["kind"], item["severity"], item["subject"], item["what"], facts, **texts)
