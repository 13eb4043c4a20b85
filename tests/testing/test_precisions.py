"""Drawn models are computed in bfloat16 and TF32 or quantized, too; a wrong number among coarse ones is found."""

import functools
import os
import random
import subprocess
import sys
from collections import Counter

import frameworks
import ml_dtypes
import pytest
from testing.faulty import with_fault

from layoutmap.inspecting.parity import ParityRow
from layoutmap.testing import models
from layoutmap.testing.laws import trial
from layoutmap.testing.laws.training import compare_training, compare_training_in_precision
from layoutmap.testing.laws.trial import NotApplicable, Trial, ignore_warnings
from layoutmap.testing.products import ALLOW_TF32
from layoutmap.testing.subjects import SUBJECTS
from layoutmap.testing.worker import draw_subject_case

PROCESSES = ("jax", "tensorflow", "torch")
HERE = os.environ.get("LAYOUTMAP_TEST_PROCESS") or "jax"
LIBRARIES = sorted({each.library for each in SUBJECTS.values() if each.engine == HERE}, reverse=True)
"""`make test` tries the first, whose models compile fastest."""
SMALL = {"keras": 105, "torch": 103, "nnx": 117, "pytree": 218}
"""Seeds of small models."""
# Each test compiles a model anew: in `make test` one engine is enough.
pytestmark = [pytest.mark.long] if HERE != "jax" else []
IN_BFLOAT16 = [
    pytest.param(library, precision, id=f"{library} in {precision}")
    for library in LIBRARIES
    for precision in ("bfloat16", "mixed_bfloat16")
    if (library, precision) != ("nnx", "mixed_bfloat16")
]
QUANTIZED = {"jax": "int8", "torch": "int8", "tensorflow": "int4"}[HERE]
"""A precision of quantized models of Keras: DTensor of TensorFlow takes no products of int8."""
TWICE = ParityRow("gradient", "of a weight", 1.0, 1e-5)

TRAINS = """
import layoutmap as lm
from layoutmap.testing import models
from layoutmap.testing.laws.training import compare_training
from layoutmap.testing.laws.trial import Trial, ignore_warnings

lm.simulate_devices(8, "torch")
with ignore_warnings():
    print(list(compare_training(Trial(models.draw(122, "torch").to_precision("bfloat16")))))
"""


@pytest.fixture(autouse=True)
def without_warnings():
    with ignore_warnings():
        yield


@functools.cache
def trial_in(library, precision):
    """A small model, and comparisons of it, made once for the tests below."""
    return Trial(models.draw(SMALL[library], library).to_precision(precision))


@pytest.mark.parametrize(("library", "precision"), IN_BFLOAT16)
def test_a_factor_of_two_is_found(library, precision):
    """The largest gradient times two, which differs by 1, is beyond rounding; what rounding does is not."""
    trial = trial_in(library, precision)
    rows = [row for row in trial.pair_comparisons if row.stage != "weights"]

    assert any(not row.agrees for row in rows)
    assert [TWICE] == trial.exclude_rounding_differences([*rows, TWICE])


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_plain_model_that_rounds_otherwise_is_a_reference(library):
    """The plain model differs from itself in float64, or without a compiler, by rounding, in all that is compared."""
    rows = list(Trial(models.draw(SMALL[library], library))._compare_with_other_rounding())

    assert {"forward", "loss", "gradient", "step 3"} <= {row.stage for row in rows}
    assert max(row.error for row in rows) < 1e-5


class WrongGradient:
    """An adapter of which one model has a wrong gradient of one variable, as a sum that is missing makes it."""

    def __init__(self, adapter, model, path, factor):
        self.adapter, self.model, self.path, self.factor = adapter, model, path, factor

    def __getattr__(self, name):
        return getattr(self.adapter, name)

    def gradients(self, model, batch):
        logs, found = self.adapter.gradients(model, batch)
        return logs, found | {self.path: found[self.path] * self.factor} if model is self.model else found


def find_sound_paths(trial):
    """Return the variables whose gradients in the plain model are alike if the rows come in another order."""
    model, batch = trial.create_unsharded_model(), trial.case.batch
    reversed_rows = map_arrays(lambda array: array[::-1], batch)
    one, other = (trial.adapter.gradients(model, each)[1] for each in (batch, reversed_rows))
    sizes = {path: float(abs(each).max()) for path, each in one.items() if each is not None and each.size}
    largest = max(sizes.values(), default=0.0)
    return [
        p for p, size in sizes.items() if size > 1e-3 * largest and abs(one[p] - other[p]).max() < 1e-4 * size
    ]


