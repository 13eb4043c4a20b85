"""Whether DTensor computes training steps right in this process.

DTensor's pass that combines all-reduces is switched on by default, and moves reads of variables before the writes that
they come after: every optimizer with state then trains wrongly, without a word. The setting that switches it off is
read once, at the process's first DTensor operation. It is made when this module is loaded; should something else have
used DTensor before, that is too late, and only an experiment shows it.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import tensorflow as tf

from layoutmap.core.errors import EngineError

dtensor: Any = tf.experimental.dtensor

SETTING = "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"
_lock = threading.Lock()
_sound: dict[str, bool] = {}

# Steps are right with it; who has set it otherwise is refused by name, not overruled.
os.environ.setdefault(SETTING, "0")


def check_training(native_mesh: Any) -> None:  # why: decisions/0009
    """Refuse a process in which training steps are computed wrongly.

    One small step is computed, once for each kind of device. On a mesh of one device there is nothing to combine.

    Raises:
        EngineError: They are.
    """
    if native_mesh.size == 1:
        return
    kind = native_mesh.device_type()
    with _lock:
        if kind not in _sound:
            _sound[kind] = _step_is_right(native_mesh)
        if _sound[kind]:
            return
    raise EngineError(
        "DTensor computes training steps wrongly in this process",
        facts={SETTING: os.environ.get(SETTING, "not set")},
        why="its pass that combines all-reduces reads variables before they are written, and was on when the process "
        "first used DTensor; a step that should give 8 gave another number",
        fix=f"start again with {SETTING}=0 in the environment, or import layoutmap and make its mesh before anything "
        "else uses DTensor",
    )


def _step_is_right(mesh: Any) -> bool:
    """Whether two variables that each take a sum over the mesh, through a variable of their own, are right."""
    dim = max(mesh.dim_names, key=mesh.dim_size)
    replicated = dtensor.Layout.replicated(mesh, 1)
    size = mesh.dim_size(dim)

    def variable() -> Any:
        return dtensor.DVariable(dtensor.pack([tf.zeros(4)] * mesh.num_local_devices(), replicated))

    first, second, first_sum, second_sum = (variable() for _ in range(4))
    rows = dtensor.pack(
        [tf.ones((1, 4))] * mesh.num_local_devices(), dtensor.Layout([dim, dtensor.UNSHARDED], mesh)
    )

    @tf.function(autograph=False)
    def step(rows: Any) -> None:
        total, double = tf.reduce_sum(rows, 0), tf.reduce_sum(rows * 2, 0)
        first_sum.assign(first_sum * 0.9 + total)
        first.assign_add(first_sum)
        second_sum.assign(second_sum * 0.9 + double)
        second.assign_add(second_sum)

    step(rows)
    got = [dtensor.unpack(v.read_value())[0].numpy().tolist() for v in (first, second)]
    return got == [[size] * 4, [2 * size] * 4]
