"""Write a plan as JSON and read it, to compare it with later plans.

    {"format": "layoutmap plan", "version": 3,
     "verdict": {"passes": true, "says": "no problems; 4.0 KiB per device, before activations", ..},
     "mesh": {"dims": {"batch": 2, "model": 4}},
     "variables": [
      {"path": "head.kernel", "shape": [64, 32], "dtype": "float32", "layout": [null, "model"], "rule": [1, ".*kernel"]}
     ],
     "activations": [],
     "problems": []}

Each variable has a line of its own, so that a version control system shows the changed variables. Fields with their
default value are left out, such as the kind of a weight. If a variable does not have the layout of its rule, because an
axis cannot be split evenly, `asked` is the layout of the rule. `memory` is the host memory of a variable, and
`rule_memory` the memory that its rule names. The file does not say which devices of the mesh are this process's.

The cost of a step is in `cost` (see `layoutmap.cost.json`). The verdict is written for readers of the file only,
because it follows from the other fields. Files of versions 1 and 2 have no verdict. In files of version 2 each plan has
a cost.

Writer and reader are in one file, so that a field is added to both or to none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import msgspec

from layoutmap.core.errors import LayoutMapError, shorten_repr
from layoutmap.core.layout import Layout
from layoutmap.core.match import Match, Rule
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import replace_unsharded_by_none
from layoutmap.core.uneven import UnevenSetting
from layoutmap.core.variables import Assignment, AxisRoles, Kind, VariableSpec, get_itemsize
from layoutmap.plan.carried_cost import load_cost_package
from layoutmap.plan.json_fields import (
    MAX_COUNT,
    Count,
    Number,
    PlanJsonList,
    PlanJsonObject,
    convert_json_to_type,
    convert_json_values_to_type,
    load_json_without_repeated_keys,
    make_plan_file_error,
    make_plan_file_type_error,
)
from layoutmap.plan.problems import Problem, Severity
from layoutmap.plan.table import PlanTable
from layoutmap.plan.verdict import Verdict, judge_plan

FORMAT = "layoutmap plan"
VERSION = 3
_OTHERWISE = Match("", None).otherwise
_ERROR: UnevenSetting = "error"  # the default policy for uneven axes, which is not written
_DTYPE = re.compile(r"[a-z]{3}[a-z0-9_]*(<[a-z0-9_]+>)?")  # also matches JAX PRNG keys: key<fry>
_ROLE = re.compile(r"(in|out)\.[0-9]+|rows|")  # role of an axis; see `AxisRoles`
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # an unpaired surrogate, which no encoding can write


def plan_to_json(plan: PlanTable, verdict: Verdict | None = None) -> str:
    """Return a plan as JSON text. Equal plans give equal texts. `None` as the verdict: that on the plan alone."""
    mesh: dict[str, Any] = {"dims": _get_dim_sizes(plan.mesh)}
    if plan.mesh.name:
        mesh["name"] = plan.mesh.name
    if plan.mesh.devices is not None:
        mesh["devices"] = plan.mesh.devices
    if plan.mesh.explicit_dims:
        mesh["explicit_dims"] = plan.mesh.explicit_dims
    lists: dict[str, Iterable[Any]] = {
        "variables": map(_convert_variable_to_json, plan.assignments),
        "activations": map(_convert_match_to_json, plan.activations),
        "problems": map(_convert_problem_to_json, plan.problems),
    }
    head = [f'"format": {_dump_json(FORMAT)}, "version": {VERSION}']
    judged = _convert_verdict_to_json(verdict or judge_plan(plan))
    head += [f'"verdict": {_dump_json(judged)}', f'"mesh": {_dump_json(mesh)}']
    if plan.device_memory is not None:
        head.append(f'"device_memory": {plan.device_memory}')
    if plan.strict:
        head.append('"strict": true')
    if plan.free_activations:
        head.append('"free_activations": true')
    if plan.gathered_dims:
        head.append(f'"gathered_dims": {_dump_json(plan.gathered_dims)}')
    if plan.cost:
        lists["collectives"], cost = load_cost_package().make_json_fields(plan.cost)
        head.append(f'"cost": {_dump_json(cost)}')
    parts = head + [
        f'"{name}": {_format_json_list([_dump_json(each) for each in items])}'
        for name, items in lists.items()
    ]
    return "{" + ",\n ".join(parts) + "}\n"


def plan_from_json(text: str) -> PlanTable:
    """Return the plan from its JSON text.

    Raises:
        PlanError: The text is no plan, or is of a newer version. The error names the position in the document.
    """
    data = load_json_without_repeated_keys(text)
    if not isinstance(data, dict) or cast("dict[str, Any]", data).get("format") != FORMAT:
        raise make_plan_file_error("the file is not a plan", f'it does not have "format": "{FORMAT}"')
    version = cast("dict[str, Any]", data).get("version")
    if type(version) is not int or version not in range(1, VERSION + 1):
        why = f"this layoutmap reads versions 1 to {VERSION}"
        raise make_plan_file_error(
            f"version {shorten_repr(version)} is not known",
            why,
            "write it again with this version of layoutmap",
        )
    top = convert_json_to_type(cast("Any", data), _PlanJson)
    mesh = _read_mesh(top.mesh)
    plan = PlanTable(
        mesh,
        tuple(_read_variable(each, f"variables[{i}]", mesh) for i, each in enumerate(top.variables)),
        tuple(Problem(**msgspec.structs.asdict(each)) for each in top.problems),
        tuple(_read_activation(each, f"activations[{i}]", mesh) for i, each in enumerate(top.activations)),
        top.free_activations,
        device_memory=top.device_memory,
        strict=top.strict,
        gathered_dims=top.gathered_dims,
    )
    if version == 2 or top.cost is not None:
        if top.collectives is None or top.cost is None:
            name = "collectives" if top.collectives is None else "cost"
            raise make_plan_file_error(f"plan has no {name!r}", "a plan with a cost has this entry")
        plan = plan.add_cost(load_cost_package().read_cost(top.cost, top.collectives, mesh))
    elif top.collectives is not None:
        raise make_plan_file_error(
            "plan: 'collectives' is not known", "only plans with a cost have this key", "delete this key"
        )
    at: dict[tuple[str, str], int] = {}
    for i, variable in enumerate(a.variable for a in plan.assignments):
        first = at.setdefault((variable.model, variable.path), i)
        if first != i:
            why = f"variables[{first}] has the same path, and a plan has each variable once"
            raise make_plan_file_error(
                f"variables[{i}]: {variable.path!r} appears twice", why, "delete one of the two"
            )
    return plan


def compute_fingerprint(plan: PlanTable) -> str:
    """Return a short hash that is equal for plans with the same variables and layouts.

    It depends on the sizes of the mesh dims, on the path, shape, dtype, and layout of each variable, and on the layouts
    of layer outputs. It does not depend on device names, on the order and kinds of variables, and on rules. So the
    fingerprints of two plans on one mesh are equal exactly if their `diff` has only changes of kinds.
    """
    variables = [
        (
            a.variable.model,
            a.variable.path,
            a.variable.shape,
            a.variable.dtype,
            *([a.layout.host_memory] if a.layout.host_memory else []),
            _list_specs(a.layout),
        )
        for a in plan.assignments
    ]
    outputs = [(m.path, _list_specs(m.layout)) for m in plan.activations if m.layout is not None]
    text = _dump_json(
        [
            list(_get_dim_sizes(plan.mesh).items()),
            sorted(variables, key=_make_sort_key),
            sorted(outputs, key=_make_sort_key),
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _make_sort_key(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a sort key for a row that ends in specs. Python cannot order their types, so write them as JSON."""
    return *row[:-1], _dump_json(row[-1])


