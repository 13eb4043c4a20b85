"""Options of TensorFlow's graph optimizer while a step runs."""

from __future__ import annotations

import threading
import weakref

import tensorflow as tf

from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.engines.patches import Closing

_ALWAYS_THERE = {"disable_model_pruning", "disable_meta_optimizer"}  # in TensorFlow's options, chosen or not
_options_lock = threading.RLock()
_unoptimized: weakref.WeakSet[Unoptimized] = weakref.WeakSet()


class Unoptimized(Closing):
    """Disable TensorFlow's graph optimizer for graphs on CPU devices until the block ends.

    TensorFlow would optimize the graph of a step once for each device: half of the time of the first step on 8, and
    no later one is faster for it. On accelerators, which that may serve, it is left alone, and wherever a program has
    chosen optimizations itself.
    """

    def __init__(self, session: KerasSession) -> None:
        mesh = session.engine.native(session.policy.replicated(0), 0).mesh
        self._is_on_cpu = mesh.device_type() == "CPU"

    def open(self) -> None:
        """Disable the optimizer."""
        options = tf.config.optimizer
        with _options_lock:
            chosen = options.get_experimental_options()
            wanted = self._is_on_cpu and not chosen.keys() - _ALWAYS_THERE
            if wanted and (_unoptimized or not chosen.get("disable_meta_optimizer")):
                _unoptimized.add(self)
                options.set_experimental_options({"disable_meta_optimizer": True})

    def close(self) -> None:
        """Restore the options."""
        with _options_lock:
            if self in _unoptimized:
                # Also with another thread inside, since each thread remembers the options that it found.
                found = {} if len(_unoptimized) > 1 else {"disable_meta_optimizer": False}
                tf.config.optimizer.set_experimental_options(found)
                _unoptimized.discard(self)
