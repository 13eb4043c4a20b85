"""Move arrays to new devices and shardings, with compiled programs that send each device only blocks that it lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from layoutmap.core.blocks import (
    Index,
    compute_block_shape,
    get_starts_and_stops,
    make_full_index,
    normalize_index,
)
from layoutmap.core.collective_steps import CollectiveSteps, PermuteStep, SliceStep, find_collective_steps
from layoutmap.core.pieces import ArrayMove, BlockTransfer, find_block_transfers
from layoutmap.engines.jax.arrays import wait_for_computation_on_cpu
from layoutmap.engines.jax.devices import Device
from layoutmap.engines.jax.programs import suspend_jax_context
from layoutmap.engines.jax.trees import find_memory_kind

_DIM = "device"
_MAX_STACKED_BYTES = 1 << 18
"""The largest size of a stack of equal arrays. One operation moves a whole stack, but stacking copies the arrays."""

Arrays = Sequence[jax.Array]
ReceivedBlock = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A block that a device receives: the sender's position, and the block's start in the sender's and the new shard."""
TransferRound = tuple[tuple[int, ...], tuple[tuple[int, ReceivedBlock], ...]]
"""The shape of a round's blocks, and pairs: a receiver's position, and the block of this shape that it receives."""


def make_array_mover(
    moves: Sequence[ArrayMove], arrays: Arrays, templates: Arrays
) -> Callable[[Arrays], Arrays]:
    """Compile a function that moves arrays to the shardings and dtypes of `templates` (see `ArrayMoverFactory`)."""
    targets = [_TargetArray.from_array(like) for like in templates]
    computed = [
        k
        for k, move in enumerate(moves)
        if move.conversion is not None or _is_on_one_device(move, arrays, targets[k])
    ]
    conversions = _ConversionProgram([moves[k] for k in computed], arrays, [targets[k] for k in computed])
    groups: dict[tuple[tuple[Device, ...], tuple[Device, ...]], list[int]] = {}
    shardings: dict[int, Sharding] = {}
    for k, move in enumerate(moves):
        found = (
            conversions.shardings[computed.index(k)] if k in computed else arrays[move.sources[0]].sharding
        )
        if found is not None and 0 not in targets[k].shape:
            shardings[k] = found
            groups.setdefault((_sort_devices(found), _sort_devices(targets[k].sharding)), []).append(k)
    programs = [
        (
            numbers,
            _TransferProgram(
                [
                    _Transfer.make_transfer(
                        shardings[k], arrays[moves[k].sources[0]].dtype, targets[k], *devices
                    )
                    for k in numbers
                ],
                [shardings[k] for k in numbers],
                *devices,
            ),
        )
        for devices, numbers in groups.items()
    ]

    def move_to_targets(sources: Arrays) -> list[jax.Array]:
        with suspend_jax_context():
            sources = [_move_to_device_memory(wait_for_computation_on_cpu(array)) for array in sources]
            done = dict(zip(computed, conversions(sources), strict=True))
            # JAX would replicate empty results, so create them directly.
            done |= {k: target.make_zeros() for k, target in enumerate(targets) if 0 in target.shape}
            for numbers, program in programs:
                given = [done[k] if k in done else sources[moves[k].sources[0]] for k in numbers]
                done.update(zip(numbers, program(given), strict=True))
            return [target.move_to_target(done[k]) for k, target in enumerate(targets)]

    return move_to_targets


