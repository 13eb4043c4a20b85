"""Check that a sharded model computes the same numbers as the unsharded model on one device.

`check_parity` builds the same model twice from the same seed, once unsharded and once under a layout map, feeds both
the same batch, and compares the weights (bit for bit), the outputs, the gradients, and the variables after each
optimizer step. It names the first value that differs.

Two programs that add the same numbers in another order differ by rounding, about 1e-7 of the numbers' size. If a
gradient is no larger than that (a bias in front of a normalization has a gradient of 0), an optimizer that divides by
the gradient's size turns rounding into full steps, on one device as on many. So elements whose gradient is less than a
thousand times the rounding in it are left out of the comparison of steps, and the report counts them.

Each difference is divided by the size of the unsharded model's own values, so small wrong numbers are found, too. Where
terms cancel, rounding may be as large as the values. Then the unsharded model is compared with itself after its numbers
were changed by one rounding error, and a difference counts only if it is thirty times as large as the one found there.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from layoutmap.adapters import (
    TrainingAdapter,
    get_adapter,
    get_adapter_of_imported_library,
    require_capability,
)
from layoutmap.core.blocks import NumpyArray
from layoutmap.core.errors import ParityError
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import BatchDim
from layoutmap.engines import get_engine
from layoutmap.inspecting.rounding import make_perturbed_arrays, perturb_variables
from layoutmap.scope.arguments import check_model_function
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.owner import retry_with_model_library
from layoutmap.scope.progress import ElapsedTime
from layoutmap.scope.scope import build

ROUNDINGS = 30
"""The allowed difference between models, as a multiple of the measured effect of rounding."""
_EPSILON = 1e-7  # relative rounding error of float32
_NUM_DRAWS = 3  # draw rounding errors several times, because with one draw a value may remain equal by chance
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)  # devices may flush smaller numbers to 0, so avoid these
_LARGEST_ROUNDING = 1e-2  # a larger difference has a different cause than rounding
_SIGNIFICANT = 1e3  # a gradient more than this many times larger than its rounding error is significant


@dataclass(frozen=True, slots=True)
class ParityRow:
    """Describe the comparison of one array or number between the unsharded and the sharded model.

    Args:
        stage: `"weights"`, `"forward"`, `"loss"`, `"gradient"`, or `"step 1"` and so on.
        name: Path of a variable, or name of an output.
        error: Largest absolute difference, divided by the largest value of the unsharded model. If rounding changes
            that value by more than the tolerance, it is divided by a larger scale of at most 1 (for gradients: the
            largest gradient of the model). `nan` if the shapes differ or only one side is not a number.
        tolerance: Largest error that counts as equal.
        left_out: Number of elements that were not compared, because their gradient is only rounding.
        factor: Factor between the values of both models, if they differ only by a factor; else `None`.
        difference: Largest absolute difference.
        largest_scale: Largest scale that may be used because of rounding.
    """

    stage: str
    name: str
    error: float
    tolerance: float
    left_out: int = 0
    factor: float | None = None
    difference: float = 0.0
    largest_scale: float = 0.0

    @property
    def may_be_rounding(self) -> bool:
        """Whether rounding could explain the difference, as when large terms cancel."""
        return not self.agrees and self.difference <= self.tolerance * self.largest_scale

    def rescale_error_by_rounding(self, rounding: float, times: float = ROUNDINGS) -> ParityRow:
        """Return the row with its error scaled, so that `times` times the effect of rounding is within the tolerance.

        Args:
            rounding: How much one rounding error in all numbers changes the unsharded model's values.
            times: How many times this change is allowed.
        """
        if self.agrees or not rounding or not self.tolerance:
            return self
        scale = min(self.largest_scale, times * rounding / self.tolerance)
        return replace(self, error=min(self.error, self.difference / scale)) if scale else self

    @property
    def agrees(self) -> bool:
        """Whether the error is within the tolerance. An error of `nan` is not."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        times = "" if self.factor is None else f", {self.factor:.4g} times the unsharded one"
        return (
            f"{self.stage:<9} {self.name}: differs by {self.error:.3g}, allowed {self.tolerance:.3g}{times}"
        )


