"""Drawn models of Keras."""

from layoutmap.testing.models.keras.drawing import draw_model

__all__ = ["draw_model"]
