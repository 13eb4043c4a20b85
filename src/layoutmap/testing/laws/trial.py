"""A drawn case on its way through the laws: models and comparisons that several laws look at are made once."""

from __future__ import annotations

import tempfile
import warnings
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from layoutmap.adapters import Adapter, capable, get_adapter
from layoutmap.core.variables import Assignment, Kind
from layoutmap.engines import get_engine
from layoutmap.scope.group import Group
from layoutmap.scope.parity import ParityRow, compared, compared_numbers, compared_variables
from layoutmap.scope.plan import Plan
from layoutmap.scope.scope import build
from layoutmap.testing.models.cases import Case
from layoutmap.testing.models.choices import Choices

ROUNDINGS = 30
"""How many times as far as by one rounding of its weights a model may differ: each of its operations rounds."""
_SEED = 0
TOLERANCE = 1e-5
"""The largest relative difference that counts as equal without a look at rounding."""


class NotTried(Exception):
    """A law has nothing to say of a case."""


class Trial:
    """A case, and the models that were made of it.

    Args:
        case: The case.
    """

    def __init__(self, case: Case):
        self.case = case
        self.adapter: Adapter = capable(get_adapter(case.library), Adapter, "a law")

    @cached_property
    def plan(self) -> Plan:
        """The plan of the case."""
        return self.case.plan()

    @cached_property
    def group(self) -> Group:
        """The processes that have devices of the mesh."""
        return Group(get_engine(self.adapter.engine_name), self.case.layout_map.mesh)

    @contextmanager
    def folder(self) -> Generator[str]:
        """A folder of all processes, for as long as the first one needs it."""
        with tempfile.TemporaryDirectory() as own:
            yield self.group.first(lambda: [own])[0]

    @property
    def choices(self) -> Choices:
        """Choices that a law makes: the same each time that it is tried on this case."""
        return Choices.of_seed(zlib.crc32(self.case.source.encode()))

    @property
    def ruled(self) -> list[Assignment]:
        """The variables of the plan that rules are asked for."""
        kinds = (Kind.WEIGHT, Kind.STATE)
        return [a for a in self.plan.assignments if a.variable.kind in kinds and a.variable.parent is None]

    @cached_property
    def pair(self) -> tuple[Any, Any]:
        """The plain model and the one in layouts, which have taken no step."""
        return self.new_pair()

    def new_pair(self) -> tuple[Any, Any]:
        """Return another plain model and another in the layouts of the case, with all that training makes."""
        case = self.case
        self.adapter.set_seed(_SEED)
        sharded = build(
            case.make_model,
            case.layout_map,
            batch_dim=case.map.batch_dim,
            library=case.library,
            progress=False,
        )
        self.adapter.complete(sharded, case.batch)
        return self.plain(), sharded

    @cached_property
    def rows(self) -> Sequence[ParityRow]:
        """Comparisons of the pair: outputs, gradients, three steps, and one with fewer rows."""
        return tuple(self._compared(*self.pair))

    @cached_property
    def is_finite(self) -> bool:
        """Whether the plain model has numbers to compare: no loss, gradient or weight of it is infinite or NaN."""
        model = self.plain()
        logs, gradients = self.adapter.gradients(model, self.case.batch)
        steps = [self.adapter.train_step(model, self.case.batch) for _ in range(3)]
        numbers = [*gradients.values(), *(number for each in (logs, *steps) for number in each.values())]
        return all(np.isfinite(each).all() for each in numbers if each is not None)

    def beyond_rounding(self, rows: Sequence[ParityRow]) -> list[ParityRow]:
        """Return comparisons that differ by more than the plain model does when its weights are rounded."""
        wrong = [row for row in rows if not row.agrees]
        if not wrong:
            return []
        worst: dict[str, float] = {}
        for row in (
            *self._rounded,
            *self._compared(self.plain(), self.plain()),
        ):  # some devices add in any order
            worst[row.stage] = max(worst.get(row.stage, 0.0), row.error)
        return [row for row in wrong if not row.error <= ROUNDINGS * worst.get(row.stage, 0.0)]

    @cached_property
    def _rounded(self) -> Sequence[ParityRow]:
        """Comparisons of two plain models, the weights of one moved by one rounding."""
        plain, moved = self.plain(), self.plain()
        trained = {a.variable.path for a in self.plan.assignments if a.variable.is_trained}
        signs = np.random.default_rng(0)
        # How a plain model calls layers without names is its own. One of JAX has no optimizer's state before its first
        # step; that comes last.
        paths = self.adapter.variables(self.pair[1])
        for path, variable in zip(paths, self.adapter.variables(moved).values(), strict=False):
            value = self.adapter.read(variable)
            if path in trained and value.dtype.kind == "f":
                step = signs.choice([-1, 1], value.shape) * np.finfo(value.dtype).eps
                self.adapter.write(variable, (value * (1 + step)).astype(value.dtype))
        return tuple(self._compared(plain, moved))

    def plain(self) -> Any:
        """Return another plain model, with all that training makes."""
        self.adapter.set_seed(_SEED)
        model = self.case.make_model()
        self.adapter.complete(model, self.case.batch)
        return model

    def _compared(self, plain: Any, sharded: Any) -> Iterator[ParityRow]:
        batch, adapter = self.case.batch, self.adapter
        report = compared(adapter, plain, sharded, batch, tolerance=TOLERANCE)
        yield from (row for row in report.rows if row.stage != "weights")
        if any(row.stage != "weights" and not row.agrees for row in report.rows):
            return
        stage, fewer = "fewer rows", first_rows(batch, self.case.rows * 2 // 3)
        expected, actual = self._run(plain, fewer), self._run(sharded, fewer)
        # Some diverge, at one rate for all.
        if all(np.isfinite(number).all() for number in expected.values()):
            yield from compared_numbers(stage, expected, actual, TOLERANCE)
            yield from compared_variables(adapter, stage, plain, sharded, TOLERANCE, report.only_rounding)

    def _run(self, model: Any, batch: Any) -> dict[str, float]:
        """A step with other rows than before; of Keras `fit`, whose last batch is smaller, too."""
        if self.case.library != "keras":
            return self.adapter.train_step(model, batch)
        size = self.case.rows * 2 // 3
        history = model.fit(*self.case.batch, batch_size=size, shuffle=False, verbose=0).history
        return {"loss": history["loss"][-1]}


def first_rows(values: Any, number: int) -> Any:
    """Return the first rows of each array in nested sequences and mappings."""
    if isinstance(values, dict):
        return {name: first_rows(value, number) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(first_rows(value, number) for value in values)
    return values[:number]


def leaves(values: Any) -> list[Any]:
    """Return the arrays in nested sequences and mappings."""
    if isinstance(values, dict):
        values = list(values.values())
    return (
        [leaf for each in values for leaf in leaves(each)] if isinstance(values, list | tuple) else [values]
    )


def quiet() -> warnings.catch_warnings[None]:
    """Return a block in which nothing warns: of maps and models that nobody would write, much does."""
    return warnings.catch_warnings(action="ignore")
