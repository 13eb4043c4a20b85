"""Define a case, which is a program with a model, a layout map, an optimizer, and a batch, to test laws on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

from layoutmap.adapters import get_adapter
from layoutmap.core.variables import Kind
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.plan import Plan
from layoutmap.scope.scope import plan
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import EIGHT, Devices, DrawnLayoutMap, Shape, draw_layout_map
from layoutmap.testing.products import ALLOW_TF32

QUANTIZED = {"int8": 2**-7, "int4": 2**-7}
"""The precisions of quantized models. Most of their calls also round inputs, to steps as wide as those of bfloat16."""
EPSILONS = {"float32": 2**-23, "bfloat16": 2**-7, "mixed_bfloat16": 2**-7, "TF32": 2**-10} | QUANTIZED
"""The precisions that a model can be computed in, with the distance from 1 to the next larger number.

`bfloat16` also stores weights as bfloat16. `mixed_bfloat16` and `TF32` store weights as float32.
"""
_ROWS = {16: 6, 8: 2, 24: 1, 10: 2, 7: 1}
_PREAMBLE = """\
{imports}
import layoutmap as lm
{simulation}

"""


class DrawnModel(Protocol):
    """A random model of one library that can return its program as text."""

    library: ClassVar[str]
    """The name of the library's adapter."""

    imports: ClassVar[str]
    """The imports of the program, with short names for modules. The program imports numpy as `np`."""

    optimizers: ClassVar[Mapping[str, int]]
    """Expressions of optimizers, with how often each is drawn.

    The first optimizer is SGD, which detects a gradient of the wrong scale, since its step depends on the scale.
    """

    @property
    def layer_kinds(self) -> Collection[str]:
        """The kinds of all layers in order. Tests count them."""
        ...

    @property
    def layer_output_shapes(self) -> Mapping[str, Shape]:
        """A dict from layer paths to output shapes without the batch axis, for activation rules."""
        ...

    @property
    def plan_inputs(self) -> str:
        """The Python expression of the inputs that a plan needs to find all variables. Empty if it needs none."""
        ...

    @property
    def precision_lines(self) -> Mapping[str, str]:
        """A dict from each supported precision to the lines at the end of the program that set it."""
        ...

    @property
    def float64_lines(self) -> str:
        """The lines at the end of the program that make the model compute in float64. Empty if it cannot."""
        ...

    def make_code(self, optimizer: str) -> str:
        """Return the program that defines `make_model`, which takes no arguments and returns a trainable model."""
        ...

    def make_batch_code(self, rows: int) -> str:
        """Return the expression that draws a batch, which is inputs and targets, from numpy's generator `rng`."""
        ...


