"""The program of a Keras model as texts: its layers with their settings, how they are joined, how it is trained.

What is compared elsewhere is left out: first values, which initializers and seeds determine. Names that Keras numbers
are without the number, which depends on what was made before.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import keras

from layoutmap.adapters.keras.names import split_number, stable_names
from layoutmap.adapters.keras.paths import find_layers
from layoutmap.adapters.keras.private import Functional
from layoutmap.adapters.programs import Program, is_users, versions
from layoutmap.engines.agreement import Trait

_LEFT_OUT = ("build_config", "module", "registered_name", "seed", "shared_object_id")
_STEPS = ("compute_loss", "compute_metrics", "predict_step", "test_step", "train_step")
_GRAPH = ("layers", "input_layers", "output_layers")


def program_of(model: object, step: str) -> list[Trait]:
    """The program of a step of a model, in parts that processes compare.

    Args:
        model: The model.
        step: `"train"`, `"test"` or `"predict"`.
    """
    program = Program()
    layers: dict[int, tuple[str, object]] = {}
    for path, layer in [("", model), *find_layers(model)]:
        layers.setdefault(id(layer), (path, layer))
    for kind in dict.fromkeys(type(layer) for _, layer in layers.values()):
        program.methods(kind, ["call", *_STEPS])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lambdas that cannot be saved
        for path, layer in layers.values():
            _add_layer(program, path, layer)
        if step != "predict":
            _add_training(program, model, with_optimizer=step == "train")
    backend = {"jax": ("jax", "jaxlib")}.get(keras.backend.backend(), (keras.backend.backend(),))
    return [*versions("keras", *backend), *program.settings, *program.lines]


def _add_layer(program: Program, path: str, layer: object) -> None:
    kind = type(layer)
    name = f'{kind.__name__} "{path}"' if path else kind.__name__
    program.value(path or "model", kind)
    own = is_users(kind)
    for key, value in _config(layer).items():
        if key not in _GRAPH:
            program.value(f"{name}: {key}", _function_or(value, layer, key), may_be_number=own)
    for key, value in vars(layer).items():
        if own and key in program.read:
            program.value(f"{name}: {key}", value, may_be_number=True)
    if isinstance(layer, Functional):
        for inputs_of, inputs in _graph(layer):
            program.value(f"{name}: inputs of {inputs_of}", inputs)


def _config(thing: Any) -> dict[str, object]:
    """The configuration that Keras would make an object anew from, and its kind; else the kind alone."""
    try:
        return _unpacked(thing.get_config())
    except Exception:  # it is a user's, and need not have one
        return {}


def _function_or(value: object, layer: object, key: str) -> object:
    """A setting; a function itself, where Keras has a dump of its code with its file and its line."""
    held = getattr(layer, key, None)
    return held if isinstance(held, FunctionType) and not isinstance(value, str) else value


def _unpacked(value: object) -> Any:
    """Settings, and those of objects in them."""
    if isinstance(value, Mapping):
        kept = {key: each for key, each in value.items() if key not in _LEFT_OUT}
        return {
            key: split_number(each)[0] if key == "name" and isinstance(each, str) else _unpacked(each)
            for key, each in kept.items()
            if not str(key).endswith("_initializer")
        }
    if isinstance(value, (list, tuple)):
        return [_unpacked(each) for each in value]
    if hasattr(value, "get_config") and not isinstance(value, type):
        return {"class_name": type(value).__name__, **_config(value)}
    return value


def _graph(model: keras.Model) -> Iterator[tuple[str, list[object]]]:
    """How a Functional model joins its layers: for each call of one what it is called with."""
    operations = model.operations
    names = dict(zip(map(id, operations), stable_names(operations), strict=True))

    def source(value: object) -> object:
        history = getattr(value, "_keras_history", None)
        if history is None:
            return value
        name = names.get(id(history.operation), "")
        return f"{name}[{history.tensor_index}]" if history.tensor_index else name

    for nodes in model._nodes_by_depth.values():
        for node in nodes:
            called = node.operation
            inputs = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
            yield f'{type(called).__name__} "{names[id(called)]}"', [source(each) for each in inputs]


def _add_training(program: Program, model: Any, *, with_optimizer: bool) -> None:
    """Add what `compile` was called with."""
    compiled = getattr(model, "_compile_config", None)
    options = dict(compiled.config) if compiled is not None else {}
    options.pop("optimizer", None)
    if with_optimizer and model.optimizer is not None:
        program.value("optimizer", type(model.optimizer))
        for key, value in _config(model.optimizer).items():
            program.value(f"{type(model.optimizer).__name__}: {key}", value)
    for key, value in options.items():
        program.value(key, _unpacked(value))
