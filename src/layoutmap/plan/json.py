"""A plan as JSON: to be kept beside the model, and compared with the plan of the next change.

    {"format": "layoutmap plan", "version": 3,
     "verdict": {"passes": true, "says": "no problems; 4.0 KiB per device, before activations", ..},
     "mesh": {"dims": {"batch": 2, "model": 4}},
     "variables": [
      {"path": "head.kernel", "shape": [64, 32], "dtype": "float32", "layout": [null, "model"], "rule": [1, ".*kernel"]}
     ],
     "activations": [],
     "problems": []}

Each variable has a line of its own, so that a version control system shows what moved. What is as usual is left out:
the kind of a weight, aliases that there are none of. Where a variable's layout is not the one that its rule asks for,
since an axis does not divide, that one is there as `asked`. Which of a mesh's devices are this process's is not written
down. A plan with the cost of a step has it as `cost` (see `json_cost`). The verdict is for who reads the file: it
follows from the rest, and is worked out anew when the file is read. Files of versions 1 and 2 have no verdict; in
those of version 2 each plan has a cost.

Writer and reader are in one file, so that a field is added to both or to none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from layoutmap.core.errors import LayoutMapError, brief
from layoutmap.core.layout import Layout
from layoutmap.core.match import Match, Rule
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import with_none
from layoutmap.core.uneven import Uneven
from layoutmap.core.variables import Assignment, Kind, Use, VariableSpec, itemsize
from layoutmap.plan.carried_cost import load_cost_package
from layoutmap.plan.json_fields import (
    MOST,
    Fields,
    JsonObject,
    Read,
    a_count,
    a_flag,
    a_number,
    a_row,
    a_text,
    an_object,
    list_of,
    one_of,
    or_null,
    refused,
    wrong,
)
from layoutmap.plan.problems import Problem, Severity
from layoutmap.plan.table import PlanTable
from layoutmap.plan.verdict import verdict_of

FORMAT = "layoutmap plan"
VERSION = 3
_OTHERWISE = Match("", None).otherwise
_ERROR: Uneven = "error"  # what a rule says of an axis that does not divide, if it says nothing
_DTYPE = re.compile(r"[a-z]{3}[a-z0-9_]*(<[a-z0-9_]+>)?")  # of keys of JAX, too: key<fry>
_ROLE = re.compile(r"(in|out)\.[0-9]+|rows|")  # of an axis: see `Use`
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # of surrogates; no encoding can write it


def plan_to_json(plan: PlanTable) -> str:
    """The text of a plan; equal plans give equal texts."""
    mesh: dict[str, Any] = {"dims": _dims(plan.mesh)}
    if plan.mesh.name:
        mesh["name"] = plan.mesh.name
    if plan.mesh.devices is not None:
        mesh["devices"] = plan.mesh.devices
    lists: dict[str, Iterable[Any]] = {
        "variables": map(_variable, plan.assignments),
        "activations": map(_match, plan.activations),
        "problems": map(_problem, plan.problems),
    }
    head = [f'"format": {_line(FORMAT)}, "version": {VERSION}']
    head += [f'"verdict": {_line(_verdict(plan))}', f'"mesh": {_line(mesh)}']
    if plan.device_memory is not None:
        head.append(f'"device_memory": {plan.device_memory}')
    if plan.strict:
        head.append('"strict": true')
    if plan.free_activations:
        head.append('"free_activations": true')
    if plan.gathered_dims:
        head.append(f'"gathered_dims": {_line(plan.gathered_dims)}')
    if plan.cost:
        lists["collectives"], cost = load_cost_package().json_fields(plan.cost)
        head.append(f'"cost": {_line(cost)}')
    parts = head + [f'"{name}": {_lines([_line(each) for each in items])}' for name, items in lists.items()]
    return "{" + ",\n ".join(parts) + "}\n"


def plan_from_json(text: str) -> PlanTable:
    """Read a plan.

    Raises:
        PlanError: The text is no plan, or of a newer version; says where.
    """
    try:
        data: Any = json.loads(text, object_pairs_hook=JsonObject)
    except (ValueError, TypeError) as error:
        raise refused("it is not JSON", str(error)) from error
    except RecursionError:
        raise refused("it is not JSON of a plan", "it is nested too deeply to be read") from None
    if not isinstance(data, JsonObject) or data.get("format") != FORMAT:
        raise refused("it is not a plan", f'it does not say "format": "{FORMAT}"')
    top = Fields(data, "plan")
    version: Any = top("format", a_text) and top("version", lambda each, _: each, None)
    if type(version) is not int or version not in range(1, VERSION + 1):
        why = f"this layoutmap reads versions 1 to {VERSION}"
        raise refused(f"version {brief(version)}", why, "write it again with this layoutmap")
    mesh = top("mesh", _mesh)
    plan = PlanTable(
        mesh,
        top("variables", list_of(lambda each, place: _read_variable(each, place, mesh))),
        top("problems", list_of(_read_problem)),
        top("activations", list_of(lambda each, place: _read_activation(each, place, mesh))),
        top("free_activations", a_flag, False),
        device_memory=top("device_memory", or_null(a_number), None),
        strict=top("strict", a_flag, False),
        gathered_dims=tuple(top("gathered_dims", list_of(a_text), ())),
    )
    top("verdict", an_object, None)
    if version == 2 or "cost" in top:
        plan = plan.with_cost(load_cost_package().read_cost(top, mesh))
    top.check()
    at: dict[tuple[str, str], int] = {}
    for i, variable in enumerate(a.variable for a in plan.assignments):
        first = at.setdefault((variable.model, variable.path), i)
        if first != i:
            why = f"variables[{first}] is the same one, and each is counted once"
            raise refused(f"variables[{i}]: {variable.path!r} is there twice", why, "delete one of the two")
    return plan


def fingerprint(plan: PlanTable) -> str:
    """A short text that is the same for plans that put the same variables in the same places.

    It changes with the sizes of the mesh's dims, with a variable's path, shape, dtype or layout, and with the layout of
    a layer's output. Devices' names, the order of the variables, what kind they are, and which rule gave a layout have
    no part in it: two plans on one mesh have the same one exactly if their `diff` has no change but of kinds.
    """
    variables = [
        (a.variable.model, a.variable.path, a.variable.shape, a.variable.dtype, _specs(a.layout))
        for a in plan.assignments
    ]
    outputs = [(m.path, _specs(m.layout)) for m in plan.activations if m.layout is not None]
    text = _line([list(_dims(plan.mesh).items()), sorted(variables, key=_order), sorted(outputs, key=_order)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _order(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key to sort by: specs are `None`, texts or tuples, which cannot be compared."""
    return *row[:-1], _line(row[-1])


