"""Time building a model while its weights are read or set one by one: in Keras alone, in a scope, and in a plan.

python benchmarks/early.py [--layers 100 200 400]

Each time must grow linearly with the number of layers, because the library finds the path of one weight alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import keras
import numpy as np
from measure import make_parser, time_call

import layoutmap as lm

SIZE = 8
VALUES = [np.ones((SIZE, SIZE), "float32"), np.ones((SIZE,), "float32")]

AxisRoles = Callable[[Any], Any]


def read(layer: Any) -> None:
    """Read all weights of a layer."""
    for weight in layer.weights:
        np.asarray(weight)


def assign(layer: Any) -> None:
    """Set all weights of a layer."""
    layer.set_weights(VALUES)


class Stack(keras.layers.Layer):
    """A layer that builds its list of dense layers."""

    def __init__(self, count: int, use: AxisRoles):
        super().__init__(name="stack")
        self.dense = [keras.layers.Dense(SIZE) for _ in range(count)]
        self.use = use

    def build(self, shape: Any) -> None:
        for layer in self.dense:
            layer.build(shape)
            self.use(layer)

    def call(self, x: Any) -> Any:
        for layer in self.dense:
            x = layer(x)
        return x


def make_functional(count: int, use: AxisRoles) -> Any:
    """Return a functional model, and use each layer when it is built."""
    x = inputs = keras.Input((SIZE,))
    for number in range(count):
        layer = keras.layers.Dense(SIZE, name=f"d{number}")
        x = layer(x)
        use(layer)
    return keras.Model(inputs, x)


def make_stacked(count: int, use: AxisRoles) -> Any:
    """Return a model with one layer that builds and uses all others."""
    return keras.Sequential([keras.Input((SIZE,)), Stack(count, use)])


def build_in_scope(make: Callable[[], Any], layout_map: lm.LayoutMap) -> None:
    """Build a model in the scope of a layout map."""
    with layout_map.scope():
        make()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[100, 200, 400])
    counts = parser.parse_args().layers
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {r".*kernel": (None, "model")})
    build_in_scope(lambda: make_functional(2, read), layout_map)  # compiles the shared programs
    print(f"{'':<24} {'layers':>7} {'plain':>8} {'scope':>8} {'plan':>8} {'scope/plain':>12}")
    for name, maker in (("functional", make_functional), ("stacked", make_stacked)):
        for use in (read, assign):
            for count in counts:

                def make(maker: Any = maker, count: int = count, use: AxisRoles = use) -> Any:
                    return maker(count, use)

                alone, _ = time_call(make)
                in_scope, _ = time_call(lambda make=make: build_in_scope(make, layout_map))
                planned, _ = time_call(lambda make=make: lm.plan(make, layout_map))
                times = f"{alone:8.2f} {in_scope:8.2f} {planned:8.2f} {in_scope / alone:12.1f}"
                print(f"{name + ', ' + use.__name__:<24} {count:7} {times}", flush=True)


if __name__ == "__main__":
    main()
