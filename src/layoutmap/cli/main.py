"""The command line: `layoutmap suggest | plan | inspect | guard | explain | lint | diff | search | checkpoint | ...`.

A model is named as `package.module:function`, a function without arguments that creates and returns the model, found
from the current folder. Or it is a model that `layoutmap presets` lists. Planning allocates no values on any device.

Exit codes: 0 the output was printed and all is well; 1 the plan has problems, lint finds something, two plans differ,
a checkpoint is damaged, or a law of the self-test does not hold; 2 there is no answer, as where a rules file is wrong
or a plan is incomplete; 130 interrupted; 141 the reader of a pipe has closed it.
If a model's code ends the process itself (`os._exit`), the exit code is its own, which cannot be prevented.
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
from layoutmap.cli.completion import INSTALL_HELP, SHELLS, make_completion_script
from layoutmap.cli.device_list import print_devices
from layoutmap.cli.inspecting import (
    add_inspect_options,
    get_process_index,
    inspect_model,
    print_difference_from_first_process,
    run_guard_command,
)
from layoutmap.cli.models import find_published_model, format_presets
from layoutmap.cli.output import (
    CLOSED,
    FAILED,
    INTERRUPTED,
    PROBLEMS,
    SUCCESS,
    add_wide_option,
    discard_unwritten_output,
    get_line_width,
    get_output_paths,
    print_text,
    write_files,
)
from layoutmap.cli.plans import (
    add_model_options,
    check_and_count_file_rules,
    format_lint_command,
    load_or_make_plans,
    read_step_explanation_file,
)
from layoutmap.cli.search import add_search_options, run_search_command
from layoutmap.cli.selftest import add_selftest_options, run_selftest_command
from layoutmap.cli.sizes import parse_size
from layoutmap.cli.suggest import add_suggest_options, run_suggest_command
from layoutmap.cli.syntax import translate_rules_to_yaml
from layoutmap.cli.users_code import UsersCodeError
from layoutmap.core.errors import LayoutMapError, format_count
from layoutmap.core.escaping import escape_text
from layoutmap.engines import ENGINES
from layoutmap.report.text import format_plan_text
from layoutmap.rules.yaml_file import read_rules_file_schema
from layoutmap.scope.plan import Plan

_EXAMPLES = r"""examples:
  layoutmap plan my_models:make_llama --rules rules.yaml --mesh batch=2,model=4
  layoutmap suggest my_models:make_llama --mesh batch=2,model=4 -o rules.yaml     a first rules file, with reasons
  layoutmap plan my_models:make_llama --rules rules.yaml --inputs "int32[8,128]" --optimizer adamw --strict
  layoutmap plan my_models:make_llama --rules rules.yaml --optimizer adamw --device-memory 80GiB
  layoutmap plan my_models:make_llama --rules rules.yaml --json plan.json --html plan.html
  layoutmap plan keras_hub:llama3_405b --mesh batch=512,model=8 --fsdp-dim batch --dtype bfloat16 --optimizer adamw
  layoutmap plan keras_hub:llama3_8b --mesh data=8,model=8 --fsdp-dim data --dtype bfloat16 --optimizer adamw \
      --inputs "token_ids=int32[64,4096]" "padding_mask=int32[64,4096]" --on h100:64 --remat blocks     a step's cost
  layoutmap inspect my_program:make_model      where the variables of an existing sharded model are
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
    """Run one command with its arguments (`None`: those of the process), and return the exit code."""
    return interrupts.finish_command_without_interrupts(_run_command_and_print_error(arguments))


def _run_command_and_print_error(arguments: Sequence[str] | None) -> int:
    """Run one command, print its error if it fails, and return the exit code."""
    try:
        try:
            options = _make_parser().parse_args(arguments)
            return options.run(options)
        finally:
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, like `| head`
        discard_unwritten_output(sys.stdout)
        return CLOSED
    except KeyboardInterrupt:
        return _report_failure("interrupted", INTERRUPTED)
    except UsersCodeError as error:
        return _report_failure(error, traceback_text=error.trace)
    except LayoutMapError as error:
        return _report_failure(error)
    except OSError as error:
        discard_unwritten_output(sys.stdout)
        return _report_failure(error.strerror or error)
    except Exception as error:  # any other error is a bug in layoutmap
        return _report_failure(
            f"{type(error).__name__}, which is a bug in layoutmap: please report it with the lines above",
            traceback_text=traceback.format_exc().rstrip(),
        )


