"""Torch's tensors without values, which know their shapes only."""

from __future__ import annotations

from layoutmap.engines.tested import Needed

with Needed("torch"):
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

UNFORESEEN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""Errors that a fake tensor raises if a result's shape depends on values, or nobody has said how to foresee it."""
