"""Random models with random layout maps, drawn by a seed or by Hypothesis.

Each seed always gives the same case in one release of layoutmap. A failing case is printed as a program:

Example:
    >>> case = draw(3)
    >>> case.make_model().count_params() > 0, case.plan().errors
    (True, ())
    >>> program = str(case)
    >>> program.count("lm.check_parity(")
    1

As a Hypothesis strategy, cases shrink to few layers and rules:

Example:
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

from layoutmap.testing.models.cases import Case, DrawnModel, draw_case
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import EIGHT, Devices

__all__ = ["LIBRARIES", "Case", "EIGHT", "Devices", "DrawnModel", "cases", "draw", "draw_model", "models"]

LIBRARIES = {"keras": "keras.drawing", "torch": "torch.drawing", "nnx": "jax.nnx", "pytree": "jax.pytree"}
"""The kinds of models, with the modules that define `draw_model` for each."""


def draw(seed: int, library: str = "keras", devices: Devices = EIGHT) -> Case:
    """Return the test case that a seed determines.

    Args:
        seed: Any integer.
        library: A key of `LIBRARIES`.
        devices: The devices of the case. Different devices give a different case.
    """
    return draw_case(Choices.from_seed(seed), _import_draw_model(library), devices)


def draw_model(seed: int, library: str = "keras") -> DrawnModel:
    """Return only the model of a seed's case, without building anything."""
    return _import_draw_model(library)(Choices.from_seed(seed))


@st.composite
def cases(draw: st.DrawFn, library: str = "keras") -> Case:
    """Return a strategy of cases: models, each with a layout map, an optimizer, and a batch."""
    return draw_case(Choices(lambda n: draw(st.integers(0, n - 1))), _import_draw_model(library))


@st.composite
def models(draw: st.DrawFn, library: str = "keras") -> DrawnModel:
    """Return a strategy of models without layout maps."""
    return _import_draw_model(library)(Choices(lambda n: draw(st.integers(0, n - 1))))


def _import_draw_model(library: str) -> Callable[[Choices], DrawnModel]:
    """Return the function that draws models of a library.

    Raises:
        ValueError: The library is not a key of `LIBRARIES`.
    """
    if library not in LIBRARIES:
        raise ValueError(f"library={library!r}: models are drawn only for {', '.join(LIBRARIES)}")
    return import_module(f"{__name__}.{LIBRARIES[library]}").draw_model