# -- plan to JSON


def _dump_json(value: Any) -> str:
    """Return a value as one line of JSON, with unpaired surrogates escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return _HALF_A_PAIR.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _format_json_list(items: Sequence[str]) -> str:
    """Return a JSON list with one item per line."""
    return "[" + ",".join(f"\n  {each}" for each in items) + ("\n ]" if items else "]")


def _get_dim_sizes(mesh: Mesh) -> dict[str, int]:
    """Return a dict from the name of each mesh dim to its size."""
    return dict(zip(mesh.dim_names, mesh.shape, strict=True))


def _list_specs(layout: Layout) -> list[Any]:
    """Return the specs of a layout as a list for JSON, with None for an unsharded axis."""
    return list(replace_unsharded_by_none(layout.sharding_specs))


def _convert_variable_to_json(assignment: Assignment) -> dict[str, Any]:
    """Return the JSON fields of a variable, without those that have their default value."""
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
        if variable.use.reads is not None:
            written["reads"] = variable.use.reads
    if assignment.layout.host_memory:
        written["memory"] = assignment.layout.host_memory
    written["layout"] = _list_specs(assignment.layout)
    if assignment.match is not None:
        match = _convert_match_to_json(assignment.match)
        if match.get("layout", written["layout"]) != written["layout"]:
            written["asked"] = match["layout"]
        written |= {name: value for name, value in match.items() if name not in written}
    if assignment.global_init:
        written["global_init"] = assignment.global_init
    if assignment.is_padded:
        written["padded"] = True
    return written


def _convert_match_to_json(match: Match) -> dict[str, Any]:
    """Return the JSON fields of the rules that match a path, without those that have their default value."""
    written: dict[str, Any] = {"path": match.path, "rule": None}
    if match.rule is not None:
        written |= {
            "layout": _list_specs(match.rule.layout),
            "rule": [match.rule.number, match.rule.pattern],
        }
        if match.rule.uneven != _ERROR:
            written["uneven"] = match.rule.uneven
        if match.rule.layout.memory:
            written["rule_memory"] = match.rule.layout.memory
    if match.others:
        written["others"] = list(map(_convert_rule_to_json, match.others))
    if match.corrected:
        written["corrected"] = _convert_rule_to_json(match.corrected)
    if match.near_misses:
        written["near_misses"] = match.near_misses
    if match.otherwise != _OTHERWISE:
        written["otherwise"] = match.otherwise
    return written


def _convert_rule_to_json(rule: Rule) -> list[Any]:
    """Return the JSON list of a rule, without default values at its end."""
    settings = [rule.uneven, rule.layout.memory] if rule.layout.memory else [rule.uneven]
    return [rule.number, rule.pattern, _list_specs(rule.layout), *(settings if settings != [_ERROR] else ())]


def _convert_verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """Return the JSON fields of the verdict on a plan, such as whether the plan passes."""
    fields = dataclasses.asdict(verdict)
    # The text `says` has these numbers. The fields stay those of earlier releases.
    del fields["num_findings"], fields["num_unchecked"]
    return {"passes": verdict.passes, "says": verdict.headline} | fields


def _convert_problem_to_json(problem: Problem) -> dict[str, Any]:
    """Return the JSON fields of a problem. Empty fields are left out."""
    written = dataclasses.asdict(problem)
    return {name: value for name, value in written.items() if value or name in ("subject", "what")}


# -- JSON to plan


_Specs = tuple[str | tuple[str, ...] | None, ...]
_Shape = tuple[Number, ...]
_Memory = Literal["device", "pinned_host", "unpinned_host"]


class _RuleJson(PlanJsonList):
    number: Count
    pattern: str
    layout: _Specs
    uneven: UnevenSetting = _ERROR
    memory: _Memory | None = None


class _MatchJson(PlanJsonObject):
    path: str
    rule: tuple[Count, str] | msgspec.UnsetType | None = msgspec.UNSET
    asked: _Specs | None = None
    uneven: UnevenSetting = _ERROR
    rule_memory: _Memory | None = None
    others: tuple[_RuleJson, ...] = ()
    near_misses: tuple[str, ...] = ()
    otherwise: str = _OTHERWISE
    corrected: _RuleJson | None = None


class _ActivationJson(_MatchJson):
    layout: _Specs | None = None


class _VariableJson(_MatchJson, kw_only=True):
    shape: _Shape
    dtype: str
    layout: _Specs
    kind: Kind = Kind.WEIGHT
    aliases: tuple[str, ...] = ()
    parent: str | None = None
    axes: tuple[_Shape, ...] | None = None
    parent_shape: _Shape | None = None
    model: str = ""
    use: tuple[str, ...] | None = None
    head_size: Count | None = None
    reads: Number | None = None
    trainable: bool = True
    memory: Literal["", "pinned_host", "unpinned_host"] = ""
    global_init: str = ""
    padded: bool = False


class _ProblemJson(PlanJsonObject, kw_only=True):
    kind: str = ""
    severity: Severity
    subject: str
    what: str
    facts: tuple[tuple[str, str], ...] = ()
    why: str = ""
    fix: str = ""
    model: str = ""


class _MeshJson(PlanJsonObject):
    dims: dict[str, Any]
    name: str = ""
    devices: tuple[str, ...] | None = None
    explicit_dims: tuple[str, ...] = ()


class _PlanJson(PlanJsonObject):
    format: str
    version: int
    mesh: _MeshJson
    variables: tuple[_VariableJson, ...]
    problems: tuple[_ProblemJson, ...]
    activations: tuple[_ActivationJson, ...]
    free_activations: bool = False
    device_memory: Number | None = None
    strict: bool = False
    gathered_dims: tuple[str, ...] = ()
    verdict: dict[str, Any] | None = None
    cost: dict[str, Any] | None = None
    collectives: list[Any] | None = None


def _read_mesh(fields: _MeshJson) -> Mesh:
    dims = convert_json_values_to_type(fields.dims, Number, "mesh.dims")
    try:
        types = dict.fromkeys(fields.explicit_dims, "explicit")
        return Mesh(fields.devices, dims, fields.name, axis_types=types)
    except LayoutMapError as error:
        raise make_plan_file_error(f"mesh: {error.what}", error.why, error.fix) from error


def _read_layout(specs: _Specs, where: str, mesh: Mesh, memory: str | None = None) -> Layout:
    try:
        return Layout(specs, mesh, memory=memory)
    except LayoutMapError as error:
        raise make_plan_file_error(f"{where}: {error.what}", error.why, error.fix) from error


def _check_variable_fields(fields: _VariableJson, where: str) -> None:
    for name in ("shape", "parent_shape"):
        if math.prod(n for n in getattr(fields, name) or () if n) > MAX_COUNT:
            raise make_plan_file_type_error(
                f"{where}.{name}", getattr(fields, name), "a shape: it has too many elements"
            )
    try:
        if not _DTYPE.fullmatch(fields.dtype):
            raise TypeError
        get_itemsize(fields.dtype)
    except (TypeError, ValueError):
        raise make_plan_file_type_error(f"{where}.dtype", fields.dtype, "a dtype") from None
    for i, role in enumerate(fields.use or ()):
        if not _ROLE.fullmatch(role):
            fix = 'use "in.0", "out.0", "rows" or ""'
            raise make_plan_file_error(
                f"{where}.use[{i}] is not an axis role", f"it is {shorten_repr(role)}", fix
            )
    for name in ("use", "axes"):
        values = getattr(fields, name)
        if values is not None and len(values) != len(fields.shape):
            why = f"it has entries for {len(values)} axes, and the shape has {len(fields.shape)}"
            raise make_plan_file_error(f"{where}.{name} does not fit the shape", why)
    for name in ("head_size", "reads"):
        if fields.use is None and getattr(fields, name) is not None:
            raise make_plan_file_error(
                f"{where}: {name!r} is not known", "only a variable with 'use' has it", "delete this key"
            )


def _read_variable(fields: _VariableJson, where: str, mesh: Mesh) -> Assignment:
    _check_variable_fields(fields, where)
    use = None if fields.use is None else AxisRoles(fields.use, fields.head_size, fields.reads)
    variable = VariableSpec(
        fields.path,
        fields.shape,
        fields.dtype,
        fields.kind,
        fields.aliases,
        fields.parent,
        fields.axes,
        fields.parent_shape,
        fields.model,
        use,
        fields.trainable,
        memory=fields.memory,
    )
    layout = _read_layout(fields.layout, f"{where}.layout", mesh, fields.memory or None)
    match = None
    if fields.rule is not msgspec.UNSET:
        match = _read_match(fields, where, mesh, layout)
    elif (
        fields.asked
        or fields.others
        or fields.near_misses
        or fields.corrected
        or (fields.uneven, fields.otherwise, fields.rule_memory) != (_ERROR, _OTHERWISE, None)
    ):
        raise make_plan_file_error(f"{where} has no 'rule'", "its other fields describe a rule")
    return Assignment(variable, layout, match, fields.global_init, fields.padded)


def _read_activation(fields: _ActivationJson, where: str, mesh: Mesh) -> Match:
    if fields.rule is msgspec.UNSET:
        raise make_plan_file_error(f"{where} has no 'rule'", "every activation has a rule or null")
    layout = None if fields.layout is None else _read_layout(fields.layout, f"{where}.layout", mesh)
    return _read_match(fields, where, mesh, layout)


def _read_match(fields: _MatchJson, where: str, mesh: Mesh, layout: Layout | None) -> Match:
    rule = None
    if isinstance(fields.rule, tuple):
        asked = layout if fields.asked is None else _read_layout(fields.asked, f"{where}.asked", mesh)
        if asked is None:
            raise make_plan_file_error(f"{where} has no 'layout'", "every entry with a rule has a layout")
        rule = Rule(*fields.rule, asked.replace_memory(fields.rule_memory), fields.uneven)
    others = tuple(_read_rule(r, f"{where}.others[{i}]", mesh) for i, r in enumerate(fields.others))
    corrected = fields.corrected and _read_rule(fields.corrected, f"{where}.corrected", mesh)
    return Match(fields.path, rule, others, fields.near_misses, fields.otherwise, corrected)


def _read_rule(fields: _RuleJson, where: str, mesh: Mesh) -> Rule:
    layout = _read_layout(fields.layout, f"{where}[2]", mesh, fields.memory)
    return Rule(fields.number, fields.pattern, layout, fields.uneven)
