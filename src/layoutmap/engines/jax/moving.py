"""Move arrays to the devices and shardings of other arrays, with compiled programs that send only missing pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from layoutmap.core.blocks import Index, compute_block_shape, get_slice_ends, make_full_index, normalize_index
from layoutmap.core.collective_steps import CollectiveStep, find_collective_steps
from layoutmap.core.pieces import Move, Piece, find_pieces
from layoutmap.engines.jax.arrays import wait_on_cpu
from layoutmap.engines.jax.devices import Device
from layoutmap.engines.jax.programs import leave_program_context
from layoutmap.engines.jax.trees import find_memory

_DIM = "device"
_STACKED_BYTES = 1 << 20
"""The limit in bytes for stacking equal arrays, which copies them, so that one operation moves all."""

Arrays = Sequence[jax.Array]
Row = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A piece that a device receives: the sender's number, and the piece's start in both shards."""
Round = tuple[tuple[int, ...], tuple[tuple[int, Row], ...]]
"""A shape, and the piece of this shape for each receiver. No device sends or receives two."""


def make_mover(moves: Sequence[Move], arrays: Arrays, likes: Arrays) -> Callable[[Arrays], list[jax.Array]]:
    """Compile a function that moves arrays to the shardings and dtypes of others (see `Engine.make_mover`)."""
    targets = [_Target.read(like) for like in likes]
    computed = [
        k
        for k, move in enumerate(moves)
        if move.conversion is not None or _is_on_one_device(move, arrays, targets[k])
    ]
    conversions = _Conversions([moves[k] for k in computed], arrays, [targets[k] for k in computed])
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
            _Program(
                [
                    _Transfer.find(shardings[k], arrays[moves[k].sources[0]].dtype, targets[k], *devices)
                    for k in numbers
                ],
                *devices,
            ),
        )
        for devices, numbers in groups.items()
    ]

    def move_arrays(new: Arrays) -> list[jax.Array]:
        with leave_program_context():
            new = [_to_device_memory(wait_on_cpu(array)) for array in new]
            done = dict(zip(computed, conversions(new), strict=True))
            # JAX would replicate empty results, so create them directly.
            done |= {k: target.make_zeros() for k, target in enumerate(targets) if 0 in target.shape}
            for numbers, program in programs:
                given = [done[k] if k in done else new[moves[k].sources[0]] for k in numbers]
                done.update(zip(numbers, program(given), strict=True))
            return [target.finish(done[k]) for k, target in enumerate(targets)]

    return move_arrays


