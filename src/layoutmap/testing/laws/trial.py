"""A drawn case with the models and comparisons that several laws share."""

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

from layoutmap.adapters import Adapter, get_adapter, require_capability
from layoutmap.core.variables import Assignment, Kind
from layoutmap.engines import get_engine
from layoutmap.inspecting.parity import (
    ROUNDINGS,
    ParityRow,
    collect_differences_by_position,
    compare_logged_numbers,
    compare_models,
    compare_variables,
    make_unsharded_model,
    rescale_errors_by_rounding,
)
from layoutmap.inspecting.rounding import make_perturbed_arrays
from layoutmap.scope.plan import Plan
from layoutmap.scope.process_group import MeshProcesses
from layoutmap.scope.scope import build
from layoutmap.testing.models.cases import EPSILONS, QUANTIZED, Case
from layoutmap.testing.models.choices import Choices

_COARSE_TOLERANCE = 8
"""Accepted multiple of the rounding error in coarse precisions. The usual 30 would accept a factor of two."""
_MAX_CANCELLATION = 1e-2
"""The largest relative error by rounding that is accepted for float32 in a drawn model, since sums may cancel."""
_REFERENCE_FACTOR = 4
"""Accepted ratio of the sharded model's error to the error of an unsharded model that rounds differently."""
DIVERGES = 1e3
"""If a loss exceeds this, an infinite next step is no fault, since some drawn models diverge at the learning rate."""
_SEED = 0
TOLERANCE = 1e-5  # largest relative difference that counts as equal if rounding was not estimated


class NotApplicable(Exception):
    """Raised by a law that does not apply to a case."""


