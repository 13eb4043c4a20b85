"""Write a plan as JSON and read it, to compare it with later plans.

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
those of version 2 each plan has a cost. `memory` is the host memory of a variable, and `rule_memory` the memory that
its rule names.

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
from layoutmap.core.specs import replace_unsharded
from layoutmap.core.uneven import UnevenSetting
from layoutmap.core.variables import Assignment, Kind, Use, VariableSpec, get_itemsize
from layoutmap.plan.carried_cost import load_cost_package
from layoutmap.plan.json_fields import (
    MAX_COUNT,
    Count,
    Number,
    PlanObject,
    PlanRow,
    convert,
    convert_values,
    load_json,
    make_file_error,
    make_type_error,
)
from layoutmap.plan.problems import Problem, Severity
from layoutmap.plan.table import PlanTable
from layoutmap.plan.verdict import judge_plan

FORMAT = "layoutmap plan"
VERSION = 3
_OTHERWISE = Match("", None).otherwise
_ERROR: UnevenSetting = "error"  # the default policy for uneven axes, which is not written
_DTYPE = re.compile(r"[a-z]{3}[a-z0-9_]*(<[a-z0-9_]+>)?")  # also matches JAX PRNG keys: key<fry>
_ROLE = re.compile(r"(in|out)\.[0-9]+|rows|")  # role of an axis; see `Use`
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # an unpaired surrogate, which no encoding can write


def plan_to_json(plan: PlanTable) -> str:
    """Return a plan as JSON text. Equal plans give equal texts."""
    mesh: dict[str, Any] = {"dims": _get_dim_sizes(plan.mesh)}
    if plan.mesh.name:
        mesh["name"] = plan.mesh.name
    if plan.mesh.devices is not None:
        mesh["devices"] = plan.mesh.devices
    if plan.mesh.explicit_dims:
        mesh["explicit_dims"] = plan.mesh.explicit_dims
    lists: dict[str, Iterable[Any]] = {
        "variables": map(_convert_variable, plan.assignments),
        "activations": map(_convert_match, plan.activations),
        "problems": map(_convert_problem, plan.problems),
    }
    head = [f'"format": {_dump_json(FORMAT)}, "version": {VERSION}']
    head += [f'"verdict": {_dump_json(_convert_verdict(plan))}', f'"mesh": {_dump_json(mesh)}']
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
        f'"{name}": {_format_list([_dump_json(each) for each in items])}' for name, items in lists.items()
    ]
    return "{" + ",\n ".join(parts) + "}\n"


def plan_from_json(text: str) -> PlanTable:
    """Read a plan.

    Raises:
        PlanError: The text is no plan, or of a newer version; says where.
    """
    data = load_json(text)
    if not isinstance(data, dict) or cast("dict[str, Any]", data).get("format") != FORMAT:
        raise make_file_error("it is not a plan", f'it does not say "format": "{FORMAT}"')
    version = cast("dict[str, Any]", data).get("version")
    if type(version) is not int or version not in range(1, VERSION + 1):
        why = f"this layoutmap reads versions 1 to {VERSION}"
        raise make_file_error(f"version {shorten_repr(version)}", why, "write it again with this layoutmap")
    top = convert(cast("Any", data), _Plan)
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
            raise make_file_error(f"plan has no {name!r}", "a plan with a cost has this entry")
        plan = plan.add_cost(load_cost_package().read_cost(top.cost, top.collectives, mesh))
    elif top.collectives is not None:
        raise make_file_error(
            "plan: 'collectives' is not known", "only plans with a cost have it", "delete it"
        )
    at: dict[tuple[str, str], int] = {}
    for i, variable in enumerate(a.variable for a in plan.assignments):
        first = at.setdefault((variable.model, variable.path), i)
        if first != i:
            why = f"variables[{first}] is the same one, and each is counted once"
            raise make_file_error(
                f"variables[{i}]: {variable.path!r} appears twice", why, "delete one of the two"
            )
    return plan


def compute_fingerprint(plan: PlanTable) -> str:
    """Return a short hash that is equal for plans with the same variables and layouts.

    It changes with the sizes of the mesh's dims, with a variable's path, shape, dtype or layout, and with the layout of
    a layer's output. Devices' names, the order of the variables, what kind they are, and which rule gave a layout have
    no part in it: two plans on one mesh have the same one exactly if their `diff` has no change but of kinds.
    """
    variables = [
        (
            a.variable.model,
            a.variable.path,
            a.variable.shape,
            a.variable.dtype,
            *([a.layout.host_memory] if a.layout.host_memory else []),
            _convert_specs(a.layout),
        )
        for a in plan.assignments
    ]
    outputs = [(m.path, _convert_specs(m.layout)) for m in plan.activations if m.layout is not None]
    text = _dump_json(
        [
            list(_get_dim_sizes(plan.mesh).items()),
            sorted(variables, key=_make_sort_key),
            sorted(outputs, key=_make_sort_key),
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _make_sort_key(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make a sort key for rows, because specs can be None, text, or tuples, which Python cannot order."""
    return *row[:-1], _dump_json(row[-1])


