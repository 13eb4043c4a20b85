"""What moved from one plan to another: variables that came, went, or are held otherwise, and layers' outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from layoutmap.path_groups import merge_paths, path_shape
from layoutmap.plan import Plan
from layoutmap.rules import Match
from layoutmap.variables import Assignment

__all__ = ["Change", "PlanDiff", "diff_plans"]


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that two plans tell differently.

    Args:
        path: The variable or layer; `""` for the mesh.
        what: What of it differs: `"added"`, `"removed"`, `"shape"`, `"dtype"`, `"kind"`, `"layout"`, `"mesh"`, or
            `"output"`: the layout of what a layer puts out.
        before: How the first plan has it; empty if it has it not.
        after: How the second has it; empty if it has it not.
    """

    path: str
    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, repr=False)
class PlanDiff:
    """What differs between two plans; true if anything does.

    Which rule gave a layout, and what devices a mesh names, are no differences.

    Args:
        before: The first plan.
        after: The second.
        changes: Every difference: of the mesh, then of variables, then of layers' outputs.
    """

    before: Plan
    after: Plan
    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __repr__(self) -> str:
        from layoutmap.report.text import diff_line

        return f"<PlanDiff: {diff_line(self)}>"

    def __str__(self) -> str:
        from layoutmap.report.text import diff_text

        return diff_text(self)

    def _repr_html_(self) -> str:
        from layoutmap.report.html import diff_html

        return diff_html(self)

    @property
    def grouped(self) -> list[tuple[int, Change]]:
        """The changes with those of repeated blocks made one, and how many each stands for."""
        groups: dict[object, list[Change]] = {}
        for each in self.changes:
            groups.setdefault((each.what, path_shape(each.path), each.before, each.after), []).append(each)
        return [
            (
                len(group),
                Change(merge_paths([c.path for c in group]), group[0].what, group[0].before, group[0].after),
            )
            for group in groups.values()
        ]


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """What differs between two plans; pure."""
    changes: list[Change] = []
    if before.mesh.mesh_dims != after.mesh.mesh_dims:
        changes.append(Change("", "mesh", str(before.mesh), str(after.mesh)))
    changes += _of_variables(_by_path(before), _by_path(after))
    changes += _of_outputs(before.activations, after.activations)
    return PlanDiff(before, after, tuple(changes))


def _by_path(plan: Plan) -> dict[tuple[str, str], Assignment]:
    return {(a.variable.model, a.variable.path): a for a in plan}


def _of_variables(
    before: dict[tuple[str, str], Assignment], after: dict[tuple[str, str], Assignment]
) -> Iterator[Change]:
    for key, old in before.items():
        new = after.get(key)
        if new is None:
            yield Change(key[1], "removed", _told(old), "")
            continue
        was, now = old.variable, new.variable
        for what, a, b in (
            ("shape", was.shape, now.shape),
            ("dtype", was.dtype, now.dtype),
            ("kind", was.kind, now.kind),
            # Not the meshes of the layouts: that they differ is told once.
            ("layout", old.layout.sharding_specs, new.layout.sharding_specs),
        ):
            if a != b:
                texts = (str(old.layout), str(new.layout)) if what == "layout" else (str(a), str(b))
                yield Change(key[1], what, *texts)
    for key, new in after.items():
        if key not in before:
            yield Change(key[1], "added", "", _told(new))


def _told(assignment: Assignment) -> str:
    variable = assignment.variable
    return f"{variable.dtype}{list(variable.shape)} {assignment.layout}"


def _of_outputs(before: Iterable[Match], after: Iterable[Match]) -> Iterator[Change]:
    old, new = ({match.path: str(match.layout) for match in matches} for matches in (before, after))
    for path in dict.fromkeys((*old, *new)):
        if old.get(path) != new.get(path):
            yield Change(path, "output", old.get(path, ""), new.get(path, ""))
