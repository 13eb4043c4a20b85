"""The plan: for each variable its layout and why, every problem there is, and all bytes; a value.

`layoutmap.plan.planner` makes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from layoutmap.core.errors import PlanError, format_message
from layoutmap.core.escaping import escaped
from layoutmap.core.match import Match
from layoutmap.core.mesh import Mesh
from layoutmap.core.paths import merge_paths, path_pattern, path_shape
from layoutmap.core.variables import Assignment
from layoutmap.rules.near_misses import nearest

if TYPE_CHECKING:
    from layoutmap.plan.diff import PlanDiff
    from layoutmap.plan.lint import Findings
    from layoutmap.plan.memory import Memory

__all__ = ["Plan", "Problem", "Severity", "group_problems", "in_order", "merge_problems"]

Severity = Literal["error", "warning", "note"]

_SHOWN_IN_FULL = 10


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a plan that is wrong or may not be meant.

    Args:
        kind: What sort of problem: `"rank"`, `"uneven"`, `"no rule"`, `"unused rule"`, `"shadowed rule"`
            (of variables or of activations), `"tied"`, `"drawn whole"`, `"no activations"`, `"not built"`, `"not held"`
            or `"cannot run"`. What lint finds has kinds of its own; see `layoutmap.plan.lint`.
        severity: `"error"`: the model cannot be made so. `"warning"`: it can, and `strict` makes it an error. `"note"`:
            worth knowing, never an error.
        subject: The path or the pattern concerned.
        what: The headline.
        facts: The values that show it.
        why: The reason.
        fix: What to type instead.
        model: The name of the model that the subject is in, if the plan has several; the headline begins with it then.
    """

    kind: str
    severity: Severity
    subject: str
    what: str
    facts: tuple[tuple[str, str], ...] = ()
    why: str = ""
    fix: str = ""
    model: str = ""

    def of_model(self, model: str) -> Problem:
        """The same problem of one model among several, named in the headline; `""`: as it is."""
        return replace(self, what=f"{model}: {self.what}", model=model) if model else self

    def __str__(self) -> str:
        return format_message(escaped(self.what), dict(self.facts), self.why, self.fix)


