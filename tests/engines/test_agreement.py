"""What processes compare: texts, and what makes their programs; here each process is a thread."""

import pytest
from threads_as_processes import everywhere

import layoutmap as lm
from layoutmap.engines.agreement import Trait, check_alike, check_program, gather_texts


def test_each_hears_what_all_say():
    """Texts of any length come to all processes, in their order."""
    texts = ["", "zwölf", "x" * 1000]

    assert [texts] * 3 == everywhere(3, lambda i, gather: gather_texts(texts[i], gather))
    assert [[""] * 3] * 3 == everywhere(3, lambda i, gather: gather_texts("", gather))


def test_what_is_alike_is_not_reported():
    """The same words give nothing, others those of all; numbers are gathered along."""
    assert [([], [0, 1])] * 2 == everywhere(2, lambda i, gather: check_alike("same", gather, i))
    assert [(["0", "1"], [0, 0])] * 2 == everywhere(2, lambda i, gather: check_alike(str(i), gather))


def said(number, parts, call=lambda i: "a step", terms=lambda i: ()):
    """The first line of what each process says of its parts."""
    errors = everywhere(number, lambda i, gather: check_program(call(i), parts(i), gather, lambda: terms(i)))
    assert all(error is None or isinstance(error, lm.ScopeError) for error in errors)
    return [error and error.what for error in errors]


def test_the_first_part_that_differs_is_named():
    """In all processes, with what each has; also where one of them has more parts, or others."""
    assert [None] * 3 == said(3, lambda i: [Trait("a", "1"), Trait("b", "2")])
    assert ["b: 2 in process 0, 3 in process 1"] * 2 == said(
        2, lambda i: [Trait("a", "1"), Trait("b", str(2 + i))]
    )
    assert ["b: 2 in process 0, nothing more in process 1"] * 2 == said(
        2, lambda i: [Trait("a", "1"), Trait("b", "2")][: 2 - i]
    )
    assert ["b: 2 in process 0, c: 2 in process 2"] * 3 == said(3, lambda i: [Trait("bbc"[i], "2")])


def test_it_is_shown_as_it_was_written_unless_that_is_the_same():
    """Lines of source stand for what is compared."""
    lines = [Trait("f", f"LOAD {i}", shown) for i, shown in enumerate(("x + 1", "x + 2"))]

    assert ["f: x + 1 in process 0, x + 2 in process 1"] * 2 == said(2, lambda i: [lines[i]])
    assert ["f: LOAD 0 in process 0, LOAD 1 in process 1"] * 2 == said(
        2, lambda i: [lines[i]._replace(shown="x + n")]
    )


def test_terms_say_a_difference_and_make_none():
    """Where programs differ, their terms are named first; where only terms differ, programs are the same."""
    terms = [[Trait("scale", str(7 + i))] for i in range(2)]

    assert [None] * 2 == said(2, lambda i: [Trait("lowered", "x")], terms=terms.__getitem__)
    assert ["scale: 7 in process 0, 8 in process 1"] * 2 == said(
        2, lambda i: [Trait("lowered", "xy"[i])], terms=terms.__getitem__
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (2, str),
        (3, "run {}/log".format),
        (4, lambda i: f"'cuda:{i % 2}'"),  # of two hosts
    ],
)
def test_the_number_of_a_process_is_no_difference(number, text):
    """Of all processes, or of those of one host, in values of the user's code; a difference after it is found."""
    parts = [[Trait("rank", text(i), may_be_number=True)] for i in range(number)]

    assert [None] * number == said(number, parts.__getitem__)
    assert ["b: 0 in process 0, 1 in process 1"] * number == said(
        number, lambda i: [*parts[i], Trait("b", str(i))]
    )


@pytest.mark.parametrize("texts", ["0.5 1.5", "1.0 2.0", "1 0", "0 0.1", "x x1"])
def test_other_numbers_are_a_difference(texts):
    """Parts of numbers are not the number of a process."""
    one, other = texts.split()

    assert [f"a: {one} in process 0, {other} in process 1"] * 2 == said(
        2, lambda i: [Trait("a", (one, other)[i], may_be_number=True)]
    )


def test_processes_that_make_different_calls_find_out():
    """Whatever they compare: all of them raise."""
    assert ["fit: the processes do different things", "evaluate: the processes do different things"] == said(
        2, lambda i: [Trait("a", "1")], call=lambda i: ("fit", "evaluate")[i]
    )
