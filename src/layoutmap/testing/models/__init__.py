"""Models in layouts that nobody chose: drawn by a seed or by Hypothesis, each a program of its own.

A seed and a release of this library give the same case for ever. What fails is printed as a program:

>>> case = draw(3)
>>> case.make_model().count_params() > 0, case.plan().errors
(True, ())
>>> program = str(case)
>>> program.count("lm.check_parity(")
1

As a Hypothesis strategy cases shrink to few layers and rules:

>>> from hypothesis import given, settings
>>> @settings(max_examples=2, deadline=None)
... @given(cases())
... def test_plans_are_stable(case):
...     assert case.plan().fingerprint == case.plan().fingerprint
>>> test_plans_are_stable()
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from hypothesis import strategies as st

from layoutmap.testing.models.cases import Case, Drawn, draw_case
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import EIGHT, Devices

__all__ = ["LIBRARIES", "Case", "EIGHT", "Devices", "Drawn", "cases", "draw", "draw_model", "models"]

LIBRARIES = {"keras": "keras", "torch": "torch", "nnx": "jax.nnx", "pytree": "jax.pytree"}
"""The kinds of models that can be drawn, and the modules that draw them: each has a function `draw_model`."""


def draw(seed: int, library: str = "keras", devices: Devices = EIGHT) -> Case:
    """Return the case of a seed.

    Args:
        seed: Any number.
        library: One of `LIBRARIES`.
        devices: Those that it is for: other ones give other cases.
    """
    return draw_case(Choices.of_seed(seed), _drawing(library), devices)


def draw_model(seed: int, library: str = "keras") -> Drawn:
    """Return the model of a seed alone, which is that of its case; builds nothing."""
    return _drawing(library)(Choices.of_seed(seed))


@st.composite
def cases(draw: st.DrawFn, library: str = "keras") -> Case:
    """Strategy of models, each with a layout map, an optimizer and a batch."""
    return draw_case(Choices(lambda n: draw(st.integers(0, n - 1))), _drawing(library))


@st.composite
def models(draw: st.DrawFn, library: str = "keras") -> Drawn:
    """Strategy of models alone."""
    return _drawing(library)(Choices(lambda n: draw(st.integers(0, n - 1))))


def _drawing(library: str) -> Callable[[Choices], Drawn]:
    if library not in LIBRARIES:
        raise ValueError(f"no models of {library!r} are drawn, but of {', '.join(LIBRARIES)}")
    return import_module(f"{__name__}.{LIBRARIES[library]}").draw_model
