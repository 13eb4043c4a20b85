"""Find the blocks that devices must send each other to change a layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from layoutmap.core.blocks import (
    BlockReader,
    Ends,
    Index,
    NumpyArray,
    compute_block_shape,
    get_slice_ends,
    intersect_blocks,
)

Device = TypeVar("Device", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Piece(Generic[Device]):
    """A block of an array that one device sends to another, or keeps.

    Args:
        sender: The device that holds it.
        receiver: The device that needs it.
        block: Its place in the array.
    """

    sender: Device
    receiver: Device
    block: Index

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(compute_block_shape(self.block))


class Conversion(Protocol):
    """Permute, split, and join axes of source arrays to make one array."""

    def list_blocks(self, index: Index) -> Sequence[Sequence[Index]]:
        """Return, for each source array, the blocks needed for a block of the result."""
        ...

    def fill(self, index: Index, sources: Sequence[BlockReader], dtype: Any) -> NumpyArray:
        """Compute a block of the result from the source arrays."""
        ...

    def compute(self, namespace: Any, sources: Sequence[Any]) -> Any:
        """Compute the result as an array of a numpy-like namespace, which may be traced."""
        ...


@dataclass(frozen=True, slots=True)
class Move:
    """Describe an array that receives values from other arrays.

    Args:
        sources: The numbers of the arrays with the values.
        conversion: How its values are computed; `None`: they are copied from one array of its shape.
        path: Its path, for messages.
    """

    sources: tuple[int, ...]
    conversion: Conversion | None = None
    path: str = ""


# Both layouts determine the bytes that move, so a plan counts them without a compiler (decisions/0240).
def find_pieces(
    held: Mapping[Device, Index], wanted: Mapping[Device, Sequence[Index]]
) -> list[Piece[Device]]:
    """Assign each missing block to one device that stores it, and return the blocks to send.

    A device keeps all that it holds. Each other piece comes from the holder that has sent least so far.

    Args:
        held: The block that each device holds.
        wanted: The blocks that each device needs, which do not overlap.

    Example:
        >>> halves = {"a": (slice(0, 2),), "b": (slice(2, 4),)}
        >>> wanted = {"a": [(slice(0, 4),)], "c": [(slice(3, 4),)]}
        >>> [(p.sender, p.receiver, p.num_elements) for p in find_pieces(halves, wanted)]
        [('a', 'a', 2), ('b', 'a', 2), ('b', 'c', 1)]
    """
    shards: dict[Ends, tuple[Index, list[Device]]] = {}
    for device, index in held.items():
        shards.setdefault(get_slice_ends(index), (index, []))[1].append(device)
    sent: Counter[Device] = Counter()
    found: list[Piece[Device]] = []
    for receiver, blocks in wanted.items():
        for block in blocks:
            for index, holders in shards.values():
                both = intersect_blocks(index, block)
                if both is None:
                    continue
                is_kept = receiver in held and held[receiver] == index
                piece = Piece(receiver if is_kept else min(holders, key=sent.__getitem__), receiver, both)
                if not is_kept:
                    sent[piece.sender] += piece.num_elements
                found.append(piece)
    return found
