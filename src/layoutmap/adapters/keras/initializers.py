"""Convert Keras initializers to initializers of this library.

Keras draws an initializer's seed as an integer when the initializer is *constructed*, so deferring the call changes
no value. Where the seed is a generator, Keras draws from it when the variable is made: see `Materializer.draw_before`.
The seed is lifted out of the initializer and handed to the program as an argument: then all variables of one
shape and one kind of initializer share one compiled program.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from layoutmap.adapters.keras.private import draw_seed
from layoutmap.core.initializers import Initializer, Program


def find_global_reason(initializer: object, global_init: Mapping[str, str]) -> str:
    """Return why a variable's global value must be computed on one device, or "" (see `Backend.global_init`)."""
    if not _is_keras_initializer(initializer):
        return f"{_format_name(initializer)} is not one of Keras's own initializers, so it cannot be split"
    if isinstance(initializer, keras.initializers.Constant) and math.prod(np.shape(initializer.value)) == 1:
        return ""
    return global_init.get(type(initializer).__name__, "")


def make_initializer(
    initializer: Any, shape: tuple[int, ...], dtype: str, plain: Callable[[object], Any] = lambda seed: seed
) -> Initializer:
    """Convert the initializer of a variable. `plain` unshards a seed if its generator is sharded."""
    if not _is_keras_initializer(initializer):
        return Initializer(lambda: keras.ops.convert_to_tensor(initializer(shape, dtype=dtype), dtype=dtype))
    config = dict(initializer.get_config())
    config.pop("seed", None)
    seed: object = ()
    if hasattr(initializer, "seed"):
        seed = plain(draw_seed(initializer.seed))  # advances the seed generator by one draw
    seeded = copy.copy(initializer)

    def compute_value(seed: object) -> object:
        own = copy.copy(seeded)
        if hasattr(own, "seed"):
            own.seed = _FixedSeed(seed)
        return keras.ops.convert_to_tensor(own(shape, dtype=dtype), dtype=dtype)

    settings = json.dumps(config, sort_keys=True, default=_encode_setting)
    key = (type(initializer), settings, shape, dtype)
    return Initializer(
        lambda: compute_value(seed),
        Program(key, seed, compute_value),
        recipe=lambda: f"{type(initializer).__name__} {settings}",
    )


def make_seed_initializer(initializer: keras.Initializer, shape: tuple[int, ...], dtype: str) -> Initializer:
    """Return the initializer of a seed generator's state. Processes with equal seeds get equal states."""

    def compute_state() -> object:
        return keras.ops.convert_to_tensor(initializer(shape, dtype=dtype), dtype=dtype)

    return Initializer(compute_state, Program(("seed", shape, dtype), compute_state(), lambda seed: seed))


def has_seed_generator(initializer: object) -> bool:
    """Return whether a Keras initializer draws its seed from a generator."""
    return _is_keras_initializer(initializer) and isinstance(
        getattr(initializer, "seed", None), keras.random.SeedGenerator
    )


def can_draw(initializer: object) -> bool:
    """Return whether a call of an initializer may draw from a generator."""
    return has_seed_generator(initializer) or not _is_keras_initializer(initializer)


def freeze_seed(initializer: Any, plain: Callable[[object], object]) -> object:
    """Copy an initializer, with the next seed of its generator fixed."""
    drawn = copy.copy(initializer)
    drawn.seed = _FixedSeed(plain(draw_seed(initializer.seed)))
    return drawn


class _FixedSeed(keras.random.SeedGenerator):
    """Hold a drawn seed in the form that every backend accepts."""

    def __init__(self, seed: object):
        # Skip the base constructor, which creates a variable, and the attribute tracking.
        self.__dict__["seed"] = seed

    def next(self, ordered: bool = True) -> object:
        """Return the seed."""
        return self.__dict__["seed"]


def _encode_setting(value: object) -> object:
    """Format a setting that JSON cannot store as unambiguous text. `repr` would shorten arrays."""
    if not hasattr(value, "shape"):
        return repr(value)
    array = np.asarray(value)
    return [str(array.dtype), list(array.shape), array.tobytes().hex()]


def _is_keras_initializer(initializer: object) -> bool:
    return isinstance(initializer, keras.initializers.Initializer) and type(
        initializer
    ).__module__.startswith("keras.src.initializers.")


def _format_name(initializer: Any) -> str:
    kind = initializer if hasattr(initializer, "__qualname__") else type(initializer)
    return f"{kind.__module__}.{kind.__qualname__}"
