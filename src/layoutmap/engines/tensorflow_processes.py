"""What several processes must agree on."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from layoutmap.draws import Draw
from layoutmap.engines.tensorflow_devices import device_names, native_mesh
from layoutmap.errors import EngineError
from layoutmap.mesh import Mesh

__all__ = ["check_equal_everywhere", "common_seeds"]

dtensor: Any = tf.experimental.dtensor


def common_seeds(draws: Mapping[str, Draw]) -> dict[str, Any]:
    """The seed of each draw that has a program; with several processes, those of process 0.

    Args:
        draws: The draws by key, in the same order in all processes.
    """
    seeds = {key: draw.program.seed for key, draw in draws.items() if draw.program is not None}
    if dtensor.num_clients() == 1 or not seeds:
        return seeds
    leaves = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(seeds)]
    flat = [np.asarray(leaf.numpy()).astype(np.int64).ravel() for leaf in leaves]
    first = _gathered(_all_devices(), np.concatenate([np.zeros(1, np.int64), *flat]))[0, 1:]
    parts = np.split(first, np.cumsum([len(part) for part in flat])[:-1])
    common = [
        tf.constant(part.astype(leaf.dtype.as_numpy_dtype).reshape(leaf.shape))
        for part, leaf in zip(parts, leaves, strict=True)
    ]
    return tf.nest.pack_sequence_as(seeds, common)


def check_equal_everywhere(checksums: Mapping[str, int]) -> None:
    """Compare what the processes drew; the same in all of them, or an error in all of them.

    Args:
        checksums: For each key a checksum of what this process drew.

    Raises:
        EngineError: They differ; names the first key.
    """
    mesh = _all_devices()
    # Each device shows its process's checksums to all others: first how many there are, which gives the shapes.
    mine = np.array([zlib.crc32(key.encode()) ^ value for key, value in checksums.items()], np.int64)
    rows = _gathered(mesh, np.array([len(mine)], np.int64))
    if len(set(rows[:, 0].tolist())) == 1:
        rows = _gathered(mesh, mine)
        different = np.flatnonzero((rows != rows[:1]).any(axis=0))
        if not different.size:
            return
        first = list(checksums)[int(different[0])]
        what = f"{first}: the processes drew different values"
    else:
        what = f"the processes create different numbers of variables: {sorted(set(rows[:, 0].tolist()))}"
    raise EngineError(
        what,
        why="each process draws for itself, so all must draw the same",
        mend="seed all processes alike, before the model is made",
    )


def _all_devices() -> Any:
    names = device_names(None)
    return native_mesh(Mesh(names, {"device": len(names)}))


def _gathered(mesh: Any, values: Any) -> Any:
    """The values of every device's process, one row for each device."""
    rows = dtensor.pack(
        [tf.constant(values[None])] * mesh.num_local_devices(),
        dtensor.Layout(["device", dtensor.UNSHARDED], mesh),
    )
    everywhere = dtensor.relayout(rows, dtensor.Layout.replicated(mesh, 2))
    return dtensor.unpack(everywhere)[0].numpy()