@dataclass(frozen=True)
class _Target:
    """The shape, dtype, and sharding of a new array. An uncommitted array remains uncommitted."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Sharding
    memory: str
    committed: bool

    @classmethod
    def read(cls, like: jax.Array) -> _Target:
        memory = find_memory(like)
        return cls(like.shape, like.dtype, _to_device_memory(like).sharding, memory, like.committed)

    def make_zeros(self) -> jax.Array:
        """Return an array of zeros."""
        zeros = np.zeros(self.shape, self.dtype)
        return jax.device_put(zeros, self.sharding) if self.committed else jnp.asarray(zeros)

    def finish(self, array: jax.Array) -> jax.Array:
        """Move an array to the mesh and memory of the target."""
        if self.committed and array.sharding != self.sharding:
            array = _make_array(self.shape, self.sharding, _list_shards(array), array.dtype)
        # JAX uncommits an array only by a copy through host memory
        elif array.committed and not self.committed:
            array = jnp.asarray(np.asarray(array))
        if not self.memory:
            return array
        return jax.device_put(array, self.sharding.with_memory_kind(self.memory))


def _to_device_memory(array: jax.Array) -> jax.Array:
    if not find_memory(array):
        return array
    kind = next(iter(array.sharding.device_set)).default_memory().kind
    return jax.device_put(array, array.sharding.with_memory_kind(kind))


def _sort_devices(sharding: Sharding) -> tuple[Device, ...]:
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def _is_on_one_device(move: Move, arrays: Arrays, target: _Target) -> bool:
    """Return whether both arrays are on the same single device, so that nothing must be sent."""
    sharding = arrays[move.sources[0]].sharding
    return len(sharding.device_set) == 1 and sharding.device_set == target.sharding.device_set


class _Conversions:
    """Compile all conversions into one program. Results for other devices stay on the source devices.

    Attributes:
        shardings: The sharding of each result that must still move; `None`: it is already in place.
    """

    def __init__(self, moves: Sequence[Move], arrays: Arrays, targets: Sequence[_Target]):
        self._moves, self._targets = moves, targets
        self.shardings: list[Sharding | None] = []
        wanted: list[Sharding | None] = []
        for move, target in zip(moves, targets, strict=True):
            is_here = arrays[move.sources[0]].sharding.device_set == target.sharding.device_set
            wanted.append(_replace_axis_types(target.sharding) if is_here and target.committed else None)
            self.shardings.append(None if is_here else target.sharding)
        self._program = jax.jit(self._compute, out_shardings=wanted)
        if any(each is not None for each in self.shardings):
            made = self._program.lower([_to_auto_axes(array) for array in arrays]).compile().output_shardings
            self.shardings = [
                None if kept is None else new for kept, new in zip(self.shardings, made, strict=True)
            ]

    def __call__(self, arrays: Arrays) -> list[jax.Array]:
        made = self._program([_to_auto_axes(array) for array in arrays]) if self._moves else []
        return [wait_on_cpu(array) for array in made]

    def _compute(self, arrays: Arrays) -> list[jax.Array]:
        # The trainer's next step may donate its array, so copy it.
        return [
            jnp.copy(
                arrays[move.sources[0]] if move.conversion is None else self._convert(move, arrays)
            ).astype(target.dtype)
            for move, target in zip(self._moves, self._targets, strict=True)
        ]

    def _convert(self, move: Move, arrays: Arrays) -> jax.Array:
        assert move.conversion is not None
        return move.conversion.compute(jnp, [arrays[number] for number in move.sources])


# JAX cannot slice and split sharded explicit axes, so use auto axes, where the compiler chooses layouts.
def _replace_axis_types(sharding: Sharding) -> Sharding:
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = jax.sharding.Mesh(np.asarray(sharding.mesh.devices), sharding.mesh.axis_names)
    return NamedSharding(mesh, sharding.spec)


def _to_auto_axes(array: jax.Array) -> jax.Array:
    if not isinstance(array.sharding, NamedSharding):
        return array
    return _make_array(array.shape, _replace_axis_types(array.sharding), _list_shards(array), array.dtype)


@dataclass(frozen=True)
class _Transfer:
    """The transfer of one array from its shards to those of its target. Equal transfers run together.

    Args:
        source_shape: Shape of the source shards.
        target_shape: Shape of the target shards.
        wire: Dtype in which pieces are sent, the smaller of both.
        dtype: Dtype of the result.
        steps: The collectives that move exactly the missing pieces, if there are such.
        rounds: Otherwise, the pieces, by round.
        target: The new array's shape, dtype, and sharding.
    """

    source_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    wire: np.dtype[Any]
    dtype: np.dtype[Any]
    steps: tuple[CollectiveStep, ...]
    rounds: tuple[Round, ...]
    target: _Target = field(compare=False)

    @classmethod
    def find(
        cls,
        sharding: Sharding,
        dtype: np.dtype[Any],
        target: _Target,
        senders: Sequence[Device],
        receivers: Sequence[Device],
    ) -> _Transfer:
        shape = target.shape
        held, wanted = _index_devices(sharding, shape), _index_devices(target.sharding, shape)
        pieces = find_pieces(held, {device: [index] for device, index in wanted.items()})
        numbers = (
            {device: n for n, device in enumerate(senders)},
            {device: n for n, device in enumerate(receivers)},
        )
        steps = None
        if senders == receivers and shape:
            stored_ends, wanted_ends = (
                [get_slice_ends(each[device]) for device in senders] for each in (held, wanted)
            )
            num_missing = sum(piece.num_elements for piece in pieces if piece.sender != piece.receiver)
            steps = find_collective_steps(stored_ends, wanted_ends, num_missing)
        return cls(
            sharding.shard_shape(shape),
            target.sharding.shard_shape(shape),
            min(dtype, target.dtype, key=lambda each: each.itemsize),
            target.dtype,
            steps or (),
            () if steps else _list_rounds(pieces, held, wanted, *numbers),
            target,
        )

    @property
    def stacked_bytes(self) -> int:
        """Bytes per device of each of the equal arrays."""
        return max(1, math.prod(self.source_shape) * self.wire.itemsize)


def _index_devices(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, Index]:
    found = sharding.devices_indices_map(shape)
    return {
        device: normalize_index(index or make_full_index(shape), shape) for device, index in found.items()
    }


def _list_rounds(
    pieces: Iterable[Piece[Device]],
    held: Mapping[Device, Index],
    wanted: Mapping[Device, Index],
    senders: Mapping[Device, int],
    receivers: Mapping[Device, int],
) -> tuple[Round, ...]:
    """Group the pieces into rounds of one shape, in which no device sends or receives two."""
    rounds: list[tuple[tuple[int, ...], bool, dict[int, Row]]] = []
    count = len(senders)

    def order(piece: Piece[Device]) -> tuple[int, int]:
        return (receivers[piece.receiver] - senders[piece.sender]) % count, senders[piece.sender]

    for piece in sorted(pieces, key=order):
        sender, receiver = senders[piece.sender], receivers[piece.receiver]
        shape, is_kept = compute_block_shape(piece.block), piece.sender == piece.receiver
        row = (
            sender,
            tuple(p.start - h.start for p, h in zip(piece.block, held[piece.sender], strict=True)),
            tuple(p.start - w.start for p, w in zip(piece.block, wanted[piece.receiver], strict=True)),
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


class _Program:
    """Compile transfers between two sets of devices."""

    def __init__(
        self, transfers: Sequence[_Transfer], senders: tuple[Device, ...], receivers: tuple[Device, ...]
    ):
        self._transfers = transfers
        self._classes = _group_equal(transfers)
        everyone = tuple(sorted({*senders, *receivers}, key=lambda device: device.id))
        self._meshes = tuple(
            jax.sharding.Mesh(np.array(each, object), (_DIM,)) for each in (senders, receivers, everyone)
        )
        self._numbers = tuple([everyone.index(device) for device in each] for each in (senders, receivers))
        ins = [_choose_spec(each.source_shape) for each in transfers]
        outs = [_choose_spec(each.target_shape) for each in transfers]
        slots = [[PartitionSpec(_DIM) for _ in transfers[first].rounds] for first, *_ in self._classes]
        self._is_local = senders == receivers
        if self._is_local:
            self._run = self._compile(
                lambda inputs: self._unpack(self._exchange(self._pack(inputs))), 0, ins, outs
            )
            return
        self._send = self._compile(self._pack, 0, ins, slots)
        self._move = self._compile(self._exchange, 2, slots, slots)
        self._receive = self._compile(self._unpack, 1, slots, outs)

    def __call__(self, arrays: Arrays) -> list[jax.Array]:
        given = [_stack_shards(array, self._meshes[0]) for array in arrays]
        made = self._run(given) if self._is_local else self._run_on_three_meshes(given)
        return [
            _make_array(
                each.target.shape, each.target.sharding, _list_shards(wait_on_cpu(array)), each.target.dtype
            )
            for each, array in zip(self._transfers, made, strict=True)
        ]

    def _run_on_three_meshes(self, given: Arrays) -> Arrays:
        """Run three programs: on the senders, on all devices, and on the receivers.

        A process runs only programs that have devices of its own.
        """
        sent = self._send(given) if _list_local_devices(self._meshes[0]) else None
        moved = self._move(self._change_mesh(sent, 2))
        if _list_local_devices(self._meshes[1]):
            return self._receive(self._change_mesh(moved, 1))
        return [
            _make_array(each.target.shape, each.target.sharding, [], each.target.dtype)
            for each in self._transfers
        ]

    def _compile(self, body: Callable[[Any], Any], mesh: int, ins: Any, outs: Any) -> Callable[[Any], Any]:
        mapped = jax.shard_map(
            body, mesh=self._meshes[mesh], in_specs=(ins,), out_specs=outs, check_vma=False
        )
        return jax.jit(mapped)

    def _pack(self, inputs: Arrays) -> list[list[jax.Array]]:
        """Return, for each class of equal transfers, the piece that this device sends in each round."""
        place, found = jax.lax.axis_index(_DIM), list[list[jax.Array]]()
        for first, *others in self._classes:
            transfer = self._transfers[first]
            stacked = _to_bits(jnp.stack([inputs[k] for k in (first, *others)]).astype(transfer.wire))
            found.append([stacked] if transfer.steps else [])
            for shape, rows in transfer.rounds:
                begins = np.zeros((self._meshes[0].size, len(shape)), np.int32)
                for _, (sender, begin, _) in rows:
                    begins[sender] = begin
                begin = [0, *jnp.asarray(begins)[place]]
                found[-1].append(jax.lax.dynamic_slice(stacked, begin, (len(stacked), *shape)))
        return found

    def _exchange(self, sent: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Return the pieces that this device receives. Rounds between the same devices are merged."""
        together: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for c, (first, *_) in enumerate(self._classes):
            transfer = self._transfers[first]
            for r, (_, rows) in enumerate(transfer.rounds):
                own, others = self._numbers
                pairs = tuple((own[sender], others[receiver]) for receiver, (sender, _, _) in rows)
                if any(sender != receiver for sender, receiver in pairs):
                    together.setdefault((pairs, transfer.wire), []).append((c, r))
        found = [
            [_take_steps(each[0], self._transfers[first].steps)] if self._transfers[first].steps else [*each]
            for each, (first, *_) in zip(sent, self._classes, strict=True)
        ]
        for (pairs, _), places in together.items():
            flat = [sent[c][r].reshape(-1) for c, r in places]
            moved = jax.lax.ppermute(jnp.concatenate(flat), _DIM, pairs)
            for (c, r), part in zip(
                places, jnp.split(moved, np.cumsum([len(each) for each in flat])[:-1]), strict=True
            ):
                found[c][r] = part.reshape(sent[c][r].shape)
        return found

    def _change_mesh(self, slots: list[list[jax.Array]] | None, number: int) -> list[list[jax.Array]]:
        """Move the pieces to another mesh. Devices without pieces get zeros."""
        mesh, local = self._meshes[number], _list_local_devices(self._meshes[number])
        shapes = [
            [(len(numbers), *shape) for shape, _ in self._transfers[numbers[0]].rounds]
            for numbers in self._classes
        ]
        dtypes = [_choose_bits_dtype(self._transfers[numbers[0]].wire) for numbers in self._classes]
        held: dict[tuple[int, int, Device], jax.Array] = {
            (c, r, shard.device): shard.data
            for c, row in enumerate(slots or [])
            for r, slot in enumerate(row)
            for shard in wait_on_cpu(slot).addressable_shards
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
                _make_array(
                    (mesh.size * shape[0], *shape[1:]), sharding, [held[c, r, d] for d in local], dtypes[c]
                )
                for r, shape in enumerate(row)
            ]
            for c, row in enumerate(shapes)
        ]

    def _unpack(self, received: list[list[jax.Array]]) -> list[jax.Array]:
        """Assemble this device's shard of each array from the received pieces."""
        place, found = jax.lax.axis_index(_DIM), dict[int, jax.Array]()
        for numbers, slots in zip(self._classes, received, strict=True):
            transfer = self._transfers[numbers[0]]
            made = (
                slots[0]
                if transfer.steps
                else _to_bits(jnp.zeros((len(numbers), *transfer.target_shape), transfer.wire))
            )
            for (shape, rows), piece in zip(transfer.rounds, slots, strict=bool(transfer.rounds)):
                if shape == transfer.target_shape and len(rows) == self._meshes[1].size:
                    made = piece
                    break
                begins = np.zeros((self._meshes[1].size, len(transfer.target_shape)), np.int32)
                for receiver, (_, _, begin) in rows:
                    begins[receiver] = begin
                begin = [0, *jnp.asarray(begins)[place]]
                if len(rows) < self._meshes[1].size:
                    gets = np.isin(np.arange(self._meshes[1].size), [receiver for receiver, _ in rows])
                    piece = jnp.where(
                        jnp.asarray(gets)[place], piece, jax.lax.dynamic_slice(made, begin, piece.shape)
                    )
                made = jax.lax.dynamic_update_slice(made, piece, begin)
            made = jax.lax.bitcast_convert_type(made, transfer.wire).astype(transfer.dtype)
            found.update(zip(numbers, made, strict=True))
        return [found[k] for k in range(len(self._transfers))]


