"""Find the library of the model that a function returns, if several libraries are imported."""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ParamSpec, TypeVar

from layoutmap.adapters import ADAPTERS, get_model_adapter
from layoutmap.core.errors import LayoutMapError, ScopeError
from layoutmap.rules.rule_set import RuleSet

P = ParamSpec("P")
R = TypeVar("R")


class OtherLibraryError(ScopeError):
    """Raised if a model does not belong to the library of its scope.

    Attributes:
        library: The library of the model.
    """

    def __init__(self, model: object, owner: str, library: str):
        self.library = owner
        super().__init__(
            f"{type(model).__name__}: a {owner} model is built in a scope for {library} models",
            why="a scope supports one library",
            fix=f"pass library={owner!r}",
        )


def check_model_library(model: object, library: str) -> None:
    """Raise if a model does not belong to the library of its scope.

    Raises:
        OtherLibraryError: The model is of a different library.
        ScopeError: The value is not a model of a supported library.
    """
    owner = get_model_adapter(model).name
    if owner != library:
        raise OtherLibraryError(model, owner, library)


_LIBRARY_OF_PACKAGE = {"keras": "keras", "torch": "torch", "jax": "jax", "flax": "jax", "equinox": "jax"}
"""The model library that a package belongs to."""
_MAX_SEARCHED_NAMES = 200


def find_libraries_named_in_code(function: object) -> set[str]:
    """Return the model libraries that a function's code refers to, without calling it.

    The code of functions that it names is searched, too. A class belongs to the libraries of its base classes.
    """
    return set[str]().union(*map(_find_defining_libraries, _list_all_referenced_objects(function)))


def choose_library_to_import(function: object) -> str | None:
    """Return the library to try first for the model of a function if none is imported, or `None` to try none.

    It is one that the code names. Packages built on another library name none: most are built on torch, so try it.
    """
    referenced = _list_all_referenced_objects(function)
    named = set[str]().union(*map(_find_defining_libraries, referenced))
    if not named and len(referenced) > 1:
        named = {"torch"}
    return next((name for name in ADAPTERS if name in named and importlib.util.find_spec(name)), None)


def _list_all_referenced_objects(function: object) -> list[object]:
    """Return a function and the objects that its code names, also through other functions that belong to no library."""
    seen, queue = dict[int, object](), [function]
    while queue and len(seen) < _MAX_SEARCHED_NAMES:
        value = queue.pop()
        while isinstance(value, functools.partial):
            value = value.func
        value = inspect.unwrap(value) if callable(value) else value
        value = value.__func__ if isinstance(value, MethodType) else value
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, FunctionType) and not _find_defining_libraries(value):
            queue += _list_referenced_objects(value)
    return list(seen.values())


def _find_defining_libraries(value: Any) -> set[str]:
    """Return the model libraries that define a value. A class also belongs to the libraries of its base classes."""
    if isinstance(value, ModuleType):
        modules = [value.__name__]
    elif isinstance(value, str):  # the name in an import statement
        modules = [value]
    elif isinstance(value, type):
        modules = [base.__module__ for base in value.__mro__]
    else:
        modules = [getattr(value, "__module__", None)]
    roots = {name.partition(".")[0] for name in modules if isinstance(name, str)}
    return {_LIBRARY_OF_PACKAGE[root] for root in roots if root in _LIBRARY_OF_PACKAGE}


def _list_referenced_objects(function: FunctionType) -> list[object]:
    """Return the objects that a function's code names: globals, closure variables, and attributes of modules.

    Modules that the code imports are returned as names, because importing them could change what the code does.
    """
    names, imported, codes = dict[str, None](), list[str](), [function.__code__]
    while codes:
        code = codes.pop()
        names |= dict.fromkeys(code.co_names)
        imported += [each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"]
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    with suppress(ValueError):  # a closure variable may have no value yet
        closure = [cell.cell_contents for cell in function.__closure__ or ()]
        scope = {**function.__globals__, **dict(zip(function.__code__.co_freevars, closure, strict=True))}
        values = [scope[name] for name in (*names, *function.__code__.co_freevars) if name in scope]
        modules = [
            value for value in values if isinstance(value, ModuleType) and not _find_defining_libraries(value)
        ]
        return [*values, *imported, *_list_attributes(modules, names)]
    return list(imported)


def _list_attributes(modules: Iterable[ModuleType], names: Collection[str]) -> list[object]:
    """Return the attributes of modules with these names. A lazy module imports an attribute's library."""
    found = list[object]()
    for module in modules:
        for name in names:
            with suppress(Exception):  # the import of a library that is missing or broken raises any error
                found.append(getattr(module, name))
    return found


def retry_with_model_library(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that it is called again with the library of the model, if the first guess was wrong.

    The first call is for JAX if the function that creates the model names no other library, so that no unsharded array
    is created (decisions/0259). Otherwise it is for the first imported library, since a Keras program on JAX has
    imported both, or if none is imported, for the one of `choose_library_to_import`. It changes only random states,
    which are restored, so values are those of one call.
    """

    @functools.wraps(function)
    def call_with_library_and_retry(*args: P.args, **kwargs: P.kwargs) -> R:
        values = [*args, *kwargs.values()]
        # Without a layout map, `load` gets an existing model and builds none, so choose no library here.
        builds = any(isinstance(value, RuleSet) for value in values)
        imported = [name for name in ADAPTERS if name in sys.modules]
        if kwargs.get("library") is not None or not (imported or builds):
            return function(*args, **kwargs)
        # Imported here, because it loads numpy, which is slow.
        from layoutmap.adapters.random_states import (
            read_python_and_numpy_states,
            restore_python_and_numpy_states,
        )

        first = None
        if not imported:
            first = choose_library_to_import(values[0])
        elif builds and "jax" in imported and find_libraries_named_in_code(values[0]) == {"jax"}:
            first = "jax"
        states = read_python_and_numpy_states()
        call: Callable[..., R] = function
        try:
            return function(*args, **kwargs) if first is None else call(*args, **{**kwargs, "library": first})
        except OtherLibraryError as error:
            restore_python_and_numpy_states(states)
            return call(*args, **{**kwargs, "library": error.library})
        except LayoutMapError:
            raise
        except Exception as error:
            # A JAX model that names mesh dims needs a mesh, and only a scope for JAX sets one, so retry with JAX.
            if first == "jax" or "jax" not in imported[1:] or "mesh" not in str(error):
                raise
            restore_python_and_numpy_states(states)
            with suppress(Exception):
                return call(*args, **{**kwargs, "library": "jax"})
            raise

    return call_with_library_and_retry
