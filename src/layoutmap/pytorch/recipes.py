"""How to make the values of one deferred tensor: whole, or only those at some indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layoutmap.blocks import Index
from layoutmap.pytorch.replay import replay
from layoutmap.pytorch.steps import Constant, Memory, Step, View

__all__ = ["Recipe"]


class Recipe:
    """How to make the values of one tensor, bit for bit those of a plain program.

    Args:
        steps: The tape that it was recorded on.
        view: The tensor.
        until: The number of the first step that is not its past.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: Its element type.
        why_whole: Why blocks cannot be made without the whole tensor; empty if they can.
    """

    def __init__(self, steps: Sequence[Step], view: View, until: int) -> None:
        self._steps = steps
        self._view = view
        self._until = until
        self.shape = view.shape
        self.dtype = view.dtype
        self.why_whole = "it is replayed whole"

    def whole(self) -> torch.Tensor:
        """The whole tensor."""
        return replay(self._steps, [self._view], self._until)[0]

    def blocks(self, indices: Sequence[Index]) -> list[torch.Tensor]:
        """The values at some indices, each contiguous and with memory of its own."""
        whole = self.whole()
        return [whole[index].clone(memory_format=torch.contiguous_format) for index in indices]

    @staticmethod
    def of(tensor: torch.Tensor) -> Recipe:
        """The recipe of a tensor that is real already."""
        memory = Memory(tensor.untyped_storage(), tensor.dtype, [0])
        view = View(memory, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        step = Step(torch.ops.aten.clone.default, (Constant(tensor.detach()),), {}, (view,), ())
        return Recipe([step], view, 1)
