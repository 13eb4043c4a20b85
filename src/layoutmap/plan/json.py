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

Writer and reader are in one file, a little longer than others, so that a field is added to both or to none.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, get_args

from layoutmap.core.errors import LayoutMapError, PlanError, brief
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.match import Match, Rule
from layoutmap.core.mesh import Mesh
from layoutmap.core.uneven import Uneven
from layoutmap.core.variables import Assignment, Kind, Use, VariableSpec, itemsize
from layoutmap.plan.problems import Problem, Severity
from layoutmap.plan.table import PlanTable

FORMAT = "layoutmap plan"
VERSION = 1
_OTHERWISE = Match("", None).otherwise
_ERROR: Uneven = "error"  # what a rule says of an axis that does not divide, if it says nothing
_MOST = 2**63 - 1  # of elements, in one axis and in all; what tensors can have
_DTYPE = re.compile(r"[a-z]{3}[a-z0-9_]*")
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # of surrogates; no encoding can write it
_MISSING: Any = object()

T = TypeVar("T")
Read = Callable[[Any, str], T]
"""Makes a value of a part of the file; the text is the place of that part, for messages."""


def plan_to_json(plan: PlanTable) -> str:
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


def plan_from_json(text: str) -> PlanTable:
    """Read a plan.

    Raises:
        PlanError: The text is no plan, or of a newer version; says where.
    """
    try:
        data: Any = json.loads(text, object_pairs_hook=_Object)
    except (ValueError, TypeError) as error:
        raise _refused("it is no JSON", str(error)) from error
    except RecursionError:
        raise _refused("it is no JSON of a plan", "it is nested too deeply to be read") from None
    if not isinstance(data, _Object) or data.get("format") != FORMAT:
        raise _refused("it is no plan", f'it does not say "format": "{FORMAT}"')
    top = _Fields(data, "plan")
    version: Any = top("format", _text) and top("version", lambda each, _: each, None)
    if type(version) is not int or version != VERSION:
        why = f"this layoutmap reads version {VERSION}"
        raise _refused(f"version {brief(version)}", why, "write it again with this layoutmap")
    mesh = top("mesh", _mesh)
    plan = PlanTable(
        mesh,
        top("variables", _list_of(lambda each, place: _read_variable(each, place, mesh))),
        top("problems", _list_of(_read_problem)),
        top("activations", _list_of(lambda each, place: _read_activation(each, place, mesh))),
        top("free_activations", _flag, False),
    )
    top.check()
    at: dict[tuple[str, str], int] = {}
    for i, variable in enumerate(a.variable for a in plan.assignments):
        first = at.setdefault((variable.model, variable.path), i)
        if first != i:
            why = f"variables[{first}] is the same one, and each is counted once"
            raise _refused(f"variables[{i}]: {variable.path!r} is there twice", why, "delete one of the two")
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
    """What to sort by: specs are `None`, texts or tuples, which cannot be compared."""
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


def _problem(problem: Problem) -> dict[str, Any]:
    written = dataclasses.asdict(problem)
    return {name: value for name, value in written.items() if value or name in ("subject", "what")}


# -- reading


class _Object(dict[str, Any]):
    """An object of the file; knows a key that is there twice, of which JSON itself keeps the last."""

    def __init__(self, pairs: list[tuple[str, Any]]):
        super().__init__(pairs)
        seen: set[str] = set()
        self.twice = next((key for key, _ in pairs if key in seen or seen.add(key)), None)


class _Fields:
    """The fields of one object, each read by its key; what is missing, wrong or not known is refused with its place."""

    def __init__(self, item: Any, place: str):
        self._item, self._place, self._asked = _object(item, place), place, list[str]()

    def __contains__(self, key: str) -> bool:
        return key in self._item

    def __call__(self, key: str, read: Read[T], default: Any = _MISSING) -> T:
        self._asked.append(key)
        if key in self._item:
            return read(self._item[key], key if self._place == "plan" else f"{self._place}.{key}")
        if default is _MISSING:
            raise _refused(f"{self._place} has no {key!r}", "every plan has one")
        return default

    def check(self) -> None:
        """Raise if the object has a key that nobody has asked for."""
        for key in self._item:
            if key not in self._asked:
                near = difflib.get_close_matches(key, self._asked, 1)
                fix = (
                    f"did you mean {near[0]!r}?" if near else "delete it, or use the layoutmap that wrote it"
                )
                raise _refused(f"{self._place}: {brief(key)} is not known", "a plan has no such key", fix)


def _refused(what: str, why: str, fix: str = "write it with plan.to_json()") -> PlanError:
    return PlanError(f"plan file: {what}", why=why, fix=fix)


def _wrong(place: str, value: Any, wanted: str) -> PlanError:
    return _refused(f"{place} is no {wanted}", f"it is {brief(value)}")


def _object(value: Any, place: str) -> _Object:
    if not isinstance(value, _Object):
        raise _wrong(place, value, "object")
    if value.twice is not None:
        why = "which of the two values is meant is not known"
        raise _refused(f"{place}: key {value.twice!r} is there twice", why, "delete one of the two")
    return value


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _wrong(place, value, "text")
    return value


