"""Move tensors to the ranks and layouts of other tensors, sending only pieces that a rank lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from layoutmap.core.blocks import (
    BlockReader,
    Index,
    assemble_blocks,
    compute_block_shape,
    get_starts_and_stops,
    intersect_blocks,
    make_full_index,
    make_relative_index,
)
from layoutmap.core.layout import Layout
from layoutmap.core.pieces import ArrayMove, BlockTransfer, find_block_transfers
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.arrays import convert_to_native_layout, create_from_blocks, get_layout
from layoutmap.engines.torch.dtensor_ops import check_no_slice_is_outdated
from layoutmap.engines.torch.element_types import to_numpy, to_torch
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.specs import get_local

_ROUND_BYTES = 1 << 28
"""Most bytes that this rank sends or gets at one time, unless one tensor has more."""

Tensors = Sequence[torch.Tensor]
Blocks = list[tuple[Index, torch.Tensor]]


def make_array_mover(
    moves: Sequence[ArrayMove], arrays: Tensors, templates: Tensors
) -> Callable[[Tensors], list[torch.Tensor]]:
    """Return a function that moves tensors to the layouts and dtypes of `templates` (see `Engine.make_array_mover`)."""
    transfers = [
        _Transfer.plan_transfer(number, place, arrays[source], like, move)
        for number, (move, like) in enumerate(zip(moves, templates, strict=True))
        for place, source in enumerate(move.sources)
    ]
    targets = [(get_layout(like), tuple(like.shape), like.dtype, like.device) for like in templates]

    @skip_function_modes
    def move_arrays(new: Tensors) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        with torch.no_grad():
            for chunk in _group_transfers_into_rounds(transfers):
                received = _exchange_blocks_of_transfers(chunk, new)
                for i in dict.fromkeys(each.target_index for each in chunk):
                    parts = [pair for pair in zip(chunk, received, strict=True) if pair[0].target_index == i]
                    made.append(_assemble_tensor(*targets[i], moves[i], parts))
        return made

    return move_arrays


@dataclass(frozen=True)
class _Transfer:
    """The pieces of one source tensor that ranks send each other to compute one target tensor.

    Args:
        target_index: The index of the target tensor.
        source_index: The index of the source tensor.
        shape: The shape of the source.
        blocks_by_rank: The index of the block of the source that each rank stores.
        pieces: The pieces, with the ranks that send and receive them.
        wire_dtype: The dtype in which pieces are sent: the smaller one of both tensors.
    """

    target_index: int
    source_index: int
    shape: tuple[int, ...]
    blocks_by_rank: Mapping[int, Index]
    pieces: Sequence[BlockTransfer[int]]
    wire_dtype: torch.dtype

    @classmethod
    def plan_transfer(
        cls, target_index: int, source_position: int, array: torch.Tensor, like: torch.Tensor, move: ArrayMove
    ) -> _Transfer:
        """Return the transfer from `array` to `like`. `array` is the source at `source_position` of the move."""
        blocks_by_rank, wanted = _find_blocks_by_rank(array), _find_blocks_by_rank(like)
        conversion = move.conversion
        blocks = {
            rank: [index] if conversion is None else conversion.list_source_blocks(index)[source_position]
            for rank, index in wanted.items()
        }
        wire_dtype = min(array.dtype, like.dtype, key=lambda each: each.itemsize)
        source_index, pieces = move.sources[source_position], find_block_transfers(blocks_by_rank, blocks)
        return cls(target_index, source_index, tuple(array.shape), blocks_by_rank, pieces, wire_dtype)

    @property
    def max_bytes_per_rank(self) -> int:
        """The largest number of bytes that any rank sends or receives."""
        counts: dict[tuple[str, int], int] = {}
        for piece in self.pieces:
            for key in (("sent", piece.sender), ("received", piece.receiver)):
                counts[key] = counts.get(key, 0) + piece.num_elements * self.wire_dtype.itemsize
        return max(counts.values(), default=0)


def _find_blocks_by_rank(tensor: torch.Tensor) -> dict[int, Index]:
    """Return the index of each rank's block. A tensor without a layout is stored as a whole by each process."""
    shape = tuple(tensor.shape)
    layout = get_layout(tensor)
    if layout is None:
        ranks = [0] if simulation.is_simulated() else range(simulation.get_world_size())
        return dict.fromkeys(ranks, make_full_index(shape))
    ranks = simulation.list_ranks(convert_to_native_layout(layout)[0])
    return {rank: layout.shard_slices(shape, place) for place, rank in enumerate(ranks)}


def _group_transfers_into_rounds(transfers: Sequence[_Transfer]) -> Iterator[list[_Transfer]]:
    """Yield lists of transfers of bounded size, equal on all ranks. All transfers to one target are in one list."""
    chunk: list[_Transfer] = []
    total = 0
    for each in transfers:
        if (
            chunk
            and total + each.max_bytes_per_rank > _ROUND_BYTES
            and each.target_index != chunk[-1].target_index
        ):
            yield chunk
            chunk, total = [], 0
        chunk.append(each)
        total += each.max_bytes_per_rank
    if chunk:
        yield chunk


