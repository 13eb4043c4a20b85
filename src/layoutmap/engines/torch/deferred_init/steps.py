"""Describe recorded steps: operations, and views of memory that is not allocated.

A deferred tensor is a `View` of a `Memory`. Views need no step: torch says which memory an operation's result is in.
So a step is an operation that makes memory or changes some, and the history of a tensor is the list of such steps.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from layoutmap.engines.torch.operators import Args, Kwargs, OpOverload
from layoutmap.engines.torch.trees import tree_leaves


@dataclass(slots=True, eq=False)
class Memory:
    """The memory of deferred tensors that share it.

    Args:
        storage: The fake storage, kept so that its id is not reused.
        dtype: The element type of the tensor that it was made for.
        writes: The numbers of the steps that created or changed it, in order.
    """

    storage: torch.UntypedStorage
    dtype: torch.dtype
    writes: list[int] = field(default_factory=list[int])

    @property
    def num_bytes(self) -> int:
        """The size of the memory in bytes."""
        return self.storage.nbytes()

    @property
    def numel(self) -> int:
        """The number of elements, of its own type."""
        return self.num_bytes // self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Geometry:
    """Strided elements of a memory: shape, strides, and offset, the slowest axis first."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def find_place(self, element: int) -> int:
        """Return the offset of an element in memory."""
        place = self.offset
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            element, along = divmod(element, n)
            place += along * stride
        return place

    def list_places(self, start: int, stop: int) -> torch.Tensor:
        """Return the offsets of a range of elements in memory."""
        left = torch.arange(start, stop, device="cpu")
        place = torch.full_like(left, self.offset)
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            place += left % n * stride
            left //= n
        return place

    def count_elements_before(self, place: int) -> int:
        """Count the elements before an offset in memory."""
        return bisect.bisect_left(range(math.prod(self.shape)), place, key=self.find_place)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A tensor without values: shape, strides, and offset in a memory."""

    memory: Memory
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return int(torch.Size(self.shape).numel())

    @property
    def order(self) -> tuple[int, ...]:
        """Return the axes in memory order, the slowest first. Axes of size 1 come first."""
        return tuple(sorted(range(len(self.shape)), key=lambda i: (self.shape[i] != 1, -self.strides[i], i)))

    @property
    def is_dense(self) -> bool:
        """Whether its elements are contiguous in memory, each once, in the memory's own dtype."""
        if self.dtype != self.memory.dtype or self.conj or self.neg:
            return False
        expected = 1
        for axis in reversed(self.order):
            if self.shape[axis] != 1 and self.strides[axis] != expected:
                return False
            expected *= self.shape[axis]
        return True

    @property
    def is_all(self) -> bool:
        """Whether it covers all of its memory, each element once."""
        return self.is_dense and self.offset == 0 and self.numel == self.memory.numel

    @property
    def is_contiguous(self) -> bool:
        """Whether torch would call it contiguous."""
        return self.is_dense and [i for i in self.order if self.shape[i] != 1] == [
            i for i, n in enumerate(self.shape) if n != 1
        ]

    @property
    def is_ordered(self) -> bool:
        """Whether its elements do not overlap and its axes are in memory order."""
        if self.dtype != self.memory.dtype or self.conj or self.neg:
            return False
        reach = 0
        for axis in reversed(self.order):
            if self.shape[axis] != 1 and self.strides[axis] <= reach:
                return False
            reach += (self.shape[axis] - 1) * self.strides[axis]
        return True

    @property
    def geometry(self) -> Geometry:
        """Offset, sizes, and strides of its elements in memory, sorted so that transposed views are equal."""
        return Geometry(
            self.offset,
            tuple(self.shape[axis] for axis in self.order),
            tuple(self.strides[axis] for axis in self.order),
        )

    def has_same_order(self, other: View) -> bool:
        """Return whether another view has the same shape and the same order of axes in memory."""
        return self.shape == other.shape and self.order == other.order

    def make_tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor that this view describes, in a real storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.shape, self.strides)  # pyright: ignore[reportArgumentType, reportCallIssue]
        tensor = torch.conj(tensor) if self.conj else tensor
        return torch.neg(tensor) if self.neg else tensor


@dataclass(slots=True, eq=False)
class Constant:
    """A real tensor that a step reads, with its values at that time.

    Args:
        value: The tensor.
        is_of_file: Whether its memory is a mapped file, so that only accessed parts are read.
    """

    value: torch.Tensor
    is_of_file: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A recorded operation.

    Args:
        number: Its position on the tape.
        op: The operation of torch.
        args: Its arguments; tensors are a `View` or a `Constant`.
        kwargs: Its arguments by name, without the generator.
        made: For each returned tensor, its view; `None` if it is not deferred.
        writes: The views that it changed in place.
        state: The generator's state before it, if it draws random numbers.
        seed: The seed of its tiles, if it is drawn by tiles.
        seen_in: The torch or library function that called it, for messages.
    """

    number: int
    op: OpOverload
    args: Args
    kwargs: Kwargs
    made: tuple[View | None, ...]
    writes: tuple[View, ...]
    state: torch.Tensor | None = None
    seed: int | None = None
    seen_in: str = ""

    @property
    def name(self) -> str:
        """The operation's name without its overload."""
        return self.op.overloadpacket.__name__.rstrip("_")

    def list_inputs(self) -> Iterator[View]:
        """Return the deferred tensors among the arguments."""
        return (leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, View))

    def find_created_view(self, memory: Memory) -> View | None:
        """Return the view with which this step created a memory, or None if another step did."""
        written = {view.memory for view in self.writes}
        for view in self.made:
            if view is not None and view.memory is memory and memory not in written:
                return view
        return None
