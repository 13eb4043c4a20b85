"""The laws hold on models and maps that nobody chose: on a few of this day in `make test`, on many in `make test-all`.

LAYOUTMAP_DRAWN=20261124 tries the cases of another day; `python tools/fuzz.py` tries as many as asked.
"""

import os
from datetime import date

import pytest
from cases import few, some

from layoutmap.testing.arrays import try_array_laws
from layoutmap.testing.laws import LAWS, PRECISIONS
from layoutmap.testing.schedule import LawResult, Schedule
from layoutmap.testing.subjects import PADDED, SUBJECTS, get_subject
from layoutmap.testing.worker import try_laws_for_seed

PROCESSES = ("jax", "tensorflow", "torch")
DAY = int(os.environ.get("LAYOUTMAP_DRAWN", date.today().strftime("%Y%m%d")))
HERE = [
    name for name, each in SUBJECTS.items() if each.engine == os.environ.get("LAYOUTMAP_TEST_PROCESS", "jax")
]
PADDED_HERE = [name for name, each in PADDED.items() if each.engine == get_subject(HERE[0]).engine]
TOGETHER = [name for name in SUBJECTS if SUBJECTS[name].num_processes > 1]
ALONE = [name for name in SUBJECTS if name not in TOGETHER]
TODAY = {each[DAY % len(each)] for each in (ALONE, TOGETHER)}
"""The libraries of this day, of those of all engines: `make test` tries one in this process and one in several."""
# `make fuzz`, `make test-all` and tests/testing/test_precisions.py try those in other precisions.
IN_FLOAT32 = [law for law in LAWS if law not in PRECISIONS]
# Laws that processes keep together; the others of a case in several processes are for `make test-all`.
TRIED_TOGETHER = some(
    IN_FLOAT32,
    "initial values equal those of the unsharded model",
    "training agrees with one device",
    "training with own rows agrees with one device",
    "a built model matches its plan",
    "a checkpoint loads on another mesh",
    "replicas have equal bits",
)
PARTS, OF_PART = 8, 15
FOUND = {
    # A strided shard of which simulated ranks have different sizes: torch made one range for all of them. A gradient of
    # only rounding, which Adagrad makes a step of.
    "torch": [8000029, 20261125708],
    # A table's rows were read from other devices: fewer tokens than rows, and outputs sharded over another dim.
    "keras-jax": [20261126046],
    # A grouped convolution, on a mesh of one dim, before a reshape. A Fourier transform in column-major order.
    "nnx": [20261127045, 20261128057],
    # The gradient of the largest along a sharded axis, a scatter, was refused: a barrier behind it was not enough.
    "pytree": [20261230086],
    # A layer's assignment to its own weight, which the call had gathered, was lost.
    "keras-torch": [20261127010],
    # DTensor took the layout of a regularizer's gradient for that of a grouped convolution's filter.
    # DTensor's all-to-all mixed up the blocks of a tensor of four axes, in a backward pass.
    "keras-tensorflow": [3600074, 91500178],
    # A weight's gradient that came beside its module was added to the one of fully_shard; one with its axes in another
    # order in memory was summed up by autograd's copy, and by fully_shard once more.
    "torch-processes": [7001, 7002],
    # Trackers of several losses held tracers after a gradient. A batch had each row once for each process, and dropout
    # drew for all of them.
    "keras-jax-processes": [9101, 20261227002],
}
"""Cases in which a law once did not hold, and whose fault has no smaller test."""


def choose_today(subjects):
    """Return those of this process as cases, of which those that are not of this day are long."""
    return few([name for name in subjects if name in HERE], *TODAY & {*HERE} & {*subjects})


@pytest.mark.every_case
@pytest.mark.parametrize("subject", choose_today(ALONE))
def test_the_laws_hold_on_a_case_of_this_day(subject):
    """Planned, built, trained, saved and loaded, each drawn model is as planned, with the numbers of the plain one."""
    print(f"LAYOUTMAP_DRAWN={DAY} tries these cases again")

    assert {} == unheld(subject, DAY * 1000, 1, IN_FLOAT32)


@pytest.mark.every_case
@pytest.mark.parametrize("subject", choose_today(TOGETHER))
def test_the_laws_hold_on_a_case_of_this_day_in_processes(subject):
    """So does one that processes make and train together; torch's fully_shard gathers there and nowhere else."""
    assert {} == unheld(subject, DAY * 1000, 1, TRIED_TOGETHER)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("subject", [subject for subject in HERE if subject in FOUND])
def test_training_is_right_where_it_once_was_not(subject):
    """Each of these trains as on one device."""
    found = [
        each
        for seed in FOUND[subject]
        for each in tried(subject, seed, 1, ["training agrees with one device"])
    ]

    assert ["held"] * len(FOUND[subject]) == [each.outcome.what for each in found]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("subject", [*HERE, *PADDED_HERE])
def test_the_laws_hold_on_many_cases(subject, part):
    """So is each of these, of three days."""
    first = (DAY + part % 3) * 1000 + 100 + part * OF_PART

    assert {} == unheld(subject, first, OF_PART)


def unheld(subject, first, number, laws=tuple(LAWS)):
    """What did not hold, by seed and law; tried again as users run it, in a process of its own."""
    found = [each for each in tried(subject, first, number, laws) if each.outcome.is_failure]
    if get_subject(subject).num_processes == 1:
        suspects = dict.fromkeys(each.seed for each in found)
        found = [
            each for seed in suspects for each in Schedule([subject], seed, count=1, laws=laws).run_cases()
        ]
    return {(each.seed, each.outcome.law): each.outcome.why for each in found if each.outcome.is_failure}


def tried(subject, first, number, laws):
    """The outcomes of laws on cases: in this process, but for those that several processes try together."""
    if get_subject(subject).num_processes > 1:
        return list(Schedule([subject], first, count=number, laws=laws, num_workers=1).run_cases())
    seeds = range(first, first + number)
    return [
        LawResult(subject, seed, outcome)
        for seed in seeds
        for outcome, _ in try_laws_for_seed(subject, seed, laws)
    ]


@pytest.mark.parametrize("engine", [os.environ.get("LAYOUTMAP_TEST_PROCESS", "jax")])
def test_the_laws_of_arrays_hold(engine):
    """Drawn arrays keep every bit; one of these seeds has a dim of size 1 beside another along one axis."""
    outcomes = [
        each for seed in (*range(DAY * 1000, DAY * 1000 + 5), 115) for each, _ in try_array_laws(engine, seed)
    ]

    assert [] == [each for each in outcomes if each.what != "held"]
