"""Read name tables, which map the paths and axes of a model's variables to those of another library.

    # A model of mine, in keras and as others publish it.
    version: 1
    names:
      embedding.embeddings: (model.)?embed_tokens.weight
      layers.*.up.kernel: {from: (model.)?layers.*.mlp.up_proj.weight, axes: out in -> in out}
      layers.*.query.kernel: {from: layers.*.q_proj.weight, axes: (heads size) width -> width heads size}
      layers.*.kv.kernel: {from: [layers.*.k.weight, layers.*.v.weight], axes: out in -> both in out}
      layers.*.gate.kernel: {from: layers.*.gate_up.weight, axes: (0/2 out) in -> in out}

On the left is the path in the model, or the end of it after a dot; on the right the name elsewhere. A `*` stands for
digits and `**` for any text, the first of one name for the first of the other. `(model.)?` may be there or not; what is
written has it. Of several names, the axis that only the right side has says which. What `axes` may say is in
`layoutmap.checkpoint.axes`: values are moved and never computed, so a table reads both ways.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from layoutmap.checkpoint.axes import AxisPart, Side, check_sides, parse_axes
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import RuleError, shorten_repr
from layoutmap.core.strict_yaml import read_yaml
from layoutmap.rules.near_misses import find_nearest

VERSION = 1
"""The version of the table format."""

_TOKEN = re.compile(r"(\*\*|\*|\([^()*]*\)\?)")
_LEFT = "a path in the model"


@dataclass(frozen=True, slots=True)
class Template:
    """A name pattern in which `*` stands for numbers.

    Args:
        text: The name, with `*`, `**` and `(...)?`.
    """

    text: str

    def find(self, name: str, *, allow_prefix: bool = False) -> tuple[int, tuple[str, ...]] | None:
        """Match a name. Return the matched length and the text of each star, or `None`.

        Args:
            name: The name.
            allow_prefix: Whether it may also be what comes after a dot.
        """
        found = re.fullmatch(
            (r"(?:.*?\.)??" if allow_prefix else "") + f"(?P<own>{self._make_pattern()})", name
        )
        return None if found is None else (len(found["own"]), found.groups()[1:])

    def write(self, stars: Sequence[str], *, optional: bool = True) -> str:
        """Fill the stars of the name with these texts."""
        left = iter(stars)
        return "".join(
            next(left) if token.startswith("*") else token[1:-2] * optional if _is_optional(token) else token
            for token in _TOKEN.split(self.text)
        )

    @property
    def stars(self) -> list[str]:
        """The stars of the pattern, in order."""
        return [token for token in _TOKEN.findall(self.text) if token.startswith("*")]

    def _make_pattern(self) -> str:
        meanings = {"*": r"(\d+)", "**": "(.*)"}
        return "".join(
            meanings.get(token, f"(?:{re.escape(token[1:-2])})?" if _is_optional(token) else re.escape(token))
            for token in _TOKEN.split(self.text)
        )


def _is_optional(token: str) -> bool:
    return token.startswith("(") and token.endswith(")?")


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the other library that holds a variable of the model or one of its equal parts.

    Args:
        theirs: Its name.
        there: Its axes; `None`: the variable's axes.
        here: The axes of the variable.
    """

    theirs: Template
    there: Side | None = None
    here: Side | None = None


@dataclass(frozen=True, slots=True)
class Renaming:
    """One line of a name table.

    Args:
        ours: The path in the model.
        pieces: The matching tensors of the other library.
    """

    ours: Template
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
# A table only moves values, so it is exact in both directions and works shard by shard (decisions/0084).
class NameTable:
    """Map paths of a model to names in another library.

    Args:
        where: The table, as messages name it.
        entries: Its lines.
        exact: Lines by full path, for a table of one model.
    """

    where: str
    entries: tuple[Renaming, ...]
    exact: Mapping[str, Renaming] = field(default_factory=dict[str, Renaming])

    def find(self, path: str) -> tuple[Renaming, tuple[str, ...]] | None:
        """Find the line with the longest match for a model path, and the text of each star."""
        if path in self.exact:
            return self.exact[path], ()
        found = [
            (size, -number, entry, stars)
            for number, entry in enumerate(self.entries)
            if (match := entry.ours.find(path, allow_prefix=True)) is not None
            for size, stars in [match]
        ]
        return max(found, key=lambda each: each[:2])[2:] if found else None


def list_name_tables() -> list[str]:
    """Return the names of the tables shipped with this library."""
    return sorted(each.name[:-5] for each in _find_folder().iterdir() if each.name.endswith(".yaml"))


