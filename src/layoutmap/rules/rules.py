"""Map regexes over paths to layouts, as a dict that looks up paths.

The rules are tried in the order in which they were added, and the first that matches wins. `match` also returns the
rules that lost, because users ask which rule won and why theirs did not.
"""

from __future__ import annotations

import threading
from collections.abc import ItemsView, Iterable, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from dataclasses import dataclass, replace
from typing import Any, Self

from layoutmap.core.errors import LayoutMapError, RuleError, format_count
from layoutmap.core.layout import Layout, convert_layout
from layoutmap.core.match import Match, Rule, format_rule_layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.old_names import DeprecatedAlias
from layoutmap.core.uneven import UnevenSetting, validate_uneven_setting
from layoutmap.rules.keras_rules import is_keras_rule
from layoutmap.rules.near_misses import find_nearest_candidates
from layoutmap.rules.patterns import compile_pattern
from layoutmap.rules.table import RuleEntry, RuleTable

_NO_DEFAULT: Any = object()


_NewRule = tuple[object, object, object, str, str | None]
"""The unchecked pattern, layout, and `uneven` setting (`None`: the map's), and the reason and memory, of a rule."""


@dataclass(slots=True)
class SharedMesh:
    """Holder of the mesh that the rules and activation rules of a map share, or of None before the first layout."""

    mesh: Mesh | None


WRITE_LOCK = threading.RLock()
"""The lock that is held while any map is changed. Lookups do not take it."""


