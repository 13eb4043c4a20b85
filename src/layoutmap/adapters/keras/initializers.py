"""Convert Keras initializers to initializers of layoutmap.

Keras draws an initializer's seed as an integer when the initializer is *constructed*, so deferring the call changes
no value. If the seed is a generator, Keras draws from it when it creates the variable: see
`Materializer.draw_seeds_of_earlier_variables`. The seed is an argument of the program that computes the value, so that
all variables with one shape and one kind of initializer share a compiled program.
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
from layoutmap.core.initializers import Initializer, InitializerProgram


def explain_why_initialized_unsharded(initializer: object, global_init_reasons: Mapping[str, str]) -> str:
    """Return why an initializer must compute a whole value on one device, or an empty text if it need not."""
    if not _is_keras_initializer(initializer):
        return f"{_format_qualified_name(initializer)} is not an initializer of Keras, so it cannot compute shards"
    if isinstance(initializer, keras.initializers.Constant) and math.prod(np.shape(initializer.value)) == 1:
        return ""
    return global_init_reasons.get(type(initializer).__name__, "")


def convert_initializer(
    initializer: Any, shape: tuple[int, ...], dtype: str, unshard: Callable[[object], Any] = lambda seed: seed
) -> Initializer:
    """Return an initializer of layoutmap that computes a Keras initializer's values. `unshard` unshards its seed."""
    if not _is_keras_initializer(initializer):
        return Initializer(lambda: keras.ops.convert_to_tensor(initializer(shape, dtype=dtype), dtype=dtype))
    config = dict(initializer.get_config())
    config.pop("seed", None)
    seed: object = ()
    if hasattr(initializer, "seed"):
        seed = unshard(draw_seed(initializer.seed))  # advances the seed generator, as in unsharded Keras
    seeded = copy.copy(initializer)

    def compute_value(seed: object) -> object:
        own = copy.copy(seeded)
        if hasattr(own, "seed"):
            own.seed = _FixedSeedGenerator(seed)
        return keras.ops.convert_to_tensor(own(shape, dtype=dtype), dtype=dtype)

    settings = json.dumps(config, sort_keys=True, default=_encode_setting_for_json)
    key = (type(initializer), settings, shape, dtype)
    return Initializer(
        lambda: compute_value(seed),
        InitializerProgram(key, seed, compute_value),
        recipe=lambda: f"{type(initializer).__name__} {settings}",
    )


def make_seed_initializer(initializer: keras.Initializer, shape: tuple[int, ...], dtype: str) -> Initializer:
    """Return the initializer of a seed generator's state. Processes with equal seeds get equal states."""

    def compute_seed_state() -> object:
        return keras.ops.convert_to_tensor(initializer(shape, dtype=dtype), dtype=dtype)

    return Initializer(
        compute_seed_state,
        InitializerProgram(("seed", shape, dtype), compute_seed_state(), lambda seed: seed),
    )


def has_seed_generator(initializer: object) -> bool:
    """Return whether a Keras initializer draws its seed from a generator."""
    return _is_keras_initializer(initializer) and isinstance(
        getattr(initializer, "seed", None), keras.random.SeedGenerator
    )


def can_draw_seeds(initializer: object) -> bool:
    """Return whether a call of an initializer may draw a seed from a generator."""
    return has_seed_generator(initializer) or not _is_keras_initializer(initializer)


def copy_with_fixed_seed(initializer: Any, unshard: Callable[[object], object]) -> object:
    """Draw a seed from an initializer's generator. Return a copy of the initializer that always uses this seed."""
    initializer_copy = copy.copy(initializer)
    initializer_copy.seed = _FixedSeedGenerator(unshard(draw_seed(initializer.seed)))
    return initializer_copy


class _FixedSeedGenerator(keras.random.SeedGenerator):
    """Seed generator that always returns one given seed, in the form that every backend accepts."""

    def __init__(self, seed: object):
        # The base constructor would create a variable, and __setattr__ would track it, so skip both.
        self.__dict__["seed"] = seed

    def next(self, ordered: bool = True) -> object:
        """Return the fixed seed."""
        return self.__dict__["seed"]


def _encode_setting_for_json(value: object) -> object:
    """Return a setting in a form for JSON: an array as dtype, shape, and bytes, anything else as its `repr`."""
    if not hasattr(value, "shape"):
        return repr(value)
    array = np.asarray(value)
    return [str(array.dtype), list(array.shape), array.tobytes().hex()]


def _is_keras_initializer(initializer: object) -> bool:
    return isinstance(initializer, keras.initializers.Initializer) and type(
        initializer
    ).__module__.startswith("keras.src.initializers.")


def _format_qualified_name(initializer: Any) -> str:
    """Return the module and the name of an initializer's class, or of the initializer itself if it is a function."""
    kind = initializer if hasattr(initializer, "__qualname__") else type(initializer)
    return f"{kind.__module__}.{kind.__qualname__}"
