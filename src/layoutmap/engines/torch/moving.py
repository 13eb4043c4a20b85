"""Move tensors to the ranks and layouts of others, sending only pieces that a rank lacks."""

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
    get_slice_ends,
    intersect_blocks,
    make_full_index,
    make_relative_index,
)
from layoutmap.core.layout import Layout
from layoutmap.core.pieces import Move, Piece, find_pieces
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.arrays import convert_layout, from_blocks, get_layout
from layoutmap.engines.torch.dtensor_ops import refuse_outdated
from layoutmap.engines.torch.element_types import to_numpy, to_torch
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.specs import get_local

_STEP_BYTES = 1 << 28
"""Most bytes that this rank sends or gets at one time, unless one tensor has more."""

Tensors = Sequence[torch.Tensor]
Blocks = list[tuple[Index, torch.Tensor]]


def make_mover(
    moves: Sequence[Move], arrays: Tensors, likes: Tensors
) -> Callable[[Tensors], list[torch.Tensor]]:
    """Return a function that moves tensors to the layouts and dtypes of others (see `Engine.make_mover`)."""
    transfers = [
        _Transfer.find(number, place, arrays[source], like, move)
        for number, (move, like) in enumerate(zip(moves, likes, strict=True))
        for place, source in enumerate(move.sources)
    ]
    targets = [(get_layout(like), tuple(like.shape), like.dtype, like.device) for like in likes]

    @skip_function_modes
    def move_arrays(new: Tensors) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        with torch.no_grad():
            for step in _split_transfers(transfers):
                received = _exchange(step, new)
                for number in dict.fromkeys(each.number for each in step):
                    parts = [pair for pair in zip(step, received, strict=True) if pair[0].number == number]
                    made.append(_make_tensor(*targets[number], moves[number], parts))
        return made

    return move_arrays


@dataclass(frozen=True)
class _Transfer:
    """Pieces of one tensor that ranks send each other for another tensor.

    Args:
        number: The number of the other tensor.
        source: The number of the tensor with the values.
        shape: Its shape.
        held: The block that each rank holds.
        pieces: The pieces, by the numbers of ranks.
        wire: Dtype in which pieces are sent: the smaller one.
    """

    number: int
    source: int
    shape: tuple[int, ...]
    held: Mapping[int, Index]
    pieces: Sequence[Piece[int]]
    wire: torch.dtype

    @classmethod
    def find(cls, number: int, place: int, array: torch.Tensor, like: torch.Tensor, move: Move) -> _Transfer:
        held, wanted = _index_ranks(array), _index_ranks(like)
        conversion = move.conversion
        blocks = {
            rank: [index] if conversion is None else conversion.list_blocks(index)[place]
            for rank, index in wanted.items()
        }
        wire = min(array.dtype, like.dtype, key=lambda each: each.itemsize)
        return cls(number, move.sources[place], tuple(array.shape), held, find_pieces(held, blocks), wire)

    @property
    def peak_bytes(self) -> int:
        """Most bytes that one rank sends or gets."""
        counts: dict[tuple[str, int], int] = {}
        for piece in self.pieces:
            for key in (("sent", piece.sender), ("received", piece.receiver)):
                counts[key] = counts.get(key, 0) + piece.num_elements * self.wire.itemsize
        return max(counts.values(), default=0)


def _index_ranks(tensor: torch.Tensor) -> dict[int, Index]:
    """Return the block of a tensor that each rank holds. Each process has its own unsharded tensors."""
    shape = tuple(tensor.shape)
    layout = get_layout(tensor)
    if layout is None:
        ranks = [0] if simulation.is_simulated() else range(simulation.get_world_size())
        return dict.fromkeys(ranks, make_full_index(shape))
    ranks = simulation.list_ranks(convert_layout(layout)[0])
    return {rank: layout.shard_slices(shape, place) for place, rank in enumerate(ranks)}


def _split_transfers(transfers: Sequence[_Transfer]) -> Iterator[list[_Transfer]]:
    """Yield the transfers in steps of bounded size, in one order on all ranks. Those for one tensor stay together."""
    step: list[_Transfer] = []
    total = 0
    for each in transfers:
        if step and total + each.peak_bytes > _STEP_BYTES and each.number != step[-1].number:
            yield step
            step, total = [], 0
        step.append(each)
        total += each.peak_bytes
    if step:
        yield step


