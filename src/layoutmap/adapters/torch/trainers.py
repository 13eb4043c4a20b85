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
from layoutmap.adapters.torch.boundary import gather_tensors, map_tensors, unshard_tensors
from layoutmap.adapters.torch.forward import find_forward
from layoutmap.adapters.torch.own_rows import find_row_place, gather_rows, has_own_rows
from layoutmap.core.specs import count_batch_shards
from layoutmap.engines.patches import Attribute, patch_if_present
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.changes import change
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.trees import tree_map


def patch_accelerate() -> Iterator[Attribute]:
    """Yield the patches of accelerate."""
    from accelerate import Accelerator, PartialState, accelerator  # pyright: ignore[reportMissingTypeStubs]
    from accelerate.optimizer import AcceleratedOptimizer  # pyright: ignore[reportMissingTypeStubs]

    def wrap_state_dict(own: Function) -> Function:
        def get_state_dict(self: object, model: torch.nn.Module, *args: object, **options: object) -> object:
            found = own(self, model, *args, **options)
            return gather_tensors(found) if found else found

        return get_state_dict

    def wrap_prepare(own: Function) -> Function:
        def prepare(self: object, *args: object, **options: object) -> object:
            _count_as_one(*args)  # before accelerate splits a data loader
            return own(self, *args, **options)

        return prepare

    def wrap_optimizer_state(own: Function) -> Function:
        def state_dict(self: object) -> object:
            return tree_map(_gather_value, own(self))

        return state_dict

    def wrap_wait(own: Function) -> Function:
        def wait_for_everyone(self: object) -> None:
            own(self)
            if not simulation.is_simulated() and dist.is_initialized():
                dist.barrier()  # pyright: ignore[reportUnknownMemberType]

        return wait_for_everyone

    def wrap_loader(own: Function) -> Function:
        def prepare_data_loader(*args: object, **options: object) -> object:
            rows = _AS_ONE.rows
            if rows is not None:
                options |= {"process_index": find_row_place(rows), "dispatch_batches": False}
                options["num_processes"] = count_batch_shards(rows.options.batch_dim, rows.policy.mesh)
            return own(*args, **options)

        return prepare_data_loader

    def wrap_gather(own: Function) -> Function:
        def gather(tensor: object) -> object:
            rows = _AS_ONE.rows
            return own(tensor) if rows is None else map_tensors(lambda each: gather_rows(each, rows), tensor)

        return gather

    def wrap_gather_object(own: Function) -> Function:
        def gather_object(object: object) -> object:
            rows = _AS_ONE.rows
            return own(object) if rows is None else _gather_lists(object, rows)

        return gather_object

    def wrap_reduce(own: Function) -> Function:
        def reduce(tensor: object, reduction: str = "mean", scale: float = 1.0) -> object:
            rows = _AS_ONE.rows
            if rows is None or reduction == "none":
                return own(tensor, reduction, scale)

            def reduce_one(tensor: torch.Tensor) -> torch.Tensor:
                gathered = gather_rows(tensor[None], rows)
                total = gathered.sum(0)
                return total if reduction == "sum" else total / len(gathered)

            return map_tensors(reduce_one, tensor)

        return reduce

    yield from patch_if_present(accelerator, "prepare_data_loader", wrap_loader)
    yield from patch_if_present(accelerator, "gather", wrap_gather)
    yield from patch_if_present(accelerator, "gather_object", wrap_gather_object)
    yield from patch_if_present(accelerator, "reduce", wrap_reduce)
    yield from patch_if_present(Accelerator, "get_state_dict", wrap_state_dict)
    yield from patch_if_present(Accelerator, "prepare", wrap_prepare)
    yield from patch_if_present(Accelerator, "prepare_model", wrap_prepare)
    yield from patch_if_present(AcceleratedOptimizer, "state_dict", wrap_optimizer_state)
    yield from patch_if_present(PartialState, "wait_for_everyone", wrap_wait)


def _gather_value(value: object) -> object:
    return unshard_tensors(value.detach()).cpu() if isinstance(value, DTensor) else value


