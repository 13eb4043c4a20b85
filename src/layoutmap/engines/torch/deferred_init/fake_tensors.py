"""Import torch's fake tensors, which have shapes but no values."""

from __future__ import annotations

from layoutmap.engines.tested import ImportErrorConverter

with ImportErrorConverter("torch"):
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
