"""Share seeds and compare values between TensorFlow processes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from layoutmap.core.blocks import NumpyArray
from layoutmap.core.initializers import Initializer
from layoutmap.core.mesh import Mesh
from layoutmap.engines.checks import make_unequal_initial_values_error
from layoutmap.engines.tensorflow.devices import NativeMesh, list_device_names, make_native_mesh

dtensor = tf.experimental.dtensor


def broadcast_seeds(initializers: Mapping[str, Initializer]) -> dict[str, object]:
    """Return the seed of each initializer that has a program, by key. All processes get the seeds of process 0."""
    seeds = {key: each.program.seed for key, each in initializers.items() if each.program is not None}
    if dtensor.num_clients() == 1:
        return seeds
    leaves = [tf.convert_to_tensor(leaf).numpy() for leaf in tf.nest.flatten(seeds)]
    mine = np.frombuffer(b"".join(leaf.tobytes() for leaf in leaves), np.uint8)
    first = _gather_integers(mine)[0].astype(np.uint8).tobytes()
    common: list[tf.Tensor] = []
    for leaf in leaves:
        part, first = first[: leaf.nbytes], first[leaf.nbytes :]
        common.append(tf.constant(np.frombuffer(part, leaf.dtype).reshape(leaf.shape)))
    return tf.nest.pack_sequence_as(seeds, common)


def check_same_checksums(checksums: Sequence[tuple[str, int]]) -> None:
    """Raise an `EngineError` in all processes if the checksum of a path's value differs between processes."""
    rows = _gather_integers([zlib.crc32(path.encode()) ^ value for path, value in checksums])
    for i in np.flatnonzero((rows != rows[:1]).any(axis=0)):
        raise make_unequal_initial_values_error(
            f"{checksums[int(i)][0]}: the processes have different values"
        )


def gather_from_processes(values: NumpyArray) -> NumpyArray:
    """Return the values of each process, one row each, in process order."""
    if dtensor.num_clients() == 1:
        return values[None]
    mesh = _make_mesh_of_all_devices()
    integers = np.frombuffer(values.tobytes(), np.uint8).astype(np.int64)  # every device can send int64
    rows = _gather_values_by_device(mesh, integers)[:: mesh.num_local_devices()]
    return np.frombuffer(rows.astype(np.uint8).tobytes(), values.dtype).reshape(-1, *values.shape)


def _gather_integers(numbers: NumpyArray | list[int]) -> NumpyArray:
    """Return the integers of each device's process, one row per device. Raise if processes pass unequal counts."""
    mesh = _make_mesh_of_all_devices()
    mine = np.asarray(numbers, np.int64)
    sizes = _gather_values_by_device(mesh, np.array([mine.size], np.int64))[:, 0]
    if len(set(sizes.tolist())) > 1:
        raise make_unequal_initial_values_error("the processes create different variables")
    return _gather_values_by_device(mesh, mine) if mine.size else np.zeros((mesh.size, 0), np.int64)


def _make_mesh_of_all_devices() -> NativeMesh:
    names = list_device_names(None)
    return make_native_mesh(Mesh(names, {"device": len(names)}))


def _gather_values_by_device(mesh: NativeMesh, values: NumpyArray) -> NumpyArray:
    """Return the values of each device's process, one row per device."""
    rows = dtensor.pack(
        [tf.constant(values[None])] * mesh.num_local_devices(),
        dtensor.Layout(["device", dtensor.UNSHARDED], mesh),
    )
    everywhere = dtensor.relayout(rows, dtensor.Layout.replicated(mesh, 2))
    return dtensor.unpack(everywhere)[0].numpy()
