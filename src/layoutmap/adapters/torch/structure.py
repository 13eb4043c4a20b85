"""Describe the properties of a module, besides its tensors, that determine its compiled graph.

Dynamo does not guard what a recorded function reads, so a key contains all of it: classes, modes, attributes, hooks,
and which tensor each name stores. Equal modules have equal keys.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from enum import Enum
from typing import Any

import torch

from layoutmap.engines.torch.modules import get_parameters_and_buffers, list_module_hooks
from layoutmap.engines.torch.operators import Function

TORCH_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
"""The attributes of every module."""

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_SIMPLE = frozenset(_VALUES)
_BY_IDENTITY = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.nn.Module)


def is_graph_constant(value: object) -> bool:
    """Return whether a value other than a tensor can be a constant of a graph."""
    if isinstance(value, slice):
        return all(map(is_graph_constant, (value.start, value.stop, value.step)))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return isinstance(value, (*_VALUES, Enum))


class ModuleStructure:
    """Describe the structure of a module and its submodules.

    Args:
        module: The module.

    Attributes:
        parts: A hashable key in parts; equal for modules that compute the same, given the same tensors.
        kept_objects: Objects whose ids are in `parts`. They must stay alive, because ids are reused.
        tensors: The tensors, each once.
        slots: For each attribute that stores a tensor, the dict of attributes, the name, and the tensor.
        attribute_dicts: The dicts with attributes, parameters, and buffers of all modules.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.parts: list[object] = []
        self.kept_objects: list[object] = []
        self.tensors: list[torch.Tensor] = []
        self.slots: list[tuple[dict[str, torch.Tensor], str, torch.Tensor]] = []
        self.attribute_dicts: list[dict[str, Any]] = []
        self._module_numbers: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._objects: set[int] = set()
        self._add_module(module)

    def _add_module(self, module: torch.nn.Module) -> None:
        is_outermost = not self._module_numbers
        self._module_numbers[id(module)] = len(self._module_numbers)
        self.parts += (type(module), module.training, sum(1 for _ in module.named_children()))
        for attributes in (vars(module), *get_parameters_and_buffers(module)):
            self.attribute_dicts.append(attributes)
            for name, value in attributes.items():
                if attributes is vars(module) and name in TORCH_ATTRIBUTES:
                    continue
                if isinstance(value, torch.Tensor):
                    self.slots.append((attributes, name, value))
                    self.parts += (name, self.get_or_add_tensor_index(value))
                else:
                    self.parts += (name, self.make_key(value))
        for name, constants in _find_global_constants(type(module).forward):
            self.parts += (name, self.make_key(constants.get(name)))
        if not is_outermost:  # hooks of the outermost module run outside the graph, so they do not matter
            self.parts += ("hooks", self.make_key(list_module_hooks(module)))
        for name, child in module.named_children():
            self.parts += (name, self._module_numbers.get(id(child)))
            if id(child) not in self._module_numbers:
                self._add_module(child)

    def get_or_add_tensor_index(self, tensor: torch.Tensor) -> int:
        """Return a tensor's index in `tensors`, and append it if it is new."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]

    def make_key(self, value: Any) -> object:
        """Return a hashable value that is equal for values with equal effect on a computation."""
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind in _SIMPLE:
            return kind, value  # with its type, since 1, 1.0 and True are equal  # pyright: ignore[reportUnknownVariableType]
        if kind in (list, tuple):
            return (kind, *map(self.make_key, value))
        if kind in (dict, OrderedDict):
            return (kind, *((self.make_key(name), self.make_key(each)) for name, each in value.items()))
        if isinstance(value, functools.partial):
            return (kind, self.make_key(value.func), self.make_key(value.args), self.make_key(value.keywords))  # pyright: ignore[reportUnknownVariableType]
        make_own_key = getattr(value, "make_structure_key", None)
        if make_own_key is not None and kind.__module__.startswith("layoutmap."):
            return make_own_key()
        return self._make_object_key(value)

    def _make_object_key(self, value: object) -> object:
        """Return an object's id with keys of its attributes, because the attributes of a configuration may change."""
        self.kept_objects.append(value)
        inner = getattr(value, "__dict__", None)
        if inner is None or isinstance(value, _BY_IDENTITY) or id(value) in self._objects:
            return id(value)
        self._objects.add(id(value))
        return (id(value), *((name, self.make_key(each)) for name, each in inner.items()))


@functools.cache
def _find_global_constants(function: Function) -> tuple[tuple[str, dict[str, object]], ...]:
    """Return pairs: the name of a constant that a function reads from its module's globals, and the dict of globals."""
    code, known = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    names = () if code is None else code.co_names
    return tuple((name, known) for name in names if name in known and is_graph_constant(known[name]))


# A module that changes its attributes runs uncompiled, so name the change in the warning (decisions/0105).
def find_changed_attribute(before: ModuleStructure, after: ModuleStructure) -> str:
    """Return the name of the first attribute that differs in two structures of a module, or an empty text."""
    for index, (old_part, new_part) in enumerate(zip(before.parts, after.parts, strict=False)):
        if old_part != new_part:
            return str(before.parts[index - 1])
    return "" if len(before.parts) == len(after.parts) else str(after.parts[-2])
