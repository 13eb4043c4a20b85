"""Laws of plans: a plan is what is built, what cannot be built is in it, and each way of asking says the same."""

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
from layoutmap.core.variables import Assignment, Kind, itemsize
from layoutmap.engines import get_engine
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.scope import build
from layoutmap.testing.laws.trial import NotTried, Trial, leaves
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Specs


def a_plan_is_the_same_each_time(trial: Trial) -> Iterator[str]:
    """Planned again, after other models, a model has the same fingerprint."""
    again = [trial.case.plan().fingerprint for _ in range(2)]
    if set(again) != {trial.plan.fingerprint}:
        yield f"fingerprints {trial.plan.fingerprint}, {', '.join(again)}"


def the_plan_is_what_is_built(trial: Trial) -> Iterator[str]:
    """Paths, layouts and bytes on each device are those of the plan, also after steps of training."""
    engine = get_engine(trial.adapter.engine_name)
    planned = {a.variable.path: a for a in trial.plan.assignments}
    stored = {each.variable.path: each.array for each in trial.adapter.stored(trial.pair[1])}
    for path, variable in trial.adapter.variables(trial.pair[1]).items():
        if path not in planned:
            if not path.startswith("optimizer."):  # optimizers may make slots that no plan can know
                yield f"{path}: built, and not planned"
            continue
        expected = planned[path]
        if variable.layout != expected.layout:
            yield f"{path}: planned {expected.layout}, built {variable.layout}"
        if path in stored:
            held = {np.asarray(piece).nbytes for _, piece in engine.to_shards(stored[path])}
            if held != {expected.shard_bytes}:
                yield f"{path}: planned {expected.shard_bytes} bytes on each device, built {sorted(held)}"


def each_variable_has_the_layout_of_its_first_rule(trial: Trial) -> Iterator[str]:
    """The layout of the first rule that matches one of its paths from the start, but for axes that do not divide.

    Of several dims along one axis, an engine that has none so takes the largest.
    """
    drawn = trial.case.map
    for a in trial.ruled:
        paths = (a.variable.path, *a.variable.aliases)
        specs = next(
            (specs for pattern, specs in drawn.rules if any(re.match(pattern, p) for p in paths)), ()
        )
        yield from _unlike(trial, a, [_as_dims(spec) for spec in specs], drawn.uneven)


def an_axis_shrinks_to_what_divides_it(trial: Trial) -> Iterator[str]:
    """An axis over all dims of the mesh is sharded over those that split it evenly into the most shards."""
    candidates = [a.variable for a in trial.ruled if a.variable.shape]
    if not candidates:
        raise NotTried("no variable has an axis")
    chosen = trial.choices.one_of(*candidates)
    place, mesh = trial.choices.one_of(*range(len(chosen.shape))), trial.case.map.mesh
    dims = [trial.plan.mesh.dim_names if axis == place else () for axis in range(len(chosen.shape))]
    rules = {f"{re.escape(chosen.path)}$": dims}
    plan = trial.case.plan(LayoutMap(mesh, rules, uneven="shrink", rest="replicated"))
    yield from _unlike(trial, plan[chosen.path], dims, "shrink")


def _unlike(trial: Trial, found: Assignment, specs: Sequence[tuple[str, ...]], uneven: str) -> Iterator[str]:
    """Yield how a layout differs from specs, but for axes that do not divide."""
    sizes = {dim.name: dim.size for dim in trial.plan.mesh.mesh_dims}
    shape = found.variable.shape
    expected = list(specs) or [()] * len(shape)
    for axis, dims in enumerate(expected):
        if shape[axis] % math.prod(sizes[dim] for dim in dims):
            options = [()] if uneven == "replicate" else _subsets(dims)
            right = [each for each in options if not shape[axis] % math.prod(sizes[d] for d in each)]
            expected[axis] = max(right, key=lambda each: math.prod(sizes[dim] for dim in each))
    if not get_engine(trial.adapter.engine_name).several_dims:
        expected = [dims and (max(dims, key=sizes.__getitem__),) for dims in expected]
    there = [found.layout.mesh_dims_of(axis) for axis in range(found.layout.rank)]
    if [_of_size(dims, sizes) for dims in expected] != [_of_size(dims, sizes) for dims in there]:
        yield f"{found.variable.path}: its rule says {expected}, and it has {found.layout}"