class Trial:
    """A case under test, with the plan, the models, and the comparisons that its laws share.

    Args:
        case: The case.
        has_own_rows: Whether each process passes its own rows to the sharded model, which only torch has.
    """

    def __init__(self, case: Case, *, has_own_rows: bool = False):
        self.case = case
        self._excluded: Mapping[str, Any] | None = None
        self.adapter: Adapter = require_capability(get_adapter(case.library), Adapter, "a law")
        self._options: dict[str, Any] = {"rows": "own"} if has_own_rows else {}
        if has_own_rows:
            self.adapter = cast(
                "Adapter", _RowsOfThisProcessAdapter(self.adapter, case, self.processes.process_index)
            )

    @cached_property
    def plan(self) -> Plan:
        """The plan of the case."""
        return self.case.plan()

    @cached_property
    def processes(self) -> MeshProcesses:
        """The processes with devices of the mesh."""
        return MeshProcesses(get_engine(self.adapter.engine_name), self.case.layout_map.mesh)

    @contextmanager
    def create_shared_folder(self) -> Generator[str]:
        """Create a temporary folder in the first process, and yield its path in all processes."""
        with tempfile.TemporaryDirectory() as folder:
            yield self.processes.run_in_first_process(lambda: [folder])[0]

    @property
    def choices(self) -> Choices:
        """A new random generator of choices. Each law gets the same random numbers."""
        return Choices.from_seed(zlib.crc32(self.case.program_lines.encode()))

    @property
    def rule_assignments(self) -> list[Assignment]:
        """The assignments of weights and states that follow from rules, and not from a parent's layout."""
        kinds = (Kind.WEIGHT, Kind.STATE)
        return [a for a in self.plan.assignments if a.variable.kind in kinds and a.variable.parent is None]

    @cached_property
    def model_pair(self) -> tuple[Any, Any]:
        """The unsharded and the sharded model that all laws of the case share."""
        return self.make_model_pair()

    def make_model_pair(self) -> tuple[Any, Any]:
        """Return a new unsharded and a new sharded model, with all variables that training creates."""
        case = self.case
        self.adapter.set_seed(_SEED)
        sharded = build(
            case.make_model,
            case.layout_map,
            batch_dim=case.map.batch_dim,
            library=case.library,
            progress=False,
            **self._options,
        )
        self.adapter.create_lazy_variables(sharded, case.batch)
        return self.create_unsharded_model(), sharded

    def create_unsharded_model(self) -> Any:
        """Return a new unsharded model, with all variables that training creates."""
        self.adapter.set_seed(_SEED)
        model = make_unsharded_model(self.adapter, self.case.make_model, self.case.layout_map)
        self.adapter.create_lazy_variables(model, self.case.batch)
        return model

    @cached_property
    def pair_comparisons(self) -> Sequence[ParityRow]:
        """The comparisons of the model pair: outputs, gradients, three steps, and a step with fewer rows."""
        return tuple(self._compare_two_models(*self.model_pair, is_shared_pair=True))

    @cached_property
    def is_unsharded_model_finite(self) -> bool:
        """Whether all outputs, losses, and gradients of the unsharded model are finite."""
        model = self.create_unsharded_model()
        outputs = flatten_arrays(self.adapter.forward(model, self.case.batch))
        logs, gradients = self.adapter.gradients(model, self.case.batch)
        steps = [self.adapter.train_step(model, self.case.batch) for _ in range(3)]
        metrics = [metric for step_logs in (logs, *steps) for metric in step_logs.values()]
        numbers = [*outputs, *gradients.values(), *metrics]
        return all(np.isfinite(number).all() for number in numbers if number is not None)

    def exclude_rounding_differences(self, rows: Sequence[ParityRow]) -> list[ParityRow]:
        """Return the comparisons that differ by more than rounding.

        Rounding is estimated from pairs of unsharded models that differ only by rounding.
        """
        worst = {row.stage: EPSILONS[self.case.precision] for row in rows if not row.agrees}
        allowed = ROUNDINGS if self.case.precision == "float32" else _COARSE_TOLERANCE
        rounding: dict[tuple[str, int], float] = {}
        wrong = [row for row in rows if not row.agrees]
        for compare in (self._compare_in_float32, self._compare_perturbed_model, self._compare_equal_models):
            if not wrong:
                break
            unsharded_rows = tuple(compare())
            for key, change in collect_differences_by_position(unsharded_rows).items():
                rounding[key] = max(rounding.get(key, 0.0), change)
            for row in rescale_errors_by_rounding(unsharded_rows, rounding, allowed):
                worst[row.stage] = max(worst.get(row.stage, 0.0), row.error)
            wrong = [
                row
                for row in rescale_errors_by_rounding(rows, rounding, allowed)
                if not row.agrees and not row.error <= allowed * worst[row.stage]
            ]
        cancellation = dict.fromkeys(worst, 0.0)
        for row in (
            rescale_errors_by_rounding(tuple(self._compare_with_other_rounding()), rounding, allowed)
            if wrong
            else ()
        ):
            if row.error < _MAX_CANCELLATION:
                cancellation[row.stage] = max(cancellation.get(row.stage, 0.0), row.error)
        return [row for row in wrong if not row.error <= _REFERENCE_FACTOR * cancellation[row.stage]]

    def _compare_equal_models(self) -> Iterator[ParityRow]:
        """Yield the differences between two equal unsharded models: rounding, on devices that sum in a random order."""
        return self._compare_two_models(self.create_unsharded_model(), self.create_unsharded_model())

    def _compare_perturbed_model(self) -> Iterator[ParityRow]:
        """Compare an unsharded model with one after changing weights and batch by one rounding error each."""
        signs, step, reference = (
            np.random.default_rng(0),
            EPSILONS[self.case.precision],
            self.create_unsharded_model(),
        )
        moved = self._copy_weights(
            self.create_unsharded_model(),
            reference,
            lambda value: 1 + step * signs.choice([-1, 1], value.shape),
        )
        return self._compare_two_models(
            reference, moved, make_perturbed_arrays(self.case.batch, signs, TOLERANCE)
        )

    def _compare_in_float32(self) -> Iterator[ParityRow]:
        """Yield the differences between an unsharded model and a float32 model of equal weights: its rounding."""
        # A float32 model has no rounding to measure, and cannot take quantized weights.
        if self.case.precision not in ("float32", *QUANTIZED):
            reference = self.create_unsharded_model()
            wide_trial = Trial(self.case.to_precision("float32"))
            yield from self._compare_two_models(
                self._copy_weights(wide_trial.create_unsharded_model(), reference), reference
            )

    def _compare_with_other_rounding(self) -> Iterator[ParityRow]:
        """Compare an unsharded model with one that rounds differently, since sums may cancel in float32.

        JAX runs the other model without the compiler, which changes the order of operations. Float64 would affect all
        JAX models of the process. Other frameworks run the other model in float64.
        """
        if self.case.precision != "float32":
            return
        reference, adapter = self.create_unsharded_model(), self.adapter
        # If the other model cannot be created or trained, yield nothing, so that no difference is attributed to
        # rounding.
        with suppress(Exception):
            if adapter.engine_name == "jax":
                other = self.create_unsharded_model()
                adapter = cast("Adapter", _UncompiledAdapter(adapter, other))
            else:
                wide_trial = Trial(replace(self.case, precision="float64"))
                other = self._copy_weights(wide_trial.create_unsharded_model(), reference)
            yield from compare_models(
                adapter, reference, other, self.case.batch, tolerance=TOLERANCE, left_out=self._excluded
            ).rows

    def _copy_weights(
        self, model: object, source: object, factor: Callable[[Any], object] = lambda _: 1
    ) -> object:
        """Copy each weight of `source`, times `factor(weight)`, to the unsharded `model`, and return `model`."""
        trained = {a.variable.path: a.variable.is_trained for a in self.plan.assignments}
        # Unsharded Keras models may number unnamed layers differently, so match variables by order. The lists may have
        # different lengths, because JAX creates optimizer states as the last variables in the first step.
        models = (self.adapter.variables(each) for each in (self.model_pair[1], source, model))
        paths, weights, variables = (list(each.items()) for each in models)
        for (path, _), (_, weight), (_, variable) in zip(paths, weights, variables, strict=False):
            if path in trained and not path.startswith("optimizer."):
                value = self.adapter.read(weight).astype("float64")
                moved = value * factor(value) if trained[path] else value
                self.adapter.write(variable, moved.astype(self.adapter.read(variable).dtype))
        return model

    def _compare_two_models(
        self, reference: object, other: object, other_batch: Any = None, *, is_shared_pair: bool = False
    ) -> Iterator[ParityRow]:
        """Compare two models by their outputs, gradients, three steps, and a step with fewer rows.

        `other` gets `other_batch`, or if that is None the batch of the case. Elements whose gradients are only rounding
        errors are excluded. For two unsharded models, the elements that were excluded for the shared pair are excluded,
        and no others.
        """
        batch, adapter = self.case.batch, self.adapter
        other_batch = batch if other_batch is None else other_batch
        left_out = None if is_shared_pair else self._excluded
        report = compare_models(
            adapter, reference, other, batch, other_batch=other_batch, tolerance=TOLERANCE, left_out=left_out
        )
        if is_shared_pair:
            self._excluded = report.only_rounding
        yield from (row for row in report.rows if row.stage != "weights")
        # A sharded model that differs already would also differ in the next stage, so stop. Two unsharded models go on,
        # because their differences are estimates of the rounding in each stage.
        if is_shared_pair and any(row.stage != "weights" and not row.agrees for row in report.rows):
            return
        stage, num_rows = "fewer rows", self.case.rows * 2 // 3
        expected = self._train_on_fewer_rows(reference, slice_rows(batch, num_rows))
        actual = self._train_on_fewer_rows(other, slice_rows(other_batch, num_rows))
        # Some models diverge, because all have the same learning rate, so compare only finite numbers.
        if all(np.isfinite(number).all() for number in expected.values()):
            yield from compare_logged_numbers(stage, expected, actual, TOLERANCE)
            if all(np.all(np.abs(number) < DIVERGES) for number in expected.values()):
                yield from compare_variables(
                    adapter, stage, reference, other, TOLERANCE, report.only_rounding
                )

    def _train_on_fewer_rows(self, model: Any, fewer_rows: object) -> dict[str, float]:
        """Train a step on fewer rows, and return its logs. Keras models run `fit` with a smaller last batch instead."""
        # In several processes, `fit` takes only the rows of its process, so train without it.
        if self.case.library != "keras" or self.processes.has_other_processes:
            return self.adapter.train_step(model, fewer_rows)
        size = self.case.rows * 2 // 3
        history = model.fit(*self.case.batch, batch_size=size, shuffle=False, verbose=0).history
        return {"loss": history["loss"][-1]}