def _report_failure(message: object, code: int = FAILED, *, traceback_text: str = "") -> int:
    """Print an error to stderr, after a traceback if there is one, and return the exit code."""
    with contextlib.suppress(OSError):  # stderr may already be closed
        message_text = translate_rules_to_yaml(f"layoutmap: {message}")
        print_text(f"{traceback_text}\n\n{message_text}" if traceback_text else message_text, sys.stderr)
    return code


class _EscapingParser(argparse.ArgumentParser):
    """Parse arguments. Texts are printed with control characters escaped, and a closed stdout raises an `OSError`."""

    def print_help(self, file: Any = None) -> None:
        print_text(self.format_help().rstrip("\n"), file or sys.stdout)

    def error(self, message: str) -> NoReturn:
        super().error(escape_text(message))


def _make_parser() -> argparse.ArgumentParser:
    parser = _EscapingParser(
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

    def add_subcommand(
        name: str, run: Callable[[Any], int], summary: str, *plan_arguments: str
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=summary, description=summary, epilog=_EXAMPLES, formatter_class=parser.formatter_class
        )
        made.set_defaults(run=run)
        for each in plan_arguments:
            made.add_argument(
                each, metavar="FILE|MODULE:FUNCTION", help="the JSON file of a plan, or a model"
            )
        return made

    suggest = add_subcommand(
        "suggest",
        run_suggest_command,
        "Write a first rules file for a model, with the reason for each rule as a comment.",
    )
    add_suggest_options(suggest)
    plan = add_subcommand(
        "plan",
        _run_plan_command,
        "Print the plan of a model: every variable with its layout and bytes, and all problems.",
        "model",
    )
    _add_plan_options(plan)
    add_model_options(plan)
    found = add_subcommand(
        "inspect",
        _run_inspect_command,
        "Print the plan of a model that a function makes and lays out, in whatever way: read off its arrays.",
    )
    guard = add_subcommand(
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
    explain = add_subcommand(
        "explain",
        _run_explain_command,
        "Explain why a variable has its layout, and what to type to change it.",
        "model",
    )
    explain.add_argument("path", metavar="PATH", help="the variable's path, as the plan shows it")
    add_model_options(explain)
    lint = add_subcommand(
        "lint",
        _run_lint_command,
        "Report layouts that are valid but probably not intended, with the evidence.",
        "model",
    )
    add_model_options(lint)
    diff = add_subcommand(
        "diff",
        _run_diff_command,
        "Show what changes from one plan to another; the exit code is 1 if anything does.",
        *("before", "after"),
    )
    add_model_options(diff)
    search = add_subcommand(
        "search",
        run_search_command,
        "Find the layout map with the fastest training step on a machine, and compare it with built-in maps.",
    )
    add_search_options(search)
    checkpoint = add_subcommand(
        "checkpoint",
        run_checkpoint_command,
        "Show, verify, relayout, and export checkpoints without loading a framework.",
    )
    add_checkpoint_commands(checkpoint)
    there = add_subcommand(
        "devices", print_devices, "List the devices of this process, and its number in a job of several."
    )
    there.add_argument("--engine", choices=tuple(ENGINES), help="the engine; default: all that are installed")
    selftest = add_subcommand(
        "selftest",
        run_selftest_command,
        "Check on these devices that sharded models compute the same numbers as one device, and measure speeds.",
    )
    add_selftest_options(selftest)
    listed = add_subcommand(
        "presets",
        _print_presets,
        "List the presets of rules, and the published models that can be planned by name.",
    )
    add_wide_option(listed)
    rules = add_subcommand(
        "schema",
        _run_schema_command,
        "Print the JSON Schema of rules files, for editors, or check such files.",
    )
    rules.add_argument("files", metavar="FILE", nargs="*", help="a rules file to check; no model is needed")
    completion = add_subcommand(
        "completion", _print_completion_script, "Print the script with which a shell completes this command."
    )
    completion.epilog = INSTALL_HELP
    completion.add_argument("shell", choices=SHELLS)
    return parser


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for a plan's output files and for its verdict."""
    parser.add_argument(
        "--json", metavar="FILE", help='also write the plan to a file, for diff; "-": to stdout'
    )
    parser.add_argument(
        "--html", metavar="FILE", help='also write it as a page for a browser; "-": to stdout'
    )
    parser.add_argument(
        "--step",
        metavar="FILE",
        help="a JSON file of step.explain(..).to_json(), to show on the page of --html",
    )
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        type=parse_size,
        help='the memory of a device, as in "80GiB"; exit code 1 if weights, gradients, slots and state need more, or '
        "with --on the peak of a step; default with --on: that of the machine",
    )
    parser.add_argument("--strict", action="store_true", help="count warnings as problems")


# -- commands


def _run_plan_command(options: Any) -> int:
    files = get_output_paths({"--json": options.json, "--html": options.html})
    excluded_option = "" if find_published_model(options.model) else "--dtype"
    plan = load_or_make_plans([options.model], options)[0]
    return _print_plan(plan, files, options, format_lint_command(options.model, options), excluded_option)


def _run_inspect_command(options: Any) -> int:
    files = get_output_paths({"--json": options.json, "--html": options.html})
    plan = inspect_model(options)
    return (
        print_difference_from_first_process(plan)
        if get_process_index()
        else _print_plan(plan, files, options, _format_lint_command_for_file(options))
    )


def _print_plan(
    plan: Plan, files: Mapping[str, str], options: Any, lint_command: str, excluded_option: str = ""
) -> int:
    """Print a plan with its verdict, write its files, and return the exit code.

    `lint_command` shows the findings of lint, and advice must not name `excluded_option`.
    """
    plan = plan.set_limits(device_memory=options.device_memory, strict=options.strict or plan.strict)
    memory, findings = plan.memory, plan.lint(options.batch_dim)
    verdict = plan.verdict.add_findings(findings)
    explained = None if options.step is None else read_step_explanation_file(options.step)
    texts = {"--json": plan.to_json, "--html": lambda: plan.to_html(options.batch_dim, explained=explained)}
    out = write_files({path: texts[option]() for option, path in files.items()})
    width = get_line_width(out, options.wide)
    first = verdict.format_text(as_command=True, excluded=excluded_option)
    rest = f"{format_plan_text(plan, '', width)}\n\n{memory.to_text(width)}"
    print_text(first + translate_rules_to_yaml(rest), out, width)
    if findings:
        print_text(f"\nLint: {findings.summary}; to see them: {lint_command}", out, width)
    if plan.cost is not None:
        print_text(f"\n{plan.cost.to_text(width)}", out, width)
    # Print the verdict again at the end, because the first line may have scrolled out of view.
    print_text(f"\nVerdict: {verdict.headline}", out, width)
    return SUCCESS if verdict.passes else PROBLEMS


def _format_lint_command_for_file(options: Any) -> str:
    """Return the command that lints the file of `--json`. Without that option, the text also says to add it."""
    command = format_lint_command(
        options.json or "plan.json", argparse.Namespace(batch_dim=options.batch_dim)
    )
    return command if options.json else f"add --json plan.json, then {command}"


def _run_explain_command(options: Any) -> int:
    plan = load_or_make_plans([options.model], options)[0]
    try:
        print_text(
            translate_rules_to_yaml(plan.explain(options.path)),
            sys.stdout,
            get_line_width(sys.stdout, options.wide),
        )
    except KeyError as error:
        raise LayoutMapError(
            str(error.args[0]),
            why="the path of a variable is as the plan prints it, with one number in place of a range such as {0..31}",
            fix=f"use a path that this command prints: layoutmap plan {options.model} ...",
        ) from None
    return SUCCESS


def _run_lint_command(options: Any) -> int:
    findings = load_or_make_plans([options.model], options)[0].lint(options.batch_dim)
    print_text(translate_rules_to_yaml(str(findings)), sys.stdout, get_line_width(sys.stdout, options.wide))
    return PROBLEMS if findings or findings.num_errors else SUCCESS


def _run_diff_command(options: Any) -> int:
    before, after = load_or_make_plans([options.before, options.after], options)
    difference = before.diff(after)
    width = get_line_width(sys.stdout, options.wide)
    print_text(difference.to_text(width), sys.stdout, width)
    return PROBLEMS if difference else SUCCESS


def _print_presets(options: Any) -> int:
    print_text(format_presets(), sys.stdout, get_line_width(sys.stdout, options.wide))
    return SUCCESS


def _print_completion_script(options: Any) -> int:
    print_text(make_completion_script(_make_parser(), options.shell), sys.stdout)
    return SUCCESS


def _run_schema_command(options: Any) -> int:
    if not options.files:
        print_text(read_rules_file_schema().rstrip("\n"), sys.stdout)
    code = SUCCESS
    for name in options.files:
        try:
            print_text(f"{name}: {format_count(check_and_count_file_rules(name), 'rule')}", sys.stdout)
        except LayoutMapError as error:
            code = _report_failure(error)
    return code


if __name__ == "__main__":
    sys.exit(main())
