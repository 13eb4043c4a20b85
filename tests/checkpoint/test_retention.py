"""Which steps are due and which are kept: laws of numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutmap.checkpoint.retention import RetentionRules, validate_metrics
from layoutmap.core.errors import CheckpointError

STEPS = st.lists(st.integers(0, 60), min_size=1, max_size=20, unique=True)
POLICIES = st.builds(
    RetentionRules,
    keep_last=st.none() | st.integers(1, 4),
    best=st.none() | st.just("loss"),
    best_mode=st.sampled_from(("min", "max")),
    keep_best=st.integers(1, 3),
)


@given(policy=POLICIES, steps=STEPS, data=st.data())
def test_the_last_and_the_best_are_kept_and_nothing_else(
    policy: RetentionRules, steps: list[int], data: st.DataObject
) -> None:
    """However steps come, the last saved, the last by number and the best are there, and no others."""
    there: dict[int, dict[str, float]] = {}
    for step in steps:
        value = data.draw(st.none() | st.sampled_from((0.0, 1.0, 2.0, math.inf, -math.inf, math.nan)))
        there[step] = {} if value is None else {"loss": value}
        before = dict(there)
        there = {n: there[n] for n in policy.choose_kept_steps(there, step)}

        last = set(sorted(before)[-policy.keep_last :] if policy.keep_last else before)
        values = {
            n: m["loss"] for n, m in before.items() if policy.best and math.isfinite(m.get("loss", math.nan))
        }
        best = sorted(values, key=lambda n: values[n], reverse=policy.best_mode == "max")[: policy.keep_best]
        assert {step} | last <= set(there)
        assert len(best) == len(
            [n for n in policy.rank_steps_by_metric(before) if n in there][: policy.keep_best]
        )
        assert [values[n] for n in best] == [
            values[n] for n in policy.rank_steps_by_metric(before)[: policy.keep_best]
        ]
        assert len(there) <= len({step} | last) + len(best)


@given(every=st.integers(1, 10), strides=st.lists(st.integers(1, 12), max_size=30), first=st.integers(0, 30))
def test_a_step_is_due_once_for_each_multiple_reached(every: int, strides: list[int], first: int) -> None:
    """Whatever the strides of the calls, each call that reaches or passes a multiple is due, and no other."""
    policy, step, seen = RetentionRules(every_steps=every), first, None
    for stride in [0, *strides]:
        step += stride
        passed = range(step, step + 1) if seen is None else range(seen + 1, step + 1)
        assert any(n and n % every == 0 for n in passed) == policy.is_save_due(step, seen, 1e9)
        seen = step


@given(minutes=st.floats(0.1, 100), seconds=st.floats(0, 10_000), step=st.integers(0, 1000))
def test_a_step_is_due_after_a_time(minutes: float, seconds: float, step: int) -> None:
    """With a time alone, a step is due once it has passed; with neither of the two, always."""
    assert (seconds >= 60 * minutes) == RetentionRules(every_minutes=minutes).is_save_due(step, step, seconds)
    assert RetentionRules().is_save_due(step, step, seconds)


@pytest.mark.parametrize(
    ("arguments", "begin"),
    [
        ({"keep_last": 0}, "keep_last=0 cannot be used"),
        ({"keep_best": -1}, "keep_best=-1 cannot be used"),
        ({"every_steps": 1.5}, "every_steps=1.5 cannot be used"),
        ({"every_minutes": 0}, "every_minutes=0 cannot be used"),
        ({"every_minutes": math.nan}, "every_minutes=nan cannot be used"),
        ({"best_mode": "auto"}, "best_mode='auto' cannot be used"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(arguments: dict[str, object], begin: str) -> None:
    """What cannot decide anything is refused at once, by name."""
    with pytest.raises(CheckpointError) as error:
        RetentionRules(**arguments)  # type: ignore[arg-type]

    assert begin == str(error.value).splitlines()[0]


def test_metrics_are_numbers() -> None:
    """What is not a number, and metrics without the one that compares, are refused by name."""
    with pytest.raises(CheckpointError, match=r"^metrics\['loss'\] is not a number"):
        validate_metrics({"loss": "small"}, None)
    with pytest.raises(CheckpointError, match=r"^metrics: 'val_loss' is missing"):
        validate_metrics({"loss": 1}, "val_loss")

    assert {"loss": 1.0} == validate_metrics({"loss": 1}, "loss")
    assert {} == validate_metrics(None, "loss")
