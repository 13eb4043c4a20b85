"""A drawn case on its way through the laws: models and comparisons that several laws look at are made once."""

from __future__ import annotations

import importlib
import tempfile
import warnings
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from layoutmap.adapters import Adapter, capable, get_adapter
from layoutmap.core.variables import Assignment, Kind
from layoutmap.engines import get_engine
from layoutmap.inspecting.parity import (
    ROUNDINGS,
    ParityRow,
    compared,
    compared_numbers,
    compared_variables,
    measure_rounding,
    plain_beside,
    scale_rows,
)
from layoutmap.scope.plan import Plan
from layoutmap.scope.process_group import Group
from layoutmap.scope.scope import build
from layoutmap.testing.models.cases import EPSILONS, QUANTIZED, Case
from layoutmap.testing.models.choices import Choices

_COARSE_ROUNDINGS = 8
"""How many roundings a model may differ by in coarser precisions, in which 30 are more than a factor of two."""
_CANCELS = 1e-2
"""By so much float32 differs from exact numbers at the most, relatively, where sums of a drawn model cancel."""
_AS_NEAR = 4
"""How many times as far as from itself, rounded otherwise, the plain model may be from one in layouts."""
DIVERGES = 1e3
"""A loss from which the next step may be infinite without a fault: some models diverge, at one rate for all."""
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
        self._left_out: Mapping[str, Any] | None = None
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
        return tuple(self._compared(*self.pair, is_pair=True))

    @cached_property
    def is_finite(self) -> bool:
        """Whether the plain model has numbers to compare: no output, loss or gradient of it is infinite or NaN."""
        model = self.plain()
        outputs = leaves(self.adapter.forward(model, self.case.batch))
        logs, gradients = self.adapter.gradients(model, self.case.batch)
        steps = [self.adapter.train_step(model, self.case.batch) for _ in range(3)]
        numbers = [
            *outputs,
            *gradients.values(),
            *(number for each in (logs, *steps) for number in each.values()),
        ]
        return all(np.isfinite(each).all() for each in numbers if each is not None)

    def beyond_rounding(self, rows: Sequence[ParityRow]) -> list[ParityRow]:
        """Return comparisons that differ by more than the plain model does when its weights are rounded.

        Args:
            rows: All comparisons of their stages, in order.
        """
        worst = {row.stage: EPSILONS[self.case.precision] for row in rows if not row.agrees}
        allowed = ROUNDINGS if self.case.precision == "float32" else _COARSE_ROUNDINGS
        rounding: dict[tuple[str, int], float] = {}
        wrong = [row for row in rows if not row.agrees]
        for rounded in (self._from_float32, self._rounded, self._again):  # each needs models of its own
            if not wrong:
                break
            found = tuple(rounded())
            for place, change in measure_rounding(found).items():
                rounding[place] = max(rounding.get(place, 0.0), change)
            for row in scale_rows(found, rounding, allowed):
                worst[row.stage] = max(worst.get(row.stage, 0.0), row.error)
            wrong = [
                row
                for row in scale_rows(rows, rounding, allowed)
                if not row.agrees and not row.error <= allowed * worst[row.stage]
            ]
        inexact = dict.fromkeys(worst, 0.0)
        for row in scale_rows(tuple(self._otherwise()), rounding, allowed) if wrong else ():
            if row.error < _CANCELS:
                inexact[row.stage] = max(inexact.get(row.stage, 0.0), row.error)
        return [row for row in wrong if not row.error <= _AS_NEAR * inexact[row.stage]]

    def _again(self) -> Iterator[ParityRow]:
        """Comparisons of two plain models: some devices add in any order."""
        return self._compared(self.plain(), self.plain())

    def _rounded(self) -> Iterator[ParityRow]:
        """Comparisons of two plain models, the weights of one moved by one rounding."""
        signs, step, plain = np.random.default_rng(0), EPSILONS[self.case.precision], self.plain()
        moved = self._with_weights(
            self.plain(), plain, lambda value: 1 + step * signs.choice([-1, 1], value.shape)
        )
        return self._compared(plain, moved)

    def _from_float32(self) -> Iterator[ParityRow]:
        """Comparisons of the plain model with one of the same weights in float32: frameworks add up in either."""
        if self.case.precision not in ("float32", *QUANTIZED):  # which have other weights
            plain = self.plain()
            wider = self._with_weights(Trial(self.case.in_precision("float32")).plain(), plain)
            yield from self._compared(wider, plain)

    def _otherwise(self) -> Iterator[ParityRow]:
        """Comparisons of the plain model with one that rounds otherwise: sums may cancel in float32.

        On JAX each of its operations runs as it comes, in another order than in a program that XLA has compiled. Others
        are computed in float64, in which JAX would compute other models of the process, too.
        """
        if self.case.precision != "float32":
            return
        plain, adapter = self.plain(), self.adapter
        # Some models are not made so, or take no step: what is wrong of them stays wrong.
        with suppress(Exception):
            if adapter.engine_name == "jax":
                other = self.plain()
                adapter = cast("Adapter", _Uncompiled(adapter, other))
            else:
                other = self._with_weights(Trial(replace(self.case, precision="float64")).plain(), plain)
            batch, left_out = self.case.batch, self._left_out
            yield from compared(adapter, plain, other, batch, tolerance=TOLERANCE, left_out=left_out).rows

    def _with_weights(
        self, model: object, plain: object, factor: Callable[[Any], object] = lambda _: 1
    ) -> object:
        """Give a plain model, which is returned, the weights of another, each multiplied by a factor."""
        trained = {a.variable.path: a.variable.is_trained for a in self.plan.assignments}
        # How a plain model calls layers without names is its own. One of JAX has no optimizer's state before its first
        # step; that comes last.
        found = (self.adapter.variables(each) for each in (self.pair[1], plain, model))
        paths, weights, variables = (list(each.items()) for each in found)
        for (path, _), (_, weight), (_, variable) in zip(paths, weights, variables, strict=False):
            if path in trained and not path.startswith("optimizer."):
                value = self.adapter.read(weight).astype("float64")
                moved = value * factor(value) if trained[path] else value
                self.adapter.write(variable, moved.astype(self.adapter.read(variable).dtype))
        return model

    def plain(self) -> Any:
        """Return another plain model, with all that training makes."""
        self.adapter.set_seed(_SEED)
        model = plain_beside(self.adapter, self.case.make_model, self.case.layout_map)
        self.adapter.complete(model, self.case.batch)
        return model

    def _compared(self, plain: object, other: object, *, is_pair: bool = False) -> Iterator[ParityRow]:
        """Comparisons; those of two plain models leave out what that of the pair has left out, and no more."""
        batch, adapter = self.case.batch, self.adapter
        left_out = None if is_pair else self._left_out
        report = compared(adapter, plain, other, batch, tolerance=TOLERANCE, left_out=left_out)
        if is_pair:
            self._left_out = report.only_rounding
        yield from (row for row in report.rows if row.stage != "weights")
        if is_pair and any(row.stage != "weights" and not row.agrees for row in report.rows):
            return  # plain models go on: of rounding, each stage is asked
        stage, fewer = "fewer rows", first_rows(batch, self.case.rows * 2 // 3)
        expected, actual = self._run(plain, fewer), self._run(other, fewer)
        # Some diverge, at one rate for all.
        if all(np.isfinite(number).all() for number in expected.values()):
            yield from compared_numbers(stage, expected, actual, TOLERANCE)
            if all(np.all(np.abs(number) < DIVERGES) for number in expected.values()):
                yield from compared_variables(adapter, stage, plain, other, TOLERANCE, report.only_rounding)

    def _run(self, model: Any, batch: object) -> dict[str, float]:
        """A step with other rows than before; of Keras `fit`, whose last batch is smaller, too."""
        if self.case.library != "keras" or self.group.several:  # processes pass `fit` rows of their own
            return self.adapter.train_step(model, batch)
        size = self.case.rows * 2 // 3
        history = model.fit(*self.case.batch, batch_size=size, shuffle=False, verbose=0).history
        return {"loss": history["loss"][-1]}


class _Uncompiled:
    """An adapter of JAX that computes with one of its models without a compiler."""

    def __init__(self, adapter: Adapter, model: object):
        self._adapter, self._model = adapter, model

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._adapter, name)
        if name not in ("forward", "gradients", "train_step"):
            return found

        def computed(model: object, batch: object) -> object:
            is_it = model is self._model
            with importlib.import_module("jax").disable_jit() if is_it else nullcontext():
                return found(model, batch)

        return computed


def first_rows(values: Any, number: int) -> Any:
    """Return the first rows of each array in nested sequences and mappings."""
    if isinstance(values, dict):
        return {name: first_rows(value, number) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(first_rows(value, number) for value in values)
    return values[:number]


def leaves(values: object) -> list[Any]:
    """Return the arrays in nested sequences and mappings."""
    if isinstance(values, dict):
        values = list(values.values())
    return (
        [leaf for each in values for leaf in leaves(each)] if isinstance(values, list | tuple) else [values]
    )


def quiet() -> warnings.catch_warnings[None]:
    """Return a block in which nothing warns: of maps and models that nobody would write, much does."""
    return warnings.catch_warnings(action="ignore")
