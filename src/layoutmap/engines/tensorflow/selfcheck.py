"""Check that DTensor computes correctly in this process.

Two of its defaults silently compute wrong numbers. Its pass that combines all-reduces moves reads of variables before
earlier writes, so that every optimizer with state trains wrongly. Its all-to-all mixes up blocks if it moves the shards
of a tensor with four or more axes from one axis to another, except to or from the first axis. This module sets two
environment variables that disable both. The first is the number of all-reduces that are combined. DTensor reads it for
each function, so `combined` can change it for a step that stays correct. DTensor reads the second once, at the first
operation of the process. If other code has used DTensor before, that is too late, and only an experiment shows it.

Private names of tensorflow.dtensor.python.api that are used, tested on TensorFlow 2.21: _dtensor_singleton,
_dtensor_singleton_lock, reset_dtensor_device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from layoutmap.core.errors import EngineError
from layoutmap.engines.tested import ImportErrorConverter, check_names_exist

with ImportErrorConverter("tensorflow"):
    from tensorflow.dtensor.python import api

check_names_exist("tensorflow", (api, "_dtensor_singleton _dtensor_singleton_lock reset_dtensor_device"))
dtensor = tf.experimental.dtensor

GROUP_SIZE_SETTING = "DTENSOR_ALLREDUCE_COMBINE_OPTIMIZATION_GROUP_SIZE"
_lock = threading.Lock()
_is_correct: dict[tuple[str, str], bool] = {}


class DTensorFault(NamedTuple):
    """A fault of DTensor that an environment variable, `setting`, avoids when set to `value`."""

    setting: str
    value: str
    what: str  # which computation is wrong
    why: str  # what DTensor does wrong, and how this was found
    is_absent: Callable[[tf.experimental.dtensor.Mesh], bool]  # whether a small computation is correct


# An asynchronous error would block DTensor's queue forever, so operations wait for their devices (decisions/0009).
def make_operations_wait_for_devices() -> None:
    """Make DTensor's operations wait for their devices, unless the process has already used DTensor.

    By default, they do not wait. Then an operation that fails on a device makes all later operations fail.
    """
    with api._dtensor_singleton_lock:
        if api._dtensor_singleton is None:
            api.reset_dtensor_device(is_async=False)


# Two of DTensor's default passes compute wrong numbers, so a small test of each runs before training (decisions/0009).
def check_dtensor_results(native_mesh: tf.experimental.dtensor.Mesh) -> None:
    """Raise an `EngineError` if DTensor computes wrong values in this process.

    It runs one small computation for each of DTensor's faults, once for each device type. A mesh of one device is not
    checked, because it has no collectives.
    """
    if native_mesh.size == 1:
        return
    kind = native_mesh.device_type()
    for fault in FAULTS:
        with _lock:
            if (kind, fault.setting) not in _is_correct:
                _is_correct[kind, fault.setting] = fault.is_absent(native_mesh)
            if _is_correct[kind, fault.setting]:
                continue
        raise EngineError(
            f"DTensor computes {fault.what} wrongly in this process",
            facts={fault.setting: os.environ.get(fault.setting, "not set")},
            why=fault.why,
            fix=f"start again with {fault.setting}={fault.value} in the environment, or import layoutmap and create "
            "its mesh before other code uses DTensor",
        )


def _is_training_step_correct(mesh: tf.experimental.dtensor.Mesh) -> bool:
    """Return whether DTensor correctly computes a step that updates two variables by different sums over the mesh.

    The step's input is packed from constants, because DTensor cannot pack the result of an operation inside `run_on`.
    """
    dim = max(mesh.dim_names, key=mesh.dim_size)
    replicated = dtensor.Layout.replicated(mesh, 1)
    size = mesh.dim_size(dim)

    def make_variable() -> tf.Variable:
        return dtensor.DVariable(
            dtensor.pack([tf.constant([0.0] * 4)] * mesh.num_local_devices(), replicated)
        )

    first, second, first_sum, second_sum = (make_variable() for _ in range(4))
    rows = dtensor.pack(
        [tf.constant([[1.0] * 4])] * mesh.num_local_devices(), dtensor.Layout([dim, dtensor.UNSHARDED], mesh)
    )

    @tf.function(autograph=False)
    def step(rows: tf.Tensor) -> None:
        total, double = tf.reduce_sum(rows, 0), tf.reduce_sum(rows * 2, 0)
        first_sum.assign(first_sum * 0.9 + total)
        first.assign_add(first_sum)
        second_sum.assign(second_sum * 0.9 + double)
        second.assign_add(second_sum)

    step(rows)
    got = [dtensor.unpack(v.read_value())[0].numpy().tolist() for v in (first, second)]
    return got == [[size] * 4, [2 * size] * 4]


def _is_four_axis_relayout_correct(mesh: tf.experimental.dtensor.Mesh) -> bool:
    """Return whether moving the shards of a tensor from its second axis to its third keeps the values."""
    dim = max(mesh.dim_names, key=mesh.dim_size)
    size = mesh.dim_size(dim)
    whole = dtensor.Layout.replicated(mesh, 4)
    values = tf.constant(np.arange(2 * size * size * 2, dtype=np.int32).reshape(2, size, size, 2))
    before, after = (
        dtensor.Layout([dim if axis == sharded else dtensor.UNSHARDED for axis in range(4)], mesh)
        for sharded in (1, 2)
    )
    moved = dtensor.pack([values] * mesh.num_local_devices(), whole)
    for layout in (before, after, whole):
        moved = dtensor.relayout(moved, layout)
    return bool((dtensor.unpack(moved)[0].numpy() == values.numpy()).all())


FAULTS = (
    DTensorFault(
        GROUP_SIZE_SETTING,
        "1",
        "training steps",
        "its pass that combines all-reduces reads variables before they are written; a small test step gave wrong "
        "values",
        _is_training_step_correct,
    ),
    DTensorFault(
        "DTENSOR_USE_ALL_TO_ALL_RELAYOUT",
        "0",
        "relayouts of tensors with four axes",
        "its all-to-all mixes up their blocks, and was on when the process first used DTensor; a tensor that was "
        "sharded along another axis had its values in another order",
        _is_four_axis_relayout_correct,
    ),
)

# With these values, DTensor is correct. If the user has set others, keep them, and let the check raise.
for _fault in FAULTS:
    os.environ.setdefault(_fault.setting, _fault.value)
