"""Where DTensor would train wrongly it is not used; each test has a process of its own, as DTensor decides once."""

import forked
import pytest

from layoutmap.engines.tensorflow.selfcheck import SETTING

PROCESSES = ("tensorflow",)
pytestmark = pytest.mark.every_case

STEP = """
whole = dtensor.Layout.replicated(mesh, 1)
first, second, first_sum, second_sum = (
    dtensor.DVariable(dtensor.relayout(tf.zeros(4), whole)) for _ in range(4)
)
rows = dtensor.relayout(tf.ones((8, 4)), dtensor.Layout(["x", "unsharded"], mesh))

@tf.function
def step(rows):
    total, double = tf.reduce_sum(rows, 0), tf.reduce_sum(rows * 2, 0)
    first_sum.assign(first_sum * 0.9 + total)
    first.assign_add(first_sum)
    second_sum.assign(second_sum * 0.9 + double)
    second.assign_add(second_sum)

step(rows)
print(first.numpy()[0])
"""
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
    lambda: engine().create({"w": Assignment(VariableSpec("w", (8,), "float32"), layout)}, {"w": zeros}),
    lambda: engine().variable(engine().relayout(np.zeros(8, np.float32), layout)),
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

WRONG = {
    "DTensor is used first": (FIRST_USE + REFUSAL, None),
    "the setting is made for combining": (ENGINE_FIRST + REFUSAL, "1"),
}
RIGHT = {
    "the engine is loaded first": (ENGINE_FIRST + FIRST_USE + REFUSAL, None),
    "the setting is in the environment": (FIRST_USE + REFUSAL, "0"),
    "nothing is done before": (REFUSAL, None),
    "a variable is the first thing that is made": (VARIABLE_FIRST + REFUSAL, None),
}
TENSORFLOWS = {"without the setting": (STEP, None), "with the setting": (STEP, "0")}


@pytest.fixture(scope="module")
def outputs():
    """What each of the texts prints."""
    jobs = {**WRONG, **RIGHT, **TENSORFLOWS}
    ran = forked.wait_for_all(
        [
            forked.start(forked.EIGHT_DEVICES + text, environment={SETTING: setting})
            for text, setting in jobs.values()
        ]
    )
    for each in ran:
        assert 0 == each.returncode, each.stderr[-3000:]
    return {name: each.stdout for name, each in zip(jobs, ran, strict=True)}


@pytest.mark.parametrize(("case", "expected"), [("without the setting", 0.0), ("with the setting", 8.0)])
def test_tensorflow_trains_wrongly_unless_it_is_set_right(case, expected, outputs):
    """A step whose variable must become 8 leaves it at 0 in TensorFlow 2.21; with the setting it is right."""
    assert f"{expected}\n" == outputs[case]


@pytest.mark.parametrize("case", WRONG)
def test_a_process_that_would_train_wrongly_is_refused(case, outputs):
    """Where steps would be wrong no variable is made, and the error says what, where, why and what to type."""
    said = outputs[case]

    assert 3 == said.count("DTensor computes training steps wrongly in this process")
    assert f"  {SETTING}  {WRONG[case][1] or 0}\n" in said
    assert "combines all-reduces reads variables before they are written" in said
    assert f"start again with {SETTING}=0 in the environment" in said
    assert said.endswith("0 made\n")


@pytest.mark.parametrize("case", RIGHT)
def test_a_process_that_trains_right_is_not_refused(case, outputs):
    """With the engine loaded before DTensor's first use, or with the setting in the environment, variables are made."""
    assert "3 made\n" == outputs[case]
