"""Laws about training: a sharded model computes the same results as one device."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from layoutmap.core.errors import EngineError, ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines import get_engine
from layoutmap.inspecting.inspect import inspect
from layoutmap.inspecting.parity import compare_logged_numbers, compare_models, compare_variables
from layoutmap.scope.scope import plan
from layoutmap.testing.laws.trial import DIVERGES, TOLERANCE, NotApplicable, Trial, flatten_arrays
from layoutmap.testing.models.cases import QUANTIZED
from layoutmap.testing.models.jax.model import JaxModel
from layoutmap.testing.models.torch.model import Head
from layoutmap.testing.models.torch.model import Model as TorchModel
from layoutmap.testing.products import allow_tf32_temporarily


def compare_initial_values(trial: Trial) -> Iterator[str]:
    """Compare all initial values with those of the unsharded model, bit for bit."""
    for row in compare_variables(trial.adapter, "weights", *trial.model_pair, tolerance=0.0):
        if not row.agrees:
            yield str(row)


def compare_keras_predictions(trial: Trial) -> Iterator[str]:
    """Compare `predict` and `evaluate` of Keras with the unsharded model. The last batch has fewer rows.

    One case in three runs. On TensorFlow, also compare eager calls.
    """
    # In several processes, `predict` and `evaluate` take only the rows of one process, so results differ from one
    # device's.
    if trial.case.library != "keras" or trial.processes.has_other_processes:
        raise NotApplicable("the case is not a Keras model in one process")
    if not trial.choices.draw_true_once_in(3):
        raise NotApplicable("only one case in three tries this law")
    batch, size = trial.case.batch, trial.case.rows * 2 // 3
    results: list[dict[str, Any]] = []
    for model in trial.model_pair:
        outputs = flatten_arrays(model.predict(batch[0], batch_size=size, verbose=0))
        logs = model.evaluate(*batch, batch_size=size, verbose=0, return_dict=True)
        # Compare only the total loss, because for several outputs Keras on TensorFlow averages each output's loss over
        # batches.
        results.append({f"output {n}": output for n, output in enumerate(outputs)} | {"loss": logs["loss"]})
    rows = compare_logged_numbers("forward", results[0], results[1], TOLERANCE)
    yield from map(str, trial.exclude_rounding_differences(list(rows)))
    if trial.adapter.engine_name == "tensorflow":
        yield from _compare_eager_calls(trial)


def _compare_eager_calls(trial: Trial) -> Iterator[str]:
    """Compare eager calls of Keras on TensorFlow with calls on one device, for inputs on and outside of the mesh.

    The inputs are unsharded, replicated, and sharded along the batch. DTensor refuses some layouts with an error, which
    counts as no difference.
    """
    tree, engine = importlib.import_module("keras").tree, get_engine("tensorflow")
    mesh, batch_dim = trial.case.layout_map.mesh, trial.case.map.batch_dim
    assert mesh is not None

    def replicate(array: Any) -> object:
        return engine.relayout(array, Layout.replicated(mesh, np.ndim(array)))

    def shard(array: Any) -> object:
        if batch_dim is None or np.shape(array)[0] % mesh.dim_size(batch_dim):
            return replicate(array)
        return engine.relayout(array, Layout.batch_sharded(mesh, batch_dim, np.ndim(array)))

    def compute_outputs(model: Any, convert: Callable[[Any], object]) -> dict[str, Any]:
        outputs = tree.flatten(model(tree.map_structure(convert, trial.case.batch[0])))
        return {f"output {n}": engine.to_numpy(output) for n, output in enumerate(outputs)}

    expected = compute_outputs(trial.model_pair[0], np.asarray)
    for convert in (np.asarray, replicate, shard):
        with suppress(EngineError):
            rows = compare_logged_numbers(
                "forward", expected, compute_outputs(trial.model_pair[1], convert), TOLERANCE
            )
            yield from map(str, trial.exclude_rounding_differences(list(rows)))


def compare_training(trial: Trial) -> Iterator[str]:
    """Compare outputs, gradients, and steps with those of one device, up to rounding. One step has fewer rows."""
    wrong = trial.exclude_rounding_differences(trial.pair_comparisons)
    if wrong and not trial.is_unsharded_model_finite:
        raise NotApplicable("some outputs, losses, or gradients of the unsharded model are not finite")
    yield from map(str, wrong)


def compare_training_with_own_rows(trial: Trial) -> Iterator[str]:
    """Compare torch training in which each process passes its own rows with training on one device.

    A model that returns no loss is wrapped in one that does, and its rules are changed for the new paths.
    """
    case, mesh = trial.case, trial.case.layout_map.mesh
    if not isinstance(case.model, TorchModel) or not trial.processes.has_other_processes or mesh is None:
        raise NotApplicable("the case is not a torch model in several processes")
    dim = next((dim for dim in ("batch", "data") if dim in mesh and mesh.dim_size(dim) > 1), None)
    if dim is None:
        raise NotApplicable("no mesh dim splits the batch, so all processes have the same rows")
    drawn_map, model = replace(case.map, batch_dim=dim), case.model
    if not model.returns_loss:
        rules, activations = (
            tuple((rf"net\.{pattern}", specs) for pattern, specs in items)
            for items in (case.map.rules, case.map.activations)
        )
        drawn_map = replace(drawn_map, rules=rules, activations=activations)
        model = replace(model, returns_loss=True)
    yield from compare_training(Trial(replace(case, model=model, map=drawn_map), has_own_rows=True))


def compare_training_with_unsharded_head(trial: Trial) -> Iterator[str]:
    """Compare torch training of a sharded model and an unsharded head, with one optimizer, with one device.

    The gradients of both are clipped to one norm. One case in four runs.
    """
    case, choices = trial.case, trial.choices
    if not isinstance(case.model, TorchModel):
        raise NotApplicable("the case is not a torch model")
    if not choices.draw_true_once_in(4):
        raise NotApplicable("only one case in four tries this law")
    head = Head(choices.pick(0.1, 1.0, 10.0), foreach=not choices.draw_true_once_in(3))
    optimizers = (text for text in case.model.optimizers if "SGD" in text or "AdamW" in text)
    other = replace(case, model=replace(case.model, head=head), optimizer=choices.pick(*optimizers))
    yield from compare_training(Trial(other))


def compare_training_without_compiler(trial: Trial) -> Iterator[str]:
    """Compare outputs, gradients, and a step of JAX without its compiler with the results of one device.

    One case in eight runs, since these take ten times as long.
    """
    if trial.adapter.engine_name != "jax":
        raise NotApplicable("on the other engines, all laws run without a compiler")
    if trial.processes.has_other_processes:
        raise NotApplicable("JAX requires the compiler in several processes")
    if not trial.choices.draw_true_once_in(8):
        raise NotApplicable("only one case in eight tries this law")
    pair = trial.make_model_pair()
    with importlib.import_module("jax").disable_jit():
        report = compare_models(trial.adapter, *pair, trial.case.batch, steps=1, tolerance=TOLERANCE)
        yield from map(str, trial.exclude_rounding_differences(report.rows))


def compare_training_in_precision(precision: str, trial: Trial) -> Iterator[str]:
    """Compare initial values and training in `precision` with those on one device, up to rounding.

    Each case is tried in one precision, seldom in a quantized one, because that takes longest (decisions/0008).
    """
    weights = {name: 1 if name in QUANTIZED else 3 for name in ("TF32", *trial.case.model.precision_lines)}
    if precision != trial.choices.pick_weighted(weights):
        raise NotApplicable("this case is tried in a different precision")
    other = Trial(trial.case.to_precision(precision))
    with ExitStack() as stack:
        if precision == "TF32":
            tf32 = allow_tf32_temporarily(trial.adapter.engine_name, Mesh(None, trial.case.map.mesh))
            if trial.case.devices.simulated or not stack.enter_context(tf32):
                raise NotApplicable("the devices do not support TF32")
        try:
            if other.plan.errors:
                raise NotApplicable(f"the plan in this precision has an error: {other.plan.errors[0]}")
            yield from compare_initial_values(other)
            yield from compare_training(other)
        except NotApplicable:
            raise
        except Exception:
            if _is_call_failing(
                lambda: other.adapter.train_step(other.create_unsharded_model(), other.case.batch)
            ):
                raise NotApplicable("the unsharded model cannot train in this precision") from None
            raise


def compare_training_with_explicit_axes(trial: Trial) -> Iterator[str]:
    """Compare initial values and two steps with those on one device, with some or all mesh axes explicit in JAX.

    Two equal steps must be compiled once. If JAX refuses a step that lacks `out_sharding`, the plan must report it.
    """
    case, choices = trial.case, trial.choices
    if (
        not isinstance(case.model, JaxModel)
        or case.devices.number == 1
        or trial.processes.has_other_processes
    ):
        raise NotApplicable("the case is not a JAX model without Keras on several devices of one process")
    dims = Mesh(None, case.map.mesh).dim_names
    rows = [dim for dim in dims if dim == case.map.batch_dim]
    explicit = choices.pick(dims, rows, [dim for dim in dims if dim not in rows]) or dims
    # Explicit axes cannot be padded, so shrink uneven axes instead.
    uneven = case.map.uneven if isinstance(case.map.uneven, str) else "shrink"
    drawn_map = replace(case.map, explicit_dims=tuple(explicit), uneven=uneven)
    lines = "" if choices.draw_true_once_in(4) else case.model.auto_axes_lines
    other = Trial(replace(case.to_sgd(), map=drawn_map, last_lines=lines))
    yield from compare_initial_values(other)
    unsharded, sharded = other.model_pair
    try:
        logs = [[other.adapter.train_step(model, case.batch) for _ in range(2)] for model in other.model_pair]
    except Exception as error:
        explicit_axes = importlib.import_module("layoutmap.cost.jax.explicit_axes")
        if not explicit_axes.is_sharding_refusal(error):
            raise
        options: Any = {"on": f"h100:{case.devices.number}", "batch_dim": case.map.batch_dim, "verify": False}
        try:
            planned = plan(
                other.case.make_model,
                other.case.layout_map,
                inputs=case.batch,
                library=case.library,
                **options,
            )
        except ScopeError as refused:
            raise NotApplicable(f"the plan cannot trace the step: {refused.what}") from None
        if "out_sharding" not in {problem.kind for problem in planned.problems}:
            yield f"JAX refuses the step, and the plan does not report it: {error}"
        return
    # Count now, because a comparison of the training runs steps with other batches, too.
    if sharded.steps.num_step_programs != 1:
        yield f"two equal steps were compiled {sharded.steps.num_step_programs} times"
    rows = [*compare_logged_numbers("step", logs[0][-1], logs[1][-1], TOLERANCE)]
    rows += compare_variables(other.adapter, "weights", unsharded, sharded, tolerance=TOLERANCE)
    if not all(row.agrees for row in rows):
        yield from compare_training(other)


def compare_bits_of_replicas(trial: Trial) -> Iterator[str]:
    """Compare all replicas of each shard bit for bit, also those in other processes and after steps."""
    problems = inspect(trial.model_pair[1], across=True).problems
    yield from (str(problem) for problem in problems if problem.kind in ("differs", "drifted"))


def check_failing_step_changes_nothing(trial: Trial) -> Iterator[str]:
    """Run a step with inputs of a wrong rank. It must raise as on one device, and change no variable."""
    unsharded, sharded = trial.model_pair
    train_step, read = trial.adapter.train_step, trial.adapter.read
    batch, wrong_batch = trial.case.batch, _add_axes_to_inputs(trial.case.batch)
    initial = list(map(read, trial.adapter.variables(unsharded).values()))
    # On TensorFlow, a traced step may raise only because the input shape is new, so `gradients` must raise, too.
    for compute in (train_step, trial.adapter.gradients):
        if not _is_call_failing(lambda compute=compute: compute(unsharded, wrong_batch)):
            raise NotApplicable("the unsharded model accepts inputs of a wrong rank")
    if not all(map(_are_equal_arrays, initial, map(read, trial.adapter.variables(unsharded).values()))):
        raise NotApplicable("the unsharded model changes its state before it raises")
    # After `fit` on JAX, Keras stores weights and averages in one buffer, and the next step fails because it donates
    # this buffer twice. The law does not apply then.
    if _is_call_failing(lambda: train_step(unsharded, batch)):
        raise NotApplicable("the unsharded model cannot train after an error")
    train_step(sharded, batch)
    before = {path: read(variable) for path, variable in trial.adapter.variables(sharded).items()}
    if not _is_call_failing(lambda: train_step(sharded, wrong_batch)):
        yield "a step that raises on one device did not raise in layouts"
    for path, variable in trial.adapter.variables(sharded).items():
        if path in before and not _are_equal_arrays(before[path], read(variable)):
            yield f"{path}: has a different value after a step that failed"
    expected, logs = (train_step(model, batch) for model in trial.model_pair)
    # Some models diverge on any number of devices, so check the sharded model only if the unsharded one is stable.
    is_stable = all(np.all(np.abs(metric) < DIVERGES) for metric in expected.values())
    if is_stable and not all(np.isfinite(metric).all() for metric in logs.values()):
        yield f"the next step is not finite: {logs}"


def check_failing_evaluation_changes_nothing(trial: Trial) -> Iterator[str]:
    """Run `evaluate` with a second batch of a wrong rank. It must change no weight, and a next step must work.

    Keras on JAX takes all variables into the steps, and restores them only if no step fails.
    """
    if trial.case.library != "keras":
        raise NotApplicable("only Keras models have evaluate")
    model, batch = trial.model_pair[1], trial.case.batch
    trained = {a.variable.path for a in trial.plan.assignments if a.variable.is_trained}
    weights = {path: v for path, v in trial.adapter.variables(model).items() if path in trained}
    before = {path: trial.adapter.read(weight) for path, weight in weights.items()}
    batches = (each for each in (batch, _add_axes_to_inputs(batch)))
    if not _is_call_failing(lambda: model.evaluate(batches, steps=2, verbose=0)):
        raise NotApplicable("the sharded model accepts inputs of a wrong rank")
    for path, weight in weights.items():
        if not _are_equal_arrays(before[path], trial.adapter.read(weight)):
            yield f"{path}: has a different value after an evaluation that failed"
    trial.adapter.train_step(model, batch)


def _add_axes_to_inputs(batch: Any) -> object:
    """Return the batch with two more axes in all inputs."""
    inputs, targets = batch
    arrays = inputs if isinstance(inputs, list | tuple) else [inputs]
    wrong = [np.asarray(array)[..., None, None] for array in arrays]
    return (type(inputs)(wrong) if isinstance(inputs, list | tuple) else wrong[0]), targets


def _are_equal_arrays(one: Any, other: Any) -> bool:
    return np.array_equal(one, other, equal_nan=True)


def _is_call_failing(compute: Callable[[], object]) -> bool:
    """Call a function, and return whether it raises an exception."""
    try:
        compute()
    except Exception:
        return True
    return False