@dataclass(frozen=True, slots=True, repr=False)
class ParityReport:
    """Report all comparisons of two models in order.

    Args:
        rows: The comparisons.
        losses: Losses of the unsharded and of the sharded model before each step. Empty if the model's own training
            step logs no `"loss"`.
        not_compared: Parts that could not be compared, with the reason.
        only_rounding: For each compared gradient, by path, a mask of the elements that are only rounding.
    """

    rows: tuple[ParityRow, ...]
    losses: tuple[tuple[float, float], ...]
    not_compared: tuple[str, ...] = ()
    only_rounding: Mapping[str, npt.NDArray[np.bool_]] = field(
        default_factory=dict[str, npt.NDArray[np.bool_]], repr=False, compare=False
    )

    @property
    def first_difference(self) -> ParityRow | None:
        """First row that disagrees, or `None`."""
        return next((row for row in self.rows if not row.agrees), None)

    @property
    def agrees(self) -> bool:
        """Whether all comparisons agree."""
        return self.first_difference is None

    def worst(self, stage: str = "") -> float:
        """Return the largest error of all stages with a name that starts with `stage`."""
        return max((row.error for row in self.rows if row.stage.startswith(stage)), default=0.0)

    def __str__(self) -> str:
        stages = dict.fromkeys(row.stage for row in self.rows)
        lines = [f"  {stage:<9} {self.worst(stage):.3g}" for stage in stages]
        left_out = max(
            (sum(r.left_out for r in self.rows if r.stage == stage) for stage in stages), default=0
        )
        if left_out:
            lines.append(f"  {left_out} elements left out of the steps: their gradient is only rounding")
        lines += [f"  not compared: {each}" for each in self.not_compared]
        first = self.first_difference
        verdict = "parity holds" if first is None else f"parity fails, first at {first}"
        return "\n".join([f"{verdict}; largest relative differences:", *lines])

    def __repr__(self) -> str:
        return f"<ParityReport: {'agrees' if self.agrees else self.first_difference}>"


