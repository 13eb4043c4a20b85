"""Read name tables, which map the paths and axes of a model's variables to those of another library.

    # My Keras model, and the names of its published weights.
    version: 1
    names:
      embedding.embeddings: (model.)?embed_tokens.weight
      layers.*.up.kernel: {from: (model.)?layers.*.mlp.up_proj.weight, axes: out in -> in out}
      layers.*.query.kernel: {from: layers.*.q_proj.weight, axes: (heads size) width -> width heads size}
      layers.*.kv.kernel: {from: [layers.*.k.weight, layers.*.v.weight], axes: out in -> both in out}
      layers.*.gate.kernel: {from: layers.*.gate_up.weight, axes: (0/2 out) in -> in out}

On the left is the path in the model, or its end after a dot; on the right is the name in the other library. A `*`
stands for digits and `**` for any text, which is the same for the n-th star on both sides. `(model.)?` is optional in
names that are read, and is part of names that are written. Several names are joined along the axis that only the right
side of `axes` has. See `layoutmap.checkpoint.axes` for `axes`. A table works in both directions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from layoutmap.checkpoint.axes import ArrayAxes, AxisPart, check_same_axis_names, parse_axes_expression
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import RuleError, shorten_repr
from layoutmap.core.strict_yaml import read_yaml
from layoutmap.rules.near_misses import find_nearest_candidates

VERSION = 1
"""The version of the table format."""

_TOKEN = re.compile(r"(\*\*|\*|\([^()*]*\)\?)")
_LEFT = "a path in the model"


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A pattern for names, in which `*` stands for digits, `**` for any text, and `(...)?` for an optional part.

    Args:
        text: The pattern.
    """

    text: str

    def match_name(self, name: str, *, allow_prefix: bool = False) -> tuple[int, tuple[str, ...]] | None:
        """Return how many characters of a name match, and each star's text, or `None` if it does not match.

        Args:
            name: The name.
            allow_prefix: Whether the pattern may also match only the end of the name after a dot.
        """
        match = re.fullmatch(
            (r"(?:.*?\.)??" if allow_prefix else "") + f"(?P<own>{self._make_regex()})", name
        )
        return None if match is None else (len(match["own"]), match.groups()[1:])

    def make_name_from_stars(self, stars: Sequence[str], *, with_optional: bool = True) -> str:
        """Return the name in which these texts replace the stars, with or without the optional parts."""
        texts = iter(stars)
        return "".join(
            next(texts)
            if part.startswith("*")
            else part[1:-2] * with_optional
            if _is_optional(part)
            else part
            for part in _TOKEN.split(self.text)
        )

    @property
    def stars(self) -> list[str]:
        """The stars of the pattern, in order."""
        return [token for token in _TOKEN.findall(self.text) if token.startswith("*")]

    def _make_regex(self) -> str:
        meanings = {"*": r"(\d+)", "**": "(.*)"}
        return "".join(
            meanings.get(token, f"(?:{re.escape(token[1:-2])})?" if _is_optional(token) else re.escape(token))
            for token in _TOKEN.split(self.text)
        )


def _is_optional(token: str) -> bool:
    return token.startswith("(") and token.endswith(")?")


@dataclass(frozen=True, slots=True)
class TensorPattern:
    """A tensor of the other library that contains a variable of the model or one of its equal parts.

    Args:
        name: The pattern of the tensor's name.
        tensor_axes: The axes of the tensor; `None`: those of the variable.
        variable_axes: The axes of the variable; `None`: those of the tensor.
    """

    name: NamePattern
    tensor_axes: ArrayAxes | None = None
    variable_axes: ArrayAxes | None = None


@dataclass(frozen=True, slots=True)
class NameTableLine:
    """One line of a name table.

    Args:
        path: The pattern of the path in the model.
        tensors: The tensors of the other library that make up the variable. Empty: the variable is not stored.
    """

    path: NamePattern
    tensors: tuple[TensorPattern, ...]