@dataclass(frozen=True)
class _TargetArray:
    """The shape, dtype, sharding, and memory of a new array, and whether it is committed to its devices."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Sharding
    memory: str
    committed: bool

    @classmethod
    def from_array(cls, array: jax.Array) -> _TargetArray:
        """Return the target for a new array with the shape, dtype, sharding, and memory of `array`."""
        memory = find_memory_kind(array)
        return cls(array.shape, array.dtype, _move_to_device_memory(array).sharding, memory, array.committed)

    def make_zeros(self) -> jax.Array:
        """Return zeros with the shape, dtype, and sharding of the target, in device memory."""
        zeros = np.zeros(self.shape, self.dtype)
        return jax.device_put(zeros, self.sharding) if self.committed else jnp.asarray(zeros)

    def move_to_target(self, array: jax.Array) -> jax.Array:
        """Return an array moved to the sharding and memory of the target."""
        if self.committed and array.sharding != self.sharding:
            array = _join_shards(self.shape, self.sharding, _list_shards(array), array.dtype)
        # JAX cannot uncommit an array on devices, so copy it through host memory.
        elif array.committed and not self.committed:
            array = jnp.asarray(np.asarray(array))
        if not self.memory:
            return array
        return jax.device_put(array, self.sharding.with_memory_kind(self.memory))


def _move_to_device_memory(array: jax.Array) -> jax.Array:
    if not find_memory_kind(array):
        return array
    kind = next(iter(array.sharding.device_set)).default_memory().kind
    return jax.device_put(array, array.sharding.with_memory_kind(kind))


def _sort_devices(sharding: Sharding) -> tuple[Device, ...]:
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def _is_on_one_device(move: ArrayMove, arrays: Arrays, target: _TargetArray) -> bool:
    """Return whether the source and the target of a move are on the same single device, so that nothing is sent."""
    sharding = arrays[move.sources[0]].sharding
    return len(sharding.device_set) == 1 and sharding.device_set == target.sharding.device_set


class _ConversionProgram:
    """Convert arrays in one program. A result for other devices stays on its source devices until it is transferred.

    Attributes:
        shardings: The sharding of each result that must still move to its target's devices; `None`: it is there.
    """

    def __init__(self, moves: Sequence[ArrayMove], arrays: Arrays, targets: Sequence[_TargetArray]):
        self._moves, self._targets = moves, targets
        self.shardings: list[Sharding | None] = []
        wanted: list[Sharding | None] = []
        for move, target in zip(moves, targets, strict=True):
            is_here = arrays[move.sources[0]].sharding.device_set == target.sharding.device_set
            wanted.append(_make_auto_sharding(target.sharding) if is_here and target.committed else None)
            self.shardings.append(None if is_here else target.sharding)
        self._program = jax.jit(self._copy_and_convert_arrays, out_shardings=wanted)
        if any(each is not None for each in self.shardings):
            lowered = self._program.lower(list(map(_move_to_auto_axes, arrays)))
            self.shardings = [
                None if kept is None else new
                for kept, new in zip(self.shardings, lowered.compile().output_shardings, strict=True)
            ]

    def __call__(self, arrays: Arrays) -> list[jax.Array]:
        made = self._program([_move_to_auto_axes(array) for array in arrays]) if self._moves else []
        return [wait_for_computation_on_cpu(array) for array in made]

    def _copy_and_convert_arrays(self, arrays: Arrays) -> list[jax.Array]:
        # The next training step may donate the source arrays, so copy even arrays that need no conversion.
        return [
            jnp.copy(
                arrays[move.sources[0]]
                if move.conversion is None
                else move.conversion.compute_array(jnp, [arrays[k] for k in move.sources])
            ).astype(target.dtype)
            for move, target in zip(self._moves, self._targets, strict=True)
        ]


# JAX cannot slice and split a sharded axis if it is explicit, so use auto axes, where the compiler chooses layouts.
def _make_auto_sharding(sharding: Sharding) -> Sharding:
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = jax.sharding.Mesh(np.asarray(sharding.mesh.devices), sharding.mesh.axis_names)
    return NamedSharding(mesh, sharding.spec)


def _move_to_auto_axes(array: jax.Array) -> jax.Array:
    if not isinstance(array.sharding, NamedSharding):
        return array
    return _join_shards(array.shape, _make_auto_sharding(array.sharding), _list_shards(array), array.dtype)


@dataclass(frozen=True)
class _Transfer:
    """The transfer of an array's blocks to the shards of its target. Equal transfers run together.

    Args:
        source_shape: Shape of the source shards.
        target_shape: Shape of the target shards.
        sent_dtype: Dtype in which blocks are sent: the smaller one of the source's and the target's.
        dtype: Dtype of the result.
        steps: The collectives that send exactly the missing blocks; `None`: no collectives do.
        rounds: The blocks to send, by round, if `steps` is `None`.
        target: The new array's shape, dtype, and sharding.
    """

    source_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    sent_dtype: np.dtype[Any]
    dtype: np.dtype[Any]
    steps: CollectiveSteps | None
    rounds: tuple[TransferRound, ...]
    target: _TargetArray = field(compare=False)

    @classmethod
    def make_transfer(
        cls,
        sharding: Sharding,
        source_dtype: np.dtype[Any],
        target: _TargetArray,
        senders: Sequence[Device],
        receivers: Sequence[Device],
    ) -> _Transfer:
        """Return the transfer of an array from a sharding to a target, by collectives if possible, else in rounds."""
        shape = target.shape
        source_indices = _map_devices_to_indices(sharding, shape)
        target_indices = _map_devices_to_indices(target.sharding, shape)
        pieces = find_block_transfers(source_indices, {d: [index] for d, index in target_indices.items()})
        numbers = (
            {device: n for n, device in enumerate(senders)},
            {device: n for n, device in enumerate(receivers)},
        )
        steps = None
        if senders == receivers and shape:  # collectives need equal devices, and an axis, which scalars lack
            stored_ends, wanted_ends = (
                [get_starts_and_stops(each[device]) for device in senders]
                for each in (source_indices, target_indices)
            )
            num_missing = sum(piece.num_elements for piece in pieces if piece.sender != piece.receiver)
            steps = find_collective_steps(stored_ends, wanted_ends, num_missing)
        return cls(
            sharding.shard_shape(shape),
            target.sharding.shard_shape(shape),
            min(source_dtype, target.dtype, key=lambda each: each.itemsize),
            target.dtype,
            steps,
            ()
            if steps is not None
            else _group_block_transfers_into_rounds(pieces, source_indices, target_indices, *numbers),
            target,
        )

    @property
    def stacked_bytes(self) -> int:
        """Bytes that one transfer adds to a stack of equal transfers on each device."""
        return max(1, math.prod(self.source_shape) * self.sent_dtype.itemsize)


def _map_devices_to_indices(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, Index]:
    found = sharding.devices_indices_map(shape)
    return {
        device: normalize_index(index or make_full_index(shape), shape) for device, index in found.items()
    }


def _group_block_transfers_into_rounds(
    blocks: Iterable[BlockTransfer[Device]],
    source_indices: Mapping[Device, Index],
    target_indices: Mapping[Device, Index],
    senders: Mapping[Device, int],
    receivers: Mapping[Device, int],
) -> tuple[TransferRound, ...]:
    """Group blocks into rounds. In a round, all blocks have one shape, and no device sends or receives two."""
    rounds: list[tuple[tuple[int, ...], bool, dict[int, ReceivedBlock]]] = []
    count = len(senders)

    def compute_sort_key(piece: BlockTransfer[Device]) -> tuple[int, int]:
        return (receivers[piece.receiver] - senders[piece.sender]) % count, senders[piece.sender]

    for piece in sorted(blocks, key=compute_sort_key):
        sender, receiver = senders[piece.sender], receivers[piece.receiver]
        shape, is_kept = compute_block_shape(piece.block), piece.sender == piece.receiver
        row = (
            sender,
            tuple(p.start - h.start for p, h in zip(piece.block, source_indices[piece.sender], strict=True)),
            tuple(
                p.start - t.start for p, t in zip(piece.block, target_indices[piece.receiver], strict=True)
            ),
        )
        for other, kept, rows in rounds:
            if (
                (other, kept) == (shape, is_kept)
                and receiver not in rows
                and all(r[0] != sender for r in rows.values())
            ):
                rows[receiver] = row
                break
        else:
            rounds.append((shape, is_kept, {receiver: row}))
    return tuple((shape, tuple(sorted(rows.items()))) for shape, _, rows in rounds)


class _TransferProgram:
    """Compile and run transfers of arrays from the devices `senders` to the devices `receivers`.

    Args:
        transfers: The transfer of each array.
        shardings: The sharding of each array before its transfer.
        senders: The devices of all these shardings, by id.
        receivers: The devices of all targets, by id.
    """

    def __init__(
        self,
        transfers: Sequence[_Transfer],
        shardings: Sequence[Sharding],
        senders: tuple[Device, ...],
        receivers: tuple[Device, ...],
    ):
        self._transfers = transfers
        self._groups = _group_equal_transfers(transfers)
        everyone = tuple(sorted({*senders, *receivers}, key=lambda device: device.id))
        self._meshes = tuple(
            jax.sharding.Mesh(np.array(each, object), (_DIM,)) for each in (senders, receivers, everyone)
        )
        self._numbers = tuple([everyone.index(device) for device in each] for each in (senders, receivers))
        ins = [_make_stacked_spec(each.source_shape) for each in transfers]
        outs = [_make_stacked_spec(each.target_shape) for each in transfers]
        slots = [[PartitionSpec(_DIM) for _ in transfers[first].rounds] for first, *_ in self._groups]
        self._is_local = senders == receivers
        self._takes_arrays = False
        if self._is_local:
            run = self._map_over_mesh(
                lambda inputs: self._join_blocks(
                    self._exchange_blocks_of_transfers(self._slice_blocks(inputs))
                ),
                0,
                ins,
                outs,
            )
            wanted = [each.target.sharding for each in transfers]
            # JAX compiles arrays of one program only for one order of devices, and not for meshes with explicit axes.
            self._takes_arrays = all(_has_device_order(each, senders) for each in (*shardings, *wanted))
            self._run = _compile_for_arrays(run, shardings, wanted) if self._takes_arrays else jax.jit(run)
            return
        self._send = jax.jit(self._map_over_mesh(self._slice_blocks, 0, ins, slots))
        self._move = jax.jit(self._map_over_mesh(self._exchange_blocks_of_transfers, 2, slots, slots))
        self._receive = jax.jit(self._map_over_mesh(self._join_blocks, 1, slots, outs))

    def __call__(self, arrays: Arrays) -> list[jax.Array]:
        if self._takes_arrays:
            return [wait_for_computation_on_cpu(array) for array in self._run(arrays)]
        given = [_stack_shards(array, self._meshes[0]) for array in arrays]
        made = self._run(given) if self._is_local else self._send_exchange_and_receive(given)
        return [
            _join_shards(
                each.target.shape,
                each.target.sharding,
                _list_shards(wait_for_computation_on_cpu(array)),
                each.target.dtype,
            )
            for each, array in zip(self._transfers, made, strict=True)
        ]

    def _send_exchange_and_receive(self, stacked: Arrays) -> Arrays:
        """Run three programs, on the senders, on all devices, and on the receivers, and return the received shards.

        A process runs only the programs of meshes that contain a device of this process.
        """
        sent = self._send(stacked) if _list_local_devices(self._meshes[0]) else None
        moved = self._move(self._move_to_mesh(sent, 2))
        if _list_local_devices(self._meshes[1]):
            return self._receive(self._move_to_mesh(moved, 1))
        return [
            _join_shards(each.target.shape, each.target.sharding, [], each.target.dtype)
            for each in self._transfers
        ]

    def _map_over_mesh(
        self, body: Callable[[Any], Any], mesh_index: int, in_specs: Any, out_specs: Any
    ) -> Callable[[Any], Any]:
        return jax.shard_map(
            body, mesh=self._meshes[mesh_index], in_specs=(in_specs,), out_specs=out_specs, check_vma=False
        )

    def _slice_blocks(self, shards: Arrays) -> list[list[jax.Array]]:
        """Return, for each group of equal transfers, the blocks that this device sends, one for each round.

        Each block is stacked over the transfers of the group. If collectives move the group, the list begins with this
        device's whole stacked shards.
        """
        place, found = jax.lax.axis_index(_DIM), list[list[jax.Array]]()
        for first, *others in self._groups:
            transfer = self._transfers[first]
            stacked = _view_small_floats_as_integers(
                jnp.stack([shards[k] for k in (first, *others)]).astype(transfer.sent_dtype)
            )
            found.append([] if transfer.steps is None else [stacked])
            for shape, rows in transfer.rounds:
                begins = np.zeros((self._meshes[0].size, len(shape)), np.int32)
                for _, (sender, begin, _) in rows:
                    begins[sender] = begin
                begin = [0, *jnp.asarray(begins)[place]]
                found[-1].append(jax.lax.dynamic_slice(stacked, begin, (len(stacked), *shape)))
        return found

    def _exchange_blocks_of_transfers(self, sent: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Exchange blocks, and return blocks that this device receives. Rounds of the same devices run together."""
        together: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for c, (first, *_) in enumerate(self._groups):
            transfer = self._transfers[first]
            for r, (_, rows) in enumerate(transfer.rounds):
                own, others = self._numbers
                pairs = tuple((own[sender], others[receiver]) for receiver, (sender, _, _) in rows)
                if any(sender != receiver for sender, receiver in pairs):
                    together.setdefault((pairs, transfer.sent_dtype), []).append((c, r))
        found = [[*each] for each in sent]
        for each, (first, *_) in zip(found, self._groups, strict=True):
            transfer = self._transfers[first]
            if transfer.steps is not None:
                each[0] = _run_collective_steps(each[0], transfer.steps, transfer.target_shape)
        for (pairs, _), places in together.items():
            flat = [sent[c][r].reshape(-1) for c, r in places]
            moved = jax.lax.ppermute(jnp.concatenate(flat), _DIM, pairs)
            for (c, r), part in zip(
                places, jnp.split(moved, np.cumsum([len(each) for each in flat])[:-1]), strict=True
            ):
                found[c][r] = part.reshape(sent[c][r].shape)
        return found

    def _move_to_mesh(self, blocks: list[list[jax.Array]] | None, mesh_index: int) -> list[list[jax.Array]]:
        """Return blocks as arrays on the mesh at `mesh_index`, without sending any. Missing blocks become zeros."""
        mesh, local = self._meshes[mesh_index], _list_local_devices(self._meshes[mesh_index])
        shapes = [
            [(len(numbers), *shape) for shape, _ in self._transfers[numbers[0]].rounds]
            for numbers in self._groups
        ]
        dtypes = [
            _choose_dtype_for_sending(self._transfers[numbers[0]].sent_dtype) for numbers in self._groups
        ]
        held: dict[tuple[int, int, Device], jax.Array] = {
            (c, r, shard.device): shard.data
            for c, row in enumerate(blocks or [])
            for r, slot in enumerate(row)
            for shard in wait_for_computation_on_cpu(slot).addressable_shards
        }
        places = [(c, r, device) for c, row in enumerate(shapes) for r in range(len(row)) for device in local]
        missing = [place for place in places if place not in held]
        zeros = [np.zeros(shapes[c][r], dtypes[c]) for c, r, _ in missing]
        held.update(
            zip(missing, jax.device_put(zeros, [SingleDeviceSharding(d) for *_, d in missing]), strict=True)
        )
        sharding = NamedSharding(mesh, PartitionSpec(_DIM))
        return [
            [
                _join_shards(
                    (mesh.size * shape[0], *shape[1:]), sharding, [held[c, r, d] for d in local], dtypes[c]
                )
                for r, shape in enumerate(row)
            ]
            for c, row in enumerate(shapes)
        ]

    def _join_blocks(self, received: list[list[jax.Array]]) -> list[jax.Array]:
        """Return this device's shard of each array, assembled from the received blocks."""
        found = dict[int, jax.Array]()
        for numbers, blocks in zip(self._groups, received, strict=True):
            transfer = self._transfers[numbers[0]]
            made = (
                self._assemble_received_blocks(transfer, len(numbers), blocks)
                if transfer.steps is None
                else blocks[0]
            )
            made = jax.lax.bitcast_convert_type(made, transfer.sent_dtype).astype(transfer.dtype)
            found.update(zip(numbers, made, strict=True))
        return [found[k] for k in range(len(self._transfers))]

    def _assemble_received_blocks(self, transfer: _Transfer, num_arrays: int, blocks: Arrays) -> jax.Array:
        """Return this device's shards of stacked arrays, assembled from the blocks that it got in each round."""
        num_devices, place = self._meshes[1].size, jax.lax.axis_index(_DIM)
        made = _view_small_floats_as_integers(
            jnp.zeros((num_arrays, *transfer.target_shape), transfer.sent_dtype)
        )
        for (shape, rows), piece in zip(transfer.rounds, blocks, strict=True):
            if shape == transfer.target_shape and len(rows) == num_devices:
                return piece
            begins = np.zeros((num_devices, len(transfer.target_shape)), np.int32)
            for receiver, (_, _, begin) in rows:
                begins[receiver] = begin
            begin = [0, *jnp.asarray(begins)[place]]
            if len(rows) < num_devices:
                gets = np.isin(np.arange(num_devices), [receiver for receiver, _ in rows])
                old = jax.lax.dynamic_slice(made, begin, piece.shape)
                piece = jnp.where(jnp.asarray(gets)[place], piece, old)
            made = jax.lax.dynamic_update_slice(made, piece, begin)
        return made


