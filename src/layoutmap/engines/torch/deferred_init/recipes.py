"""How to compute the values of one deferred tensor: all, or only those at some indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from layoutmap.core.blocks import Index, compute_block_shape, make_full_index
from layoutmap.core.checksums import compute_checksum
from layoutmap.engines.torch.deferred_init.elementwise import History, NeedsAll
from layoutmap.engines.torch.deferred_init.passes import iterate_by_tiles, iterate_in_order
from layoutmap.engines.torch.deferred_init.replay import find_needed_steps, replay
from layoutmap.engines.torch.deferred_init.runs import ApartError
from layoutmap.engines.torch.deferred_init.steps import Constant, Memory, Recorded, View
from layoutmap.engines.torch.deferred_init.streams import PIECE
from layoutmap.engines.torch.trees import tree_map

_NUM_COMPARED = 1024  # processes compare only this number of file elements, to avoid reading the whole tensor


class Recipe:
    """Describe how to compute the values of one tensor, with the bits of the unsharded program.

    Args:
        steps: The recorded steps.
        view: The tensor.
        until: The number of the first step that does not affect it.
        piece: The number of elements to compute at a time, a multiple of 16.

    Attributes:
        shape: The global shape.
        dtype: Its element type.
        why_global: Why blocks cannot be computed without the global value; empty if they can.
    """

    def __init__(self, steps: Sequence[Recorded], view: View, until: int, piece: int = PIECE) -> None:
        self._steps = steps
        self._view = view
        self._until = until
        self._piece = piece
        self.shape = view.shape
        self.dtype = view.dtype
        self.why_global = ""
        past = [steps[n] for n in find_needed_steps(steps, {view.memory}, until)]
        by_blocks = any(step.seed is not None or _is_of_file(step) for step in past)
        self._reads = iterate_by_tiles if by_blocks else iterate_in_order
        try:
            History(steps).read_before(view, until)
        except NeedsAll as reason:
            self.why_global = str(reason)

    # The bits must equal the unsharded program's, so replay all operations if pieces do not suffice (decisions/0006).
    def global_value(self) -> torch.Tensor:
        """Compute the unsharded tensor, with the strides of the unsharded program."""
        if not self.why_global:
            tensor = torch.empty_strided(self.shape, self._view.strides, dtype=self.dtype, device="cpu")
            if self._fill([(make_full_index(self.shape), tensor)]):
                return tensor
        folded = self._compute_any_or_all()
        if folded is not None:
            return folded
        return replay(self._steps, [self._view], self._until)[0]

    def text(self) -> str:
        """Format the recipe as text, one line per operation. Equal texts mean equal values in any process."""
        names: dict[Memory, str] = {}

        def format_leaf(leaf: object) -> Any:
            if isinstance(leaf, View):
                where = "" if leaf.is_all else f" at {leaf.offset} by {leaf.strides}"
                where += " conj" * leaf.conj + " neg" * leaf.neg
                name = names.setdefault(leaf.memory, f"#{len(names)}")
                return f"{name} {leaf.dtype}{list(leaf.shape)}{where}"
            if isinstance(leaf, Constant):
                few = leaf.value[-1:].reshape(-1)[-_NUM_COMPARED:] if leaf.is_of_file else leaf.value
                return f"{leaf.value.dtype}{list(leaf.value.shape)} {_format_checksum(few)}"
            # omit the device index, which differs between processes
            return leaf.type if isinstance(leaf, torch.device) else leaf

        lines = [format_leaf(self._view)]
        for number in find_needed_steps(self._steps, {self._view.memory}, self._until):
            step = self._steps[number]
            given = [str(tree_map(format_leaf, each)) for each in step.args]
            given += [f"{name}={tree_map(format_leaf, step.kwargs[name])}" for name in sorted(step.kwargs)]
            if step.state is not None:
                given.append(f"random state {_format_checksum(step.state)}")
            if step.seed is not None:
                given.append(f"seed {step.seed}")
            made = [format_leaf(view) for view in step.made if view is not None]
            lines.append(f"{step.op}({', '.join(given)}) gives {', '.join(made)}")
        return "\n".join(lines)

    def blocks(self, indices: Sequence[Index]) -> list[torch.Tensor]:
        """Compute the values at some indices, each contiguous and in its own memory.

        The random numbers are drawn in one pass, in pieces of about 1 MiB, unless `why_global` says otherwise.
        """
        if not self.why_global:
            blocks = [
                torch.empty(compute_block_shape(index), dtype=self.dtype, device="cpu") for index in indices
            ]
            if self._fill(list(zip(indices, blocks, strict=True))):
                return blocks
        values = self.global_value()
        return [values[index].clone(memory_format=torch.contiguous_format) for index in indices]

    @staticmethod
    def from_values(tensor: torch.Tensor) -> Recipe:
        """Return the recipe of a tensor that already has values."""
        memory = Memory(tensor.untyped_storage(), tensor.dtype, [0])
        view = View(memory, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        step = Recorded(0, torch.ops.aten.clone.default, (Constant(tensor.detach()),), {}, (view,), ())
        return Recipe([step], view, 1)

    def _compute_any_or_all(self) -> torch.Tensor | None:
        """Compute a recipe that ends in `any` or `all` in one pass, or return None for other recipes."""
        step = self._steps[self._view.memory.writes[0]]
        if step.op not in (torch.ops.aten.any.default, torch.ops.aten.all.default):
            return None
        [source] = step.args
        if not isinstance(source, View) or self._until <= self._view.memory.writes[-1]:
            return None
        decisive = step.name == "any"  # the value that decides the result, after which the pass stops
        try:
            reader = History(self._steps, self._piece).read_before(source, self._view.memory.writes[0])
            shape = source.geometry.shape
            reads = self._reads(shape, [make_full_index(shape)], self._piece)
            values = (reader.read(run) for run, _ in reads)
            found = any(bool(piece.any() if decisive else not piece.all()) for piece in values)
        except (NeedsAll, ApartError):
            return None
        return torch.tensor(found == decisive, dtype=self.dtype, device="cpu")

    def _fill(self, blocks: Sequence[tuple[Index, torch.Tensor]]) -> bool:
        """Fill blocks with values in one pass. Return False if one pass is not enough."""
        # Elements arrive in memory order, so permute indices and blocks to it.
        order = self._view.order
        indices = [tuple(index[axis] for axis in order) for index, _ in blocks]
        turned = [block.permute(order) for _, block in blocks]
        reader = History(self._steps, self._piece).read_before(self._view, self._until)
        try:
            with torch.no_grad():
                for run, parts in self._reads([self.shape[axis] for axis in order], indices, self._piece):
                    values = reader.read(run)
                    for part in parts:
                        part.put(values, turned)
        except ApartError:
            return False
        return True


def _is_of_file(step: Recorded) -> bool:
    return any(isinstance(leaf, Constant) and leaf.is_of_file for leaf in step.args)


def _format_checksum(tensor: torch.Tensor) -> str:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.is_sparse:
        return type(tensor).__name__
    bits = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    return f"checksum {compute_checksum(bits.numpy()):08x}"
