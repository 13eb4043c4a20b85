"""The command line: `layoutmap plan | explain | lint | diff | devices | presets | schema | completion`.

A model is named as `package.module:function`: a function without arguments that makes and returns it, found from the
present folder; or it is one that `layoutmap presets` lists. Nothing of it is allocated, and no device is needed.

Exit codes: 0 all is well; 1 the plan has problems, lint finds something, or two plans differ; 2 the command cannot be
carried out.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layoutmap.cli_models import (
    add_preset_options,
    known_model,
    listing,
    make_of,
    preset_of,
    refuse_unknown,
)
from layoutmap.completion import HOW_TO, SHELLS, completion_script
from layoutmap.devices import devices
from layoutmap.engines import ENGINES
from layoutmap.errors import LayoutMapError, PlanError
from layoutmap.layout_map import LayoutMap
from layoutmap.mesh import Mesh
from layoutmap.plan import Plan
from layoutmap.report.rows import size
from layoutmap.scope import plan as make_plan
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


@dataclass(frozen=True, slots=True)
class _Shaped:
    """What a model is called with: a shape and a type, and no values."""

    shape: tuple[int, ...]
    dtype: str


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
    _add_batch_dim(plan)
    _add_model_options(plan)
    explain = command(
        "explain", _explain, "Say why one variable is where it is, and what to type to change it."
    )
    explain.add_argument("model", metavar="MODULE:FUNCTION")
    explain.add_argument("path", metavar="PATH", help="the variable's path, as the plan shows it")
    _add_model_options(explain)
    lint = command("lint", _lint, "Say which layouts of a plan are probably not meant, with the evidence.")
    lint.add_argument("plan", metavar="FILE|MODULE:FUNCTION")
    _add_batch_dim(lint)
    _add_model_options(lint)
    diff = command("diff", _diff, "Say what moves from one plan to another; exit code 1 if anything does.")
    for name in ("before", "after"):
        diff.add_argument(name, metavar="FILE|MODULE:FUNCTION", help="what --json has written, or a model")
    _add_model_options(diff)
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


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rules", metavar="FILE", type=Path, help="the rules file, as LayoutMap.to_yaml writes it"
    )
    add_preset_options(parser)
    parser.add_argument(
        "--mesh", metavar="DIMS", help='the mesh, as in "batch=2,model=4"; without it, the file\'s'
    )
    parser.add_argument(
        "--inputs",
        metavar="SPEC",
        nargs="+",
        help='what the model is called with, if it makes its weights then: "float32[8,128]", or "name=int32[8,16]"',
    )
    parser.add_argument(
        "--optimizer", metavar="NAME", help="a Keras optimizer whose slots are planned, too: adamw"
    )
    parser.add_argument(
        "--backend", choices=("jax", "tensorflow", "torch"), help="the backend that Keras runs on"
    )
    parser.add_argument(
        "--library", choices=("keras", "torch"), help="the model's library, if several are imported"
    )
    parser.add_argument("--strict", action="store_true", help="let warnings count as problems")


# -- commands


def _plan(options: Any) -> int:
    made = _plan_of(options.model, options)
    print(f"{made}\n\n{made.memory}")
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
    fits = options.device_memory is None or made.memory.total <= options.device_memory
    if options.device_memory is not None:
        print(f"\n{_fit(made.memory.total, options.device_memory)}")
    return PROBLEMS if made.errors or (options.strict and made.warnings) or not fits else WELL


def _explain(options: Any) -> int:
    made = _plan_of_model(options.model, options)
    try:
        print(made.explain(options.path))
    except KeyError as error:
        raise LayoutMapError(str(error.args[0]), mend="copy the path from: layoutmap plan ..") from None
    return WELL


def _lint(options: Any) -> int:
    findings = _plan_of(options.plan, options).lint(options.batch_dim)
    print(findings)
    return PROBLEMS if findings else WELL


def _diff(options: Any) -> int:
    before, after = (_plan_of(each, options) for each in (options.before, options.after))
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


def _plan_of(name: str, options: Any) -> Plan:
    path = Path(name)
    if path.suffix != ".json":
        return _plan_of_model(name, options)
    return Plan.from_json(_text_of(path))


def _plan_of_model(name: str, options: Any) -> Plan:
    if options.backend:
        os.environ["KERAS_BACKEND"] = options.backend
    mesh = Mesh(None, options.mesh) if options.mesh else None
    known = known_model(name)
    layout_map = preset_of(options, mesh, known)
    if layout_map is None:
        layout_map = LayoutMap.from_yaml(_text_of(options.rules), mesh) if options.rules else LayoutMap(mesh)
    make_model = make_of(known, options.dtype) if known else _imported(name)
    by = f" by preset {known.preset!r}" if known and not (options.rules or options.preset) else ""
    print(f"layoutmap: planning {name}{by}", file=sys.stderr)
    return make_plan(
        _with_optimizer(make_model, options.optimizer) if options.optimizer else make_model,
        layout_map,
        inputs=_inputs(options.inputs),
        library=options.library or ("keras" if known else None),
    )


def _with_optimizer(make_model: Callable[[], Any], optimizer: str) -> Callable[[], Any]:
    def make() -> Any:
        model = make_model()
        if not hasattr(model, "compile") or not hasattr(model, "stateless_call"):
            raise LayoutMapError(
                f"--optimizer {optimizer}: {type(model).__name__} is no Keras model",
                why="the slots of a Keras optimizer can be planned",
                mend="leave --optimizer out",
            )
        try:
            model.compile(optimizer=optimizer)
        except ValueError as error:
            raise LayoutMapError(
                f"--optimizer {optimizer}", why=str(error), mend="use adamw, sgd, ..."
            ) from error
        return model

    return make


def _imported(name: str) -> Callable[[], Any]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise LayoutMapError(
            f"{name!r} names no function that makes a model",
            why="a model is named as package.module:function, and a plan's file ends in .json",
            mend=f"layoutmap plan {module_name or 'my_models'}:make_model",
        )
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise LayoutMapError(
            f"{module_name} cannot be imported",
            why=str(error),
            mend="run the command in the folder that has it, or install it",
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    made = getattr(module, function_name, None)
    if not callable(made):
        refuse_unknown(module_name, function_name)
        near = [n for n in dir(module) if not n.startswith("_") and callable(getattr(module, n))]
        raise LayoutMapError(
            f"{module_name} has no function {function_name!r}",
            facts={"functions": ", ".join(near[:10])},
            mend="name one that makes a model and returns it",
        )
    return made


def _inputs(texts: Sequence[str] | None) -> Any:
    if not texts:
        return None
    found = [re.fullmatch(r"(?:(\w+)=)?(\w+)\[([\d,\s]*)\]", text) for text in texts]
    if not all(found):
        wrong = next(text for text, match in zip(texts, found, strict=True) if not match)
        raise LayoutMapError(
            f"--inputs {wrong!r} is no shape with a type",
            why="it says the type and the shape of what the model is called with",
            mend='write it as in --inputs "float32[8,128]", or "name=int32[8,16]" for each of several',
        )
    read = [
        (m[1], _Shaped(tuple(int(n) for n in m[3].split(",") if n.strip()), m[2]))
        for m in found
        if m is not None
    ]
    if read[0][0]:
        return dict(read)
    return read[0][1] if len(read) == 1 else [each for _, each in read]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise LayoutMapError(
            f"{path} cannot be read",
            why=error.strerror or str(error),
            mend="name a file that is there, from the present folder",
        ) from error


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
