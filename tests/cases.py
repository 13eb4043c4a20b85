"""Which cases of a law `make test` tries; `make test-all` tries all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


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