def _take_steps(stacked: jax.Array, steps: Sequence[CollectiveStep]) -> jax.Array:
    """Return the shards of stacked arrays after these steps. Axis 0 is that of the stack."""
    for step in steps:
        if step.grown_axis is None:
            assert step.shrunk_axis is not None
            start = jnp.asarray(step.starts)[jax.lax.axis_index(_DIM)]
            stacked = jax.lax.dynamic_slice_in_dim(stacked, start, step.size, step.shrunk_axis + 1)
            continue
        groups, size = [*map(list, step.groups)], len(step.groups[0])
        # XLA is slower if it exchanges parts of other axes than the first one.
        if step.shrunk_axis is None:
            parts = jax.lax.all_gather(stacked, _DIM, axis_index_groups=groups)
        else:
            axis = step.shrunk_axis + 1
            shape = (*stacked.shape[:axis], size, -1, *stacked.shape[axis + 1 :])
            parts = jnp.moveaxis(stacked.reshape(shape), axis, 0)
            parts = jax.lax.all_to_all(parts, _DIM, 0, 0, tiled=True, axis_index_groups=groups)
        axis = step.grown_axis + 1
        shape = (*parts.shape[1 : axis + 1], -1, *parts.shape[axis + 2 :])
        stacked = jnp.moveaxis(parts, 0, axis).reshape(shape)
    return stacked


