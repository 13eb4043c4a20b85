"""Write a first rules file for a model: `layoutmap suggest`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from layoutmap.adapters import ADAPTERS
from layoutmap.cli.output import SUCCESS, get_output_paths, print_text, write_files
from layoutmap.cli.plans import add_partial_option, plan_model, require_complete_plan
from layoutmap.core.specs import format_batch_dim, parse_batch_dim
from layoutmap.plan.lint import list_dims_with_batch_names
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.suggest import suggest_layout_map

EXAMPLES = r"""examples:
  layoutmap suggest my_models:make_llama --mesh batch=2,model=4
  layoutmap suggest my_models:make_llama --mesh batch=2,model=4 --inputs "int32[8,128]" -o rules.yaml
  layoutmap plan my_models:make_llama --rules rules.yaml --inputs "int32[8,128]"     what these rules give
  layoutmap search my_models:make_llama --start rules.yaml --inputs "int32[8,128]" --on h100:8     a faster map

A model of a known family gets the rules of its preset. Other rules follow from what layers do with their weights. Each
rule has its reason above it as a comment. Nothing is compiled, and no device is needed.
"""


def add_suggest_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `layoutmap suggest` to a parser."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "model", metavar="MODULE:FUNCTION", help="a function that makes a model, or a published one"
    )
    parser.add_argument("--mesh", metavar="DIMS", required=True, help='the mesh, as in "batch=2,model=4"')
    parser.add_argument(
        "--inputs",
        metavar="SPEC",
        nargs="+",
        help="the model's inputs, for a model that makes its weights at its first call: "
        '"float32[8,128]", or "name=int32[8,16]"',
    )
    parser.add_argument(
        "--batch-dim",
        type=parse_batch_dim,
        metavar="DIM",
        help="the mesh dim over which the batch is sharded (several: replica,fsdp); default: those with a usual name",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help='write the rules to a file; default, and "-": to stdout'
    )
    add_partial_option(parser)
    parser.add_argument(
        "--backend", choices=("jax", "tensorflow", "torch"), help="the backend that Keras runs on"
    )
    parser.add_argument("--library", choices=tuple(ADAPTERS), help="the library of the model")
    # `plan_model` needs these options. They do not change the variables, so this command only sets defaults.
    parser.set_defaults(
        on=None, dtype=None, optimizer=None, verify=None, remat=None, fuse_attention=False, wide=True
    )


def run_suggest_command(options: Any) -> int:
    """Write the suggested rules to the output file or to stdout, and return the exit code.

    Raises:
        LayoutMapError: The model cannot be planned, or its plan is incomplete.
    """
    files = get_output_paths({"--output": options.output})
    replicated = LayoutMap(options.mesh)
    made = require_complete_plan(plan_model(options.model, options, replicated), options.model, options)
    found = suggest_layout_map(made, options.batch_dim)
    dims = options.batch_dim or list_dims_with_batch_names(made.mesh)
    batches = f"sharded over {format_batch_dim(dims)}" if dims else "replicated"
    text = f"# Suggested for {options.model}, if batches are {batches}.\n{found.to_yaml()}"
    if files:
        write_files(dict.fromkeys(files.values(), text))
    else:
        print_text(text.rstrip("\n"), sys.stdout)
    return SUCCESS
