"""Get the plans that a command line names: from the file of a plan, a user's model, or a published model."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layoutmap.adapters import (
    ADAPTERS,
    TrainingAdapter,
    find_model_adapter,
    get_adapter_of_imported_library,
    require_capability,
)
from layoutmap.cli.models import (
    add_preset_options,
    find_published_model,
    make_preset_layout_map,
    make_published_model_function,
)
from layoutmap.cli.output import add_wide_option, print_text
from layoutmap.cli.users_code import import_function, isolate_users_code, parse_function_name
from layoutmap.core.errors import LayoutMapError, ScopeError
from layoutmap.core.mesh import UNSHARDED, Mesh
from layoutmap.core.specs import list_batch_dims, parse_batch_dim
from layoutmap.plan.completeness import find_unbuilt_layers_problem
from layoutmap.rules.yaml_file import parse_rules_file
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.owner import choose_library_to_import
from layoutmap.scope.plan import Plan
from layoutmap.scope.scope import plan as make_plan

_MODEL_OPTIONS = (
    *("rules", "preset", "model_dim", "fsdp_dim", "dtype", "mesh", "inputs", "optimizer"),
    *("backend", "library", "on", "verify", "remat", "fuse_attention"),
)
_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "string"),
)


@dataclass(frozen=True, slots=True)
class _ModelInput:
    """The shape and dtype of a model input, as an example input without values."""

    shape: tuple[int, ...]
    dtype: str


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for planning a model."""
    parser.add_argument("--rules", metavar="FILE", help="the rules file, as LayoutMap.to_yaml writes it")
    add_preset_options(parser)
    parser.add_argument(
        "--mesh", metavar="DIMS", help='the mesh, as in "batch=2,model=4"; default: that of the rules file'
    )
    parser.add_argument(
        "--inputs",
        metavar="SPEC",
        nargs="+",
        help="the model's inputs: for a model that makes its weights at its first call, and for --on: "
        '"float32[8,128]", or "name=int32[8,16]"',
    )
    add_partial_option(parser)
    add_wide_option(parser)
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help="a Keras optimizer whose slots are planned as well, such as adamw; with --on also one of torch or optax",
    )
    parser.add_argument(
        "--on",
        metavar="MACHINE",
        help='the machine, as in "h100:64", or "mine.yaml:my_device:64": adds to the plan what a training step sends, '
        "holds and takes there; needs --inputs",
    )
    parser.add_argument(
        "--verify",
        metavar="DEVICE",
        nargs="?",
        const=True,
        help="with --on: have XLA's own compiler compile the step for those devices, which need not be present, or for "
        'DEVICE, as in "cpu", and print its figures beside the counted ones',
    )
    parser.add_argument(
        "--no-verify",
        dest="verify",
        action="store_const",
        const=False,
        help="with --on: count without XLA's compiler for those devices, although it is installed",
    )
    parser.add_argument(
        "--remat",
        metavar="LAYERS",
        help="with --on: recompute the activations inside of these layers in the backward pass (rematerialization): a "
        'regex for their paths, or "blocks", the repeated blocks of the model',
    )
    add_attention_option(parser)
    parser.add_argument(
        "--batch-dim",
        type=parse_batch_dim,
        metavar="DIM",
        help="the mesh dim over which the batch is sharded (several: replica,fsdp), for lint and --on; default: that "
        "of the rules for activations, or one with a usual name",
    )
    parser.add_argument(
        "--backend", choices=("jax", "tensorflow", "torch"), help="the backend that Keras runs on"
    )
    parser.add_argument(
        "--library",
        choices=tuple(ADAPTERS),
        help="the library of the model; default: found from the function and its model",
    )


