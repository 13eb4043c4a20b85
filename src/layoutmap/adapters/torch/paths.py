"""Find a model's tensors by the names of `named_parameters` and `named_buffers`.

A tensor that several names lead to, a tied weight, is called by the first; the rest are its aliases. Parameters come
before buffers, each in the order of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy

from layoutmap.core.variables import VariableSpec, make_unique_names
from layoutmap.engines.torch.modules import get_parameters_and_buffers, list_modules


@dataclass(frozen=True, slots=True)
class TensorAttribute:
    """An attribute of a module that stores a parameter or a buffer."""

    module: torch.nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """Return the tensor that the attribute stores now, or None if it was pruned."""
        return self._stored_tensors.get(self.name)

    def set_tensor(self, tensor: torch.Tensor | None) -> None:
        """Store a tensor in the attribute instead of the present one."""
        self._stored_tensors[self.name] = tensor

    @property
    def _stored_tensors(self) -> dict[str, torch.Tensor | None]:
        parameters, buffers = get_parameters_and_buffers(self.module)
        return parameters if self.name in parameters else buffers


@dataclass(slots=True)
class ModelTensor:
    """A parameter or a buffer of a model.

    Args:
        tensor: The tensor.
        path: The first name that leads to it.
        is_buffer: Whether it is a buffer.
        aliases: The other names.
        attributes: Every attribute that holds it.
    """

    tensor: torch.Tensor
    path: str
    is_buffer: bool
    aliases: list[str] = field(default_factory=list[str])
    attributes: list[TensorAttribute] = field(default_factory=list[TensorAttribute])


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """A tensor of a model and its description as a variable of a plan."""

    source: ModelTensor
    spec: VariableSpec


def has_forward(module: torch.nn.Module) -> bool:
    """Return whether a module's class defines `forward`. A `ModuleList`, for example, does not."""
    return type(module).forward is not torch.nn.Module.forward


def unwrap_compiled_module(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that was passed to `torch.compile`, or the module itself if it is not compiled."""
    return getattr(model, "_orig_mod", model)


def is_keras_module(module: torch.nn.Module) -> bool:
    """Return whether a module is a Keras layer with the torch backend."""
    return any(base.__module__.partition(".")[0] == "keras" for base in type(module).__mro__)


def list_model_tensors(root: torch.nn.Module) -> list[ModelTensor]:
    """Return the parameters of a model, then its buffers. A tensor with several names is returned once."""
    model_tensors_by_tensor_id: dict[int, ModelTensor] = {}
    modules = list_modules(root, remove_duplicate=False)  # include all names of a shared module
    for is_buffer in (False, True):
        for prefix, module in modules:
            members = module.named_buffers if is_buffer else module.named_parameters
            for name, tensor in members(recurse=False, remove_duplicate=False):
                path = f"{prefix}.{name}" if prefix else name
                model_tensor = model_tensors_by_tensor_id.get(id(tensor))
                if model_tensor is None:
                    model_tensor = model_tensors_by_tensor_id[id(tensor)] = ModelTensor(
                        tensor, path, is_buffer
                    )
                else:
                    model_tensor.aliases.append(path)
                if TensorAttribute(module, name) not in model_tensor.attributes:
                    model_tensor.attributes.append(TensorAttribute(module, name))
    return list(model_tensors_by_tensor_id.values())


def find_paths_by_module_id(root: torch.nn.Module) -> dict[int, str]:
    """Return a dict from the id of each module below a model to the first path of the module."""
    paths: dict[int, str] = {}
    for name, module in list_modules(root):
        if name:
            paths.setdefault(id(module), name)
    return paths


def find_root_modules(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules that are inside none of the other modules."""
    descendant_ids: set[int] = set()
    for module in modules:
        descendant_ids.update(map(id, iterate_descendants(module, descendant_ids)))
    return [module for module in modules if id(module) not in descendant_ids]


def iterate_descendants(module: torch.nn.Module, known: set[int] = frozenset()) -> Iterator[torch.nn.Module]:  # pyright: ignore[reportArgumentType]
    """Yield each descendant of a module once, except for descendants of modules with an id in `known`."""
    pending, seen = list(module.children()), {id(module)}
    while pending:
        child = pending.pop()
        if id(child) not in seen:
            seen.add(id(child))
            yield child
            if id(child) not in known:
                pending.extend(child.children())


def make_model_names(roots: Sequence[torch.nn.Module]) -> list[str]:
    """Return a unique name for each model: the name of its class, numbered from the second model of a class on."""
    return make_unique_names([_find_user_class(type(root)).__name__ for root in roots])


def _find_user_class(cls: type) -> type:
    """Return the class that a module's author wrote, instead of the subclass that `fully_shard` creates of it."""
    is_fsdp_class = cls.__name__.startswith("FSDP") and issubclass(cls.__bases__[0], FSDPModule)
    return cls.__bases__[-1] if is_fsdp_class else cls


def list_lazy_layer_paths(root: torch.nn.Module) -> list[str]:
    """Return the paths of the modules that create weights in their first call."""
    return [
        name or type(root).__name__
        for name, module in list_modules(root)
        if any(is_lazy(t) for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    ]
