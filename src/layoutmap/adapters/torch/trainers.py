"""Trainer of transformers, accelerate, and Lightning with a model that several processes share.

They wrap a model in DistributedDataParallel and give each process rows of its own. A sharded model takes the global
batch and reduces its gradients itself, so its processes count as one: each runs the program of one device, with the
same rows. With `scope(rows="own")` only data loaders are split and metrics gathered. All processes gather weights and
states that are saved, and the first writes them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.adapters.torch.boundary import gather_to_cpu, map_tensors, unshard_tensors
from layoutmap.adapters.torch.forward import find_forward
from layoutmap.adapters.torch.own_rows import find_row_shard_index, gather_rows, has_own_rows_per_process
from layoutmap.core.specs import count_batch_shards
from layoutmap.engines.patches import AttributePatch, make_patch_if_present
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.changes import install_patches
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.trees import tree_map


def iterate_accelerate_patches() -> Iterator[AttributePatch]:
    """Yield the patches with which accelerate trains and saves a model that several processes share."""
    from accelerate import Accelerator, PartialState, accelerator  # pyright: ignore[reportMissingTypeStubs]
    from accelerate.optimizer import AcceleratedOptimizer  # pyright: ignore[reportMissingTypeStubs]

    def wrap_get_state_dict(original: Function) -> Function:
        def get_state_dict(self: object, model: torch.nn.Module, *args: object, **options: object) -> object:
            state_dict = original(self, model, *args, **options)
            return gather_to_cpu(state_dict) if state_dict else state_dict

        return get_state_dict

    def wrap_prepare(original: Function) -> Function:
        def prepare(self: object, *args: object, **options: object) -> object:
            # Accelerate splits data loaders among the processes that it counts, so change the count first.
            _make_accelerate_count_one_process_if_shared(*args)
            return original(self, *args, **options)

        return prepare

    def wrap_optimizer_state_dict(original: Function) -> Function:
        def state_dict(self: object) -> object:
            return tree_map(_unshard_to_cpu, original(self))

        return state_dict

    def wrap_wait_for_everyone(original: Function) -> Function:
        def wait_for_everyone(self: object) -> None:
            original(self)
            if not simulation.is_simulated() and dist.is_initialized():
                dist.barrier()  # pyright: ignore[reportUnknownMemberType]

        return wait_for_everyone

    def wrap_prepare_data_loader(original: Function) -> Function:
        def prepare_data_loader(*args: object, **options: object) -> object:
            rows = _SINGLE_PROCESS.rows
            if rows is not None:
                options |= {"process_index": find_row_shard_index(rows), "dispatch_batches": False}
                options["num_processes"] = count_batch_shards(rows.options.batch_dim, rows.policy.mesh)
            return original(*args, **options)

        return prepare_data_loader

    def wrap_gather(original: Function) -> Function:
        def gather(tensor: object) -> object:
            rows = _SINGLE_PROCESS.rows
            if rows is None:
                return original(tensor)
            return map_tensors(lambda each: gather_rows(each, rows), tensor)

        return gather

    def wrap_gather_object(original: Function) -> Function:
        def gather_object(object: object) -> object:
            rows = _SINGLE_PROCESS.rows
            return original(object) if rows is None else _gather_objects_in_shard_order(object, rows)

        return gather_object

    def wrap_reduce(original: Function) -> Function:
        def reduce(tensor: object, reduction: str = "mean", scale: float = 1.0) -> object:
            rows = _SINGLE_PROCESS.rows
            if rows is None or reduction == "none":
                return original(tensor, reduction, scale)

            def reduce_tensor(tensor: torch.Tensor) -> torch.Tensor:
                gathered = gather_rows(tensor[None], rows)
                total = gathered.sum(0)
                return total if reduction == "sum" else total / len(gathered)

            return map_tensors(reduce_tensor, tensor)

        return reduce

    yield from make_patch_if_present(accelerator, "prepare_data_loader", wrap_prepare_data_loader)
    yield from make_patch_if_present(accelerator, "gather", wrap_gather)
    yield from make_patch_if_present(accelerator, "gather_object", wrap_gather_object)
    yield from make_patch_if_present(accelerator, "reduce", wrap_reduce)
    yield from make_patch_if_present(Accelerator, "get_state_dict", wrap_get_state_dict)
    yield from make_patch_if_present(Accelerator, "prepare", wrap_prepare)
    yield from make_patch_if_present(Accelerator, "prepare_model", wrap_prepare)
    yield from make_patch_if_present(AcceleratedOptimizer, "state_dict", wrap_optimizer_state_dict)
    yield from make_patch_if_present(PartialState, "wait_for_everyone", wrap_wait_for_everyone)


def _unshard_to_cpu(value: object) -> object:
    return unshard_tensors(value.detach()).cpu() if isinstance(value, DTensor) else value


def _gather_objects_in_shard_order(values: object, context: ScopeContext) -> object:
    """Return the values of all shards of the batch, in order: lists are concatenated, other values are listed."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (find_row_shard_index(context), values))  # pyright: ignore[reportUnknownMemberType]
    lists = [each for _, each in sorted(dict(gathered).items())]
    return [value for each in lists for value in each] if isinstance(values, list) else lists


