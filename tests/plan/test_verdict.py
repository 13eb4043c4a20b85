"""The verdict is one: it follows from the plan's problems and its memory, and a file of the plan has the same."""

from hypothesis import given
from hypothesis import strategies as st

from layoutmap import Plan
from layoutmap.plan.problems import NOT_BUILT, Problem
from layoutmap.testing import strategies

LIMITS = st.none() | st.integers(1, 2**20)
NOT_ALL = Problem(NOT_BUILT, "warning", "Net", "Net: 1 layer has no weights yet: d1")


@given(strategies.plans(), LIMITS, st.booleans(), st.booleans())
def test_a_verdict_says_what_decides(drawn, limit, strict, is_partial):
    """Errors, memory, and warnings if they are to count; nothing fits of which variables are missing."""
    plan = drawn[2].with_limits(limit, strict=strict)
    if is_partial:
        plan = plan.with_problem(NOT_ALL)
    verdict = plan.verdict
    fits = None if limit is None or is_partial else plan.memory.total <= limit

    assert fits is verdict.fits
    assert verdict.passes is not bool(plan.errors or (strict and plan.warnings) or fits is False)
    assert ("fits:" in verdict.text.lower()) is (fits is True)
    assert ("does not fit:" in verdict.text.lower()) is (fits is False)
    assert ("ncomplete" in verdict.text) is is_partial
    assert ("no problems" in verdict.text) is not (plan.errors or plan.warnings)


@given(strategies.plans(), LIMITS, st.booleans())
def test_a_plan_that_is_kept_keeps_its_verdict(drawn, limit, strict):
    """So the page and the exit code of a file are those of the model that it was made of."""
    plan = drawn[2].with_limits(limit, strict=strict)

    assert plan.verdict == Plan.from_json(plan.to_json()).verdict
    assert plan == Plan.from_json(plan.to_json())
