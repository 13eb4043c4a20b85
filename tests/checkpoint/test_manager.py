"""A manager saves beside the training: what was when `save` was called is there, errors are raised, nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from checkpoint.forged import manifest_in, write_manifest
from checkpoint.saves import names_in

import layoutmap as lm
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.core.errors import CheckpointError
from layoutmap.engines import get_engine
from layoutmap.saving import save_plan

PROCESSES = ("jax",)


def layouts_of(kind: str) -> tuple[Any, ...]:
    mesh = lm.create_mesh("x=2,y=4")
    return {
        "plain": (),
        "sharded": (lm.Layout(["x", "y"], mesh),),
        "replicated": (lm.Layout([None, None], mesh),),
    }[kind]


def model_of(value: float, kind: str = "plain") -> dict[str, Any]:
    """A model of one weight, in a layout or plain."""
    array = np.full((64, 64), value, np.float32)
    return {
        "w": get_engine("jax").relayout(array, *layouts_of(kind)) if kind != "plain" else jnp.asarray(array)
    }


def saved(directory: Path, step: int) -> float:
    """The one value that all elements of a saved weight have."""
    (value,) = np.unique(StepSource(LocalStorage(directory), step).read("w"))
    return float(value)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk on which nothing is written until an event is set."""
    may_write = threading.Event()
    create = LocalStorage.create_file

    def wait_and_create(self: LocalStorage, folder: str, name: str) -> Any:
        may_write.wait(60)
        return create(self, folder, name)

    monkeypatch.setattr(LocalStorage, "create_file", wait_and_create)
    yield may_write
    may_write.set()


@pytest.mark.parametrize("kind", ["sharded", "plain", "replicated"])
def test_a_donated_array_is_saved_as_it_was(tmp_path: Path, slow_disk: threading.Event, kind: str) -> None:
    """An array that is donated to the next step, before it is written, is saved with the values it had."""
    model = model_of(1, kind)
    step = jax.jit(lambda w: w * 2 + 1, donate_argnums=0)
    with lm.CheckpointManager(tmp_path) as manager:
        assert manager.save(model, 1)
        for _ in range(5):
            model = {"w": step(model["w"])}
        jax.block_until_ready(model)
        assert [] == manager.steps
        slow_disk.set()

    assert 63 == float(np.asarray(model["w"])[0, 0])
    assert 1 == saved(tmp_path, 1)


def test_an_immutable_array_is_not_copied(tmp_path: Path, slow_disk: threading.Event) -> None:
    """What waits to be written shares the memory of a JAX array on a CPU, which nothing can change."""
    model = model_of(1, "sharded")
    shards = [values for _, values in get_engine("jax").iterate_shards(model["w"])]
    buffers = {shard.data.unsafe_buffer_pointer() for shard in model["w"].addressable_shards}

    assert buffers == {values.ctypes.data for values in shards}
    assert not any(values.flags.writeable for values in shards)