@dataclass(frozen=True)
class Case:
    """A model with its layout map and training. `str(case)` is a program that needs neither this module nor Hypothesis.

    Args:
        model: The model.
        map: The layout map and the mesh dim of the batch.
        optimizer: The expression of the optimizer.
        rows: The number of rows of the batch.
        devices: The devices that the case runs on.
        precision: A key of `EPSILONS`, or `"float64"`.
        last_lines: More lines at the end of the source.
        ambient_mesh: The axis types of the mesh that the program sets by `jax.set_mesh`. Empty: it sets none.
    """

    model: DrawnModel
    map: DrawnLayoutMap
    optimizer: str
    rows: int
    devices: Devices = EIGHT
    precision: str = "float32"
    ambient_mesh: str = ""
    last_lines: str = ""

    def __str__(self) -> str:
        options = f"batch_dim={self.map.batch_dim!r}, library={self.library!r}"
        # In coarse precisions, a tolerance of 0.25 accepts rounding errors, but not a factor of two.
        if self.precision != "float32":
            options += ", tolerance=0.25"
        return f"{self.program}print(lm.check_parity(make_model, layout_map, batch, {options}))\n"

    @property
    def program(self) -> str:
        """A program that defines `make_model`, `layout_map`, and `batch`, and simulates the devices if needed."""
        simulation = f"\nlm.simulate_devices({self.devices.number})\n" if self.devices.simulated else ""
        if self.precision == "TF32":
            engine = get_adapter(self.library).engine_name
            simulation += f"\nimport {engine}\n\n{ALLOW_TF32[engine].format(True)}\n"
        program = f"{_PREAMBLE.format(imports=self.model.imports, simulation=simulation)}{self.program_lines}"
        return (
            f"{program}import jax\n\njax.set_mesh({self._make_ambient_mesh_code()})\n"
            if self.ambient_mesh
            else program
        )

    @property
    def library(self) -> str:
        """The name of the library's adapter."""
        return self.model.library

    @contextmanager
    def use_ambient_mesh(self) -> Generator[None]:
        """Set the mesh that the program sets by `jax.set_mesh`, if it sets one, until the block ends."""
        if not self.ambient_mesh:
            yield
            return
        import jax

        with jax.set_mesh(eval(self._make_ambient_mesh_code(), {"jax": jax})):
            yield

    def _make_ambient_mesh_code(self) -> str:
        """Return the expression of the mesh that the program sets by `jax.set_mesh`."""
        mesh = self.layout_map.mesh
        assert mesh is not None
        types = f"(jax.sharding.AxisType.{self.ambient_mesh},) * {len(mesh.shape)}"
        return f"jax.make_mesh({mesh.shape}, {mesh.dim_names}, axis_types={types})"

    def to_sgd(self) -> Case:
        """Return the same case with SGD. A step of SGD depends on the scale of the gradient."""
        return dataclasses.replace(self, optimizer=next(iter(self.model.optimizers)))

    def to_precision(self, precision: str) -> Case:
        """Return the same case with SGD, computed in `precision`, which is a key of `EPSILONS`."""
        return dataclasses.replace(self.to_sgd(), precision=precision)

    @property
    def make_model(self) -> Callable[[], Any]:
        """The function of the program that returns a trainable model."""
        return self._program_values["make_model"]

    @property
    def layout_map(self) -> LayoutMap:
        """The layout map of the program."""
        return self._program_values["layout_map"]

    @property
    def batch(self) -> tuple[Any, Any]:
        """The batch of the program: inputs and targets."""
        return self._program_values["batch"]

    @property
    def plan_inputs(self) -> Any:
        """The inputs that a plan needs to find all variables, or None if it needs none."""
        return _execute_program_lines(self.model, f"inputs = {self.model.plan_inputs or None}")["inputs"]

    def plan(self, layout_map: LayoutMap | None = None) -> Plan:
        """Return the plan of all variables that training creates."""
        return plan(
            self.make_model,
            self.layout_map if layout_map is None else layout_map,
            inputs=self.plan_inputs,
            library=self.library,
        )

    @cached_property
    def program_lines(self) -> str:
        """The lines of the program that define `make_model`, `layout_map`, and `batch`."""
        precision_lines = {**self.model.precision_lines, "float64": self.model.float64_lines}
        return (
            f"{self.model.make_code(self.optimizer)}\n\nlayout_map = {self.map.expression}\n"
            f"rng = np.random.default_rng(0)\nbatch = {self.model.make_batch_code(self.rows)}\n"
            f"{precision_lines.get(self.precision, '')}{self.last_lines}"
        )

    @cached_property
    def _program_values(self) -> dict[str, Any]:
        """A dict from each name that the lines of the program define to its value."""
        return _execute_program_lines(self.model, self.program_lines)


def draw_case(
    choices: Choices, draw_model: Callable[[Choices], DrawnModel], devices: Devices = EIGHT
) -> Case:
    """Return a case with a random model, layout map, optimizer, and number of rows."""
    model = draw_model(choices)
    unmapped = Case(model, DrawnLayoutMap("batch=8", (), (), "error", None), next(iter(model.optimizers)), 8)
    variables = {
        v.path: v.shape
        for v in (assignment.variable for assignment in unmapped.plan().assignments)
        if v.kind in (Kind.WEIGHT, Kind.STATE) and v.parent is None
    }
    drawn_map = draw_layout_map(choices, variables, model.layer_output_shapes, devices)
    optimizer, rows = choices.pick_weighted(model.optimizers), choices.pick_weighted(_ROWS)
    is_on_jax = get_adapter(model.library).engine_name == "jax" and devices is EIGHT
    ambient_mesh = choices.pick("", "", "Auto", "Explicit") if is_on_jax else ""
    return Case(model, drawn_map, optimizer, rows, devices, ambient_mesh=ambient_mesh)


def _execute_program_lines(model: DrawnModel, source: str) -> dict[str, Any]:
    """Run lines after the imports of a model's program. Return a dict from the defined names to their values."""
    names: dict[str, Any] = {"__name__": __name__}
    program = f"{model.imports}\nimport layoutmap as lm\n{source}"
    exec(compile(program, "<drawn>", "exec"), names)
    return names