class Rules(MutableMapping[str, Layout]):
    """Map regexes over paths to layouts. This is the base of `LayoutMap` and its `activations`.

    Reading (`rules[path]`, `rules.get(path)`) looks up a path: an exact key first, then `re.match` over the rules in
    insertion order. The first match wins, and no match gives `None`. Other methods (`in`, `del`, `pop`, `len`, `items`,
    ...) work on the patterns. One thread may change the rules while others look up paths. A lookup sees the rules
    before or after a change.

    Args:
        shared_mesh: The mesh to which tuples of specs are bound, shared with the other rules of a map.
        rules: Rules to begin with, in order.
        uneven: The policy for an axis that cannot be split evenly, for rules without a policy of their own.

    Raises:
        RuleError: See `__setitem__`.
    """

    # Words for messages: the kind of rule, what its paths are, the map as a Python expression, an example of a pattern,
    # and what happens to a path that no rule matches. Subclasses have other words.
    _rule_kind = "rule"
    _paths = "variable paths"
    _expression = "layout_map"
    _example = r".*\.kernel"
    _otherwise = "it is replicated"
    _has_memory = True

    def __init__(
        self,
        shared_mesh: SharedMesh,
        rules: Mapping[str, object] | None = None,
        uneven: UnevenSetting = "error",
    ):
        self._shared_mesh = shared_mesh
        self._default_uneven: UnevenSetting = validate_uneven_setting(uneven, self._expression)
        self._table = RuleTable()
        Rules.update(self, rules or {})

    # -- lookup

    def __getitem__(self, path: str) -> Layout | None:  # type: ignore[override]
        rule = self._find_winning_rule(path)
        return rule and rule.layout

    def get(self, path: str, default: Any = None) -> Any:
        """Return the layout of a path, or `default` if no rule matches."""
        rule = self._find_winning_rule(path)
        return rule.layout if rule else default

    def match(self, path: str) -> Match:
        """Return the rule that wins for a path, the matching rules that lost, and near misses if no rule matches.

        Example:
            >>> rules = {r".*\\.kernel": (None, "model"), "d1.*": ("model", None)}
            >>> layout_map = lm.LayoutMap(lm.Mesh(None, "model=4"), rules)
            >>> print(layout_map.match("d1.kernel"))
            d1.kernel: rule 1  .*\\.kernel -> (unsharded, model)
              also matches  rule 2  d1.*: would give (model, unsharded)
              change it     change rule 1, or add a rule before it: the first rule that matches wins
        """
        found = self.match_without_near_misses(path)
        return found if found.rule else replace(found, near_misses=tuple(find_nearest_candidates(path, self)))

    def match_without_near_misses(self, path: str) -> Match:
        """Return the same as `match`, but without near misses, which take long to find."""
        won, *lost = self.matching_rules(path) or [None]
        return Match(path, won, tuple(rule for rule in lost if rule), otherwise=self._otherwise)

    def matching_rules(self, path: str) -> list[Rule]:
        """Return all rules that match a path, the winner first."""
        table = self._table
        found = list(_iterate_matching_rules(table, path))
        exact = table.entries.get(path)
        if exact is not None:
            found = [exact.rule, *(rule for rule in found if rule.pattern != path)]
        return found

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules, in order, numbered from 1."""
        return tuple(self._table.in_order)

    @property
    def mesh(self) -> Mesh | None:
        """Mesh of the map, or None while it has neither a mesh nor a rule."""
        return self._shared_mesh.mesh

    def _find_winning_rule(self, path: str) -> Rule | None:
        table = self._table
        exact = table.entries.get(path)
        if exact is not None:
            return exact.rule
        return next(_iterate_matching_rules(table, path), None)

    # -- mapping of patterns to layouts

    def __setitem__(self, pattern: str, layout: Layout | Sequence[object]) -> None:
        """Append a rule.

        Args:
            pattern: A regex over paths.
            layout: A `Layout`, one of `tf.experimental.dtensor`, or a tuple of specs to bind to the map's mesh.

        Raises:
            RuleError: The pattern exists already, is not a regex, or can take exponential time to fail, as `(a+)+$`
                does; the layout is none, names a dim that the mesh does not have, or is on another mesh than the rest
                of the map. Nothing is changed then.
        """
        self._add_rules([(pattern, layout, None, "", None)])

    def add(
        self,
        pattern: str,
        layout: Layout | Sequence[object],
        *,
        uneven: UnevenSetting | None = None,
        reason: str = "",
        memory: str | None = None,
    ) -> None:
        """Append a rule with its own settings.

        Args:
            pattern: See `__setitem__`.
            layout: See `__setitem__`.
            uneven: What happens to an axis that cannot be split evenly, as for `LayoutMap`. `None`: the map's setting.
            reason: Why the rule gives this layout, for readers: `str` shows it, and `to_yaml` writes it as a comment.
            memory: The kind of memory, as for `Layout`. `None`: that of the layout.

        Raises:
            RuleError: See `__setitem__`.

        Example:
            >>> layout_map = lm.LayoutMap(lm.Mesh(None, "model=4"))
            >>> layout_map.add(r".*\\.key\\.kernel", (None, "model", None), uneven="replicate", reason="4 heads")
            >>> print(layout_map)
            LayoutMap on model=4, 1 rule
                  # 4 heads
               1  .*\\.key\\.kernel  (unsharded, model, unsharded)  uneven="replicate"
        """
        self._add_rules([(pattern, layout, uneven, reason, memory)])

    def _add_rules(self, new: Iterable[_NewRule]) -> None:
        new = list(new)
        with WRITE_LOCK:
            self._append_rule_entries(*self._make_rule_entries(new, self._shared_mesh.mesh))

    def _make_rule_entries(
        self, new: Iterable[_NewRule], mesh: Mesh | None
    ) -> tuple[Mesh | None, list[RuleEntry]]:
        """Check new rules without adding them, and return the mesh that the map will have, and the rules' entries."""
        entries: dict[str, RuleEntry] = {}
        for pattern, layout, uneven, reason, memory in new:
            entry = self._make_checked_rule_entry(pattern, layout, uneven, mesh, entries, reason, memory)
            entries[entry.rule.pattern] = entry
            mesh = entry.rule.layout.mesh
        return mesh, list(entries.values())

    def _append_rule_entries(self, mesh: Mesh | None, entries: Iterable[RuleEntry]) -> None:
        self._shared_mesh.mesh = mesh
        for entry in entries:
            self._table.append(entry)

    def _make_checked_rule_entry(
        self,
        pattern: object,
        layout: object,
        uneven: object,
        mesh: Mesh | None,
        other_new_entries: Mapping[str, RuleEntry],
        reason: str,
        memory: str | None,
    ) -> RuleEntry:
        if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleError(
                f"{self._rule_kind} {pattern!r} is not text",
                why=f"a rule is a regex over {self._paths}",
                fix=f'write it as in {self._expression}[r"{self._example}"]',
            )
        pattern = str.__str__(pattern)  # YAML and JSON cannot write subclasses of str
        existing = self._table.entries.get(pattern) or other_new_entries.get(pattern)
        if existing is not None:
            raise RuleError(
                f"{self._rule_kind} {pattern!r} is in the map already",
                facts={"old": existing.rule.layout, "new": layout},
                why="one pattern has one layout",
                fix=f"delete it first, del {self._expression}[{pattern!r}], or change one of the patterns",
            )
        compiled = compile_pattern(pattern, self._rule_kind)
        try:
            value = convert_layout(layout, mesh)
            if memory is not None:
                value = value.replace_memory(memory)
        except LayoutMapError as error:
            raise RuleError(
                f"{self._rule_kind} {pattern!r}: {error.what}",
                facts=error.facts,
                why=error.why,
                fix=error.fix,
            ) from error
        if mesh is not None and value.mesh != mesh:
            raise RuleError(
                f"{self._rule_kind} {pattern!r}: its layout is on another mesh",
                facts=_describe_mesh_difference(mesh, value.mesh),
                why="all variables of a model share one mesh",
                fix="use the map's mesh, or create another map",
            )
        if value.host_memory and not self._has_memory:
            raise RuleError(
                f"{self._rule_kind} {pattern!r} cannot have memory={value.memory!r}",
                why="layers write their outputs to device memory",
                fix="leave memory out",
            )
        setting = (
            None if uneven is None else validate_uneven_setting(uneven, f"{self._rule_kind} {pattern!r}")
        )
        number = len(self._table.in_order) + len(other_new_entries) + 1
        rule = Rule(number, pattern, value, setting or self._default_uneven, reason)
        return RuleEntry(rule, compiled, setting is not None)

    @property
    def uneven(self) -> UnevenSetting:
        """The policy for an axis that cannot be split evenly, for rules without a policy of their own."""
        return self._default_uneven

    def __delitem__(self, pattern: str) -> None:
        with WRITE_LOCK:
            rest = self._table.entries.copy()
            del rest[pattern]
            self._table = RuleTable(rest.values())

    def update(self, rules: object = (), /, **more: object) -> None:
        """Add all rules in order. If one of them cannot be added, add none.

        Raises:
            RuleError: See `__setitem__`.
        """
        self._add_rules(self._list_new_rules(rules, more))

    def _list_new_rules(self, rules: Any, more: Mapping[str, Any]) -> list[_NewRule]:
        if isinstance(rules, Rules):
            new: list[_NewRule] = [
                (r.pattern, r.layout, r.uneven if r.uneven != self._default_uneven else None, r.reason, None)
                for r in rules.rules
            ]
        elif hasattr(rules, "keys"):
            new = [(pattern, rules[pattern], None, "", None) for pattern in rules.keys()]  # noqa: SIM118
        else:
            new = [(pattern, layout, None, "", None) for pattern, layout in rules]
        return [*new, *((pattern, layout, None, "", None) for pattern, layout in more.items())]

    def _get_uneven_settings(self) -> dict[str, UnevenSetting]:
        """Return a dict from pattern to `uneven` setting, for rules that do not use the setting of the map."""
        entries = self._table.entries.copy().items()
        return {pattern: entry.rule.uneven for pattern, entry in entries if entry.has_uneven}

    def __contains__(self, pattern: object) -> bool:
        return pattern in self._table.entries

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._table.entries))

    def __reversed__(self) -> Iterator[str]:
        return reversed(list(self._table.entries))

    def __len__(self) -> int:
        return len(self._table.entries)

    def values(self) -> ValuesView[Layout]:
        """Return the current layouts in order."""
        return self._table.get_layouts_by_pattern().values()

    def items(self) -> ItemsView[str, Layout]:
        """Return the current pairs of pattern and layout in order."""
        return self._table.get_layouts_by_pattern().items()

    def pop(self, pattern: str, default: object = _NO_DEFAULT) -> Any:
        """Remove a rule and return its layout. If there is no such rule, return `default`.

        Raises:
            KeyError: There is no such rule and no default.
        """
        with WRITE_LOCK:
            entry = self._table.entries.get(pattern)
            if entry is not None:
                del self[pattern]
                return entry.rule.layout
        if default is _NO_DEFAULT:
            raise KeyError(pattern)
        return default

    def popitem(self) -> tuple[str, Layout]:
        """Remove the last rule, and return its pattern and layout.

        Raises:
            KeyError: There are no rules.
        """
        with WRITE_LOCK:
            if not self:
                raise KeyError("popitem(): layout map is empty")
            pattern = next(reversed(self))
            return pattern, self.pop(pattern)

    def setdefault(self, pattern: str, default: Any = None) -> Layout:
        """Return the layout of the rule with this exact pattern. If there is no such rule, add it first.

        Raises:
            RuleError: It has to be added and cannot; see `__setitem__`.
        """
        with WRITE_LOCK:
            if pattern not in self:
                self[pattern] = default
            return self._table.entries[pattern].rule.layout

    def clear(self) -> None:
        """Remove all rules. The mesh stays."""
        with WRITE_LOCK:
            self._table = RuleTable()

    def __eq__(self, other: object) -> bool:
        """Return whether two maps have equal rules in equal order, and equal meshes. Other mappings have no order.

        Rules for variables and rules for activations are never equal.
        """
        if isinstance(other, Rules):
            return (
                self._rule_kind == other._rule_kind and self.mesh == other.mesh and self.rules == other.rules
            )
        return self._table.get_layouts_by_pattern() == other if isinstance(other, Mapping) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(
            self.__dict__, _shared_mesh=SharedMesh(self._shared_mesh.mesh), _table=self._table.copy()
        )
        return twin

    def __str__(self) -> str:
        rules = self.rules
        width = max((len(rule.pattern) for rule in rules), default=0)
        rows = [
            f"{f'      # {rule.reason}{chr(10)}' if rule.reason else ''}"
            f"{rule.number:>4}  {rule.pattern:<{width}}  {format_rule_layout(rule)}"
            for rule in rules
        ]
        return "\n".join([f"{self.format_title()}, {format_count(len(rules), 'rule')}", *rows])

    def format_name(self, rule: Rule) -> str:
        """Return a rule's name for messages, such as `rule 2  .*kernel` or `activation rule 1  blocks`."""
        return f"{self._rule_kind} {rule.number}  {rule.pattern}"

    name_of = DeprecatedAlias("format_name")

    def format_title(self) -> str:
        """Return the first words of the map's text: the name of the class and the mesh."""
        return f"{type(self).__name__} on {self.mesh or 'no mesh yet'}"