@retry_with_model_library
def check_parity(
    make_model: Callable[[], object],
    layout_map: LayoutMap,
    batch: object,
    *,
    steps: int = 3,
    seed: int = 0,
    tolerance: float = 1e-5,
    batch_dim: BatchDim | None = None,
    library: str | None = None,
    raises: bool = True,
    progress: bool | None = None,
) -> ParityReport:
    """Compare a model under a layout map with the same model on one device.

    Both are built in this process, one after the other, so the unsharded model must fit on one device. For a large
    model, use a small configuration. Layers whose random state differs from run to run get the same seeds.

    Args:
        make_model: Function that creates and returns the model, compiled if steps are compared. It is called twice, and
            more often if rounding must be measured because values are small compared with others.
        layout_map: The rules.
        batch: Batch of one training step: `(x, y)` or `(x, y, sample_weight)`, with all rows in each process.
        steps: Number of training steps to compare, each on the same batch; 0 for a model that is not compiled.
        seed: Seed of both builds. Random states are restored afterwards.
        tolerance: Largest relative difference that counts as equal. Initial weights must be equal bit for bit.
        batch_dim: Mesh dim that splits the batch; `None`: none.
        library: See `scope`.
        raises: Whether to raise if the models differ, instead of only reporting it.
        progress: Whether to show the current comparison on stderr. `None`: only if it takes long, on any stderr.

    Returns:
        The comparisons. `print` shows a summary.

    Raises:
        ParityError: The models differ. The message names the first difference.
        PlanError: The layout map does not fit the model.

    Example:
        >>> import keras, layoutmap as lm, numpy as np
        >>> def make_model():
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")])
        ...     model.compile(optimizer="sgd", loss="mse")
        ...     return model
        >>> layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {"d1.kernel": (None, "model")})
        >>> batch = np.ones((4, 8), "float32"), np.ones((4, 16), "float32")
        >>> lm.check_parity(make_model, layout_map, batch, batch_dim="batch")
        <ParityReport: agrees>
    """
    check_model_function(make_model, layout_map, "check_parity")
    found = get_adapter(library) if library else get_adapter_of_imported_library()
    adapter = require_capability(found, TrainingAdapter, "check_parity")

    def make_seeded_unsharded_model() -> Any:
        adapter.set_seed(seed)
        model = make_unsharded_model(adapter, make_model, layout_map)
        adapter.create_lazy_variables(model, batch)
        return model

    shown_as = "log" if progress is None else progress
    with (
        adapter.preserve_random_states(),
        ElapsedTime("comparing the model with one device", enabled=shown_as) as shown,
    ):
        adapter.set_seed(seed)
        sharded = build(make_model, layout_map, batch_dim=batch_dim, library=adapter.name, progress=False)
        adapter.create_lazy_variables(sharded, batch)
        adapter.set_seed(seed)
        unsharded = make_unsharded_model(adapter, make_model, layout_map)
        _check_no_shared_variables(adapter, unsharded, sharded)
        adapter.create_lazy_variables(unsharded, batch)
        report = compare_models(
            adapter, unsharded, sharded, batch, steps=steps, tolerance=tolerance, show_progress=shown
        )
        del unsharded, sharded
        for draw in range(_NUM_DRAWS):
            first = report.first_difference
            if first is None or not first.may_be_rounding:
                break
            with_rounding_errors = compare_with_perturbed_model(
                adapter,
                make_seeded_unsharded_model(),
                make_seeded_unsharded_model(),
                batch,
                steps=steps,
                tolerance=tolerance,
                left_out=report.only_rounding,
                seed=draw,
                show_progress=shown,
            )
            rounding = collect_differences_by_position(with_rounding_errors.rows)
            report = replace(report, rows=rescale_errors_by_rounding(report.rows, rounding))
    first = report.first_difference
    if raises and first is not None:
        raise ParityError(
            f"{first.name}: the sharded model differs from the unsharded one, first in its {first.stage}",
            facts={
                "differs by": f"{first.error:.3g} (allowed {first.tolerance:.3g})",
                "mesh": str(layout_map.mesh),
                "then": "; ".join(str(r) for r in report.rows if not r.agrees and r is not first)[:300],
            },
            why=_explain_why_row_differs(first, layout_map.mesh),
            fix=_suggest_parity_fix(first),
        )
    return report


def make_unsharded_model(
    adapter: TrainingAdapter, make_model: Callable[[], object], layout_map: LayoutMap
) -> Any:
    """Build the model unsharded, on one device of the type that the mesh has, and return it."""
    assert layout_map.mesh is not None  # a map without a mesh builds no model
    return adapter.build_model_on_one_device(
        make_model, get_engine(adapter.engine_name).bind_mesh(layout_map.mesh)
    )


# The effect of rounding depends on the model, so measure it with a second unsharded model whose values are changed by
# one rounding error each (decisions/0008).
def compare_with_perturbed_model(
    adapter: TrainingAdapter,
    model: Any,
    perturbed_model: Any,
    batch: Any,
    *,
    steps: int = 3,
    tolerance: float = 1e-5,
    left_out: Mapping[str, npt.NDArray[np.bool_]] | None = None,
    seed: int = 0,
    show_progress: Callable[[str], object] | None = None,
) -> ParityReport:
    """Compare two equal models after changing each number of the second model and its batch by one rounding error.

    Args:
        adapter: Adapter of the models.
        model: A model that has taken no step.
        perturbed_model: An equal model, whose variables are changed.
        batch: The batch of each step.
        steps: Number of training steps to compare.
        tolerance: The tolerance of the comparison that this one explains. One rounding error is an 84th of it.
        left_out: See `compare_models`.
        seed: Seed of the signs of the rounding errors.
        show_progress: See `compare_models`.
    """
    signs = np.random.default_rng(seed)
    perturb_variables(adapter, perturbed_model, signs, tolerance)
    perturbed_batch = make_perturbed_arrays(batch, signs, tolerance)
    return compare_models(
        adapter,
        model,
        perturbed_model,
        batch,
        other_batch=perturbed_batch,
        steps=steps,
        tolerance=tolerance,
        left_out=left_out,
        show_progress=show_progress,
    )