def read_names(names: str | os.PathLike[str] | Mapping[str, Any]) -> NameTable:
    """Read a name table.

    Args:
        names: The name of a table of the library, such as `"llama"`; a YAML file; or a mapping, what such a file has
            under `names`.

    Raises:
        RuleError: There is no such table, or it cannot be read; says where.

    Example:
        >>> table = read_names({"d1.kernel": {"from": "fc.weight", "axes": "out in -> in out"}})
        >>> table.find("model.d1.kernel")[0].pieces[0].theirs.text
        'fc.weight'
        >>> read_names("llama").where
        'llama'
    """
    if isinstance(names, Mapping):
        return NameTable("names", tuple(_read_entries("names", "", dict(names))))
    where = os.fspath(names)
    if isinstance(names, str) and not names.endswith((".yaml", ".yml")) and os.sep not in names:
        if names not in list_name_tables():
            raise RuleError(
                f"names={names!r}: there is no such name table",
                facts={"near misses": ", ".join(find_nearest(names, list_name_tables()))},
                why=f"the tables are {', '.join(list_name_tables())}",
                fix="name one of them, a file as in names='mine.yaml', or pass a mapping",
            )
        text = _find_folder().joinpath(f"{names}.yaml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(where).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RuleError(
                f"{where}: the name table cannot be read", why=str(error), fix="name a YAML file"
            ) from error
    data: Any = read_yaml(text, where)
    there = shorten_repr(data)
    if not isinstance(data, dict) or (found := cast("dict[str, Any]", data)).get("version") != VERSION:
        raise RuleError(
            f"{where}: this is not a name table of version {VERSION}",
            facts={"there": there},
            why="a name table is a mapping that begins with its version",
            fix=f"begin with version: {VERSION}, then names:",
        )
    if unknown := next((key for key in found if key not in ("version", "names")), None):
        raise _make_error(
            where,
            text,
            unknown,
            f"it has an unknown key {unknown!r}",
            "the keys are version and names",
            "delete it",
        )
    entries = found.get("names")
    if not isinstance(entries, dict):
        raise _make_error(
            where,
            text,
            "names",
            "names is not a mapping",
            f"it is {shorten_repr(entries)}",
            f"map {_LEFT} to a name",
        )
    return NameTable(where, tuple(_read_entries(where, text, cast("dict[str, Any]", entries))))


def make_model_table(where: str, names: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> NameTable:
    """Build the table of one model from the name and axes of each variable.

    Args:
        where: The table, as messages name it.
        names: Pairs of a path and of (name, axes). A variable without any is not stored.
    """
    lines: dict[str, Renaming] = {}
    for path, parts in names:
        sides = [(name, *parse_axes(axes)) for name, axes in parts]
        lines[path] = Renaming(
            Template(path), tuple(Piece(Template(n), there, ours) for n, there, ours in sides)
        )
    return NameTable(where, (), lines)


def _find_folder() -> Any:
    return files("layoutmap.checkpoint").joinpath("names")


def _read_entries(where: str, text: str, found: dict[str, Any]) -> Iterator[Renaming]:
    for path, value in found.items():
        try:
            yield _read_entry(path, value)
        except ValueError as error:
            fix = 'write a: b, or a: {from: b, axes: "out in -> in out"}'
            raise _make_error(where, text, path, f"{path!r} cannot be read", str(error), fix) from None


def _read_entry(path: Any, value: Any) -> Renaming:
    if not isinstance(path, str) or not path:
        raise ValueError(f"{_LEFT} is text, and it is {describe_type(path)}")
    ours = Template(path)
    if not isinstance(value, Mapping):
        value = {"from": value}
    fields = dict(cast("Mapping[str, Any]", value))
    names, axes = fields.pop("from", None), fields.pop("axes", None)
    if fields:
        raise ValueError(f"it has a key {next(iter(fields))!r}; the keys are from and axes")
    several = isinstance(names, (list, tuple))
    listed = list(cast("Sequence[Any]", names)) if several else [names]
    if not listed or not all(isinstance(name, str) and name for name in listed):
        raise ValueError(f"from must be a name or a list of names, not {shorten_repr(names)}")
    theirs = [Template(name) for name in listed]
    for each in theirs:
        if each.stars != ours.stars:
            raise ValueError(f"{each.text!r} has the stars {each.stars}, but the path has {ours.stars}")
    if axes is None:
        if several:
            raise ValueError(
                "several names need axes, which says how to join them, as in: out in -> both out in"
            )
        return Renaming(ours, (Piece(theirs[0]),))
    if not isinstance(axes, str):
        raise ValueError(f"axes must be text, such as: out in -> in out, not {shorten_repr(axes)}")
    there, here = parse_axes(axes)
    if not several:
        check_sides(here, there)
        return Renaming(ours, (Piece(theirs[0], there, here),))
    known = {atom for axis in there for atom in axis}
    joined = [a for axis in here for a in axis if isinstance(a, str) and a not in known]
    if len(joined) != 1:
        raise ValueError(
            f"several names need exactly one axis that is only on the right side, not {len(joined)}"
        )
    pieces: list[Piece] = []
    for number, each in enumerate(theirs):
        part = AxisPart(number, len(theirs))
        side = tuple(tuple(part if atom == joined[0] else atom for atom in axis) for axis in here)
        check_sides(side, there)
        pieces.append(Piece(each, there, side))
    return Renaming(ours, tuple(pieces))


def _make_error(where: str, text: str, key: Any, what: str, why: str, fix: str) -> RuleError:
    lines = text.splitlines()
    own = (n for n, line in enumerate(lines, 1) if line.strip().lstrip("\"'?").startswith(str(key)))
    return RuleError(f"{where}: {what}", facts={"line": next(own, "")}, why=why, fix=fix)
