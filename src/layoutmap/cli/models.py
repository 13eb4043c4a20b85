"""Find published models and the rule presets for their families.

`keras_hub:llama3_405b` names a published model. No values of it are loaded, and without other rules it has the preset
of its family.
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


def list_presets() -> str:
    """Return all presets, their purposes, and the published models that use them."""
    width = max(map(len, presets.list_presets())) + 2
    lines: list[str] = []
    for preset in presets.list_presets():
        lines.append(f"{preset:<{width}}{presets.describe_preset(preset)}")
        own = [model for model in zoo.list_models().values() if model.preset == preset]
        lines += [f"{'':<{width}}   {_format_name(model):<27}{model.num_parameters:>15,}" for model in own]
    return "\n".join(lines)


def find_published_model(name: str) -> PublishedModel | None:
    """Return the published model that a command-line name refers to, if any."""
    model = zoo.list_models().get(name.partition(":")[2])
    return model if model is not None and name == _format_name(model) else None


def refuse_unknown_model(module: str, name: str) -> None:
    """Raise with the known names if a package of published models lacks a name."""
    if any(model.package == module for model in zoo.list_models().values()):
        zoo.find_model(name)


def make_published_model(model: PublishedModel, dtype: str | None) -> Callable[[], Any]:
    """Return a function that builds a published model."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keras-hub imports TensorFlow, which logs to stderr
    if dtype is None:
        return model.make
    try:
        importlib.import_module("keras").dtype_policies.get(dtype)
    except ValueError as error:
        raise LayoutMapError(
            f"--dtype {dtype}", why=str(error), fix="use float32, bfloat16 or mixed_bfloat16"
        ) from error
    return lambda: model.make(dtype=dtype)


def choose_preset(options: Any, mesh: Mesh | None, model: PublishedModel | None) -> LayoutMap | None:
    """Return the requested preset, or a published model's own preset if there are no other rules."""
    name = options.preset or (model.preset if model is not None and not options.rules else None)
    for option, value, of, there in (
        ("--preset", options.preset, "instead of --rules", not options.rules),
        ("--model-dim", options.model_dim, "for presets", name),
        ("--fsdp-dim", options.fsdp_dim, "for presets", name),
        ("--dtype", options.dtype, "for published models", model),
    ):
        if value and not there:
            raise LayoutMapError(
                f"{option} {value} is {of}",
                why="it has no effect here",
                fix="leave it out; layoutmap --help has examples",
            )
    if name is None:
        return None
    if mesh is None:
        raise LayoutMapError(
            f"preset {name!r}: the mesh is missing",
            why="the rules of a preset fit any mesh, so they do not name one",
            fix="add one, as in --mesh batch=2,model=4",
        )
    model_dim = options.model_dim or "model"
    return LayoutMap.preset(
        name, mesh, model_dim=None if model_dim == "none" else model_dim, fsdp_dim=options.fsdp_dim
    )


def _format_name(model: PublishedModel) -> str:
    return f"{model.package}:{model.name}"
