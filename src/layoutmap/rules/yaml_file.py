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

A rule may have its own setting for axes that cannot be split evenly: `{layout: [null, model], uneven: replicate}`,
and name the memory of its variables: `{layout: [null, model], memory: pinned_host}`.

A map does not keep the comments of its file. `to_yaml` writes the reason of a rule as a comment above it.
`layoutmap.core.strict_yaml` describes the part of YAML that a file may use.

`layoutmap schema > rules.schema.json` writes a JSON Schema of the form. Editors check a file by it that begins with

    # yaml-language-server: $schema=rules.schema.json

The order of the rules is their order in the file. This module checks the form, and `LayoutMap` checks the rules.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from layoutmap.core.errors import LayoutMapError, MeshError, RuleError, shorten_repr
from layoutmap.core.layout import UNSHARDED, validate_memory_kind
from layoutmap.core.match import Rest, validate_rest_setting
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import ShardingSpec
from layoutmap.core.strict_yaml import read_yaml
from layoutmap.core.uneven import UnevenSetting, validate_uneven_setting
from layoutmap.rules.patterns import check_pattern_is_fast

VERSION = 1
"""The version of the file format."""

_KEYS = {"version", "mesh", "rules", "activations", "uneven", "rest"}
_MESH_KEYS = {"dims", "name", "devices", "explicit_dims"}
_MAX_ERRORS = 10
_FIX = "write it as LayoutMap.to_yaml() does: version, mesh and rules"


