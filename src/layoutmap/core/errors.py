"""Errors and warnings, each in full: what, where, why, and the fix.

Every error of this library is a `LayoutMapError`, which is a `ValueError`. Its text has one form:

    what went wrong, in a line that starts with the variable, rule or mesh concerned
      shape   (512, 1365)
      layout  (unsharded, model)     rule 2  .*\\.up\\.kernel
      why     1365 is not a multiple of 4
      fix     pad axis 1 to 1368, or leave it unsharded

Facts come first, the fix last, and the fix is something one can type.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from layoutmap.core.escaping import escaped

__all__ = [  # why: decisions/0060
    "CheckpointError",
    "EngineError",
    "LayoutError",
    "LayoutMapError",
    "LayoutMapWarning",
    "MeshError",
    "ParityError",
    "PlanError",
    "RuleError",
    "ScopeError",
]


class _Brief(reprlib.Repr):
    def __init__(self):
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 60, 60

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()  # of many digits Python refuses to write them
        return super().repr_int(x, level) if bits < 1000 else f"<a number of {bits} bits>"


def brief(value: object) -> str:
    """A value as messages show it: its `repr`, and of what is long or deep the begin and the end.

    Example:
        >>> brief([None, "model"]), brief(list(range(1000)))
        ("[None, 'model']", '[0, 1, 2, 3, 4, 5, ...]')
    """
    return _Brief().repr(value)


def listed(names: Sequence[str]) -> str:
    """Names as messages show them: all of up to eight; of more the first seven, and how many others there are."""
    return ", ".join(names if len(names) <= 8 else [*names[:7], f"... {len(names) - 7} more"])


def counted(count: int, noun: str) -> str:
    """A number with what it counts: `1 layer`, `2 layers`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_message(what: str, facts: Mapping[str, object], why: str, fix: str) -> str:
    """Lay out one problem: the headline, then one aligned line for each fact, the reason and the fix.

    Names of paths and files are parts of these texts: control characters are escaped.
    """
    rows = [(escaped(name), str(value)) for name, value in facts.items()] + [("why", why), ("fix", fix)]
    rows = [(name, escaped(value.rstrip("\n"), keep="\n")) for name, value in rows if value]
    return aligned(escaped(what, keep="\n"), rows)


def aligned(head: str, rows: Sequence[tuple[str, str]]) -> str:
    """A headline, and under it names with their texts, which begin in one column."""
    width = max((4, *(len(name) for name, _ in rows)))
    indent = "\n" + " " * (width + 4)
    return "\n".join([head, *(f"  {name:<{width}}  {text.replace(chr(10), indent)}" for name, text in rows)])


class _Message(Exception):
    """The parts of an error or a warning, and the text made of them."""

    def __init__(self, what: str, *, facts: Mapping[str, object] | None = None, why: str = "", fix: str = ""):
        self.what = what
        self.facts = dict(facts or {})
        self.why = why
        self.fix = fix
        super().__init__(format_message(what, self.facts, why, fix))


class LayoutMapError(_Message, ValueError):
    """Any error of this library.

    Args:
        what: The headline: which thing is wrong, and how.
        facts: The values that show it, in the order to print them.
        why: The reason, in one sentence.
        fix: What to type instead.

    Example:
        >>> raise LayoutMapError("mesh: no devices", facts={"dims": "x=2"}, why="2 are needed", fix="pass 2 devices")
        Traceback (most recent call last):
        ...
        layoutmap.core.errors.LayoutMapError: mesh: no devices
          dims  x=2
          why   2 are needed
          fix   pass 2 devices
    """


class MeshError(LayoutMapError):
    """A mesh that cannot be, or that the machine does not have."""


class LayoutError(LayoutMapError):
    """A layout that cannot be, or that does not fit its variable."""


class RuleError(LayoutMapError):
    """A rule that a layout map cannot take."""


class PlanError(LayoutError):
    """A model and a layout map that do not fit; holds every problem that was found.

    Attributes:
        problems: All problems of the plan that were counted as errors.
    """

    def __init__(self, what: str, *, problems: tuple[Any, ...] = (), **rest: Any):
        super().__init__(what, **rest)
        self.problems = problems


class EngineError(LayoutMapError):
    """Something that an engine cannot hold or cannot do."""


class ScopeError(LayoutMapError):
    """A scope that was opened or used where it cannot work."""


class CheckpointError(LayoutMapError):
    """A checkpoint that cannot be written, is not as it was written, or is that of another model."""


class ParityError(LayoutMapError):
    """A sharded model whose numbers are not those of one device."""


class LayoutMapWarning(_Message, UserWarning):
    """A layout map that works and may not do what was meant; it has the parts of a `LayoutMapError`."""
