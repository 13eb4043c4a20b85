"""Which cases of a law `make test` tries; `make test-all` tries all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

from layoutmap.cost.jax.targets import has_gpu_compiler
from layoutmap.testing.subjects import QUICK_XLA

EVERYTHING = bool(os.environ.get("LAYOUTMAP_TEST_ALL"))
IS_QUICK = not EVERYTHING or bool(os.environ.get("LAYOUTMAP_TEST_QUICK"))
"""Whether JAX compiles quickly: always, but where `make test-all` runs what `make test` has."""


def compiled_for_gpus(*values: Any) -> Any:
    """A case for `parametrize` that needs XLA's compiler for GPUs."""
    reason = 'needs pip install "layoutmap[xla-gpu]", hundreds of MB, as make test-all does'
    return pytest.param(
        *values, marks=[pytest.mark.xla_gpu, pytest.mark.skipif(not has_gpu_compiler("h100"), reason=reason)]
    )


def xla_settings(num_devices: int) -> dict[str, str]:
    """The environment of a process of JAX with so many devices; it compiles as the tests do, so to the same bits."""
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    if IS_QUICK:
        flags += f" {QUICK_XLA}"
    return {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def few(cases: Iterable[Any], *usual: Any) -> list[Any]:
    """All cases for `parametrize`, of which those that are not the usual ones are long."""
    cases = list(cases)
    assert set(usual) <= set(cases), f"no cases: {set(usual) - set(cases)}"
    return [
        case
        if case in usual
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]


def some(cases: Iterable[Any], *usual: Any) -> list[Any]:
    """What one test goes through: all cases, and in `make test` the usual ones."""
    cases = list(cases)
    assert set(usual) <= set(cases), f"no cases: {set(usual) - set(cases)}"
    return cases if EVERYTHING else list(usual)


def examples(number: int) -> int:
    """Return how many examples to try of a property that wants more than others: in `make test` a tenth of them."""
    return number if EVERYTHING else max(number // 10, 3)
