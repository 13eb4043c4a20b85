"""Laws of training: a model in layouts has the numbers of one device."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from layoutmap.core.mesh import Mesh
from layoutmap.inspecting.inspect import inspect
from layoutmap.inspecting.parity import compared, compared_numbers, compared_variables
from layoutmap.testing.laws.trial import DIVERGES, TOLERANCE, NotTried, Trial, leaves
from layoutmap.testing.models.cases import QUANTIZED
from layoutmap.testing.products import tf32


def first_values_are_those_of_the_plain_model(trial: Trial) -> Iterator[str]:
    """The first values are those of the plain model, bit for bit."""
    for row in compared_variables(trial.adapter, "weights", *trial.pair, tolerance=0.0):
        if not row.agrees:
            yield str(row)


def it_predicts_and_evaluates_as_on_one_device(trial: Trial) -> Iterator[str]:
    """`predict` and `evaluate`, the last of whose batches has fewer rows, return the numbers of one device.

    One case in three is tried.
    """
    if trial.case.library != "keras" or trial.group.several:  # processes pass them rows of their own
        raise NotTried("its library has no predict, or several processes compute")
    if not trial.choices.one_in(3):
        raise NotTried("one case in three is tried")
    batch, size = trial.case.batch, trial.case.rows * 2 // 3
    found: list[dict[str, Any]] = []
    for model in trial.pair:
        outputs = leaves(model.predict(batch[0], batch_size=size, verbose=0))
        logs = model.evaluate(*batch, batch_size=size, verbose=0, return_dict=True)
        # Plain Keras on TensorFlow averages the loss of one of several outputs over batches, not over rows.
        found.append(
            {f"output {number}": each for number, each in enumerate(outputs)} | {"loss": logs["loss"]}
        )
    rows = compared_numbers("forward", found[0], found[1], TOLERANCE)
    yield from map(str, trial.beyond_rounding(list(rows)))


def it_trains_as_on_one_device(trial: Trial) -> Iterator[str]:
    """Outputs, gradients, three steps, and steps with fewer rows are those of one device, but for rounding."""
    wrong = trial.beyond_rounding(trial.rows)
    if wrong and not trial.is_finite:
        raise NotTried("the plain model has no finite numbers")
    yield from map(str, wrong)


def it_computes_the_same_without_a_compiler(trial: Trial) -> Iterator[str]:
    """Outputs, gradients and a step are those of one device where JAX runs each operation as it comes.

    One case in eight is tried, since it takes ten times as long as compiled.
    """
    if trial.adapter.engine_name != "jax":
        raise NotTried("on the other engines, each operation runs as it comes in all laws")
    if trial.group.several:
        raise NotTried("several processes of JAX compute together what is compiled")
    if not trial.choices.one_in(8):
        raise NotTried("one case in eight is tried")
    pair = trial.new_pair()
    with importlib.import_module("jax").disable_jit():
        found = compared(trial.adapter, *pair, trial.case.batch, steps=1, tolerance=TOLERANCE)
        yield from map(str, trial.beyond_rounding(found.rows))


def it_trains_in(precision: str, trial: Trial) -> Iterator[str]:  # why: decisions/0008
    """First values, outputs, gradients and steps of SGD are those of one device, but for rounding, in a precision.

    Each case is tried in one precision other than float32: in TF32, or in one that models of its kind are drawn in;
    quantized less often, as that takes longest.
    """
    weights = {each: 1 if each in QUANTIZED else 3 for each in ("TF32", *trial.case.model.precisions)}
    if precision != trial.choices.weighted(weights):
        raise NotTried("another precision is tried on this case")
    other = Trial(trial.case.in_precision(precision))
    with ExitStack() as stack:
        if precision == "TF32":
            in_tf32 = tf32(trial.adapter.engine_name, Mesh(None, trial.case.map.mesh))
            if trial.case.devices.simulated or not stack.enter_context(in_tf32):
                raise NotTried("no TF32 on these devices")
        try:
            if other.plan.errors:
                raise NotTried(f"the plan refuses it: {other.plan.errors[0]}")
            yield from first_values_are_those_of_the_plain_model(other)
            yield from it_trains_as_on_one_device(other)
        except NotTried:
            raise
        except Exception:
            if _raises(lambda *_: other.adapter.train_step(other.plain(), other.case.batch), None, None):
                raise NotTried("its plain model takes no step in it") from None
            raise


def replicas_have_the_same_bits(trial: Trial) -> Iterator[str]:
    """Devices and processes that hold one shard of a variable have the same bits of it, also after steps."""
    problems = inspect(trial.pair[1], across=True).problems
    yield from (str(problem) for problem in problems if problem.kind in ("differs", "drifted"))


def a_step_that_fails_changes_nothing(trial: Trial) -> Iterator[str]:
    """A step that raises on one device raises in layouts, and changes no variable that it does not change there."""
    plain, sharded = trial.pair
    batch = _of_another_rank(trial.case.batch)
    alone = [trial.adapter.read(variable) for variable in trial.adapter.variables(plain).values()]
    # TensorFlow forgets the rank of inputs where it traces a step for a second shape, and may raise for that alone.
    computations = trial.adapter.train_step, trial.adapter.gradients
    if not all(_raises(each, plain, batch) for each in computations):
        raise NotTried("its plain model takes inputs of other shapes")
    if not all(map(_is_same, alone, map(trial.adapter.read, trial.adapter.variables(plain).values()))):
        raise NotTried("its plain model changes its state before it raises")
    # Keras on JAX gives weights and their averages one memory at the end of `fit`, and in the next step away, twice.
    if _raises(trial.adapter.train_step, plain, trial.case.batch):
        raise NotTried("its plain model takes no other step")
    trial.adapter.train_step(sharded, trial.case.batch)
    variables = trial.adapter.variables(sharded)
    before = {path: trial.adapter.read(variable) for path, variable in variables.items()}
    if not _raises(trial.adapter.train_step, sharded, batch):
        yield "a step that raises on one device did not raise in layouts"
    for path, variable in trial.adapter.variables(sharded).items():
        if path in before and not _is_same(before[path], trial.adapter.read(variable)):
            yield f"{path}: has another value after a step that failed"
    expected, logs = (trial.adapter.train_step(model, trial.case.batch) for model in trial.pair)
    # Some diverge, on any device.
    is_stable = all(np.all(np.abs(each) < DIVERGES) for each in expected.values())
    if is_stable and not all(np.isfinite(each).all() for each in logs.values()):
        yield f"the next step is not finite: {logs}"


def an_evaluation_that_fails_keeps_the_weights(trial: Trial) -> Iterator[str]:
    """After `evaluate` whose second batch has another rank the weights have the bits that they had, and a step goes on.

    Keras on JAX lends the values of all variables to the steps, and takes them back only where none of these fails.
    """
    if trial.case.library != "keras":
        raise NotTried("its library has no evaluate")
    model, batch = trial.pair[1], trial.case.batch
    trained = {a.variable.path for a in trial.plan.assignments if a.variable.is_trained}
    weights = {path: v for path, v in trial.adapter.variables(model).items() if path in trained}
    before = {path: trial.adapter.read(weight) for path, weight in weights.items()}
    batches = (each for each in (batch, _of_another_rank(batch)))
    if not _raises(lambda model, given: model.evaluate(given, steps=2, verbose=0), model, batches):
        raise NotTried("its model takes inputs of other shapes")
    for path, weight in weights.items():
        if not _is_same(before[path], trial.adapter.read(weight)):
            yield f"{path}: has another value after an evaluation that failed"
    trial.adapter.train_step(model, batch)


def _of_another_rank(batch: Any) -> object:
    """The batch with two more axes of its inputs than a model takes."""
    inputs, targets = batch
    flat = [inputs] if not isinstance(inputs, list | tuple) else inputs
    wrong = [np.asarray(each)[..., None, None] for each in flat]
    return (type(inputs)(wrong) if isinstance(inputs, list | tuple) else wrong[0]), targets


def _is_same(one: Any, other: Any) -> bool:
    return np.array_equal(one, other, equal_nan=True)


def _raises(compute: Callable[[Any, object], object], model: object, batch: object) -> bool:
    try:
        compute(model, batch)
    except Exception:
        return True
    return False
