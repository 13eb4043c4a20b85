"""The command line: `layoutmap plan | explain | lint | diff | devices | presets | schema | completion`.

A model is named as `package.module:function`: a function without arguments that makes and returns it, found from the
present folder; or it is one that `layoutmap presets` lists. Nothing of it is allocated, and no device is needed.

Exit codes: 0 all is well; 1 the plan has problems, lint finds something, or two plans differ; 2 the command cannot be
carried out.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from layoutmap.cli_models import listing
from layoutmap.cli_plans import add_model_options, plan_of, plans_of
from layoutmap.completion import HOW_TO, SHELLS, completion_script
from layoutmap.devices import devices
from layoutmap.engines import ENGINES
from layoutmap.errors import LayoutMapError, PlanError
from layoutmap.report.rows import size
from layoutmap.yaml_form import schema

__all__ = ["main"]

WELL, PROBLEMS, CANNOT = 0, 1, 2

_EXAMPLES = """examples:
  layoutmap plan my_models:make_llama --rules rules.yaml --mesh batch=2,model=4
  layoutmap plan my_models:make_llama --rules rules.yaml --inputs "int32[8,128]" --optimizer adamw --strict
  layoutmap plan my_models:make_llama --rules rules.yaml --optimizer adamw --device-memory 80GiB
  layoutmap plan my_models:make_llama --rules rules.yaml --json plan.json --html plan.html
  layoutmap plan keras_hub:llama3_405b --mesh batch=512,model=8 --fsdp-dim batch --dtype bfloat16 --optimizer adamw
  layoutmap explain my_models:make_llama blocks.0.up.kernel --rules rules.yaml
  layoutmap lint my_models:make_llama --rules rules.yaml --batch-dim data
  layoutmap diff plan.json my_models:make_llama --rules rules.yaml     in a project's CI: fails when a layout changes
  layoutmap devices --engine jax
  layoutmap presets
  layoutmap schema > rules.schema.json
  source <(layoutmap completion bash)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except LayoutMapError as error:
        print(f"layoutmap: {error}", file=sys.stderr)
        return PROBLEMS if isinstance(error, PlanError) and error.problems else CANNOT
    except KeyboardInterrupt:
        print("layoutmap: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="layoutmap",
        description="Say where every weight of a model lives, and see it before a byte is allocated.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        required=True, metavar="plan | explain | lint | diff | devices | presets | schema | completion"
    )

    def command(name: str, run: Callable[[Any], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=text, description=text, epilog=_EXAMPLES, formatter_class=parser.formatter_class
        )
        made.set_defaults(run=run)
        return made

    plan = command(
        "plan", _plan, "Print the plan of a model: every variable, its layout and bytes, all problems."
    )
    plan.add_argument("model", metavar="FILE|MODULE:FUNCTION", help="a plan's JSON file, or a model")
    plan.add_argument("--json", metavar="FILE", type=Path, help="also write the plan to a file, for diff")
    plan.add_argument("--html", metavar="FILE", type=Path, help="also write it as a page for a browser")
    plan.add_argument(
        "--device-memory",
        metavar="SIZE",
        type=_nbytes,
        help='what a device has, as in "80GiB": the plan is a problem if weights, gradients, slots and state take more',
    )
    plan.add_argument("--strict", action="store_true", help="let warnings count as problems")
    _add_batch_dim(plan)
    add_model_options(plan)
    explain = command(
        "explain", _explain, "Say why one variable is where it is, and what to type to change it."
    )
    explain.add_argument("model", metavar="FILE|MODULE:FUNCTION", help="a plan's JSON file, or a model")
    explain.add_argument("path", metavar="PATH", help="the variable's path, as the plan shows it")
    add_model_options(explain)
    lint = command("lint", _lint, "Say which layouts of a plan are probably not meant, with the evidence.")
    lint.add_argument("model", metavar="FILE|MODULE:FUNCTION", help="a plan's JSON file, or a model")
    _add_batch_dim(lint)
    add_model_options(lint)
    diff = command("diff", _diff, "Say what moves from one plan to another; exit code 1 if anything does.")
    for name in ("before", "after"):
        diff.add_argument(name, metavar="FILE|MODULE:FUNCTION", help="what --json has written, or a model")
    add_model_options(diff)
    there = command("devices", _devices, "List the devices of this machine.")
    there.add_argument(
        "--engine", choices=tuple(ENGINES), help="whose devices; without it, those of all installed"
    )
    command("presets", _presets, "List presets of rules, and published models that need no function.")
    command("schema", _schema, "Print the JSON Schema of rules files, for editors.")
    completion = command("completion", _completion, "Print what makes a shell complete this command.")
    completion.epilog = HOW_TO
    completion.add_argument("shell", choices=SHELLS)
    return parser


def _add_batch_dim(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-dim",
        metavar="DIM",
        help="the mesh dim that cuts the batch, for lint; without it, that of the activations' rules, or one of its "
        "usual names",
    )


# -- commands


def _plan(options: Any) -> int:
    made = plan_of(options.model, options)
    memory = made.memory
    print(f"{made}\n\n{memory}")
    findings = made.lint(options.batch_dim)
    if findings:
        print(f"\n{findings!r}: see layoutmap lint {options.model} ...")
    for path, form in (
        (options.json, made.to_json),
        (options.html, lambda: made.to_html(options.batch_dim)),
    ):
        if path is not None:
            _write(path, form())
            print(f"written: {path}", file=sys.stderr)
    fits = options.device_memory is None or memory.total <= options.device_memory
    if options.device_memory is not None:
        print(f"\n{_fit(memory.total, options.device_memory)}")
    return PROBLEMS if made.errors or (options.strict and made.warnings) or not fits else WELL


def _explain(options: Any) -> int:
    made = plan_of(options.model, options)
    try:
        print(made.explain(options.path))
    except KeyError as error:
        raise LayoutMapError(
            str(error.args[0]),
            why="a path is as the plan has it, with a number where the table has {0..31}",
            mend="copy it from: layoutmap plan ..",
        ) from None
    return WELL


def _lint(options: Any) -> int:
    findings = plan_of(options.model, options).lint(options.batch_dim)
    print(findings)
    return PROBLEMS if findings else WELL


def _diff(options: Any) -> int:
    before, after = plans_of([options.before, options.after], options)
    difference = before.diff(after)
    print(difference)
    return PROBLEMS if difference else WELL


def _devices(options: Any) -> int:
    found = False
    for engine in [options.engine] if options.engine else ENGINES:
        try:
            names = devices(engine=engine)
        except (LayoutMapError, ImportError) as error:
            if options.engine:
                raise LayoutMapError(
                    f"{engine}: no devices", why=str(error), mend=f'pip install "layoutmap[{engine}]"'
                ) from error
            continue
        found = True
        print(f"{engine}: {len(names)} devices")
        for name in names:
            print(f"   {name}")
    if not found:
        raise LayoutMapError(
            "no engine is installed", mend='pip install "layoutmap[jax]", [tensorflow] or [torch]'
        )
    return WELL


def _presets(_: Any) -> int:
    print(listing())
    return WELL


def _completion(options: Any) -> int:
    print(completion_script(_parser(), options.shell))
    return WELL


def _schema(options: Any) -> int:
    print(schema(), end="")
    return WELL


# -- what they need


def _nbytes(text: str) -> int:
    """The bytes of a size that people write; argparse tells what it raises."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", text)
    if found is None:
        raise argparse.ArgumentTypeError(f'{text!r} is no size; write it as in "80GiB" or "80GB"')
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(prefix) + 1))


def _fit(needed: int, there: int) -> str:
    if needed > there:
        return f"does not fit: {size(needed)} of {size(there)} on each device, before activations"
    return f"fits: {size(needed)} of {size(there)} on each device, and {size(there - needed)} are left for activations"


def _write(path: Path, text: str) -> None:
    """All of it, or nothing: a file that was there stays until the new one is whole."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise LayoutMapError(
            f"{path} cannot be written",
            why=error.strerror or str(error),
            mend="name a file in a folder that is there and has room; what was there has not been touched",
        ) from error
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