def _find_multiprocess_scope(model: object) -> ScopeContext | None:
    """Return the scope of a model that is sharded over devices of several processes, or None for any other value."""
    if (
        simulation.get_world_size() == 1
        or simulation.is_simulated()
        or not isinstance(model, torch.nn.Module)
    ):
        return None
    forwards = map(find_forward, model.modules())
    return next((each.context for each in forwards if each is not None), None)


def _is_sharded_over_processes(model: object) -> bool:
    return _find_multiprocess_scope(model) is not None


class _OneProcessCountPatch:
    """Patch that makes accelerate count the processes of a sharded model as one process.

    Attributes:
        rows: The scope of the model that was prepared last if each process passes its own rows to it, else None.
    """

    def __init__(self) -> None:
        self.rows: ScopeContext | None = None
        self._original_states: list[tuple[dict[str, object], dict[str, object]]] = []

    def install(self) -> None:
        """Make accelerate count one process from now on."""
        from accelerate.state import AcceleratorState, PartialState  # pyright: ignore[reportMissingTypeStubs]
        from accelerate.utils import DistributedType  # pyright: ignore[reportMissingTypeStubs]

        single_process: dict[str, object] = {"num_processes": 1, "distributed_type": DistributedType.NO}
        shared: list[dict[str, object]] = [
            vars(PartialState)["_shared_state"],
            vars(AcceleratorState)["_shared_state"],
        ]
        for state in shared:
            if state.get("num_processes", 1) != 1:
                self._original_states.append((state, {name: state[name] for name in single_process}))
                state.update(single_process)

    def remove(self) -> None:
        """Make accelerate count all processes again, as before `install`."""
        self.rows = None
        for state, before in self._original_states:
            if state:
                state.update(before)
        self._original_states.clear()


_SINGLE_PROCESS = _OneProcessCountPatch()


# A sharded model takes the global batch in each process, so accelerate must not split batches (decisions/0215). But if
# each process passes only its own rows, accelerate splits batches among the shards of the batch (decisions/0305).
def _make_accelerate_count_one_process_if_shared(*values: object) -> None:
    """Make accelerate count one process if a value is a sharded model that several processes share."""
    contexts = [each for each in map(_find_multiprocess_scope, values) if each is not None]
    if contexts:
        install_patches(_SINGLE_PROCESS)
        _SINGLE_PROCESS.rows = next(filter(has_own_rows_per_process, contexts), None)


