"""Check on this machine's devices that sharded models compute the same numbers as one device: `layoutmap selftest`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from layoutmap.cli import interrupts, output
from layoutmap.core.errors import LayoutMapError
from layoutmap.engines import ENGINES


def add_selftest_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the devices, the laws, and the duration of the self-test."""
    parser.add_argument("--engine", choices=tuple(ENGINES), help="the engine; default: all installed")
    parser.add_argument("--simulate", metavar="N", type=int, default=0, help="try so many simulated devices")
    parser.add_argument("--mesh", metavar="DIMS", default="", help="the mesh; default: it is drawn")
    parser.add_argument("--busy", action="store_true", help="also on devices that others use")
    parser.add_argument("--minutes", type=float, default=5, help="for how long (default: %(default)g)")
    parser.add_argument("--on", metavar="MACHINE", help="a machine of plan --on, to compare speeds with")
    parser.add_argument("--write-machine", metavar="FILE", help="write what was measured, for plan --on FILE")
    parser.add_argument("--seed", metavar="N", type=int, help="the first seed; default: by today's date")
    parser.add_argument("--only", metavar="KIND", action="append", help="only these, as in keras-jax")
    parser.add_argument("--count", metavar="N", type=int, help="how many seeds of each kind at most")
    parser.add_argument("--folder", metavar="DIRECTORY", help="where it saves and loads; default: TMPDIR")
    parser.add_argument("--report", metavar="FILE", help='also write a page for a browser; "-": to stdout')
    parser.add_argument("--json", metavar="FILE", help='also write it as JSON; "-": to stdout')
    parser.add_argument("--with-names", action="store_true", help="leave hosts, users and folders in these")
    output.add_wide_option(parser)


def run_selftest_command(options: Any) -> int:
    """Check laws until the time is over, print and write the results, and return the exit code."""
    targets = {"--report": options.report, "--json": options.json, "--write-machine": options.write_machine}
    files = output.get_output_paths(targets)
    if find_spec("hypothesis") is None:
        raise LayoutMapError("the self-test needs hypothesis", fix='pip install "layoutmap[selftest]"')
    with interrupts.allow_interrupts():
        # Import by name, because `cli` must not depend on the higher package `testing`.
        report = import_module("layoutmap.testing.selftest").run_selftest(options)
    if report is None:  # this is not process 0, which prints the report
        return output.SUCCESS
    texts = {"--report": report.to_html, "--json": report.to_json}
    out = output.write_files({path: texts[option]() for option, path in files.items() if option in texts})
    width = output.get_line_width(out, options.wide)
    output.print_text(report.to_text(width), out, width)
    # Write the machine file last, because that fails with too few measurements.
    if "--write-machine" in files:
        output.write_files({files["--write-machine"]: report.to_machine_file()})
    if report.failures:
        return output.PROBLEMS
    if report.is_complete:
        return output.SUCCESS
    output.print_text("layoutmap: interrupted; the results so far are above", sys.stderr)
    return output.INTERRUPTED
