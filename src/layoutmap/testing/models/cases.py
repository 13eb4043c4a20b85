"""A case that laws are tried on: a model, a layout map, an optimizer and a batch, and the program that they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

from layoutmap.adapters import get_adapter
from layoutmap.core.variables import Kind
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.plan import Plan
from layoutmap.scope.scope import plan
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import EIGHT, Devices, Map, Shape, draw_map
from layoutmap.testing.products import ALLOW_TF32

QUANTIZED = {"int8": 2**-7, "int4": 2**-7}
"""The precisions in which built models are quantized; most calls round inputs, too, to steps as wide as bfloat16's."""
EPSILONS = {"float32": 2**-23, "bfloat16": 2**-7, "mixed_bfloat16": 2**-7, "TF32": 2**-10} | QUANTIZED
"""The precisions in which a model is computed, and the distance of 1 to the next number in each.

In `bfloat16` weights are of it, too; in `mixed_bfloat16` and `TF32` they are of float32.
"""
_ROWS = {16: 6, 8: 2, 24: 1, 10: 2, 7: 1}
_PREAMBLE = """\
{imports}
import layoutmap as lm
{simulation}

"""


class Drawn(Protocol):
    """A drawn model of one library, as a value that writes its program."""

    library: ClassVar[str]
    """The name of the library's adapter."""

    imports: ClassVar[str]
    """Lines of the program: imports, and short names for modules. The program imports numpy as `np`."""

    optimizers: ClassVar[Mapping[str, int]]
    """Expressions that make optimizers, and how often each is drawn; the first is SGD, whose step depends on the
    gradient's scale: a gradient that is some times too large is seen."""

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of all its parts, in order, so that what is drawn can be counted."""
        ...

    @property
    def layer_outputs(self) -> Mapping[str, Shape]:
        """The shapes of outputs of layers that a rule for activations may name, without rows, by the layers' paths."""
        ...

    @property
    def planned_with(self) -> str:
        """The expression of the inputs that a plan needs to know all variables; empty: it needs none."""
        ...

    @property
    def precisions(self) -> Mapping[str, str]:
        """Lines at the end of a program by which its model is computed in another precision, by precision."""
        ...

    @property
    def in_float64(self) -> str:
        """Lines at the end of a program by which its model is computed in float64; empty: there are none."""
        ...

    def source(self, optimizer: str) -> str:
        """The program that defines `make_model`, a function of no arguments that returns the model, ready to train.

        Args:
            optimizer: The expression that makes the optimizer.
        """
        ...

    def data(self, rows: int) -> str:
        """The expression of a batch, inputs and targets, drawn from the generator `rng` of numpy."""
        ...


@dataclass(frozen=True)
class Case:
    """A model and how it is laid out and trained. As text it is a program that needs neither this nor Hypothesis.

    Args:
        model: The model.
        map: The layout map, and the mesh dim of the batch.
        optimizer: The expression that makes the optimizer.
        rows: How many rows the batch has.
        devices: Those that it is for.
        precision: One of `EPSILONS`, or float64.
    """

    model: Drawn
    map: Map
    optimizer: str
    rows: int
    devices: Devices = EIGHT
    precision: str = "float32"

    def __str__(self) -> str:
        options = f"batch_dim={self.map.batch_dim!r}, library={self.library!r}"
        if self.precision != "float32":  # a factor of two is still seen
            options += ", tolerance=0.25"
        return f"{self.program}print(lm.check_parity(make_model, layout_map, batch, {options}))\n"

    @property
    def program(self) -> str:
        """A program that defines `make_model`, `layout_map` and `batch`, where devices are simulated with them."""
        simulation = f"\nlm.simulate_devices({self.devices.number})\n" if self.devices.simulated else ""
        if self.precision == "TF32":
            engine = get_adapter(self.library).engine_name
            simulation += f"\nimport {engine}\n\n{ALLOW_TF32[engine].format(True)}\n"
        return f"{_PREAMBLE.format(imports=self.model.imports, simulation=simulation)}{self.source}"

    @property
    def library(self) -> str:
        """The name of the library's adapter."""
        return self.model.library

    @property
    def with_sgd(self) -> Case:
        """The same case with an optimizer whose step depends on the gradient's scale."""
        return dataclasses.replace(self, optimizer=next(iter(self.model.optimizers)))

    def in_precision(self, precision: str) -> Case:
        """The same case with SGD, computed in another precision, one of `EPSILONS`."""
        return dataclasses.replace(self.with_sgd, precision=precision)

    @property
    def make_model(self) -> Callable[[], Any]:
        """The function of the program that makes the model, ready to train."""
        return self._defined["make_model"]

    @property
    def layout_map(self) -> LayoutMap:
        """The layout map of the program."""
        return self._defined["layout_map"]

    @property
    def batch(self) -> tuple[Any, Any]:
        """The batch of the program: inputs and targets."""
        return self._defined["batch"]

    @property
    def inputs(self) -> Any:
        """The inputs that a plan needs to know all variables; `None`: it needs none."""
        return _run(self.model, f"inputs = {self.model.planned_with or None}")["inputs"]

    def plan(self, layout_map: LayoutMap | None = None) -> Plan:
        """The plan, of all variables that training makes.

        Args:
            layout_map: Rules; `None`: those of the case.
        """
        return plan(
            self.make_model,
            self.layout_map if layout_map is None else layout_map,
            inputs=self.inputs,
            library=self.library,
        )

    @cached_property
    def source(self) -> str:
        """The lines of the program that define `make_model`, `layout_map` and `batch`."""
        precisions = {**self.model.precisions, "float64": self.model.in_float64}
        return (
            f"{self.model.source(self.optimizer)}\n\nlayout_map = {self.map.source}\n"
            f"rng = np.random.default_rng(0)\nbatch = {self.model.data(self.rows)}\n"
            f"{precisions.get(self.precision, '')}"
        )

    @cached_property
    def _defined(self) -> dict[str, Any]:
        return _run(self.model, self.source)


def draw_case(choices: Choices, draw_model: Callable[[Choices], Drawn], devices: Devices = EIGHT) -> Case:
    """A model, a map of its variables, an optimizer and a batch."""
    model = draw_model(choices)
    unmapped = Case(model, Map("batch=8", (), (), "error", None), next(iter(model.optimizers)), 8)
    found = unmapped.plan()
    variables = {
        v.path: v.shape
        for v in (assignment.variable for assignment in found.assignments)
        if v.kind in (Kind.WEIGHT, Kind.STATE) and v.parent is None
    }
    drawn = draw_map(choices, variables, model.layer_outputs, devices)
    return Case(model, drawn, choices.weighted(model.optimizers), choices.weighted(_ROWS), devices)


def _run(model: Drawn, source: str) -> dict[str, Any]:
    """The names that a program of a model defines."""
    names: dict[str, Any] = {"__name__": __name__}
    program = f"{model.imports}\nimport layoutmap as lm\n{source}"
    exec(compile(program, "<drawn>", "exec"), names)
    return names
