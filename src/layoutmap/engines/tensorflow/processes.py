"""Agreement between several processes of TensorFlow."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from layoutmap.core.blocks import NumpyArray
from layoutmap.core.initializers import Initializer
from layoutmap.core.mesh import Mesh
from layoutmap.engines.checks import processes_differ
from layoutmap.engines.tensorflow.devices import NativeMesh, device_names, native_mesh

dtensor = tf.experimental.dtensor


def common_seeds(initializers: Mapping[str, Initializer]) -> dict[str, object]:
    """Return the seed of each initializer that has a program; with several processes, those of process 0."""
    seeds = {key: each.program.seed for key, each in initializers.items() if each.program is not None}
    if dtensor.num_clients() == 1:
        return seeds
    leaves = [tf.convert_to_tensor(leaf).numpy() for leaf in tf.nest.flatten(seeds)]
    mine = np.frombuffer(b"".join(leaf.tobytes() for leaf in leaves), np.uint8)
    first = _gathered_alike(mine)[0].astype(np.uint8).tobytes()
    common: list[tf.Tensor] = []
    for leaf in leaves:
        part, first = first[: leaf.nbytes], first[leaf.nbytes :]
        common.append(tf.constant(np.frombuffer(part, leaf.dtype).reshape(leaf.shape)))
    return tf.nest.pack_sequence_as(seeds, common)


def check_equal_everywhere(checksums: Sequence[tuple[str, int]]) -> None:
    """Compare what the processes computed; the same in all of them, or an error in all of them.

    Args:
        checksums: For each variable its path, and a checksum of what this process computed.
    """
    rows = _gathered_alike([zlib.crc32(path.encode()) ^ value for path, value in checksums])
    for i in np.flatnonzero((rows != rows[:1]).any(axis=0)):
        raise processes_differ(f"{checksums[int(i)][0]}: the processes have different values")


def gathered(values: NumpyArray) -> NumpyArray:
    """The values of each process, one row each, in order of the processes."""
    if dtensor.num_clients() == 1:
        return values[None]
    mesh = _all_devices()
    own = np.frombuffer(values.tobytes(), np.uint8).astype(np.int64)  # which every device can move
    rows = _gathered(mesh, own)[:: mesh.num_local_devices()]
    return np.frombuffer(rows.astype(np.uint8).tobytes(), values.dtype).reshape(-1, *values.shape)


def _gathered_alike(numbers: NumpyArray | list[int]) -> NumpyArray:
    """Whole numbers of every device's process, one row for each device."""
    mesh = _all_devices()
    mine = np.asarray(numbers, np.int64)
    sizes = _gathered(mesh, np.array([mine.size], np.int64))[:, 0]
    if len(set(sizes.tolist())) > 1:
        raise processes_differ("the processes create different variables")
    return _gathered(mesh, mine) if mine.size else np.zeros((mesh.size, 0), np.int64)


def _all_devices() -> NativeMesh:
    names = device_names(None)
    return native_mesh(Mesh(names, {"device": len(names)}))


def _gathered(mesh: NativeMesh, values: NumpyArray) -> NumpyArray:
    """The values of every device's process, one row for each device."""
    rows = dtensor.pack(
        [tf.constant(values[None])] * mesh.num_local_devices(),
        dtensor.Layout(["device", dtensor.UNSHARDED], mesh),
    )
    everywhere = dtensor.relayout(rows, dtensor.Layout.replicated(mesh, 2))
    return dtensor.unpack(everywhere)[0].numpy()
