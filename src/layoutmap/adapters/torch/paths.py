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
from layoutmap.engines.torch.modules import get_members, list_modules


@dataclass(frozen=True, slots=True)
class Holder:
    """A module attribute that stores a tensor."""

    module: torch.nn.Module
    name: str

    @property
    def held(self) -> torch.Tensor | None:
        """Return the tensor that the module stores under this name now, or None if it was pruned."""
        return self._members.get(self.name)

    def put(self, tensor: torch.Tensor | None) -> None:
        """Store another tensor in the attribute."""
        self._members[self.name] = tensor

    @property
    def _members(self) -> dict[str, torch.Tensor | None]:
        parameters, buffers = get_members(self.module)
        return parameters if self.name in parameters else buffers


@dataclass(slots=True)
class FoundTensor:
    """A parameter or a buffer of a model.

    Args:
        tensor: The tensor.
        path: The first name that leads to it.
        is_buffer: Whether it is a buffer.
        aliases: The other names.
        places: Every attribute that holds it.
    """

    tensor: torch.Tensor
    path: str
    is_buffer: bool
    aliases: list[str] = field(default_factory=list[str])
    places: list[Holder] = field(default_factory=list[Holder])


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a scope, as the core will see it."""

    found: FoundTensor
    spec: VariableSpec


def has_forward(module: torch.nn.Module) -> bool:
    """Return whether a module can be called. A `ModuleList`, for example, cannot."""
    return type(module).forward is not torch.nn.Module.forward


def unwrap_compiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that was passed to `torch.compile`, or the module itself if it is not compiled."""
    return getattr(model, "_orig_mod", model)


def is_keras_module(module: torch.nn.Module) -> bool:
    """Return whether a module is a Keras layer with the torch backend."""
    return any(base.__module__.partition(".")[0] == "keras" for base in type(module).__mro__)


def find_tensors(root: torch.nn.Module) -> list[FoundTensor]:
    """Return the parameters of a model, then its buffers, each once."""
    found: dict[int, FoundTensor] = {}
    modules = list_modules(root, remove_duplicate=False)  # include all names of a shared module
    for is_buffer in (False, True):
        for prefix, module in modules:
            members = module.named_buffers if is_buffer else module.named_parameters
            for name, tensor in members(recurse=False, remove_duplicate=False):
                path = f"{prefix}.{name}" if prefix else name
                known = found.get(id(tensor))
                if known is None:
                    known = found[id(tensor)] = FoundTensor(tensor, path, is_buffer)
                else:
                    known.aliases.append(path)
                if Holder(module, name) not in known.places:
                    known.places.append(Holder(module, name))
    return list(found.values())


def find_layer_paths(root: torch.nn.Module) -> dict[int, str]:
    """Return the first path of each module below a model, by the module's id."""
    paths: dict[int, str] = {}
    for name, module in list_modules(root):
        if name:
            paths.setdefault(id(module), name)
    return paths


def find_roots(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules that are inside no other module of the list."""
    inside: set[int] = set()
    for module in modules:
        inside.update(map(id, iterate_descendants(module, inside)))
    return [module for module in modules if id(module) not in inside]


def iterate_descendants(module: torch.nn.Module, known: set[int] = frozenset()) -> Iterator[torch.nn.Module]:  # pyright: ignore[reportArgumentType]
    """Yield every module below a module once, without descending into known modules."""
    todo, seen = list(module.children()), {id(module)}
    while todo:
        child = todo.pop()
        if id(child) not in seen:
            seen.add(id(child))
            yield child
            if id(child) not in known:
                todo.extend(child.children())


def make_model_names(roots: Sequence[torch.nn.Module]) -> list[str]:
    """Return a distinct name for each model: its class's name, numbered from the second of a class on."""
    return make_unique_names([_find_user_class(type(root)).__name__ for root in roots])


def _find_user_class(kind: type) -> type:
    """Return a module's class as written by its author, without the FSDP class that `fully_shard` mixes in."""
    is_made = kind.__name__.startswith("FSDP") and issubclass(kind.__bases__[0], FSDPModule)
    return kind.__bases__[-1] if is_made else kind


def find_lazy_layers(root: torch.nn.Module) -> list[str]:
    """Return the names of modules that create weights in their first call."""
    return [
        name or type(root).__name__
        for name, module in list_modules(root)
        if any(is_lazy(t) for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    ]