@dataclass(frozen=True, slots=True)
# A name table only moves values, so it converts exactly in both directions, and shard by shard (decisions/0084).
class NameTable:
    """Map the paths of a model's variables to the names of tensors in a different library.

    Args:
        where: The name of the table in messages.
        entries: The lines of the table.
        exact: Lines by the full path of their variable, for a table of one model.
    """

    where: str
    entries: tuple[NameTableLine, ...]
    exact: Mapping[str, NameTableLine] = field(default_factory=dict[str, NameTableLine])

    def find_matching_line(self, path: str) -> tuple[NameTableLine, tuple[str, ...]] | None:
        """Return the line that matches most characters of a path, and each star's text, or `None` if none does."""
        if path in self.exact:
            return self.exact[path], ()
        found = [
            (size, -index, entry, stars)
            for index, entry in enumerate(self.entries)
            if (match := entry.path.match_name(path, allow_prefix=True)) is not None
            for size, stars in [match]
        ]
        return max(found, key=lambda each: each[:2])[2:] if found else None


def list_name_tables() -> list[str]:
    """Return the names of the tables shipped with layoutmap."""
    return sorted(each.name[:-5] for each in _get_tables_folder().iterdir() if each.name.endswith(".yaml"))


def read_name_table(names: str | os.PathLike[str] | Mapping[str, Any]) -> NameTable:
    """Read a name table: one that is shipped with layoutmap, a YAML file, or a mapping.

    Args:
        names: The name of a shipped table, such as `"llama"`; the path of a YAML file; or a mapping, as such a file has
            it under `names`.

    Raises:
        RuleError: There is no such table, or a line of it is invalid. The message names the line.

    Example:
        >>> table = read_name_table({"d1.kernel": {"from": "fc.weight", "axes": "out in -> in out"}})
        >>> table.find_matching_line("model.d1.kernel")[0].tensors[0].name.text
        'fc.weight'
        >>> read_name_table("llama").where
        'llama'
    """
    if isinstance(names, Mapping):
        return NameTable("names", tuple(_parse_name_table_lines("names", "", dict(names))))
    where = os.fspath(names)
    if names == "checkpoint":
        raise RuleError(
            "names='checkpoint' needs an existing model",
            why="it stands for the names in the model's own files, and these are read from the model, so it must exist",
            fix="create the model first, as in model = layout_map.build(make_model), and load into it: "
            "lm.load(model, directory, names='checkpoint')",
        )
    if isinstance(names, str) and not names.endswith((".yaml", ".yml")) and os.sep not in names:
        if names not in list_name_tables():
            raise RuleError(
                f"names={names!r}: there is no such name table",
                facts={"near misses": ", ".join(find_nearest_candidates(names, list_name_tables()))},
                why=f"the tables are {', '.join(list_name_tables())}",
                fix="name one of them, a file as in names='mine.yaml', or pass a mapping",
            )
        text = _get_tables_folder().joinpath(f"{names}.yaml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(where).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RuleError(
                f"{where}: the name table cannot be read", why=str(error), fix="pass the path of a YAML file"
            ) from error
    data: Any = read_yaml(text, where)
    content = shorten_repr(data)
    if not isinstance(data, dict) or (found := cast("dict[str, Any]", data)).get("version") != VERSION:
        raise RuleError(
            f"{where}: this is not a name table of version {VERSION}",
            facts={"content": content},
            why="a name table is a mapping that begins with its version",
            fix=f"begin with version: {VERSION}, then names:",
        )
    if unknown := next((key for key in found if key not in ("version", "names")), None):
        raise _make_table_error(
            where,
            text,
            unknown,
            f"{unknown!r} is an unknown key",
            "the keys are version and names",
            f"delete {unknown!r}",
        )
    entries = found.get("names")
    if not isinstance(entries, dict):
        raise _make_table_error(
            where,
            text,
            "names",
            "the key 'names' is not a mapping",
            f"it is {shorten_repr(entries)}",
            f"under names, map {_LEFT} to a name",
        )
    return NameTable(where, tuple(_parse_name_table_lines(where, text, cast("dict[str, Any]", entries))))


