"""Make functions of other libraries work on sharded models, or raise by name.

While there are models in layouts, each of these that is imported, before or after, is looked after. The names that are
replaced, and the versions on which that was tested:

peft 0.21           tuners.lora.LoraLayer._get_in_out_features(module): the sizes of a layer. It gives factors the size
                    of a shard, as transformers' own tensor parallelism wants them; a layer here has all of its outputs
accelerate 1.15     Accelerator.get_state_dict(model), AcceleratedOptimizer.state_dict(): what is saved has to be plain;
                    accelerator.prepare_data_loader, gather, gather_object, reduce: of own rows;
                    prepare(...), prepare_model(model): several processes of a sharded model count as one, and
                    PartialState.wait_for_everyone() waits for them all the same
safetensors 0.8     torch._remove_duplicate_names(state_dict), _flatten_as_ptr(tensors): they read memory, which a
                    tensor in a layout has none of
transformers 5.23   PreTrainedModel.save_pretrained, and that of peft.PeftModel: what is saved has to be plain, or each
                    process writes its shards: modeling_utils.safe_save_file(tensors, filename) tells which files
                    there are; resize_token_embeddings(...): its fix is to be one that the caller can follow
                    Trainer._save, _save_optimizer_and_scheduler, _save_rng_state, _save_checkpoint: what all
                    processes gather, and the first writes; create_accelerator_and_postprocess(): knows the model
lightning 2.6       SingleDeviceStrategy.save_checkpoint, remove_checkpoint, barrier, broadcast,
                    reduce_boolean_decision: the first process writes what all gather, and decides
torch               nn.parallel.DistributedDataParallel(module), distributed.fsdp.FullyShardedDataParallel(module): for
                    a model that each process has for itself;
                    distributed.fsdp._fully_shard._fully_shard._validate_module(module, name): the first that
                    fully_shard does
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.torch.boundary import gather_tensors
from layoutmap.adapters.torch.forward import find_forward
from layoutmap.adapters.torch.pretrained import save_shards, wrap_save_file
from layoutmap.adapters.torch.trainers import patch_accelerate, patch_lightning, patch_trainer
from layoutmap.core.errors import EngineError, ScopeError
from layoutmap.engines.patches import Attribute, patch_if_present
from layoutmap.engines.tested import Needed
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.changes import change
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.specs import get_local


def patch_tools() -> None:
    """Patch transformers, PEFT, and safetensors once they are imported, while sharded tensors exist."""
    for module in _TOOLS:
        if module in sys.modules:
            change(*_make_patches(module))
    change(_LATER)


class _LaterImports(MetaPathFinder):
    """Patch libraries that are imported after a model is sharded, such as `transformers.Trainer`."""

    def install(self) -> None:
        """Watch imports."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop watching imports."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec. If it is a library's, its patches follow when it has been executed."""
        if fullname not in _TOOLS:
            return None
        finders = (each for each in sys.meta_path if each is not self)
        spec = next((spec for each in finders if (spec := each.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    change(*_make_patches(fullname))

            spec.loader.exec_module = execute_and_patch
        return spec


_LATER = _LaterImports()


@functools.cache
def _make_patches(module: str) -> tuple[Attribute, ...]:
    return tuple(_TOOLS[module]())


def _gather_locally(what: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather tensors where this process has all shards, or raise a ScopeError."""
    found = next((name for name, tensor in tensors.items() if isinstance(tensor, DTensor)), None)
    if found is not None and not simulation.is_simulated():
        raise ScopeError(
            f"{what}: {found} is in a layout of several processes",
            why="this process has only its own shards, and would write only a part of the weight",
            fix="call layoutmap.export(model, directory) in all processes: it writes safetensors, each weight once",
        )
    return gather_tensors(tensors)


def _wrap_save_pretrained(own: Function) -> Function:
    def save_pretrained(self: torch.nn.Module, directory: str, *args: object, **options: Any) -> object:
        tensors = options.get("state_dict") or self.state_dict()
        if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
            options["state_dict"] = gather_tensors(tensors)
            if simulation.get_rank():  # only process 0 writes files
                return None
        return own(self, directory, *args, **options)

    return save_pretrained


def _wrap_sharded_save(own: Function) -> Function:
    gathering = _wrap_save_pretrained(own)

    def save_pretrained(self: torch.nn.Module, directory: str, *args: object, **options: Any) -> object:
        tensors = options.get("state_dict") or self.state_dict()
        several = simulation.get_world_size() > 1 and not simulation.is_simulated()
        if (
            several
            and not options.get("push_to_hub")
            and any(isinstance(t, DTensor) for t in tensors.values())
        ):

            def save(folder: object, **state: object) -> None:
                own(self, folder, *args, **options | {"is_main_process": True} | state)

            if save_shards(save, directory, tensors):
                return None
        return gathering(self, directory, *args, **options)

    return save_pretrained


def _wrap_resize(own: Function) -> Function:
    def resize_token_embeddings(self: torch.nn.Module, *args: object, **options: object) -> object:
        try:
            return own(self, *args, **options)
        except EngineError as error:
            raise ScopeError(
                f"resize_token_embeddings: {type(self).__name__} is sharded",
                why="a shard of the embeddings was made for their size, and transformers would change it",
                fix="resize the model before layout_map.apply(model), or in the function that you give to "
                "layout_map.build",
            ) from error

    return resize_token_embeddings


def _patch_transformers() -> Iterator[Attribute]:
    from transformers import PreTrainedModel, modeling_utils

    yield from patch_if_present(PreTrainedModel, "save_pretrained", _wrap_sharded_save)
    yield from patch_if_present(PreTrainedModel, "resize_token_embeddings", _wrap_resize)
    yield from patch_if_present(modeling_utils, "safe_save_file", wrap_save_file)


def _patch_peft() -> Iterator[Attribute]:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    yield from patch_if_present(PeftModel, "save_pretrained", _wrap_save_pretrained)

    def wrap_sizes(own: Function) -> Function:
        def get_in_out_features(self: object, module: torch.nn.Module) -> object:
            if isinstance(module, torch.nn.Linear) and find_forward(module) is not None:
                return module.in_features, module.out_features
            return own(self, module)

        return get_in_out_features

    yield from patch_if_present(LoraLayer, "_get_in_out_features", wrap_sizes)


def _patch_safetensors() -> Iterator[Attribute]:
    from safetensors import torch as functions  # its package lacks the name while it is imported

    def wrap_deduplication(own: Function) -> Function:
        def remove_duplicate_names(state_dict: dict[str, torch.Tensor], **options: object) -> object:
            if simulation.is_simulated():
                state_dict.update(gather_tensors(state_dict))
                return own(state_dict, **options)
            # Compare the storages of shards. A save of shards is refused below.
            shards = ((n, get_local(t) if isinstance(t, DTensor) else t) for n, t in state_dict.items())
            return own(dict(shards), **options)

        return remove_duplicate_names

    def wrap_flatten(own: Function) -> Function:
        def flatten_as_ptr(tensors: Sequence[torch.Tensor], *args: object) -> object:
            is_mapping = isinstance(tensors, Mapping)
            return own(_gather_locally("safetensors", tensors) if is_mapping else tensors, *args)

        return flatten_as_ptr

    yield from patch_if_present(functions, "_remove_duplicate_names", wrap_deduplication)
    yield from patch_if_present(functions, "_flatten_as_ptr", wrap_flatten)


def _patch_wrapper(module_name: str, name: str) -> Iterator[Attribute]:
    """Yield the patch of a class that wraps a module."""

    def wrap_init(own: Function) -> Function:
        def __init__(self: object, module: torch.nn.Module, *args: object, **options: object) -> None:
            _refuse_wrapping(name, module)
            own(self, module, *args, **options)

        return __init__

    yield from patch_if_present(getattr(sys.modules[module_name], name), "__init__", wrap_init)


def _patch_fully_shard() -> Iterator[Attribute]:
    with Needed("torch"):
        from torch.distributed.fsdp._fully_shard import _fully_shard  # pyright: ignore[reportPrivateUsage]

    def wrap_validation(own: Function) -> Function:
        def validate_module(module: torch.nn.Module, func_name: str) -> None:
            _refuse_wrapping(func_name, module)
            own(module, func_name)

        return validate_module

    yield from patch_if_present(_fully_shard, "_validate_module", wrap_validation)


def _refuse_wrapping(what: str, module: torch.nn.Module) -> None:
    if any(find_forward(each) is not None for each in module.modules()):
        raise ScopeError(
            f"{what}: {type(module).__name__} is sharded already",
            why="it expects a whole model in each process, and a sharded model gathers its weights and reduces its "
            "gradients over all processes itself",
            fix="leave it out: a loop of your own, Trainer of transformers, accelerate, and Lightning with devices=1 "
            'do without. A rule such as ("batch", None) with batch_dim="batch" shards weights as fully_shard does',
        )


_TOOLS: dict[str, Callable[[], Iterator[Attribute]]] = {
    **{
        name: functools.partial(_patch_wrapper, name, kind)
        for name, kind in (
            ("torch.nn.parallel.distributed", "DistributedDataParallel"),
            ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
        )
    },
    "torch.distributed.fsdp._fully_shard._fully_shard": _patch_fully_shard,
    "transformers.modeling_utils": _patch_transformers,
    "transformers.trainer": patch_trainer,
    "peft": _patch_peft,
    "accelerate": patch_accelerate,
    "safetensors.torch": _patch_safetensors,
    "lightning.pytorch.strategies": functools.partial(patch_lightning, "lightning.pytorch.strategies"),
    "pytorch_lightning.strategies": functools.partial(patch_lightning, "pytorch_lightning.strategies"),
}
