"""Arguments of `fit`: callbacks that cannot read weights in layouts, and batches of which none divides."""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras

from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.core.errors import ScopeError


def wrap_fit_for_callbacks(fit: Callable[..., object], session: KerasSession) -> Callable[..., object]:
    """Return a `fit` that refuses TensorBoard options that would fail at the end of the first epoch."""

    @functools.wraps(fit)
    def fit_with_callbacks(*args: object, **kwargs: object) -> object:
        given = kwargs.get("callbacks")
        for each in getattr(given, "callbacks", None) or keras.tree.flatten(given):
            if isinstance(each, keras.callbacks.TensorBoard) and each.histogram_freq:
                for option in session.backend.unsupported_board_options:
                    if getattr(each, option):
                        _refuse(option, session)
        return fit(*args, **kwargs)

    return fit_with_callbacks


def _refuse(option: str, session: KerasSession) -> None:
    raise ScopeError(
        f"fit: TensorBoard with {option} cannot show weights in layouts on {session.backend.engine_name}",
        why="it computes with the weights, using operations for a single device",
        fix=f"leave {option} out, and log variable.numpy() in a callback of your own",
    )


def wrap_fit_for_batches(fit: Callable[..., object], session: KerasSession) -> Callable[..., object]:
    """Return a `fit` that warns at its end if no batch could be sharded over the scope's batch dim."""

    @functools.wraps(fit)
    def fit_with_batches(*args: object, **kwargs: object) -> object:
        batches = session.policy.batches
        batches.clear()
        result = fit(*args, **kwargs)
        if batches and True not in batches:
            session.policy.warn_of_uneven_batch("fit", "keras")
        return result

    return fit_with_batches