def _iterate_matching_rules(table: RuleTable, path: str) -> Iterator[Rule]:
    """Yield the rules that match a path, in order. Only `keras:` rules match a name that starts with `keras:`."""
    rules = (table.in_order[number] for number in table.index.iterate_matching_positions(path))
    return (rule for rule in rules if is_keras_rule(rule.pattern)) if is_keras_rule(path) else rules


def _describe_mesh_difference(map_mesh: Mesh, layout_mesh: Mesh) -> dict[str, str]:
    """Return the first difference between the meshes of a map and of a layout, as facts for an error."""
    texts: tuple[str, str]
    if map_mesh.mesh_dims != layout_mesh.mesh_dims:
        texts = str(map_mesh), str(layout_mesh)
    elif map_mesh.name != layout_mesh.name:
        texts = f"named {map_mesh.name!r}", f"named {layout_mesh.name!r}"
    elif map_mesh.devices is None or layout_mesh.devices is None:
        texts = tuple(
            "abstract" if m.is_abstract else f"on {m.device_type} devices" for m in (map_mesh, layout_mesh)
        )  # type: ignore[assignment]
    else:
        pairs = enumerate(zip(map_mesh.devices, layout_mesh.devices, strict=True))
        texts = next((f"{a!r} at position {i}", f"{b!r} at position {i}") for i, (a, b) in pairs if a != b)
    return {"map's": texts[0], "layout's": texts[1]}
