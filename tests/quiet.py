"""Warnings that a test is not about: of a layout map's rules, and of arrays that libraries pass to numpy."""

import pytest

OF_MAPS = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")

# Keras 3.15's own variables, and torch 2.13's tensors, know only the older form of __array__.
OF_ARRAYS = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)
