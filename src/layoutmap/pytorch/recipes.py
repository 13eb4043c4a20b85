"""How to make the values of one deferred tensor: whole, or only those at some indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layoutmap.blocks import Index, block_shape, intersect, whole_index
from layoutmap.pytorch.elementwise import History, NeedsWhole
from layoutmap.pytorch.readers import boxes
from layoutmap.pytorch.replay import replay
from layoutmap.pytorch.steps import Constant, Memory, Step, View
from layoutmap.pytorch.streams import PIECE, RewindError, pieces

__all__ = ["Recipe"]


class Recipe:
    """How to make the values of one tensor, bit for bit those of a plain program.

    Args:
        steps: The tape that it was recorded on.
        view: The tensor.
        until: The number of the first step that is not its past.
        piece: The elements to make at a time, a multiple of 16.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: Its element type.
        why_whole: Why blocks cannot be made without the whole tensor; empty if they can.
    """

    def __init__(self, steps: Sequence[Step], view: View, until: int, piece: int = PIECE) -> None:
        self._steps = steps
        self._view = view
        self._until = until
        self._piece = piece
        self.shape = view.shape
        self.dtype = view.dtype
        self.why_whole = ""
        try:
            History(steps).of(view, until)
        except NeedsWhole as reason:
            self.why_whole = str(reason)

    def whole(self) -> torch.Tensor:
        """The whole tensor, with the strides that a plain program gives it."""
        if not self.why_whole:
            tensor = torch.empty_strided(self.shape, self._view.strides, dtype=self.dtype, device="cpu")
            if self._fill([(whole_index(self.shape), tensor)]):
                return tensor
        folded = self._folded()
        if folded is not None:
            return folded
        return replay(self._steps, [self._view], self._until)[0]

    def blocks(self, indices: Sequence[Index]) -> list[torch.Tensor]:
        """The values at some indices, each contiguous and with memory of its own.

        The random numbers are drawn in one pass, in pieces of about 1 MiB, unless `why_whole` says otherwise.
        """
        if not self.why_whole:
            blocks = [torch.empty(block_shape(index), dtype=self.dtype, device="cpu") for index in indices]
            if self._fill(list(zip(indices, blocks, strict=True))):
                return blocks
        whole = self.whole()
        return [whole[index].clone(memory_format=torch.contiguous_format) for index in indices]

    @staticmethod
    def of(tensor: torch.Tensor) -> Recipe:
        """The recipe of a tensor that is real already."""
        memory = Memory(tensor.untyped_storage(), tensor.dtype, [0])
        view = View(memory, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        step = Step(0, torch.ops.aten.clone.default, (Constant(tensor.detach()),), {}, (view,), ())
        return Recipe([step], view, 1)

    def _folded(self) -> torch.Tensor | None:
        """Whether any, or all, of the elements of a tensor are true, if that is what this is; read in one pass."""
        step = self._steps[self._view.memory.writes[0]]
        if step.op not in (torch.ops.aten.any.default, torch.ops.aten.all.default):
            return None
        [source] = step.args
        if not isinstance(source, View) or self._until <= self._view.memory.writes[-1]:
            return None
        decisive = step.name == "any"
        try:
            reader = History(self._steps, self._piece).of(source, self._view.memory.writes[0])
            values = (reader.read(start, stop) for start, stop in pieces(source.numel, self._piece))
            found = any(bool(piece.any() if decisive else not piece.all()) for piece in values)
        except (NeedsWhole, RewindError):
            return None
        return torch.tensor(found == decisive, dtype=self.dtype, device="cpu")

    def _fill(self, blocks: Sequence[tuple[Index, torch.Tensor]]) -> bool:
        """Give blocks their values in one pass; false if it turns out that one is not enough."""
        order = self._view.order
        shape = [self.shape[axis] for axis in order]
        # Elements come in the order of memory, so indices and blocks are turned to have their axes in that order.
        turned = [(tuple(index[axis] for axis in order), block.permute(order)) for index, block in blocks]
        reader = History(self._steps, self._piece).of(self._view, self._until)
        with torch.no_grad():
            for start, stop in pieces(self._view.numel, self._piece):
                parts = [
                    (offset, box, both, index, block)
                    for offset, box in _offsets(shape, start, stop)
                    for index, block in turned
                    if (both := intersect(box, index)) is not None
                ]
                if not parts:
                    continue
                try:
                    values = reader.read(start, stop)
                except RewindError:
                    return False
                for offset, box, both, index, block in parts:
                    piece = values[offset : offset + _numel(box)].view(block_shape(box))
                    _within(block, both, index).copy_(_within(piece, both, box))
        return True


def _offsets(shape: Sequence[int], start: int, stop: int) -> list[tuple[int, Index]]:
    """The blocks that a run of elements is, each with its place in the run."""
    found, offset = [], 0
    for box in boxes(shape, start, stop):
        found.append((offset, box))
        offset += _numel(box)
    return found


def _numel(index: Index) -> int:
    return int(torch.Size(block_shape(index)).numel())


def _within(block: torch.Tensor, part: Index, index: Index) -> torch.Tensor:
    """The part of a block that is at an index."""
    return block[tuple(slice(p.start - i.start, p.stop - i.start) for p, i in zip(part, index, strict=True))]
