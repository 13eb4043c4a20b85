"""Compute deferred values by replaying the recorded operations.

`replay` makes global tensors: it picks the steps that they depend on, and does them in order on real memory, which it
frees as soon as no later step needs it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch

from layoutmap.engines.torch.deferred_init.operations import OVERWRITING
from layoutmap.engines.torch.deferred_init.spans import ElementSpan
from layoutmap.engines.torch.deferred_init.steps import Constant, DeferredMemory, RecordedStep, View
from layoutmap.engines.torch.deferred_init.streams import find_generator_overload, find_random_fill
from layoutmap.engines.torch.deferred_init.tiles import TileReader
from layoutmap.engines.torch.operators import Args, Kwargs
from layoutmap.engines.torch.trees import tree_leaves, tree_map


def _is_memory_overwritten(step: RecordedStep, memory: DeferredMemory) -> bool:
    """Return whether a step overwrites all values of a memory without reading them."""
    if step.op.overloadpacket not in OVERWRITING or not step.writes[0].is_whole_memory:
        return False
    return sum(view.memory is memory for view in step.iterate_inputs()) == 1


def replay_steps(steps: Sequence[RecordedStep], views: Sequence[View], until: int) -> list[torch.Tensor]:
    """Replay recorded steps, and return unsharded tensors with their values from before the step `until`."""
    indices = find_needed_indices(steps, {view.memory for view in views}, until)
    last_use = {view.memory: index for index in indices for view in _list_step_views(steps[index])}
    kept = {view.memory for view in views}
    storages: dict[DeferredMemory, torch.UntypedStorage] = {}
    with torch.no_grad():
        for index in indices:
            _replay_step(steps[index], storages)
            for memory in {view.memory for view in _list_step_views(steps[index])}:
                if last_use[memory] == index and memory not in kept:
                    storages.pop(memory, None)  # no later step reads this storage, so free it
        return [view.make_tensor(_get_storage(view.memory, storages)) for view in views]


def _list_step_views(step: RecordedStep) -> list[View]:
    return [*step.iterate_inputs(), *(view for view in step.results if view is not None)]


def find_needed_indices(
    steps: Sequence[RecordedStep], memories: set[DeferredMemory], until: int
) -> list[int]:
    """Return the ascending indices of the steps on which the values of some memories depend."""
    found: set[int] = set()
    seen: set[tuple[DeferredMemory, int]] = set()
    todo = [(memory, until) for memory in memories]
    while todo:
        memory, end = todo.pop()
        place = bisect.bisect_left(memory.writes, end) - 1
        if place < 0 or (memory, memory.writes[place]) in seen:
            continue
        number = memory.writes[place]
        seen.add((memory, number))
        found.add(number)
        step = steps[number]
        over = step.find_result_that_created(memory) is not None or _is_memory_overwritten(step, memory)
        todo += [
            (view.memory, number) for view in step.iterate_inputs() if not (over and view.memory is memory)
        ]
        if not over:
            todo.append((memory, number))
    return sorted(found)


def _get_storage(
    memory: DeferredMemory, storages: dict[DeferredMemory, torch.UntypedStorage]
) -> torch.UntypedStorage:
    """Return the real storage of a memory. If it does not exist yet, create it, filled with zeros."""
    if memory not in storages:
        storages[memory] = torch.zeros(memory.num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
    return storages[memory]


def _replay_step(step: RecordedStep, storages: dict[DeferredMemory, torch.UntypedStorage]) -> None:
    def resolve_leaf(leaf: object) -> object:
        if isinstance(leaf, View):
            return leaf.make_tensor(_get_storage(leaf.memory, storages))
        return leaf.value if isinstance(leaf, Constant) else leaf

    if step.seed is not None:
        [view] = step.writes or step.results
        fill = None if view is None else find_random_fill(step, view)
        assert view is not None
        assert fill is not None
        shape = view.geometry.shape
        values = TileReader(fill, shape, step.seed).read_span(ElementSpan(0, view.numel)).view(shape)
        view.make_tensor(_get_storage(view.memory, storages)).permute(view.axis_order).copy_(values)
        return
    args, kwargs = tree_map(resolve_leaf, (step.args, step.kwargs))
    made = call_step(step, args, kwargs)
    tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
    for view, tensor in zip(step.results, tensors, strict=True):
        if view is None or view.memory in storages:
            continue
        if tensor.stride() != view.strides or tensor.storage_offset() or view.offset:
            # Later steps were recorded with the predicted strides, so copy the result into memory with these strides.
            view.make_tensor(_get_storage(view.memory, storages)).copy_(tensor)
        else:
            storages[view.memory] = tensor.untyped_storage()


def call_step(
    step: RecordedStep, args: Args, kwargs: Kwargs, generator: torch.Generator | None = None
) -> Any:
    """Call a step's operation on real tensors, and return its result.

    Random numbers are drawn from `generator`, or if it is None from a new one in the state that the step recorded.
    """
    if step.state is None:
        return step.op(*args, **kwargs)
    if generator is None:
        generator = torch.Generator("cpu")
        generator.set_state(step.state)
    drawn_by = find_generator_overload(step.op)
    assert drawn_by is not None  # only random steps store a generator state
    return drawn_by(*args, **kwargs, generator=generator)
