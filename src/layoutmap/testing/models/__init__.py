"""Keras models in layouts that nobody chose: drawn by a seed or by Hypothesis, each a program of its own.

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

from hypothesis import strategies as st

from layoutmap.testing.models.cases import SGD, Case, draw_case
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.describing import Model
from layoutmap.testing.models.drawing import draw_model

__all__ = ["SGD", "Case", "Model", "cases", "draw", "models"]


def draw(seed: int) -> Case:
    """The case of a seed."""
    return draw_case(Choices.of_seed(seed))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Models, each with a layout map, an optimizer and a batch."""
    return draw_case(Choices(lambda n: draw(st.integers(0, n - 1))))


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Models alone."""
    return draw_model(Choices(lambda n: draw(st.integers(0, n - 1))))
