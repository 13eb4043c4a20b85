"""Read and write the tensor of a torch model at a path."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layoutmap.core.blocks import NumpyArray
from layoutmap.core.errors import PlanError
from layoutmap.core.layout import Layout
from layoutmap.engines import get_engine
from layoutmap.engines.torch.deferred_init import FakeTensor
from layoutmap.engines.torch.element_types import to_torch


@dataclass(frozen=True, slots=True)
class Variable:
    """A parameter, a buffer, or a slot of an optimizer.

    The attribute `layout` of a torch tensor says how its memory is used. So read the layout from this object, or with
    `layoutmap.dtensor.fetch_layout`.

    Args:
        path: Its path.
        tensor: The tensor.
        has_value: Whether it has a value; the tensors of a plan do not.
    """

    path: str
    tensor: torch.Tensor
    has_value: bool = True

    @property
    def layout(self) -> Layout:
        """The layout of the tensor.

        Raises:
            AttributeError: It has none.
        """
        layout = get_engine("torch").get_layout(self.tensor)
        if layout is None:
            raise AttributeError(f"{self.path} is unsharded and has no layout")
        return layout

    def read(self) -> NumpyArray:
        """Return the global value as a numpy array.

        Raises:
            PlanError: It has none.
        """
        self._check_has_value()
        return get_engine("torch").to_numpy(self.tensor)

    def write(self, value: NumpyArray | torch.Tensor) -> None:
        """Assign a torch or numpy value without changing the layout.

        Raises:
            PlanError: It is only planned.
        """
        self._check_has_value()
        engine = get_engine("torch")
        layout = engine.get_layout(self.tensor)
        with torch.no_grad():  # an in-place change of a leaf requires no_grad
            if layout is not None:
                value = engine.relayout(value, layout, pad=True)
            self.tensor.copy_(value if isinstance(value, torch.Tensor) else to_torch(value))

    def _check_has_value(self) -> None:
        if not self.has_value or isinstance(self.tensor, FakeTensor):
            raise PlanError(
                f"{self.path}: this tensor has no values",
                why="the model was planned, or its scope failed",
                fix="build the model in a scope, or with layout_map.build",
            )
