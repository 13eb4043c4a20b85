"""Define a callback for `fit` that saves steps and resumes a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from layoutmap.adapters.data_states import read_data_state, restore_data_state


class CheckpointCallback(keras.callbacks.Callback):
    """Save the steps of `fit` through a `layoutmap.CheckpointManager`.

    A step is a trained batch. Steps are counted from the beginning of the run, over all epochs. A step that is saved
    after the last batch of an epoch has the logs of that epoch as metrics, such as `val_loss`. A step inside an epoch
    has none.

    With `preemption_seconds` of the manager, and without `every_epochs`, SIGTERM makes `fit` save a last step and stop.

    The callback stores the position of the run as the state of its data: pass the callback as `data` to `load`.

    Args:
        manager: The `CheckpointManager`, which decides the directory, the due steps, and the steps to keep.
        every_epochs: Save only at the end of each epoch whose number is a multiple of it. `None`: save whenever the
            manager says that a step is due, also inside epochs.
        data: Data iterator whose state is saved and restored with the model, with `state_dict()` and
            `load_state_dict()`, or `get_state()` and `set_state()` as in grain. Pass `batches()` to `fit`.

    Attributes:
        epoch: Epoch in which `fit` continues: pass it as `initial_epoch`.
        batch: Number of trained batches of that epoch. The data continues with the next one.
        step: Number of trained steps.

    Example:
        >>> import keras, layoutmap as lm, numpy as np, tempfile
        >>> from layoutmap.adapters.keras import CheckpointCallback
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="d1")])
        >>> model.compile("adam", "mse")
        >>> manager = lm.CheckpointManager(tempfile.mkdtemp(), best="loss")
        >>> callback = CheckpointCallback(manager, every_epochs=1)
        >>> if manager.steps:  # a run that was interrupted goes on
        ...     model = manager.load(model, data=callback)
        >>> history = model.fit(
        ...     np.ones((32, 8)), np.ones((32, 4)), batch_size=8, epochs=2,
        ...     initial_epoch=callback.epoch, callbacks=[callback], verbose=0,
        ... )
        >>> manager.steps, callback.epoch
        ([4, 8], 2)
    """

    def __init__(self, manager: Any, *, every_epochs: int | None = None, data: Any = None):
        super().__init__()
        self.epoch, self.batch, self.step = 0, 0, 0
        self._manager = manager
        self._every_epochs = every_epochs
        self._data = data
        self._states: dict[int, object] = {}  # state of the data after each step's batch, by step
        self._num_before = 0  # number of batches of this epoch that were trained before the run was resumed
        self._is_new = False  # whether the last step has not been offered to the manager yet

    # Keras reads batches ahead of training, so keep the data state of each step, not only the newest (decisions/0081).
    def batches(self) -> Iterator[object]:
        """Yield batches for `fit`, starting after the last trained batch.

        The state of the data after each batch is saved with the step that trains on it.

        Example:
            >>> import grain, keras, layoutmap as lm, numpy as np, tempfile
            >>> from layoutmap.adapters.keras import CheckpointCallback
            >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="d1")])
            >>> model.compile("adam", "mse")
            >>> dataset = grain.MapDataset.range(32).map(lambda row: (np.ones(8), np.ones(4))).batch(8).repeat()
            >>> manager = lm.CheckpointManager(tempfile.mkdtemp(), every_steps=2)
            >>> callback = CheckpointCallback(manager, data=iter(dataset))
            >>> options = {"steps_per_epoch": 3, "shuffle": False, "verbose": 0}
            >>> history = model.fit(callback.batches(), callbacks=[callback], **options)
            >>> manager.steps
            [2]
        """
        if self.step in self._states:
            restore_data_state(self._data, self._states[self.step])
        self._states = {self.step: read_data_state(self._data)}
        for step, batch in enumerate(self._data, self.step + 1):
            self._states[step] = read_data_state(self._data)
            yield batch

    def set_model(self, model: keras.Model) -> None:
        """Store the model that `fit` trains."""
        super().set_model(model)
        # Keras on JAX copies all values into the model when a callback accesses it, so defer that to saves.
        self._unsynced = model

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Begin to count the batches of an epoch."""
        self._num_before = self.batch = self.batch if epoch == self.epoch else 0
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Save the previous step if a save is due, because only now is it known that its epoch goes on."""
        if self._is_new and self._every_epochs is None:
            self._offer_step_to_manager()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Count the batches trained since the last call. With `steps_per_execution`, there are several."""
        now = self._num_before + batch + 1
        self.step += now - self.batch
        self.batch, self._is_new = now, True
        for step in [each for each in list(self._states) if each < self.step]:
            del self._states[step]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save the last step of an epoch, with the epoch's metrics, if a save is due."""
        self.epoch, self.batch, self._num_before = epoch + 1, 0, 0
        if self._every_epochs is None:
            self._offer_step_to_manager(metrics=logs)
        elif self.epoch % self._every_epochs == 0:
            self._offer_step_to_manager(metrics=logs, force=True)

    def on_train_end(self, logs: object = None) -> None:
        """Wait for the last save."""
        self._manager.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run and the state of its data."""
        found = {"epoch": self.epoch, "batch": self.batch, "step": self.step}
        if self._data is None:
            return found
        return found | {
            "data": self._states[self.step] if self.step in self._states else read_data_state(self._data)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position of a saved run, and the state of its data."""
        self.epoch, self.batch, self.step = state["epoch"], state["batch"], state["step"]
        if self._data is not None:
            self._states = {}
            restore_data_state(self._data, state["data"])

    def _offer_step_to_manager(
        self, *, metrics: Mapping[str, float] | None = None, force: bool = False
    ) -> None:
        """Offer the current step to the manager, and stop `fit` if the process is being preempted."""
        self._is_new = False
        if self._manager.is_preempted:  # `fit` stops after this batch, and the epoch stays incomplete
            return
        self._manager.save(self._unsynced, self.step, data=self, metrics=metrics, force=force)
        if self._manager.is_preempted:
            self._unsynced.stop_training = True


def make_callback_after_each_batch(function: Callable[[], None]) -> keras.callbacks.Callback:
    """Return a callback that calls a function after each training batch."""
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: function())
