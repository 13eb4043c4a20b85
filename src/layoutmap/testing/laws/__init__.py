"""Laws over drawn cases: each is a sentence that holds for every model and every layout map, and is tried on one.

>>> from layoutmap.testing import models
>>> [(outcome.law, outcome.what) for outcome in try_case(models.draw(3), only=["a plan is the same each time"])]
[('a plan is the same each time', 'held')]
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

from layoutmap.testing.laws import inspecting, keeping, planning, training
from layoutmap.testing.laws.trial import NotTried, Trial, quiet
from layoutmap.testing.models.cases import EPSILONS, Case

__all__ = ["LAWS", "PRECISIONS", "Outcome", "quiet", "tried", "try_case"]

Law = Callable[[Trial], Iterable[str]]
_FUNCTIONS: tuple[Law, ...] = (  # those that need no built model first, then in the order of a model's life
    planning.a_plan_is_the_same_each_time,
    planning.each_variable_has_the_layout_of_its_first_rule,
    planning.an_axis_shrinks_to_what_divides_it,
    planning.the_memory_is_the_sum_of_shards,
    planning.a_slot_has_the_layout_of_its_weight,
    planning.a_misspelt_rule_is_noticed,
    planning.a_rule_matches_from_the_start_of_a_path,
    planning.an_impossible_rule_is_refused,
    planning.the_exit_code_is_the_verdict,
    training.first_values_are_those_of_the_plain_model,
    training.it_predicts_and_evaluates_as_on_one_device,
    training.it_trains_as_on_one_device,
    training.it_computes_the_same_without_a_compiler,
    planning.the_plan_is_what_is_built,
    inspecting.what_is_inspected_is_what_was_planned,
    inspecting.rules_read_off_a_model_build_it_again,
    keeping.it_is_loaded_on_another_mesh,
    keeping.it_is_loaded_by_another_engine,
    keeping.a_model_that_exists_is_laid_out,
    training.replicas_have_the_same_bits,
    training.a_step_that_fails_changes_nothing,
    training.an_evaluation_that_fails_keeps_the_weights,
)
PRECISIONS = {
    f"it trains in {precision.replace('_', ' ')} as on one device": precision
    for precision in EPSILONS
    if precision != "float32"
}
"""The laws of models that are computed in other precisions than float32, and these."""
LAWS: Mapping[str, Law] = {law.__name__.replace("_", " "): law for law in _FUNCTIONS} | {
    law: partial(training.it_trains_in, precision) for law, precision in PRECISIONS.items()
}
"""The laws by name, in the order in which they are tried; each yields the differences that it finds."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a law on a case.

    Args:
        law: The law's name.
        what: `"held"`; `"wrong"`: something differs; `"failed"`: an error that the plan did not announce; `"refused"`:
            the plan has an error, and no other law is tried; `"not tried"`: the law has nothing to say of the case.
        why: The differences, the error or the reason.
        seconds: How long it took.
        figures: What was measured.
        missing: The package without which the law cannot be tried; empty: none is missing.
    """

    law: str
    what: str
    why: str
    seconds: float
    figures: Sequence[Mapping[str, Any]] = ()
    missing: str = ""

    @property
    def is_suspicious(self) -> bool:
        """Whether the law did not hold."""
        return self.what in ("wrong", "failed")


def try_case(case: Case, only: Collection[str] = ()) -> Iterator[Outcome]:
    """Try laws on a case; yields an outcome for each.

    Args:
        case: The case.
        only: Names of `LAWS`; none: all.
    """
    with quiet():
        trial, names = Trial(case), [name for name in LAWS if not only or name in only]
        refusal = tried(names[0], lambda trial=trial: map(str, trial.plan.errors[:1]))
        if refusal.what == "wrong":
            yield replace(refusal, what="refused")
            return
        for name in names:
            yield tried(name, partial(LAWS[name], trial))
        del trial
    gc.collect()  # models have cycles, and the next one needs their room


def tried(
    law: str, differences: Callable[[], Iterable[str]], figures: Sequence[Mapping[str, Any]] = ()
) -> Outcome:
    """Return the outcome of a law.

    Args:
        law: Its name.
        differences: Returns the differences that it finds.
        figures: Has what it measures, when they are known.
    """
    begun, missing = time.perf_counter(), ""
    try:
        with quiet():
            found = list(differences())
        what, why = ("wrong", "\n".join(found)) if found else ("held", "")
    except NotTried as reason:
        what, why = "not tried", str(reason)
    except (Exception, SystemExit) as error:
        what, why, missing = "failed", traceback.format_exc(limit=-4), missing_package(error)
        if missing:
            what, why = "not tried", f"{missing} is not installed"
    return Outcome(law, what, why, time.perf_counter() - begun, figures, missing)


def missing_package(error: BaseException | None) -> str:  # why: decisions/0166
    """Return the package that an error, or one of its causes, could not import; empty if it has another reason.

    A module of this package, or one that an installed package lacks, is a fault and no missing package.
    """
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition(".")[0]
            if find_spec(package) is None:
                return package
        error = error.__cause__
    return ""
