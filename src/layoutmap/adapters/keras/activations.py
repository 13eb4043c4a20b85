"""Outputs of Keras layers, in the layouts of rules of `LayoutMap.activations`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras

from layoutmap.adapters.keras.private import in_symbolic_scope
from layoutmap.adapters.keras.protocol import KerasSession


def wrap_call_with_layouts(
    layer: object, session: KerasSession, plain: Callable[..., object]
) -> Callable[..., object]:
    """Return a layer's `call` or equivalent that returns arrays in the layouts of activation rules.

    The layer's path is looked up when it is called, since it may not be known before.
    """

    @functools.wraps(plain)
    def call(*args: object, **kwargs: object) -> object:
        outputs = plain(*args, **kwargs)
        # Keras finds out shapes with sizes that it makes up, and a plan has no arrays.
        if in_symbolic_scope() or session.context.plan_only:
            return outputs
        path, layout = session.find_output_layout(layer)
        if layout is None:
            return outputs
        flat = keras.tree.flatten(outputs)
        arrays = [each for each in flat if keras.ops.is_tensor(each)]
        shapes = [tuple(int(n) for n in array.shape) for array in arrays]
        layouts = session.policy.choose_output_layouts(layout, shapes, path)
        chosen = {id(array): each for array, each in zip(arrays, layouts, strict=True) if each is not None}
        placed = [
            session.backend.relayout_output(each, chosen[id(each)], session) if id(each) in chosen else each
            for each in flat
        ]
        return keras.tree.pack_sequence_as(outputs, placed)

    return call