# -- writing


def _line(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return _HALF_A_PAIR.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _lines(items: Sequence[str]) -> str:
    return "[" + ",".join(f"\n  {each}" for each in items) + ("\n ]" if items else "]")


def _dims(mesh: Mesh) -> dict[str, int]:
    return dict(zip(mesh.dim_names, mesh.shape, strict=True))


def _specs(layout: Layout) -> list[Any]:
    return list(with_none(layout.sharding_specs))


def _variable(assignment: Assignment) -> dict[str, Any]:
    variable = assignment.variable
    usual = VariableSpec(variable.path, variable.shape, variable.dtype)
    written: dict[str, Any] = {"path": variable.path, "shape": variable.shape, "dtype": variable.dtype}
    for field in ("kind", "aliases", "parent", "axes", "parent_shape", "model", "trainable", "memory"):
        if getattr(variable, field) != getattr(usual, field):
            written[field] = getattr(variable, field)
    if variable.use is not None:
        written["use"] = variable.use.roles
        if variable.use.head_size is not None:
            written["head_size"] = variable.use.head_size
    written["layout"] = _specs(assignment.layout)
    if assignment.match is not None:
        match = _match(assignment.match)
        if match.get("layout", written["layout"]) != written["layout"]:
            written["asked"] = match["layout"]
        written |= {name: value for name, value in match.items() if name not in written}
    if assignment.global_init:
        written["global_init"] = assignment.global_init
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


def _verdict(plan: PlanTable) -> dict[str, Any]:
    verdict = verdict_of(plan)
    fields = dataclasses.asdict(verdict)
    return {"passes": verdict.passes, "says": verdict.headline} | fields


def _problem(problem: Problem) -> dict[str, Any]:
    written = dataclasses.asdict(problem)
    return {name: value for name, value in written.items() if value or name in ("subject", "what")}


# -- reading


_texts, _shape_of_any = list_of(a_text), list_of(a_number)
_uneven: Read[Uneven] = one_of(*get_args(Uneven))


def _shape(value: Any, place: str) -> tuple[int, ...]:
    shape = _shape_of_any(value, place)
    if math.prod(n for n in shape if n) > MOST:
        raise wrong(place, value, "a shape: it has too many elements")
    return shape


def _dtype(value: Any, place: str) -> str:
    try:
        if not _DTYPE.fullmatch(a_text(value, place)):
            raise TypeError
        itemsize(value)
    except (TypeError, ValueError):
        raise wrong(place, value, "a dtype") from None
    return value


def _role(value: Any, place: str) -> str:
    if not _ROLE.fullmatch(a_text(value, place)):
        raise refused(
            f"{place} is no role of an axis", f"it is {brief(value)}", 'use "in.0", "out.0", "rows" or ""'
        )
    return value


def _mesh(item: Any, place: str) -> Mesh:
    read = Fields(item, place)
    sizes = read("dims", an_object)
    dims = {name: a_number(size, f"{place}.dims.{name}") for name, size in sizes.items()}
    devices, name = read("devices", or_null(_texts), None), read("name", a_text, "")
    read.check()
    try:
        return Mesh(devices, dims, name)
    except LayoutMapError as error:
        raise refused(f"{place}: {error.what}", error.why, error.fix) from error


def _layout(mesh: Mesh) -> Read[Layout]:
    def read(value: Any, place: str) -> Layout:
        specs = list_of(_spec)(value, place)
        try:
            return Layout(specs, mesh)
        except LayoutMapError as error:
            raise refused(f"{place}: {error.what}", error.why, error.fix) from error

    return read


def _spec(value: Any, place: str) -> str | tuple[str, ...] | None:
    return value if isinstance(value, str | None) else _texts(value, place)


def _read_variable(item: Any, place: str, mesh: Mesh) -> Assignment:
    read = Fields(item, place)
    use = read("use", or_null(list_of(_role)), None)
    shape = read("shape", _shape)
    axes = read("axes", or_null(list_of(_shape_of_any)), None)
    for name, each in (("use", use), ("axes", axes)):
        if each is not None and len(each) != len(shape):
            why = f"it is for {len(each)} axes, and the shape has {len(shape)}"
            raise refused(f"{place}.{name} does not fit the shape", why)
    variable = VariableSpec(
        read("path", a_text),
        shape,
        read("dtype", _dtype),
        read("kind", one_of(*Kind), Kind.WEIGHT),
        read("aliases", _texts, ()),
        read("parent", or_null(a_text), None),
        axes,
        read("parent_shape", or_null(_shape), None),
        read("model", a_text, ""),
        None if use is None else Use(use, read("head_size", or_null(a_count), None)),
        read("trainable", a_flag, True),
        memory=read("memory", a_text, ""),
    )
    layout = read("layout", _layout(mesh))
    match = _read_match(variable.path, read, mesh, layout) if "rule" in read else None
    global_init = read("global_init", a_text, "")
    read.check()
    return Assignment(variable, layout, match, global_init)


def _read_activation(item: Any, place: str, mesh: Mesh) -> Match:
    read = Fields(item, place)
    layout = read("layout", _layout(mesh), None)
    match = _read_match(read("path", a_text), read, mesh, layout)
    read.check()
    return match


def _read_match(path: str, read: Fields, mesh: Mesh, layout: Layout | None) -> Match:
    rule = None
    won = read("rule", or_null(a_row(a_count, a_text)))
    if won is not None:
        asked = read("asked", _layout(mesh), layout) or read("layout", _layout(mesh))
        rule = Rule(won[0], won[1], asked, read("uneven", _uneven, _ERROR))
    others = read("others", list_of(a_row(a_count, a_text, _layout(mesh), _uneven, least=3)), ())
    return Match(
        path,
        rule,
        tuple(Rule(*other) for other in others),
        read("near_misses", _texts, ()),
        read("otherwise", a_text, _OTHERWISE),
    )


def _read_problem(item: Any, place: str) -> Problem:
    read = Fields(item, place)
    facts = read("facts", list_of(a_row(a_text, a_text)), ())
    problem = Problem(
        read("kind", a_text, ""),
        read("severity", one_of(*get_args(Severity))),
        read("subject", a_text),
        read("what", a_text),
        tuple((name, value) for name, value in facts),
        read("why", a_text, ""),
        read("fix", a_text, ""),
        read("model", a_text, ""),
    )
    read.check()
    return problem