def _exchange_blocks_of_transfers(transfers: Sequence[_Transfer], arrays: Tensors) -> list[Blocks]:
    """Exchange the pieces of transfers between ranks, and return for each transfer the blocks for this process."""
    locals_ = [_get_local_tensors_by_rank(arrays[each.source_index]) for each in transfers]
    found: list[Blocks] = [[] for _ in transfers]
    if simulation.is_simulated():
        for blocks, each, held in zip(found, transfers, locals_, strict=True):
            shards = {
                get_starts_and_stops(index): (index, held[rank].to(each.wire_dtype))
                for rank, index in each.blocks_by_rank.items()
            }
            blocks += shards.values()
        return found
    own, size = simulation.get_rank(), simulation.get_world_size()
    sent: list[list[torch.Tensor]] = [[] for _ in range(size)]
    expected: list[list[tuple[int, BlockTransfer[int]]]] = [[] for _ in range(size)]
    for number, (each, held) in enumerate(zip(transfers, locals_, strict=True)):
        for piece in each.pieces:
            if piece.sender == own == piece.receiver:
                found[number].append((piece.block, _extract_sent_piece(each, piece, held)))
            elif piece.sender == own:
                sent[piece.receiver].append(
                    _extract_sent_piece(each, piece, held).reshape(-1).view(torch.uint8)
                )
            elif piece.receiver == own:
                expected[piece.sender].append((number, piece))
    if all(piece.sender == piece.receiver for each in transfers for piece in each.pieces):
        return found
    device = next(iter(arrays)).device
    given = [sum(len(part) for part in parts) for parts in sent]
    taken = [sum(p.num_elements * transfers[n].wire_dtype.itemsize for n, p in each) for each in expected]
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    outgoing = torch.cat([empty, *(part for parts in sent for part in parts)])
    incoming = torch.empty(sum(taken), dtype=torch.uint8, device=device)
    dist.all_to_all_single(incoming, outgoing, taken, given, group=simulation.get_global_group())  # pyright: ignore[reportUnknownMemberType]
    del outgoing, sent
    begin = 0
    for number, piece in (pair for pairs in expected for pair in pairs):
        wire = transfers[number].wire_dtype
        end = begin + piece.num_elements * wire.itemsize
        # Copy the bytes, because a view of them in a wider dtype must be aligned.
        values = incoming[begin:end].clone().view(wire).reshape(compute_block_shape(piece.block))
        found[number].append((piece.block, values))
        begin = end
    return found


def _get_local_tensors_by_rank(array: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the local tensors of this process by their ranks."""
    if not isinstance(array, DTensor):
        return {0 if simulation.is_simulated() else simulation.get_rank(): array.detach()}
    check_no_slice_is_outdated("reading a tensor", array)
    return simulation.get_tensors_by_rank(get_local(array.detach()))


def _extract_sent_piece(
    transfer: _Transfer, piece: BlockTransfer[int], local_tensors: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """Return the values of a piece from the local tensor of its sender, in the dtype in which they are sent."""
    inner = make_relative_index(piece.block, transfer.blocks_by_rank[piece.sender])
    return local_tensors[piece.sender][inner].to(transfer.wire_dtype).contiguous()


def _assemble_tensor(
    layout: Layout | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    move: ArrayMove,
    parts: Sequence[tuple[_Transfer, Blocks]],
) -> torch.Tensor:
    """Return the target tensor of a move, from the received blocks of its sources."""

    def read_block(index: Index) -> torch.Tensor:
        if move.conversion is not None:
            readers = [_make_block_reader(*part) for part in parts]
            wire = to_numpy(torch.empty(0, dtype=parts[0][0].wire_dtype)).dtype
            return to_torch(move.conversion.compute_block(index, readers, wire)).to(dtype)
        made = torch.empty(compute_block_shape(index), dtype=dtype, device=device)
        for block, values in parts[0][1]:
            both = intersect_blocks(block, index)
            if both is not None:
                made[make_relative_index(both, index)] = values[make_relative_index(both, block)].to(dtype)
        return made

    if layout is None:
        return read_block(make_full_index(shape)).to(device)
    return create_from_blocks(shape, dtype, layout, read_block)


def _make_block_reader(transfer: _Transfer, blocks: Blocks) -> BlockReader:
    """Return a function that returns the values of a source tensor at an index, from its received blocks."""
    arrays = [(index, to_numpy(values)) for index, values in blocks]
    dtype = to_numpy(torch.empty(0, dtype=transfer.wire_dtype)).dtype
    return lambda index: assemble_blocks(arrays, transfer.shape, dtype, index)
