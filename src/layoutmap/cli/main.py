"""The command line: `layoutmap plan | inspect | guard | explain | lint | diff | search | checkpoint | ...`.

A model is named as `package.module:function`: a function without arguments that makes and returns it, found from the
current folder; or it is one that `layoutmap presets` lists. Nothing of it is allocated, and no device is needed.

Exit codes: 0 the output was printed and all is well; 1 the plan has problems, lint finds something, two plans differ,
a checkpoint is damaged, or a law of the self-test does not hold; 2 there is no answer, as where a rules file is wrong
or a plan incomplete; 130 interrupted; 141 the reader of a pipe has closed it.
Code of a model that ends the process itself (`os._exit`) decides the exit code as well: nothing inside of the process
can prevent that.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import layoutmap
from layoutmap.cli import interrupts
from layoutmap.cli.checkpoints import add_checkpoint_commands, run_checkpoint_command
from layoutmap.cli.completion import HOW_TO, SHELLS, completion_script
from layoutmap.cli.device_list import list_devices
from layoutmap.cli.inspecting import (
    add_inspect_options,
    inspected,
    process_number,
    run_guard_command,
    tell_difference,
)
from layoutmap.cli.models import known_model, listing
from layoutmap.cli.output import (
    CANNOT,
    CLOSED,
    INTERRUPTED,
    PROBLEMS,
    WELL,
    add_wide_option,
    check_targets,
    columns_of,
    drop_unwritten,
    say,
    write_all,
)
from layoutmap.cli.plans import add_model_options, num_rules, plan_of, plans_of
from layoutmap.cli.search import add_search_options, run_search_command
from layoutmap.cli.selftest import add_selftest_options, run_selftest_command
from layoutmap.cli.sizes import size_in_bytes
from layoutmap.cli.syntax import in_yaml
from layoutmap.cli.users_code import UsersCodeError
from layoutmap.core.errors import LayoutMapError, counted
from layoutmap.core.escaping import escaped
from layoutmap.engines import ENGINES
from layoutmap.rules.yaml_file import schema
from layoutmap.scope.plan import Plan

_EXAMPLES = r"""examples:
  layoutmap plan my_models:make_llama --rules rules.yaml --mesh batch=2,model=4
  layoutmap plan my_models:make_llama --rules rules.yaml --inputs "int32[8,128]" --optimizer adamw --strict
  layoutmap plan my_models:make_llama --rules rules.yaml --optimizer adamw --device-memory 80GiB
  layoutmap plan my_models:make_llama --rules rules.yaml --json plan.json --html plan.html
  layoutmap plan keras_hub:llama3_405b --mesh batch=512,model=8 --fsdp-dim batch --dtype bfloat16 --optimizer adamw
  layoutmap plan keras_hub:llama3_8b --mesh data=8,model=8 --fsdp-dim data --dtype bfloat16 --optimizer adamw \
      --inputs "token_ids=int32[64,4096]" "padding_mask=int32[64,4096]" --on h100:64 --remat blocks     a step's cost
  layoutmap inspect my_program:make_model      of a model that exists, whoever laid it out: where its variables are
  layoutmap guard golden.json my_program:make_model     in a project's CI: fails when one is elsewhere
  layoutmap explain my_models:make_llama blocks.0.up.kernel --rules rules.yaml
  layoutmap lint my_models:make_llama --rules rules.yaml --batch-dim data
  layoutmap diff plan.json my_models:make_llama --rules rules.yaml     in a project's CI: fails when a layout changes
  layoutmap search keras_hub:llama3_8b --dtype bfloat16 --optimizer adamw --on h100:64 --write rules.yaml \
      --inputs "token_ids=int32[64,4096]" "padding_mask=int32[64,4096]"       the best map, found
  layoutmap checkpoint describe runs/llama --step 1000     more: layoutmap checkpoint --help
  layoutmap devices --engine jax
  layoutmap selftest --report selftest.html     do these devices compute what one device computes?
  layoutmap presets
  layoutmap schema > rules.schema.json
  layoutmap schema rules.yaml     checks the file, without a model
  source <(layoutmap completion bash)