def collect_differences_by_position(rows: Sequence[ParityRow]) -> dict[tuple[str, int], float]:
    """Return a dict from the stage of each row, and its position in the stage, to the row's difference."""
    return {position: row.difference for position, row in _iterate_rows_with_position(rows)}


def rescale_errors_by_rounding(
    rows: Sequence[ParityRow], rounding: Mapping[tuple[str, int], float], times: float = ROUNDINGS
) -> tuple[ParityRow, ...]:
    """Return rows with errors reduced as far as the measured effect of rounding can explain them."""
    positioned = _iterate_rows_with_position(rows)
    return tuple(row.rescale_error_by_rounding(rounding.get(key, 0.0), times) for key, row in positioned)


def _iterate_rows_with_position(rows: Sequence[ParityRow]) -> Iterator[tuple[tuple[str, int], ParityRow]]:
    """Yield each row after a pair of its stage and its position in the stage."""
    # Match rows by position, because unnamed layers have different names in each build.
    counts = Counter[str]()
    for row in rows:
        yield (row.stage, counts[row.stage]), row
        counts[row.stage] += 1


def compare_models(
    adapter: TrainingAdapter,
    unsharded: Any,
    sharded: Any,
    batch: Any,
    *,
    other_batch: Any = None,
    steps: int = 3,
    tolerance: float = 1e-5,
    left_out: Mapping[str, npt.NDArray[np.bool_]] | None = None,
    show_progress: Callable[[str], object] | None = None,
) -> ParityReport:
    """Train two existing models, and return a report that compares them at each stage.

    Args:
        adapter: Adapter of the models.
        unsharded: The model with the expected values.
        sharded: The other model.
        batch: The batch of each step.
        other_batch: The batch of the other model; `None`: the same.
        steps: Number of training steps to compare.
        tolerance: The largest relative difference that counts as equal.
        left_out: The elements that are left out of the comparison of steps, as `only_rounding` of an earlier report of
            the same model; `None`: those whose gradients are only rounding in this comparison.
        show_progress: Called with a text after each comparison of a tensor.
    """
    losses: list[tuple[float, float]] = []
    not_compared: list[str] = []
    masks: dict[str, npt.NDArray[np.bool_]] = {}
    # Match variables by order, because unnamed layers have different names in each build.
    known = None if left_out is None else list(left_out.values())
    batches = batch, batch if other_batch is None else other_batch
    rows = list[ParityRow]()
    for row in _compare_stages(
        adapter, unsharded, sharded, batches, steps, tolerance, known, losses, not_compared, masks
    ):
        rows.append(row)
        if show_progress is not None:
            show_progress(f", {row.stage}")
    return ParityReport(tuple(rows), tuple(losses), tuple(not_compared), masks)


def _check_no_shared_variables(adapter: TrainingAdapter, unsharded: object, sharded: object) -> None:
    """Raise if both models share variables, because the model would be compared with itself."""
    # Keep both mappings alive, because the ids of deleted variables may be reused.
    ours, theirs = adapter.variables(sharded), adapter.variables(unsharded)
    laid_out = {id(variable) for variable in ours.values()}
    shared = [path for path, variable in theirs.items() if unsharded is sharded or id(variable) in laid_out]
    if shared:
        raise ParityError(
            f"{shared[0]}: the second model of make_model() shares this variable with the first",
            facts={"shared variables": len(shared)},
            why="the model would be compared with itself",
            fix="create all layers and the optimizer inside make_model()",
        )