# -- plan to JSON


def _dump_json(value: Any) -> str:
    """Format a value as one line of JSON, with unpaired surrogates escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return _HALF_A_PAIR.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _format_list(items: Sequence[str]) -> str:
    """Return a JSON list with one item per line."""
    return "[" + ",".join(f"\n  {each}" for each in items) + ("\n ]" if items else "]")


def _get_dim_sizes(mesh: Mesh) -> dict[str, int]:
    """Return the sizes of a mesh's dims by name."""
    return dict(zip(mesh.dim_names, mesh.shape, strict=True))


def _convert_specs(layout: Layout) -> list[Any]:
    """Return a layout as a list of specs, with None for an unsharded axis."""
    return list(replace_unsharded(layout.sharding_specs))


def _convert_variable(assignment: Assignment) -> dict[str, Any]:
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
    if assignment.layout.host_memory:
        written["memory"] = assignment.layout.host_memory
    written["layout"] = _convert_specs(assignment.layout)
    if assignment.match is not None:
        match = _convert_match(assignment.match)
        if match.get("layout", written["layout"]) != written["layout"]:
            written["asked"] = match["layout"]
        written |= {name: value for name, value in match.items() if name not in written}
    if assignment.global_init:
        written["global_init"] = assignment.global_init
    if assignment.is_padded:
        written["padded"] = True
    return written


def _convert_match(match: Match) -> dict[str, Any]:
    written: dict[str, Any] = {"path": match.path, "rule": None}
    if match.rule is not None:
        written |= {
            "layout": _convert_specs(match.rule.layout),
            "rule": [match.rule.number, match.rule.pattern],
        }
        if match.rule.uneven != _ERROR:
            written["uneven"] = match.rule.uneven
        if match.rule.layout.memory:
            written["rule_memory"] = match.rule.layout.memory
    if match.others:
        written["others"] = [
            [r.number, r.pattern, _convert_specs(r.layout), *_convert_settings(r)] for r in match.others
        ]
    if match.near_misses:
        written["near_misses"] = match.near_misses
    if match.otherwise != _OTHERWISE:
        written["otherwise"] = match.otherwise
    return written


def _convert_settings(rule: Rule) -> list[Any]:
    """Return the `uneven` setting and the memory of a rule, without defaults at the end."""
    if rule.layout.memory:
        return [rule.uneven, rule.layout.memory]
    return [rule.uneven] if rule.uneven != _ERROR else []


def _convert_verdict(plan: PlanTable) -> dict[str, Any]:
    """Return the JSON fields of the verdict on a plan."""
    verdict = judge_plan(plan)
    fields = dataclasses.asdict(verdict)
    return {"passes": verdict.passes, "says": verdict.headline} | fields


def _convert_problem(problem: Problem) -> dict[str, Any]:
    """Return the JSON fields of a problem. Empty fields are left out."""
    written = dataclasses.asdict(problem)
    return {name: value for name, value in written.items() if value or name in ("subject", "what")}


# -- JSON to plan


_Specs = tuple[str | tuple[str, ...] | None, ...]
_Shape = tuple[Number, ...]
_Memory = Literal["device", "pinned_host", "unpinned_host"]


class _Rule(PlanRow):
    number: Count
    pattern: str
    layout: _Specs
    uneven: UnevenSetting = _ERROR
    memory: _Memory | None = None


class _Match(PlanObject):
    path: str
    rule: tuple[Count, str] | msgspec.UnsetType | None = msgspec.UNSET
    asked: _Specs | None = None
    uneven: UnevenSetting = _ERROR
    rule_memory: _Memory | None = None
    others: tuple[_Rule, ...] = ()
    near_misses: tuple[str, ...] = ()
    otherwise: str = _OTHERWISE


class _Activation(_Match):
    layout: _Specs | None = None


class _Variable(_Match, kw_only=True):
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
    trainable: bool = True
    memory: Literal["", "pinned_host", "unpinned_host"] = ""
    global_init: str = ""
    padded: bool = False


class _Problem(PlanObject, kw_only=True):
    kind: str = ""
    severity: Severity
    subject: str
    what: str
    facts: tuple[tuple[str, str], ...] = ()
    why: str = ""
    fix: str = ""
    model: str = ""


