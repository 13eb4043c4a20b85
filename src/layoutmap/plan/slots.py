"""Find problems of optimizer slots that do not follow a weight, and describe slots that ZeRO shards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from layoutmap.core.errors import join_names
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.plan.problems import Problem

_MAX_UNREPORTED = 1024  # a replicated slot with more elements gets a warning, because it takes much memory
SLOTS = re.compile(r"optimizer(\\?\.|$)")
"""Regex for the patterns of rules that are meant for slots: they start with `optimizer.`, unlike `optimizer_net`."""
NO_RULES = (
    "rules do not apply to an optimizer's slots",
    "each slot has the layout of its weight",
    "delete it, and shard the weight; for optax, build_optimizer(.., zero_dim=) shards slots alone (ZeRO-1)",
)


def is_sharded_by_zero_dim(variable: VariableSpec) -> bool:
    """Return whether a variable is a slot that `zero_dim` shards: it belongs to a weight, or has many elements."""
    return variable.kind is Kind.SLOT and (variable.is_derived or math.prod(variable.shape) > _MAX_UNREPORTED)


def find_slot_problems(variable: VariableSpec) -> Iterator[Problem]:
    """Yield a problem if a variable is a slot with several elements, and none of its axes is an axis of a weight."""
    num_elements = math.prod(variable.shape)
    follows = variable.is_derived and (variable.axes is None or any(variable.axes))
    if variable.kind is not Kind.SLOT or num_elements < 2 or follows:
        return
    why = f"it belongs to {variable.parent}, which has no axis of such a size"
    yield Problem(
        "loose slot",
        "warning" if num_elements > _MAX_UNREPORTED else "note",
        variable.path,
        f"{variable.path}: none of its axes is an axis of a weight, so it does not get the layout of a weight",
        (("shape", str(variable.shape)), ("bytes", f"{variable.global_bytes:,}")),
        why if variable.is_derived else "its path contains no weight's path",
        "store it under the path of its weight in the optimizer's state, or pass zero_dim= to shard it, too",
    )


def make_zero_dim_note(assignments: Sequence[Assignment], dim: str) -> Problem:
    """Return a note with the number of slots that `zero_dim` shards over a mesh dim, and the other slots."""
    slots = [a for a in assignments if is_sharded_by_zero_dim(a.variable)]
    rest = [
        a.variable.path
        for a in slots
        if all(dim not in a.layout.list_mesh_dims(axis) for axis in range(a.layout.rank))
    ]
    return Problem(
        "zero",
        "note",
        dim,
        f"{len(slots) - len(rest)} of {len(slots)} slots are sharded over {dim} (ZeRO-1)",
        (("as their weights", join_names(rest)),),
        f"zero_dim={dim!r}: slots are sharded further than their weights, along the first axis that splits evenly",
    )