def _group_equal(transfers: Sequence[_Transfer]) -> list[list[int]]:
    """Group the numbers of equal transfers, with bounded size."""
    groups: list[list[int]] = []
    open_groups: dict[_Transfer, list[int]] = {}
    for number, each in enumerate(transfers):
        group = open_groups.get(each)
        if group is None or (len(group) + 1) * each.stacked_bytes > _STACKED_BYTES:
            groups.append(group := [])
            open_groups[each] = group
        group.append(number)
    return groups


# On CPUs, XLA widens 16-bit floats to 32 bits in collectives, so send their bits as integers.
def _to_bits(array: jax.Array) -> jax.Array:
    """Reinterpret narrow floats as integers, and return other arrays unchanged."""
    dtype = _choose_bits_dtype(array.dtype)
    return array if dtype == array.dtype else jax.lax.bitcast_convert_type(array, dtype)


def _choose_bits_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits in (8, 16)
    return np.dtype(f"uint{8 * dtype.itemsize}") if is_narrow else dtype


def _list_local_devices(mesh: jax.sharding.Mesh) -> list[Device]:
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


def _choose_spec(shape: tuple[int, ...]) -> PartitionSpec:
    """Return the spec of an array that joins the shards of all devices along its first axis."""
    return PartitionSpec(_DIM) if shape else PartitionSpec()


def _stack_shards(array: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
    """Join the shards of an array along its first axis, without a copy."""
    shards, shape = _list_shards(array), array.sharding.shard_shape(array.shape)
    whole = (mesh.size * shape[0], *shape[1:]) if shape else ()
    return _make_array(whole, NamedSharding(mesh, _choose_spec(shape)), shards, array.dtype)


def _list_shards(array: jax.Array) -> list[jax.Array]:
    return [shard.data for shard in array.addressable_shards]


def _make_array(
    shape: tuple[int, ...], sharding: Sharding, shards: Sequence[jax.Array], dtype: np.dtype[Any]
) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards), dtype=dtype)
