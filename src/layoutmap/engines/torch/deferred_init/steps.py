"""Describe recorded operations, and views of memory that is not allocated.

A deferred tensor is a `DeferredView` of a `DeferredMemory`. Views are not recorded, because torch reports the memory of
an operation's result. So each recorded operation creates or changes memory, and a list of them is a tensor's history.
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
class DeferredMemory:
    """A storage without values, which one or several deferred tensors share.

    Args:
        storage: The fake storage, kept so that its id is not reused.
        dtype: The element type of the tensor that it was made for.
        writes: The numbers of the operations that created or changed it, in order.
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
        """The number of elements of `dtype` that fit into the memory."""
        return self.num_bytes // self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class MemoryGeometry:
    """Offset, sizes, and strides of a view's elements in memory, from the slowest axis to the fastest."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def find_offset(self, index: int) -> int:
        """Return the memory offset of the element at an index in memory order."""
        offset = self.offset
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            index, along = divmod(index, n)
            offset += along * stride
        return offset

    def list_offsets(self, start: int, stop: int) -> torch.Tensor:
        """Return the memory offsets of the elements from `start` up to `stop`."""
        left = torch.arange(start, stop, device="cpu")
        offset = torch.full_like(left, self.offset)
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            offset += left % n * stride
            left //= n
        return offset

    def count_elements_before(self, offset: int) -> int:
        """Return the number of elements that lie before an offset in memory."""
        return bisect.bisect_left(range(math.prod(self.shape)), offset, key=self.find_offset)


@dataclass(frozen=True, slots=True, eq=False)
class DeferredView:
    """A deferred tensor: its shape, strides, and offset in a memory."""

    memory: DeferredMemory
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False

    @property
    def numel(self) -> int:
        """The number of elements of the view."""
        return int(torch.Size(self.shape).numel())

    @property
    def axis_order(self) -> tuple[int, ...]:
        """The axes from the slowest in memory to the fastest. Axes of size 1 come first."""
        return tuple(sorted(range(len(self.shape)), key=lambda i: (self.shape[i] != 1, -self.strides[i], i)))

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill a range of the memory, each once, in the memory's own dtype."""
        if self.dtype != self.memory.dtype or self.conj or self.neg:
            return False
        expected = 1
        for axis in reversed(self.axis_order):
            if self.shape[axis] != 1 and self.strides[axis] != expected:
                return False
            expected *= self.shape[axis]
        return True

    @property
    def is_whole_memory(self) -> bool:
        """Whether the elements fill the whole memory, each once."""
        return self.is_dense and self.offset == 0 and self.numel == self.memory.numel

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are dense and in row-major order."""
        return self.is_dense and [i for i in self.axis_order if self.shape[i] != 1] == [
            i for i, n in enumerate(self.shape) if n != 1
        ]

    @property
    def has_ascending_offsets(self) -> bool:
        """Whether the elements, in memory order, have ascending offsets, so that no two overlap."""
        if self.dtype != self.memory.dtype or self.conj or self.neg:
            return False
        reach = 0
        for axis in reversed(self.axis_order):
            if self.shape[axis] != 1 and self.strides[axis] <= reach:
                return False
            reach += (self.shape[axis] - 1) * self.strides[axis]
        return True

    @property
    def geometry(self) -> MemoryGeometry:
        """Positions of the elements in memory. Transposed views have equal geometries."""
        return MemoryGeometry(
            self.offset,
            tuple(self.shape[axis] for axis in self.axis_order),
            tuple(self.strides[axis] for axis in self.axis_order),
        )

    def has_same_memory_order(self, other: DeferredView) -> bool:
        """Return whether another view has the same shape and the same order of axes in memory."""
        return self.shape == other.shape and self.axis_order == other.axis_order

    def make_tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a real tensor with the geometry of this view, in a real storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.shape, self.strides)  # pyright: ignore[reportArgumentType, reportCallIssue]
        tensor = torch.conj(tensor) if self.conj else tensor
        return torch.neg(tensor) if self.neg else tensor


@dataclass(slots=True, eq=False)
class RecordedConstant:
    """A real tensor that a recorded operation reads, with the values that it had at the recording.

    Args:
        value: The tensor.
        is_mapped_file: Whether its memory is a mapped file, so that only accessed parts are read.
    """

    value: torch.Tensor
    is_mapped_file: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RecordedOperation:
    """A recorded operation, with its arguments and results.

    Args:
        number: Its position on the tape.
        op: The operation of torch.
        args: Its arguments; tensors are a `DeferredView` or a `RecordedConstant`.
        kwargs: Its arguments by name, without the generator.
        results: For each returned tensor, its view; `None` if it is not deferred.
        writes: The views that it changed in place.
        state: The generator's state before it, if it draws random numbers.
        seed: The seed of its tiles, if it is drawn by tiles.
        caller: The torch or Keras initializer that called it, for messages; empty if there is none.
    """

    number: int
    op: OpOverload
    args: Args
    kwargs: Kwargs
    results: tuple[DeferredView | None, ...]
    writes: tuple[DeferredView, ...]
    state: torch.Tensor | None = None
    seed: int | None = None
    caller: str = ""

    @property
    def name(self) -> str:
        """The operation's name without its overload."""
        return self.op.overloadpacket.__name__.rstrip("_")

    def iterate_deferred_inputs(self) -> Iterator[DeferredView]:
        """Return the deferred tensors among the arguments."""
        return (leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, DeferredView))

    def find_result_with_new_memory(self, memory: DeferredMemory) -> DeferredView | None:
        """Return the result stored in a memory that this operation created, or None if it did not create the memory."""
        written = {view.memory for view in self.writes}
        for view in self.results:
            if view is not None and view.memory is memory and memory not in written:
                return view
        return None
