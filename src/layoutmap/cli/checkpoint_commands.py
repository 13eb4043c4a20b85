"""Run the subcommands of `layoutmap checkpoint`, without a model and without a framework."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from layoutmap.checkpoint.export import export_source
from layoutmap.checkpoint.foreign.torch_file import TorchFile
from layoutmap.checkpoint.lineage import History, find_last_step
from layoutmap.checkpoint.name_tables import read_names
from layoutmap.checkpoint.relayout import write_relayout
from layoutmap.checkpoint.remote import open_storage
from layoutmap.checkpoint.renamed_source import rename_source
from layoutmap.checkpoint.specs import make_variable_specs
from layoutmap.cli.output import PROBLEMS, SUCCESS, check_targets, get_width, print_text, write_all
from layoutmap.cli.plans import read_rules
from layoutmap.core.errors import CheckpointError, LayoutMapError, join_names
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.text_table import format_bytes
from layoutmap.core.variables import VariableSpec
from layoutmap.plan.problems import group_problems
from layoutmap.report.history import format_history
from layoutmap.saving.describe import Checkpoint, describe
from layoutmap.scope.plan import Plan, make_plan
from layoutmap.scope.progress import Progress


def run_describe(options: Any) -> int:
    """Print the content of a checkpoint, and write it as JSON and as a page."""
    files = check_targets({"--json": options.json, "--html": options.html})
    found = describe(options.directory, step=options.step)
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
    width = get_width(out, options.wide)
    print_text(found.to_text(width), out, width)
    return SUCCESS


def run_verify(options: Any) -> int:
    """Read a checkpoint completely, and print all damage."""
    for option, value in (("--step", options.step), ("--html", options.html)):
        if options.all and value is not None:
            raise LayoutMapError(
                f"--all and {option} {value}",
                why=f"{option} is for one step",
                fix=f"leave out --all or {option}",
            )
    files = check_targets({"--html": options.html})
    storage = open_storage(options.directory)
    there = storage.steps()
    wanted = (
        there
        if options.all and there
        else [find_last_step(storage) if options.step is None else options.step]
    )
    return max(
        [_verify_step(options.directory, step, step in there, list(files.values())) for step in wanted]
    )


def _verify_step(directory: str, step: int | None, is_there: bool, pages: Sequence[str]) -> int:
    try:
        found = describe(directory, step=step)
    except CheckpointError as error:
        if not is_there:
            raise
        # a damaged manifest is the only problem that can be reported
        print_text(f"{error}\n\nstep {step}: 1 problem", sys.stdout)
        return PROBLEMS
    with Progress(_collect_specs(found.plan), verb="verified") as shown:
        problems = found.verify(shown)
    out = write_all({path: found.to_html(problems) for path in pages})
    for problem in problems:
        print_text(f"{problem}\n", out)
    name = found.where if found.step is None else f"step {found.step}"
    count = f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"
    well = "all as they were saved" if found.has_checksums else "all are there; their files have no checksums"
    all_well = f"{len(found)} variables, {format_bytes(found.global_bytes)}, {well}"
    print_text(f"{name}: {count if problems else all_well}", out)
    return PROBLEMS if problems else SUCCESS


def run_history(options: Any) -> int:
    """Print the parent of each step."""
    storage = open_storage(options.directory)
    found = History(storage)
    if not (steps := found.steps()):
        raise CheckpointError(
            f"{storage.where}: there is no checkpoint",
            facts={"damaged": join_names(list(map(str, found.damaged)))},
            why="a step is a folder step-<number>, whose manifest says which step it came from",
            fix="name the directory of a checkpoint",
        )
    print_text(format_history(storage.where, steps.values()), sys.stdout)
    for step in found.damaged:
        print_text(
            f"step {step}: its manifest cannot be read; layoutmap checkpoint verify says why", sys.stdout
        )
    return PROBLEMS if found.damaged else SUCCESS


def run_relayout(options: Any) -> int:
    """Rewrite a step for other layouts."""
    source = describe(options.directory, step=options.step)
    layout_map = read_rules(options.rules, Mesh(None, options.mesh) if options.mesh else None)
    plan = make_plan(make_variable_specs(source.values()), layout_map).check()
    for problem in group_problems([p for p in plan.warnings if p.kind != "no rule"]):
        print_text(f"layoutmap: warning: {problem.what}", sys.stderr)
    layouts = {path: a.layout for path, a in plan.items()}
    with Progress(_collect_specs(plan), verb="written") as shown:
        folder = write_relayout(
            source.source, open_storage(options.new), layouts, plan.mesh, plan.fingerprint, shown
        )
    print_text(f"{folder}: {plan!r}", sys.stdout)
    return SUCCESS


def run_export(options: Any) -> int:
    """Write the weights in another library's format."""
    source = describe(options.directory, step=options.step).source
    if options.names is not None:
        source = rename_source(source, read_names(options.names))
    variables = {each.path: each for each in make_variable_specs(source.variables.values())}
    with Progress(variables, verb="written") as shown:
        folder = export_source(
            source, options.new, format=options.format, max_shard_bytes=options.max_shard, progress=shown
        )
    try:
        text = repr(describe(folder))
    except CheckpointError:  # the format can be written but not read
        text = f"{folder}: written as {options.format}"
    print_text(text, sys.stdout)
    return SUCCESS


def run_convert(options: Any) -> int:
    """Write a `torch.save` file as a step of a checkpoint."""
    source = TorchFile(options.directory, options.part)
    mesh = Mesh(None, "device=1")
    layouts = {path: Layout.replicated(mesh, len(each.shape)) for path, each in source.variables.items()}
    variables = {each.path: each for each in make_variable_specs(source.variables.values())}
    with Progress(variables, verb="written") as shown:
        folder = write_relayout(source, open_storage(options.new), layouts, mesh, "", shown)
    print_text(repr(describe(folder)), sys.stdout)
    return SUCCESS


def _collect_specs(plan: Plan) -> dict[str, VariableSpec]:
    return {path: a.variable for path, a in plan.items()}
