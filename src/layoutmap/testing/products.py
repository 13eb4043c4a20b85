"""Products of float32 in TF32: found by a product, since settings of frameworks have several places."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from layoutmap.core.blocks import NumpyArray
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines import get_engine

ALLOW_TF32 = {
    "jax": "jax.config.update('jax_default_matmul_precision', 'tensorfloat32' if {} else 'highest')",
    "torch": "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = {}",
    "tensorflow": "tensorflow.config.experimental.enable_tensor_float_32_execution({})",
}
"""The line of a program that has products computed in TF32 where devices have it, or not, by engine.

It is run here as it stands in the program that is printed of a case, so that both set the same.
"""
_FLOAT32 = "in float32"
_COARSE = 1e-5
"""Products of float32 differ by less from exact ones, and those of TF32 and bfloat16 by more."""


@contextmanager
def tf32(engine: str, mesh: Mesh) -> Iterator[bool]:
    """A block in which products are computed in TF32, if the value is true: devices have it. After it they are not."""
    allow = f"import {engine}\n{ALLOW_TF32[engine]}"
    exec(allow.format(True))
    try:
        yield type_of_products(partial(_multiplied, engine, mesh)) != _FLOAT32
    finally:
        exec(allow.format(False))


def product_facts(engine: str, mesh: Mesh, *, simulated: bool) -> dict[str, str]:
    """Return how products of float32 are computed, for people; on devices that are not simulated not in TF32 from here.

    Args:
        engine: The engine's name.
        mesh: Its devices.
        simulated: Whether they are simulated.
    """
    has_tf32 = False
    if not simulated:
        with tf32(engine, mesh) as has_tf32:
            pass
    said = type_of_products(partial(_multiplied, engine, mesh))
    return {"float32 products": said, "TF32": "tried, too" if has_tf32 else "not on these devices"}


def type_of_products(multiplied: Callable[[NumpyArray, NumpyArray], NumpyArray]) -> str:
    """Return how products of float32 are rounded: in float32, or as TF32 and bfloat16 are.

    Args:
        multiplied: Multiplies two matrices on a device.
    """
    a, b = np.random.default_rng(0).normal(size=(2, 128, 128)).astype("float32")
    exact = a.astype("float64") @ b.astype("float64")
    error = float(np.abs(multiplied(a, b) - exact).max() / np.abs(exact).max())
    return _FLOAT32 if error < _COARSE else f"in TF32 or bfloat16 (they differ by {error:.0e})"


def _multiplied(engine: str, mesh: Mesh, *matrices: NumpyArray) -> NumpyArray:
    held, layout = get_engine(engine), Layout.replicated(mesh, 2)
    arrays = [held.relayout(each, layout) for each in matrices]
    return held.to_numpy(held.call(operator.matmul, layout, arrays, {}))
