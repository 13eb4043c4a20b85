"""`layoutmap checkpoint describe | verify | relayout | export`: what was saved, without a model and a framework."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from layoutmap.checkpoint.export import MOST_BYTES, export_source
from layoutmap.checkpoint.relayout import write_relayout
from layoutmap.checkpoint.remote import storage_of
from layoutmap.checkpoint.renamed import under_their_names
from layoutmap.checkpoint.renaming import read_names, shipped_names
from layoutmap.checkpoint.specs import variable_specs
from layoutmap.cli.output import PROBLEMS, WELL, check_targets, say, write_all
from layoutmap.cli.plans import rules_of_file
from layoutmap.cli.sizes import size_in_bytes
from layoutmap.core.errors import CheckpointError, LayoutMapError
from layoutmap.core.mesh import Mesh
from layoutmap.core.text_table import size
from layoutmap.core.variables import VariableSpec
from layoutmap.plan.problems import group_problems
from layoutmap.scope.describing import Checkpoint, describe
from layoutmap.scope.plan import Plan, make_plan
from layoutmap.scope.progress import Progress

_EXAMPLES = """examples:
  layoutmap checkpoint describe runs/llama
  layoutmap checkpoint describe runs/llama --step 1000 --match "blocks\\.0\\." --json - | jq .variables
  layoutmap checkpoint describe runs/llama --html checkpoint.html
  layoutmap checkpoint verify runs/llama --all     in a job at night: exit code 1 if a byte has changed
  layoutmap checkpoint relayout runs/llama serving/llama --rules rules.yaml --mesh batch=1,model=8
  layoutmap checkpoint export runs/llama llama-hf --names llama --max-shard 5GiB     for transformers and others
  layoutmap checkpoint describe llama-hf     files of Hugging Face, Keras, orbax and DCP are described, too

exit codes:
  0  the output was printed, and all is well
  1  something is damaged; stdout says which variables of which files
  2  something went wrong; stderr says what
"""


def add_checkpoint_commands(parser: argparse.ArgumentParser) -> None:
    """What can be done with a checkpoint."""
    parser.epilog = _EXAMPLES
    commands = parser.add_subparsers(required=True, metavar="describe | verify | relayout | export")

    def command(name: str, run: Callable[[Any], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=text, description=text, epilog=_EXAMPLES, formatter_class=parser.formatter_class
        )
        made.set_defaults(run_on_checkpoint=run)
        made.add_argument(
            "directory", metavar="DIRECTORY", help="what the checkpoint was saved to, or files of others"
        )
        made.add_argument("--step", metavar="N", type=int, help="the step; default: the last one")
        return made

    shown = command(
        "describe",
        _describe,
        "Print what is in a checkpoint: its facts and its variables, the largest first.",
    )
    shown.add_argument(
        "--match", metavar="REGEX", help="only variables in whose paths the regex is found; bytes are theirs"
    )
    shown.add_argument("--json", metavar="FILE", help='also write it for programs; "-": to stdout')
    shown.add_argument("--html", metavar="FILE", help='also write it as a page for a browser; "-": to stdout')
    verify = command(
        "verify", _verify, "Read all, and name each file and chunk that is not as it was written."
    )
    verify.add_argument(
        "--html",
        metavar="FILE",
        help='also write a page with what is in it and what is damaged; "-": to stdout',
    )
    verify.add_argument("--all", action="store_true", help="verify every step")
    moved = command(
        "relayout",
        _relayout,
        "Write a step once more, in the layouts of other rules, so that who loads it there reads whole chunks.",
    )
    moved.add_argument("new", metavar="NEW", help="the directory of the new checkpoint; it may exist")
    moved.add_argument(
        "--rules", metavar="FILE", required=True, help="the rules file, as LayoutMap.to_yaml writes it"
    )
    moved.add_argument(
        "--mesh", metavar="DIMS", help='the mesh, as in "batch=2,model=4"; default: that of the rules file'
    )
    out = command(
        "export",
        _export,
        "Write the weights as Hugging Face's libraries read them: safetensors and an index.",
    )
    out.add_argument("new", metavar="NEW", help="the folder to write; if it is there, it is empty")
    out.add_argument(
        "--names",
        metavar="FILE|TABLE",
        help="what the variables are called there: a YAML file, or one of "
        f"{', '.join(shipped_names())}; default: as here",
    )
    out.add_argument(
        "--max-shard",
        metavar="SIZE",
        type=size_in_bytes,
        default=MOST_BYTES,
        help='how large a file becomes, as in "2GB"; default: 5GiB',
    )


def _describe(options: Any) -> int:
    files = check_targets({"--json": options.json, "--html": options.html})
    found = describe(options.directory, step=options.step)
    if options.match is not None:
        try:
            found = Checkpoint(found.source, options.match)
        except re.error as error:
            raise LayoutMapError(
                f"--match {options.match!r} is no regex",
                why=str(error),
                fix=r"write it as in --match '\.kernel$'",
            ) from error
    texts = {"--json": found.to_json, "--html": found.to_html}
    out = write_all({path: texts[option]() for option, path in files.items()})
    say(str(found), out)
    return WELL


def _verify(options: Any) -> int:
    for option, value in (("--step", options.step), ("--html", options.html)):
        if options.all and value is not None:
            raise LayoutMapError(
                f"--all and {option} {value}",
                why=f"{option} is for one step",
                fix=f"leave out --all or {option}",
            )
    files = check_targets({"--html": options.html})
    there = storage_of(options.directory).steps()
    wanted = (
        there
        if options.all and there
        else [options.step if options.step is not None or not there else there[-1]]
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


def _relayout(options: Any) -> int:
    source = describe(options.directory, step=options.step)
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


def _export(options: Any) -> int:
    source = describe(options.directory, step=options.step).source
    if options.names is not None:
        source = under_their_names(source, read_names(options.names))
    variables = {each.path: each for each in variable_specs(source.variables.values())}
    with Progress(variables, verb="written") as shown:
        folder = export_source(source, options.new, max_shard_bytes=options.max_shard, progress=shown)
    say(repr(describe(folder)), sys.stdout)
    return WELL


def _specs(plan: Plan) -> dict[str, VariableSpec]:
    return {path: a.variable for path, a in plan.items()}
