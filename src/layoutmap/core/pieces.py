"""Find the blocks that devices must send each other so that each gets the part of an array that it needs."""

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
    get_starts_and_stops,
    intersect_blocks,
)

Device = TypeVar("Device", bound=Hashable)


@dataclass(frozen=True, slots=True)
class BlockTransfer(Generic[Device]):
    """A block of an array that one device sends to another, or keeps if both are the same device.

    Args:
        sender: The device that stores it.
        receiver: The device that needs it.
        block: Its index in the array.
    """

    sender: Device
    receiver: Device
    block: Index

    @property
    def num_elements(self) -> int:
        """The number of elements of the block."""
        return math.prod(compute_block_shape(self.block))


class ArrayConversion(Protocol):
    """Computation of one array from source arrays by permuting, splitting, and joining their axes."""

    def list_source_blocks(self, index: Index) -> Sequence[Sequence[Index]]:
        """Return for each source array the indices of the blocks on which the result's block at an index depends."""
        ...

    def compute_block(self, index: Index, sources: Sequence[BlockReader], dtype: Any) -> NumpyArray:
        """Compute the result's block at an index. `sources` read blocks of the source arrays."""
        ...

    def compute_array(self, namespace: Any, sources: Sequence[Any]) -> Any:
        """Compute the whole result with a numpy-like namespace, such as `jax.numpy` while it traces a function."""
        ...


@dataclass(frozen=True, slots=True)
class ArrayMove:
    """Describe how one target array gets its values from source arrays.

    Args:
        sources: The positions of the source arrays in the list of all arrays.
        conversion: How the values are computed; `None`: they are copied from one source array of equal shape.
        path: The path of the target array, for messages.
    """

    sources: tuple[int, ...]
    conversion: ArrayConversion | None = None
    path: str = ""


# The two layouts alone determine the bytes to send, so a plan computes them without a compiler (decisions/0240).
def find_block_transfers(
    stored: Mapping[Device, Index], needed: Mapping[Device, Sequence[Index]]
) -> list[BlockTransfer[Device]]:
    """Return a transfer for each block that a device keeps or receives, so that each device gets the blocks it needs.

    A device keeps what it stores already. Of the devices that store another block, the one that has sent fewest
    elements so far sends it.

    Args:
        stored: The block that each device stores.
        needed: The blocks that each device needs. They do not overlap.

    Example:
        >>> halves = {"a": (slice(0, 2),), "b": (slice(2, 4),)}
        >>> needed = {"a": [(slice(0, 4),)], "c": [(slice(3, 4),)]}
        >>> [(t.sender, t.receiver, t.num_elements) for t in find_block_transfers(halves, needed)]
        [('a', 'a', 2), ('b', 'a', 2), ('b', 'c', 1)]
    """
    shards: dict[Ends, tuple[Index, list[Device]]] = {}
    for device, index in stored.items():
        shards.setdefault(get_starts_and_stops(index), (index, []))[1].append(device)
    sent: Counter[Device] = Counter()
    found: list[BlockTransfer[Device]] = []
    for receiver, blocks in needed.items():
        for block in blocks:
            for index, holders in shards.values():
                both = intersect_blocks(index, block)
                if both is None:
                    continue
                is_kept = receiver in stored and stored[receiver] == index
                sender = receiver if is_kept else min(holders, key=sent.__getitem__)
                transfer = BlockTransfer(sender, receiver, both)
                if not is_kept:
                    sent[sender] += transfer.num_elements
                found.append(transfer)
    return found