def _gather_lists(values: object, rows: ScopeContext) -> object:
    """Return the lists of all places in one, or a list of values that are no lists."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (find_row_place(rows), values))  # pyright: ignore[reportUnknownMemberType]
    lists = [each for _, each in sorted(dict(found).items())]
    return [value for each in lists for value in each] if isinstance(values, list) else lists


def _find_context(model: object) -> ScopeContext | None:
    """Return the scope of a model that several processes share, or None."""
    if (
        simulation.get_world_size() == 1
        or simulation.is_simulated()
        or not isinstance(model, torch.nn.Module)
    ):
        return None
    forwards = map(find_forward, model.modules())
    return next((each.context for each in forwards if each is not None), None)


def _is_sharded_in_processes(model: object) -> bool:
    return _find_context(model) is not None


class _ProcessesAsOne:
    """Patch that makes accelerate count the processes of a sharded model as one.

    Attributes:
        rows: The scope of the model that was prepared last, if each process passes its own rows to it.
    """

    def __init__(self) -> None:
        self.rows: ScopeContext | None = None
        self._before: list[tuple[dict[str, object], dict[str, object]]] = []

    def install(self) -> None:
        """Count one process from now on."""
        from accelerate.state import AcceleratorState, PartialState  # pyright: ignore[reportMissingTypeStubs]
        from accelerate.utils import DistributedType  # pyright: ignore[reportMissingTypeStubs]

        one: dict[str, object] = {"num_processes": 1, "distributed_type": DistributedType.NO}
        shared: list[dict[str, object]] = [
            vars(PartialState)["_shared_state"],
            vars(AcceleratorState)["_shared_state"],
        ]
        for state in shared:
            if state.get("num_processes", 1) != 1:
                self._before.append((state, {name: state[name] for name in one}))
                state.update(one)

    def remove(self) -> None:
        """Count all processes again."""
        self.rows = None
        for state, before in self._before:
            if state:
                state.update(before)
        self._before.clear()


_AS_ONE = _ProcessesAsOne()


# Each process runs the program of one device, of its own rows if it has those (decisions/0215, why: decisions/0305).
def _count_as_one(*values: object) -> None:
    """Count the processes as one if a value is a model that they share."""
    contexts = [each for each in map(_find_context, values) if each is not None]
    if contexts:
        change(_AS_ONE)
        _AS_ONE.rows = next(filter(has_own_rows, contexts), None)


def patch_trainer() -> Iterator[Attribute]:
    """Yield the patches of the Trainer of transformers."""
    from transformers import Trainer

    def wrap_creation(own: Function) -> Function:
        def create_accelerator_and_postprocess(self: Any) -> None:
            _count_as_one(self.model)
            own(self)

        return create_accelerator_and_postprocess

    def wrap_count(own: Function) -> Function:
        def count_items(self: Any, *args: object) -> object:
            number = own(self, *args)
            has_own = number is not None and _AS_ONE.rows is not None
            return self.accelerator.reduce(number, "sum") if has_own else number

        return count_items

    def wrap_save(own: Function) -> Function:
        def save(
            self: Any, output_dir: str | None = None, state_dict: Mapping[str, torch.Tensor] | None = None
        ) -> None:
            if not _is_sharded_in_processes(self.model):
                own(self, output_dir, state_dict)
                return
            if not hasattr(self.model, "save_pretrained"):
                state_dict = gather_tensors(state_dict or self.model.state_dict())
            elif not self.args.should_save:
                self.model.save_pretrained(output_dir or self.args.output_dir, state_dict=state_dict)
            own(self, output_dir, state_dict)
            dist.barrier()  # pyright: ignore[reportUnknownMemberType]

        return save

    def wrap_save_optimizer(own: Function) -> Function:
        def save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
            if _is_sharded_in_processes(self.model) and not self.args.should_save:
                self.optimizer.state_dict()  # a collective, so call it in all processes
            own(self, output_dir)

        return save_optimizer_and_scheduler

    def wrap_save_draws(own: Function) -> Function:
        def save_rng_state(self: Any, output_dir: str) -> None:
            if self.args.should_save or not _is_sharded_in_processes(self.model):
                own(self, output_dir)

        return save_rng_state

    def wrap_checkpoint(own: Function) -> Function:
        def save_checkpoint(self: Any, *args: object, **options: object) -> None:
            own(self, *args, **options)
            if _is_sharded_in_processes(self.model):
                dist.barrier()  # pyright: ignore[reportUnknownMemberType]  # another process may read it next

        return save_checkpoint

    yield from patch_if_present(Trainer, "create_accelerator_and_postprocess", wrap_creation)
    yield from patch_if_present(Trainer, "_get_num_items_in_batch", wrap_count)
    yield from patch_if_present(Trainer, "_save", wrap_save)
    yield from patch_if_present(Trainer, "_save_optimizer_and_scheduler", wrap_save_optimizer)
    yield from patch_if_present(Trainer, "_save_rng_state", wrap_save_draws)
    yield from patch_if_present(Trainer, "_save_checkpoint", wrap_checkpoint)


def patch_lightning(strategies: str) -> Iterator[Attribute]:
    """Yield the patches of Lightning. Its package `strategies` has a class for each way to train.

    The class for one device trains a sharded model in all processes. The first of them writes checkpoints, with plain
    tensors that all gather.
    """
    single = importlib.import_module(f"{strategies}.single_device").SingleDeviceStrategy

    def take_part(self: Any) -> bool:
        return _is_sharded_in_processes(self.lightning_module)

    def wrap_save(own: Function) -> Function:
        def save_checkpoint(self: Any, checkpoint: object, *args: object, **options: object) -> None:
            gathered = tree_map(_gather_value, checkpoint) if take_part(self) else checkpoint
            if not take_part(self) or not simulation.get_rank():
                own(self, gathered, *args, **options)
            self.barrier()

        return save_checkpoint

    def wrap_remove(own: Function) -> Function:
        def remove_checkpoint(self: Any, *args: object, **options: object) -> None:
            if not take_part(self) or not simulation.get_rank():
                own(self, *args, **options)
            self.barrier()

        return remove_checkpoint

    def wrap_barrier(own: Function) -> Function:
        def barrier(self: Any, *args: object, **options: object) -> None:
            own(self, *args, **options)
            if take_part(self):
                dist.barrier()  # pyright: ignore[reportUnknownMemberType]

        return barrier

    def wrap_broadcast(own: Function) -> Function:
        def broadcast(self: Any, obj: object, src: int = 0) -> object:
            found = [own(self, obj, src)]
            if take_part(self):
                dist.broadcast_object_list(found, src)  # pyright: ignore[reportUnknownMemberType]
            return found[0]

        return broadcast

    # One process may have written a file before another looks for it.
    def wrap_decision(own: Function) -> Function:
        def reduce_boolean_decision(self: Any, decision: bool, *args: object, **options: object) -> object:
            return self.broadcast(own(self, decision, *args, **options))

        return reduce_boolean_decision

    yield from patch_if_present(single, "save_checkpoint", wrap_save)
    yield from patch_if_present(single, "remove_checkpoint", wrap_remove)
    yield from patch_if_present(single, "barrier", wrap_barrier)
    yield from patch_if_present(single, "broadcast", wrap_broadcast)
    yield from patch_if_present(single, "reduce_boolean_decision", wrap_decision)
