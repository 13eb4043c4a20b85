"""The rows of a plan's table, with repeated blocks collapsed.

Thirty-two equal decoder blocks are one row each variable: `blocks.{0..31}.attn.query.kernel`, times 32.
"""

from __future__ import annotations

from dataclasses import dataclass

from layoutmap.path_groups import merge_paths, path_shape
from layoutmap.plan import Plan
from layoutmap.variables import Assignment

__all__ = ["Row", "plan_rows", "size"]


@dataclass(frozen=True, slots=True)
class Row:
    """Variables that differ only in numbers in their paths.

    Args:
        path: Their paths in one, as in `blocks.{0..31}.kernel`.
        assignments: The variables.
    """

    path: str
    assignments: tuple[Assignment, ...]

    @property
    def first(self) -> Assignment:
        """One of them; all have its shape, type, layout and rule."""
        return self.assignments[0]

    @property
    def nbytes(self) -> int:
        """Size in bytes of all of them."""
        return sum(a.variable.nbytes for a in self.assignments)

    @property
    def rule(self) -> str:
        """The number of the rule that won, or why there is none."""
        match, variable = self.first.match, self.first.variable
        if match is None or (match.rule is None and variable.kind not in ("weight", "state")):
            return f"({variable.kind})"
        return str(match.rule.number) if match.rule else "no rule"


def plan_rows(plan: Plan) -> list[Row]:
    """The rows of a plan, in the order of their first variables."""
    groups: dict[object, list[Assignment]] = {}
    for a in plan:
        v = a.variable
        rule = a.match.rule.number if a.match and a.match.rule else None
        key = (v.model, path_shape(v.path), v.shape, v.dtype, v.kind, a.layout, rule, a.drawn_whole)
        groups.setdefault(key, []).append(a)
    several = len({a.variable.model for a in plan} - {""}) > 1
    return [
        Row((f"{g[0].variable.model}: " if several and g[0].variable.model else "") + merge_paths([a.variable.path for a in g]), tuple(g))
        for g in groups.values()
    ]


def size(nbytes: float) -> str:
    """A size as people read it.

    Example:
        >>> size(3 * 2**20), size(100)
        ('3.0 MiB', '100 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")
