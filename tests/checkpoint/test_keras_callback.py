"""`fit` with a callback that saves: when it does, and that a run goes on where it stood."""

import os
import signal

import grain
import keras
import numpy as np
import pytest

import layoutmap as lm
from layoutmap.adapters.keras import CheckpointCallback
from layoutmap.adapters.keras.paths import find_variables

L = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
ROWS, BATCH, EPOCHS = 48, 8, 3
BATCHES = ROWS // BATCH


def make_model(steps_per_execution=1):
    model = keras.Sequential([keras.Input((8,)), L.Dense(8), L.Dropout(0.5, seed=3), L.Dense(4)])
    model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=steps_per_execution)
    return model


def layout_map(dims):
    return lm.LayoutMap(lm.create_mesh(dims), {r".*kernel": (None, "model")})


def fitted(model, *callbacks, epoch=0, batch=0, epochs=EPOCHS):
    """The loss of each epoch of `fit`, which begins at a batch of an epoch."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(ROWS, 8)).astype("float32"), random.normal(size=(ROWS, 4)).astype("float32")
    numbers = [n for e in range(epoch, epochs) for n in range(batch if e == epoch else 0, BATCHES)]

    def batches():
        for n in numbers:
            rows = slice(n * BATCH, n * BATCH + BATCH)
            yield x[rows], y[rows]

    data, losses = batches(), []
    for e in range(epoch, epochs):  # one by one, as the first may have fewer batches
        steps = BATCHES - batch if e == epoch else BATCHES
        options = {"initial_epoch": e, "epochs": e + 1, "steps_per_epoch": steps, "shuffle": False}
        losses += model.fit(data, callbacks=callbacks, verbose=0, **options).history["loss"]
    return losses


@pytest.mark.parametrize("every_steps", [None, 4])
def test_a_run_goes_on_where_it_stood(every_steps, tmp_path):
    """Stopped at the end of an epoch or inside of one, and resumed on another mesh, a run has the losses it had had."""
    keras.utils.set_random_seed(1)
    model = layout_map("batch=2,model=4").build(make_model, batch_dim="batch")
    manager = lm.CheckpointManager(tmp_path, every_steps=every_steps)
    every_epochs = 1 if every_steps is None else None
    fitted(model, CheckpointCallback(manager, every_epochs=every_epochs), epochs=2)
    expected = fitted(model, epoch=2)

    callback = CheckpointCallback(manager, every_epochs=every_epochs)
    other = {"layout_map": layout_map("batch=4,model=2"), "batch_dim": "batch"}
    model = manager.load(make_model, step=8 if every_steps else None, data=callback, **other)
    stood = callback.epoch, callback.batch, callback.step
    losses = fitted(model, epoch=callback.epoch, batch=callback.batch)

    assert ((1, 2, 8) if every_steps else (2, 0, 12)) == stood
    assert ([4, 8, 12] if every_steps else [6, 12]) == manager.steps
    np.testing.assert_allclose(losses[-1:], expected, rtol=1e-6)


def test_several_steps_of_one_execution_are_counted(tmp_path):
    """With three steps in each execution, a step is saved after the execution in which it is due."""
    manager = lm.CheckpointManager(tmp_path, every_steps=4, keep_last=None, best="loss")
    callback = CheckpointCallback(manager)
    fitted(make_model(steps_per_execution=3), callback, epochs=2)
    metrics = {step: sorted(lm.describe(tmp_path, step=step).metrics) for step in manager.steps}

    assert {6: ["loss"], 9: [], 12: ["loss"]} == metrics
    assert (2, 0, 12) == (callback.epoch, callback.batch, callback.step)


def test_the_state_of_the_data_is_kept(tmp_path):
    """An iterator that was passed to the callback goes on with the run."""

    class Data:
        count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    data, other = Data(), Data()
    data.count = 7
    manager = lm.CheckpointManager(tmp_path)
    model = make_model()
    fitted(model, CheckpointCallback(manager, every_epochs=1, data=data), epochs=1)
    manager.load(model, data=CheckpointCallback(manager, data=other))

    assert 7 == other.count


def test_data_goes_on_after_the_last_batch_that_was_trained_on(tmp_path):
    """Keras reads batches before it trains on them; a resumed run still trains on each of a grain dataset's once."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(ROWS, 8)).astype("float32"), random.normal(size=(ROWS, 4)).astype("float32")

    def run(model, callback):
        for epoch in range(callback.epoch, 2):
            steps = {"steps_per_epoch": BATCHES - callback.batch, "initial_epoch": epoch, "epochs": epoch + 1}
            model.fit(callback.batches(), callbacks=[callback], shuffle=False, verbose=0, **steps)
        return [found.variable.numpy() for found in find_variables(model)]

    def begun(manager):
        rows = grain.MapDataset.range(ROWS).seed(3).shuffle().map(lambda row: (x[row], y[row]))
        few = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)  # else 500 batches are read ahead
        return CheckpointCallback(manager, data=iter(rows.batch(BATCH).repeat().to_iter_dataset(few)))

    manager = lm.CheckpointManager(tmp_path, every_steps=1, keep_last=None)
    model = layout_map("batch=2,model=4").build(make_model, batch_dim="batch")
    expected = run(model, begun(manager))
    callback = begun(lm.CheckpointManager(tmp_path / "resumed"))
    actual = run(manager.load(model, step=1, data=callback), callback)

    assert len(expected) == len(actual)
    for ours, theirs in zip(actual, expected, strict=True):
        assert np.array_equal(ours, theirs)


class Terminated(keras.callbacks.Callback):
    """Sends SIGTERM to its own process in a batch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_whose_machine_is_taken_away_goes_on_elsewhere(tmp_path):
    """SIGTERM ends fit after a last save, due or not, and what goes on from it has the losses of a run without it."""
    keras.utils.set_random_seed(1)
    model = make_model()
    with lm.CheckpointManager(tmp_path, every_steps=100, preemption_seconds=30) as manager:
        fitted(model, CheckpointCallback(manager), Terminated(), epochs=1)
    keras.utils.set_random_seed(1)
    model, callback = make_model(), CheckpointCallback(lm.CheckpointManager(tmp_path))
    expected = fitted(model, epochs=2)[1:]
    lm.load(model, tmp_path, data=callback)

    assert ([3], 3, True) == (manager.steps, callback.batch, manager.is_preempted)
    assert signal.SIG_DFL == signal.getsignal(signal.SIGTERM)
    assert expected == fitted(model, epoch=callback.epoch, batch=callback.batch, epochs=2)[1:]