@dataclass(frozen=True, repr=False)
class Plan(Mapping[str, Assignment]):
    """Where every variable of a model goes: a mapping from path to `Assignment`.

    A variable is found under each of its paths, and iteration gives its first one. Where several models have a variable
    of one path, the keys are `"model: path"`, and the path alone is a `PlanError` that names them.

    Args:
        mesh: The mesh.
        assignments: The variables and their layouts, in the order of the model.
        problems: Everything found, errors first.
        activations: The layers whose output a rule of `LayoutMap.activations` lays out, in the order of the model;
            empty too where the library tells no layers.
        free_activations: Whether a compiler chooses how activations lie where no rule says it.

    Example:
        >>> from layoutmap import LayoutMap, Mesh
        >>> from layoutmap.plan.planner import make_plan
        >>> from layoutmap.core.variables import VariableSpec
        >>> layout_map = LayoutMap(Mesh(None, "batch=2,model=4"), {r".*\\.kernel": (None, "model")})
        >>> plan = make_plan([VariableSpec("d1.kernel", (512, 1024), "float32")], layout_map)
        >>> plan["d1.kernel"].shard_shape, plan.device_bytes
        ((512, 256), 524288)
        >>> plan
        <Plan: 1 variable on batch=2, model=4, 2.0 MiB, 512.0 KiB per device; no problems>
    """

    mesh: Mesh
    assignments: tuple[Assignment, ...]
    problems: tuple[Problem, ...] = ()
    activations: tuple[Match, ...] = ()
    free_activations: bool = False

    @cached_property
    def _by_key(self) -> dict[str, Assignment]:
        counts = Counter(a.variable.path for a in self.assignments)
        found: dict[str, Assignment] = {}
        for a in self.assignments:
            v = a.variable
            key = name = v.path if counts[v.path] == 1 else f"{v.model}: {v.path}"
            number = 1
            while key in found:  # two models of one name
                number += 1
                key = f"{name} ({number})"
            found[key] = a
        return found

    @cached_property
    def _by_path(self) -> dict[str, list[str]]:
        """The keys of the variables that have a path; a variable's own path is before another's alias."""
        own: dict[str, list[str]] = {}
        aliases: dict[str, list[str]] = {}
        for key, a in self._by_key.items():
            own.setdefault(a.variable.path, []).append(key)
            for path in dict.fromkeys(a.variable.aliases):
                aliases.setdefault(path, []).append(key)
        return {**aliases, **own}

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self.assignments)

    def __contains__(self, path: object) -> bool:
        return path in self._by_key or path in self._by_path

    def __getitem__(self, path: str) -> Assignment:
        if path in self._by_key:
            return self._by_key[path]
        keys = self._by_path.get(path, ())
        if len(keys) == 1:
            return self._by_key[keys[0]]
        if keys:
            raise PlanError(
                f"{path}: {len(keys)} variables of the plan have this path",
                facts={"variables": ", ".join(keys[:8]) + (", ..." if len(keys) > 8 else "")},
                why="several models are in one plan",
                fix=f"name the model too: plan[{keys[0]!r}]",
            )
        near = nearest(path, self._by_path)
        raise KeyError(
            f"the plan has no variable {path!r}" + (f"; near misses: {', '.join(near)}" if near else "")
        )

    def __getstate__(self) -> dict[str, Any]:
        """The fields, without what is worked out of them."""
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems with which the model cannot be made."""
        return tuple(p for p in self.problems if p.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The problems that `strict` makes errors."""
        return tuple(p for p in self.problems if p.severity == "warning")

    @property
    def global_bytes(self) -> int:
        """Size in bytes of all variables, each counted once."""
        return sum(a.variable.global_bytes for a in self.assignments)

    @property
    def device_bytes(self) -> int:
        """Size in bytes of what each device holds: the shards of all variables."""
        return sum(a.shard_bytes for a in self.assignments if a.fits)

    @property
    def largest_global_init(self) -> Assignment | None:
        """The largest variable whose first value must be drawn whole on one device, if there is any."""
        whole = [a for a in self.assignments if a.global_init]
        return max(whole, key=lambda a: a.variable.global_bytes, default=None)

    def with_problem(self, problem: Problem) -> Plan:
        """The same plan with one more problem."""
        return self.with_problems([problem])

    def with_problems(self, problems: Sequence[Problem]) -> Plan:
        """The same plan with more problems."""
        return replace(self, problems=in_order([*self.problems, *problems]))

    def check(self, *, strict: bool = False) -> Plan:
        """Raise once, with every error; give the plan back if there is none.

        Args:
            strict: Whether warnings count as errors.

        Raises:
            PlanError: There are errors; the first ten are in the message, all are in `problems`.
        """
        found = self.errors + (self.warnings if strict else ())
        if not found:
            return self
        grouped = group_problems(found)
        if len(grouped) == 1:
            (only,) = grouped
            raise PlanError(only.what, problems=found, facts=dict(only.facts), why=only.why, fix=only.fix)
        shown = "\n\n".join(str(problem) for problem in grouped[:_SHOWN_IN_FULL])
        more = f"\n\n... and {len(grouped) - _SHOWN_IN_FULL} more" if len(grouped) > _SHOWN_IN_FULL else ""
        raise PlanError(f"{len(found)} problems\n{shown}{more}", problems=found)

    # -- questions

    @property
    def memory(self) -> Memory:
        """What each device holds: weights, gradients, slots and state; and what is whole there and need not be.

        Example:
            >>> from layoutmap import LayoutMap, Mesh
            >>> from layoutmap.plan.planner import make_plan
            >>> from layoutmap.core.variables import VariableSpec
            >>> variables = [VariableSpec(path, (512, 1024), "float32") for path in ("up.kernel", "head.kernel")]
            >>> layout_map = LayoutMap(Mesh(None, "batch=2,model=4"), {"up": (None, "model"), "head": (None, None)})
            >>> print(make_plan(variables, layout_map).memory)
            per device: weights 2.5 MiB, gradients 2.5 MiB; 5.0 MiB in all
            <BLANKLINE>
            whole on every device    bytes  could save it
            ---------------------  -------  -----------------
            head.kernel            1.5 MiB  axis 0 over model
        """
        from layoutmap.plan.memory import memory_of

        return memory_of(self)

    def explain(self, path: str) -> str:
        """Why a variable is where it is, and what to type to have it elsewhere.

        Args:
            path: The variable's path, or another path to it.

        Raises:
            KeyError: The plan has no such variable; names those that come close.

        Example:
            >>> from layoutmap import LayoutMap, Mesh
            >>> from layoutmap.plan.planner import make_plan
            >>> from layoutmap.core.variables import VariableSpec
            >>> rules = {r".*\\.kernel": (None, "model"), "d1": ("model",)}
            >>> layout_map = LayoutMap(Mesh(None, "batch=2,model=4"), rules)
            >>> print(make_plan([VariableSpec("d1.kernel", (512, 1024), "float32")], layout_map).explain("d1.kernel"))
            d1.kernel
              what          weight, float32[512, 1024], 2.0 MiB
              layout        (unsharded, model)
              per device    512 x 256, 512.0 KiB
              because       rule 1  .*\\.kernel
              also matches  rule 2  d1: would give (model,)
              change it     the first rule that matches wins: put one before rule 1, or change that
        """
        from layoutmap.report.explain import explain_text

        return explain_text(self, path)

    def diff(self, other: Plan) -> PlanDiff:
        """What moves from this plan to another; false if nothing does.

        Example:
            >>> from layoutmap import LayoutMap, Mesh
            >>> from layoutmap.plan.planner import make_plan
            >>> from layoutmap.core.variables import VariableSpec
            >>> mesh, variables = Mesh(None, "model=4"), [VariableSpec("d1.kernel", (512, 1024), "float32")]
            >>> rows, columns = LayoutMap(mesh, {"d1": ("model", None)}), LayoutMap(mesh, {"d1": (None, "model")})
            >>> print(make_plan(variables, rows).diff(make_plan(variables, columns)))
            d1.kernel  layout  (model, unsharded) -> (unsharded, model)
            <BLANKLINE>
            1 change; per device 512.0 KiB -> 512.0 KiB
        """
        from layoutmap.plan.diff import diff_plans

        return diff_plans(self, other)

    def lint(self, batch_dim: str | None = None) -> Findings:
        """What can be made so, and is probably not meant: each with its evidence and a fix.

        Args:
            batch_dim: The mesh dim that cuts the batch. Without it, the one that cuts the first axis of activations by
                their rules, or else one that is called batch, data, dp or fsdp.

        Raises:
            PlanError: The mesh has no such dim.

        Example:
            >>> from layoutmap import LayoutMap, Mesh
            >>> from layoutmap.plan.planner import make_plan
            >>> from layoutmap.core.variables import VariableSpec
            >>> layout_map = LayoutMap(Mesh(None, "batch=2,model=4"), {".*": ("batch", None)})
            >>> print(make_plan([VariableSpec("d1.kernel", (512, 1024), "float32")], layout_map).lint())
            unused dim: model: nothing is cut over this dim of the mesh
              mesh  batch=2, model=4
              why   groups of 4 devices hold the same, and compute the same: 2 of the 8 devices would do
              fix   cut weights over model, or plan for a mesh without it
            <BLANKLINE>
            Lint: 1 finding; the batch is cut over batch
        """
        from layoutmap.plan.lint import lint_plan

        return lint_plan(self, batch_dim)

    @property
    def fingerprint(self) -> str:
        """A short text that is the same for plans that put the same variables in the same places of a mesh."""
        from layoutmap.plan.json import fingerprint

        return fingerprint(self)

    # -- texts

    def to_json(self) -> str:
        """The plan as JSON, a variable in each line: to be kept beside the model, and compared by `diff`."""
        from layoutmap.plan.json import plan_to_json

        return plan_to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            PlanError: The text is no plan, or of another version; says where.
        """
        from layoutmap.plan.json import plan_from_json

        return plan_from_json(text)

    def to_html(self, batch_dim: str | None = None) -> str:
        """The plan as one page for a browser, which loads nothing: the mesh, memory, every variable and its slices.

        What `lint` finds stands beside the problems.

        Args:
            batch_dim: See `lint`.

        Example:
            >>> from layoutmap import LayoutMap, Mesh
            >>> from layoutmap.plan.planner import make_plan
            >>> from layoutmap.core.variables import VariableSpec
            >>> layout_map = LayoutMap(Mesh(None, "model=4"), {"d1": (None, "model")})
            >>> page = make_plan([VariableSpec("d1.kernel", (512, 1024), "float32")], layout_map).to_html()
            >>> page.startswith("<!doctype html>"), "d1.kernel" in page
            (True, True)
        """
        from layoutmap.report.page.page import plan_page

        return plan_page(self, self.lint(batch_dim).problems)

    def __str__(self) -> str:
        from layoutmap.report.text import plan_text

        return plan_text(self)

    def __repr__(self) -> str:
        from layoutmap.report.text import plan_line

        return f"<Plan: {plan_line(self)}>"

    def _repr_html_(self) -> str:
        from layoutmap.report.html import plan_html

        return plan_html(self)


def group_problems(problems: Sequence[Problem]) -> list[Problem]:
    """The problems with those of repeated blocks made one: `blocks.{0..31}.kernel: ...`."""
    return [merged for merged, _ in merge_problems(problems)]


def merge_problems(problems: Sequence[Problem]) -> list[tuple[Problem, tuple[Problem, ...]]]:
    """The problems with those of repeated blocks made one, each with those that it was made of."""
    groups: dict[object, list[Problem]] = {}
    for p in problems:
        # The pattern in a fix names one block; all else must be equal for two problems to be one.
        key = (p.kind, p.severity, p.model, path_shape(p.subject), p.facts, p.why)
        groups.setdefault(key, []).append(p)
    merged: list[tuple[Problem, tuple[Problem, ...]]] = []
    for first, *rest in groups.values():
        subjects = [first.subject, *(p.subject for p in rest)]
        new = merge_paths(subjects) if rest else first.subject
        fix = first.fix.replace(path_pattern(subjects[:1]), path_pattern(subjects))
        head = f"{first.model}: " if first.model else ""
        what = head + first.what.removeprefix(head).replace(first.subject, new, 1)
        merged.append((replace(first, subject=new, what=what, fix=fix), (first, *rest)))
    return merged


def in_order(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Errors first."""
    order = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(problems, key=lambda p: order[p.severity]))
