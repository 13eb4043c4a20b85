"""What a law is tried on: a model, a layout map, an optimizer and a batch, and the program that they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from layoutmap.core.variables import Kind
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.plan import Plan
from layoutmap.scope.scope import plan
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.describing import Model, one_or_list
from layoutmap.testing.models.drawing import draw_model
from layoutmap.testing.models.maps import Map, draw_map

SGD = "keras.optimizers.SGD(0.05, momentum=0.9)"
"""An optimizer whose step depends on the gradient's scale, so that a gradient that is some times too large is seen."""

_OPTIMIZERS = {
    SGD: 6,
    "keras.optimizers.SGD(0.05)": 1,
    "keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=1.0)": 1,
    "keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, weight_decay=0.01)": 1,
    "keras.optimizers.Adam(0.001)": 2,
    "keras.optimizers.AdamW(0.001, global_clipnorm=1.0)": 1,
    "keras.optimizers.RMSprop(0.001)": 1,
    "keras.optimizers.Adafactor(0.001)": 1,
    "keras.optimizers.Lion(0.001)": 1,
}
_ROWS = {16: 6, 8: 2, 24: 1, 10: 2, 7: 1}
_IMPORTS = """\
import os

os.environ.setdefault("KERAS_BACKEND", "jax")
import keras
import numpy as np

import layoutmap as lm

lm.simulate_devices(8)
L = keras.layers


"""


@dataclass(frozen=True)
class Case:
    """A model and how it is laid out and trained. As text it is a program that needs neither this nor Hypothesis.

    Args:
        model: The model.
        map: The layout map, and the mesh dim of the batch.
        optimizer: The expression that makes the optimizer.
        rows: How many rows the batch has.
    """

    model: Model
    map: Map
    optimizer: str
    rows: int

    def __str__(self) -> str:
        check = f"lm.check_parity(make_model, layout_map, batch, batch_dim={self.map.batch_dim!r})"
        return f"{_IMPORTS}{self._source}print({check})\n"

    @property
    def make_model(self) -> Callable[[], Any]:
        """The function of the program that makes the model, compiled."""
        return self._defined["make_model"]

    @property
    def layout_map(self) -> LayoutMap:
        """The layout map of the program."""
        return self._defined["layout_map"]

    @property
    def batch(self) -> tuple[Any, Any]:
        """The batch of the program: inputs and targets."""
        return self._defined["batch"]

    def plan(self) -> Plan:
        """The plan, of all variables that training makes."""
        return _plan(self.model, self.make_model, self.layout_map)

    @cached_property
    def _defined(self) -> dict[str, Any]:
        return _run(self._source)

    @property
    def _source(self) -> str:
        data = [
            one_or_list([each.data(self.rows) for each in values])
            for values in (self.model.inputs, self.model.outputs)
        ]
        return (
            f"{self.model.source(self.optimizer)}\n\nlayout_map = {self.map.source}\n"
            f"rng = np.random.default_rng(0)\nbatch = {', '.join(data)}\n"
        )


def draw_case(choices: Choices) -> Case:
    """A model, a map of its variables, an optimizer and a batch."""
    model = draw_model(choices)
    found = _plan(model, _run(model.source(SGD))["make_model"], LayoutMap("batch=8", rest="replicated"))
    variables = {
        v.path: v.shape
        for v in (assignment.variable for assignment in found.assignments)
        if v.kind in (Kind.WEIGHT, Kind.STATE) and v.parent is None and v.shape
    }
    called = [call.layer for call in model.calls] if model.named else []
    outputs = {model.path(call.layer): call.shape for call in model.calls if called.count(call.layer) == 1}
    drawn = draw_map(choices, variables, outputs)
    return Case(model, drawn, choices.weighted(_OPTIMIZERS), choices.weighted(_ROWS))


def _plan(model: Model, make_model: Callable[[], Any], layout_map: LayoutMap) -> Plan:
    inputs = None
    if model.is_subclassed:  # what it makes at its first call belongs to the plan
        inputs = _run(f"inputs = {one_or_list([each.input_source for each in model.inputs])}")["inputs"]
    return plan(make_model, layout_map, inputs=inputs, library="keras")


def _run(source: str) -> dict[str, Any]:
    """What a program defines."""
    import keras
    import numpy as np

    import layoutmap as lm

    names: dict[str, Any] = {"keras": keras, "L": keras.layers, "np": np, "lm": lm, "__name__": __name__}
    exec(compile(source, "<drawn>", "exec"), names)
    return names
