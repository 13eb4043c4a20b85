"""Describe other ways to plan a model, and how to write each in Python, as options, and in a rules file.

A way is a value. What to type follows from what differs between two of them, so nothing is advised that is not counted.
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
from layoutmap.core.paths import make_path_regex, split_at_numbers
from layoutmap.core.specs import BatchDim, format_batch_dim, list_batch_dims, replace_unsharded
from layoutmap.core.steps import Shape
from layoutmap.core.variables import Assignment
from layoutmap.plan.lint import guess_batch_dim
from layoutmap.plan.table import PlanTable
from layoutmap.rules import presets
from layoutmap.rules.rule_set import RuleSet

T = TypeVar("T")
Specs = Sequence[Any]
_QUOTE = "'"


class Preset(NamedTuple):
    """Arguments of `LayoutMap.preset`."""

    name: str
    model_dim: str | None
    fsdp_dim: str | None

    def rules(self, mesh: Mesh) -> RuleSet:
        """Return the preset's rules for a mesh."""
        return RuleSet.preset(self.name, mesh, model_dim=self.model_dim, fsdp_dim=self.fsdp_dim)


@dataclass(frozen=True)
class Way:
    """One way to plan a model.

    Args:
        rules: The rules.
        preset: The preset that they are those of; `None`: of none.
        on: The machine, as it is named; `None`: no step is counted.
        inputs: The arrays that the model is called with.
        named: Whether these are known by their names.
        batch_dim: The mesh dim over which batches are sharded, where it is said.
        remat: Whose activations are computed again in the backward pass.
        fuse_attention: Whether attention is one fused kernel.
        dtype: The type that weights are made in; empty: their own.
        data: The mesh dim over which batches are sharded, said or not; it changes no plan by itself.
        blocks: What the layers between which activations pass are called.
    """

    rules: RuleSet
    preset: Preset | None = None
    on: str = ""
    inputs: tuple[Shape, ...] = ()
    named: bool = False
    batch_dim: BatchDim | None = None
    remat: str | None = None
    fuse_attention: bool = False
    dtype: str = ""
    data: str | None = field(default=None, compare=False)
    blocks: str = field(default="", compare=False)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the rules."""
        assert self.rules.mesh is not None
        return self.rules.mesh

    @property
    def batch_size(self) -> int:
        """Size of the first axis of the first input, or 1 without one."""
        return next((each.shape[0] for each in self.inputs if each.shape), 1)

    # -- variants

    def change_rules(self, rules: Mapping[str, Specs], activations: Mapping[str, Specs] | None = None) -> Way:
        """Return the way with some rules changed, and others added at the end."""
        return replace(self, rules=_edit_rules(self.rules, self.mesh, rules, activations or {}), preset=None)

    def doubled(self, dim: str) -> Way:
        """Return the same configuration with twice as many devices along a mesh dim."""
        mesh = Mesh(
            None, [replace(each, size=each.size * (1 + (each.name == dim))) for each in self.mesh.mesh_dims]
        )
        on = re.sub(r":[0-9]+$", f":{mesh.size}", self.on)
        return replace(self, rules=_edit_rules(self.rules, mesh, {}, {}), on=on)

    def joined(self, before: Way, other: Way) -> Way:
        """Return the way with the changes from `before` to `other`. This way's rules stay if it changed them."""
        names = ["fuse_attention", "remat", "batch_dim", "inputs"]
        names += ["rules", "preset", "blocks"] if self.rules == before.rules else []
        return replace(
            self, **{n: getattr(other, n) for n in names if getattr(other, n) != getattr(before, n)}
        )

    def halve_batch(self) -> Way | None:
        """Return the way with half the batch, or None if the batch size is odd or unknown."""
        size = self.batch_size
        if size % 2:
            return None
        inputs = [
            replace(x, shape=(size // 2, *x.shape[1:])) if x.shape[:1] == (size,) else x for x in self.inputs
        ]
        return replace(self, inputs=tuple(inputs))

    def shard_weights(self, dim: str, plan: PlanTable) -> Way | None:
        """Return the way with each weight of two or more axes on devices also sharded over `dim`, or None without one.

        Args:
            dim: The mesh dim.
            plan: The plan, as it is now.
        """
        if self.preset and not self.preset.fsdp_dim and self.preset.model_dim != dim:
            preset = self.preset._replace(fsdp_dim=dim)
            return replace(self, rules=preset.rules(self.mesh), preset=preset)
        groups: dict[Any, list[Assignment]] = {}
        for a in plan.assignments:
            if not a.variable.follows and a.fits and a.layout.rank > 1 and not a.layout.host_memory:
                rule = a.match.rule if a.match else None
                groups.setdefault(rule or split_at_numbers(a.variable.path), []).append(a)
        changed = {
            key.pattern if isinstance(key, Rule) else make_path_regex([a.variable.path for a in group]): specs
            for key, group in groups.items()
            if (specs := _add_dim(dim, key.layout if isinstance(key, Rule) else group[0].layout, group))
        }
        return self.change_rules(changed) if changed else None


def read_way(plan: PlanTable) -> Way:
    """Return the way in which a plan without a step cost was made: the rules that won in it."""
    rules = RuleSet(plan.mesh, rest="replicated")
    for made, matches in (
        (rules, [a.match for a in plan.assignments if a.match]),
        (rules.activations, plan.activations),
    ):
        won = {match.rule.number: match.rule for match in matches if match.rule}
        for number in sorted(won):
            made.add(won[number].pattern, won[number].layout, uneven=won[number].uneven)
    return Way(rules, find_preset(rules), data=guess_batch_dim(plan))


def find_preset(rules: RuleSet) -> Preset | None:
    """Return the preset that contains all of these rules, or None without one."""
    mesh = rules.mesh
    if mesh is None or not rules:
        return None
    for name in presets.list_presets():
        # Keep presets with a matching pattern, because most belong to other families.
        fields = presets.read_preset(name, mesh, None, None)
        for model_dim in (*mesh.dim_names, None) if fields.rules.keys() >= set(rules) else ():
            for fsdp_dim in (None, *(dim for dim in mesh.dim_names if dim != model_dim)):
                preset = Preset(name, model_dim, fsdp_dim)
                made = preset.rules(mesh)
                pairs = (rules, made), (rules.activations, made.activations)
                if all(ours.items() <= theirs.items() for ours, theirs in pairs):
                    return preset
    return None


def _add_dim(dim: str, layout: Layout, group: Sequence[Assignment]) -> Specs | None:
    """Return one rule's specs with a dim added along the largest axis that it divides, or None without one."""
    dims = [layout.list_mesh_dims(axis) for axis in range(layout.rank)]
    if any(a.layout != layout for a in group) or any(dim in of for of in dims):
        return None
    shape, size = group[0].variable.shape, layout.mesh.dim_size(dim)
    for axis in sorted(range(layout.rank), key=lambda axis: (bool(dims[axis]), -shape[axis])):
        if all(a.variable.shape[axis] % (layout.num_shards(axis) * size) == 0 for a in group):
            dims[axis] = (*dims[axis], dim)
            return _get_specs(Layout(dims, layout.mesh))
    return None


def _edit_rules(
    before: RuleSet, mesh: Mesh, rules: Mapping[str, Specs], activations: Mapping[str, Specs]
) -> RuleSet:
    """Return rules for a mesh with some changed, and others added at the end."""
    after = RuleSet(mesh, uneven=before.uneven, rest=before.rest)
    for made, there, changed in (
        (after, before, rules),
        (after.activations, before.activations, activations),
    ):
        for rule in there.rules:
            specs = changed.get(rule.pattern, _get_specs(rule.layout))
            made.add(rule.pattern, specs, uneven=rule.uneven, memory=rule.layout.memory)
        for pattern, specs in changed.items():
            if pattern not in there:
                made.add(pattern, specs)
    return after


def _get_specs(layout: Layout) -> Specs:
    return replace_unsharded(layout.sharding_specs)


# -- text of a change


class Difference(NamedTuple):
    """Difference of two ways in words, in Python, as options, and in a rules file, or empty texts."""

    what: str
    python: str
    option: str = ""
    yaml: str = ""


def describe_change(before: Way, after: Way) -> tuple[str, str, str]:
    """Return the change between two ways in words, in Python, and as command-line options, or "" without options."""
    found = list(_find_differences(before, after))
    lines = [each.yaml for each in found if each.yaml]
    if options := " ".join(each.option for each in found if each.option):
        lines.insert(0, options)
    can = all(each.option or each.yaml for each in found)
    what, python = ", and ".join(each.what for each in found), ", ".join(each.python for each in found)
    return what, python, "\n".join(lines) if can else ""


def _find_differences(before: Way, after: Way) -> Iterator[Difference]:
    """Yield the differences of two ways."""
    if after.fuse_attention and not before.fuse_attention:
        what = "have attention computed by one fused kernel (flash attention)"
        yield Difference(what, "fuse_attention=True", "--fuse-attention")
    if after.remat != before.remat:
        what = f"recompute the activations of {after.remat} in the backward pass"
        yield Difference(what, f'remat="{after.remat}"', f"--remat {after.remat}")
    dims = ",".join(map(str, after.mesh.mesh_dims))
    if after.mesh != before.mesh:
        on = after.on if after.on != before.on else ""
        python, option = (
            f'mesh="{dims}"' + f', on="{on}"' * bool(on),
            f"--mesh {dims}" + f" --on {on}" * bool(on),
        )
        yield Difference(f"use {after.mesh.size:,} devices", python, option)
    if after.preset and after.preset != before.preset:
        name, model, fsdp = after.preset
        python = f"lm.LayoutMap.preset({name!r}, {dims!r}, model_dim={model!r}, fsdp_dim={fsdp!r})"
        more = f" --model-dim {model or 'none'}" * (model != "model")
        option = f"--preset {name}{more} --fsdp-dim {fsdp}"
        yield Difference(_describe_sharding([fsdp], before.data), python.replace("'", '"'), option)
    else:
        yield from _find_rule_differences(before, after)
    if after.batch_dim != before.batch_dim:
        dim = after.batch_dim
        assert dim is not None, "no way stops to shard the batch"
        written = f'"{dim}"' if isinstance(dim, str) else str(dim)
        option = f"--batch-dim {','.join(list_batch_dims(dim))}"
        yield Difference(f"shard the batch over {format_batch_dim(dim)}", f"batch_dim={written}", option)
    if after.inputs != before.inputs:
        texts = [
            f"{x.name}=" * after.named + f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in after.inputs
        ]
        batch = f"a batch of {after.batch_size:,}"
        option = " ".join(f'"{text}"' for text in texts)
        yield Difference(f"take {batch}", f"inputs of {batch}", f"--inputs {option}")
    if after.dtype != before.dtype:
        what, dtype = f"make weights and slots in {after.dtype}", after.dtype
        yield Difference(what, f'dtype="{dtype}" where the model is made', f"--dtype {dtype}")


def _find_rule_differences(before: Way, after: Way) -> Iterator[Difference]:
    """Yield the differences of two ways' rules."""
    for name, old, new in (
        ("rules", before.rules, after.rules),
        ("activations", before.rules.activations, after.rules.activations),
    ):
        there = {rule.pattern: _get_specs(rule.layout) for rule in old.rules}
        changed = {
            r.pattern: specs for r in new.rules if there.get(r.pattern) != (specs := _get_specs(r.layout))
        }
        if not changed:
            continue
        what = f"lay out what {escape_text(after.blocks)} return as {_format_python(next(iter(changed.values())))}"
        if name == "rules":
            dims = {
                dim
                for p, specs in changed.items()
                for dim in {*_iterate_dims(specs)} - {*_iterate_dims(there.get(p, ()))}
            }
            what = _describe_sharding(sorted(dims), before.data)
        written = ", ".join(f'r"{escape_text(p)}": {_format_python(specs)}' for p, specs in changed.items())
        lines = [
            f"  '{escape_text(p).replace(_QUOTE, 2 * _QUOTE)}': {_format_yaml(s)}" for p, s in changed.items()
        ]
        # A user cannot edit the rules of a preset, so write them as a new file.
        yield Difference(
            what, f"{name}={{{written}}}", "", "" if before.preset else "\n".join([f"{name}:", *lines])
        )


def _describe_sharding(dims: Sequence[str | None], data: str | None) -> str:
    return f"shard weights over {', '.join(map(str, dims))} as well" + " (FSDP)" * (dims == [data])


def _iterate_dims(specs: Specs) -> Iterator[str]:
    for spec in specs:
        yield from [spec] if isinstance(spec, str) else spec or ()


def _format_python(specs: Specs) -> str:
    return repr(tuple(specs)).replace("'", '"')


def _format_yaml(specs: Specs) -> str:
    def format_spec(spec: Any) -> str:
        return "null" if spec is None else spec if isinstance(spec, str) else f"[{', '.join(spec)}]"

    return f"[{', '.join(map(format_spec, specs))}]"


def try_count_bytes(work_out: Callable[[], T]) -> T | None:
    """Return the bytes that a function counts, or None if a model cannot be planned that way."""
    try:
        return work_out()
    except LayoutMapError:
        return None
