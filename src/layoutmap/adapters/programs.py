"""The program of a model as texts that processes compare: settings, and the code of functions.

Processes compare it: see `layoutmap.engines.agreement`. A function is its instructions, line by line, with the plain
values that it closes over and the numbers in constants of its module; not its address, and not the file, the line or
the module that it was read from. Code of the frameworks is known by their releases. See docs/decisions/0118.
"""

# pyright: basic
# Values of any type are looked into, which no annotation says.

from __future__ import annotations

import dis
import functools
import linecache
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import numpy as np

from layoutmap.engines.agreement import Trait
from layoutmap.engines.tested import TESTED

_FRAMEWORKS = frozenset((*TESTED, "flax", "jaxlib", "layoutmap", "numpy", "optax"))
_PLAIN = (bool, int, float, complex, bytes, str, type(None), np.generic, Enum)
_DEVICE = re.compile(r"(\w+):\d+")


def versions(*packages: str) -> Iterator[Trait]:
    """The releases of what a program runs on."""
    yield Trait("Python", "{}.{}".format(*sys.version_info))
    yield from (Trait(name, str(sys.modules[name].__version__)) for name in ("layoutmap", *packages))


def lowered_lines(name: str, lowered: Any) -> Iterator[Trait]:
    """The lines of what JAX has lowered: the text has no place of a source, and no address."""
    for number, line in enumerate(lowered.as_text().splitlines(), 1):
        yield Trait(f"the lowered {name}, line {number}", line.strip())


def is_users(thing: object) -> bool:
    """Whether a class or a function is not one of a framework, or Python's own."""
    package = str(getattr(thing, "__module__", "")).partition(".")[0]
    return package not in _FRAMEWORKS and package not in sys.stdlib_module_names


class Program:
    """Collects what makes a program.

    Attributes:
        settings: Values, by what they are.
        lines: The lines of functions.
        read: The names of attributes that functions read, in their order.
    """

    def __init__(self) -> None:
        self.settings: list[Trait] = []
        self.lines: list[Trait] = []
        self.read: dict[str, None] = {}
        self._seen: dict[int, Any] = {}

    def value(self, name: str, value: object, *, may_be_number: bool = False) -> None:
        """Add a value: what is plain in it, and what functions in it do."""
        inside = functools.partial(self.value, may_be_number=may_be_number)
        if isinstance(value, functools.partial):
            inside(name, value.func)
            inside(f"{name}.args", value.args)
            inside(f"{name}.keywords", value.keywords)
        elif isinstance(value, Mapping) and self._is_new(value):
            for key, each in value.items():
                inside(f"{name}.{key}", each)
        elif isinstance(value, (list, tuple)) and not _is_plain(value) and self._is_new(value):
            for number, each in enumerate(value):
                inside(f"{name}.{number}", each)
        else:
            self.settings.append(Trait(name, _text(value), may_be_number=may_be_number))
            self.function(value)

    def function(self, function: Any) -> None:
        """Add what a function does, and the functions of the user that it calls by name; of what is none, nothing."""
        function = getattr(function, "__func__", function)  # of a method
        if not isinstance(function, FunctionType):
            function = getattr(function, "__wrapped__", function)  # of one that is compiled
        if not isinstance(function, FunctionType) or not self._is_new(function):
            return
        name = function.__qualname__
        for held, value in _held(function):
            self.value(f"{name}: {held}", value, may_be_number=True)
        if is_users(function) and self._is_new(function.__code__):
            for other in self._add_lines(function.__code__):
                held = function.__globals__.get(other)
                if isinstance(held, FunctionType):
                    self.function(held)
                elif other.isupper() and isinstance(held, (int, float)):
                    self.value(f"{name}: {other}", held, may_be_number=True)

    def methods(self, kind: type, names: Iterable[str]) -> None:
        """Add what methods of a class of the user do, and the methods and properties that they read."""
        classes = [each for each in kind.__mro__ if is_users(each)]
        known, todo = set[str](), list(names)
        while classes and todo:
            for found in [vars(each).get(name) for name in todo for each in classes]:
                self.function(getattr(found, "fget", found))
            known.update(todo)
            todo = [name for name in self.read if name not in known]

    def _add_lines(self, code: CodeType) -> list[str]:
        """Add the lines of some code, and of what is defined in it; returns the names that it reads in its module."""
        lines: dict[int, list[str]] = {}
        names: list[str] = []
        for each in dis.get_instructions(code):
            place = each.positions and each.positions.lineno
            operand = _text(each.argval) if each.opcode in dis.hasconst else each.argrepr
            lines.setdefault(place or 0, []).append(f"{each.opname} {operand}".strip())
            if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                self.read[each.argval] = None
            elif each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.append(each.argval)
        for place, instructions in lines.items():
            shown = linecache.getline(code.co_filename, place).strip()
            self.lines.append(Trait(code.co_qualname, " ".join(instructions), shown))
        inner = [each for each in code.co_consts if isinstance(each, CodeType)]
        return names + [name for each in inner for name in self._add_lines(each)]

    def _is_new(self, thing: object) -> bool:
        """Whether something was not seen before; it is kept, so that nothing else gets its id."""
        is_new = id(thing) not in self._seen
        self._seen[id(thing)] = thing
        return is_new


def _held(function: FunctionType) -> Iterator[tuple[str, object]]:
    """The values that a function closes over, and the defaults of its arguments."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing was assigned to the name yet
            yield name, cell.cell_contents
    defaults = function.__defaults__ or ()
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(map(_is_plain, value)))


def _text(value: Any) -> str:
    """The same text in each process for values that compute the same: no address, no path, no number of a device."""
    if isinstance(value, str):
        if os.path.isabs(value):
            return "a path"
        return repr(_DEVICE.sub(r"\1", value) if _DEVICE.fullmatch(value) else value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, (*_PLAIN, np.dtype)) or type(value).__name__ == "dtype":
        return str(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    name = "__name__" if isinstance(value, BuiltinFunctionType) else "__qualname__"
    return str(getattr(value, name, type(value).__qualname__))
