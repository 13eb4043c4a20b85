"""Replay recorded operations in one pass, if each element depends on few others at known positions.

A `History` turns the steps that a tensor depends on into readers. Where a step needs more than the elements at the same
place, it says so, in the words of the plan.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from operator import methodcaller
from typing import Any, NamedTuple

import torch

from layoutmap.engines.torch.deferred_init.operations import (
    COPIES,
    FILLED,
    FILLED_WITH,
    ROWS,
    is_local,
    is_pointwise,
)
from layoutmap.engines.torch.deferred_init.readers import (
    Computed,
    Filled,
    Fixed,
    Interleaved,
    Joined,
    Patch,
    Patched,
    Picked,
    Reader,
    Rows,
    Shifted,
    make_grid_patch,
    make_place_patch,
    make_run_patch,
)
from layoutmap.engines.torch.deferred_init.replay import find_needed_steps
from layoutmap.engines.torch.deferred_init.steps import Constant, Memory, Recorded, View
from layoutmap.engines.torch.deferred_init.streams import PIECE, Stream, find_random_fill
from layoutmap.engines.torch.deferred_init.tiles import Tiled

aten = torch.ops.aten
_LONGEST_ROW = 64
_MAX_GAP = 16
_MOST_PLACES = 1 << 16
_MOST_PATCHES = 64
_SHORTEST_PERIOD = 1024


class NeedsAll(Exception):
    """Raised if a tensor cannot be computed in one pass over its elements."""


class IndexMap(NamedTuple):
    """Map element `t` of the requested tensor to the element to read: `scale * t + shift`, after `outer`.

    Readers give each element once, so only consumers of the same elements, in the same frame, may share one.
    """

    outer: Any = None
    scale: int = 1
    shift: int = 0

    def map_to_view(self, view: View) -> IndexMap:
        """Convert this map from elements of a memory to elements of a view in it."""
        if view.is_dense:
            return self._replace(shift=self.shift - view.offset)
        return IndexMap((view.geometry, "within", self))

    def map_to_memory(self, view: View) -> IndexMap:
        """Convert this map from elements of a view to elements of its memory."""
        if view.is_dense:
            return self._replace(shift=self.shift + view.offset)
        if self.outer and self[1:] == (1, 0) and self.outer[:2] == (view.geometry, "within"):
            return self.outer[2]
        return IndexMap((view.geometry, "around", self))

    def map_to_rows(self, length: int) -> IndexMap:
        """Convert this map from rows to elements of rows."""
        return self._replace(scale=self.scale * length, shift=self.shift * length)


class History:
    """Build the readers of one pass over recorded steps.

    Args:
        steps: The tape.
        piece: The number of elements to draw at a time.
    """

    def __init__(self, steps: Sequence[Recorded], piece: int = PIECE) -> None:
        self._steps = steps
        self._piece = piece
        self._readers: dict[object, Reader] = {}

    def read_before(self, view: View, until: int) -> Reader:
        """Return a reader of a tensor's elements, in memory order, with their values before a step.

        Raises:
            NeedsAll: It cannot be made in one pass.
        """
        reader = self._read_view(view, until, IndexMap())
        if reader is None:
            raise NeedsAll("its elements are far apart in memory")
        return reader

    def _read_view(self, view: View, until: int, frame: IndexMap) -> Reader | None:
        """Return a reader of a view's elements in memory order, or None if they are unordered or far apart."""
        if view.is_dense:
            reader = self._read_memory(view.memory, until, frame.map_to_memory(view))
            return Shifted(reader, view.offset) if view.offset else reader
        # Do not read all memory for a small view.
        if not view.is_ordered or view.memory.numel > _MAX_GAP * view.numel:
            return None
        reader = self._read_memory(view.memory, until, frame.map_to_memory(view))
        return _count_consumer(Picked(reader, view.geometry))

    def _read_memory(self, memory: Memory, until: int, frame: IndexMap) -> Reader:
        place = bisect.bisect_left(memory.writes, until) - 1
        key = (memory, place, frame)  # a reader yields each element once, so the key includes the frame
        if key not in self._readers:
            self._readers[key] = self._read_version(memory, place, frame)
        return _count_consumer(self._readers[key])

    def _read_version(self, memory: Memory, place: int, frame: IndexMap) -> Reader:
        """Return a reader of a memory after write number `place`."""
        patches: list[tuple[Recorded, View]] = []
        while True:
            step = self._steps[memory.writes[place]]
            made = step.find_created_view(memory)
            written = [made] if made is not None else [each for each in step.writes if each.memory is memory]
            # every run reads all patches, so limit their number
            if len(written) != 1 or len(patches) > _MOST_PATCHES:
                raise self._make_error(step)
            [view] = written
            if view.is_all and step.op.overloadpacket is not aten.index_put_:
                break
            if made is not None:
                raise self._make_error(step)
            patches.append((step, view))
            place -= 1
        if not patches:
            return self._read_result(step, view, frame.map_to_view(view))
        base = self._read_memory(memory, step.number + 1, frame)
        return Patched(base, [self._patch(step, view, frame) for step, view in reversed(patches)])

    # -- steps that write part of a memory

    def _patch(self, step: Recorded, view: View, frame: IndexMap) -> Patch:
        if step.op.overloadpacket is aten.index_put_:
            return self._make_index_patch(step, view)
        if not view.is_ordered:
            raise self._make_error(step)
        reader = _count_consumer(self._read_result(step, view, frame.map_to_view(view)))
        if view.is_dense:
            return make_run_patch(view.offset, view.numel, reader)
        return make_grid_patch(view.geometry, reader)

    def _make_index_patch(self, step: Recorded, view: View) -> Patch:
        """Return the patch of `tensor[indices] = values`, if both exist already."""
        indices, values = step.args[1:3]
        accumulates = _get_argument(step, 3, False)
        if accumulates or any(isinstance(each, View) for each in (*indices, values)):
            raise self._make_error(step)
        index = tuple(slice(None) if each is None else each.value for each in indices)
        shape = torch.empty(1, device="cpu").expand(view.shape)[index].shape
        if shape.numel() > _MOST_PLACES:
            raise self._make_error(step)
        places = torch.full(shape, view.offset, device="cpu")
        for axis, (n, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
            along = torch.arange(n, device="cpu").view(
                [n if i == axis else 1 for i in range(len(view.shape))]
            )
            places += stride * along.expand(view.shape)[index]
        # torch does not define the result of duplicate indices, so refuse them.
        if places.unique().numel() < places.numel():  # pyright: ignore[reportUnknownMemberType]
            raise self._make_error(step)
        return make_place_patch(places.reshape(-1), values.value.expand(shape).reshape(-1))

    # -- steps that write a whole tensor

    def _read_result(self, step: Recorded, view: View, frame: IndexMap) -> Reader:
        """Return a reader of the elements that a step writes to a view."""
        packet = step.op.overloadpacket
        if step.state is not None:
            fill = find_random_fill(step, view)
            if fill is None:
                raise self._make_error(step)
            if step.seed is not None:
                return Tiled(fill, view.geometry.shape, step.seed)
            return Stream(fill, view.numel, step.state, self._piece)
        if packet in FILLED:
            return Filled(FILLED[packet], view.dtype)
        if packet in FILLED_WITH:
            value = step.args[FILLED_WITH[packet]]
            if isinstance(value, View):
                raise self._make_error(step)
            return Filled(value.value.item() if isinstance(value, Constant) else value, view.dtype)
        if packet in COPIES:
            source = self._read_operand(step, step.args[packet is aten.copy_], view, frame)
            return Computed(methodcaller("to", view.dtype), [source], owns_first=True)
        if is_pointwise(step):
            return self._read_pointwise(step, view, frame)
        if packet in (aten.cat, aten.stack):
            return self._read_joined(step, view, frame)
        if packet in ROWS or packet is aten.gather:
            return self._read_rows(step, view, frame)
        raise self._make_error(step)

    def _read_pointwise(self, step: Recorded, view: View, frame: IndexMap) -> Reader:
        if any(isinstance(each, View | Constant) for each in step.kwargs.values()):
            raise self._make_error(step)
        inputs: list[Reader] = []
        args, places = list(step.args), list[int]()
        for place, arg in enumerate(args):
            if isinstance(arg, Constant) and arg.value.numel() == 1:
                args[place] = arg.value.reshape(() if arg.value.dim() == 0 else (1,))
            elif isinstance(arg, View | Constant):
                places.append(place)
                inputs.append(self._read_operand(step, arg, view, frame))

        def compute(*values: torch.Tensor) -> torch.Tensor:
            given = {**dict(enumerate(args)), **dict(zip(places, values, strict=True))}
            return step.op(*given.values(), **step.kwargs)

        return Computed(compute, inputs, owns_first=bool(step.writes))

    def _read_operand(self, step: Recorded, arg: View | Constant, view: View, frame: IndexMap) -> Reader:
        """Return a reader of an argument's elements at the positions that a pointwise step writes."""
        if isinstance(arg, Constant):
            return _count_consumer(Fixed(arg.value.expand(view.shape).permute(view.order)))
        reader = self._read_view(arg, step.number, frame) if arg.has_same_order(view) else None
        if reader is None:
            raise self._make_error(step)
        return reader

    def _read_joined(self, step: Recorded, view: View, frame: IndexMap) -> Reader:
        """Return a reader of tensors that are concatenated along an axis, or stacked along a new first axis."""
        axis = _get_argument(step, 1, 0) % max(1, len(view.shape))
        is_stack = step.op.overloadpacket is aten.stack
        outer = math.prod(view.shape[:axis])
        if not view.is_contiguous or (axis and (is_stack or view.numel // outer < _SHORTEST_PERIOD)):
            raise self._make_error(step)
        parts: list[tuple[Reader, int]] = []
        begin = 0
        for part in step.args[0]:
            reader: Reader | None = None
            if isinstance(part, Constant):
                reader, numel, dtype = (
                    _count_consumer(Fixed(part.value)),
                    part.value.numel(),
                    part.value.dtype,
                )
            else:
                numel, dtype = part.numel, part.dtype
                if part.is_contiguous:
                    within = frame._replace(shift=frame.shift - begin)
                    reader = self._read_view(
                        part, step.number, IndexMap((step, begin, frame)) if axis else within
                    )
            if reader is None or dtype != view.dtype:
                raise self._make_error(step)
            parts.append((reader, numel // outer))
            begin += numel // outer
        return Interleaved(parts) if axis else Joined(parts)

    def _read_rows(self, step: Recorded, view: View, frame: IndexMap) -> Reader:
        """Return a reader of an operation along short rows, such as the maximum of each row."""
        gathers = step.op.overloadpacket is aten.gather
        axis = _get_argument(step, 1, None)
        which = next(
            (i for i, made in enumerate(step.made) if made is not None and made.memory is view.memory), -1
        )
        if not isinstance(axis, int) or not view.is_contiguous or which < 0:
            raise self._make_error(step)
        inputs: list[tuple[Reader, int]] = []
        for source in (step.args[0], step.args[2]) if gathers else (step.args[0],):
            n = source.shape[-1] if isinstance(source, View) and source.shape else 0
            if not 0 < n <= _LONGEST_ROW or axis not in (-1, len(source.shape) - 1):
                raise self._make_error(step)
            reader = (
                self._read_view(source, step.number, frame.map_to_rows(n)) if source.is_contiguous else None
            )
            if reader is None or source.numel != n * view.numel:
                raise self._make_error(step)
            inputs.append((reader, n))

        def compute(rows: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            made = step.op(rows, -1, *others)
            return made if isinstance(made, torch.Tensor) else made[which]

        return Rows(compute, inputs)

    def _make_error(self, step: Recorded) -> NeedsAll:
        """Return the error for a step that needs unsharded tensors, or depends on such a step."""
        before = (
            self._steps[n]
            for n in find_needed_steps(self._steps, {view.memory for view in step.list_inputs()}, step.number)
        )
        cause = next((each for each in before if not is_local(each)), step) if is_local(step) else step
        asked = cause.seen_in or step.seen_in
        return NeedsAll(
            f"{asked} needs all of it: {cause.name}" if asked else f"{cause.name} needs all of it"
        )


def _count_consumer(reader: Reader) -> Reader:
    reader.consumers += 1
    return reader


def _get_argument(step: Recorded, place: int, default: object) -> Any:
    return step.args[place] if len(step.args) > place else default
