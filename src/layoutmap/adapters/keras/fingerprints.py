"""Compute the fingerprint of a Keras model from its layers, connections, and `compile` settings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import keras

from layoutmap.adapters.fingerprints import format_function_fingerprint, format_setting
from layoutmap.adapters.keras.names import renumber_names
from layoutmap.adapters.keras.paths import find_layers
from layoutmap.adapters.keras.private import Functional
from layoutmap.engines.agreement import NamedText


def describe_step_program(model: keras.Model, step_name: str) -> Iterator[NamedText]:
    """Yield pairs of a name and a text for all that determines the result of a step, such as `"train"`."""
    layers: dict[int, tuple[str, Any]] = {}
    for path, layer in [("", model), *find_layers(model)]:
        layers.setdefault(id(layer), (path, layer))
    for path, layer in layers.values():
        kind = type(layer)
        name = f'{kind.__name__} "{path}"' if path else kind.__name__
        yield path or "model", f"{kind.__qualname__} in {layer.compute_dtype}"
        if kind.__module__.startswith("keras."):
            yield from _describe_object_settings(f"{name}: ", layer)
        else:
            yield f"{name}: call", format_function_fingerprint(kind.call)
        if isinstance(layer, Functional):
            names = dict(zip(map(id, layer.operations), renumber_names(layer.operations), strict=True))
            for node in (node for nodes in layer._nodes_by_depth.values() for node in nodes):
                inputs = [names.get(id(parent.operation)) for parent in node.parent_nodes]
                yield f"{name}: inputs of {names[id(node.operation)]}", str(inputs)
    if step_name != "predict" and model.compiled:
        for method in (f"{step_name}_step", "compute_loss"):
            yield method, format_function_fingerprint(getattr(type(model), method))
        for key, value in model._compile_config.config.items():
            if key != "optimizer" or step_name == "train":
                yield key, type(value).__qualname__ if hasattr(value, "get_config") else format_setting(value)
                yield from _describe_object_settings(f"{type(value).__name__}: ", value)


def _describe_object_settings(prefix: str, keras_object: Any) -> Iterator[NamedText]:
    """Yield the scalar settings and the functions in a Keras object's configuration, if it has one."""
    try:
        # Keras warns that a lambda cannot be saved, which does not matter here.
        with warnings.catch_warnings(action="ignore"):
            config = keras_object.get_config()
    except Exception:  # a custom layer may have no config, so leave out its settings
        return
    for key, value in config.items():
        # The config of a function has its file and line, which may differ by process, so describe the function.
        own = getattr(keras_object, key, None)
        if callable(own) and isinstance(value, dict):
            yield f"{prefix}{key}", format_function_fingerprint(own)
        # The processes compare seeds separately, so leave seeds out of the description.
        elif key not in ("name", "seed") and not isinstance(value, (dict, list)):
            yield f"{prefix}{key}", format_setting(value)
