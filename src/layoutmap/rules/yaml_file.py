"""Read and write a layout map as YAML: the rules file that a project keeps beside its model.

    version: 1
    mesh:
      dims: {batch: 2, model: 4}
    rules:
      blocks\\.\\d+\\.up\\.kernel: [null, model]
      head\\.kernel: [[batch, model], null]
    activations:
      blocks\\.\\d+: [batch, null, null]
    uneven: shrink
    rest: replicated

`version` may be left out, and `mesh: batch=2,model=4` stands for its dims. `to_yaml` writes both in full.

A rule may say for itself what it does with an axis that does not divide: `{layout: [null, model], uneven: replicate}`,
and in which memory its variables are: `{layout: [null, model], memory: pinned_host}`.

Comments are for people, who edit the file as text: a map does not keep them. `to_yaml` writes the reason of a rule as a
comment above it. What of YAML a file may use is in `layoutmap.core.strict_yaml`.

`layoutmap schema > rules.schema.json` writes a JSON Schema of the form. Editors check a file by it that begins with

    # yaml-language-server: $schema=rules.schema.json

The order of the rules is their order in the file. This module knows the form; `LayoutMap` checks what it means.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from layoutmap.core.errors import LayoutMapError, MeshError, RuleError, shorten_repr
from layoutmap.core.layout import UNSHARDED, check_memory
from layoutmap.core.match import Rest, check_rest
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import ShardingSpec
from layoutmap.core.strict_yaml import read_yaml
from layoutmap.core.uneven import UnevenSetting, check_uneven
from layoutmap.rules.patterns import refuse_slow_pattern

VERSION = 1
"""The version of the file format."""

_KEYS = {"version", "mesh", "rules", "activations", "uneven", "rest"}
_MESH_KEYS = {"dims", "name", "devices", "explicit_dims"}
_MAX_ERRORS = 10
_FIX = "write it as LayoutMap.to_yaml() does: version, mesh and rules"


@dataclass(frozen=True, slots=True)
class RulesFields:
    """Store the unchecked fields of a rules file.

    The specs are those of variables in `rules`, and of layers' outputs in `activations`.
    `dims` is `None` if the file names no mesh. `explicit_dims` are those with explicit axes on JAX. `uneven_rules` has
    the rules that say it for themselves, and `memory_rules` those that name a memory. `reasons` are the comments
    to write above rules; none are read.
    """

    dims: Mapping[str, int] | None
    mesh_name: str
    devices: tuple[str, ...] | None
    rules: Mapping[str, tuple[Any, ...]]
    activations: Mapping[str, tuple[Any, ...]]
    explicit_dims: tuple[str, ...] = ()
    uneven: UnevenSetting = "error"
    uneven_rules: Mapping[str, UnevenSetting] = field(default_factory=dict[str, UnevenSetting])
    memory_rules: Mapping[str, str] = field(default_factory=dict[str, str])
    rest: Rest | None = None
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])


# A rules file must not contain tags, so write plain lists and mappings (decisions/0199).
def to_yaml(fields: RulesFields) -> str:
    """Write fields as the text of a rules file."""
    import yaml

    class Flow(list[object]):
        """A list written on one line."""

    class FlowMapping(dict[str, object]):
        """A mapping written on one line."""

    safe_dumper: Any = yaml.SafeDumper

    class Dumper(safe_dumper):
        """Write specs on one line, and everything else in block style."""

    def represent_list(dumper: Any, data: Flow) -> object:
        return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)

    def represent_mapping(dumper: Any, data: FlowMapping) -> object:
        return dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True)

    Dumper.add_representer(Flow, represent_list)
    Dumper.add_representer(FlowMapping, represent_mapping)

    def convert_spec(spec: ShardingSpec) -> object:
        return None if spec == UNSHARDED else Flow(spec) if isinstance(spec, tuple) else spec

    def convert_rule(pattern: str, specs: tuple[Any, ...]) -> object:
        listed = Flow(map(convert_spec, specs))
        own = FlowMapping(layout=listed)
        if uneven := fields.uneven_rules.get(pattern):
            own["uneven"] = convert_uneven(uneven)
        if memory := fields.memory_rules.get(pattern):
            own["memory"] = memory
        return own if len(own) > 1 else listed

    def convert_uneven(setting: UnevenSetting) -> object:
        return setting if isinstance(setting, str) else Flow(setting)

    data: dict[str, object] = {"version": VERSION}
    if fields.dims is not None:
        mesh: dict[str, object] = {"dims": dict(fields.dims)}
        if fields.mesh_name:
            mesh["name"] = fields.mesh_name
        if fields.devices is not None:
            mesh["devices"] = Flow(fields.devices)
        if fields.explicit_dims:
            mesh["explicit_dims"] = Flow(fields.explicit_dims)
        data["mesh"] = mesh
    data["rules"] = {pattern: convert_rule(pattern, specs) for pattern, specs in fields.rules.items()}
    if fields.activations:
        data["activations"] = {p: Flow(map(convert_spec, specs)) for p, specs in fields.activations.items()}
    if fields.uneven != "error":
        data["uneven"] = convert_uneven(fields.uneven)
    if fields.rest:
        data["rest"] = fields.rest

    def dump(value: object) -> str:
        return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110))

    text = dump(data)
    end = text.index("rules:")
    for pattern, reason in fields.reasons.items():
        # Search for each key after the previous one, so that line numbers are correct.
        key = textwrap.indent(dump({pattern: None}).removesuffix("null\n").rstrip(), "  ")
        end = text.index(f"\n{key}", end) + 1
        comment = "".join(f"  # {line}\n" for line in textwrap.wrap(reason, 106, break_long_words=False))
        text = text[:end] + comment + text[end:]
        end += len(comment)
    return text


def from_yaml(text: str) -> RulesFields:
    """Read the fields of a rules file.

    Raises:
        RuleError: It is no YAML of the kind that rules files are (see `strict_yaml`), has a key that is not
            known, a mesh that is not allowed, or another version.
    """
    data = read_yaml(text)
    version = _check_mapping(data, "it", None).get("version", VERSION)
    if version != VERSION:
        raise RuleError(
            f"rules file of version {shorten_repr(version)}",
            why=f"this layoutmap reads version {VERSION}",
            fix=f"write version: {VERSION}, delete the line, or use the layoutmap release that wrote the file",
        )
    top = _check_mapping(data, "it", _KEYS)
    mesh = None if top.get("mesh") is None else _read_mesh(top["mesh"])
    name = (mesh or {}).get("name")
    devices = (mesh or {}).get("devices")
    if not isinstance(name, str | None):
        raise RuleError("rules file: mesh name is not text", facts={"there": shorten_repr(name)}, fix=_FIX)
    explicit_dims = (mesh or {}).get("explicit_dims")
    for key, value in (("devices", devices), ("explicit_dims", explicit_dims)):
        if value is not None and not _are_texts(value):
            raise RuleError(
                f"rules file: mesh {key} is not a list of texts",
                facts={"there": shorten_repr(value)},
                fix=_FIX,
            )
    dims = None if mesh is None else _check_mapping(mesh.get("dims"), "mesh dims", None)
    for dim, size in (dims or {}).items():
        if not isinstance(size, int):
            raise RuleError(
                f"rules file: the size of mesh dim {dim!r} is not a whole number",
                facts={"there": shorten_repr(size)},
                why="it is the number of devices along the dim",
                fix=f"write a number, as in {{{dim}: 4}}",
            )
    rules, uneven_rules, memory_rules = _split_settings(
        _check_mapping(_read_section(top, "rules"), "rules", None)
    )
    return RulesFields(
        dims=dims,
        mesh_name=name or "",
        devices=None if devices is None else tuple(cast("list[str]", devices)),
        explicit_dims=tuple(cast("list[str]", explicit_dims or [])),
        rules=_read_rules(rules, "rules", "rule"),
        activations=_read_rules(_read_section(top, "activations"), "activations", "activation rule"),
        uneven=check_uneven(top.get("uneven", "error"), "rules file"),
        uneven_rules=uneven_rules,
        memory_rules=memory_rules,
        rest=check_rest(top.get("rest"), "rules file"),
    )


def _read_mesh(value: object) -> dict[str, Any]:
    """Read the mesh as a mapping. A text such as `batch=2,model=4` gives its dims."""
    if not isinstance(value, str):
        return _check_mapping(value, "mesh", _MESH_KEYS)
    try:
        return {"dims": {dim.name: dim.size for dim in Mesh(None, value).mesh_dims}}
    except MeshError as error:
        raise RuleError(
            f"rules file: mesh: {error.what}", facts=error.facts, why=error.why, fix=error.fix
        ) from error


def read_schema() -> str:
    """Return the JSON Schema of a rules file. It checks the structure, not patterns and dims."""
    from importlib.resources import files

    return files("layoutmap.rules").joinpath("schema.json").read_text(encoding="utf-8")


def _read_section(top: dict[str, Any], key: str) -> object:
    """Return a section of the file, or an empty dict if all its lines are comments."""
    return {} if top.get(key) is None else top[key]


def _split_settings(
    rules: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, UnevenSetting], dict[str, str]]:
    """Split rules written as mappings into specs, `uneven` settings, and `memory` settings."""
    layouts, uneven, memory = dict(rules), dict[str, UnevenSetting](), dict[str, str]()
    for pattern, value in rules.items():
        if isinstance(value, dict):
            own = _check_mapping(value, f"rule {pattern!r}", {"layout", "uneven", "memory"})
            layouts[pattern] = own.get("layout")
            if "uneven" in own:
                uneven[pattern] = check_uneven(own["uneven"], f"rules file: rule {pattern!r}")
            if kind := check_memory(own.get("memory"), f"rules file: rule {pattern!r}", RuleError):
                memory[pattern] = kind
    return layouts, uneven, memory


def _read_rules(value: object, what: str, rule: str) -> dict[str, tuple[Any, ...]]:
    rules = _check_mapping(value, what, None)
    check_all(_check_specs, [(rule, pattern, specs) for pattern, specs in rules.items()])
    return {
        pattern: tuple(tuple(cast("list[str]", s)) if isinstance(s, list) else s for s in specs)
        for pattern, specs in rules.items()
    }


def check_all(check: Callable[..., object], rows: Iterable[tuple[object, ...]]) -> None:
    """Call a check for each row of arguments, and raise one error for all failures."""
    errors: list[LayoutMapError] = []
    for row in rows:
        try:
            check(*row)
        except LayoutMapError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        more = f"\n\n... and {len(errors) - _MAX_ERRORS} more" if len(errors) > _MAX_ERRORS else ""
        shown = "\n\n".join(map(str, errors[:_MAX_ERRORS]))
        raise RuleError(f"{len(errors)} errors\n{shown}{more}")


def _check_specs(rule: str, pattern: str, specs: object) -> None:
    if not isinstance(specs, list):
        raise RuleError(
            f"rules file: {rule} {pattern!r} has no list of sharding specs",
            facts={"there": shorten_repr(specs)},
            why="a layout has one sharding spec for each axis",
            fix="write a list, as in [null, model]",
        )
    refuse_slow_pattern(pattern, f"rules file: {rule}")
    listed = cast("list[Any]", specs)
    if "None" in listed:
        raise RuleError(
            f"rules file: {rule} {pattern!r}: None is not a mesh dim",
            facts={"there": shorten_repr(listed)},
            why="Python's None is null in YAML",
            fix=f"write [{', '.join('null' if s in ('None', None) else str(s) for s in listed)}]",
        )
    for axis, spec in enumerate(listed):
        if not isinstance(spec, str | None) and not _are_texts(spec):
            raise RuleError(
                f"rules file: {rule} {pattern!r}: the sharding spec of axis {axis} cannot be read",
                facts={"there": shorten_repr(spec)},
                why="a spec is null, a mesh dim, or a list of mesh dims",
                fix="write null, model or [batch, model]",
            )


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in cast("list[Any]", value))


def _check_mapping(value: Any, what: str, keys: set[str] | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RuleError(
            f"rules file: {what} is not a mapping", facts={"there": shorten_repr(value)}, fix=_FIX
        )
    found = cast("dict[str, Any]", value)
    for key in found:
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleError(
                f"rules file: {what} has a key {key!r} that is not text",
                why="YAML does not read unquoted null and digits as text",
                fix=f"quote it: '{'null' if key is None else key}'",
            )
    unknown = sorted(str(key) for key in found if keys is not None and key not in keys)
    if unknown:
        raise RuleError(
            f"rules file: {what} has a key {unknown[0]!r}",
            why=f"the keys are {', '.join(sorted(keys or ()))}",
            fix="correct the key, or delete it",
        )
    return found
