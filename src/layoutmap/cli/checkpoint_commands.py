"""The subcommands of `layoutmap checkpoint`: without a model, and without a framework."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from layoutmap.checkpoint.export import export_source
from layoutmap.checkpoint.foreign.torch_file import TorchFile
from layoutmap.checkpoint.lineage import History, last_step
from layoutmap.checkpoint.name_tables import read_names
from layoutmap.checkpoint.relayout import write_relayout
from layoutmap.checkpoint.remote import storage_of
from layoutmap.checkpoint.renamed_source import under_their_names
from layoutmap.checkpoint.specs import variable_specs
from layoutmap.cli.output import PROBLEMS, WELL, check_targets, columns_of, say, write_all
from layoutmap.cli.plans import rules_of_file
from layoutmap.core.errors import CheckpointError, LayoutMapError, listed
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.text_table import size
from layoutmap.core.variables import VariableSpec
from layoutmap.plan.problems import group_problems
from layoutmap.report.history import history_text
from layoutmap.saving.describe import Checkpoint
from layoutmap.saving.describe import describe as described
from layoutmap.scope.plan import Plan, make_plan
from layoutmap.scope.progress import Progress


def describe(options: Any) -> int:
    """Print what is in a checkpoint, and write it as JSON and as a page."""
    files = check_targets({"--json": options.json, "--html": options.html})
    found = described(options.directory, step=options.step)
    if options.match is not None:
        try:
            found = Checkpoint(found.source, options.match)
        except re.error as error:
            raise LayoutMapError(
                f"--match {options.match!r} is not a regex",
                why=str(error),
                fix=r"write it as in --match '\.kernel$'",
            ) from error
    texts = {"--json": found.to_json, "--html": found.to_html}
    out = write_all({path: texts[option]() for option, path in files.items()})
    width = columns_of(out, options.wide)
    say(found.to_text(width), out, width)
    return WELL


def verify(options: Any) -> int:
    """Read all, and print what is not as it was written."""
    for option, value in (("--step", options.step), ("--html", options.html)):
        if options.all and value is not None:
            raise LayoutMapError(
                f"--all and {option} {value}",
                why=f"{option} is for one step",
                fix=f"leave out --all or {option}",
            )
    files = check_targets({"--html": options.html})
    storage = storage_of(options.directory)
    there = storage.steps()
    wanted = (
        there if options.all and there else [last_step(storage) if options.step is None else options.step]
    )
    return max(
        [_verify_step(options.directory, step, step in there, list(files.values())) for step in wanted]
    )


def _verify_step(directory: str, step: int | None, is_there: bool, pages: Sequence[str]) -> int:
    try:
        found = described(directory, step=step)
    except CheckpointError as error:
        if not is_there:
            raise
        say(f"{error}\n\nstep {step}: 1 problem", sys.stdout)  # its manifest is damaged
        return PROBLEMS
    with Progress(_specs(found.plan), verb="verified") as shown:
        problems = found.verify(shown)
    out = write_all({path: found.to_html(problems) for path in pages})
    for problem in problems:
        say(f"{problem}\n", out)
    name = found.where if found.step is None else f"step {found.step}"
    count = f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"
    well = "all as they were saved" if found.has_checksums else "all are there; their files have no checksums"
    all_well = f"{len(found)} variables, {size(found.global_bytes)}, {well}"
    say(f"{name}: {count if problems else all_well}", out)
    return PROBLEMS if problems else WELL


def history(options: Any) -> int:
    """Print which step came from which."""
    storage = storage_of(options.directory)
    found = History(storage)
    if not (steps := found.steps()):
        raise CheckpointError(
            f"{storage.where}: there is no checkpoint",
            facts={"damaged": listed(list(map(str, found.damaged)))},
            why="a step is a folder step-<number>, whose manifest says which step it came from",
            fix="name the directory that was saved to",
        )
    say(history_text(storage.where, steps.values()), sys.stdout)
    for step in found.damaged:
        say(f"step {step}: its manifest cannot be read; layoutmap checkpoint verify says why", sys.stdout)
    return PROBLEMS if found.damaged else WELL


def relayout(options: Any) -> int:
    """Write a step once more, in other layouts."""
    source = described(options.directory, step=options.step)
    layout_map = rules_of_file(options.rules, Mesh(None, options.mesh) if options.mesh else None)
    plan = make_plan(variable_specs(source.values()), layout_map).check()
    for problem in group_problems([p for p in plan.warnings if p.kind != "no rule"]):
        say(f"layoutmap: warning: {problem.what}", sys.stderr)
    layouts = {path: a.layout for path, a in plan.items()}
    with Progress(_specs(plan), verb="written") as shown:
        folder = write_relayout(
            source.source, storage_of(options.new), layouts, plan.mesh, plan.fingerprint, shown
        )
    say(f"{folder}: {plan!r}", sys.stdout)
    return WELL


def export(options: Any) -> int:
    """Write the weights in a format of other libraries."""
    source = described(options.directory, step=options.step).source
    if options.names is not None:
        source = under_their_names(source, read_names(options.names))
    variables = {each.path: each for each in variable_specs(source.variables.values())}
    with Progress(variables, verb="written") as shown:
        folder = export_source(
            source, options.new, format=options.format, max_shard_bytes=options.max_shard, progress=shown
        )
    try:
        text = repr(described(folder))
    except CheckpointError:  # a format that is written and not read
        text = f"{folder}: written as {options.format}"
    say(text, sys.stdout)
    return WELL


def convert(options: Any) -> int:
    """Write what `torch.save` wrote as a step of a checkpoint."""
    source = TorchFile(options.directory, options.part)
    mesh = Mesh(None, "device=1")
    layouts = {path: Layout.replicated(mesh, len(each.shape)) for path, each in source.variables.items()}
    variables = {each.path: each for each in variable_specs(source.variables.values())}
    with Progress(variables, verb="written") as shown:
        folder = write_relayout(source, storage_of(options.new), layouts, mesh, "", shown)
    say(repr(described(folder)), sys.stdout)
    return WELL


def _specs(plan: Plan) -> dict[str, VariableSpec]:
    return {path: a.variable for path, a in plan.items()}
