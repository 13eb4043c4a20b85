"""Describe variants of a plan, and how to write each in Python, as command-line options, and in a rules file.

A variant is planned, and its cost is computed. The text to type is derived from the difference of two variants, so the
advice is exactly the change whose cost was computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from layoutmap.core.errors import LayoutMapError
from layoutmap.core.escaping import escape_text
from layoutmap.core.layout import Layout
from layoutmap.core.match import Rule
from layoutmap.core.mesh import Mesh
from layoutmap.core.paths import make_path_regex, split_path_at_numbers
from layoutmap.core.specs import BatchDim, format_batch_dim, list_batch_dims, replace_unsharded_by_none
from layoutmap.core.steps import BatchArraySpec
from layoutmap.core.variables import Assignment
from layoutmap.plan.lint import guess_batch_dim
from layoutmap.plan.table import PlanTable
from layoutmap.rules import presets
from layoutmap.rules.rule_set import RuleSet

T = TypeVar("T")
Specs = Sequence[Any]
_QUOTE = "'"


class PresetArguments(NamedTuple):
    """Arguments of `LayoutMap.preset`."""

    name: str
    model_dim: str | None
    fsdp_dim: str | None

    def make_rules(self, mesh: Mesh) -> RuleSet:
        """Return the rules that `LayoutMap.preset` makes from these fields for a mesh."""
        return RuleSet.preset(self.name, mesh, model_dim=self.model_dim, fsdp_dim=self.fsdp_dim)


@dataclass(frozen=True)
class PlanVariant:
    """The choices that determine a plan and the cost of its step.

    Args:
        rules: The rules.
        preset: The preset with these rules; `None`: they are from no preset.
        machine_name: The name of the machine, such as `"h100:8"`; empty: no cost of a step is computed.
        inputs: The arrays with which the model is called.
        has_input_names: Whether the model gets the arrays by name.
        batch_dim: The mesh dim over which batches are sharded, if the user has set it.
        remat: The layers whose activations the backward pass recomputes; `None`: none.
        fuse_attention: Whether attention is one fused kernel.
        dtype: The dtype in which weights are created; empty: that of the model.
        guessed_batch_dim: The mesh dim over which batches probably are sharded. It changes no plan. Not compared.
        block_names: The paths of the blocks whose outputs the activation rules lay out, as text. Not compared.
    """

    rules: RuleSet
    preset: PresetArguments | None = None
    machine_name: str = ""
    inputs: tuple[BatchArraySpec, ...] = ()
    has_input_names: bool = False
    batch_dim: BatchDim | None = None
    remat: str | None = None
    fuse_attention: bool = False
    dtype: str = ""
    guessed_batch_dim: str | None = field(default=None, compare=False)
    block_names: str = field(default="", compare=False)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the rules, which always have one."""
        assert self.rules.mesh is not None
        return self.rules.mesh

    @property
    def batch_size(self) -> int:
        """The size of the first axis of the first input that has axes, or 1 if no input has any."""
        return next((array.shape[0] for array in self.inputs if array.shape), 1)

    # -- changed copies of the variant

    def with_changed_rules(
        self, rules: Mapping[str, Specs], activations: Mapping[str, Specs] | None = None
    ) -> PlanVariant:
        """Return this variant with new specs for some rules. Rules with new patterns are added at the end."""
        return replace(
            self, rules=_copy_rules_with_changes(self.rules, self.mesh, rules, activations or {}), preset=None
        )

    def with_doubled_devices(self, dim: str) -> PlanVariant:
        """Return this variant with twice as many devices along a mesh dim."""
        mesh = Mesh(
            None, [replace(each, size=each.size * (1 + (each.name == dim))) for each in self.mesh.mesh_dims]
        )
        machine_name = re.sub(r":[0-9]+$", f":{mesh.size}", self.machine_name)
        return replace(
            self, rules=_copy_rules_with_changes(self.rules, mesh, {}, {}), machine_name=machine_name
        )

    def with_changes_between(self, before: PlanVariant, after: PlanVariant) -> PlanVariant:
        """Return this variant with the changes from `before` to `after`. Rules that it has changed itself stay."""
        names = ["fuse_attention", "remat", "batch_dim", "inputs"]
        names += ["rules", "preset", "block_names"] if self.rules == before.rules else []
        return replace(
            self, **{n: getattr(after, n) for n in names if getattr(after, n) != getattr(before, n)}
        )

    def with_halved_batch(self) -> PlanVariant | None:
        """Return this variant with half the batch size, or None if the batch size is odd or unknown."""
        size = self.batch_size
        if size % 2:
            return None
        inputs = [
            replace(x, shape=(size // 2, *x.shape[1:])) if x.shape[:1] == (size,) else x for x in self.inputs
        ]
        return replace(self, inputs=tuple(inputs))

    def with_sharded_weights(self, dim: str, plan: PlanTable) -> PlanVariant | None:
        """Return this variant with weights also sharded over a mesh dim (FSDP), or None if no weight can be.

        Only weights in device memory with two axes or more are changed.

        Args:
            dim: The mesh dim.
            plan: The plan of this variant.
        """
        if self.preset and not self.preset.fsdp_dim and self.preset.model_dim != dim:
            preset = self.preset._replace(fsdp_dim=dim)
            return replace(self, rules=preset.make_rules(self.mesh), preset=preset)
        groups: dict[Any, list[Assignment]] = {}
        for a in plan.assignments:
            if not a.variable.is_derived and a.fits and a.layout.rank > 1 and not a.layout.host_memory:
                rule = a.match.rule if a.match else None
                groups.setdefault(rule or split_path_at_numbers(a.variable.path), []).append(a)
        changed = {
            key.pattern if isinstance(key, Rule) else make_path_regex([a.variable.path for a in group]): specs
            for key, group in groups.items()
            if (
                specs := _make_specs_with_added_dim(
                    dim, key.layout if isinstance(key, Rule) else group[0].layout, group
                )
            )
        }
        return self.with_changed_rules(changed) if changed else None


def extract_variant_from_plan(plan: PlanTable) -> PlanVariant:
    """Return the `PlanVariant` of a plan without a step cost. It has only rules that determine a layout."""
    rules = RuleSet(plan.mesh, rest="replicated")
    for rule_set, matches in (
        (rules, [a.match for a in plan.assignments if a.match]),
        (rules.activations, plan.activations),
    ):
        won = {match.rule.number: match.rule for match in matches if match.rule}
        for number in sorted(won):
            rule_set.add(won[number].pattern, won[number].layout, uneven=won[number].uneven)
    return PlanVariant(rules, find_preset_containing_rules(rules), guessed_batch_dim=guess_batch_dim(plan))


def find_preset_containing_rules(rules: RuleSet) -> PresetArguments | None:
    """Return the arguments of a preset that contains all of these rules, or None if there is no such preset."""
    mesh = rules.mesh
    if mesh is None or not rules:
        return None
    for name in presets.list_presets():
        # Most presets are for other model families, so create layouts only for a preset with all patterns in `rules`.
        fields = presets.read_preset(name, mesh, None, None)
        for model_dim in (*mesh.dim_names, None) if fields.rules.keys() >= set(rules) else ():
            for fsdp_dim in (None, *(dim for dim in mesh.dim_names if dim != model_dim)):
                preset = PresetArguments(name, model_dim, fsdp_dim)
                made = preset.make_rules(mesh)
                pairs = (rules, made), (rules.activations, made.activations)
                if all(ours.items() <= theirs.items() for ours, theirs in pairs):
                    return preset
    return None


def _make_specs_with_added_dim(dim: str, layout: Layout, group: Sequence[Assignment]) -> Specs | None:
    """Return the specs of a rule with one more axis sharded over a mesh dim, or None if that is impossible.

    Of the axes that then split evenly, it is the largest unsharded one, or else the largest one.
    """
    dims = [layout.list_mesh_dims(axis) for axis in range(layout.rank)]
    if any(a.layout != layout for a in group) or any(dim in of for of in dims):
        return None
    shape, size = group[0].variable.shape, layout.mesh.dim_size(dim)
    for axis in sorted(range(layout.rank), key=lambda axis: (bool(dims[axis]), -shape[axis])):
        if all(a.variable.shape[axis] % (layout.num_shards(axis) * size) == 0 for a in group):
            dims[axis] = (*dims[axis], dim)
            return _list_specs_with_none_for_unsharded(Layout(dims, layout.mesh))
    return None


def _copy_rules_with_changes(
    before: RuleSet, mesh: Mesh, rules: Mapping[str, Specs], activations: Mapping[str, Specs]
) -> RuleSet:
    """Return a copy of a rule set for a mesh, with new specs for some patterns. New patterns are added at the end."""
    after = RuleSet(mesh, uneven=before.uneven, rest=before.rest)
    for new, old, changed in (
        (after, before, rules),
        (after.activations, before.activations, activations),
    ):
        for rule in old.rules:
            specs = changed.get(rule.pattern, _list_specs_with_none_for_unsharded(rule.layout))
            new.add(rule.pattern, specs, uneven=rule.uneven, memory=rule.layout.memory)
        for pattern, specs in changed.items():
            if pattern not in old:
                new.add(pattern, specs)
    return after


def _list_specs_with_none_for_unsharded(layout: Layout) -> Specs:
    return replace_unsharded_by_none(layout.sharding_specs)


# -- text of a change


class VariantDifference(NamedTuple):
    """A difference of two variants in words, in Python, as options, and for a rules file. Empty: impossible there."""

    what: str
    python: str
    option: str = ""
    yaml: str = ""


def format_variant_change(before: PlanVariant, after: PlanVariant) -> tuple[str, str, str]:
    """Return the change between two variants in words, in Python, and for the command line ("" if impossible there)."""
    found = list(_iterate_variant_differences(before, after))
    lines = [difference.yaml for difference in found if difference.yaml]
    if options := " ".join(difference.option for difference in found if difference.option):
        lines.insert(0, options)
    can = all(difference.option or difference.yaml for difference in found)
    what = ", and ".join(difference.what for difference in found)
    return what, ", ".join(difference.python for difference in found), "\n".join(lines) if can else ""


def _iterate_variant_differences(before: PlanVariant, after: PlanVariant) -> Iterator[VariantDifference]:
    """Yield each difference between two variants, with the text for it."""
    if after.fuse_attention and not before.fuse_attention:
        what = "have attention computed by one fused kernel (flash attention)"
        yield VariantDifference(what, "fuse_attention=True", "--fuse-attention")
    if after.remat != before.remat:
        what = f"recompute the activations of {after.remat} in the backward pass"
        yield VariantDifference(what, f'remat="{after.remat}"', f"--remat {after.remat}")
    dims = ",".join(map(str, after.mesh.mesh_dims))
    if after.mesh != before.mesh:
        machine_name = after.machine_name if after.machine_name != before.machine_name else ""
        python, option = (
            f'mesh="{dims}"' + f', on="{machine_name}"' * bool(machine_name),
            f"--mesh {dims}" + f" --on {machine_name}" * bool(machine_name),
        )
        yield VariantDifference(f"use {after.mesh.size:,} devices", python, option)
    if after.preset and after.preset != before.preset:
        name, model, fsdp = after.preset
        python = f"lm.LayoutMap.preset({name!r}, {dims!r}, model_dim={model!r}, fsdp_dim={fsdp!r})"
        more = f" --model-dim {model or 'none'}" * (model != "model")
        option = f"--preset {name}{more} --fsdp-dim {fsdp}"
        yield VariantDifference(
            _describe_weight_sharding_change([fsdp], before.guessed_batch_dim),
            python.replace("'", '"'),
            option,
        )
    else:
        yield from _iterate_rule_differences(before, after)
    if after.batch_dim != before.batch_dim:
        dim = after.batch_dim
        assert dim is not None, "no variant removes the batch dim"
        written = f'"{dim}"' if isinstance(dim, str) else str(dim)
        option = f"--batch-dim {','.join(list_batch_dims(dim))}"
        yield VariantDifference(
            f"shard the batch over {format_batch_dim(dim)}", f"batch_dim={written}", option
        )
    if after.inputs != before.inputs:
        texts = [
            f"{x.name}=" * after.has_input_names + f"{x.dtype}[{','.join(map(str, x.shape))}]"
            for x in after.inputs
        ]
        batch = f"a batch of {after.batch_size:,}"
        option = " ".join(f'"{text}"' for text in texts)
        yield VariantDifference(f"take {batch}", f"inputs of {batch}", f"--inputs {option}")
    if after.dtype != before.dtype:
        what, dtype = f"make weights and slots in {after.dtype}", after.dtype
        yield VariantDifference(what, f'dtype="{dtype}" where the model is made', f"--dtype {dtype}")


def _iterate_rule_differences(before: PlanVariant, after: PlanVariant) -> Iterator[VariantDifference]:
    """Yield the differences between the rules, and between the activation rules, of two variants."""
    for name, old, new in (
        ("rules", before.rules, after.rules),
        ("activations", before.rules.activations, after.rules.activations),
    ):
        there = {rule.pattern: _list_specs_with_none_for_unsharded(rule.layout) for rule in old.rules}
        changed = {
            r.pattern: specs
            for r in new.rules
            if there.get(r.pattern) != (specs := _list_specs_with_none_for_unsharded(r.layout))
        }
        if not changed:
            continue
        specs = _format_specs_as_python(next(iter(changed.values())))
        what = f"lay out what {escape_text(after.block_names)} return as {specs}"
        if name == "rules":
            dims = {
                dim
                for p, specs in changed.items()
                for dim in {*_iterate_spec_dims(specs)} - {*_iterate_spec_dims(there.get(p, ()))}
            }
            what = _describe_weight_sharding_change(sorted(dims), before.guessed_batch_dim)
        written = ", ".join(
            f'r"{escape_text(p)}": {_format_specs_as_python(specs)}' for p, specs in changed.items()
        )
        lines = [
            f"  '{escape_text(p).replace(_QUOTE, 2 * _QUOTE)}': {_format_specs_as_yaml(s)}"
            for p, s in changed.items()
        ]
        # A preset has no file that the user could edit, so no lines for a rules file are given.
        yield VariantDifference(
            what, f"{name}={{{written}}}", "", "" if before.preset else "\n".join([f"{name}:", *lines])
        )


def _describe_weight_sharding_change(dims: Sequence[str | None], batch_dim: str | None) -> str:
    return f"shard weights over {', '.join(map(str, dims))} as well" + " (FSDP)" * (dims == [batch_dim])


def _iterate_spec_dims(specs: Specs) -> Iterator[str]:
    for spec in specs:
        yield from [spec] if isinstance(spec, str) else spec or ()


def _format_specs_as_python(specs: Specs) -> str:
    return repr(tuple(specs)).replace("'", '"')


def _format_specs_as_yaml(specs: Specs) -> str:
    def format_spec_as_yaml(spec: Any) -> str:
        return "null" if spec is None else spec if isinstance(spec, str) else f"[{', '.join(spec)}]"

    return f"[{', '.join(map(format_spec_as_yaml, specs))}]"


def call_or_none(function: Callable[[], T]) -> T | None:
    """Return the result of a function that plans or evaluates a variant, or None if the variant cannot be planned."""
    try:
        return function()
    except LayoutMapError:
        return None