def the_memory_is_the_sum_of_shards(trial: Trial) -> Iterator[str]:
    """The memory of a plan is that of weights, their gradients, slots and the rest, each divided by its shards."""
    sizes = {dim.name: dim.size for dim in trial.plan.mesh.mesh_dims}
    total = slots = 0
    for a in trial.plan.assignments:
        shards = math.prod(sizes[d] for axis in range(a.layout.rank) for d in a.layout.mesh_dims_of(axis))
        num_bytes = math.ceil(math.prod(a.variable.shape) // shards * itemsize(a.variable.dtype))
        total += 2 * num_bytes if a.variable.is_trained else num_bytes
        slots += num_bytes * (a.variable.kind is Kind.SLOT)
    if (total, slots) != (trial.plan.memory.total, trial.plan.memory.slots):
        yield f"{total} bytes by hand, {slots} of slots, and in the plan {trial.plan.memory!r}"


def a_slot_has_the_layout_of_its_weight(trial: Trial) -> Iterator[str]:
    """A slot of an optimizer is sharded as its weight, along each axis whose size only that axis of the weight has.

    One plan in two is with Adafactor, whose slots have fewer axes than their weights.
    """
    factored = [each for each in trial.case.model.optimizers if "Adafactor" in each]
    is_factored = bool(factored) and trial.choices.one_in(2)
    plan = replace(trial.case, optimizer=factored[0]).plan() if is_factored else trial.plan
    weights = {a.variable.path: a for a in plan.assignments if a.variable.kind is Kind.WEIGHT}
    slots = [a for a in plan.assignments if a.variable.kind is Kind.SLOT and a.variable.parent in weights]
    if not slots:
        raise NotTried("its plan has no slots")
    for slot in slots:
        weight = weights[slot.variable.parent or ""]
        shape = weight.variable.shape
        for axis, size in enumerate(slot.variable.shape):
            if shape.count(size) != 1 or slot.layout.mesh_dims_of(axis) == (
                dims := weight.layout.mesh_dims_of(shape.index(size))
            ):
                continue
            yield f"{slot.variable.path}: {slot.layout}, and axis {axis} of its weight is over {dims}"


def _as_dims(spec: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if spec is None else (spec,) if isinstance(spec, str) else spec


def _subsets(dims: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [some for number in range(len(dims) + 1) for some in itertools.combinations(dims, number)]


def _of_size(dims: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The dims that shard: one of size 1 counts as none."""
    return tuple(dim for dim in dims if sizes[dim] > 1)


def a_misspelt_rule_is_noticed(trial: Trial) -> Iterator[str]:
    """A rule that is changed in one letter, so that it matches nothing, is named by the plan."""
    rules = dict(trial.case.map.rules)
    if not rules:
        raise NotTried("it has no rule")
    right = trial.choices.one_of(*rules)
    letters = [i for i, letter in enumerate(right) if letter.isalpha() and right[i - 1 : i] != "\\"]
    if not letters:
        raise NotTried("the rule has no letter")
    at = trial.choices.one_of(*letters)
    wrong = f"{right[:at]}{'q' if right[at] != 'q' else 'z'}{right[at + 1 :]}"
    if any(
        re.match(wrong, path)
        for a in trial.plan.assignments
        for path in (a.variable.path, *a.variable.aliases)
    ):
        raise NotTried("the changed rule matches, too")
    changed = {wrong if pattern == right else pattern: specs for pattern, specs in rules.items()}
    plan = trial.case.plan(
        LayoutMap(trial.case.map.mesh, changed, uneven=trial.case.map.uneven, rest="replicated")
    )
    if not any(wrong in str(problem) for problem in plan.problems):
        yield f"{wrong} matches nothing, and no problem of the plan names it"


def a_rule_matches_from_the_start_of_a_path(trial: Trial) -> Iterator[str]:
    """A rule for the last name of a path alone matches nothing, and the plan names it."""
    names = {a.variable.path.rpartition(".")[2] for a in trial.ruled if a.variable.shape}
    paths = [path for a in trial.plan.assignments for path in (a.variable.path, *a.variable.aliases)]
    within = sorted(name for name in names if not any(path.startswith(name) for path in paths))
    if not within:
        raise NotTried("a path has one name")
    pattern = f"{re.escape(trial.choices.one_of(*within))}$"
    plan = trial.case.plan(LayoutMap(trial.case.map.mesh, {pattern: ()}, rest="replicated"))
    if ("unused rule", pattern) not in {(each.kind, each.subject) for each in plan.problems}:
        yield f"{pattern} is at the start of no path, and the plan does not say that it is unused"


def an_impossible_rule_is_refused(trial: Trial) -> Iterator[str]:
    """A rule that cannot be is refused when it is written or planned, by name, and nothing is built."""
    candidates = [a for a in trial.ruled if a.variable.shape]
    if not candidates:
        raise NotTried("no variable has an axis")
    chosen = trial.choices.one_of(*candidates).variable
    mesh, pattern = trial.case.map.mesh, re.escape(chosen.path) + "$"
    specs = _impossible(trial.choices, trial.case.layout_map, chosen.shape)
    try:
        layout_map = LayoutMap(mesh, {pattern: specs}, rest="replicated")
    except LayoutMapError as error:
        if repr(pattern) not in str(error):
            yield f"{specs} for {chosen.path}: the error does not name the rule: {error}"
        return
    plan = trial.case.plan(layout_map)
    if chosen.path not in {each.subject for each in plan.errors}:
        yield f"{specs} for {chosen.path} of shape {chosen.shape}: the plan has no error that names it"
    try:
        build(
            trial.case.make_model,
            layout_map,
            inputs=trial.case.inputs,
            library=trial.case.library,
            progress=False,
        )
    except LayoutMapError:
        return
    yield f"{specs} for {chosen.path} of shape {chosen.shape}: it was built"


def _impossible(choices: Choices, layout_map: LayoutMap, shape: tuple[int, ...]) -> Specs:
    """Specs that do not fit: too many, an unknown dim, a dim on two axes, or an axis that does not divide."""
    mesh = layout_map.mesh
    assert mesh is not None
    ways: list[Callable[[], Specs]] = [
        lambda: (*(None for _ in shape), mesh.dim_names[0]),
        lambda: ("nowhere", *(None for _ in shape[1:])),
    ]
    if len(shape) > 1:
        ways.append(lambda: (mesh.dim_names[0], mesh.dim_names[0], *(None for _ in shape[2:])))
    odd = [
        tuple(dim if at == axis else None for at in range(len(shape)))
        for axis in range(len(shape))
        for dim in mesh.dim_names
        if Layout([dim if at == axis else None for at in range(len(shape))], mesh).uneven_axes(shape)
    ]
    if odd:
        ways.append(lambda: choices.one_of(*odd))
    return choices.one_of(*ways)()


def the_exit_code_is_the_verdict(trial: Trial) -> Iterator[str]:
    """A drawn limit of memory: terminal, page, JSON and exit code have the verdict of the plan.

    One case in four is tried, since the command is a process of its own.
    """
    if not trial.choices.one_in(4):
        raise NotTried("one case in four runs the command")
    case, needed = trial.case, trial.plan.memory.total
    limit = trial.choices.one_of(2 * needed, needed + 2, needed, needed - 2, needed // 2) // 2 * 2
    expected = trial.plan.judged(device_memory=limit).verdict
    with tempfile.TemporaryDirectory() as folder:
        rules, page, kept = (Path(folder) / name for name in ("rules.yaml", "plan.html", "plan.json"))
        rules.write_text(case.layout_map.to_yaml(), encoding="utf-8")
        (Path(folder) / "drawn_model.py").write_text(case.program, encoding="utf-8")
        arguments = ["plan", "drawn_model:make_model", "--rules", str(rules), "--library", case.library]
        arguments += ["--device-memory", _in_kib(limit), "--html", str(page), "--json", str(kept)]
        if case.model.planned_with:
            arrays = map(np.asarray, leaves(case.batch[0]))
            arguments += ["--inputs", *(f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in arrays)]
        command = _run_command(folder, arguments)
        if command.returncode != (0 if expected.passes else 1):
            yield f"exit code {command.returncode}, and the verdict is {expected.headline!r}: {command.stderr}"
            return
        expected_of_half = trial.plan.judged(device_memory=limit // 4 * 2).verdict
        of_file = _run_command(folder, ["plan", str(kept), "--device-memory", _in_kib(limit // 4 * 2)])
        if of_file.returncode != (0 if expected_of_half.passes else 1):
            yield f"exit code {of_file.returncode} of the plan's file: {expected_of_half.headline!r}"
        verdicts = {
            "terminal": command.stdout.partition("\n")[0],
            "page": page.read_text(encoding="utf-8"),
            "JSON": json.loads(kept.read_text(encoding="utf-8"))["verdict"]["says"],
        }
    for where, text in verdicts.items():
        if expected.headline not in text:
            yield f"{where}: {text[:300]!r} is not the verdict {expected.headline!r}"


def _in_kib(num_bytes: int) -> str:
    return f"{num_bytes / 1024:.9f}KiB"


def _run_command(folder: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the command line in a folder, as one process of no group."""
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