def make_name_table_of_model(where: str, names: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> NameTable:
    """Build the table of one model from the names and axes of the tensors that make up each variable.

    Args:
        where: The name of the table in messages.
        names: For each variable its path, and the name and axes expression of each of its tensors. A variable without
            tensors is not stored.
    """
    lines: dict[str, NameTableLine] = {}
    for path, parts in names:
        sides = [(name, *parse_axes_expression(axes)) for name, axes in parts]
        lines[path] = NameTableLine(
            NamePattern(path),
            tuple(TensorPattern(NamePattern(n), tensor, variable) for n, tensor, variable in sides),
        )
    return NameTable(where, (), lines)


def _get_tables_folder() -> Any:
    return files("layoutmap.checkpoint").joinpath("names")


def _parse_name_table_lines(where: str, text: str, entries: dict[str, Any]) -> Iterator[NameTableLine]:
    for path, value in entries.items():
        try:
            yield _parse_name_table_line(path, value)
        except ValueError as error:
            fix = 'write a: b, or a: {from: b, axes: "out in -> in out"}'
            raise _make_table_error(where, text, path, f"{path!r} cannot be read", str(error), fix) from None


def _parse_name_table_line(path: Any, value: Any) -> NameTableLine:
    if not isinstance(path, str) or not path:
        raise ValueError(
            f"{_LEFT} is empty" if path == "" else f"{_LEFT} must be text, not {describe_type(path)}"
        )
    pattern = NamePattern(path)
    if not isinstance(value, Mapping):
        value = {"from": value}
    fields = dict(cast("Mapping[str, Any]", value))
    names, axes = fields.pop("from", None), fields.pop("axes", None)
    if fields:
        raise ValueError(f"{next(iter(fields))!r} is an unknown key; the keys are from and axes")
    several = isinstance(names, (list, tuple))
    listed = list(cast("Sequence[Any]", names)) if several else [names]
    if not listed or not all(isinstance(name, str) and name for name in listed):
        raise ValueError(f"from must be a name or a list of names, not {shorten_repr(names)}")
    name_patterns = [NamePattern(name) for name in listed]
    for each in name_patterns:
        if each.stars != pattern.stars:
            raise ValueError(f"{each.text!r} has the stars {each.stars}, but the path has {pattern.stars}")
    if axes is None:
        if several:
            raise ValueError(
                "a list of names needs the key 'axes', which says how to join them, as in 'out in -> both out in'"
            )
        return NameTableLine(pattern, (TensorPattern(name_patterns[0]),))
    if not isinstance(axes, str):
        raise ValueError(f"axes must be text, such as 'out in -> in out', and not {shorten_repr(axes)}")
    tensor_axes, variable_axes = parse_axes_expression(axes)
    if not several:
        check_same_axis_names(variable_axes, tensor_axes)
        return NameTableLine(pattern, (TensorPattern(name_patterns[0], tensor_axes, variable_axes),))
    known = {atom for axis in tensor_axes for atom in axis}
    joined = [a for axis in variable_axes for a in axis if isinstance(a, str) and a not in known]
    if len(joined) != 1:
        raise ValueError(
            f"several names need exactly one axis that is only on the right side, not {len(joined)}"
        )
    tensors: list[TensorPattern] = []
    for index, each in enumerate(name_patterns):
        part = AxisPart(index, len(name_patterns))
        side = tuple(tuple(part if atom == joined[0] else atom for atom in axis) for axis in variable_axes)
        check_same_axis_names(side, tensor_axes)
        tensors.append(TensorPattern(each, tensor_axes, side))
    return NameTableLine(pattern, tuple(tensors))


def _make_table_error(where: str, text: str, key: Any, what: str, why: str, fix: str) -> RuleError:
    lines = text.splitlines()
    own = (n for n, line in enumerate(lines, 1) if line.strip().lstrip("\"'?").startswith(str(key)))
    return RuleError(f"{where}: {what}", facts={"line": next(own, "")}, why=why, fix=fix)
