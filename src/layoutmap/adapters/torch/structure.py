"""Describe the properties of a module, besides its tensors, that determine its compiled graph.

No guard of Dynamo watches what a recorded function reads, so all of it is in a key: classes, modes, attributes, hooks,
and which tensor is where. Equal modules have equal keys.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from enum import Enum
from typing import Any

import torch

from layoutmap.engines.torch.modules import get_members, list_module_hooks
from layoutmap.engines.torch.operators import Function

OF_TORCH = frozenset(vars(torch.nn.Module()))
"""The attributes of every module."""

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_SIMPLE = frozenset(_VALUES)
_BY_IDENTITY = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.nn.Module)


def is_constant(value: object) -> bool:
    """Return whether a value other than a tensor can be a constant of a graph."""
    if isinstance(value, slice):
        return all(map(is_constant, (value.start, value.stop, value.step)))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return isinstance(value, (*_VALUES, Enum))


class Structure:
    """Describe the structure of a module and its submodules.

    Args:
        module: The module.

    Attributes:
        parts: Hashable; equal for modules that compute the same, given the same tensors.
        kept: Objects whose ids are in `parts`.
        tensors: The tensors, each once.
        places: Where tensors are: the dict, the name in it, and the tensor.
        members: All dicts of attributes.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.parts: list[object] = []
        self.kept: list[object] = []
        self.tensors: list[torch.Tensor] = []
        self.places: list[tuple[dict[str, torch.Tensor], str, torch.Tensor]] = []
        self.members: list[dict[str, Any]] = []
        self._module_numbers: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._objects: set[int] = set()
        self._add_module(module)

    def _add_module(self, module: torch.nn.Module) -> None:
        is_outermost = not self._module_numbers
        self._module_numbers[id(module)] = len(self._module_numbers)
        self.parts += (type(module), module.training, sum(1 for _ in module.named_children()))
        for members in (vars(module), *get_members(module)):
            self.members.append(members)
            for name, value in members.items():
                if members is vars(module) and name in OF_TORCH:
                    continue
                if isinstance(value, torch.Tensor):
                    self.places.append((members, name, value))
                    self.parts += (name, self.number(value))
                else:
                    self.parts += (name, self.frozen(value))
        for name, known in _find_globals(type(module).forward):
            self.parts += (name, self.frozen(known.get(name)))
        if not is_outermost:  # hooks of the outermost module run outside the graph, so they do not matter
            self.parts += ("hooks", self.frozen(list_module_hooks(module)))
        for name, child in module.named_children():
            self.parts += (name, self._module_numbers.get(id(child)))
            if id(child) not in self._module_numbers:
                self._add_module(child)

    def number(self, tensor: torch.Tensor) -> int:
        """Return a tensor's index in `tensors`, and append it if it is new."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]

    def frozen(self, value: Any) -> object:
        """Return a hashable value that is equal for values with equal effect on a computation."""
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind in _SIMPLE:
            return kind, value  # with its type, since 1, 1.0 and True are equal  # pyright: ignore[reportUnknownVariableType]
        if kind in (list, tuple):
            return (kind, *map(self.frozen, value))
        if kind in (dict, OrderedDict):
            return (kind, *((self.frozen(name), self.frozen(each)) for name, each in value.items()))
        if isinstance(value, functools.partial):
            return (kind, self.frozen(value.func), self.frozen(value.args), self.frozen(value.keywords))  # pyright: ignore[reportUnknownVariableType]
        own = getattr(value, "structure", None)
        if own is not None and kind.__module__.startswith("layoutmap."):
            return own()
        return self._hash_object(value)

    def _hash_object(self, value: object) -> object:
        """Return an object's identity and attributes, since a configuration may change."""
        self.kept.append(value)
        inner = getattr(value, "__dict__", None)
        if inner is None or isinstance(value, _BY_IDENTITY) or id(value) in self._objects:
            return id(value)
        self._objects.add(id(value))
        return (id(value), *((name, self.frozen(each)) for name, each in inner.items()))


@functools.cache
def _find_globals(function: Function) -> tuple[tuple[str, dict[str, object]], ...]:
    """Return the constants that a function reads from its module's globals, each with the dict that contains it."""
    code, known = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    names = () if code is None else code.co_names
    return tuple((name, known) for name in names if name in known and is_constant(known[name]))


# A module that changes its attributes runs uncompiled, so name the change in the warning (decisions/0105).
def find_change(before: Structure, after: Structure) -> str:
    """Return the name of the first difference between two structures of a module, or an empty text."""
    for number, (one, other) in enumerate(zip(before.parts, after.parts, strict=False)):
        if one != other:
            return str(before.parts[number - 1])
    return "" if len(before.parts) == len(after.parts) else str(after.parts[-2])