# Adam turns the rounding error of a zero gradient into a full step, so leave out such elements (decisions/0008).
def _compare_stages(
    adapter: TrainingAdapter,
    unsharded: object,
    sharded: object,
    batches: tuple[object, object],
    steps: int,
    tolerance: float,
    left_out: Sequence[npt.NDArray[np.bool_]] | None,
    losses: list[tuple[float, float]],
    not_compared: list[str],
    masks: dict[str, npt.NDArray[np.bool_]],
) -> Iterator[ParityRow]:
    yield from compare_variables(adapter, "weights", unsharded, sharded, 0.0)
    batch, other_batch = batches
    outputs = (
        _flatten_outputs(adapter.forward(unsharded, batch)),
        _flatten_outputs(adapter.forward(sharded, other_batch)),
    )
    for number, (a, b) in enumerate(zip(*outputs, strict=True)):
        yield _compare_arrays("forward", f"output {number}", a, b, tolerance)
    if not steps:
        return
    logs, gradients = adapter.gradients(unsharded, batch)
    other_logs, other_gradients = adapter.gradients(sharded, other_batch)
    yield from compare_logged_numbers("loss", logs, other_logs, tolerance)
    if not logs:
        not_compared.append("losses, since the model's train_step logs no number")
    pairs = zip(other_gradients.items(), gradients.values(), strict=True)
    found = [(path, a, b) for (path, b), a in pairs if a is not None and b is not None]
    without = [path for path in other_gradients if path not in {each for each, _, _ in found}]
    if without:
        some = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
        not_compared.append(
            f"gradients of {some}, since the model's train_step passes them to no optimizer of the model"
        )
    largest = max((float(np.max(np.abs(g))) for _, g, _ in found if g.size), default=0.0)
    perturbed_gradients: dict[str, Any] = {}
    if left_out is None and any(_can_be_rounding(a, b, largest) for _, a, b in found):
        # Some adapters draw random numbers by the count of calls, so run both models to keep the counts equal.
        again, _ = (
            _compute_perturbed_gradients(adapter, model, batch, tolerance) for model in (unsharded, sharded)
        )
        perturbed_gradients = dict(zip(other_gradients, again.values(), strict=True))
    for number, (path, gradient, actual) in enumerate(found):
        row = _compare_arrays("gradient", path, gradient, actual, tolerance, largest_scale=largest)
        yield (row if row.agrees else replace(row, factor=_find_scale_factor(gradient, actual, tolerance)))
        if left_out is None:
            tiny = perturbed_gradients.get(path) if _can_be_rounding(gradient, actual, largest) else None
            masks[path] = _mask_rounding_elements(gradient, actual, tiny)
        else:
            masks[path] = left_out[number]
    for step in range(1, steps + 1):
        logs, other_logs = adapter.train_step(unsharded, batch), adapter.train_step(sharded, other_batch)
        if "loss" in logs and "loss" in other_logs:
            losses.append((logs["loss"], other_logs["loss"]))
        yield from compare_logged_numbers(f"step {step}", logs, other_logs, tolerance)
        yield from compare_variables(adapter, f"step {step}", unsharded, sharded, tolerance, masks)


def compare_logged_numbers(
    stage: str, expected: Mapping[str, float], actual: Mapping[str, float], tolerance: float
) -> Iterator[ParityRow]:
    """Yield a row for each number that two steps logged. A number that is in only one log counts as different."""
    if expected.keys() != actual.keys() and len(expected) == len(actual):
        # Loss names contain layer numbers that grow with each build, so pair them in numeric order.
        named = zip(
            sorted(actual, key=_make_name_sort_key), sorted(expected, key=_make_name_sort_key), strict=True
        )
        expected = {name: expected[other] for name, other in named}
    for name in dict.fromkeys([*expected, *actual]):
        if name in expected and name in actual:
            yield _compare_arrays(
                stage, name, np.asarray(expected[name]), np.asarray(actual[name]), tolerance
            )
        else:
            yield ParityRow(stage, name, float("nan"), tolerance)


def _make_name_sort_key(name: str) -> tuple[str, list[int]]:
    """Return the words and the numbers of a name. Keras omits the first number, so `dense` sorts before `dense_1`."""
    return re.sub(r"_?\d+", "", name), [int(number) for number in re.findall(r"\d+", name)]


