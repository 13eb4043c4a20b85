"""Processes of JAX, each with some of the devices, train one Keras model: the numbers of one process."""

from pathlib import Path

import keras_process
import numpy as np
import pytest
from cases import EVERYTHING, xla_settings
from engines import several_processes

PROCESSES = ("jax",)
pytestmark = [
    pytest.mark.every_case,
    pytest.mark.filterwarnings(
        # Keras 3.15's own variables know only the older form of __array__.
        "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
    ),
]

WORKER = Path(__file__).with_name("keras_process.py")
ENVIRONMENT = xla_settings(4)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of two processes tells, and plain Keras in this one."""
    (port,) = several_processes.free_ports(1)
    folder = tmp_path_factory.mktemp("processes")
    results = several_processes.run(WORKER, folder, [ENVIRONMENT] * 2, f"127.0.0.1:{port}")
    plain = keras_process.seeded()
    x, y = (each[: keras_process.BATCH] for each in keras_process.data())
    alone = {}
    if EVERYTHING:
        alone["both"] = {"evaluate": plain.evaluate(x, y, verbose=0), "predict": plain.predict(x, verbose=0)}
    alone["cut"] = keras_process.trained(plain)
    alone["step"] = keras_process.fitted(keras_process.seeded())
    return [told for told, _ in results], alone


def assert_close(expected, actual):
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_first_values_are_those_of_one_process(told):
    """With a seed, the plan is one and all first values have the bits of the plain model."""
    (first, second), _ = told

    assert first["plain bits"] == first["bits"] == second["bits"]
    assert first["plan"] == second["plan"]


def test_processes_without_a_seed_agree_on_one(told):
    """Where nobody set a seed, every device has the same values and the same seeds for dropout."""
    (first, second), _ = told

    assert first["unseeded"] == second["unseeded"]
    assert 1 == len({tuple(seed) for seed in first["unseeded"]["seeds"]})


def test_each_brings_its_rows_and_all_get_the_numbers_of_one_process(told):
    """Histories, evaluations and steps are those of one process with all rows, the last batch not dividing."""
    processes, alone = told

    for each in processes:
        for name, expected in alone["cut"]["fit"].items():
            assert_close(expected, each["cut"]["fit"][name])
        for name in ("evaluate", "step"):
            assert_close(alone["cut"][name], each["cut"][name])
    assert processes[0]["cut"]["fit"] == processes[1]["cut"]["fit"]


def test_predict_gives_each_process_its_own_rows(told):
    """Put together batch by batch, what the processes get is what one process gets."""
    processes, alone = told
    expected = np.array(alone["cut"]["predict"])
    rows = np.arange(len(expected))

    for number, each in enumerate(processes):
        own = np.concatenate([part[0] for part in keras_process.batches((rows,), number, 2)])

        np.testing.assert_allclose(each["cut"]["predict"], expected[own], rtol=1e-5, atol=1e-6)


def test_meshes_that_share_rows_or_leave_devices_out(told):
    """Processes that hold the same rows all bring them, and four devices of one process work alone."""
    processes, alone = told

    for each in processes:
        for name, expected in alone["step"].items():
            assert_close(expected, each["shared"][name])
    for name, expected in alone["step"].items():
        assert_close(expected, processes[0]["alone"][name])
    assert "no device of the mesh belongs to this process" in processes[1]["alone"]


@pytest.mark.long
def test_two_devices_of_each_process_make_a_mesh(told):
    """Whose parts of the batch are not side by side: evaluation is that of one process, predictions are its rows."""
    processes, alone = told

    for number, each in enumerate(processes):
        assert_close(alone["both"]["evaluate"], each["both"]["evaluate"])
        own = alone["both"]["predict"][4 * number : 4 * number + 4]
        np.testing.assert_allclose(each["both"]["predict"], own, rtol=1e-5, atol=1e-6)


def test_one_process_writes_a_file_and_all_read_it(told):
    """Of equal names the first process writes, of different ones each; what comes back is complete and laid out."""
    (first, second), _ = told

    assert [(2, 1), (1, 0)] == [
        (each["saved"]["written"], each["saved"]["checkpoint"]) for each in (first, second)
    ]
    for each in (first, second):
        for what in ("own", "plain", "again", "layouts"):
            assert each["saved"][what], what
        assert ["(model, batch)", "(unsharded,)"] == each["saved"]["whole"]
    assert "No such file" in first["saved"]["refused"]
    assert (
        "save_weights: another process could not write its file\n  process 0  FileNotFoundError"
        in (second["saved"]["refused"])
    )


SAID = {
    "plan": "process 1 has a different plan from process 0\n"
    "  from process 0 to 1  up.bias  layout  (unsharded,) -> (model,)",
    "sizes": "fit: the processes call different methods or pass different shapes or types\n"
    "  process 0  fit: float32[4, 6], int32[4]\n  process 1  fit: float32[3, 6], int32[3]",
    "verbs": "the processes call different methods or pass different shapes or types\n"
    "  process 0  evaluate: float32[4, 6]",
    "contents": "fit: processes whose devices hold the same rows pass different rows\n"
    "  mesh       model=2, batch=4\n  parts      1\n",
    "divided": "the rows of a batch cannot be divided between the processes\n  mesh       batch=3, model=2\n"
    "  process 0  holds the blocks [0, 1]\n  process 1  holds the blocks [1, 2]",
    "values": "up.kernel: its values differ between processes",
}


def test_a_process_that_fails_tells_the_others(told):
    """What a callback raises in one process ends `fit` in all of them, where it is said whose error it was."""
    (first, second), _ = told

    assert "no more disk" == second["refused"]["fails"]
    assert "fit: process 1 of this program has failed\n" in first["refused"]["fails"]
    assert "process 1  fit: has failed: Broken: no more disk" in first["refused"]["fails"]


@pytest.mark.parametrize("what", SAID)
def test_processes_that_do_not_do_the_same_are_refused(told, what):
    """Other plans, parts, rows or values are an error in every process, which says what differs."""
    processes, _ = told

    for each in processes:
        assert SAID[what] in each["refused"][what]
