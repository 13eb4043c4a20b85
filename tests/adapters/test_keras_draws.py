"""From Keras's initializers to draws: what is shared, and what the plan says is initialized globally."""

import importlib

import keras
import numpy as np
import pytest

import layoutmap as lm
from layoutmap.adapters.keras.initializers import convert_initializer, explain_why_initialized_unsharded
from layoutmap.adapters.keras.protocol import get_backend, get_keras_backend_name

PROCESSES = ("jax", "tensorflow", "torch")
I = keras.initializers  # noqa: E741 - as Keras's users abbreviate it
SHAPE = (64, 64)
pytestmark = [
    pytest.mark.every_case,
    pytest.mark.every_backend,
    pytest.mark.filterwarnings(
        # Torch 2.13's own tensors know only the older form of __array__.
        "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
    ),
]


@pytest.mark.parametrize(
    "initializer",
    [
        I.Zeros(),
        I.Ones(),
        I.Constant(0.5),
        I.Constant(np.arange(64 * 64, dtype="float32").reshape(SHAPE)),
        I.Identity(),
        I.RandomNormal(),
        I.RandomUniform(),
        I.TruncatedNormal(mean=1.0),
        I.GlorotUniform(),
        I.HeNormal(),
        I.VarianceScaling(distribution="untruncated_normal"),
        I.Orthogonal(),
    ],
    ids=lambda initializer: type(initializer).__name__,
)
def test_the_plan_names_what_the_engine_initializes_globally(initializer):
    """A dry run says of an initializer what the engine finds out when it traces it."""
    port = get_backend(get_keras_backend_name())
    made = convert_initializer(initializer, SHAPE, "float32")

    assert must_be_global(port.engine_name, made) == bool(
        explain_why_initialized_unsharded(initializer, port.global_init_reasons)
    )


def must_be_global(engine_name, made):
    """Whether an engine that traces an initializer finds that it cannot be computed in shards."""
    if made.blocks is not None or made.program is None:
        return made.blocks is None
    where = {"torch": "deferred_init.tape", "tensorflow": "pieces", "jax": "programs"}[engine_name]
    programs = importlib.import_module(f"layoutmap.engines.{engine_name}.{where}")
    names = {"torch": "trace_recipe", "tensorflow": "PiecewiseInitializer", "jax": "trace_program"}
    traced = getattr(programs, names[engine_name])(made.program.function, made.program.seed)
    return bool(
        programs.explain_why_sharding_changes_values(traced) if engine_name == "jax" else traced.why_global
    )


def test_draws_that_differ_in_a_digit_are_not_one_program():
    """Settings that print alike and are not equal make other programs: each variable has its own values."""
    close = [
        keras.ops.convert_to_tensor(np.float32(0.1)),
        keras.ops.convert_to_tensor(np.nextafter(np.float32(0.1), 1)),
    ]
    draws = [convert_initializer(I.RandomNormal(stddev=stddev, seed=1), SHAPE, "float32") for stddev in close]
    arrays = [np.arange(4096, dtype="float32"), np.arange(4096, dtype="float32")]
    arrays[1][2000] = 0
    draws += [
        convert_initializer(I.Constant(keras.ops.convert_to_tensor(a)), (4096,), "float32") for a in arrays
    ]

    assert len(draws) == len({draw.program.key for draw in draws if draw.program})


def test_a_name_given_in_place_is_kept():
    """A name counts as given however the constructor takes it, even if it looks like one of Keras's."""

    class Named(keras.layers.Layer):
        def __init__(self, label):
            super().__init__(name=label)
            self.inner = keras.layers.Dense(4, use_bias=False)

        def call(self, x):
            return self.inner(x)

    def make_model():
        return keras.Sequential([keras.Input((4,)), Named("named_7"), Named(label="named_3")])

    plan = lm.plan(make_model, lm.LayoutMap(lm.create_mesh("model=2")))

    assert ["named_7.inner.kernel", "named_3.inner.kernel"] == [a.variable.path for a in plan.assignments]