def add_partial_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--partial`, which accepts a plan that lacks weights."""
    parser.add_argument(
        "--partial",
        action="store_true",
        help="accept a plan of a model whose layers do not all have weights yet; without it the exit code is 2",
    )


def add_attention_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--fuse-attention`, which counts attention as a fused kernel although the model calls none."""
    parser.add_argument(
        "--fuse-attention",
        action="store_true",
        help="with --on: count attention as one fused kernel (flash attention), which keeps no scores in memory, "
        "although the model as it is traced here calls none",
    )


def load_or_make_plans(names: Sequence[str], options: Any) -> list[Plan]:
    """Return the plans of all models and plan files that a command names, in order."""
    model_options = [f"--{name.replace('_', '-')}" for name in _MODEL_OPTIONS if getattr(options, name)]
    if model_options and all(map(_is_plan_file, names)):
        raise LayoutMapError(
            f"{model_options[0]} needs a model, but {names[0]} is the file of a plan",
            why="the plan in the file has its own mesh, rules and variables",
            fix=f"leave out {', '.join(model_options)}, or name the model",
        )
    # Planning can take minutes, so read all files first to find a misspelled name early.
    plans = {
        name: require_complete_plan(read_plan_file(name), name, options)
        for name in names
        if _is_plan_file(name)
    }
    return [
        plans[name] if name in plans else require_complete_plan(plan_model(name, options), name, options)
        for name in names
    ]


def format_lint_command(name: str, options: Any) -> str:
    """Return the command that lints a model, or the file of a plan, with the same options as this command."""
    words = ["layoutmap", "lint", name]
    for option in (*_MODEL_OPTIONS, "batch_dim", "partial"):
        value, flag = getattr(options, option, None), f"--{option.replace('_', '-')}"
        if option == "batch_dim" and value:
            words += [flag, ",".join(list_batch_dims(value))]
        elif option == "verify" and value is False:
            words.append("--no-verify")
        elif value:
            words += [flag, *(value if option == "inputs" else [] if value is True else [str(value)])]
    return shlex.join(words)


def require_complete_plan(plan: Plan, name: str, options: Any) -> Plan:
    """Return the plan unchanged. Raise if it lacks weights of its model, unless `--partial` is given."""
    missing = find_unbuilt_layers_problem(plan)
    if missing is None or options.partial:
        return plan
    if _is_plan_file(name):
        fix = "write the file again from the model, with --inputs"
    elif options.inputs:
        fix = "name --inputs that reach these layers, or remove layers that the model never calls"
    else:
        fix = 'describe its inputs, as in --inputs "float32[8,128]", or "int32[8,128]" for tokens'
    raise LayoutMapError(
        f"{name}: the plan is incomplete: {missing.what}",
        why=missing.why,
        fix=f"{fix}; or accept the incomplete plan: --partial",
    )


def _is_plan_file(name: str) -> bool:
    return Path(name).suffix == ".json"


def read_plan_file(name: str) -> Plan:
    """Return the plan in a JSON file."""
    text = _read_text_file(name)
    with _add_file_to_errors(name):
        return Plan.from_json(text)


def load_model_function(name: str, options: Any) -> tuple[Callable[[], Any], str | None]:
    """Return the function that creates the model of this name, and the library of the model, or `None` if unknown."""
    if published := find_published_model(name):
        return make_published_model_function(published, options.dtype), options.library or "keras"
    return import_function(*parse_function_name(name)), options.library


def plan_model(name: str, options: Any, layout_map: LayoutMap | None = None) -> Plan:
    """Return the plan of a model that a command names.

    Args:
        name: The model, as `package.module:function` or as a published one.
        options: The options of `add_model_options`.
        layout_map: The rules; `None`: the rules or the preset that the options name.
    """
    inputs = parse_inputs(options.inputs)
    if options.backend:
        os.environ["KERAS_BACKEND"] = options.backend
    elif options.on:
        # Costs can be computed only on JAX, but Keras's default backend is TensorFlow, so change the default.
        os.environ.setdefault("KERAS_BACKEND", "jax")
    mesh = Mesh(None, options.mesh) if options.mesh else None
    model = find_published_model(name)
    parse_function_name(name)  # raises for an invalid name, before any file is read
    note = ""
    if layout_map is None:
        layout_map = make_preset_layout_map(options, mesh, model)
        note = f" by preset {model.preset!r}" if model and not (options.rules or options.preset) else ""
    if layout_map is None:
        layout_map = load_layout_map_file(options.rules, mesh) if options.rules else LayoutMap(mesh)
    print_text(f"layoutmap: planning {name}{note}", sys.stderr)
    with isolate_users_code(name, backend_fix="add --backend {}"):
        make_model, library = load_model_function(name, options)
        if layout_map.mesh is None:
            raise LayoutMapError(
                f"{name}: the layout map has no mesh",
                why="neither a rules file nor a mesh is named",
                fix="add --rules FILE, which layoutmap suggest writes, or --mesh, as in --mesh batch=2,model=4",
            )
        if library is None:
            check_library_can_be_found(make_model)
        if options.optimizer:
            make_model = _make_model_function_with_optimizer(make_model, options)
        return make_plan(
            make_model,
            layout_map,
            inputs=inputs,
            library=library,
            on=options.on,
            batch_dim=options.batch_dim if options.on else None,
            verify=options.verify,
            remat=options.remat,
            fuse_attention=options.fuse_attention,
            device_memory=getattr(options, "device_memory", None),
            advise=hasattr(options, "device_memory"),  # only the command `plan` shows a verdict with advice
        )


def load_layout_map_file(path: str, mesh: Mesh | None) -> LayoutMap:
    """Return the layout map of a rules file, on `mesh`, or on the mesh that the file names if `mesh` is `None`."""
    text = _read_text_file(path)
    with _add_file_to_errors(path):
        if mesh is None and parse_rules_file(text).dims is None:
            raise LayoutMapError(
                "the mesh is missing",
                why="the rules name none",
                fix="add a mesh, as in --mesh batch=2,model=4",
            )
        return LayoutMap.from_yaml(text, mesh)


def read_step_explanation_file(name: str) -> Any:
    """Return the explanation of a compiled step from a JSON file."""
    try:
        found: Any = json.loads(_read_text_file(name))
    except ValueError as error:
        raise LayoutMapError(
            f"{name} is not JSON",
            why=str(error),
            fix="write it with json.dump(step.explain(..).to_json(), file)",
        ) from error
    return found


def check_and_count_file_rules(name: str) -> int:
    """Check a rules file, and return the number of rules. In a file without a mesh, rules may name any dims."""
    text = _read_text_file(name)
    with _add_file_to_errors(name):
        fields = parse_rules_file(text)
        named = [spec for specs in (*fields.rules.values(), *fields.activations.values()) for spec in specs]
        dims = {dim for spec in named if spec for dim in ([spec] if isinstance(spec, str) else spec)} - {
            UNSHARDED
        }
        mesh = Mesh(None, [(dim, 1) for dim in sorted(dims)]) if fields.dims is None else None
        return len(LayoutMap.from_yaml(text, mesh).rules)


def _make_model_function_with_optimizer(make_model: Callable[[], Any], options: Any) -> Callable[[], Any]:
    """Return a function that creates a model with the optimizer of `--optimizer`, so that its slots are planned."""

    def make_model_with_optimizer() -> Any:
        model = make_model()
        adapter = find_model_adapter(model)
        if adapter is None:
            return model  # planning a model of an unknown library raises a clearer error
        if adapter.name != "keras" and not options.on:
            raise LayoutMapError(
                f"--optimizer {options.optimizer} has no effect without --on: {type(model).__name__} is not a Keras "
                "model",
                why="the table of a plan has slots only for a Keras model, which contains its optimizer; for other "
                "models, slots are in the cost of a training step",
                fix='add --on and --inputs, as in --on h100:8 --inputs "float32[8,128]", or leave --optimizer out',
            )
        try:
            return require_capability(adapter, TrainingAdapter, "--optimizer").set_optimizer(
                model, options.optimizer
            )
        except ScopeError as error:
            raise LayoutMapError(
                f"--optimizer {options.optimizer} cannot be used",
                facts=error.facts,
                why=error.why,
                fix="use adamw, sgd, ...",
            ) from error

    return make_model_with_optimizer


def check_library_can_be_found(make_model: Callable[[], Any]) -> None:
    """Raise if no model library is imported, and the code of the function refers to nothing that may import one."""
    try:
        if choose_library_to_import(make_model) is None:
            get_adapter_of_imported_library()
    except ScopeError as error:
        raise ScopeError(error.what, why=error.why, fix=f"pass --library {' or '.join(ADAPTERS)}") from error


def parse_inputs(texts: Sequence[str] | None) -> Any:
    """Return the example inputs of `--inputs`: one input, a list, a dict by name, or `None` without the option."""
    if not texts:
        return None
    inputs = [_parse_input(text) for text in texts]
    names = [name for name, _ in inputs]
    if len(inputs) > 1 and (None in names or len(set(names)) < len(names)) and any(names):
        raise LayoutMapError(
            f"--inputs {' '.join(texts)} is ambiguous",
            why="two inputs have the same name"
            if None not in names
            else "some inputs have a name and some have none",
            fix='name all of them, as in --inputs "tokens=int32[8,16]" "mask=bool[8,16]", or none',
        )
    if names[0]:
        return dict(inputs)
    return inputs[0][1] if len(inputs) == 1 else [each for _, each in inputs]


def _parse_input(text: str) -> tuple[str | None, _ModelInput]:
    """Return the name of an input, or `None`, and its shape and dtype, from a text such as `tokens=int32[8,16]`."""
    found = re.fullmatch(r"(?:(\w+)=)?(\w+)\[([0-9]{1,18}(?:, *[0-9]{1,18})*|)\]", text)
    if found is None or found[2] not in _DTYPES:
        raise LayoutMapError(
            f"--inputs {text!r} is not a dtype with a shape",
            facts={"dtypes": ", ".join(_DTYPES)} if found else {},
            why="an input needs a dtype and a shape",
            fix='write it as in --inputs "float32[8,128]", or "name=int32[8,16]" for each of several',
        )
    return found[1], _ModelInput(tuple(map(int, filter(None, found[3].split(",")))), found[2])


@contextlib.contextmanager
def _add_file_to_errors(path: str) -> Generator[None]:
    """Add the path of a file to errors about its content that the block raises."""
    try:
        yield
    except RecursionError as error:
        raise LayoutMapError(
            f"{path} is nested too deeply",
            why="layoutmap never writes such a file",
            fix="write the file again",
        ) from error
    except LayoutMapError as error:
        raise LayoutMapError(
            f"{path}: {error.what}", facts=error.facts, why=error.why, fix=error.fix
        ) from error


def _read_text_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise LayoutMapError(
            f"{path} cannot be read",
            why=f"it is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}",
            fix="save the file as UTF-8, or name another file",
        ) from error
    except (OSError, ValueError) as error:  # ValueError: the path contains a zero byte
        raise LayoutMapError(
            f"{path} cannot be read",
            why=getattr(error, "strerror", None) or str(error),
            fix="name a file that exists; relative paths start at the current folder",
        ) from error
