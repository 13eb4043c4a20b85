"""Import torch's fake tensors, which have shapes but no values."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from layoutmap.engines.patches import AttributePatch
from layoutmap.engines.tested import ImportErrorConverter

with ImportErrorConverter("torch"):
    import torch._meta_registrations as _shape_rules
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily

UNSUPPORTED_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""Errors that fake tensors raise if a result's shape depends on values, or an operator has no shape rule."""


@contextmanager
def allow_fake_grouped_products() -> Generator[None]:
    """Until the block ends, fake tensors of any dtype can be multiplied in groups, as experts of a layer do.

    Torch's shape rule allows only bfloat16, although the operator itself allows more.
    """
    patch = AttributePatch(_shape_rules, "_meta_grouped_mm_common", lambda _: _make_grouped_product)
    try:
        patch.install()
        yield
    finally:
        patch.remove()


def _make_grouped_product(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    *_: object,
    offs: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **__: object,
) -> torch.Tensor:
    """Return a tensor with the shape of a grouped product: a 3-D operand has a matrix for each group."""
    *groups_a, rows, _ = mat_a.shape
    *groups_b, _, columns = mat_b.shape
    groups = groups_a if groups_a and groups_b else []
    if offs is not None and not groups_a and not groups_b:
        groups = [*offs.shape]
    return mat_a.new_empty((*groups, rows, columns), dtype=out_dtype or mat_a.dtype)
