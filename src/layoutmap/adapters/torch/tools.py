"""Functions of other libraries on laid out models: done right, or refused by name.

While there are models in layouts, each of these that was imported before one of them was made is looked after. The
names that are replaced, and the versions on which that was tested:

peft 0.21           tuners.lora.LoraLayer._get_in_out_features(module): the sizes of a layer. It gives factors the size
                    of a shard, as transformers' own tensor parallelism wants them; a layer here has all of its outputs
accelerate 1.15     Accelerator.get_state_dict(model): what is saved of a model, which has to be plain;
                    prepare_model(model): wraps it in DistributedDataParallel, in several processes
safetensors 0.8     torch._remove_duplicate_names(state_dict), _flatten_as_ptr(tensors): they read memory, which a
                    tensor in a layout has none of
transformers 5.23   PreTrainedModel.save_pretrained, and that of peft.PeftModel: what is saved has to be plain, or each
                    process writes its shards: modeling_utils.safe_save_file(tensors, filename) tells which files
                    there are; resize_token_embeddings(...): its fix is to be one that the caller can follow
torch               nn.parallel.DistributedDataParallel(module): for a model that each process has for itself;
                    distributed.fsdp._fully_shard._fully_shard._validate_module(module, name): the first that
                    fully_shard does
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.torch.boundary import unshard_tensors
from layoutmap.adapters.torch.forward import find_forward
from layoutmap.adapters.torch.pretrained import save_shards, wrap_save_file
from layoutmap.core.errors import EngineError, ScopeError
from layoutmap.engines.patches import Attribute
from layoutmap.engines.tested import Needed
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.changes import change
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.specs import get_local
from layoutmap.engines.torch.storages import get_storage_key


def look_after_tools() -> None:
    """Look after each of the libraries that are imported, as long as there are tensors on a mesh."""
    for module in _TOOLS:
        if module in sys.modules:
            change(*_make_patches(module))


@functools.cache
def _make_patches(module: str) -> tuple[Attribute, ...]:
    return tuple(_TOOLS[module]())


def gather_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return unsharded tensors on the CPU in place of DTensors. Names of one tensor still share one.

    All processes must call it.
    """
    known: dict[int, torch.Tensor] = {}
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            key = get_storage_key(next(iter(simulation.get_pieces(get_local(tensor)).values())))
            if key not in known:
                known[key] = unshard_tensors(tensor.detach()).cpu()
            tensor = known[key]
        made[name] = tensor
    return made


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


def _patch_attribute(owner: object, name: str, make: Callable[[Function], Function]) -> Iterator[Attribute]:
    if hasattr(owner, name):  # else the library says itself what it cannot do
        yield Attribute(owner, name, lambda own: functools.wraps(own)(make(own)))  # callers read signatures


def _wrap_save_pretrained(own: Function) -> Function:
    def save_pretrained(self: torch.nn.Module, directory: str, *args: object, **options: Any) -> object:
        tensors = options.get("state_dict") or self.state_dict()
        if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
            options["state_dict"] = gather_tensors(tensors)
            if simulation.get_rank():  # the first process writes
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

    yield from _patch_attribute(PreTrainedModel, "save_pretrained", _wrap_sharded_save)
    yield from _patch_attribute(PreTrainedModel, "resize_token_embeddings", _wrap_resize)
    yield from _patch_attribute(modeling_utils, "safe_save_file", wrap_save_file)


def _patch_peft() -> Iterator[Attribute]:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    yield from _patch_attribute(PeftModel, "save_pretrained", _wrap_save_pretrained)

    def wrap_sizes(own: Function) -> Function:
        def get_in_out_features(self: object, module: torch.nn.Module) -> object:
            if isinstance(module, torch.nn.Linear) and find_forward(module) is not None:
                return module.in_features, module.out_features
            return own(self, module)

        return get_in_out_features

    yield from _patch_attribute(LoraLayer, "_get_in_out_features", wrap_sizes)


def _patch_accelerate() -> Iterator[Attribute]:
    from accelerate import Accelerator  # pyright: ignore[reportMissingTypeStubs]

    def wrap_state_dict(own: Function) -> Function:
        def get_state_dict(self: object, model: torch.nn.Module, *args: object, **options: object) -> object:
            found = own(self, model, *args, **options)
            return gather_tensors(found) if found else found

        return get_state_dict

    def wrap_prepare(own: Function) -> Function:
        def prepare_model(self: Any, model: torch.nn.Module, *args: object, **options: object) -> object:
            if self.num_processes > 1:
                _refuse_wrapping("Accelerator.prepare", model)
            return own(self, model, *args, **options)

        return prepare_model

    yield from _patch_attribute(Accelerator, "get_state_dict", wrap_state_dict)
    yield from _patch_attribute(Accelerator, "prepare_model", wrap_prepare)


def _patch_safetensors() -> Iterator[Attribute]:
    import safetensors.torch

    def wrap_deduplication(own: Function) -> Function:
        def remove_duplicate_names(state_dict: dict[str, torch.Tensor], **options: object) -> object:
            state_dict.update(_gather_locally("safetensors", state_dict))
            return own(state_dict, **options)

        return remove_duplicate_names

    def wrap_flatten(own: Function) -> Function:
        def flatten_as_ptr(tensors: Sequence[torch.Tensor], *args: object) -> object:
            is_mapping = isinstance(tensors, Mapping)
            return own(_gather_locally("safetensors", tensors) if is_mapping else tensors, *args)

        return flatten_as_ptr

    yield from _patch_attribute(safetensors.torch, "_remove_duplicate_names", wrap_deduplication)
    yield from _patch_attribute(safetensors.torch, "_flatten_as_ptr", wrap_flatten)


def _patch_data_parallel() -> Iterator[Attribute]:
    def wrap_init(own: Function) -> Function:
        def __init__(self: object, module: torch.nn.Module, *args: object, **options: object) -> None:
            _refuse_wrapping("DistributedDataParallel", module)
            own(self, module, *args, **options)

        return __init__

    yield from _patch_attribute(torch.nn.parallel.DistributedDataParallel, "__init__", wrap_init)


def _patch_fully_shard() -> Iterator[Attribute]:
    with Needed("torch"):
        from torch.distributed.fsdp._fully_shard import _fully_shard  # pyright: ignore[reportPrivateUsage]

    def wrap_validation(own: Function) -> Function:
        def validate_module(module: torch.nn.Module, func_name: str) -> None:
            _refuse_wrapping(func_name, module)
            own(module, func_name)

        return validate_module

    yield from _patch_attribute(_fully_shard, "_validate_module", wrap_validation)


def _refuse_wrapping(what: str, module: torch.nn.Module) -> None:
    if any(find_forward(each) is not None for each in module.modules()):
        raise ScopeError(
            f"{what}: {type(module).__name__} is in layouts",
            why="it expects a separate model and batch in each process; a model in layouts spans all processes, takes "
            "the global batch, and gathers its weights and reduces its gradients itself",
            fix='leave it out, and train with a loop of your own. A rule such as ("batch", None) with '
            'batch_dim="batch" shards a weight as fully_shard does',
        )


_TOOLS: dict[str, Callable[[], Iterator[Attribute]]] = {
    "torch": _patch_data_parallel,
    "torch.distributed.fsdp._fully_shard._fully_shard": _patch_fully_shard,
    "transformers.modeling_utils": _patch_transformers,
    "peft": _patch_peft,
    "accelerate": _patch_accelerate,
    "safetensors.torch": _patch_safetensors,
}
