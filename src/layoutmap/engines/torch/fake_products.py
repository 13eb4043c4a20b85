"""Multiply fake tensors in groups, as the experts of a layer do, whatever their dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from layoutmap.engines.patches import PatchGroup, make_patch_if_present
from layoutmap.engines.tested import ImportErrorConverter

with ImportErrorConverter("torch"):
    import torch._meta_registrations as _shape_rules


def _make_grouped_product(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    *unused: object,
    offs: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **settings: object,
) -> torch.Tensor:
    """Return a tensor with the shape of a grouped product: a 3-D operand has a matrix for each group."""
    *groups_a, rows, _inner = mat_a.shape
    *groups_b, _inner, columns = mat_b.shape
    groups = groups_a if groups_b else [*offs.shape] if offs is not None and not groups_a else []
    return mat_a.new_empty((*groups, rows, columns), dtype=out_dtype or mat_a.dtype)


_PATCHES = PatchGroup(
    [*make_patch_if_present(_shape_rules, "_meta_grouped_mm_common", lambda _: _make_grouped_product)]
)


def allow_fake_grouped_products() -> AbstractContextManager[object]:
    """Let fake tensors of any dtype be multiplied in groups until the block ends.

    Torch's shape rule allows only bfloat16, although the operator itself allows more.
    """
    return _PATCHES.activate()