class _UncompiledAdapter:
    """A JAX adapter that runs one model without the compiler."""

    def __init__(self, adapter: Adapter, model: object):
        self._adapter, self._model = adapter, model

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._adapter, name)
        if name not in ("forward", "gradients", "train_step"):
            return method

        def call_method_uncompiled(model: object, batch: object) -> object:
            is_uncompiled = model is self._model
            with importlib.import_module("jax").disable_jit() if is_uncompiled else nullcontext():
                return method(model, batch)

        return call_method_uncompiled


class _RowsOfThisProcessAdapter:
    """An adapter that passes a sharded model only the rows of this process, and returns only these rows of outputs.

    The last rows of a batch are dropped for both models, so that all processes get equally many.
    """

    def __init__(self, adapter: Adapter, case: Case, process_index: int):
        mesh, dim = case.layout_map.mesh, case.map.batch_dim
        assert mesh is not None
        assert dim is not None
        self._adapter, self._num_shards = adapter, mesh.dim_size(dim)
        self._shard_index = int(np.unravel_index(process_index, mesh.shape)[mesh.dim_names.index(dim)])

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._adapter, name)
        if name not in ("forward", "gradients", "train_step"):
            return method

        def call_method_with_own_rows(model: Any, batch: Any) -> object:
            num_rows = len(flatten_arrays(batch)[0]) // self._num_shards
            start = num_rows * self._shard_index
            if self._adapter.find_scope_context(model) is not None:
                return method(model, slice_rows(batch, start + num_rows, start))
            result = method(model, slice_rows(batch, num_rows * self._num_shards))
            return slice_rows(result, start + num_rows, start) if name == "forward" else result

        return call_method_with_own_rows


def slice_rows(values: Any, stop: int, start: int = 0) -> Any:
    """Return nested sequences and mappings with rows `start` to `stop` of each array, and scalars unchanged."""
    if isinstance(values, dict):
        return {name: slice_rows(value, stop, start) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(slice_rows(value, stop, start) for value in values)
    return values[start:stop] if np.ndim(values) else values


def flatten_arrays(values: object) -> list[Any]:
    """Return a flat list of the arrays in nested sequences and mappings."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [array for value in values for array in flatten_arrays(value)]
    return [values]


def ignore_warnings() -> warnings.catch_warnings[None]:
    """Return a context that ignores all warnings, because many random maps and models cause some."""
    return warnings.catch_warnings(action="ignore")