exit codes:
  0  the output was printed, and all is well
  1  the plan has problems, lint found something, the plans differ, a checkpoint is damaged, or the self-test failed
  2  there is no answer, as where a rules file is wrong or a plan is incomplete; stderr says why
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    return interrupts.ended(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        try:
            options = _parser().parse_args(arguments)
            return options.run(options)
        finally:
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except BrokenPipeError:  # as with `| head`: who reads has enough
        drop_unwritten(sys.stdout)
        return CLOSED
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    except UsersCodeError as error:
        return _failed(error, before=error.trace)
    except LayoutMapError as error:
        return _failed(error)
    except OSError as error:
        drop_unwritten(sys.stdout)
        return _failed(error.strerror or error)
    except Exception as error:  # else its exit code would be that of a plan with problems
        return _failed(
            f"{type(error).__name__}, which is a bug in layoutmap: please report it with the lines above",
            before=traceback.format_exc().rstrip(),
        )


def _failed(message: object, code: int = CANNOT, *, before: str = "") -> int:
    with contextlib.suppress(OSError):  # of stderr: then nobody reads it
        told = in_yaml(f"layoutmap: {message}")
        say(f"{before}\n\n{told}" if before else told, sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """Escapes what it repeats of the command line, and passes on that nobody reads its help."""

    def print_help(self, file: Any = None) -> None:
        say(self.format_help().rstrip("\n"), file or sys.stdout)

    def error(self, message: str) -> NoReturn:
        super().error(escaped(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="layoutmap",
        description="See where every weight of a model is placed, before a byte is allocated.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        help="print the version and exit",
        version=f"layoutmap {layoutmap.__version__}",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int], text: str, *plans: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=text, description=text, epilog=_EXAMPLES, formatter_class=parser.formatter_class
        )
        made.set_defaults(run=run)
        for each in plans:
            made.add_argument(
                each, metavar="FILE|MODULE:FUNCTION", help="the JSON file of a plan, or a model"
            )
        return made

    plan = command(
        "plan",
        _plan,
        "Print the plan of a model: every variable with its layout and bytes, and all problems.",
        "model",
    )
    _add_plan_options(plan)
    add_model_options(plan)
    found = command(
        "inspect",
        _inspect,
        "Print the plan of a model that a function makes and lays out, in whatever way: read off its arrays.",
    )
    guard = command(
        "guard",
        run_guard_command,
        "Compare a model that a function makes with the plan that was kept of it; the exit code is 1 if it differs.",
    )
    guard.add_argument(
        "golden", metavar="FILE", help="the JSON file of the plan, as inspect --json writes it"
    )
    for each in (found, guard):
        each.add_argument("model", metavar="MODULE:FUNCTION", help="what makes the model and returns it")
        add_inspect_options(each)
    _add_plan_options(found)
    explain = command(
        "explain", _explain, "Explain why a variable has its layout, and what to type to change it.", "model"
    )
    explain.add_argument("path", metavar="PATH", help="the variable's path, as the plan shows it")
    add_model_options(explain)
    lint = command(
        "lint", _lint, "Report layouts that are valid but probably not intended, with the evidence.", "model"
    )
    add_model_options(lint)
    diff = command(
        "diff",
        _diff,
        "Show what changes from one plan to another; the exit code is 1 if anything does.",
        *("before", "after"),
    )
    add_model_options(diff)
    search = command(
        "search",
        run_search_command,
        "Find the layout map with the fastest training step on a machine, and compare it with built-in expert maps.",
    )
    add_search_options(search)
    checkpoint = command(
        "checkpoint",
        run_checkpoint_command,
        "Show, verify, relayout and export what was saved; no framework is loaded.",
    )
    add_checkpoint_commands(checkpoint)
    there = command(
        "devices", list_devices, "List the devices of this process, and its number in a job of several."
    )
    there.add_argument("--engine", choices=tuple(ENGINES), help="the engine; default: all that are installed")
    selftest = command(
        "selftest",
        run_selftest_command,
        "Try on the devices here, for minutes, whether layouts compute what one device computes, and how fast.",
    )
    add_selftest_options(selftest)
    listed = command(
        "presets",
        _presets,
        "List the presets of rules, and the published models that can be planned by name.",
    )
    add_wide_option(listed)
    rules = command(
        "schema", _schema, "Print the JSON Schema of rules files, for editors, or check such files."
    )
    rules.add_argument("files", metavar="FILE", nargs="*", help="a rules file to check; no model is needed")
    completion = command(
        "completion", _completion, "Print the script with which a shell completes this command."
    )
    completion.epilog = HOW_TO
    completion.add_argument("shell", choices=SHELLS)
    return parser


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for where a plan is written, and what its verdict goes by."""
    parser.add_argument(
        "--json", metavar="FILE", help='also write the plan to a file, for diff; "-": to stdout'
    )
    parser.add_argument(
        "--html", metavar="FILE", help='also write it as a page for a browser; "-": to stdout'
    )
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        type=size_in_bytes,
        help='the memory of a device, as in "80GiB"; exit code 1 if weights, gradients, slots and state need more, or '
        "with --on the peak of a step; default with --on: that of the machine",
    )
    parser.add_argument("--strict", action="store_true", help="count warnings as problems")


# -- commands


def _plan(options: Any) -> int:
    files = check_targets({"--json": options.json, "--html": options.html})
    refused = "" if known_model(options.model) else "--dtype"
    return _show(plan_of(options.model, options), files, options, options.model, refused)


def _inspect(options: Any) -> int:
    files = check_targets({"--json": options.json, "--html": options.html})
    made = inspected(options)
    return (
        tell_difference(made)
        if process_number()
        else _show(made, files, options, options.json or "FILE.json")
    )


def _show(made: Plan, files: Mapping[str, str], options: Any, lint: str, refused: str = "") -> int:
    """Print a plan and write its files; `lint` is what that command takes for it."""
    made = made.judged(device_memory=options.device_memory, strict=options.strict or made.strict)
    memory, verdict = made.memory, made.verdict
    findings = made.lint(options.batch_dim)
    texts = {"--json": made.to_json, "--html": lambda: made.to_html(options.batch_dim)}
    out = write_all({path: texts[option]() for option, path in files.items()})
    width = columns_of(out, options.wide)
    rest = f"{made.to_text(width)}\n\n{memory.to_text(width)}".removeprefix(str(verdict))
    say(verdict.text(as_command=True, refused=refused) + in_yaml(rest), out, width)
    if findings:
        say(f"\n{findings!r}: see layoutmap lint {lint} ...", out, width)
    if made.cost is not None:
        say(f"\n{made.cost.to_text(width)}", out, width)
    say(f"\nVerdict: {verdict.headline}", out, width)  # the first line is out of sight by now
    return WELL if verdict.passes else PROBLEMS


def _explain(options: Any) -> int:
    made = plan_of(options.model, options)
    try:
        say(in_yaml(made.explain(options.path)), sys.stdout, columns_of(sys.stdout, options.wide))
    except KeyError as error:
        raise LayoutMapError(
            str(error.args[0]),
            why="write a path as in the plan, with one number in place of {0..31}",
            fix=f"this prints all paths: layoutmap plan {options.model} ...",
        ) from None
    return WELL


def _lint(options: Any) -> int:
    findings = plan_of(options.model, options).lint(options.batch_dim)
    say(in_yaml(str(findings)), sys.stdout, columns_of(sys.stdout, options.wide))
    return PROBLEMS if findings else WELL


def _diff(options: Any) -> int:
    before, after = plans_of([options.before, options.after], options)
    difference = before.diff(after)
    width = columns_of(sys.stdout, options.wide)
    say(difference.to_text(width), sys.stdout, width)
    return PROBLEMS if difference else WELL


def _presets(options: Any) -> int:
    say(listing(), sys.stdout, columns_of(sys.stdout, options.wide))
    return WELL


def _completion(options: Any) -> int:
    say(completion_script(_parser(), options.shell), sys.stdout)
    return WELL


def _schema(options: Any) -> int:
    if not options.files:
        say(schema().rstrip("\n"), sys.stdout)
    code = WELL
    for name in options.files:
        try:
            say(f"{name}: {counted(num_rules(name), 'rule')}", sys.stdout)
        except LayoutMapError as error:
            code = _failed(error)
    return code


if __name__ == "__main__":
    sys.exit(main())
