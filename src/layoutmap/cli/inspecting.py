"""Plan an existing model that a user's function builds and shards: `layoutmap inspect` and `layoutmap guard`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from layoutmap.cli.output import PROBLEMS, SUCCESS, add_wide_option, get_line_width, print_text
from layoutmap.cli.plans import read_plan_file
from layoutmap.cli.users_code import import_function, isolate_users_code, parse_function_name
from layoutmap.core.errors import LayoutMapError, format_count, join_names
from layoutmap.core.specs import parse_batch_dim
from layoutmap.engines.launchers import detect_launcher
from layoutmap.plan.completeness import find_unbuilt_layers_problem
from layoutmap.plan.problems import merge_problems
from layoutmap.scope.plan import Plan


def add_inspect_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for inspecting an existing model."""
    parser.add_argument(
        "--across",
        action="store_true",
        help="compare the values of replicas on all devices; always done where torchrun or SLURM has started several "
        "processes",
    )
    parser.add_argument(
        "--batch-dim",
        type=parse_batch_dim,
        metavar="DIM",
        help="the mesh dim over which batches are sharded (several: replica,fsdp)",
    )
    parser.add_argument(
        "--backend", choices=("jax", "tensorflow", "torch"), help="the backend that Keras runs on"
    )
    add_wide_option(parser)


def get_process_index() -> int:
    """Return the rank of this process in its torchrun or SLURM job, or 0 outside of a job."""
    launcher = detect_launcher()
    return 0 if launcher is None else launcher.process


def inspect_model(options: Any) -> Plan:
    """Return the plan of the model that a user's function creates. In a job, processes also compare their values."""
    # imported here, so that other commands need not load numpy
    from layoutmap.inspecting.inspect import inspect

    name, launcher = options.model, detect_launcher()
    if options.backend:
        os.environ["KERAS_BACKEND"] = options.backend
    if not get_process_index():
        print_text(f"layoutmap: making {name}", sys.stderr)
    with isolate_users_code(name, backend_fix="add --backend {}"):
        model = import_function(*parse_function_name(name))()
        across = options.across or (launcher is not None and launcher.num_processes > 1)
        plan = inspect(model, batch_dim=options.batch_dim, across=across)
    if (missing := find_unbuilt_layers_problem(plan)) is not None:
        raise LayoutMapError(
            f"{name}: {missing.what}",
            why="a model creates its weights in its first call, and has none before that",
            fix="call the model in the function, as in model(inputs), before you return it",
        )
    return plan


def print_difference_from_first_process(plan: Plan) -> int:
    """Print one line if variables differ between this process and process 0, and return the exit code."""
    own_label = f"process {get_process_index()}"
    facts = [(p.subject, dict(p.facts)) for p in plan.problems if p.kind == "differs"]
    different_paths = [path for path, each in facts if each.get(own_label) != each.get("process 0")]
    if different_paths:
        print_text(
            f"{own_label}: {format_count(len(different_paths), 'variable')} differ from those of process 0: "
            f"{join_names(different_paths)}",
            sys.stdout,
        )
    return PROBLEMS if plan.errors else SUCCESS


def run_guard_command(options: Any) -> int:
    """Compare a model with its stored plan, print the differences, and return the exit code: 1 if anything differs."""
    golden_plan = read_plan_file(options.golden)
    plan = inspect_model(options)
    difference = golden_plan.diff(plan)
    if get_process_index():
        return PROBLEMS if difference or plan.errors else SUCCESS
    width = get_line_width(sys.stdout, options.wide)
    print_text(difference.to_text(width), sys.stdout, width)
    for problem in merge_problems(plan.errors):
        print_text(f"\nerror: {problem}", sys.stdout, width)
    return PROBLEMS if difference or plan.errors else SUCCESS
