"""Run the subcommands of `layoutmap checkpoint`, without a model and without a framework."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from layoutmap.checkpoint.export import export_source
from layoutmap.checkpoint.foreign.torch_file import TorchFileSource
from layoutmap.checkpoint.lineage import StepHistory, find_last_step_number
from layoutmap.checkpoint.name_tables import read_name_table
from layoutmap.checkpoint.relayout import write_step_with_layouts
from layoutmap.checkpoint.remote import open_storage
from layoutmap.checkpoint.renamed_source import make_renamed_source
from layoutmap.checkpoint.specs import make_variable_specs
from layoutmap.cli.output import PROBLEMS, SUCCESS, get_line_width, get_output_paths, print_text, write_files
from layoutmap.cli.plans import load_layout_map_file
from layoutmap.core.errors import CheckpointError, LayoutMapError, join_names
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.text_table import format_bytes
from layoutmap.core.variables import VariableSpec
from layoutmap.plan.problems import merge_problems
from layoutmap.report.history import format_step_history
from layoutmap.saving.describe import Checkpoint, describe
from layoutmap.scope.plan import Plan, make_plan
from layoutmap.scope.progress import Progress


def run_describe_command(options: Any) -> int:
    """Print the content of a checkpoint, write the requested JSON file and HTML page, and return the exit code."""
    files = get_output_paths({"--json": options.json, "--html": options.html})
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
    out = write_files({path: texts[option]() for option, path in files.items()})
    width = get_line_width(out, options.wide)
    print_text(found.to_text(width), out, width)
    return SUCCESS


def run_verify_command(options: Any) -> int:
    """Read one step of a checkpoint or all steps completely, print all damage, and return the exit code."""
    for option, value in (("--step", options.step), ("--html", options.html)):
        if options.all and value is not None:
            raise LayoutMapError(
                f"--all and {option} {value} contradict each other",
                why=f"{option} is for one step",
                fix=f"leave out --all or {option}",
            )
    files = get_output_paths({"--html": options.html})
    storage = open_storage(options.directory)
    steps = storage.list_steps()
    wanted = (
        steps
        if options.all and steps
        else [find_last_step_number(storage) if options.step is None else options.step]
    )
    return max(
        [_verify_step(options.directory, step, step in steps, list(files.values())) for step in wanted]
    )


def _verify_step(directory: str, step: int | None, exists: bool, html_paths: Sequence[str]) -> int:
    try:
        found = describe(directory, step=step)
    except CheckpointError as error:
        if not exists:
            raise
        # The manifest is damaged, so nothing else of the step can be checked.
        print_text(f"{error}\n\nstep {step}: 1 problem", sys.stdout)
        return PROBLEMS
    with Progress(_get_variables_by_path(found.plan), verb="verified") as shown:
        problems = found.verify(shown)
    out = write_files({path: found.to_html(problems) for path in html_paths})
    for problem in problems:
        print_text(f"{problem}\n", out)
    name = found.where if found.step is None else f"step {found.step}"
    count = f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"
    well = "all as they were saved" if found.has_checksums else "all are there; their files have no checksums"
    all_well = f"{len(found)} variables, {format_bytes(found.global_bytes)}, {well}"
    print_text(f"{name}: {count if problems else all_well}", out)
    return PROBLEMS if problems else SUCCESS


def run_history_command(options: Any) -> int:
    """Print the steps of a checkpoint as a tree, each below its parent, and return the exit code."""
    storage = open_storage(options.directory)
    found = StepHistory(storage)
    if not (steps := found.read_lineages()):
        raise CheckpointError(
            f"{storage.where}: there is no checkpoint",
            facts={"damaged": join_names(list(map(str, found.damaged)))},
            why="no step-<number> folder has a readable manifest, which names the step's parent",
            fix="name the directory of a checkpoint",
        )
    print_text(format_step_history(storage.where, steps.values()), sys.stdout)
    for step in found.damaged:
        print_text(
            f"step {step}: its manifest cannot be read; layoutmap checkpoint verify says why", sys.stdout
        )
    return PROBLEMS if found.damaged else SUCCESS


def run_relayout_command(options: Any) -> int:
    """Write a copy of a checkpoint step in the layouts of a rules file, and return the exit code."""
    source = describe(options.directory, step=options.step)
    layout_map = load_layout_map_file(options.rules, Mesh(None, options.mesh) if options.mesh else None)
    plan = make_plan(make_variable_specs(source.values()), layout_map).check()
    for problem in merge_problems([p for p in plan.warnings if p.kind != "no rule"]):
        print_text(f"layoutmap: warning: {problem.what}", sys.stderr)
    layouts = {path: a.layout for path, a in plan.items()}
    with Progress(_get_variables_by_path(plan), verb="written") as shown:
        folder = write_step_with_layouts(
            source.source, open_storage(options.new), layouts, plan.mesh, plan.fingerprint, shown
        )
    print_text(f"{folder}: {plan!r}", sys.stdout)
    return SUCCESS


def run_export_command(options: Any) -> int:
    """Write the weights of a checkpoint in another library's format, and return the exit code."""
    source = describe(options.directory, step=options.step).source
    if options.names is not None:
        source = make_renamed_source(source, read_name_table(options.names))
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


def run_convert_command(options: Any) -> int:
    """Write the tensors of a `torch.save` file as step 0 of a checkpoint, and return the exit code."""
    source = TorchFileSource(options.directory, options.part)
    mesh = Mesh(None, "device=1")
    layouts = {path: Layout.replicated(mesh, len(each.shape)) for path, each in source.variables.items()}
    variables = {each.path: each for each in make_variable_specs(source.variables.values())}
    with Progress(variables, verb="written") as shown:
        folder = write_step_with_layouts(source, open_storage(options.new), layouts, mesh, "", shown)
    print_text(repr(describe(folder)), sys.stdout)
    return SUCCESS


def _get_variables_by_path(plan: Plan) -> dict[str, VariableSpec]:
    return {path: a.variable for path, a in plan.items()}
