"""Search for the layout map with the fastest training step on a machine: `layoutmap search`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from layoutmap.adapters import ADAPTERS
from layoutmap.cli import interrupts
from layoutmap.cli.models import find_published_model
from layoutmap.cli.output import (
    SUCCESS,
    add_wide_option,
    get_line_width,
    get_output_paths,
    print_text,
    write_files,
)
from layoutmap.cli.plans import (
    add_attention_option,
    add_partial_option,
    check_library_can_be_found,
    load_layout_map_file,
    load_model_function,
    parse_inputs,
    require_complete_plan,
)
from layoutmap.cli.sizes import parse_size
from layoutmap.cli.users_code import isolate_users_code, parse_function_name
from layoutmap.core.errors import LayoutMapError
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import parse_batch_dim


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `layoutmap search` to a parser."""
    parser.add_argument(
        "model", metavar="MODULE:FUNCTION", help="a function that makes a model, or a published one"
    )
    parser.add_argument("--on", metavar="MACHINE", required=True, help='the machine, as in "h100:64"')
    parser.add_argument(
        "--inputs",
        metavar="SPEC",
        nargs="+",
        required=True,
        help='what the model is called with in a step, of the global batch: "int32[64,4096]", or "name=int32[64,4096]"',
    )
    parser.add_argument("--optimizer", metavar="NAME", help="a Keras optimizer, as in adamw")
    parser.add_argument(
        "--dtype", metavar="POLICY", help="the Keras dtype policy of a published model, as in bfloat16"
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        type=parse_size,
        help='the memory of a device that may be used, as in "80GB"; default: all that the machine has',
    )
    parser.add_argument(
        "--mesh",
        metavar="DIMS",
        help="the mesh; default: that of --start, or else its shape is searched as well",
    )
    parser.add_argument(
        "--batch-dim",
        type=parse_batch_dim,
        metavar="DIM",
        help="the dim of --mesh over which the batch is sharded (several: replica,fsdp)",
    )
    parser.add_argument("--start", metavar="FILE", help="a rules file to start from")
    parser.add_argument(
        "--keep", metavar="PATTERN", nargs="+", default=[], help="rules of --start that stay as they are"
    )
    parser.add_argument("--tries", metavar="N", type=int, default=32, help="how many maps are tried at most")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="decides the order in which layouts are tried"
    )
    parser.add_argument(
        "--cache", metavar="FILE", help="a file that stores costs, so that a second search is quick"
    )
    parser.add_argument(
        "--verify",
        metavar="DEVICE",
        nargs="?",
        const=True,
        help="have XLA compile the step with the best maps for such devices, which need not be present, or for DEVICE",
    )
    parser.add_argument(
        "--no-verify",
        dest="verify",
        action="store_const",
        const=False,
        help="choose by estimates alone, although XLA's compiler for those devices is installed",
    )
    parser.add_argument(
        "--remat",
        metavar="LAYERS",
        help="recompute the activations inside of these layers in the backward pass (rematerialization): a regex for "
        'their paths, or "blocks", the repeated blocks of the model; "no": of none; default: of blocks, if it helps',
    )
    add_attention_option(parser)
    parser.add_argument(
        "--write", metavar="FILE", help='also write the rules to a file, for --rules; "-": to stdout'
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write the plan with its cost to a file, for diff"
    )
    parser.add_argument("--html", metavar="FILE", help="also write it as a page for a browser")
    parser.add_argument("--library", choices=tuple(ADAPTERS), help="the library of the model")
    add_partial_option(parser)
    add_wide_option(parser)


def run_search_command(options: Any) -> int:
    """Search for a layout map, print it and the built-in maps, write its files, and return the exit code."""
    # imported here, so that other commands need not load JAX
    from layoutmap.cost.layout_map_search import search

    files = get_output_paths({"--write": options.write, "--json": options.json, "--html": options.html})
    inputs = parse_inputs(options.inputs)
    mesh = Mesh(None, options.mesh) if options.mesh else None
    start = load_layout_map_file(options.start, mesh) if options.start else None
    if options.dtype and not find_published_model(options.model):
        raise LayoutMapError(
            f"--dtype {options.dtype} has no effect",
            why="it is used only with a published model",
            fix="leave --dtype out, and create the model with that dtype",
        )
    parse_function_name(options.model)  # raises for an invalid name, before anything is imported
    os.environ.setdefault("KERAS_BACKEND", "jax")
    with isolate_users_code(options.model), interrupts.allow_interrupts():
        make_model, library = load_model_function(options.model, options)
        if library is None:
            check_library_can_be_found(make_model)
        found = search(
            make_model,
            inputs,
            options.on,
            optimizer=options.optimizer,
            memory=options.memory,
            mesh=mesh,
            batch_dim=options.batch_dim,
            start=start,
            keep=options.keep,
            tries=options.tries,
            seed=options.seed,
            cache=options.cache,
            verify=options.verify,
            remat=False if options.remat == "no" else options.remat,
            fuse_attention=options.fuse_attention,
            library=library,
        )
    require_complete_plan(found.plan, options.model, options)
    made = {
        "--write": found.to_yaml,
        "--json": found.plan.to_json,
        "--html": lambda: found.plan.to_html(found.batch_dim),
    }
    out = write_files({path: made[option]() for option, path in files.items()})
    width, rules = get_line_width(out, options.wide), found.to_yaml()
    print_text(rules, out)  # print full lines, so that users can copy the rules
    print_text(found.to_text(width).removeprefix(f"{rules}\n"), out, width)
    if not found.is_complete:
        print_text("layoutmap: interrupted; the best map so far is above", sys.stderr)
    return SUCCESS
