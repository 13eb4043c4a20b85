"""Define the errors and warnings. Each message states the problem, its location, the reason, and the fix.

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

from layoutmap.core.escaping import escape_text

# Public errors are listed here, because removing one needs a deprecation first (decisions/0060).
__all__ = [
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


class _ShortRepr(reprlib.Repr):
    def __init__(self):
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 60, 60

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()  # Python refuses to format thousands of digits, so give the size instead
        return super().repr_int(x, level) if bits < 1000 else f"<a number of {bits} bits>"


def shorten_repr(value: object) -> str:
    """Return a short `repr` of a value for messages. Dots replace the middle of long texts and the ends of long lists.

    Example:
        >>> shorten_repr([None, "model"]), shorten_repr(list(range(1000)))
        ("[None, 'model']", '[0, 1, 2, 3, 4, 5, ...]')
    """
    return _ShortRepr().repr(value)


def join_names(names: Sequence[str]) -> str:
    """Return names as text for messages: up to eight, or the first seven and the number of the others."""
    return ", ".join(names if len(names) <= 8 else [*names[:7], f"... {len(names) - 7} more"])


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun: `1 layer`, `2 layers`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_message(what: str, facts: Mapping[str, object], why: str, fix: str) -> str:
    """Return the text of one problem: the headline, then aligned lines for the facts, the reason, and the fix.

    Paths and file names in these texts may contain control characters, so these are escaped.
    """
    rows = [(escape_text(name), str(value)) for name, value in facts.items()] + [("why", why), ("fix", fix)]
    rows = [(name, escape_text(value.rstrip("\n"), keep="\n")) for name, value in rows if value]
    return format_aligned_rows(escape_text(what, keep="\n"), rows)


def format_aligned_rows(head: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a headline and, on lines below it, rows of a name and a text, with the texts aligned in one column."""
    width = max((4, *(len(name) for name, _ in rows)))
    indent = "\n" + " " * (width + 4)
    return "\n".join([head, *(f"  {name:<{width}}  {text.replace(chr(10), indent)}" for name, text in rows)])


class _StructuredMessage(Exception):
    """Base of errors and warnings that store a headline, facts, reason, and fix, and format these as their text."""

    def __init__(self, what: str, *, facts: Mapping[str, object] | None = None, why: str = "", fix: str = ""):
        self.what = what
        self.facts = dict(facts or {})
        self.why = why
        self.fix = fix
        super().__init__(format_message(what, self.facts, why, fix))


class LayoutMapError(_StructuredMessage, ValueError):
    """Base class of all errors of layoutmap.

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

    ag_pass_through = True  # makes TensorFlow's autograph raise this error unchanged, not as a StagingError


class MeshError(LayoutMapError):
    """Raised for an invalid mesh, or for a mesh that the machine cannot provide."""


class LayoutError(LayoutMapError):
    """Raised for an invalid layout, or for a layout that does not fit its variable."""


class RuleError(LayoutMapError):
    """Raised for a rule that a layout map cannot accept."""


class PlanError(LayoutError):
    """Raised if a model and a layout map do not fit together.

    Attributes:
        problems: All problems of the plan that were counted as errors.
    """

    def __init__(self, what: str, *, problems: tuple[Any, ...] = (), **rest: Any):
        super().__init__(what, **rest)
        self.problems = problems


class EngineError(LayoutMapError):
    """Raised for an operation or an array that an engine does not support."""


class ScopeError(LayoutMapError):
    """Raised if a scope is opened or used where it cannot work."""


class ShardingRefusedError(ScopeError):
    """Raised if JAX cannot infer the sharding of an operation's result under explicit axes."""


class CheckpointError(LayoutMapError):
    """Raised for a checkpoint that cannot be written, is damaged, or belongs to another model."""


class ParityError(LayoutMapError):
    """Raised if the results of a sharded model differ from those of the model on one device."""


class LayoutMapWarning(_StructuredMessage, UserWarning):
    """Category of the warnings about code that works but is probably not intended, such as an unused mesh dim."""