def map_arrays(function, values):
    if isinstance(values, list | tuple):
        return type(values)(map_arrays(function, each) for each in values)
    return (
        {n: map_arrays(function, v) for n, v in values.items()}
        if isinstance(values, dict)
        else function(values)
    )


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4000, 4003))
@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_a_drawn_factor_of_a_gradient_is_found(library, seed):
    """A gradient of a drawn model that is zero, or off by 1 to 100 %, is named by the law: no rounding explains it."""
    rng = random.Random(seed)
    case = Trial(models.draw(seed, library))
    paths = [] if case.plan.errors or not case.is_unsharded_model_finite else find_sound_paths(case)
    if not paths:
        pytest.skip("the plan is refused, or rounding changes each gradient")
    path = rng.choice(paths)
    factor = rng.choice([0.0, 1 + 10 ** rng.uniform(-2, 0), 1 - 10 ** rng.uniform(-2, 0)])
    case.adapter = WrongGradient(case.adapter, case.model_pair[1], path, factor)

    assert [f"gradient  {path}"] == [
        text.partition(":")[0] for text in compare_training(case) if path in text
    ]


def test_rounding_is_allowed_for_after_steps_that_it_changes(monkeypatch):
    """Plain models that rounding drives apart in the first steps are compared in those with fewer rows, too."""
    monkeypatch.setattr(trial, "TOLERANCE", 0.0)  # any difference counts
    library = LIBRARIES[0]
    case = Trial(models.draw(SMALL[library], library))

    assert {"step 3", "fewer rows"} <= {
        row.stage for row in case._compare_perturbed_model() if not row.agrees
    }


@pytest.mark.parametrize(("library", "precision"), IN_BFLOAT16)
def test_a_model_is_computed_in_its_precision(library, precision):
    """Outputs are of bfloat16, and weights are, unless it is mixed; gradients are like weights."""
    trial = trial_in(library, precision)
    plain, sharded = trial.model_pair
    outputs = trial.adapter.forward(plain, trial.case.batch)
    while isinstance(outputs, list | tuple):
        outputs = outputs[0]
    own = "float32" if precision == "mixed_bfloat16" else "bfloat16"

    assert ml_dtypes.bfloat16 == outputs.dtype
    assert {own} == {a.variable.dtype for a in trial.plan.assignments if a.variable.is_trained}
    gradients = trial.adapter.gradients(sharded, trial.case.batch)[1].values()
    assert {own} == {each.dtype.name for each in gradients if each is not None}


@pytest.mark.long
def test_a_quantized_model_has_kernels_of_int8():
    """A model of Keras is quantized once it is built, and its kernels are planned so; int4 ones are packed in pairs."""
    trial = trial_in("keras", QUANTIZED)

    assert "int8" in {a.variable.dtype for a in trial.plan.assignments}
    assert [TWICE] == trial.exclude_rounding_differences([*trial.pair_comparisons, TWICE])


@pytest.mark.long
@pytest.mark.skipif(HERE != "jax", reason="its model is one of flax.nnx")
def test_a_model_that_diverges_is_no_fault():
    """Its weights go to 1e15 in three steps, and one rounding moves them as far as layouts do."""
    trial = Trial(draw_subject_case("nnx", 20261402021).to_precision("bfloat16"))

    assert any(not row.agrees for row in trial.pair_comparisons)
    assert [] == list(compare_training(trial))


@pytest.mark.long
@pytest.mark.skipif(HERE != "torch", reason="where the fault is put in, in the engine of torch")
def test_a_fault_is_found_in_bfloat16(tmp_path):
    """A bias that two devices add, each all of it, is beyond rounding in bfloat16; without the fault nothing is."""
    right = "of_bias = of_bias / plan.num_summands"
    source = with_fault(tmp_path, "engines/torch/dtensor_ops/linear.py", right, "of_bias = of_bias / 1")
    for path, is_right in ((source, False), (frameworks.ROOT / "src", True)):
        environment = os.environ | {"PYTHONPATH": str(path)}
        done = subprocess.run([sys.executable, "-c", TRAINS], env=environment, capture_output=True, text=True)

        assert is_right == (done.stdout == "[]\n"), done.stdout + done.stderr
        assert is_right or "forward   output 1: differs by" in done.stdout


def test_what_is_not_tried():
    """Each case is tried in one precision, and none in TF32 where devices have none, which is said."""
    library = LIBRARIES[0]
    said = Counter()
    for seed in range(12):
        with pytest.raises(NotApplicable) as caught:
            list(compare_training_in_precision("TF32", Trial(models.draw(seed, library))))
        said[str(caught.value)] += 1

    assert {"this case is tried in a different precision", "the devices do not support TF32"} == said.keys()


def test_a_program_says_its_precision():
    """What is printed where a law does not hold has the lines that it was tried with."""
    library = LIBRARIES[0]
    case = models.draw(SMALL[library], library)

    assert f"\n{ALLOW_TF32[HERE].format(True)}\n" in str(case.to_precision("TF32"))
    assert str(case.to_precision("bfloat16")).count("bfloat16")
    assert not str(case).count("float16")
