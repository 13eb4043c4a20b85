"""Store a plan: the layout of each variable with its reason, the problems, and the bytes.

`layoutmap.plan.planner` makes it. `layoutmap.Plan`, which users see, is a subclass in `layoutmap.scope.plan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from layoutmap.core.errors import PlanError, join_names
from layoutmap.core.match import Match
from layoutmap.core.mesh import Mesh, MeshDimension
from layoutmap.core.old_names import DeprecatedAlias
from layoutmap.core.paths import replace_numbers_with_stars
from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.carried_cost import PlanCost
from layoutmap.plan.output_rules import OutputRanks
from layoutmap.plan.problems import Problem, merge_problems, sort_problems
from layoutmap.rules.keras_rules import pad_rule_layout
from layoutmap.rules.near_misses import find_nearest_candidates

_MAX_FULL_PROBLEMS = 10


@dataclass(frozen=True)
class PlanTable(Mapping[str, Assignment]):
    """Mapping from the path of every variable to its `Assignment`. See `layoutmap.Plan`."""

    mesh: Mesh
    assignments: tuple[Assignment, ...]
    problems: tuple[Problem, ...] = ()
    activations: tuple[Match, ...] = ()
    free_activations: bool = False
    cost: PlanCost | None = field(default=None, hash=False)
    device_memory: int | None = None
    strict: bool = False
    gathered_dims: tuple[str, ...] = ()
    batches: tuple[str, ...] | None = field(default=None, compare=False)
    layers: OutputRanks | None = field(default=None, compare=False)

    @cached_property
    def _assignments_by_key(self) -> dict[str, Assignment]:
        """A dict from key to assignment. If several models have a path, its key begins with the model's name."""
        counts = Counter(a.variable.path for a in self.assignments)
        found: dict[str, Assignment] = {}
        for a in self.assignments:
            v = a.variable
            key = name = v.path if counts[v.path] == 1 else f"{v.model}: {v.path}"
            number = 1
            while key in found:  # two models may have the same name, so add a number
                number += 1
                key = f"{name} ({number})"
            found[key] = a
        return found

    @cached_property
    def _keys_by_path(self) -> dict[str, list[str]]:
        """A dict from each path to the keys of its variables. A path takes precedence over an equal alias."""
        by_path: dict[str, list[str]] = {}
        aliases: dict[str, list[str]] = {}
        for key, a in self._assignments_by_key.items():
            by_path.setdefault(a.variable.path, []).append(key)
            for path in dict.fromkeys(a.variable.aliases):
                aliases.setdefault(path, []).append(key)
        return {**aliases, **by_path}

    # Several models may share a path, so a plan iterates over unique keys (decisions/0038).
    def __iter__(self) -> Iterator[str]:
        return iter(self._assignments_by_key)

    def __len__(self) -> int:
        return len(self.assignments)

    def __contains__(self, path: object) -> bool:
        return path in self._assignments_by_key or path in self._keys_by_path

    def __getitem__(self, path: str) -> Assignment:
        if path in self._assignments_by_key:
            return self._assignments_by_key[path]
        keys = self._keys_by_path.get(path, ())
        if len(keys) == 1:
            return self._assignments_by_key[keys[0]]
        if keys:
            raise PlanError(
                f"{path}: {len(keys)} variables of the plan have this path",
                facts={"variables": join_names(keys)},
                why="the plan has several models",
                fix=f"include the model: plan[{keys[0]!r}]",
            )
        near = find_nearest_candidates(path, self._keys_by_path)
        raise KeyError(
            f"the plan has no variable {path!r}" + (f"; near misses: {', '.join(near)}" if near else "")
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without cached properties."""
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    def apply_corrections(self) -> Self:
        """Return the plan with the layouts of the rules without typos, so that other advice fits them."""
        assignments = tuple(
            replace(a, layout=pad_rule_layout(rule, a.layout.rank), match=Match(a.variable.path, rule))
            if a.match and (rule := a.match.corrected)
            else a
            for a in self.assignments
        )
        is_same = all(new is a for new, a in zip(assignments, self.assignments, strict=True))
        return self if is_same else replace(self, assignments=assignments)

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that prevent building the model."""
        return tuple(p for p in self.problems if p.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The problems that `strict` turns into errors."""
        return tuple(p for p in self.problems if p.severity == "warning")

    @property
    def global_bytes(self) -> int:
        """Size in bytes of all variables, each counted once."""
        return sum(a.variable.global_bytes for a in self.assignments)

    @property
    def device_bytes(self) -> int:
        """Bytes on each device: the shards of all variables that are not in host memory."""
        return sum(a.device_bytes for a in self.assignments if a.fits)

    @property
    def host_bytes(self) -> int:
        """Size in bytes of the shards in host memory, for each device."""
        return sum(a.shard_bytes - a.device_bytes for a in self.assignments if a.fits)

    @property
    def unused_dims(self) -> tuple[MeshDimension, ...]:
        """The mesh dims larger than 1 over which no weight and no layer output is sharded."""
        layouts = [a.layout for a in self.assignments if a.variable.kind is Kind.WEIGHT]
        layouts += [match.layout for match in self.activations if match.layout is not None]
        used = {
            dim for layout in layouts for axis in range(layout.rank) for dim in layout.list_mesh_dims(axis)
        }
        return tuple(dim for dim in self.mesh.mesh_dims if layouts and dim.size > 1 and dim.name not in used)

    @property
    def largest_variable_initialized_unsharded(self) -> Assignment | None:
        """The largest variable that one device must initialize unsharded, or None if there is no such variable."""
        found = [a for a in self.assignments if a.global_init]
        return max(found, key=lambda a: a.variable.global_bytes, default=None)

    def add_problem(self, problem: Problem) -> Self:
        """Return a copy of the plan with one more problem."""
        return self.add_problems([problem])

    def add_problems(self, problems: Sequence[Problem]) -> Self:
        """Return a copy of the plan with more problems."""
        return replace(self, problems=sort_problems([*self.problems, *problems]))

    def add_cost(self, cost: PlanCost) -> Self:
        """Return a copy of the plan with the cost of a training step, in which collectives of weights are marked."""
        paths = {
            replace_numbers_with_stars(path)
            for a in self.assignments
            for path in (a.variable.path, *a.variable.aliases)
        }
        return replace(self, cost=cost.with_weight_paths(frozenset(paths)))

    def set_limits(self, *, device_memory: int | None = None, strict: bool = False) -> Self:
        """Return a copy of the plan with limits for its `verdict`: device memory, and whether warnings count as errors.

        Args:
            device_memory: The memory of a device in bytes, instead of that of the machine; `None`: unchanged.
            strict: Whether warnings count as errors.

        Raises:
            PlanError: `device_memory` is below 1.
        """
        if device_memory is None:
            return replace(self, strict=strict)
        if device_memory < 1:
            raise PlanError(
                f"device_memory={device_memory} is not a memory size",
                why="device_memory is the memory of one device in bytes",
                fix="pass a positive number, as in device_memory=80 * 2**30",
            )
        if self.cost is None:
            return replace(self, device_memory=device_memory, strict=strict)
        return replace(self, cost=self.cost.on_memory(device_memory), strict=strict)

    with_problem = DeprecatedAlias("add_problem")
    with_problems = DeprecatedAlias("add_problems")
    with_cost = DeprecatedAlias("add_cost")
    judged = DeprecatedAlias("set_limits")

    def check(self, *, strict: bool = False) -> Self:
        """Raise one error with all errors of the plan, or return the plan if it has none.

        Args:
            strict: Whether warnings count as errors.

        Raises:
            PlanError: There are errors; the first ten are in the message, all are in `problems`.
        """
        found = self.errors + (self.warnings if strict else ())
        if not found:
            return self
        grouped = merge_problems(found)
        rest = any(p.kind == "no rule" for p in found) * 'set layout_map.rest = "replicated" if that is meant'
        if len(grouped) == 1:
            (only,) = grouped
            fix = ", or ".join(filter(None, (only.fix, rest)))
            raise PlanError(only.what, problems=found, facts=dict(only.facts), why=only.why, fix=fix)
        shown = "\n\n".join(str(problem) for problem in grouped[:_MAX_FULL_PROBLEMS])
        more = (
            f"\n\n... and {len(grouped) - _MAX_FULL_PROBLEMS} more"
            if len(grouped) > _MAX_FULL_PROBLEMS
            else ""
        )
        last = f"\n\nsome variables match no rule: {rest}" if rest else ""
        raise PlanError(f"{len(found)} problems\n{shown}{more}{last}", problems=found)