def _run_collective_steps(stacked: jax.Array, found: CollectiveSteps, shape: tuple[int, ...]) -> jax.Array:
    """Return the shards of stacked arrays after steps, reshaped to `shape`. Axis 0 counts the arrays of the stack."""
    device, stack = jax.lax.axis_index(_DIM), len(stacked)
    local = list(found.shape)
    for step in found.steps:
        stacked = stacked.reshape(stack, *local)
        if isinstance(step, PermuteStep):
            stacked = jax.lax.ppermute(stacked, _DIM, step.pairs)
            continue
        if isinstance(step, SliceStep):
            starts = np.zeros((len(step.kept), 1 + len(local)), np.int32)
            starts[:, [1 + n for n in step.factors]] = step.kept
            for n in step.factors:
                local[n] = 1
            stacked = jax.lax.dynamic_slice(stacked, [*jnp.asarray(starts)[device]], (stack, *local))
            continue
        groups = [*map(list, step.groups)]
        # XLA exchanges parts of the first axis fastest, so move what is split to the front, and move it back below.
        if step.split:
            for n in step.split:
                local[n] = 1
            parts = jnp.moveaxis(stacked, [1 + n for n in step.split], range(len(step.split)))
            parts = parts.reshape(len(groups[0]), stack, *local)
            if step.parts:
                parts = jnp.take(parts, jnp.asarray(step.parts)[device], axis=0)
            parts = jax.lax.all_to_all(parts, _DIM, 0, 0, tiled=True, axis_index_groups=groups)
        else:
            parts = jax.lax.all_gather(stacked, _DIM, axis_index_groups=groups)
        num_joined = len(step.joined)
        parts = parts.reshape(*(found.lengths[n] for n in step.joined), stack, *local)
        order = [num_joined]
        for n, axis in enumerate(range(num_joined + 1, parts.ndim)):
            order += [step.joined.index(n), axis] if n in step.joined else [axis]
        stacked = parts.transpose(order)
        for n in step.joined:
            local[n] = found.lengths[n]
    return stacked.reshape(stack, *shape)


