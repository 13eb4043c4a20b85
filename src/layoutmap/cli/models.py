"""Find published models and the rule presets for their families.

`keras_hub:llama3_405b` names a published model. Its values are not loaded. Without other rules, it is planned with the
preset of its family.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from typing import Any

from layoutmap.core.errors import LayoutMapError
from layoutmap.core.mesh import Mesh
from layoutmap.rules import presets, zoo
from layoutmap.rules.zoo import PublishedModel
from layoutmap.scope.layout_map import LayoutMap


def add_preset_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for a preset, its dims, and a published model's dtype."""
    parser.add_argument(
        "--preset",
        choices=presets.list_presets(),
        metavar="NAME",
        help='the rules for a family of models, instead of a file; "layoutmap presets" lists them',
    )
    parser.add_argument(
        "--model-dim",
        metavar="DIM",
        help='the mesh dim over which a preset shards layers, if it is not "model"; "none": over none',
    )
    parser.add_argument(
        "--fsdp-dim",
        metavar="DIM",
        help="the mesh dim of the batch, if a preset is to shard weights over it as well (FSDP)",
    )
    parser.add_argument(
        "--dtype", metavar="POLICY", help="the Keras dtype policy of a published model, as in bfloat16"
    )


def format_presets() -> str:
    """Return a text that lists all presets, their purposes, and the published models that use them."""
    width = max(map(len, presets.list_presets())) + 2
    lines: list[str] = []
    for preset in presets.list_presets():
        lines.append(f"{preset:<{width}}{presets.describe_preset(preset)}")
        models = [model for model in zoo.list_models().values() if model.preset == preset]
        lines += [
            f"{'':<{width}}   {_format_model_name(model):<27}{model.num_parameters:>15,}" for model in models
        ]
    return "\n".join(lines)


def find_published_model(name: str) -> PublishedModel | None:
    """Return the published model with a name such as `keras_hub:llama3_405b`, or `None` for other names."""
    model = zoo.list_models().get(name.partition(":")[2])
    return model if model is not None and name == _format_model_name(model) else None


def check_published_model_exists(module: str, name: str) -> None:
    """Raise if `module` is a package of published models that lacks this name. The error lists the known names."""
    if any(model.package == module for model in zoo.list_models().values()):
        zoo.find_model(name)


def make_published_model_function(model: PublishedModel, dtype: str | None) -> Callable[[], Any]:
    """Return a function that creates a published model, with a Keras dtype policy unless `dtype` is `None`."""
    # keras-hub imports TensorFlow, which logs a lot, so show only fatal errors.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if dtype is None:
        return model.make
    try:
        importlib.import_module("keras").dtype_policies.get(dtype)
    except ValueError as error:
        raise LayoutMapError(
            f"--dtype {dtype} is unknown", why=str(error), fix="use float32, bfloat16 or mixed_bfloat16"
        ) from error
    return lambda: model.make(dtype=dtype)


def make_preset_layout_map(options: Any, mesh: Mesh | None, model: PublishedModel | None) -> LayoutMap | None:
    """Return the map of `--preset`, or of the published model's preset if `--rules` is not given, or `None`."""
    name = options.preset or (model.preset if model is not None and not options.rules else None)
    for option, value, condition, is_met in (
        ("--preset", options.preset, "without --rules", not options.rules),
        ("--model-dim", options.model_dim, "with a preset", name),
        ("--fsdp-dim", options.fsdp_dim, "with a preset", name),
        ("--dtype", options.dtype, "with a published model", model),
    ):
        if value and not is_met:
            raise LayoutMapError(
                f"{option} {value} has no effect",
                why=f"it is used only {condition}",
                fix=f"leave {option} out; layoutmap --help has examples",
            )
    if name is None:
        return None
    if mesh is None:
        raise LayoutMapError(
            f"preset {name!r}: the mesh is missing",
            why="the rules of a preset fit any mesh, so they do not name one",
            fix="add a mesh, as in --mesh batch=2,model=4",
        )
    model_dim = options.model_dim or "model"
    return LayoutMap.preset(
        name, mesh, model_dim=None if model_dim == "none" else model_dim, fsdp_dim=options.fsdp_dim
    )


def _format_model_name(model: PublishedModel) -> str:
    return f"{model.package}:{model.name}"