def compare_variables(
    adapter: TrainingAdapter,
    stage: str,
    unsharded: object,
    sharded: object,
    tolerance: float,
    masks: Mapping[str, npt.NDArray[np.bool_]] | None = None,
) -> Iterator[ParityRow]:
    """Yield a row for each variable of two models, under its path in the sharded model."""
    # Pair variables by order, because the unsharded model numbers its unnamed layers differently.
    ours, theirs = adapter.variables(sharded), adapter.variables(unsharded)
    if len(ours) != len(theirs):
        raise ParityError(
            "the two builds created different variables",
            facts={"unsharded": f"{len(theirs)} variables", "sharded": f"{len(ours)} variables"},
            why="make_model() did not create the same variables twice",
            fix="let make_model() depend only on the random seed",
        )
    for (path, variable), unsharded_variable in zip(ours.items(), theirs.values(), strict=True):
        expected, actual = adapter.read(unsharded_variable), adapter.read(variable)
        left_out = _find_rounding_mask(path, expected.shape, masks or {})
        if left_out is not None and expected.shape == actual.shape:
            actual = cast("NumpyArray", np.where(left_out, expected, actual))
        count = 0 if left_out is None else int(left_out.sum())
        yield _compare_arrays(stage, path, expected, actual, tolerance, left_out=count)


def _find_rounding_mask(
    path: str, shape: tuple[int, ...], masks: Mapping[str, npt.NDArray[np.bool_]]
) -> npt.NDArray[np.bool_] | None:
    """Return the mask of a variable's elements with gradients of only rounding error, or None if there are none."""
    found = masks.get(path)
    if found is None:
        found = next((m for weight, m in masks.items() if path.startswith(f"optimizer.{weight}.")), None)
    return found if found is not None and found.shape == shape and found.any() else None


def _can_be_rounding(expected: NumpyArray, actual: NumpyArray, largest_gradient: float) -> bool:
    """Return whether a gradient is so small that all of it may be rounding error of the model's largest gradient."""
    size = max(float(np.max(np.abs(each), initial=0.0)) for each in (expected, actual))
    return 0 < size < 10 * _EPSILON * largest_gradient


def _compute_perturbed_gradients(
    adapter: TrainingAdapter, model: Any, batch: object, tolerance: float
) -> Mapping[str, Any]:
    """Return the gradients after changing the model's values by one rounding error, and restore the values."""
    # A forward pass may update variables such as moving averages, so restore all of them.
    before = {path: adapter.read(variable).copy() for path, variable in adapter.variables(model).items()}
    signs = np.random.default_rng(0)
    perturb_variables(adapter, model, signs, tolerance)
    try:
        return adapter.gradients(model, make_perturbed_arrays(batch, signs, tolerance))[1]
    finally:
        for path, variable in adapter.variables(model).items():
            if path in before and not np.array_equal(adapter.read(variable), before[path], equal_nan=True):
                adapter.write(variable, before[path])


def _mask_rounding_elements(
    expected: NumpyArray, actual: NumpyArray, perturbed: NumpyArray | None
) -> npt.NDArray[np.bool_]:
    """Return the mask of gradient elements that may be only rounding error.

    If no element is larger than ten times the effect of one rounding error in the model's numbers, the whole gradient
    is rounding error. Then zeros count, too, because a value may round to zero in one step and not in the next.

    Args:
        expected: The gradient of the unsharded model.
        actual: The gradient of the other model.
        perturbed: The gradient of the unsharded model after its numbers were changed by one rounding error; `None`: the
            gradient is larger than rounding.
    """
    a, b = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    noise = 0.0
    if perturbed is not None:
        noise = float(np.max(np.abs(a - np.asarray(perturbed, np.float64)), initial=0.0))
    if max(np.max(np.abs(a), initial=0.0), np.max(np.abs(b), initial=0.0)) < 10 * noise:
        return np.ones(a.shape, np.bool_)
    rounding = max(noise, np.max(np.abs(a - b), initial=0.0), _EPSILON * np.max(np.abs(a), initial=0.0))
    return (np.abs(a) < _SIGNIFICANT * rounding) & ((a != 0) | (b != 0))