def _group_equal_transfers(transfers: Sequence[_Transfer]) -> list[list[int]]:
    """Return positions of equal transfers in groups. A group of several has at most `_MAX_STACKED_BYTES` per device."""
    groups: list[list[int]] = []
    open_groups: dict[_Transfer, list[int]] = {}
    for number, each in enumerate(transfers):
        group = open_groups.get(each)
        if group is None or (len(group) + 1) * each.stacked_bytes > _MAX_STACKED_BYTES:
            groups.append(group := [])
            open_groups[each] = group
        group.append(number)
    return groups


# On CPUs, XLA widens 16-bit floats to 32 bits in collectives, so send their bits as integers.
def _view_small_floats_as_integers(array: jax.Array) -> jax.Array:
    """Reinterpret floats of 8 or 16 bits as unsigned integers, and return other arrays unchanged."""
    dtype = _choose_dtype_for_sending(array.dtype)
    return array if dtype == array.dtype else jax.lax.bitcast_convert_type(array, dtype)


def _choose_dtype_for_sending(dtype: np.dtype[Any]) -> np.dtype[Any]:
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits in (8, 16)
    return np.dtype(f"uint{8 * dtype.itemsize}") if is_narrow else dtype


def _list_local_devices(mesh: jax.sharding.Mesh) -> list[Device]:
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


