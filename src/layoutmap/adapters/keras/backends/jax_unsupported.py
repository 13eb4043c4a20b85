"""What XLA cannot compile on CPU devices, found out by compiling each with jax 0.10; it compiles all else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from layoutmap.core.unsupported import Unsupported

L = keras.layers

_DEPTHWISE = (L.DepthwiseConv1D, L.DepthwiseConv2D, L.SeparableConv1D, L.SeparableConv2D)
_GROUPED = (L.Conv1D, L.Conv2D, L.Conv3D)


def unsupported_of(layer: Any, path: str, weights: list[str]) -> Iterator[Unsupported]:
    """What XLA cannot compile of a layer."""
    if not weights or not isinstance(layer, (*_DEPTHWISE, *_GROUPED)) or not _covers_its_input(layer):
        return
    axis = layer.rank if isinstance(layer, _DEPTHWISE) else layer.rank + 1
    yield Unsupported(
        weights[0],
        f"XLA ends the process when it compiles {type(layer).__name__} with this kernel sharded over its channels",
        why="the kernel is as large as the layer's input, so that one position comes out; on CPU devices XLA frees "
        'memory that is not its own then ("free(): invalid pointer"), unless the batch is sharded, too',
        fix=f"leave axis {axis} of the kernel unsharded",
        if_sharded=(axis,),
        device_type="CPU",
    )


def _covers_its_input(layer: Any) -> bool:
    """Whether each channel is convolved for itself, with a kernel of the size of the input and without padding."""
    shape = (layer.get_build_config() or {}).get("input_shape")
    if shape is None or any(n != 1 for n in layer.dilation_rate):
        return False
    first = layer.data_format == "channels_first"
    positions, channels = tuple(shape[2:] if first else shape[1:-1]), shape[1 if first else -1]
    own = isinstance(layer, _DEPTHWISE) or layer.groups == channels > 1
    padded = layer.padding != "valid" and any(n != 1 for n in layer.kernel_size)
    return own and not padded and positions == tuple(layer.kernel_size)
