"""YAML as rules files use it: text, whole numbers and null, in mappings and lists.

The rest of YAML 1.1 is refused with its line, since it says something else than people read (`010` is 8, `on` is
true), hides the order of rules (merge keys), or makes objects (tags). An alias may repeat what an anchor names, as long
as what the file says, written out, stays small. Reading takes time and memory in proportion to the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from layoutmap.core.arguments import kind_of
from layoutmap.core.errors import RuleError

_DEEPEST = 10  # a rules file needs 5
_MOST_BY_ALIAS = 100_000
_STR, _INT, _NULL, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("str", "int", "null", "merge"))
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_KNOWN = "such a file holds text, whole numbers and null, in mappings and lists"  # why: decisions/0036


def read_yaml(text: str, where: str = "rules file") -> Any:
    """The data of one YAML document; `None` if it is empty.

    Args:
        text: The document.
        where: What it is, as messages name it.

    Raises:
        RuleError: It is no YAML, or not of the kind above; says where.

    Example:
        >>> read_yaml("{version: 1, rules: {a: &columns [null, model], b: *columns}}")
        {'version': 1, 'rules': {'a': [None, 'model'], 'b': [None, 'model']}}
    """
    yaml = _yaml()
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RuleError(
            f"{where} cannot be read",
            why=f"it is {kind_of(text)}, not text",
            fix="pass its text, as in Path(file).read_text()",
        )
    try:
        # libyaml's parser, where PyYAML was built with it, is about 15 times as fast.
        return _Reader(yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), where).document()
    except RuleError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: text that cannot be encoded
        # libyaml since 0.2.6 has a limit of its own, and reads up to 1024 characters ahead of its events.
        if "maximum nesting depth" in str(error):
            marked: Any = error
            raise _too_deep(marked.problem_mark, where) from None
        fix = "correct the text at that place"
        if "unknown escape character" in str(error):
            fix = r"use single quotes for a regex, as in 'up\.kernel', or none: in double quotes a \ begins an escape"
        raise RuleError(f"{where} cannot be read", why=str(error), fix=fix) from error


class _Reader:
    """Makes data of the events of a parser, one by one: nothing is made that is then refused."""

    def __init__(self, events: Iterator[Any], where: str):
        yaml = _yaml()
        self._events = events
        self._where = where
        self._yaml = yaml
        self._resolver: Any = yaml.resolver.Resolver()
        self._anchors: dict[str, tuple[Any, int] | None] = {}  # value and size; `None` while it is being read
        self._size = 0  # the number of values so far, those that aliases repeat included
        self._by_alias = 0

    def document(self) -> Any:
        yaml, found = self._yaml, None
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    why = "one file holds one document"
                    raise self._refused(
                        event, "it has a second document", why, "delete the line --- and all after it"
                    )
            elif isinstance(event, yaml.NodeEvent):
                found = self._value(event, 1)
        return found

    def _value(self, event: Any, depth: int) -> Any:
        yaml, before = self._yaml, self._size
        self._size += 1
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if event.tag not in (None, "!", _STR) or (event.tag and not isinstance(event, yaml.ScalarEvent)):
            raise self._refused(event, f"the tag {event.tag} is not read", _KNOWN, "delete the tag")
        if depth > _DEEPEST:
            raise _too_deep(event.start_mark, self._where)
        if event.anchor:
            self._anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = [self._value(each, depth + 1) for each in self._until(yaml.SequenceEndEvent)]
        else:
            value = self._mapping(depth + 1)
        if event.anchor:
            self._anchors[event.anchor] = value, self._size - before
        return value

    def _until(self, end: type[Any]) -> Iterator[Any]:
        for event in self._events:
            if isinstance(event, end):
                return
            yield event

    def _mapping(self, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for event in self._until(self._yaml.MappingEndEvent):
            key = self._value(event, depth)
            if isinstance(key, (list, dict)):
                raise self._refused(
                    event, "a list or a mapping is a key", "keys are text", "write the key as text"
                )
            if key in found:
                why = "two rules for one pattern contradict each other"
                raise self._refused(event, f"{key!r} is there twice", why, "delete one of them")
            found[key] = self._value(next(self._events), depth)
        return found

    def _alias(self, event: Any) -> Any:
        name = event.anchor
        if name not in self._anchors:
            why = "an alias repeats what an anchor above it names"
            raise self._refused(
                event, f"*{name} has no &{name}", why, f"write &{name} before the value that it is to repeat"
            )
        anchor = self._anchors[name]
        if anchor is None:
            raise self._refused(
                event, f"*{name} is inside of what it repeats", "it has no end", "write the value instead"
            )
        value, size = anchor
        self._size += size
        self._by_alias += size
        if self._by_alias > _MOST_BY_ALIAS:
            what = f"its aliases repeat more than {_MOST_BY_ALIAS} values"
            raise self._refused(
                event, what, "so much is a mistake or an attack", "write the values instead of aliases"
            )
        return value

    def _scalar(self, event: Any) -> Any:
        text = event.value
        if event.tag or not event.implicit[0]:
            return text
        tag = self._resolver.resolve(self._yaml.ScalarNode, text, (True, False))
        if tag == _STR:
            return text
        if tag == _NULL:
            return None
        if tag == _INT and _DECIMAL.fullmatch(text):
            return int(text)
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        if tag == _MERGE:
            why = "a merge key hides in which order the rules stand, and the first that matches wins"
            raise self._refused(event, "the merge key << is not read", why, "write out what it stands for")
        if tag == _INT:
            why = "YAML 1.1 reads 010 as 8, 1:20 as 80 and 1_0 as 10, which other readers do not"
            fix = f"write a number in decimal digits, at most 18, without zeros before them; quote text: '{shown}'"
            raise self._refused(event, f"{shown} is no plain whole number", why, fix)
        kind = tag.rpartition(":")[2]
        raise self._refused(
            event, f"YAML reads {shown} as {kind}", _KNOWN, f"write a whole number, or quote text: '{shown}'"
        )

    def _refused(self, event: Any, what: str, why: str, fix: str) -> RuleError:
        facts = {"line": event.start_mark.line + 1}
        return RuleError(f"{self._where}: {what}", facts=facts, why=why, fix=fix)


def _yaml() -> Any:  # what is known of its types is half of them
    import yaml

    return yaml


def _too_deep(mark: Any, where: str) -> RuleError:
    return RuleError(
        f"{where}: it is nested more than {_DEEPEST} deep",
        facts={"line": mark.line + 1},
        why="the deepest of a rules file is a sharding spec of several mesh dims, in a layout of a rule",
        fix="write a rule as in a: [null, model]",
    )