def _make_stacked_spec(shape: tuple[int, ...]) -> PartitionSpec:
    """Return the spec of an array that joins all devices' shards of a shape along axis 0. Scalars are not joined."""
    return PartitionSpec(_DIM) if shape else PartitionSpec()


def _has_device_order(sharding: Sharding, devices: tuple[Device, ...]) -> bool:
    """Return whether a sharding is on a mesh of these devices in this order, and the mesh has only auto axes."""
    return (
        isinstance(sharding, NamedSharding)
        and isinstance(sharding.mesh, jax.sharding.Mesh)
        and tuple(sharding.mesh.devices.flat) == devices
        and all(each is jax.sharding.AxisType.Auto for each in sharding.mesh.axis_types)
    )


def _compile_for_arrays(
    run: Callable[[Any], Any], shardings: Sequence[Any], wanted: Sequence[Any]
) -> Callable[[Any], Any]:
    """Compile a function of stacked shards for arrays in their own shardings. So Python need not stack the shards."""

    def reinterpret_shards(array: jax.Array, sharding: NamedSharding, *, stack: bool) -> jax.Array:
        specs = [sharding.spec, PartitionSpec(sharding.mesh.axis_names) if array.ndim else PartitionSpec()]
        old, new = specs if stack else reversed(specs)
        return jax.shard_map(
            lambda shard: shard, mesh=sharding.mesh, in_specs=(old,), out_specs=new, check_vma=False
        )(array)

    def run_on_arrays(arrays: Arrays) -> list[jax.Array]:
        stacked = [reinterpret_shards(*each, stack=True) for each in zip(arrays, shardings, strict=True)]
        return [reinterpret_shards(*each, stack=False) for each in zip(run(stacked), wanted, strict=True)]

    return jax.jit(run_on_arrays, out_shardings=list(wanted))


def _stack_shards(array: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
    """Return an array that joins the shards of `array` along its first axis, without a copy."""
    shards, shape = _list_shards(array), array.sharding.shard_shape(array.shape)
    whole = (mesh.size * shape[0], *shape[1:]) if shape else ()
    return _join_shards(whole, NamedSharding(mesh, _make_stacked_spec(shape)), shards, array.dtype)


def _list_shards(array: jax.Array) -> list[jax.Array]:
    return [shard.data for shard in array.addressable_shards]


def _join_shards(
    shape: tuple[int, ...], sharding: Sharding, shards: Sequence[jax.Array], dtype: np.dtype[Any]
) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards), dtype=dtype)
