"""Where DTensor would compute wrongly it is not used; each test has a process of its own, as DTensor decides once."""

import forked
import pytest

from layoutmap.engines.tensorflow.selfcheck import FAULTS
from layoutmap.testing.faults import FAULTS as KNOWN

PROCESSES = ("tensorflow",)
pytestmark = pytest.mark.every_case

COMBINING, ALL_TO_ALL = (fault.setting for fault in FAULTS)

FIRST_USE = 'dtensor.relayout(tf.zeros(8), dtensor.Layout(["x"], mesh))\n'
REFUSAL = """
import layoutmap as lm
from layoutmap.core.initializers import Initializer
from layoutmap.engines.tensorflow.engine import engine
from layoutmap.core.variables import Assignment, VariableSpec

layout = lm.Layout(["x"], lm.Mesh(None, "x=4"))
zeros = Initializer(global_value=lambda: np.zeros(8, np.float32))
made = []
for make in (
    lambda: lm.DVariable(tf.zeros(8), layout=layout),
    lambda: engine().create_initial_values({"w": Assignment(VariableSpec("w", (8,), "float32"), layout)}, {"w": zeros}),
    lambda: engine().make_variable(engine().relayout(np.zeros(8, np.float32), layout)),
):
    try:
        made.append(make())
    except lm.EngineError as error:
        print(error)
print(len(made), "made")
on_one_device = lm.DVariable(tf.zeros(8), layout=lm.Layout(["x"], lm.Mesh(None, "x=1")))
"""


ENGINE_FIRST = "import layoutmap.engines.tensorflow.engine\n"
VARIABLE_FIRST = "import layoutmap as lm\nlm.DVariable(0, layout=lm.Layout([], lm.Mesh(None, 'x=4')))\n"

UNSET: dict[str, str | None] = {COMBINING: None, ALL_TO_ALL: None}
BOTH_OFF = {COMBINING: "1", ALL_TO_ALL: "0"}
WRONG = {
    "DTensor is used first": (FIRST_USE + REFUSAL, {}, ALL_TO_ALL, "0"),
    "the setting is made for combining": (ENGINE_FIRST + REFUSAL, {COMBINING: "64"}, COMBINING, "64"),
    "the setting is made for all-to-all": (ENGINE_FIRST + REFUSAL, {ALL_TO_ALL: "1"}, ALL_TO_ALL, "1"),
}
RIGHT = {
    "the engine is loaded first": (ENGINE_FIRST + FIRST_USE + REFUSAL, {}),
    "the settings are in the environment": (FIRST_USE + REFUSAL, BOTH_OFF),
    "nothing is done before": (REFUSAL, {}),
    "a variable is the first thing that is made": (VARIABLE_FIRST + REFUSAL, {}),
}


@pytest.fixture(scope="module")
def outputs():
    """What each of the texts prints."""
    jobs = {**WRONG, **RIGHT}
    ran = forked.wait_for_all(
        [
            forked.start(forked.EIGHT_DEVICES + text, environment=UNSET | settings)
            for text, settings, *_ in jobs.values()
        ]
    )
    for each in ran:
        assert 0 == each.returncode, each.stderr[-3000:]
    return {name: each.stdout for name, each in zip(jobs, ran, strict=True)}


@pytest.mark.parametrize("fault", KNOWN["tensorflow"](), ids=lambda fault: fault.title)
def test_tensorflow_computes_wrongly_unless_it_is_set_right(fault):
    """In TensorFlow 2.21 a step leaves a variable at 0 that must become 8, and a relayout mixes up blocks."""
    running = [forked.start(program, environment=UNSET) for program in (fault.uncorrected, fault.corrected)]
    said = [each.stdout for each in forked.wait_for_all(running)]

    assert ["right: 0.0\n", "right: 1.0\n"] == said


@pytest.mark.parametrize("case", WRONG)
def test_a_process_that_would_compute_wrongly_is_refused(case, outputs):
    """Where numbers would be wrong no variable is made, and the error says what, where, why and what to type."""
    said, (*_, setting, value) = outputs[case], WRONG[case]
    fault = next(each for each in FAULTS if each.setting == setting)

    assert 3 == said.count(f"DTensor computes {fault.what} wrongly in this process")
    assert f"  {setting}  {value}\n" in said
    assert f"start again with {setting}={fault.value} in the environment" in said
    assert said.endswith("0 made\n")


@pytest.mark.parametrize("case", RIGHT)
def test_a_process_that_computes_right_is_not_refused(case, outputs):
    """With the engine loaded before DTensor's first use, or the settings in the environment, variables are made."""
    assert "3 made\n" == outputs[case]
