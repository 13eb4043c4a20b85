"""Compute the bytes of variables on a device, and the savings from sharding those that are replicated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from layoutmap.core.paths import format_merged_paths, split_path_at_numbers
from layoutmap.core.text_table import format_bytes, format_table
from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.lint import make_layout_suggester
from layoutmap.plan.table import PlanTable

_MAX_SHOWN_ROWS = 10


@dataclass(frozen=True, slots=True)
class ShardableVariable:
    """A replicated variable that could be sharded, with the axis and the mesh dim.

    Args:
        assignment: The variable with its planned layout.
        axis: The axis that could be sharded.
        dim: The mesh dim over which it could be sharded.
        saved_bytes: The memory that each device would save.
    """

    assignment: Assignment
    axis: int
    dim: str
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class ShardableRow:
    """Replicated variables of repeated blocks that could be sharded in the same way.

    Args:
        path: Their merged paths.
        axis: The axis that could be sharded.
        dim: The mesh dim over which it could be sharded.
        saved_bytes: The memory that each device would save if all of them were sharded.
        assignments: The variables.
    """

    path: str
    axis: int
    dim: str
    saved_bytes: int
    assignments: tuple[Assignment, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Memory:
    """Bytes of variables per device by purpose, and the replicated variables that could be sharded.

    Gradients have the layouts of their weights. Activations are not counted.

    Args:
        weights: Trained weights.
        gradients: A gradient for each of them.
        slots: The optimizer's slots that are in the plan.
        state: All other variables: moving statistics, frozen weights, random states, metrics.
        host: Variables in host memory, for each device. They are not counted in the other fields.
        could_be_sharded: Replicated variables that could be sharded, the largest saving first, with the layouts that
            `layoutmap.plan.lint.suggest` suggests.
    """

    weights: int
    gradients: int
    slots: int
    state: int
    host: int
    could_be_sharded: tuple[ShardableVariable, ...]

    @property
    def total(self) -> int:
        """The bytes of all purposes in device memory."""
        return self.weights + self.gradients + self.slots + self.state

    @property
    def rows(self) -> list[ShardableRow]:
        """The replicated variables that could be sharded, largest saving first. Repeated blocks share a row."""
        groups: dict[object, list[ShardableVariable]] = {}
        for each in self.could_be_sharded:
            v = each.assignment.variable
            groups.setdefault((v.model, split_path_at_numbers(v.path), v.shape, v.dtype), []).append(each)
        rows = [
            ShardableRow(
                format_merged_paths([each.assignment.variable.path for each in group]),
                group[0].axis,
                group[0].dim,
                sum(each.saved_bytes for each in group),
                tuple(each.assignment for each in group),
            )
            for group in groups.values()
        ]
        return sorted(rows, key=lambda row: -row.saved_bytes)

    def to_text(self, width: int | None = None) -> str:
        """Return the text that `print` shows. For `width`, see `Plan.to_text`."""
        cells = [
            (row.path, format_bytes(row.saved_bytes), f"axis {row.axis} over {row.dim}") for row in self.rows
        ]
        lines = [self._summary]
        if cells:
            head = ("replicated", "saves", "if sharded")
            lines += ["", *format_table(head, cells[:_MAX_SHOWN_ROWS], {"saves"}, width=width)]
        if len(cells) > _MAX_SHOWN_ROWS:
            lines.append(f"... and {len(cells) - _MAX_SHOWN_ROWS} more")
        return "\n".join(lines)

    __str__ = to_text

    @property
    def _summary(self) -> str:
        parts = {name: getattr(self, name) for name in ("weights", "gradients", "slots", "state")}
        listed = ", ".join(
            f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts.items() if num_bytes
        )
        host = f", and {format_bytes(self.host)} in host memory" if self.host else ""
        return f"per device: {listed or 'nothing'}; {format_bytes(self.total)} in total{host}"

    def __repr__(self) -> str:
        return f"<Memory: {self._summary}>"


def count_memory_by_purpose(plan: PlanTable) -> Memory:
    """Return the bytes of a plan's variables per device by purpose, without variables that do not fit their layouts."""
    fitting = [a for a in plan.assignments if a.fits]
    weights = sum(a.device_bytes for a in fitting if a.variable.is_trained)
    gradients = sum(a.shard_bytes for a in fitting if a.variable.is_trained)
    slots = sum(a.device_bytes for a in fitting if a.variable.kind is Kind.SLOT)
    could = sorted(_iterate_shardable_variables(plan), key=lambda each: -each.saved_bytes)
    return Memory(
        weights, gradients, slots, plan.device_bytes - weights - slots, plan.host_bytes, tuple(could)
    )


def _iterate_shardable_variables(plan: PlanTable) -> Iterator[ShardableVariable]:
    """Yield each variable that is replicated and could be sharded over a mesh dim."""
    corrected = plan.apply_corrections()
    suggestions = make_layout_suggester(corrected)
    for a, new in zip(plan.assignments, corrected.assignments, strict=True):
        # A derived variable is sharded along with its parent, so it needs no row.
        if not a.fits or a.variable.is_derived or not a.layout.is_fully_replicated():
            continue
        layout = suggestions.advise_layout(new)
        if layout is not None and not layout.is_fully_replicated():
            axis = max(range(layout.rank), key=layout.num_shards)
            dim = max(layout.list_mesh_dims(axis), key=layout.mesh.dim_size)
            saved = a.shard_bytes - a.shard_bytes // layout.mesh.dim_size(dim)
            yield ShardableVariable(a, axis, dim, saved)
