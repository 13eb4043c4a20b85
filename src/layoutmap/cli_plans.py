"""From what a command line names to a plan: the file of one, a function that makes a model, or a published model."""

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
    make_of,
    preset_of,
    refuse_unknown,
)
from layoutmap.errors import LayoutMapError
from layoutmap.layout_map import LayoutMap
from layoutmap.mesh import Mesh
from layoutmap.plan import Plan
from layoutmap.scope import plan as make_plan

__all__ = ["add_model_options", "plan_of", "plans_of"]

_OF_MODELS = ("rules", "preset", "model_dim", "fsdp_dim", "dtype", "mesh", "inputs", "optimizer")


@dataclass(frozen=True, slots=True)
class _Shaped:
    """What a model is called with: a shape and a type, and no values."""

    shape: tuple[int, ...]
    dtype: str


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What says how a model is planned."""
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


def plan_of(name: str, options: Any) -> Plan:
    """The plan of the one thing that a command names."""
    return plans_of([name], options)[0]


def plans_of(names: Sequence[str], options: Any) -> list[Plan]:
    """The plans of all that a command names.

    Raises:
        LayoutMapError: One cannot be made; or all are files, and there are options for models.
    """
    given = [f"--{name.replace('_', '-')}" for name in _OF_MODELS if getattr(options, name)]
    if given and all(map(_is_file, names)):
        raise LayoutMapError(
            f"{given[0]} is for a model, and {names[0]} is the file of a plan",
            why="a plan that was written has its mesh, its rules and its variables",
            mend=f"leave out {', '.join(given)}, or name the model",
        )
    return [
        Plan.from_json(_text_of(Path(name))) if _is_file(name) else _plan_of_model(name, options)
        for name in names
    ]


def _is_file(name: str) -> bool:
    return Path(name).suffix == ".json"


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
