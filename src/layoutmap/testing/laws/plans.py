"""Laws about plans: a plan predicts the built model, contains each problem, and agrees with all its reports."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from layoutmap.core.errors import LayoutMapError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.uneven import UnevenSetting, choose_uneven_policy
from layoutmap.core.variables import Assignment, Kind, VariableSpec, get_itemsize
from layoutmap.engines import get_engine
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.scope import build
from layoutmap.scope.suggest import suggest
from layoutmap.testing.laws.trial import NotApplicable, Trial, flatten_arrays
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Specs

Dims = tuple[str, ...]


def compare_repeated_plans(trial: Trial) -> Iterator[str]:
    """Compare the fingerprint of the plan with the fingerprints of two more plans of the same case."""
    later = [trial.case.plan().fingerprint for _ in range(2)]
    if set(later) != {trial.plan.fingerprint}:
        yield f"fingerprints {trial.plan.fingerprint}, {', '.join(later)}"


def compare_built_model_with_plan(trial: Trial) -> Iterator[str]:
    """Compare paths, layouts, and bytes on each device with the plan, also after training steps."""
    engine = get_engine(trial.adapter.engine_name)
    planned = {a.variable.path: a for a in trial.plan.assignments}
    stored = {
        each.variable.path: each.array for each in trial.adapter.list_stored_variables(trial.model_pair[1])
    }
    for path, variable in trial.adapter.variables(trial.model_pair[1]).items():
        if path not in planned:
            if not path.startswith("optimizer."):  # a plan cannot predict all slots of an optimizer
                yield f"{path}: built, and not planned"
            continue
        expected = planned[path]
        if variable.layout != expected.layout:
            yield f"{path}: planned {expected.layout}, built {variable.layout}"
        if path in stored:
            sizes = {np.asarray(shard).nbytes for _, shard in engine.iterate_shards(stored[path])}
            if max(sizes) != expected.shard_bytes or (len(sizes) > 1 and not expected.is_padded):
                yield f"{path}: planned {expected.shard_bytes} bytes on each device, built {sorted(sizes)}"


def compare_layouts_with_rules(trial: Trial) -> Iterator[str]:
    """Compare each variable's layout with the first rule that matches the start of one of the variable's paths."""
    drawn_map = trial.case.map
    for a in trial.rule_assignments:
        paths = (a.variable.path, *a.variable.aliases)
        specs = next(
            (specs for pattern, specs in drawn_map.rules if any(re.match(pattern, p) for p in paths)), ()
        )
        dims = [() if spec is None else (spec,) if isinstance(spec, str) else spec for spec in specs]
        yield from _compare_with_rule_dims(trial, a, dims, drawn_map.uneven)


def check_uneven_axis_shrinks(trial: Trial) -> Iterator[str]:
    """Plan an axis over all mesh dims. It must be sharded over the dims that split it into the most equal shards."""
    variable = _pick_variable_with_axes(trial)
    axis, mesh = trial.choices.pick(*range(len(variable.shape))), trial.case.map.mesh
    dims = [trial.plan.mesh.dim_names if position == axis else () for position in range(len(variable.shape))]
    rules = {f"{re.escape(variable.path)}$": dims}
    plan = trial.case.plan(LayoutMap(mesh, rules, uneven="shrink", rest="replicated"))
    yield from _compare_with_rule_dims(trial, plan[variable.path], dims, "shrink")


def _pick_variable_with_axes(trial: Trial) -> VariableSpec:
    """Return a random variable with at least one axis."""
    candidates = [a.variable for a in trial.rule_assignments if a.variable.shape]
    if not candidates:
        raise NotApplicable("all variables of the case are scalars")
    return trial.choices.pick(*candidates)


def _compare_with_rule_dims(
    trial: Trial, assignment: Assignment, rule_dims: Sequence[Dims], uneven: UnevenSetting
) -> Iterator[str]:
    """Yield a text if a variable's layout or padding is not the one that its rule's dims and `uneven` require.

    An uneven axis is padded, replicated, or sharded over fewer dims, as `uneven` says. An engine without
    support for several dims along one axis uses the largest of them.
    """
    sizes = {dim.name: dim.size for dim in trial.plan.mesh.mesh_dims}
    shape = assignment.variable.shape
    expected = list(rule_dims) or [()] * len(shape)
    requested = Layout(expected, trial.plan.mesh)
    why_not = trial.adapter.explain_why_padding_is_impossible(assignment.variable, requested)
    policy = choose_uneven_policy(uneven, can_pad=not why_not)
    if assignment.is_padded != (policy == "pad" and bool(requested.find_uneven_axes(shape))):
        yield f"{assignment.variable.path}: padded is {assignment.is_padded}, by {uneven} and {why_not!r}"
    for axis, dims in enumerate(expected):
        if shape[axis] % math.prod(sizes[dim] for dim in dims) and policy != "pad":
            counts = [0] if policy == "replicate" else range(len(dims) + 1)
            options = [option for count in counts for option in itertools.combinations(dims, count)]
            even = [option for option in options if not shape[axis] % math.prod(sizes[d] for d in option)]
            expected[axis] = max(even, key=lambda option: math.prod(sizes[dim] for dim in option))
    if not get_engine(trial.adapter.engine_name).several_dims:
        expected = [dims and (max(dims, key=sizes.__getitem__),) for dims in expected]
    actual = [assignment.layout.list_mesh_dims(axis) for axis in range(assignment.layout.rank)]
    if [_remove_dims_of_size_one(dims, sizes) for dims in expected] != [
        _remove_dims_of_size_one(d, sizes) for d in actual
    ]:
        yield f"{assignment.variable.path}: its rule says {expected}, and it has {assignment.layout}"


def _remove_dims_of_size_one(dims: Dims, sizes: Mapping[str, int]) -> Dims:
    """Return the dims without those of size 1, which shard nothing."""
    return tuple(dim for dim in dims if sizes[dim] > 1)


def compare_planned_memory_with_shards(trial: Trial) -> Iterator[str]:
    """Compare the planned memory of a device with the sum of its shards of weights, gradients, slots, and states."""
    sizes = {dim.name: dim.size for dim in trial.plan.mesh.mesh_dims}
    total = slots = 0
    for a in trial.plan.assignments:
        counts = (math.prod(sizes[d] for d in a.layout.list_mesh_dims(axis)) for axis in range(a.layout.rank))
        shard = [math.ceil(size / count) for size, count in zip(a.variable.shape, counts, strict=True)]
        num_bytes = math.ceil(math.prod(shard) * get_itemsize(a.variable.dtype))
        total += 2 * num_bytes if a.variable.is_trained else num_bytes
        slots += num_bytes * (a.variable.kind is Kind.SLOT)
    if (total, slots) != (trial.plan.memory.total, trial.plan.memory.slots):
        yield f"{total} bytes by hand, {slots} of slots, and in the plan {trial.plan.memory!r}"


def compare_slots_with_weights(trial: Trial) -> Iterator[str]:
    """Check that an axis of a slot is sharded like the axis of its weight with the same size, if only one has it.

    Half of the cases use Adafactor, which creates slots with fewer axes than their weights.
    """
    factored = [optimizer for optimizer in trial.case.model.optimizers if "Adafactor" in optimizer]
    is_factored = bool(factored) and trial.choices.draw_true_once_in(2)
    plan = replace(trial.case, optimizer=factored[0]).plan() if is_factored else trial.plan
    weights = {a.variable.path: a for a in plan.assignments if a.variable.kind is Kind.WEIGHT}
    slots = [a for a in plan.assignments if a.variable.kind is Kind.SLOT and a.variable.parent in weights]
    if not slots:
        raise NotApplicable("the plan of the case has no optimizer slots")
    for slot in slots:
        weight = weights[slot.variable.parent or ""]
        shape = weight.variable.shape
        for axis, size in enumerate(slot.variable.shape):
            if shape.count(size) == 1:
                dims = weight.layout.list_mesh_dims(shape.index(size))
                if slot.layout.list_mesh_dims(axis) != dims:
                    yield f"{slot.variable.path}: {slot.layout}, and axis {axis} of its weight is over {dims}"


def check_misspelled_rule_is_reported(trial: Trial) -> Iterator[str]:
    """Change a letter of a rule so that it matches nothing, and check that a problem of the plan names the rule."""
    rules = dict(trial.case.map.rules)
    if not rules:
        raise NotApplicable("the layout map of the case has no rule")
    right = trial.choices.pick(*rules)
    letters = [i for i, letter in enumerate(right) if letter.isalpha() and right[i - 1 : i] != "\\"]
    if not letters:
        raise NotApplicable("the rule has no letter that can be misspelled")
    position = trial.choices.pick(*letters)
    misspelled = f"{right[:position]}{'q' if right[position] != 'q' else 'z'}{right[position + 1 :]}"
    if any(re.match(misspelled, path) for path in _list_variable_paths(trial)):
        raise NotApplicable("the misspelled rule matches a path, too")
    changed = {misspelled if pattern == right else pattern: specs for pattern, specs in rules.items()}
    layout_map = LayoutMap(trial.case.map.mesh, changed, uneven=trial.case.map.uneven, rest="replicated")
    if not any(misspelled in str(problem) for problem in trial.case.plan(layout_map).problems):
        yield f"{misspelled} matches nothing, and no problem of the plan names it"


def _list_variable_paths(trial: Trial) -> list[str]:
    return [path for a in trial.plan.assignments for path in (a.variable.path, *a.variable.aliases)]


def check_last_name_rule_is_unused(trial: Trial) -> Iterator[str]:
    """Plan with a rule for only the last name of a path, and check that the plan reports it as unused."""
    names = {a.variable.path.rpartition(".")[2] for a in trial.rule_assignments if a.variable.shape}
    paths = _list_variable_paths(trial)
    unmatched = sorted(name for name in names if not any(path.startswith(name) for path in paths))
    if not unmatched:
        raise NotApplicable("each last name of a path also starts a path, so a rule for it matches")
    pattern = f"{re.escape(trial.choices.pick(*unmatched))}$"
    plan = trial.case.plan(LayoutMap(trial.case.map.mesh, {pattern: ()}, rest="replicated"))
    if ("unused rule", pattern) not in {(problem.kind, problem.subject) for problem in plan.problems}:
        yield f"{pattern} is at the start of no path, and the plan does not say that it is unused"


def check_impossible_rule_is_refused(trial: Trial) -> Iterator[str]:
    """Use a rule that no layout satisfies. The map must raise, or its plan must have an error and `build` raise."""
    chosen = _pick_variable_with_axes(trial)
    case, pattern = trial.case, re.escape(chosen.path) + "$"
    assert case.layout_map.mesh is not None
    specs = _draw_impossible_specs(trial.choices, case.layout_map.mesh, chosen.shape)
    try:
        layout_map = LayoutMap(case.map.mesh, {pattern: specs}, rest="replicated")
    except LayoutMapError as error:
        if repr(pattern) not in str(error):
            yield f"{specs} for {chosen.path}: the error does not name the rule: {error}"
        return
    plan = case.plan(layout_map)
    if chosen.path not in {problem.subject for problem in plan.errors}:
        yield f"{specs} for {chosen.path} of shape {chosen.shape}: the plan has no error that names it"
    try:
        build(case.make_model, layout_map, inputs=case.plan_inputs, library=case.library, progress=False)
    except LayoutMapError:
        return
    yield f"{specs} for {chosen.path} of shape {chosen.shape}: it was built"


def _draw_impossible_specs(choices: Choices, mesh: Mesh, shape: tuple[int, ...]) -> Specs:
    """Draw impossible specs for a shape: too many, an unknown dim, one dim twice, or an axis split unevenly."""
    first = mesh.dim_names[0]
    options: list[Callable[[], Specs]] = [
        lambda: (*(None for _ in shape), first),
        lambda: ("nowhere", *(None for _ in shape[1:])),
    ]
    if len(shape) > 1:
        options.append(lambda: (first, first, *(None for _ in shape[2:])))
    uneven = [
        tuple(dim if at == axis else None for at in range(len(shape)))
        for axis in range(len(shape))
        for dim in mesh.dim_names
        if Layout([dim if at == axis else None for at in range(len(shape))], mesh).find_uneven_axes(shape)
    ]
    if uneven:
        options.append(lambda: choices.pick(*uneven))
    return choices.pick(*options)()


def find_problems_of_suggested_rules(trial: Trial) -> Iterator[str]:
    """Plan the model with the suggested rules, and yield each problem of the plan and each finding of lint."""
    case = trial.case
    layout_map = suggest(case.make_model, case.map.mesh, inputs=case.plan_inputs, library=case.library)
    reread_map = LayoutMap.from_yaml(layout_map.to_yaml())
    if reread_map != layout_map:
        yield f"the rules {layout_map} were read back as {reread_map}"
    planned = case.plan(reread_map)
    problems = [*planned.errors, *planned.warnings, *planned.lint()]
    # A suggested map shards weights over one dim, and has no rules for outputs of blocks, so ignore the problems of
    # these two kinds.
    yield from (str(problem) for problem in problems if problem.kind not in ("unused dim", "no activations"))


def compare_exit_code_with_verdict(trial: Trial) -> Iterator[str]:
    """Plan on the command line with a memory limit. All outputs and the exit code must say whether the plan fits.

    A quarter of the cases run, since the command needs a process.
    """
    if not trial.choices.draw_true_once_in(4):
        raise NotApplicable("only one case in four tries this law")
    case, needed = trial.case, trial.plan.memory.total
    limit = trial.choices.pick(2 * needed, needed + 2, needed, needed - 2, needed // 2) // 2 * 2
    expected = trial.plan.set_limits(device_memory=limit).verdict
    with tempfile.TemporaryDirectory() as folder:
        rules, page, plan_file = (Path(folder) / name for name in ("rules.yaml", "plan.html", "plan.json"))
        rules.write_text(case.layout_map.to_yaml(), encoding="utf-8")
        (Path(folder) / "drawn_model.py").write_text(case.program, encoding="utf-8")
        arguments = ["plan", "drawn_model:make_model", "--rules", str(rules), "--library", case.library]
        arguments += ["--device-memory", _format_kib(limit), "--html", str(page), "--json", str(plan_file)]
        if case.model.plan_inputs:
            arrays = map(np.asarray, flatten_arrays(case.batch[0]))
            arguments += ["--inputs", *(f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in arrays)]
        command = _run_layoutmap_command(folder, arguments)
        if command.returncode != (0 if expected.passes else 1):
            yield f"exit code {command.returncode}, and the verdict is {expected.headline!r}: {command.stderr}"
            return
        low_limit = limit // 4 * 2
        low_verdict = trial.plan.set_limits(device_memory=low_limit).verdict
        second = _run_layoutmap_command(
            folder, ["plan", str(plan_file), "--device-memory", _format_kib(low_limit)]
        )
        if second.returncode != (0 if low_verdict.passes else 1):
            yield f"exit code {second.returncode} of the plan's file: {low_verdict.headline!r}"
        reports = {
            "terminal": command.stdout.partition("\n")[0],
            "page": page.read_text(encoding="utf-8"),
            "JSON": json.loads(plan_file.read_text(encoding="utf-8"))["verdict"]["says"],
        }
    for name, text in reports.items():
        if expected.headline not in text:
            yield f"{name}: {text[:300]!r} is not the verdict {expected.headline!r}"


def _format_kib(num_bytes: int) -> str:
    return f"{num_bytes / 1024:.9f}KiB"


def _run_layoutmap_command(folder: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the command line in a folder, in one process without a launcher."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "JAX_COORDINATOR_ADDRESS", "TF_CONFIG")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    environment["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, map(os.path.abspath, sys.path))])
    return subprocess.run(
        [sys.executable, "-m", "layoutmap", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