@dataclass(frozen=True, slots=True)
class RulesFileFields:
    """Content of a rules file. `LayoutMap` checks the mesh and the rules.

    `rules` has the specs of variables by pattern, and `activations` those of layer outputs. `dims` is `None` if the
    file has no mesh. `explicit_dims` are the dims with the axis type `"explicit"`. `uneven_rules` and `memory_rules`
    have the settings of single rules by pattern. `reasons` are comments to write above rules; comments are not read.
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


# The reader refuses YAML tags, so write everything as lists, mappings, and scalars without tags (decisions/0199).
def make_rules_file_text(fields: RulesFileFields) -> str:
    """Return the text of a rules file with this content."""
    import yaml

    class FlowList(list[object]):
        """A list written on one line."""

    class FlowMapping(dict[str, object]):
        """A mapping written on one line."""

    safe_dumper: Any = yaml.SafeDumper

    class RulesDumper(safe_dumper):
        """Write specs on one line, and everything else in block style."""

    def represent_flow_list(dumper: Any, data: FlowList) -> object:
        return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)

    def represent_flow_mapping(dumper: Any, data: FlowMapping) -> object:
        return dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True)

    RulesDumper.add_representer(FlowList, represent_flow_list)
    RulesDumper.add_representer(FlowMapping, represent_flow_mapping)

    def convert_spec_to_yaml(spec: ShardingSpec) -> object:
        return None if spec == UNSHARDED else FlowList(spec) if isinstance(spec, tuple) else spec

    def convert_rule_to_yaml(pattern: str, specs: tuple[Any, ...]) -> object:
        listed = FlowList(map(convert_spec_to_yaml, specs))
        settings = FlowMapping(layout=listed)
        if uneven := fields.uneven_rules.get(pattern):
            settings["uneven"] = convert_uneven_to_yaml(uneven)
        if memory := fields.memory_rules.get(pattern):
            settings["memory"] = memory
        return settings if len(settings) > 1 else listed

    def convert_uneven_to_yaml(setting: UnevenSetting) -> object:
        return setting if isinstance(setting, str) else FlowList(setting)

    data: dict[str, object] = {"version": VERSION}
    if fields.dims is not None:
        mesh: dict[str, object] = {"dims": dict(fields.dims)}
        if fields.mesh_name:
            mesh["name"] = fields.mesh_name
        if fields.devices is not None:
            mesh["devices"] = FlowList(fields.devices)
        if fields.explicit_dims:
            mesh["explicit_dims"] = FlowList(fields.explicit_dims)
        data["mesh"] = mesh
    data["rules"] = {pattern: convert_rule_to_yaml(pattern, specs) for pattern, specs in fields.rules.items()}
    if fields.activations:
        data["activations"] = {
            p: FlowList(map(convert_spec_to_yaml, specs)) for p, specs in fields.activations.items()
        }
    if fields.uneven != "error":
        data["uneven"] = convert_uneven_to_yaml(fields.uneven)
    if fields.rest:
        data["rest"] = fields.rest

    def dump_yaml(value: object) -> str:
        return str(yaml.dump(value, Dumper=RulesDumper, sort_keys=False, allow_unicode=True, width=110))

    text = dump_yaml(data)
    end = text.index("rules:")
    for pattern, reason in fields.reasons.items():
        # A key may also occur inside an earlier line, so search for it after the previous key.
        key = textwrap.indent(dump_yaml({pattern: None}).removesuffix("null\n").rstrip(), "  ")
        end = text.index(f"\n{key}", end) + 1
        comment = "".join(
            f"  # {line}\n"
            for line in textwrap.wrap(reason, 106, break_long_words=False, break_on_hyphens=False)
        )
        text = text[:end] + comment + text[end:]
        end += len(comment)
    return text


def parse_rules_file(text: str) -> RulesFileFields:
    """Return the content of a rules file after checking its form.

    Raises:
        RuleError: The text is not YAML as `strict_yaml` reads it, or has an unknown key, an invalid mesh, or another
            version.
    """
    data = read_yaml(text)
    version = _validate_mapping(data, "the file", None).get("version", VERSION)
    if version != VERSION:
        raise RuleError(
            f"rules file has the unknown version {shorten_repr(version)}",
            why=f"this layoutmap reads version {VERSION}",
            fix=f"write version: {VERSION}, delete the line, or use the layoutmap release that wrote the file",
        )
    top = _validate_mapping(data, "the file", _KEYS)
    mesh = None if top.get("mesh") is None else _read_mesh_section(top["mesh"])
    name = (mesh or {}).get("name")
    devices = (mesh or {}).get("devices")
    if not isinstance(name, str | None):
        raise RuleError(
            "rules file: mesh name is not text",
            facts={"value": shorten_repr(name)},
            fix="write the name in quotes, for example name: 'mesh1'",
        )
    explicit_dims = (mesh or {}).get("explicit_dims")
    for key, value in (("devices", devices), ("explicit_dims", explicit_dims)):
        if value is not None and not _is_list_of_texts(value):
            raise RuleError(
                f"rules file: mesh {key} is not a list of texts",
                facts={"value": shorten_repr(value)},
                fix=_FIX,
            )
    dims = None if mesh is None else _validate_mapping(mesh.get("dims"), "mesh dims", None)
    for dim, size in (dims or {}).items():
        if not isinstance(size, int):
            raise RuleError(
                f"rules file: the size of mesh dim {dim!r} is not an integer",
                facts={"value": shorten_repr(size)},
                why="it is the number of devices along the dim",
                fix=f"write a number, as in {{{dim}: 4}}",
            )
    rules, uneven_rules, memory_rules = _split_rule_settings(
        _validate_mapping(_get_section(top, "rules"), "rules", None)
    )
    return RulesFileFields(
        dims=dims,
        mesh_name=name or "",
        devices=None if devices is None else tuple(cast("list[str]", devices)),
        explicit_dims=tuple(cast("list[str]", explicit_dims or [])),
        rules=_read_rules_section(rules, "rules", "rule"),
        activations=_read_rules_section(_get_section(top, "activations"), "activations", "activation rule"),
        uneven=validate_uneven_setting(top.get("uneven", "error"), "rules file"),
        uneven_rules=uneven_rules,
        memory_rules=memory_rules,
        rest=validate_rest_setting(top.get("rest"), "rules file"),
    )


def _read_mesh_section(value: object) -> dict[str, Any]:
    """Return the section `mesh` as a mapping. A text such as `batch=2,model=4` gives a mapping with only `dims`."""
    if not isinstance(value, str):
        return _validate_mapping(value, "mesh", _MESH_KEYS)
    try:
        return {"dims": {dim.name: dim.size for dim in Mesh(None, value).mesh_dims}}
    except MeshError as error:
        raise RuleError(
            f"rules file: mesh: {error.what}", facts=error.facts, why=error.why, fix=error.fix
        ) from error


def read_rules_file_schema() -> str:
    """Return the text of the JSON Schema for rules files. It checks their structure, but not patterns and dims."""
    from importlib.resources import files

    return files("layoutmap.rules").joinpath("schema.json").read_text(encoding="utf-8")


def _get_section(top: dict[str, Any], key: str) -> object:
    """Return a section of the file, or an empty dict if it is missing or empty."""
    return {} if top.get(key) is None else top[key]


def _split_rule_settings(
    rules: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, UnevenSetting], dict[str, str]]:
    """Return the specs, the `uneven` settings, and the `memory` settings of rules, each by pattern."""
    layouts, uneven, memory = dict(rules), dict[str, UnevenSetting](), dict[str, str]()
    for pattern, value in rules.items():
        if isinstance(value, dict):
            fields = _validate_mapping(value, f"rule {pattern!r}", {"layout", "uneven", "memory"})
            layouts[pattern] = fields.get("layout")
            if "uneven" in fields:
                uneven[pattern] = validate_uneven_setting(fields["uneven"], f"rules file: rule {pattern!r}")
            if kind := validate_memory_kind(fields.get("memory"), f"rules file: rule {pattern!r}", RuleError):
                memory[pattern] = kind
    return layouts, uneven, memory


def _read_rules_section(value: object, section: str, rule_kind: str) -> dict[str, tuple[Any, ...]]:
    rules = _validate_mapping(value, section, None)
    check_each_argument_row(_check_specs, [(rule_kind, pattern, specs) for pattern, specs in rules.items()])
    return {
        pattern: tuple(tuple(cast("list[str]", s)) if isinstance(s, list) else s for s in specs)
        for pattern, specs in rules.items()
    }


def check_each_argument_row(check: Callable[..., object], rows: Iterable[tuple[object, ...]]) -> None:
    """Call a check with each row of arguments, and raise one error at the end with the messages of all failures."""
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


def _check_specs(rule_kind: str, pattern: str, specs: object) -> None:
    if not isinstance(specs, list):
        raise RuleError(
            f"rules file: {rule_kind} {pattern!r} has no list of sharding specs",
            facts={"value": shorten_repr(specs)},
            why="a layout has one sharding spec for each axis",
            fix="write a list, as in [null, model]",
        )
    check_pattern_is_fast(pattern, f"rules file: {rule_kind}")
    listed = cast("list[Any]", specs)
    if "None" in listed:
        raise RuleError(
            f"rules file: {rule_kind} {pattern!r}: None is not a mesh dim",
            facts={"value": shorten_repr(listed)},
            why="Python's None is null in YAML",
            fix=f"write [{', '.join('null' if s in ('None', None) else str(s) for s in listed)}]",
        )
    for axis, spec in enumerate(listed):
        if not isinstance(spec, str | None) and not _is_list_of_texts(spec):
            raise RuleError(
                f"rules file: {rule_kind} {pattern!r}: the sharding spec of axis {axis} cannot be read",
                facts={"value": shorten_repr(spec)},
                why="a spec is null, a mesh dim, or a list of mesh dims",
                fix="write null, model or [batch, model]",
            )


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in cast("list[Any]", value))


def _validate_mapping(value: Any, section: str, known_keys: set[str] | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RuleError(
            f"rules file: {section} is not a mapping", facts={"value": shorten_repr(value)}, fix=_FIX
        )
    found = cast("dict[str, Any]", value)
    for key in found:
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleError(
                f"rules file: {section} has a key {key!r} that is not text",
                why="YAML does not read unquoted null and digits as text",
                fix=f"quote it: '{'null' if key is None else key}'",
            )
    unknown = sorted(str(key) for key in found if known_keys is not None and key not in known_keys)
    if unknown:
        raise RuleError(
            f"rules file: {section} has the unknown key {unknown[0]!r}",
            why=f"the keys are {', '.join(sorted(known_keys or ()))}",
            fix="correct the key, or delete it",
        )
    return found
