"""Drawn models of torch."""

from layoutmap.testing.models.torch.drawing import draw_model

__all__ = ["draw_model"]
