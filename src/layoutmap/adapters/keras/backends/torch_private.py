"""List the private names of Keras that only its torch backend uses (tested on Keras 3.15).

keras.src.backend.torch.core                DEFAULT_DEVICE, device_scope, get_device
keras.src.backend.torch.layer.TorchLayer    _post_build, _post_track_variable, _track_variables, _torch_params
keras.src.layers.layer.Layer                _get_own_losses, _get_regularization_losses
keras.Model                                 _call_has_training_arg, _compute_loss, _post_quantize
"""

from __future__ import annotations

import keras
from keras.src.backend.torch import core as keras_core
from keras.src.backend.torch.layer import TorchLayer as TorchLayer

from layoutmap.adapters.keras.private import NamesByOwner

NAMES: NamesByOwner = (
    (keras_core, ("DEFAULT_DEVICE", "device_scope", "get_device")),
    (TorchLayer, ("_post_build", "_post_track_variable", "_track_variables")),
    (keras.layers.Layer, ("_get_own_losses", "_get_regularization_losses")),
    (keras.Model, ("_post_quantize",)),
)


def is_symbolic_device() -> bool:
    """Return whether Keras now creates tensors without values."""
    return keras_core.get_device() == "meta"
