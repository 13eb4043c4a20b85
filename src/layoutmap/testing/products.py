"""Detect TF32 by the error of a matrix product, since frameworks have several settings for it."""

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
"""The line of a program that allows or forbids TF32, by engine.

A law executes the same line as the program that it prints for a failing case.
"""
_FLOAT32 = "in float32"
_MAX_FLOAT32_ERROR = 1e-5
"""The largest relative error of a float32 product. TF32 and bfloat16 have larger errors."""


@contextmanager
def allow_tf32_temporarily(engine: str, mesh: Mesh) -> Iterator[bool]:
    """Allow TF32 until the block ends, and forbid it then. Yield whether the devices use TF32 for products."""
    setting = f"import {engine}\n{ALLOW_TF32[engine]}"
    exec(setting.format(True))
    try:
        yield format_product_precision(partial(_multiply_on_mesh, engine, mesh)) != _FLOAT32
    finally:
        exec(setting.format(False))


def make_tf32_facts(engine: str, mesh: Mesh, *, simulated: bool) -> dict[str, str]:
    """Return facts about float32 products for a report. TF32 is forbidden afterwards, unless devices are simulated."""
    has_tf32 = False
    if not simulated:
        with allow_tf32_temporarily(engine, mesh) as has_tf32:
            pass
    description = format_product_precision(partial(_multiply_on_mesh, engine, mesh))
    return {"float32 products": description, "TF32": "tried, too" if has_tf32 else "not on these devices"}


def format_product_precision(multiply: Callable[[NumpyArray, NumpyArray], NumpyArray]) -> str:
    """Return a text that says whether float32 products are rounded to float32, or to TF32 or bfloat16."""
    a, b = np.random.default_rng(0).normal(size=(2, 128, 128)).astype("float32")
    exact = a.astype("float64") @ b.astype("float64")
    error = float(np.abs(multiply(a, b) - exact).max() / np.abs(exact).max())
    return _FLOAT32 if error < _MAX_FLOAT32_ERROR else f"in TF32 or bfloat16 (they differ by {error:.0e})"


def _multiply_on_mesh(engine: str, mesh: Mesh, *matrices: NumpyArray) -> NumpyArray:
    implementation, layout = get_engine(engine), Layout.replicated(mesh, 2)
    arrays = [implementation.relayout(matrix, layout) for matrix in matrices]
    return implementation.to_numpy(implementation.call_with_layout(operator.matmul, layout, arrays, {}))
