"""Plan an existing model that a user's function builds and shards: `layoutmap inspect` and `layoutmap guard`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from layoutmap.cli.output import PROBLEMS, SUCCESS, add_wide_option, get_width, print_text
from layoutmap.cli.plans import read_plan
from layoutmap.cli.users_code import import_function, parse_function_name, users_code
from layoutmap.core.errors import LayoutMapError, format_count, join_names
from layoutmap.core.specs import parse_batch_dim
from layoutmap.engines.launchers import detect_launcher
from layoutmap.plan.completeness import find_missing_weights
from layoutmap.plan.problems import group_problems
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


def get_process_number() -> int:
    """Return this process's number in its torchrun or SLURM job, or 0 without one."""
    started_by = detect_launcher()
    return 0 if started_by is None else started_by.process


def inspect_model(options: Any) -> Plan:
    """Return the plan of the model that a function builds, compared across processes if there are several."""
    # imported here, so that other commands need not load numpy
    from layoutmap.inspecting.inspect import inspect

    name, started_by = options.model, detect_launcher()
    if options.backend:
        os.environ["KERAS_BACKEND"] = options.backend
    if not get_process_number():
        print_text(f"layoutmap: making {name}", sys.stderr)
    with users_code(name, choose_backend="add --backend {}"):
        model = import_function(*parse_function_name(name))()
        across = options.across or (started_by is not None and started_by.num_processes > 1)
        plan = inspect(model, batch_dim=options.batch_dim, across=across)
    if (missing := find_missing_weights(plan)) is not None:
        raise LayoutMapError(
            f"{name}: {missing.what}",
            why="a model creates its weights in its first call, and has none to compare before",
            fix="call it in the function, as in model(inputs), before you return it",
        )
    return plan


def report_difference(plan: Plan) -> int:
    """Print one line if this process's layouts differ from process 0's, and return the exit code."""
    own = f"process {get_process_number()}"
    facts = [(p.subject, dict(p.facts)) for p in plan.problems if p.kind == "differs"]
    other = [path for path, each in facts if each.get(own) != each.get("process 0")]
    if other:
        print_text(
            f"{own}: holds {format_count(len(other), 'variable')} in other ways than process 0: {join_names(other)}",
            sys.stdout,
        )
    return PROBLEMS if plan.errors else SUCCESS


def run_guard_command(options: Any) -> int:
    """Compare a model with its stored plan. Return the exit code, 1 if anything differs."""
    kept = read_plan(options.golden)
    plan = inspect_model(options)
    difference = kept.diff(plan)
    if get_process_number():
        return PROBLEMS if difference or plan.errors else SUCCESS
    width = get_width(sys.stdout, options.wide)
    print_text(difference.to_text(width), sys.stdout, width)
    for problem in group_problems(plan.errors):
        print_text(f"\nerror: {problem}", sys.stdout, width)
    return PROBLEMS if difference or plan.errors else SUCCESS