def _exchange(transfers: Sequence[_Transfer], arrays: Tensors) -> list[Blocks]:
    """Return for each transfer the blocks that this process needs."""
    locals_ = [_get_pieces(arrays[each.source]) for each in transfers]
    found: list[Blocks] = [[] for _ in transfers]
    if simulation.is_simulated():
        for blocks, each, held in zip(found, transfers, locals_, strict=True):
            shards = {
                get_slice_ends(index): (index, held[rank].to(each.wire)) for rank, index in each.held.items()
            }
            blocks += shards.values()
        return found
    own, size = simulation.get_rank(), simulation.get_world_size()
    sent: list[list[torch.Tensor]] = [[] for _ in range(size)]
    expected: list[list[tuple[int, Piece[int]]]] = [[] for _ in range(size)]
    for number, (each, held) in enumerate(zip(transfers, locals_, strict=True)):
        for piece in each.pieces:
            if piece.sender == own == piece.receiver:
                found[number].append((piece.block, _cut_piece(each, piece, held)))
            elif piece.sender == own:
                sent[piece.receiver].append(_cut_piece(each, piece, held).reshape(-1).view(torch.uint8))
            elif piece.receiver == own:
                expected[piece.sender].append((number, piece))
    if all(piece.sender == piece.receiver for each in transfers for piece in each.pieces):
        return found
    device = next(iter(arrays)).device
    given = [sum(len(part) for part in parts) for parts in sent]
    taken = [sum(piece.num_elements * transfers[n].wire.itemsize for n, piece in each) for each in expected]
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    outgoing = torch.cat([empty, *(part for parts in sent for part in parts)])
    incoming = torch.empty(sum(taken), dtype=torch.uint8, device=device)
    dist.all_to_all_single(incoming, outgoing, taken, given, group=simulation.get_group())  # pyright: ignore[reportUnknownMemberType]
    del outgoing, sent
    begin = 0
    for number, piece in (pair for pairs in expected for pair in pairs):
        wire = transfers[number].wire
        end = begin + piece.num_elements * wire.itemsize
        # Copy, because a wider dtype needs aligned bytes.
        values = incoming[begin:end].clone().view(wire).reshape(compute_block_shape(piece.block))
        found[number].append((piece.block, values))
        begin = end
    return found


def _get_pieces(array: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the local tensor of each rank of this process."""
    if not isinstance(array, DTensor):
        return {0 if simulation.is_simulated() else simulation.get_rank(): array.detach()}
    refuse_outdated("values of a tensor", array)
    return simulation.get_pieces(get_local(array.detach()))


def _cut_piece(transfer: _Transfer, piece: Piece[int], held: Mapping[int, torch.Tensor]) -> torch.Tensor:
    inner = make_relative_index(piece.block, transfer.held[piece.sender])
    return held[piece.sender][inner].to(transfer.wire).contiguous()


def _make_tensor(
    layout: Layout | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    move: Move,
    parts: Sequence[tuple[_Transfer, Blocks]],
) -> torch.Tensor:
    """Return the new tensor of this process, made of the blocks of its sources."""

    def read(index: Index) -> torch.Tensor:
        if move.conversion is not None:
            readers = [_make_reader(*part) for part in parts]
            wire = to_numpy(torch.empty(0, dtype=parts[0][0].wire)).dtype
            return to_torch(move.conversion.fill(index, readers, wire)).to(dtype)
        made = torch.empty(compute_block_shape(index), dtype=dtype, device=device)
        for block, values in parts[0][1]:
            both = intersect_blocks(block, index)
            if both is not None:
                made[make_relative_index(both, index)] = values[make_relative_index(both, block)].to(dtype)
        return made

    if layout is None:
        return read(make_full_index(shape)).to(device)
    return from_blocks(shape, dtype, layout, read)


def _make_reader(transfer: _Transfer, blocks: Blocks) -> BlockReader:
    """Return a function that reads blocks of a source."""
    arrays = [(index, to_numpy(values)) for index, values in blocks]
    dtype = to_numpy(torch.empty(0, dtype=transfer.wire)).dtype
    return lambda index: assemble_blocks(arrays, transfer.shape, dtype, index)
