"""Keras models that nobody chose, on layout maps that nobody chose, train on JAX as on one device.

`make test` tries a few each day; LAYOUTMAP_DRAWN=17 tries those of another day. As a program it tries as many as asked,
and prints what fails as programs:

    python tests/adapters/test_drawn_models.py --seed 5000 --count 300
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pytest
from cases import xla_settings
from rounding import beyond

import layoutmap as lm
from layoutmap.adapters import get_adapter
from layoutmap.scope.parity import ParityRow
from layoutmap.testing import models

PROCESSES = ("jax",)
A_DAY = 4
PARTS, OF_PART = 12, 20
IN_ONE_PROCESS = 25
NAN = "differs by nan"
OPTIMIZED = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
"""As users run, so what is wrong is tried again so. XLA without its optimizations, as tests run to be quick, has faults
of its own: it divides 0 by 0 in the gradient of some maxima, on one device, too, and gave 1 of 640 models wrong
gradients of a normalization in layouts."""
pytestmark = pytest.mark.filterwarnings("ignore")  # of maps and models that nobody would write


def tried(seed):
    """What became of a case, and why: `held`, `refused` by the plan, `no numbers` on one device, or `wrong`."""
    case = models.draw(seed).with_sgd
    plan = case.plan()
    if plan.errors:
        return "refused", str(plan.errors[0])
    try:
        why = differences(case, plan)
    except Exception:
        why = [traceback.format_exc(limit=-3)]
    if any(NAN in each for each in why) and not is_finite(case):
        return "no numbers", why[0]
    return ("wrong", "\n".join(why)) if why else ("held", "")


def is_finite(case):
    """Whether the plain model trains."""
    adapter = get_adapter("keras")
    adapter.set_seed(0)
    model = case.make_model()
    adapter.complete(model, case.batch)
    logs, gradients = adapter.gradients(model, case.batch)
    steps = [adapter.train_step(model, case.batch) for _ in range(3)]
    numbers = [*gradients.values(), *(number for each in (logs, *steps) for number in each.values())]
    return all(np.isfinite(each).all() for each in numbers if each is not None)


def differences(case, plan):
    """Where a model in layouts differs from its plan, and from the plain model."""
    made = []
    rows = trained(case, made)
    planned = {a.variable.path: a.layout for a in plan.assignments}
    others = [
        f"{path}: planned {planned.get(path)}, built {variable.layout}"
        for path, variable in get_adapter("keras").variables(made[0]).items()
        if planned.get(path) != variable.layout
    ]
    return [*map(str, beyond(rows, case.make_model, case.batch)), *others]


def trained(case, made):
    """Where first values, gradients, three steps or `fit`, whose last batch is smaller, differ; and both models."""

    def make_model():
        made.append(case.make_model())
        return made[-1]

    report = lm.check_parity(
        make_model, case.layout_map, case.batch, batch_dim=case.map.batch_dim, raises=False
    )
    if not report.agrees:
        return [row for row in report.rows if not row.agrees]
    size, adapter = case.rows * 2 // 3, get_adapter("keras")
    losses = [
        model.fit(*case.batch, batch_size=size, shuffle=False, verbose=0).history["loss"] for model in made
    ]
    if not np.isfinite(losses[1]).all():  # some diverge, at one rate of learning for all
        return []
    ours, theirs = ({path: adapter.read(v) for path, v in adapter.variables(model).items()} for model in made)
    pairs = zip([*ours, "loss"], [*ours.values(), losses[0]], [*theirs.values(), losses[1]], strict=True)
    rows = [ParityRow("fit", name, difference(a, b), 1e-5) for name, a, b in pairs]
    return [row for row in rows if not row.agrees]


def difference(actual, expected):
    """The largest one, by the size of the values, as `check_parity` has it."""
    actual, expected = np.asarray(actual, "float64"), np.asarray(expected, "float64")
    return np.max(np.abs(actual - expected), initial=0) / np.max(np.abs(expected), initial=1)


def test_some_drawn_models():
    """The cases of this day have the layouts of their plan, first values of the plain model, and its steps."""
    day = int(os.environ.get("LAYOUTMAP_DRAWN", date.today().toordinal()))
    print(f"LAYOUTMAP_DRAWN={day} tries these cases again")

    assert {} == wrong(range(day * A_DAY, (day + 1) * A_DAY))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_drawn_models(part):
    """So have these."""
    assert {} == wrong(range(part * OF_PART, (part + 1) * OF_PART))


def wrong(seeds):
    suspects = [seed for seed in seeds if tried(seed)[0] == "wrong"]
    again = (case for seed in suspects for case in outcomes(range(seed, seed + 1), OPTIMIZED))
    return {seed: why for seed, what, why in again if what == "wrong"}


# -- as a program


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=date.today().toordinal() * 1000)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    seeds = range(asked.seed, asked.seed + asked.count)
    if asked.in_this_process:
        warnings.simplefilter("ignore")
        for seed in seeds:
            print(json.dumps([seed, "begun", ""]), flush=True)
            print(json.dumps([seed, *tried(seed)]), flush=True)
        return 0
    begun, counts = time.perf_counter(), Counter()
    while seeds:
        for seed, what, why in outcomes(seeds[:IN_ONE_PROCESS], xla_settings(8)):
            if what == "wrong" or NAN in why:
                print(f"\n{what} without optimizations: seed {seed}: {why}")
                ((_, what, why),) = outcomes(range(seed, seed + 1), OPTIMIZED)
            counts[what] += 1
            if what != "held":
                print(f"\n{what}: seed {seed}: {why}")
            if what == "wrong":
                print(models.draw(seed).with_sgd)
            seeds = range(seed + 1, seeds.stop)
        print(
            f"{counts.total()} of {asked.count} in {time.perf_counter() - begun:.0f} s: {dict(counts)}",
            flush=True,
        )
    return 1 if counts["wrong"] else 0


def outcomes(seeds, settings):
    """What became of cases, tried in a process of their own; the last of them may have ended it."""
    arguments = [
        sys.executable,
        __file__,
        "--seed",
        str(seeds.start),
        "--count",
        str(len(seeds)),
        "--in-this-process",
    ]
    environment = os.environ | settings | {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    begun = None
    for seed, what, why in map(json.loads, done.stdout.splitlines()):
        begun = seed if what == "begun" else None
        if what != "begun":
            yield seed, what, why
    if begun is not None:
        yield begun, "wrong", f"ends the process with status {done.returncode}: {done.stderr[-2000:]}"
    assert begun is not None or done.returncode == 0, done.stderr


if __name__ == "__main__":
    sys.exit(main())