def iterate_trainer_patches() -> Iterator[AttributePatch]:
    """Yield the patches with which transformers' Trainer trains and saves a model that several processes share."""
    from transformers import Trainer

    def wrap_accelerator_creation(original: Function) -> Function:
        def create_accelerator_and_postprocess(self: Any) -> None:
            _make_accelerate_count_one_process_if_shared(self.model)
            original(self)

        return create_accelerator_and_postprocess

    def wrap_count_items(original: Function) -> Function:
        def count_items(self: Any, *args: object) -> object:
            num_items = original(self, *args)
            is_own_rows = num_items is not None and _SINGLE_PROCESS.rows is not None
            return self.accelerator.reduce(num_items, "sum") if is_own_rows else num_items

        return count_items

    def wrap_save_model(original: Function) -> Function:
        def save(
            self: Any, output_dir: str | None = None, state_dict: Mapping[str, torch.Tensor] | None = None
        ) -> None:
            if not _is_sharded_over_processes(self.model):
                original(self, output_dir, state_dict)
                return
            if not hasattr(self.model, "save_pretrained"):
                state_dict = gather_to_cpu(state_dict or self.model.state_dict())
            elif not self.args.should_save:
                self.model.save_pretrained(output_dir or self.args.output_dir, state_dict=state_dict)
            original(self, output_dir, state_dict)
            dist.barrier()  # pyright: ignore[reportUnknownMemberType]

        return save

    def wrap_save_optimizer(original: Function) -> Function:
        def save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
            if _is_sharded_over_processes(self.model) and not self.args.should_save:
                self.optimizer.state_dict()  # a collective, so call it in all processes
            original(self, output_dir)

        return save_optimizer_and_scheduler

    def wrap_save_rng_state(original: Function) -> Function:
        def save_rng_state(self: Any, output_dir: str) -> None:
            if self.args.should_save or not _is_sharded_over_processes(self.model):
                original(self, output_dir)

        return save_rng_state

    def wrap_save_checkpoint(original: Function) -> Function:
        def save_checkpoint(self: Any, *args: object, **options: object) -> None:
            original(self, *args, **options)
            if _is_sharded_over_processes(self.model):
                dist.barrier()  # pyright: ignore[reportUnknownMemberType]  # wait until the files exist

        return save_checkpoint

    yield from make_patch_if_present(Trainer, "create_accelerator_and_postprocess", wrap_accelerator_creation)
    yield from make_patch_if_present(Trainer, "_get_num_items_in_batch", wrap_count_items)
    yield from make_patch_if_present(Trainer, "_save", wrap_save_model)
    yield from make_patch_if_present(Trainer, "_save_optimizer_and_scheduler", wrap_save_optimizer)
    yield from make_patch_if_present(Trainer, "_save_rng_state", wrap_save_rng_state)
    yield from make_patch_if_present(Trainer, "_save_checkpoint", wrap_save_checkpoint)


def iterate_lightning_patches(strategies_package: str) -> Iterator[AttributePatch]:
    """Yield the patches with which Lightning trains and saves a model that several processes share.

    The class for one device trains a sharded model in all processes. The first of them writes checkpoints, with plain
    tensors that all gather.
    """
    strategy = importlib.import_module(f"{strategies_package}.single_device").SingleDeviceStrategy

    def has_shared_model(self: Any) -> bool:
        return _is_sharded_over_processes(self.lightning_module)

    def wrap_save_checkpoint(original: Function) -> Function:
        def save_checkpoint(self: Any, checkpoint: object, *args: object, **options: object) -> None:
            gathered = tree_map(_unshard_to_cpu, checkpoint) if has_shared_model(self) else checkpoint
            if not has_shared_model(self) or not simulation.get_rank():
                original(self, gathered, *args, **options)
            self.barrier()

        return save_checkpoint

    def wrap_remove_checkpoint(original: Function) -> Function:
        def remove_checkpoint(self: Any, *args: object, **options: object) -> None:
            if not has_shared_model(self) or not simulation.get_rank():
                original(self, *args, **options)
            self.barrier()

        return remove_checkpoint

    def wrap_barrier(original: Function) -> Function:
        def barrier(self: Any, *args: object, **options: object) -> None:
            original(self, *args, **options)
            if has_shared_model(self):
                dist.barrier()  # pyright: ignore[reportUnknownMemberType]

        return barrier

    def wrap_broadcast(original: Function) -> Function:
        def broadcast(self: Any, obj: object, src: int = 0) -> object:
            values = [original(self, obj, src)]
            if has_shared_model(self):
                dist.broadcast_object_list(values, src)  # pyright: ignore[reportUnknownMemberType]
            return values[0]

        return broadcast

    # A file that one process has just written may be missing for another, so all follow the decision of process 0.
    def wrap_reduce_boolean_decision(original: Function) -> Function:
        def reduce_boolean_decision(self: Any, decision: bool, *args: object, **options: object) -> object:
            return self.broadcast(original(self, decision, *args, **options))

        return reduce_boolean_decision

    yield from make_patch_if_present(strategy, "save_checkpoint", wrap_save_checkpoint)
    yield from make_patch_if_present(strategy, "remove_checkpoint", wrap_remove_checkpoint)
    yield from make_patch_if_present(strategy, "barrier", wrap_barrier)
    yield from make_patch_if_present(strategy, "broadcast", wrap_broadcast)
    yield from make_patch_if_present(strategy, "reduce_boolean_decision", wrap_reduce_boolean_decision)
