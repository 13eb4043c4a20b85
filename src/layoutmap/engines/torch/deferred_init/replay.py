"""Compute deferred values by replaying the recorded operations.

`replay_operations` returns global tensors. It runs the operations on which they depend, in order, on real memory, and
frees each memory as soon as no later operation needs it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch

from layoutmap.engines.torch.deferred_init.operations import OVERWRITING
from layoutmap.engines.torch.deferred_init.spans import ElementSpan
from layoutmap.engines.torch.deferred_init.steps import (
    DeferredMemory,
    DeferredView,
    RecordedConstant,
    RecordedOperation,
)
from layoutmap.engines.torch.deferred_init.streams import find_generator_overload, find_random_fill
from layoutmap.engines.torch.deferred_init.tiles import TiledRandomReader
from layoutmap.engines.torch.operators import Args, Kwargs
from layoutmap.engines.torch.trees import tree_leaves, tree_map

Storages = dict[DeferredMemory, torch.UntypedStorage]


def _is_memory_overwritten(operation: RecordedOperation, memory: DeferredMemory) -> bool:
    """Return whether an operation overwrites all values of a memory without reading them."""
    if operation.op.overloadpacket not in OVERWRITING or not operation.writes[0].is_whole_memory:
        return False
    return sum(view.memory is memory for view in operation.iterate_deferred_inputs()) == 1


def replay_operations(
    operations: Sequence[RecordedOperation], views: Sequence[DeferredView], end_number: int
) -> list[torch.Tensor]:
    """Replay recorded operations, and return unsharded tensors with their values before operation `end_number`."""
    indices = find_needed_operation_numbers(operations, {view.memory for view in views}, end_number)
    last_use = {view.memory: index for index in indices for view in _list_operation_views(operations[index])}
    kept = {view.memory for view in views}
    storages: Storages = {}
    with torch.no_grad():
        for index in indices:
            _replay_operation(operations[index], storages)
            for memory in {view.memory for view in _list_operation_views(operations[index])}:
                if last_use[memory] == index and memory not in kept:
                    storages.pop(memory, None)  # no later operation reads this storage, so free it
        return [view.make_tensor(_get_or_create_storage(view.memory, storages)) for view in views]


def _list_operation_views(operation: RecordedOperation) -> list[DeferredView]:
    return [*operation.iterate_deferred_inputs(), *(view for view in operation.results if view is not None)]


def find_needed_operation_numbers(
    operations: Sequence[RecordedOperation], memories: set[DeferredMemory], end_number: int
) -> list[int]:
    """Return, in order, the numbers of the operations before `end_number` that determine the values of `memories`."""
    found: set[int] = set()
    seen: set[tuple[DeferredMemory, int]] = set()
    todo = [(memory, end_number) for memory in memories]
    while todo:
        memory, end = todo.pop()
        place = bisect.bisect_left(memory.writes, end) - 1
        if place < 0 or (memory, memory.writes[place]) in seen:
            continue
        number = memory.writes[place]
        seen.add((memory, number))
        found.add(number)
        operation = operations[number]
        created = operation.find_result_with_new_memory(memory)
        over = created is not None or _is_memory_overwritten(operation, memory)
        inputs = {view.memory for view in operation.iterate_deferred_inputs()} - ({memory} if over else set())
        todo += [(each, number) for each in inputs]
        if not over:
            todo.append((memory, number))
    return sorted(found)


def _get_or_create_storage(memory: DeferredMemory, storages: Storages) -> torch.UntypedStorage:
    """Return the real storage of a memory. If it does not exist yet, create it, filled with zeros."""
    if memory not in storages:
        storages[memory] = torch.zeros(memory.num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
    return storages[memory]


def _replay_operation(operation: RecordedOperation, storages: Storages) -> None:
    """Compute a recorded operation on real tensors, and put the storages of its results into `storages`."""

    def make_real_argument(leaf: object) -> object:
        if isinstance(leaf, DeferredView):
            return leaf.make_tensor(_get_or_create_storage(leaf.memory, storages))
        return leaf.value if isinstance(leaf, RecordedConstant) else leaf

    if operation.seed is not None:
        [view] = operation.writes or operation.results
        fill = None if view is None else find_random_fill(operation, view)
        assert view is not None
        assert fill is not None
        shape = view.geometry.shape
        values = (
            TiledRandomReader(fill, shape, operation.seed).read_span(ElementSpan(0, view.numel)).view(shape)
        )
        view.make_tensor(_get_or_create_storage(view.memory, storages)).permute(view.axis_order).copy_(values)
        return
    args, kwargs = tree_map(make_real_argument, (operation.args, operation.kwargs))
    made = call_recorded_operation(operation, args, kwargs)
    tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
    for view, tensor in zip(operation.results, tensors, strict=True):
        if view is None or view.memory in storages:
            continue
        if tensor.stride() != view.strides or tensor.storage_offset() or view.offset:
            # Later operations were recorded with the predicted strides, so copy the result to memory with these.
            view.make_tensor(_get_or_create_storage(view.memory, storages)).copy_(tensor)
        else:
            storages[view.memory] = tensor.untyped_storage()


def call_recorded_operation(
    operation: RecordedOperation, args: Args, kwargs: Kwargs, generator: torch.Generator | None = None
) -> Any:
    """Call a recorded operation on real tensors, and return its result.

    Random numbers are drawn from `generator`, or if it is None from a new one in the recorded state.
    """
    if operation.state is None:
        return operation.op(*args, **kwargs)
    if generator is None:
        generator = torch.Generator("cpu")
        generator.set_state(operation.state)
    drawn_by = find_generator_overload(operation.op)
    assert drawn_by is not None  # only random operations store a generator state
    return drawn_by(*args, **kwargs, generator=generator)
