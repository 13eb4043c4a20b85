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

from layoutmap.adapters.torch.boundary import gather_to_cpu
from layoutmap.adapters.torch.forward import find_forward
from layoutmap.adapters.torch.pretrained import save_model_in_parallel, wrap_save_file
from layoutmap.adapters.torch.trainers import (
    iterate_accelerate_patches,
    iterate_lightning_patches,
    iterate_trainer_patches,
)
from layoutmap.core.errors import EngineError, ScopeError
from layoutmap.engines.patches import AttributePatch, make_patch_if_present
from layoutmap.engines.tested import ImportErrorConverter
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.changes import install_patches
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.specs import get_local


def patch_training_libraries() -> None:
    """Patch libraries such as transformers, now or when they are imported, as long as sharded tensors exist."""
    for module in _TOOLS:
        if module in sys.modules:
            install_patches(*_list_patches_of_module(module))
    install_patches(_PATCH_ON_IMPORT)


class _ImportPatcher(MetaPathFinder):
    """Patch libraries that are imported only after a model is sharded, such as `transformers.Trainer`."""

    def install(self) -> None:
        """Start watching imports."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop watching imports."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that patches the module once it is executed, or None for a module without patches."""
        if fullname not in _TOOLS:
            return None
        finders = (each for each in sys.meta_path if each is not self)
        spec = next((spec for each in finders if (spec := each.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    install_patches(*_list_patches_of_module(fullname))

            spec.loader.exec_module = execute_and_patch
        return spec


_PATCH_ON_IMPORT = _ImportPatcher()


@functools.cache
def _list_patches_of_module(module_name: str) -> tuple[AttributePatch, ...]:
    return tuple(_TOOLS[module_name]())


def _gather_simulated_tensors(library: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Unshard tensors of simulated devices on the CPU. Raise a ScopeError if one is sharded over processes."""
    name = next((name for name, tensor in tensors.items() if isinstance(tensor, DTensor)), None)
    if name is not None and not simulation.is_simulated():
        raise ScopeError(
            f"{library}: {name} is sharded over several processes",
            why="this process has only its own shards, and would write only a part of the weight",
            fix="call layoutmap.export(model, directory) in all processes: it writes safetensors, each weight once",
        )
    return gather_to_cpu(tensors)


def _wrap_save_with_gather(original: Function) -> Function:
    def save_pretrained(self: torch.nn.Module, directory: str, *args: object, **options: Any) -> object:
        tensors = options.get("state_dict") or self.state_dict()
        if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
            options["state_dict"] = gather_to_cpu(tensors)
            if simulation.get_rank():  # only process 0 writes files
                return None
        return original(self, directory, *args, **options)

    return save_pretrained


def _wrap_save_in_parallel(original: Function) -> Function:
    save_gathered = _wrap_save_with_gather(original)

    def save_pretrained(self: torch.nn.Module, directory: str, *args: object, **options: Any) -> object:
        tensors = options.get("state_dict") or self.state_dict()
        has_other_processes = simulation.get_world_size() > 1 and not simulation.is_simulated()
        if (
            has_other_processes
            and not options.get("push_to_hub")
            and any(isinstance(t, DTensor) for t in tensors.values())
        ):

            def save_to_folder(folder: object, **state: object) -> None:
                original(self, folder, *args, **options | {"is_main_process": True} | state)

            if save_model_in_parallel(save_to_folder, directory, tensors):
                return None
        return save_gathered(self, directory, *args, **options)

    return save_pretrained


def _wrap_embedding_resize(original: Function) -> Function:
    def resize_token_embeddings(self: torch.nn.Module, *args: object, **options: object) -> object:
        try:
            return original(self, *args, **options)
        except EngineError as error:
            raise ScopeError(
                f"resize_token_embeddings: {type(self).__name__} is sharded",
                why="the embeddings were sharded for their present size, and transformers would change it",
                fix="resize the model before layout_map.apply(model), or in the function that you give to "
                "layout_map.build",
            ) from error

    return resize_token_embeddings


def _iterate_transformers_patches() -> Iterator[AttributePatch]:
    from transformers import PreTrainedModel, modeling_utils

    yield from make_patch_if_present(PreTrainedModel, "save_pretrained", _wrap_save_in_parallel)
    yield from make_patch_if_present(PreTrainedModel, "resize_token_embeddings", _wrap_embedding_resize)
    yield from make_patch_if_present(modeling_utils, "safe_save_file", wrap_save_file)


def _iterate_peft_patches() -> Iterator[AttributePatch]:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    yield from make_patch_if_present(PeftModel, "save_pretrained", _wrap_save_with_gather)

    def wrap_get_in_out_features(original: Function) -> Function:
        def get_in_out_features(self: object, module: torch.nn.Module) -> object:
            if isinstance(module, torch.nn.Linear) and find_forward(module) is not None:
                return module.in_features, module.out_features
            return original(self, module)

        return get_in_out_features

    yield from make_patch_if_present(LoraLayer, "_get_in_out_features", wrap_get_in_out_features)


def _iterate_safetensors_patches() -> Iterator[AttributePatch]:
    # This runs while the program imports `safetensors.torch`, so `safetensors` does not have the attribute `torch` yet.
    from safetensors import torch as functions

    def wrap_remove_duplicate_names(original: Function) -> Function:
        def remove_duplicate_names(state_dict: dict[str, torch.Tensor], **options: object) -> object:
            if simulation.is_simulated():
                state_dict.update(gather_to_cpu(state_dict))
                return original(state_dict, **options)
            # safetensors compares storages, which only local shards have, so pass these instead of DTensors.
            shards = ((n, get_local(t) if isinstance(t, DTensor) else t) for n, t in state_dict.items())
            return original(dict(shards), **options)

        return remove_duplicate_names

    def wrap_flatten_as_ptr(original: Function) -> Function:
        def flatten_as_ptr(tensors: Sequence[torch.Tensor], *args: object) -> object:
            is_mapping = isinstance(tensors, Mapping)
            return original(
                _gather_simulated_tensors("safetensors", tensors) if is_mapping else tensors, *args
            )

        return flatten_as_ptr

    yield from make_patch_if_present(functions, "_remove_duplicate_names", wrap_remove_duplicate_names)
    yield from make_patch_if_present(functions, "_flatten_as_ptr", wrap_flatten_as_ptr)


def _iterate_patches_of_wrapper_class(module_name: str, class_name: str) -> Iterator[AttributePatch]:
    """Yield a patch that makes a class that wraps modules, such as `DistributedDataParallel`, refuse sharded ones."""

    def wrap_init(original: Function) -> Function:
        def __init__(self: object, module: torch.nn.Module, *args: object, **options: object) -> None:
            _check_module_is_unsharded(class_name, module)
            original(self, module, *args, **options)

        return __init__

    yield from make_patch_if_present(getattr(sys.modules[module_name], class_name), "__init__", wrap_init)


def _iterate_fully_shard_patches() -> Iterator[AttributePatch]:
    with ImportErrorConverter("torch"):
        from torch.distributed.fsdp._fully_shard import _fully_shard  # pyright: ignore[reportPrivateUsage]

    def wrap_validate_module(original: Function) -> Function:
        def validate_module(module: torch.nn.Module, func_name: str) -> None:
            _check_module_is_unsharded(func_name, module)
            original(module, func_name)

        return validate_module

    yield from make_patch_if_present(_fully_shard, "_validate_module", wrap_validate_module)


def _check_module_is_unsharded(wrapper: str, module: torch.nn.Module) -> None:
    if any(find_forward(each) is not None for each in module.modules()):
        raise ScopeError(
            f"{wrapper}: {type(module).__name__} is sharded already",
            why=f"{wrapper} expects a whole model in each process, and a sharded model gathers its weights and reduces "
            "its gradients over all processes itself",
            fix=f"leave {wrapper} out: your own loop, Trainer of transformers, accelerate, and Lightning with "
            'devices=1 work without it. A rule such as ("batch", None) with batch_dim="batch" shards like fully_shard',
        )


_TOOLS: dict[str, Callable[[], Iterator[AttributePatch]]] = {
    **{
        name: functools.partial(_iterate_patches_of_wrapper_class, name, kind)
        for name, kind in (
            ("torch.nn.parallel.distributed", "DistributedDataParallel"),
            ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
        )
    },
    "torch.distributed.fsdp._fully_shard._fully_shard": _iterate_fully_shard_patches,
    "transformers.modeling_utils": _iterate_transformers_patches,
    "transformers.trainer": iterate_trainer_patches,
    "peft": _iterate_peft_patches,
    "accelerate": iterate_accelerate_patches,
    "safetensors.torch": _iterate_safetensors_patches,
    "lightning.pytorch.strategies": functools.partial(
        iterate_lightning_patches, "lightning.pytorch.strategies"
    ),
    "pytorch_lightning.strategies": functools.partial(
        iterate_lightning_patches, "pytorch_lightning.strategies"
    ),
}