def _flag(value: Any, place: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(place, value, "true or false")
    return value


def _number(value: Any, place: str) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:  # a bool is an int
        raise _wrong(place, value, "whole number of 0 or more")
    return value


def _list_of(read: Read[T]) -> Read[tuple[T, ...]]:
    def read_all(value: Any, place: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise _wrong(place, value, "list")
        return tuple(read(each, f"{place}[{i}]") for i, each in enumerate(cast("list[Any]", value)))

    return read_all


def _one_of(*known: T) -> Read[T]:
    def read(value: Any, place: str) -> T:
        if isinstance(value, str):
            for each in known:
                if value == each:
                    return each
        why = f"it is {brief(value)}"
        raise _refused(f"{place} is not known", why, f"use one of {', '.join(map(str, known))}")

    return read


def _or_null(read: Read[T]) -> Read[T | None]:
    return lambda value, place: None if value is None else read(value, place)


_texts, _shape_of_any = _list_of(_text), _list_of(_number)
_uneven: Read[Uneven] = _one_of(*get_args(Uneven))


def _shape(value: Any, place: str) -> tuple[int, ...]:
    shape = _shape_of_any(value, place)
    if math.prod(n for n in shape if n) > _MOST:
        raise _wrong(place, value, "shape: it has too many elements")
    return shape


def _dtype(value: Any, place: str) -> str:
    try:
        if not _DTYPE.fullmatch(_text(value, place)):
            raise TypeError
        itemsize(value)
    except (TypeError, ValueError):
        raise _wrong(place, value, "dtype") from None
    return value


def _mesh(item: Any, place: str) -> Mesh:
    read = _Fields(item, place)
    sizes = read("dims", _object)
    dims = {name: _number(size, f"{place}.dims.{name}") for name, size in sizes.items()}
    devices, name = read("devices", _or_null(_texts), None), read("name", _text, "")
    read.check()
    try:
        return Mesh(devices, dims, name)
    except LayoutMapError as error:
        raise _refused(f"{place}: {error.what}", error.why, error.fix) from error


def _layout(mesh: Mesh) -> Read[Layout]:
    def read(value: Any, place: str) -> Layout:
        specs = _list_of(_spec)(value, place)
        try:
            return Layout(specs, mesh)
        except LayoutMapError as error:
            raise _refused(f"{place}: {error.what}", error.why, error.fix) from error

    return read


def _spec(value: Any, place: str) -> str | tuple[str, ...] | None:
    return value if isinstance(value, str | None) else _texts(value, place)


def _read_variable(item: Any, place: str, mesh: Mesh) -> Assignment:
    read = _Fields(item, place)
    use = read("use", _or_null(_texts), None)
    shape = read("shape", _shape)
    axes = read("axes", _or_null(_list_of(_shape_of_any)), None)
    for name, each in (("use", use), ("axes", axes)):
        if each is not None and len(each) != len(shape):
            why = f"it is for {len(each)} axes, and the shape has {len(shape)}"
            raise _refused(f"{place}.{name} does not fit the shape", why)
    variable = VariableSpec(
        read("path", _text),
        shape,
        read("dtype", _dtype),
        read("kind", _one_of(*Kind), Kind.WEIGHT),
        read("aliases", _texts, ()),
        read("parent", _or_null(_text), None),
        axes,
        read("parent_shape", _or_null(_shape), None),
        read("model", _text, ""),
        None if use is None else Use(use, read("head_size", _or_null(_number), None)),
        read("trainable", _flag, True),
    )
    layout = read("layout", _layout(mesh))
    match = _read_match(variable.path, read, mesh, layout) if "rule" in read else None
    global_init = read("global_init", _text, "")
    read.check()
    return Assignment(variable, layout, match, global_init)


def _read_activation(item: Any, place: str, mesh: Mesh) -> Match:
    read = _Fields(item, place)
    layout = read("layout", _layout(mesh), None)
    match = _read_match(read("path", _text), read, mesh, layout)
    read.check()
    return match


def _read_match(path: str, read: _Fields, mesh: Mesh, layout: Layout | None) -> Match:
    rule = None
    won = read("rule", _or_null(_row(_number, _text)))
    if won is not None:
        asked = read("asked", _layout(mesh), layout) or read("layout", _layout(mesh))
        rule = Rule(won[0], won[1], asked, read("uneven", _uneven, _ERROR))
    others = read("others", _list_of(_row(_number, _text, _layout(mesh), _uneven, least=3)), ())
    return Match(
        path,
        rule,
        tuple(Rule(*other) for other in others),
        read("near_misses", _texts, ()),
        read("otherwise", _text, _OTHERWISE),
    )


def _row(*reads: Read[Any], least: int = 2) -> Read[list[Any]]:
    """Reads a list whose places have types of their own; those after the first `least` may be left out."""

    def read(value: Any, place: str) -> list[Any]:
        items = cast("list[Any]", value) if isinstance(value, list) else []
        if not least <= len(items) <= len(reads):
            raise _wrong(
                place, value, f"list of {least}" + (f" to {len(reads)}" if least < len(reads) else "")
            )
        return [of(each, f"{place}[{i}]") for i, (of, each) in enumerate(zip(reads, items, strict=False))]

    return read


def _read_problem(item: Any, place: str) -> Problem:
    read = _Fields(item, place)
    facts = read("facts", _list_of(_row(_text, _text)), ())
    problem = Problem(
        read("kind", _text, ""),
        read("severity", _one_of(*get_args(Severity))),
        read("subject", _text),
        read("what", _text),
        tuple((name, value) for name, value in facts),
        read("why", _text, ""),
        read("fix", _text, ""),
        read("model", _text, ""),
    )
    read.check()
    return problem