def _compare_arrays(
    stage: str,
    name: str,
    expected: NumpyArray,
    actual: NumpyArray,
    tolerance: float,
    *,
    left_out: int = 0,
    largest_scale: float = 1.0,
) -> ParityRow:
    """Return a row with the largest absolute difference of two arrays, divided by the largest expected value."""
    row = ParityRow(stage, name, 0.0, tolerance, left_out)
    if expected.shape != actual.shape:
        return replace(row, error=float("nan"))
    if expected.dtype.kind in "biu":
        return replace(row, error=float(not np.array_equal(expected, actual)))
    a, b = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    if not a.size or np.array_equal(a, b, equal_nan=True):
        return row
    difference = float(np.max(np.abs(a - b)))
    size = max(float(np.max(np.abs(a))), _SMALLEST_NORMAL / tolerance if tolerance else 0.0)
    error = difference / size if size else math.inf
    return replace(row, error=error, difference=difference, largest_scale=largest_scale)


def _find_scale_factor(expected: NumpyArray, actual: NumpyArray, tolerance: float) -> float | None:
    """Return the factor between two proportional arrays, or None if they are not proportional or the factor is 1."""
    if expected.shape != actual.shape or not np.any(expected):
        return None
    a, b = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    factor = float(np.vdot(a, b) / np.vdot(a, a))
    # A factor of 1 cannot explain a difference, so return None.
    if math.isclose(factor, 1, abs_tol=10 * tolerance):
        return None
    return factor if np.max(np.abs(a * factor - b)) <= 10 * tolerance * np.max(np.abs(b)) else None


def _flatten_outputs(outputs: object) -> list[NumpyArray]:
    """Return the arrays in nested mappings and sequences, in order."""
    parts: list[Any]
    if isinstance(outputs, Mapping):
        parts = list(cast("Mapping[Any, Any]", outputs).values())
    elif isinstance(outputs, (list, tuple)):
        parts = list(cast("list[Any]", outputs))
    else:
        return [np.asarray(outputs)]
    return [array for part in parts for array in _flatten_outputs(part)]


def _explain_why_row_differs(row: ParityRow, mesh: Mesh | None) -> str:
    if row.stage == "weights":
        return "initial values must be equal bit for bit, but the models used different seeds or initializers"
    if _is_likely_rounding(row):
        return (
            "sums over a mesh add numbers in a different order, and some models magnify the rounding, as those that "
            "normalize by few values; or an operation is slightly wrong"
        )
    if row.stage == "forward":
        return "the weights were equal and the outputs are not: some operation is wrong under its layouts"
    if mesh is not None and row.factor is not None and (dims := _format_dims_with_product(mesh, row.factor)):
        return (
            f"the outputs were equal and each element of this gradient is {row.factor:.3g} times the unsharded one, "
            f"the size of the mesh in {dims}: a sum over the mesh adds equal copies"
        )
    if row.stage in ("gradient", "loss"):
        return "the outputs were equal and the gradients are not: a reduction over the mesh is missing or doubled"
    return "gradients were equal and the step is not: the optimizer's state or its order of updates differs"


def _format_dims_with_product(mesh: Mesh, factor: float) -> str:
    """Return the fewest mesh dims, as text, with sizes that multiply to a factor or its inverse, or an empty string."""
    names = [name for name in mesh.dim_names if mesh.dim_size(name) > 1]
    for number in range(1, len(names) + 1):
        for some in combinations(names, number):
            size = math.prod(map(mesh.dim_size, some))
            if any(math.isclose(each, size, rel_tol=1e-3) for each in (factor, 1 / factor if factor else 0)):
                return " x ".join(some)
    return ""


def _is_likely_rounding(row: ParityRow) -> bool:
    return row.stage != "weights" and row.factor is None and row.error < _LARGEST_ROUNDING


def _suggest_parity_fix(row: ParityRow) -> str:
    look = "call with raises=False and look at the report's rows"
    if _is_likely_rounding(row):
        return f"{look}; if all are as small, allow that with tolerance=, or compare in float64"
    if row.stage in ("forward", "gradient"):
        return (
            f"{look}; operators that frameworks are known to shard wrongly are in docs/xla-faults.md (JAX) and "
            "docs/torch-operators.md (PyTorch)"
        )
    return look