class _Mesh(PlanObject):
    dims: dict[str, Any]
    name: str = ""
    devices: tuple[str, ...] | None = None
    explicit_dims: tuple[str, ...] = ()


class _Plan(PlanObject):
    format: str
    version: int
    mesh: _Mesh
    variables: tuple[_Variable, ...]
    problems: tuple[_Problem, ...]
    activations: tuple[_Activation, ...]
    free_activations: bool = False
    device_memory: Number | None = None
    strict: bool = False
    gathered_dims: tuple[str, ...] = ()
    verdict: dict[str, Any] | None = None
    cost: dict[str, Any] | None = None
    collectives: list[Any] | None = None


def _read_mesh(item: _Mesh) -> Mesh:
    dims = convert_values(item.dims, Number, "mesh.dims")
    try:
        types = dict.fromkeys(item.explicit_dims, "explicit")
        return Mesh(item.devices, dims, item.name, axis_types=types)
    except LayoutMapError as error:
        raise make_file_error(f"mesh: {error.what}", error.why, error.fix) from error


def _read_layout(specs: _Specs, place: str, mesh: Mesh, memory: str | None = None) -> Layout:
    try:
        return Layout(specs, mesh, memory=memory)
    except LayoutMapError as error:
        raise make_file_error(f"{place}: {error.what}", error.why, error.fix) from error


def _check_variable(item: _Variable, place: str) -> None:
    for name in ("shape", "parent_shape"):
        if math.prod(n for n in getattr(item, name) or () if n) > MAX_COUNT:
            raise make_type_error(f"{place}.{name}", getattr(item, name), "a shape: it has too many elements")
    try:
        if not _DTYPE.fullmatch(item.dtype):
            raise TypeError
        get_itemsize(item.dtype)
    except (TypeError, ValueError):
        raise make_type_error(f"{place}.dtype", item.dtype, "a dtype") from None
    for i, role in enumerate(item.use or ()):
        if not _ROLE.fullmatch(role):
            fix = 'use "in.0", "out.0", "rows" or ""'
            raise make_file_error(f"{place}.use[{i}] is not an axis role", f"it is {shorten_repr(role)}", fix)
    for name in ("use", "axes"):
        each = getattr(item, name)
        if each is not None and len(each) != len(item.shape):
            why = f"it is for {len(each)} axes, and the shape has {len(item.shape)}"
            raise make_file_error(f"{place}.{name} does not fit the shape", why)
    if item.use is None and item.head_size is not None:
        raise make_file_error(
            f"{place}: 'head_size' is not known", "only a variable with a use has one", "delete it"
        )


def _read_variable(item: _Variable, place: str, mesh: Mesh) -> Assignment:
    _check_variable(item, place)
    use = None if item.use is None else Use(item.use, item.head_size)
    variable = VariableSpec(
        item.path,
        item.shape,
        item.dtype,
        item.kind,
        item.aliases,
        item.parent,
        item.axes,
        item.parent_shape,
        item.model,
        use,
        item.trainable,
        memory=item.memory,
    )
    layout = _read_layout(item.layout, f"{place}.layout", mesh, item.memory or None)
    match = None
    if item.rule is not msgspec.UNSET:
        match = _read_match(item, place, mesh, layout)
    elif (
        item.asked
        or item.others
        or item.near_misses
        or (item.uneven, item.otherwise, item.rule_memory) != (_ERROR, _OTHERWISE, None)
    ):
        raise make_file_error(f"{place} has no 'rule'", "its other fields describe a rule")
    return Assignment(variable, layout, match, item.global_init, item.padded)


def _read_activation(item: _Activation, place: str, mesh: Mesh) -> Match:
    if item.rule is msgspec.UNSET:
        raise make_file_error(f"{place} has no 'rule'", "every plan has one")
    layout = None if item.layout is None else _read_layout(item.layout, f"{place}.layout", mesh)
    return _read_match(item, place, mesh, layout)


def _read_match(item: _Match, place: str, mesh: Mesh, layout: Layout | None) -> Match:
    rule = None
    if isinstance(item.rule, tuple):
        asked = layout if item.asked is None else _read_layout(item.asked, f"{place}.asked", mesh)
        if asked is None:
            raise make_file_error(f"{place} has no 'layout'", "every plan has one")
        rule = Rule(*item.rule, asked.replace_memory(item.rule_memory), item.uneven)
    others = tuple(
        Rule(r.number, r.pattern, _read_layout(r.layout, f"{place}.others[{i}][2]", mesh, r.memory), r.uneven)
        for i, r in enumerate(item.others)
    )
    return Match(item.path, rule, others, item.near_misses, item.otherwise)
