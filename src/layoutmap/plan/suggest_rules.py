"""Suggest the first rules for a model: those of a preset, or rules from the roles of its weights (decisions/0258).

`LayoutSuggestions` of `plan.lint.suggest` chooses each layout, as it does for the plan's advice. Each rule has the
reason for its layout.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from layoutmap.core.layout import Layout
from layoutmap.core.paths import format_merged_paths, split_path_at_numbers
from layoutmap.core.specs import BatchDim, list_batch_dims, make_spec
from layoutmap.core.unsupported import UNKNOWN_ORDER_KIND
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.plan.lint import list_dims_with_batch_names
from layoutmap.plan.lint.linted_plan import LintedPlan
from layoutmap.plan.lint.suggest import NAMES_OF_EXPERTS, LayoutSuggestions, is_index_or_mask
from layoutmap.plan.lint.weights import Weight, make_sibling_key
from layoutmap.plan.planner import make_plan_table
from layoutmap.plan.table import PlanTable
from layoutmap.rules import presets
from layoutmap.rules.merged_rules import find_whole_path_pattern_parts, merge_patterns
from layoutmap.rules.rule_set import RuleSet

_MIN_SHARE = 0.001  # groups with a smaller share of all weights get no rule

Group = Sequence[Assignment]


def suggest_rules(plan: PlanTable, batch_dim: BatchDim | None = None) -> RuleSet:
    """Return suggested rules for the variables of a plan: those of a fitting preset, or rules from the axis roles.

    Args:
        plan: The plan. Its layouts have no effect.
        batch_dim: The mesh dim over which batches are sharded; `None`: all dims with a usual name for that.
    """
    variables, is_free = [a.variable for a in plan.assignments], plan.free_activations
    notes = [p for p in plan.problems if p.kind == UNKNOWN_ORDER_KIND]
    plan = make_plan_table(variables, RuleSet(plan.mesh), complete=False, free_activations=is_free)
    plan = plan.add_problems(notes)
    batch_dims = list_batch_dims(batch_dim) or list_dims_with_batch_names(plan.mesh)
    dims = [dim.name for dim in plan.mesh.mesh_dims if dim.size > 1]
    if not dims:
        return RuleSet(plan.mesh, rest="replicated")
    # A dim that shards the batch cannot serve tensor parallelism, too, so choose one only if the mesh has no other dim.
    dim = max(
        dims, key=lambda dim: (dim not in batch_dims, dim not in NAMES_OF_EXPERTS, plan.mesh.dim_size(dim))
    )
    preset = presets.find_matching_preset([group[0].variable.path for group in _group_repeated_weights(plan)])
    return (preset and _adapt_preset_rules(plan, preset, dim, batch_dims)) or _make_rules_with_reasons(
        _with_suggested_layouts(plan, batch_dims), dim, batch_dims
    )


def _group_repeated_weights(plan: PlanTable) -> list[Group]:
    """Return the weights and states in groups of one shape with paths that differ only in numbers."""
    return _group_variables_needing_rules(plan, lambda v: (split_path_at_numbers(v.path), v.rule_shape))


def _group_variables_needing_rules(plan: PlanTable, key: Callable[[VariableSpec], object]) -> list[Group]:
    """Return the weights and states that may need rules, grouped by a key.

    Derived variables, scalars, indices, and masks need none.
    """
    found: dict[object, list[Assignment]] = {}
    for a in plan.assignments:
        v = a.variable
        is_kept = v.is_derived or not v.rule_shape or is_index_or_mask(v)
        if v.kind in (Kind.WEIGHT, Kind.STATE) and not is_kept:
            found.setdefault(key(v), []).append(a)
    return list(found.values())


def _adapt_preset_rules(plan: PlanTable, name: str, dim: str, batch_dims: tuple[str, ...]) -> RuleSet | None:
    """Return the rules of a preset that are used, or None if a layout does not fit, even with `uneven="shrink"`."""
    over = (None, dim) if dim in batch_dims else (dim, None)
    fields = presets.read_preset(name, plan.mesh, *over)
    uneven, variables = dict(fields.uneven_rules), [a.variable for a in plan.assignments]
    for _ in range(2):
        rules = RuleSet(plan.mesh, activations=fields.activations, rest="replicated")
        for pattern, specs in fields.rules.items():
            rules.add(pattern, specs, uneven=uneven.get(pattern))
        table = make_plan_table(variables, rules, complete=False)
        won = {a.match.rule.pattern: a for a in table.assignments if a.match and a.match.rule}
        if all(a.fits for a in table.assignments):
            writer, notes = _ReasonMaker(table, dim, batch_dims), _make_order_notes(table)
            used = RuleSet(plan.mesh, activations=fields.activations, rest="replicated")
            for pattern, specs in fields.rules.items():
                if pattern in won:
                    reason = f"{writer.make_reason([won[pattern]])}{notes.get(pattern, '')} (preset {name})"
                    used.add(pattern, specs, uneven=uneven.get(pattern), reason=reason)
            return used
        uneven |= {
            a.match.rule.pattern: "shrink"
            for a in table.assignments
            if not a.fits and a.match and a.match.rule
        }
    return None


def _make_order_notes(plan: PlanTable) -> Mapping[str, str]:
    """Return a dict from the pattern of a rule to a text with the later rules that it must precede."""
    later: dict[str, dict[str, None]] = defaultdict(dict)
    matches = [(a.match.rule, a.match.others) for a in plan.assignments if a.match and a.match.rule]
    winners = {rule.pattern for rule, _ in matches}
    for rule, others in matches:
        for other in others:
            # Suggested rules contain no rule of a preset that determines no layout.
            if other.layout != rule.layout and other.pattern in winners:
                later[rule.pattern][other.pattern] = None
    return {
        pattern: f"; must stay before {' and '.join(others)}, as the first match wins"
        for pattern, others in later.items()
    }


def _with_suggested_layouts(plan: PlanTable, batch_dims: tuple[str, ...]) -> PlanTable:
    """Return a copy of the plan with the suggested layout of each weight.

    A suggestion depends on the other weights of the block, so only one weight of each block is changed at a time.
    """
    while True:
        suggestions = LayoutSuggestions(LintedPlan(plan, make_spec(batch_dims) if batch_dims else None))
        layouts, changed_blocks = dict[int, Layout](), set[str]()
        for group in _group_repeated_weights(plan):
            blocks = {a.variable.path.rpartition(".")[0].rpartition(".")[0] for a in group}
            if blocks & changed_blocks or _is_small_group(group, suggestions.linted):
                continue
            found = {
                id(a): layout
                for a in group
                if a.layout.is_fully_replicated() and (layout := suggestions.suggest_layout(a))
            }
            changed_blocks |= blocks if found else set()
            layouts |= found
        if not layouts:
            return plan
        changed = [replace(a, layout=layouts.get(id(a), a.layout)) for a in plan.assignments]
        plan = replace(plan, assignments=tuple(changed))


def _is_small_group(group: Group, linted: LintedPlan) -> bool:
    """Return whether a group has too few bytes of the model to be sharded. Biases are sharded as their kernels."""
    if _is_bias(group[0], linted):
        return False
    total = sum(a.variable.global_bytes for a in linted.plan.assignments)
    return sum(a.variable.global_bytes for a in group) < _MIN_SHARE * total


def _is_bias(a: Assignment, linted: LintedPlan) -> bool:
    """Return whether a variable is a vector, or has no summed axis, as a bias with several axes."""
    w = linted.weights_by_id.get(id(a))
    is_summed = w is None or w.list_axes("in") or w.list_axes("rows")
    return len(a.variable.shape) == 1 or not is_summed


def _make_rules_with_reasons(plan: PlanTable, dim: str, batch_dims: tuple[str, ...]) -> RuleSet:
    """Return rules that give the layouts of a plan, one rule for each layout and reason, with merged patterns."""
    reasons = _ReasonMaker(plan, dim, batch_dims)
    owners = {
        path: a.variable.path for a in plan.assignments for path in (a.variable.path, *a.variable.aliases)
    }
    rows: dict[tuple[bool, Layout, str], list[tuple[str, ...]]] = {}
    for group in _group_variables_needing_rules(plan, lambda v: split_path_at_numbers(v.path)):
        counts = Counter(a.layout for a in group)
        layout, count = counts.most_common(1)[0]
        usual = layout if 2 * count > len(group) else None
        for layout in counts:
            members = [a for a in group if a.layout == layout]
            is_small = layout.is_fully_replicated() and (
                _is_bias(members[0], reasons.linted)
                or _is_small_group(members, reasons.linted)
                or reasons.suggestions.is_small(members[0])
            )
            if is_small and usual in (None, layout):
                continue
            # The pattern for the usual layout may also match variables with other layouts, so the rules of these must
            # come first.
            parts = _find_pattern_parts(members, group if layout == usual else members, owners)
            rows.setdefault((layout == usual, layout, reasons.make_reason(members)), []).append(parts)
    merged = [(key, pattern) for key, patterns in rows.items() for pattern in merge_patterns(patterns)]
    paths = [a.variable.path for a in plan.assignments]
    merged.sort(
        key=lambda row: (row[0][0], next(n for n, path in enumerate(paths) if re.match(row[1], path)))
    )
    rule_set, notes = RuleSet(plan.mesh, rest="replicated"), dict[str, str]()
    # The first pass finds which rules match the variables of earlier ones.
    for _ in range(2):
        rule_set = RuleSet(plan.mesh, rest="replicated")
        for (_, layout, reason), pattern in merged:
            rule_set.add(pattern, layout, reason=reason + notes.get(pattern, ""))
        notes = _make_order_notes(
            make_plan_table([a.variable for a in plan.assignments], rule_set, complete=False)
        )
    return rule_set


def _find_pattern_parts(members: Group, group: Group, owners: Mapping[str, str]) -> tuple[str, ...]:
    """Return the parts of a pattern that matches some variables of a group and no variable outside of the group."""
    of_group = {a.variable.path for a in group}
    unwanted = [path for path, owner in owners.items() if owner not in of_group]
    return find_whole_path_pattern_parts(_list_similar_paths(members), _list_similar_paths(group), unwanted)


def _list_similar_paths(members: Group) -> list[str]:
    """Return the paths and aliases of variables that differ from the first path only in numbers."""
    # A pattern for the paths also matches aliases that differ only in numbers, so return these, too.
    paths = [path for a in members for path in (a.variable.path, *a.variable.aliases)]
    return [path for path in paths if split_path_at_numbers(path) == split_path_at_numbers(paths[0])]


class _ReasonMaker:
    """Maker of the reasons for the suggested layouts of a plan."""

    def __init__(self, plan: PlanTable, dim: str, batch_dims: tuple[str, ...]) -> None:
        self.linted = LintedPlan(plan, make_spec(batch_dims) if batch_dims else None)
        self._parts = {
            id(w) for block in self.linted.blocks for w in self.linted.find_attention_kernels(block).values()
        }
        self._attention_outputs = {
            id(w)
            for block in self.linted.blocks
            if self.linted.find_attention_kernels(block) and (w := self.linted.find_attention_output(block))
        }
        self.suggestions = LayoutSuggestions(self.linted)
        self._previous_kernels = self.suggestions.previous_kernels
        self._kernels_before_row_kernels = {
            id(before)
            for w in self.linted.kernels
            if (before := self._previous_kernels.get(id(w))) and w.layout.num_shards(w.list_axes("in")[0]) > 1
        }
        self._siblings_per_block = Counter(
            (make_sibling_key(w.assignment), w.block) for w in self.linted.weights
        )
        self._dim = dim
        self._batch_dims = batch_dims

    def make_reason(self, members: Group) -> str:
        """Return the reason for the layout of some weights: the role in the layer, and the effect of the layout.

        Weights with another role than most are named.
        """
        reasons: dict[str, list[str]] = {}
        for has_names in (True, False):
            reasons = {}
            for a in members:
                reason = self._make_weight_reason(a, has_names)
                if id(a) in self.linted.experts.listed and len(a.variable.shape) > 1:
                    reason += self._list_explanation
                reasons.setdefault(reason, []).append(a.variable.path)
            if len(reasons) == 1:
                break
        usual = max(reasons, key=lambda reason: len(reasons[reason]))
        others = [
            f"; for {format_merged_paths(paths)}: {reason.removeprefix(f'{usual}; ')}"
            for reason, paths in reasons.items()
            if reason != usual
        ]
        return usual + "".join(others)

    def _make_weight_reason(self, a: Assignment, has_names: bool) -> str:
        w, shape = self.linted.weights_by_id.get(id(a)), a.variable.shape
        axis = next((n for n in range(len(shape)) if a.layout.num_shards(n) > 1), None)
        if axis is None:
            if id(a) in self.linted.experts.routers:
                return "router: replicated, because each device scores all experts"
            if factor := self.linted.low_rank_factors.get(id(a)):
                why = (
                    "the rest of its base kernel is sharded"
                    if factor.role
                    else "shapes hide which is the first"
                )
                return f"low-rank factor: replicated, as {why}"
            if self.suggestions.is_small(a):
                return "replicated: small"
            return self._explain_why_replicated(w, shape)
        if factor := self.linted.low_rank_factors.get(id(a)):
            return f"low-rank factor: sharded as the {factor.role}puts of its base kernel are"
        dims = a.layout.list_mesh_dims(axis)
        over = " and ".join(dims)
        if {*dims} <= {*self._batch_dims}:
            return f"FSDP: stored in shards over {over}, the batch's dim, and gathered for use"
        if w is None or not w.use.roles[axis]:
            return self._explain_sharding_without_role(a, axis)
        role = w.use.roles[axis].partition(".")[0]
        if role == "rows":
            return f"table: each device along {over} has some of the {shape[axis]} rows"
        if w.list_axes("rows"):
            return "table: sharded by features" + self._explain_why_uneven(shape, w.list_axes("rows"))
        if not w.list_axes("in"):
            return "bias: sharded as the output of its kernel"
        if id(w) in self._parts:
            is_known = w.use.head_size or len(w.list_axes("out")) > 1
            condition = "" if is_known else f", if {a.layout.num_shards(axis)} divides their number"
            return f"heads: each device computes whole heads{condition}"
        return self._explain_kernel_sharding(w, role, over, has_names)

    @cached_property
    def _list_explanation(self) -> str:
        """Text about the mesh dim of experts, which cannot shard a list of them, or "" if the mesh has no such dim."""
        mesh, unused = self.linted.plan.mesh, self.linted.plan.unused_dims
        dim = next((d for d in mesh.mesh_dims if d.name in NAMES_OF_EXPERTS and d.size > 1), None)
        effect = ", so nothing uses it" if dim in unused else ""
        return f"; a list of experts cannot be divided over {dim.name}{effect}: stack them" if dim else ""

    def _explain_kernel_sharding(self, w: Weight, role: str, over: str, has_names: bool) -> str:
        others = (self.linted.kernels_after if role == "out" else self.linted.kernels_before).get(id(w), ())
        # One reason is for all siblings, and those of one block have different neighbors, so it names none.
        has_names = has_names and self._siblings_per_block[make_sibling_key(w.assignment), w.block] == 1
        names = ", ".join(dict.fromkeys(other.layer_name for other in others)) if has_names else ""
        previous = self._previous_kernels.get(id(w))
        pairs = (
            {(id(w), id(other)) for other in others}
            if role == "out"
            else {(id(other), id(w)) for other in others}
        )
        order = f"; {self.linted.guessed_order_reason}" if pairs & self.linted.guessed_pairs else ""
        if id(w) in self.linted.unordered_kernels:
            is_known_layer = w.assignment.variable.use is not None
            order = (
                f"; {self.linted.unknown_order_reason if is_known_layer else 'the order of calls is unknown'}"
            )
        if role == "out" and not names and (others or id(w) in self._kernels_before_row_kernels):
            names = "the next layer"
        if (
            role == "in"
            and not names
            and previous is not None
            and previous.layout.num_shards(previous.list_axes("out")[0]) > 1
        ):
            names = "the layer before"
        if role == "out":
            takers = (
                f"as the inputs of {names} are" if names else "and gathered if what follows needs all of them"
            )
            split = (
                "; fused: a split that crosses shards reshards them"
                if id(w) in self.linted.kernels_after_fused
                else ""
            )
            return f"column: outputs are sharded, {takers}{split}{order}"
        source = (
            f"takes the sharded outputs of {names}" if names else "each device takes its part of the inputs"
        )
        if id(w) in self._attention_outputs and not names:
            source = "takes the heads of each device"
        return f"row: {source}, and the sums are all-reduced over {over}{order}"

    def _explain_sharding_without_role(self, a: Assignment, axis: int) -> str:
        if axis == 0 and self.linted.is_expert_stack(a):
            return f"experts: each device has {a.shard_shape[0]} of {a.variable.shape[0]} experts"
        return f"unknown role: axis {axis} is sharded because it is the largest that divides evenly"

    def _explain_why_replicated(self, w: Weight | None, shape: Sequence[int]) -> str:
        axes = range(len(shape))
        if len(shape) == 1:
            return "replicated: a vector is small"
        if w is not None and w.list_axes("rows") and self._dim in self.linted.batch_dims:
            return f"replicated: over {self._dim}, each step would gather or sum the outputs of a table"
        if w is not None and w.list_axes("in") and w.list_axes("out"):
            is_row = any(
                not maker.layout.is_fully_replicated() for maker in self.linted.kernels_before.get(id(w), ())
            )
            axes = w.list_axes("in" if is_row else "out")[:1]
        return "replicated" + (self._explain_why_uneven(shape, axes, w) or ", as the inputs of its layer are")

    def _explain_why_uneven(self, shape: Sequence[int], axes: Sequence[int], w: Weight | None = None) -> str:
        """Return text about axes or numbers of heads that the mesh dim does not divide, or "" if it divides all."""
        unit = (
            w.use.head_size or 1
            if w is not None and (id(w) in self._parts or id(w) in self.linted.attention_outputs)
            else 1
        )
        count = self.linted.plan.mesh.dim_size(self._dim)
        uneven = [
            f"{shape[axis] // unit} heads" if unit > 1 else f"axis {axis} of {shape[axis]}"
            for axis in axes
            if shape[axis] % (count * unit)
        ]
        if not uneven:
            return ""
        return f": {self._dim}={count} does not divide {' or '.join(uneven)}"
