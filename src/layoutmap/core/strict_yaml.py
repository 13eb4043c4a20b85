"""Read YAML as text, decimal integers, and null, in mappings and lists.

PyYAML's `BaseLoader` reads every scalar as text, so `010`, `on`, and `1.0` keep their spelling.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import RuleError

_MAX_DEPTH = 10  # levels of nesting; a rules file needs 5
_MAX_ALIASED = 100_000
_INT, _NULL = "tag:yaml.org,2002:int", "tag:yaml.org,2002:null"


# YAML readers disagree about numbers such as 010, so every scalar except null and decimal integers
# is text (decisions/0199).
def read_yaml(text: str, where: str = "rules file") -> Any:
    """Return the data of one YAML document, or `None` if it is empty.

    Args:
        text: The document.
        where: Name of the document in messages.

    Raises:
        RuleError: The text is not YAML, repeats a key, has a tag or a merge key, or exceeds the limits on nesting
            and aliases.

    Example:
        >>> read_yaml("{version: 1, rules: {a: &columns [null, model], b: *columns}}")
        {'version': 1, 'rules': {'a': [None, 'model'], 'b': [None, 'model']}}
    """
    import yaml

    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        why, fix = f"it is {describe_type(text)}, not text", "pass its text, as in Path(file).read_text()"
        raise RuleError(f"{where} cannot be read", why=why, fix=fix)
    try:
        # Prefer libyaml's parser: it is 15 times as fast, but some builds of PyYAML lack it.
        loader = _make_strict_loader_class(getattr(yaml, "CBaseLoader", yaml.BaseLoader))
        _check_yaml_events(yaml.parse(text, loader))  # pyright: ignore[reportUnknownMemberType]
        return loader(text).get_single_data()
    except _YamlRefusalError as error:
        mark, what, why, fix = error.args
        raise RuleError(f"{where}: {what}", facts={"line": mark.line + 1}, why=why, fix=fix) from None
    except (yaml.YAMLError, ValueError) as error:  # PyYAML raises ValueError if it cannot encode the text
        fix = "correct the text at the line and column in the reason"
        if "unknown escape character" in str(error):
            fix = r"use single quotes for a regex, as in 'up\.kernel', or none: in double quotes a \ begins an escape"
        raise RuleError(f"{where} cannot be read", why=str(error), fix=fix) from error


class _YamlRefusalError(Exception):
    """Raised for a part of the document that is not allowed. `args` are its position, the headline, reason, and fix."""


def _check_yaml_events(events: Any) -> None:
    """Raise if a document is nested too deeply for PyYAML, or has a tag or merge key, which PyYAML would ignore."""
    depth = 0
    for event in events:
        name, tag = type(event).__name__, getattr(event, "tag", None)
        depth += name.endswith("StartEvent") - name.endswith("EndEvent")
        if depth > _MAX_DEPTH + 2:  # the stream and the document count as two more levels
            why = "a rules file needs five levels, for a sharding spec of several mesh dims in a layout of a rule"
            what, fix = f"it has more than {_MAX_DEPTH} nested levels", "write a rule as in a: [null, model]"
            raise _YamlRefusalError(event.start_mark, what, why, fix)
        if tag not in (None, "!"):
            why = "a file holds text, decimal integers, and null, in mappings and lists"
            raise _YamlRefusalError(
                event.start_mark, f"the tag {tag} is not supported", why, "delete the tag"
            )
        if name == "ScalarEvent" and event.value == "<<" and event.implicit[0]:
            why = "a merge key hides the order of the rules, and the first match wins"
            raise _YamlRefusalError(
                event.start_mark, "the merge key << is not supported", why, "write out the merged keys"
            )


@cache
def _make_strict_loader_class(base: Any) -> Any:
    class StrictLoader(base):
        """YAML loader that converts decimal integers and null, and raises for duplicate keys and too many aliases."""

        def __init__(self, text: str):
            base.__init__(self, text)
            self._size, self._sizes, self._limit = 0, dict[Any, int](), len(text) + _MAX_ALIASED

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            before = self._size
            value: Any = base.construct_object(self, node, deep=True)
            # Each alias adds the size of its node again, because a few aliases of aliases can stand for huge data.
            self._size = before + self._sizes.setdefault(node, self._size - before + 1)
            if self._size > self._limit:
                what, why = (
                    f"its aliases repeat more than {_MAX_ALIASED} values",
                    "so many are a mistake or an attack",
                )
                raise _YamlRefusalError(node.start_mark, what, why, "write the values instead of aliases")
            return value

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = set[Any]()
            for key_node, _ in node.value:
                key = repr(self.construct_object(key_node))
                if key in keys:
                    why = "a key has one value, and a pattern one rule"
                    raise _YamlRefusalError(
                        key_node.start_mark, f"{key} appears twice", why, "delete one of them"
                    )
                keys.add(key)
            return base.construct_mapping(self, node, deep=True)

    StrictLoader.add_implicit_resolver(
        _INT, re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})$"), list("-+0123456789")
    )
    StrictLoader.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
    StrictLoader.add_constructor(_INT, _construct_int)
    StrictLoader.add_constructor(_NULL, _construct_null)
    return StrictLoader


def _construct_int(loader: object, node: Any) -> int:
    return int(node.value)


def _construct_null(loader: object, node: object) -> None:
    return None
