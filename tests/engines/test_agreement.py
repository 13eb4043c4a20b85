"""What processes compare: texts, fingerprints, and calls that are due; here each process is a thread."""

import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from threads_as_processes import everywhere

import layoutmap as lm
from layoutmap.engines.agreement import (
    CallComparisonSchedule,
    check_same_batch,
    check_same_program,
    gather_texts,
    gather_unequal_texts_and_checksums,
)


def test_each_hears_what_all_say():
    """Texts of any length come to all processes, in their order."""
    texts = ["", "zwölf", "x" * 1000]

    assert [texts] * 3 == everywhere(3, lambda i, gather: gather_texts(texts[i], gather))
    assert [[""] * 3] * 3 == everywhere(3, lambda i, gather: gather_texts("", gather))


def test_what_is_alike_is_not_reported():
    """The same words give nothing, others those of all; numbers are gathered along."""
    assert [([], [0, 1])] * 2 == everywhere(
        2, lambda i, gather: gather_unequal_texts_and_checksums("same", gather, i)
    )
    assert [(["0", "1"], [0, 0])] * 2 == everywhere(
        2, lambda i, gather: gather_unequal_texts_and_checksums(str(i), gather)
    )


def messages(number, parts, call=lambda i: "a step"):
    """The first line of what each process says of its parts."""
    errors = everywhere(number, lambda i, gather: check_same_program(call(i), parts(i), gather))
    assert all(error is None or isinstance(error, lm.ScopeError) for error in errors)
    return [error and error.what for error in errors]


def test_the_first_part_that_differs_is_named():
    """In all processes, with what each has; also where one of them has more parts, or others."""
    assert [None] * 3 == messages(3, lambda i: [("a", "1"), ("b", "2")])
    assert ["b: 2 in process 0, 3 in process 1"] * 2 == messages(2, lambda i: [("a", "1"), ("b", str(2 + i))])
    assert ["b: 2 in process 0, nothing in process 1"] * 2 == messages(
        2, lambda i: [("a", "1"), ("b", "2")][: 2 - i]
    )
    assert ["b: 2 in process 0, nothing in process 2"] * 3 == messages(3, lambda i: [("bbc"[i], "2")])


@pytest.mark.parametrize("texts", ["0.5 1.5", "1 0", "cuda:0 cuda:1", "x x1"])
def test_numbers_are_a_difference(texts):
    """Also one that is the number of the process: nothing that names it is part of a fingerprint."""
    one, other = texts.split()

    assert [f"a: {one} in process 0, {other} in process 1"] * 2 == messages(
        2, lambda i: [("a", (one, other)[i])]
    )


def test_processes_that_make_different_calls_find_out():
    """Whatever they compare: all of them raise."""
    assert ["call: fit in process 0, evaluate in process 1"] * 2 == messages(
        2, lambda i: [("a", "1")], call=lambda i: ("fit", "evaluate")[i]
    )

    def act(i, gather):
        return check_same_program("fit", [("a", "1")], gather) if i else check_same_batch([], gather)

    assert [lm.ScopeError] * 2 == [type(each) for each in everywhere(2, act)]


@settings(max_examples=examples(100))
@given(st.lists(st.integers(1, 300), min_size=1, max_size=30))
def test_calls_are_compared_without_end_and_ever_more_rarely(epochs):
    """The first eight calls, each power of two, and each that begins an epoch are compared, and no others."""
    schedule, due, begins, calls = CallComparisonSchedule(), [], [], 0
    for length in epochs:
        schedule.begins_epoch = True
        begins.append(calls + 1)
        due += [call for call in range(calls + 1, calls + length + 1) if schedule.count_call_and_check_due()]
        calls += length
    powers = {1 << n for n in range(calls.bit_length())}

    assert sorted({*range(1, 9), *powers, *begins} & {*range(1, calls + 1)}) == due


def test_a_batch_is_named_by_its_call():
    """The error says which call it was, and what each process has passed."""
    errors = everywhere(2, lambda i, gather: check_same_batch([np.full(3, i, np.float32)], gather, 16))

    assert [16, 16] == [error.facts["in call"] for error in errors]
    assert ["process 0", "process 1", "in call"] == [*errors[0].facts]
