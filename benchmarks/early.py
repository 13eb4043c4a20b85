"""Seconds to build a model whose weights are read or set one by one meanwhile: plain Keras, a scope, a plan.

python benchmarks/early.py [--layers 100 200 400]

Each must grow as the number of layers does: the path of one weight is found by itself.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import keras
import numpy as np

import layoutmap as lm

SIZE = 8
VALUES = [np.ones((SIZE, SIZE), "float32"), np.ones((SIZE,), "float32")]

Use = Callable[[Any], Any]


def read(layer: Any) -> None:
    for weight in layer.weights:
        np.asarray(weight)


def assign(layer: Any) -> None:
    layer.set_weights(VALUES)


class Stack(keras.layers.Layer):
    """Layers in a list, built by the layer that holds them."""

    def __init__(self, count: int, use: Use):
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


def functional(count: int, use: Use) -> Any:
    x = inputs = keras.Input((SIZE,))
    for number in range(count):
        layer = keras.layers.Dense(SIZE, name=f"d{number}")
        x = layer(x)
        use(layer)
    return keras.Model(inputs, x)


def stacked(count: int, use: Use) -> Any:
    return keras.Sequential([keras.Input((SIZE,)), Stack(count, use)])


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def scoped(make: Callable[[], Any], layout_map: lm.LayoutMap) -> None:
    with layout_map.scope():
        make()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[100, 200, 400])
    counts = parser.parse_args().layers
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {r".*kernel": (None, "model")})
    scoped(lambda: functional(2, read), layout_map)  # what is compiled once
    print(f"{'':<24} {'layers':>7} {'plain':>8} {'scope':>8} {'plan':>8} {'scope/plain':>12}")
    for maker in (functional, stacked):
        for use in (read, assign):
            for count in counts:

                def make(maker: Any = maker, count: int = count, use: Use = use) -> Any:
                    return maker(count, use)

                plain, in_scope = seconds(make), seconds(lambda make=make: scoped(make, layout_map))
                planned = seconds(lambda make=make: lm.plan(make, layout_map))
                times = f"{plain:8.2f} {in_scope:8.2f} {planned:8.2f} {in_scope / plain:12.1f}"
                print(f"{maker.__name__ + ', ' + use.__name__:<24} {count:7} {times}", flush=True)


if __name__ == "__main__":
    main()
