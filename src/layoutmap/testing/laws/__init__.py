"""Laws of drawn cases: statements that hold for every model with every layout map.

>>> from layoutmap.testing import models
>>> [(outcome.law, outcome.what) for outcome in try_laws(models.draw(3), only=["repeated plans are equal"])]
[('repeated plans are equal', 'held')]
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from layoutmap.testing.laws import checkpoints, inspection, plans, training
from layoutmap.testing.laws.trial import NotApplicable, Trial, ignore_warnings
from layoutmap.testing.models.cases import EPSILONS, Case

__all__ = ["LAWS", "PRECISIONS", "Outcome", "ignore_warnings", "run_law", "try_laws"]

Law = Callable[[Trial], Iterable[str]]
PRECISIONS = {
    f"training in {precision.replace('_', ' ')} agrees with one device": precision
    for precision in EPSILONS
    if precision != "float32"
}
"""The precision of each law about a precision other than float32."""
LAWS: Mapping[str, Law] = {
    "repeated plans are equal": plans.compare_repeated_plans,
    "each variable has the layout of the first rule that matches": plans.compare_layouts_with_rules,
    "an uneven axis shrinks to the dims that divide it": plans.check_uneven_axis_shrinks,
    "the planned memory is the sum of all shards": plans.compare_planned_memory_with_shards,
    "an optimizer slot has the layout of its weight": plans.compare_slots_with_weights,
    "a misspelled rule is reported": plans.check_misspelled_rule_is_reported,
    "a rule matches from the start of a path": plans.check_last_name_rule_is_unused,
    "an impossible rule is refused": plans.check_impossible_rule_is_refused,
    "suggested rules give a plan without problems": plans.find_problems_of_suggested_rules,
    "the exit code matches the verdict": plans.compare_exit_code_with_verdict,
    "initial values equal those of the unsharded model": training.compare_initial_values,
    "predict and evaluate agree with one device": training.compare_keras_predictions,
    "training agrees with one device": training.compare_training,
    "training with own rows agrees with one device": training.compare_training_with_own_rows,
    "training with an unsharded head agrees with one device": training.compare_training_with_unsharded_head,
    "training without the compiler agrees with one device": training.compare_training_without_compiler,
    "steps under explicit axes agree with one device": training.compare_training_with_explicit_axes,
    "a built model matches its plan": plans.compare_built_model_with_plan,
    "an inspected model matches its plan": inspection.compare_inspected_model_with_plan,
    "rules read from a model rebuild its layouts": inspection.compare_model_rebuilt_from_rules,
    "a checkpoint loads on another mesh": checkpoints.load_checkpoint_on_other_mesh,
    "a sync moves the weights to another mesh": checkpoints.sync_weights_to_other_mesh,
    "a checkpoint loads on another engine": checkpoints.load_checkpoint_on_other_engine,
    "apply keeps the values of an existing model": checkpoints.apply_map_to_existing_model,
    "replicas have equal bits": training.compare_bits_of_replicas,
    "a failing step changes no variable": training.check_failing_step_changes_nothing,
    "a failing evaluation changes no weight": training.check_failing_evaluation_changes_nothing,
} | {law: partial(training.compare_training_in_precision, precision) for law, precision in PRECISIONS.items()}
"""For each law a function that yields the differences that it finds, in the order of a model's life.

Users read the laws in reports, so a law has a text of its own, and not the name of its function (decisions/0200).
"""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a law for a case.

    `what` is `"held"`, `"wrong"` after a difference, `"failed"` after an error that the plan did not predict,
    `"refused"` if the plan has an error, so that no other law is tried, or `"not tried"` if the law does not apply.
    """

    law: str
    what: str
    why: str  # the differences, the error, or the reason why the law does not apply
    seconds: float
    figures: Sequence[Mapping[str, Any]] = ()  # measurements that the law took
    missing: str = ""  # name of a package that the law needs and that is not installed

    @property
    def is_failure(self) -> bool:
        """Whether the law did not hold, or raised an error that the plan did not predict."""
        return self.what in ("wrong", "failed")


def try_laws(case: Case, only: Collection[str] = ()) -> Iterator[Outcome]:
    """Try all laws, or those in `only`, on a case, and yield the outcome of each."""
    with ignore_warnings(), case.use_ambient_mesh():
        trial, laws = Trial(case), [law for law in LAWS if not only or law in only]
        refusal = run_law(laws[0], lambda trial=trial: map(str, trial.plan.errors[:1]))
        if refusal.what == "wrong":
            yield replace(refusal, what="refused")
            return
        for law in laws:
            yield run_law(law, partial(LAWS[law], trial))
        del trial
    gc.collect()  # models contain reference cycles, and the next case needs their memory


def run_law(
    law: str, find_differences: Callable[[], Iterable[str]], figures: Sequence[Mapping[str, Any]] = ()
) -> Outcome:
    """Try one law, and return its outcome. `find_differences` may append measurements to `figures`."""
    start, missing = time.perf_counter(), ""
    try:
        with ignore_warnings():
            differences = list(find_differences())
        what, why = ("wrong", "\n".join(differences)) if differences else ("held", "")
    except NotApplicable as reason:
        what, why = "not tried", str(reason)
    except (Exception, SystemExit) as error:
        what, why, missing = "failed", traceback.format_exc(limit=-4), find_missing_package(error)
        if missing:
            what, why = "not tried", f"{missing} is not installed"
    return Outcome(law, what, why, time.perf_counter() - start, figures, missing)


def find_missing_package(error: BaseException | None) -> str:
    """Return the package that an error reports as not installed, or an empty string.

    A missing module of an installed package is a fault, not a missing package (decisions/0166).
    """
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition(".")[0]
            if find_spec(package) is None:
                return package
        error = error.__cause__
    return ""