def test_an_assigned_keras_variable_is_saved_as_it_was(tmp_path: Path, slow_disk: threading.Event) -> None:
    """A weight of Keras that is assigned, before it is written, is saved with the value it had."""
    layout_map = lm.LayoutMap(lm.create_mesh("model=4"), {r".*\.kernel": (None, "model")})
    model = layout_map.build(lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")]))
    kernel = model.layers[0].kernel
    expected = np.asarray(kernel)
    with lm.CheckpointManager(tmp_path) as manager:
        manager.save(model, 1)
        kernel.assign(np.zeros((8, 16)))
        slow_disk.set()

    assert np.array_equal(expected, StepSource(LocalStorage(tmp_path), 1).read("d1.kernel"))


def test_a_second_save_waits_for_the_first(tmp_path: Path, slow_disk: threading.Event) -> None:
    """At most one save is in flight: the second returns when the first is there."""
    manager = lm.CheckpointManager(tmp_path)
    manager.save(model_of(1), 1)
    second = threading.Thread(target=lambda: manager.save(model_of(2), 2))
    second.start()
    second.join(0.1)
    waited, before = second.is_alive(), manager.steps
    slow_disk.set()
    second.join()
    manager.close()

    assert (True, []) == (waited, before)
    assert [1.0, 2.0] == [saved(tmp_path, step) for step in manager.steps]


def test_what_fails_on_the_thread_is_raised_once(tmp_path: Path, slow_disk: threading.Event) -> None:
    """A save that fails on its thread raises in the next call, whichever that is, once; the step can be saved then."""
    for call in ("save", "wait", "close", "load"):
        slow_disk.clear()
        directory = tmp_path / call
        manager = lm.CheckpointManager(directory, every_steps=10)
        manager.save(model_of(1), 10)
        for folder in directory.iterdir():
            folder.rename(directory / "moved")  # what is written then has no folder
        slow_disk.set()
        manager._flight._thread.join()  # type: ignore[union-attr]
        calls = {
            "save": lambda m=manager: m.save(model_of(1), 11),
            "load": lambda m=manager: m.load(model_of(0)),
        }
        with pytest.raises(CheckpointError, match="the file cannot be written"):
            calls.get(call, getattr(manager, call))()

        assert [] == manager.steps
        assert manager.save(model_of(2), 10, force=True)
        manager.close()
        assert 2 == saved(directory, 10)


def test_an_error_in_a_with_block_is_not_hidden(tmp_path: Path, slow_disk: threading.Event) -> None:
    """If a block raises and its last save failed, too, the block's error is raised, and notes the other."""

    def block() -> None:
        with lm.CheckpointManager(tmp_path) as manager:
            manager.save(model_of(1), 10)
            next(tmp_path.iterdir()).rename(tmp_path / "moved")
            slow_disk.set()
            raise KeyError("mine")

    with pytest.raises(KeyError) as error:
        block()
    assert "And the last save has failed: " in "".join(error.value.__notes__)


def test_steps_are_saved_when_due_and_the_rest_are_deleted(tmp_path: Path) -> None:
    """The last two and the best are there in the end; a step that is not due, or was saved already, is not saved."""
    with lm.CheckpointManager(tmp_path, keep_last=2, best="loss", every_steps=2, wait=True) as manager:
        due = [
            step for step in range(12) if manager.save(model_of(step), step, metrics={"loss": abs(step - 5)})
        ]
        again = manager.save(model_of(11), 10, force=True)
        last = manager.save(model_of(11), 11, force=True)
        loaded = manager.load(model_of(0), best=True)

    assert ([2, 4, 6, 8, 10], False, True) == (due, again, last)
    assert [6, 10, 11] == manager.steps
    assert 6 == float(loaded["w"][0, 0])
    assert {"loss": 1.0} == StepSource(LocalStorage(tmp_path), 6).metrics
    assert f"<CheckpointManager of {tmp_path}: steps [6, 10, 11]>" == repr(manager)


def test_another_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    """A manager made anew knows the steps and metrics of the one before, and the last step counts as saved."""
    with lm.CheckpointManager(tmp_path, keep_last=1, best="loss", every_steps=10) as manager:
        for step in (10, 20, 30):
            manager.save(model_of(step), step, metrics={"loss": step})
    with lm.CheckpointManager(tmp_path, keep_last=1, best="loss", every_steps=10) as manager:
        model = manager.load(model_of(0))
        saves = [manager.save(model, step, metrics={"loss": step}, force=step == 30) for step in (30, 31, 40)]

    assert [False, False, True] == saves
    assert [10, 40] == manager.steps
    assert 30 == float(model["w"][0, 0])


def refused(action: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as found:
        action()
    return found.value


@pytest.mark.parametrize("wait", [True, False])
def test_a_run_that_goes_back_cannot_save_below_the_steps_that_it_left(tmp_path: Path, wait: bool) -> None:
    """The next run would go on from those, and this run's steps would be deleted first; nothing of either is lost."""
    with lm.CheckpointManager(tmp_path, keep_last=3, wait=wait) as manager:
        for step in (10, 20, 30, 40, 50):
            manager.save(model_of(step), step)
        model = manager.load(model_of(0), step=30)
        errors = [
            refused(lambda force=force: manager.save(model_of(34), 34, force=force))
            for force in (False, True)
        ]
        assert not manager.save(model, 30)
        assert [30, 40, 50] == manager.steps

    assert [f"{tmp_path}: step 34 cannot be saved, because later steps exist"] * 2 == [e.what for e in errors]
    fix = 'load the step with later="delete" or later="keep"; or save into another directory, or delete these folders'
    assert [f"{fix} first: step-40, step-50"] * 2 == [error.fix for error in errors]
    assert ["step-30", "step-40", "step-50"] == names_in(tmp_path)


def test_what_to_do_about_steps_that_were_left(tmp_path: Path) -> None:
    """Another directory takes the new steps; with the later ones deleted, the next run goes on from the new ones."""
    with lm.CheckpointManager(tmp_path / "a", keep_last=2, wait=True) as manager:
        for step in (30, 40, 50):
            manager.save(model_of(step), step)
    (tmp_path / "b").mkdir()
    for step in (40, 50):
        shutil.copytree(tmp_path / "a" / f"step-{step}", tmp_path / "b" / f"step-{step}")
    with lm.CheckpointManager(tmp_path / "a", keep_last=2) as manager:
        model = manager.load(model_of(0), step=40)
        shutil.rmtree(tmp_path / "a" / "step-50")
        assert manager.save(model, 44)
    with lm.CheckpointManager(tmp_path / "c", keep_last=2) as manager:
        assert manager.save(lm.load(model_of(0), tmp_path / "b", step=40), 44)

    assert [[40, 44], [40, 50], [44]] == [lm.CheckpointManager(tmp_path / name).steps for name in "abc"]
    assert 40 == float(lm.CheckpointManager(tmp_path / "a").load(model_of(0))["w"][0, 0])


def saved_to_50(directory: Path) -> None:
    """A run of steps 10 to 50."""
    with lm.CheckpointManager(directory, keep_last=3, wait=True) as manager:
        for step in (10, 20, 30, 40, 50):
            manager.save(model_of(step), step)


@pytest.mark.parametrize(
    ("later", "before", "steps", "after"),
    [
        ("delete", [30], [35, 40, 45, 50], [35, 40, 45]),
        ("keep", [30, 40, 50], [35, 40, 45, 50], [35, 40, 45]),
        ("keep", [30, 40, 50], [34, 37, 60], [30, 34, 37]),
    ],
)
def test_a_run_goes_back_and_on_from_there(
    tmp_path: Path, later: Any, before: list[int], steps: list[int], after: list[int]
) -> None:
    """Later steps are deleted, or stay until their number is saved; retention and the next run follow the new line."""
    saved_to_50(tmp_path)
    with lm.CheckpointManager(tmp_path, keep_last=3, wait=True) as manager:
        model = manager.load(model_of(0), step=30, later=later)
        there = manager.steps
        for step in steps[:-1]:
            assert manager.save(model_of(step + 0.5), step)
        history = [each.step for each in manager.history()]
    with lm.CheckpointManager(tmp_path, keep_last=3, wait=True) as other:
        loaded = [other.load(model_of(0)), lm.load(model_of(0), tmp_path)]
        assert other.save(model, steps[-1])
        parents = [each.parent for each in other.history()]

    assert 30 == float(model["w"][0, 0])
    assert before == there
    assert [steps[-2] + 0.5] * 2 == [float(each["w"][0, 0]) for each in loaded]
    assert [after, steps[-3:]] == [history[-3:], [each.step for each in other.history()]]
    assert [30, *steps][-4:-1] == parents


def test_a_manager_follows_its_own_line(tmp_path: Path) -> None:
    """What was left stays, is loaded by its number alone, and is neither the last nor the best of the run."""
    with lm.CheckpointManager(tmp_path, keep_last=None, best="loss", wait=True) as manager:
        for step in (10, 20, 30):
            manager.save(model_of(step), step, metrics={"loss": 5 - step / 10})
        manager.load(model_of(0), step=10, later="keep")
        for step in (12, 14):
            manager.save(model_of(step), step, metrics={"loss": 10 - step / 10})
        found = [
            manager.load(model_of(0)),
            manager.load(model_of(0), best=True),
            manager.load(model_of(0), step=20),
        ]
        again = manager.load(model_of(0))

    assert [14, 10, 20, 20] == [float(each["w"][0, 0]) for each in (*found, again)]
    assert [10, 12, 14, 20, 30] == manager.steps
    assert [(10, None), (20, 10)] == [(each.step, each.parent) for each in manager.history()]
    assert [(10, None), (12, 10), (14, 12)] == [
        (e.step, e.parent) for e in lm.CheckpointManager(tmp_path).history()
    ]


def test_steps_are_deleted_by_their_number(tmp_path: Path) -> None:
    """`delete` makes way for a run that goes back; a number that is not there is an error with those that are."""
    saved_to_50(tmp_path)
    with lm.CheckpointManager(tmp_path) as manager:
        manager.load(model_of(0), step=30)
        for step in (40, 50):
            manager.delete(step)
        error = refused(lambda: manager.delete(40))
        assert manager.save(model_of(35), 35)
    assert f"{tmp_path}: there is no step 40 to delete" == error.what
    assert [30, 35] == manager.steps


def test_the_last_step_is_saved_again_where_it_was_deleted(tmp_path: Path) -> None:
    """It does not count as saved any more: the run goes on from the step before it."""
    with lm.CheckpointManager(tmp_path, wait=True) as manager:
        for step in (10, 20):
            manager.save(model_of(step), step)
        manager.delete(20)
        assert manager.save(model_of(21), 20)
        manager.delete(10)
        manager.delete(20)
        assert manager.save(model_of(22), 20)
        assert manager.save(model_of(30), 30)
        found = [(each.step, each.parent) for each in manager.history()]

    assert [(20, 10), (30, 20)] == found
    assert 22 == saved(tmp_path, 20)


def test_what_becomes_of_later_steps_is_one_of_three(tmp_path: Path) -> None:
    """A misspelt choice is refused before anything is loaded or deleted."""
    saved_to_50(tmp_path)
    error = refused(lambda: lm.CheckpointManager(tmp_path).load(model_of(0), step=30, later="remove"))  # type: ignore[arg-type]

    assert "later='remove': this value is not allowed" == error.what
    assert [30, 40, 50] == lm.CheckpointManager(tmp_path).steps


def test_steps_that_know_nothing_of_lines_are_one_line(tmp_path: Path) -> None:
    """What was saved before lines were known loads as before, and a run goes on from the last of them and back."""
    saved_to_50(tmp_path)
    for step in tmp_path.iterdir():
        found = manifest_in(step)
        for name in ("parent", "lines", "order"):
            del found[name]
        write_manifest(step, found)
    with lm.CheckpointManager(tmp_path, keep_last=3, wait=True) as manager:
        assert 50 == float(manager.load(model_of(0))["w"][0, 0])
        manager.save(model_of(60), 60)
        manager.load(model_of(0), step=50, later="keep")
        manager.save(model_of(55), 55)

    assert [(40, None), (50, None), (55, 50)] == [(each.step, each.parent) for each in manager.history()]
    assert [40, 50, 55, 60] == manager.steps


def test_managers_of_one_directory_do_not_fail_each_other(tmp_path: Path) -> None:
    """Two managers that save in turn, each beside the other's deletions: all saves are there, and each is told once."""
    managers = [lm.CheckpointManager(tmp_path, keep_last=1) for _ in range(2)]

    def save_all() -> None:
        for step in range(1, 21):
            managers[step % 2].save(model_of(step), step)
            managers[step % 2 - (step > 2)].wait()
        for manager in managers:
            manager.close()

    with pytest.warns(lm.LayoutMapWarning, match="continues step 1, although later steps exist"):
        save_all()

    assert [19, 20] == managers[0].steps
    assert [19, 20] == [saved(tmp_path, step) for step in (19, 20)]


def test_a_step_above_those_that_were_left_is_saved_with_a_warning(tmp_path: Path) -> None:
    """Nothing that it left is deleted, and the next run goes on from it."""
    saved_to_50(tmp_path)
    with lm.CheckpointManager(tmp_path, keep_last=1, wait=True) as manager:
        manager.load(model_of(0), step=30)
        with pytest.warns(lm.LayoutMapWarning, match="step 60 continues step 30, although later steps exist"):
            manager.save(model_of(60), 60)

    assert [40, 50, 60] == manager.steps
    assert [60] == [each.step for each in lm.CheckpointManager(tmp_path).history()]


def test_a_new_run_cannot_save_below_the_steps_of_another(tmp_path: Path) -> None:
    """Nor can a program that begins anew in a directory of steps; one that goes on from the last one can."""
    with lm.CheckpointManager(tmp_path, wait=True) as manager:
        manager.save(model_of(1), 20)
    with lm.CheckpointManager(tmp_path, wait=True) as manager:
        error = refused(lambda: manager.save(model_of(2), 10))
        assert manager.save(manager.load(model_of(0)), 30)

    assert f"{tmp_path}: step 10 cannot be saved, because later steps exist" == error.what
    assert [20, 30] == manager.steps


def test_a_step_that_is_being_written_is_one_of_the_later(tmp_path: Path, slow_disk: threading.Event) -> None:
    """A save below it waits for it, and is refused."""
    with lm.CheckpointManager(tmp_path) as manager:
        manager.save(model_of(2), 20)
        threading.Timer(0.2, slow_disk.set).start()
        error = refused(lambda: manager.save(model_of(1), 10))

    assert error.fix.endswith(" first: step-20")
    assert [20] == manager.steps


def test_steps_before_a_damaged_one_that_was_passed_over_are_saved(tmp_path: Path) -> None:
    """It holds nothing that anybody could go on from: the run goes on below it, and replaces it when it comes there."""
    with lm.CheckpointManager(tmp_path, wait=True) as manager:
        for step in (10, 20):
            manager.save(model_of(step), step)
    (tmp_path / "step-20" / "data-00000.safetensors").unlink()
    with lm.CheckpointManager(tmp_path, wait=True) as manager:
        with pytest.warns(lm.LayoutMapWarning, match="step 20 is damaged: it is not loaded"):
            model = manager.load(model_of(0), damaged="skip")
        saves = [manager.save(model, step) for step in (15, 20, 25)]
        error = refused(lambda: manager.save(model, 18))

    assert [True] * 3 == saves
    assert error.fix.endswith(" first: step-20, step-25")
    assert [15, 20, 25] == manager.steps
    assert 10 == saved(tmp_path, 20)


def flip_a_value(step: Path) -> None:
    file = step / "data-00000.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def misname_the_line(step: Path) -> None:
    """The lines before it stay readable, and are not believed."""
    file = step / "manifest.json"
    text = file.read_text()
    place = text.index('"lines": {"') + len('"lines": {"')
    file.write_text(text[:place] + "x" + text[place + 1 :])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip_a_value, "its values differ from the saved ones"),
        (misname_the_line, "the manifest was damaged"),
    ],
)
def test_a_damaged_step_is_skipped_only_if_asked(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    """A damaged step is an error; with damaged="skip" the one before is loaded, with a warning, and it is replaced."""
    with lm.CheckpointManager(tmp_path, wait=True) as manager:
        for step in (1, 2):
            manager.save(model_of(step), step)
    damage(tmp_path / "step-2")
    manager = lm.CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        manager.load(model_of(0))
    with pytest.warns(lm.LayoutMapWarning, match="step 2 is damaged: it is not loaded"):
        model = manager.load(model_of(0), damaged="skip")
    manager.save(model_of(5), 2)
    manager.close()

    assert 1 == float(model["w"][0, 0])
    assert [1.0, 5.0] == [saved(tmp_path, step) for step in (1, 2)]


def test_a_clock_that_is_set_back_changes_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are in the order of their saves, though the later one was saved years earlier, as its clock says."""
    years = iter((2030, 2029, 2000, 1999))

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(next(years), 1, 1, tzinfo=tz)

    monkeypatch.setattr(save_plan, "datetime", Clock)
    with lm.CheckpointManager(tmp_path, keep_last=2, wait=True) as manager:
        for step in (10, 20):
            manager.save(model_of(step), step)
        model = manager.load(model_of(0), step=10, later="keep")
        for step in (12, 14):
            manager.save(model_of(step), step)
        created = [each.created[:4] for each in manager.history()]
    last = lm.CheckpointManager(tmp_path).load(model)

    assert ["2000", "1999"] == created
    assert [12, 14, 20] == lm.CheckpointManager(tmp_path).steps
    assert 14 == float(last["w"][0, 0])


def test_a_model_on_several_meshes_is_refused(tmp_path: Path) -> None:
    """Before anything is written, with both meshes, and with the fix to save two models."""
    meshes = lm.create_mesh("x=8"), lm.create_mesh("y=2,z=4")
    layouts = lm.Layout(["x"], meshes[0]), lm.Layout(["y"], meshes[1])
    model = {
        name: lm.dtensor.relayout(np.zeros(8), layout) for name, layout in zip("ab", layouts, strict=True)
    }
    with pytest.raises(
        CheckpointError, match=r"(?s)a and b are on different meshes.*save the variables of each mesh"
    ):
        lm.CheckpointManager(tmp_path / "steps").save(model, 1)

    assert [] == list(tmp_path.iterdir())


def test_if_all_steps_are_damaged_it_is_an_error(tmp_path: Path) -> None:
    """With nothing good left to load, the last step is refused as it is without damaged="skip"."""
    with lm.CheckpointManager(tmp_path, wait=True) as manager:
        manager.save(model_of(1), 1)
        (tmp_path / "step-1" / "data-00000.safetensors").unlink()
        warned = pytest.warns(lm.LayoutMapWarning, match="step 1 is damaged: it is not loaded")
        with warned, pytest.raises(CheckpointError, match="the file is missing"):
            manager.load(model_of(0), damaged="skip")
        with pytest.raises(CheckpointError, match="there is no best step"):
            manager.load(model_of(0), best=True)


@pytest.mark.parametrize(("seconds", "steps"), [(30, [10, 13]), (1e-9, [10])])
def test_a_last_step_is_saved_where_there_is_time(tmp_path: Path, seconds: float, steps: list[int]) -> None:
    """After SIGTERM the next call saves its step, due or not, unless the time is over; later ones save nothing."""
    called = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    try:
        with lm.CheckpointManager(tmp_path, every_steps=10, preemption_seconds=seconds) as manager:
            saves = [manager.save(model_of(step), step) for step in (10, 11)]
            os.kill(os.getpid(), signal.SIGTERM)
            was_preempted = manager.is_preempted
            saves += [manager.save(model_of(step), step) for step in (13, 20)]
            assert steps == manager.steps
        assert ([True, False, len(steps) == 2, False], False, True) == (
            saves,
            was_preempted,
            manager.is_preempted,
        )
        assert [signal.SIGTERM] == called
        signal.raise_signal(signal.SIGTERM)
        assert [signal.SIGTERM] * 2 == called
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_time_that_is_none_is_refused(tmp_path: Path, seconds: float) -> None:
    """So it is with a manager outside of the main thread, where Python has no signals."""
    error = refused(lambda: lm.CheckpointManager(tmp_path, preemption_seconds=seconds))
    said = list[str]()
    thread = threading.Thread(
        target=lambda: said.append(
            refused(lambda: lm.CheckpointManager(tmp_path, preemption_seconds=30)).what
        )
    )
    thread.start()
    thread.join()

    assert f"preemption_seconds={seconds!r} cannot be used" == error.what
    assert ["preemption_seconds: SIGTERM can be recorded only in the main thread"] == said


PROGRAM = """
import signal, sys, time, jax.numpy as jnp, layoutmap as lm
from layoutmap.checkpoint.storage import LocalStorage
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
create = LocalStorage.create_file
def slow(self, folder, name):
    time.sleep(0.5)
    return create(self, folder, name)
LocalStorage.create_file = slow
manager = lm.CheckpointManager(sys.argv[1])
manager.save({"w": jnp.ones((8, 8))}, 1)
print("saving", flush=True)
"""


@pytest.mark.parametrize("end", ["time.sleep(60)", "", "raise SystemExit(3)", "1 / 0"])
def test_a_program_that_ends_waits_for_its_last_save(tmp_path: Path, end: str) -> None:
    """However a program ends, by Ctrl-C too, its last save is there, and its exit status is what it was."""
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + end, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    assert "saving\n" == run.stdout.readline()
    if "sleep" in end:
        run.send_signal(signal.SIGINT)
    run.communicate(timeout=240)

    assert {"": 0, "raise": 3, "1": 1}.get(end.partition(" ")[0], -signal.SIGINT) == run.returncode
    assert ["step-1"] == names_in(tmp_path)


def test_a_failure_that_nobody_asked_for_is_said_at_the_end(tmp_path: Path) -> None:
    """A program that ends without another call says on stderr that its last save has failed."""
    end = "import os; [os.rename(f'{sys.argv[1]}/{n}', sys.argv[1] + '/x') for n in os.listdir(sys.argv[1])]"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM + end, str(tmp_path)], capture_output=True, text=True, timeout=240
    )

    assert "layoutmap: the last save has failed\n" in run.stderr
    assert "data-00000.safetensors: the file cannot be written" in run.stderr
