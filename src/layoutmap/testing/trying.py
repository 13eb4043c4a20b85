"""A process that tries laws on cases of one subject: `python -m layoutmap.testing.trying keras-jax [LAW ...]`.

It reads seeds from stdin, a line each, and writes a line of JSON for each law, and one when the case has ended.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Collection, Iterator
from dataclasses import asdict
from typing import Any

from layoutmap.scope.devices import simulate_devices
from layoutmap.testing import models
from layoutmap.testing.laws import Outcome, quiet, try_case
from layoutmap.testing.models.cases import Case
from layoutmap.testing.subjects import SUBJECTS

NUM_DEVICES = 8
OWN_OPTIMIZER = 4
"""One in so many cases keeps the optimizer that was drawn for it; the others have SGD, which hides no wrong scale."""


def case_of(subject: str, seed: int) -> Case:
    """Return the case that is tried for a seed of a subject."""
    case = models.draw(seed, SUBJECTS[subject].library)
    return case.with_sgd if seed % OWN_OPTIMIZER else case


def try_seed(subject: str, seed: int, laws: Collection[str] = ()) -> Iterator[tuple[Outcome, str]]:
    """Yield what came of each law on the case of a seed, with the case as a program where the law did not hold.

    Args:
        subject: One of `SUBJECTS`.
        seed: The seed.
        laws: Names of laws; none: all.
    """
    try:
        with quiet():
            case = case_of(subject, seed)
    except Exception:
        yield Outcome("a case is drawn", "failed", traceback.format_exc(limit=-4), 0.0), ""
        return
    for outcome in try_case(case, laws):
        yield outcome, str(case) if outcome.is_suspicious else ""


def main(arguments: list[str]) -> int:
    """Try the seeds that are read from stdin.

    Args:
        arguments: The subject, and names of laws; none: all.
    """
    subject, *laws = arguments
    answers, sys.stdout = sys.stdout, sys.stderr  # frameworks print, too

    def answer(**facts: Any) -> None:
        answers.write(f"{json.dumps(facts)}\n")
        answers.flush()

    simulate_devices(NUM_DEVICES, SUBJECTS[subject].engine)
    for line in sys.stdin:
        for outcome, program in try_seed(subject, int(line), laws):
            answer(outcome=asdict(outcome), program=program)
        answer(ended=int(line))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
