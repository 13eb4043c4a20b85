"""Find the library of the model that a function returns, if several libraries are imported."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
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
    libraries, seen, queue = set[str](), dict[int, object](), [function]
    while queue and len(seen) < _MAX_SEARCHED_NAMES:
        value = queue.pop()
        while isinstance(value, functools.partial):
            value = value.func
        value = inspect.unwrap(value) if callable(value) else value
        value = getattr(value, "__func__", value)  # unwrap a bound method
        if id(value) in seen:
            continue
        seen[id(value)] = value
        found = _find_libraries(value)
        libraries |= found
        if not found and isinstance(value, FunctionType):
            queue += _list_referenced_objects(value)
    return libraries


def _find_libraries(value: Any) -> set[str]:
    """Return the model libraries that define a value. A class also belongs to the libraries of its base classes."""
    if isinstance(value, ModuleType):
        modules = [value.__name__]
    elif isinstance(value, type):
        modules = [base.__module__ for base in value.__mro__]
    else:
        modules = [getattr(value, "__module__", None)]
    roots = {name.partition(".")[0] for name in modules if isinstance(name, str)}
    return {_LIBRARY_OF_PACKAGE[root] for root in roots if root in _LIBRARY_OF_PACKAGE}


def _list_referenced_objects(function: FunctionType) -> list[object]:
    """Return the objects that a function's code names: globals, closure variables, and attributes of modules."""
    names, codes = dict[str, None](), [function.__code__]
    while codes:
        code = codes.pop()
        names |= dict.fromkeys(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    with suppress(ValueError):  # a closure variable may have no value yet
        closure = [cell.cell_contents for cell in function.__closure__ or ()]
        scope = {**function.__globals__, **dict(zip(function.__code__.co_freevars, closure, strict=True))}
        values = [scope[name] for name in (*names, *function.__code__.co_freevars) if name in scope]
        modules = [value for value in values if isinstance(value, ModuleType) and not _find_libraries(value)]
        return [
            *values,
            *(vars(module)[name] for module in modules for name in names if name in vars(module)),
        ]
    return []


def retry_with_model_library(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that it is called again with the library of the model, if the first guess was wrong.

    The first call is for JAX if the function that creates the model names no other library, so that no unsharded array
    is created (decisions/0259). Otherwise it is for the first imported library, since a Keras program on JAX has
    imported both. It changes only random states, which are restored, so values are those of one call.
    """

    @functools.wraps(function)
    def call_with_library_and_retry(*args: P.args, **kwargs: P.kwargs) -> R:
        imported = [name for name in ADAPTERS if name in sys.modules]
        if kwargs.get("library") is not None or len(imported) < 2:
            return function(*args, **kwargs)
        # Imported here, because it loads numpy, which is slow.
        from layoutmap.adapters.random_states import (
            read_python_and_numpy_states,
            restore_python_and_numpy_states,
        )

        values = [*args, *kwargs.values()]
        # Without a layout map, `load` gets an existing model and builds none, so do not choose JAX here.
        builds = any(isinstance(value, RuleSet) for value in values)
        is_jax = builds and "jax" in imported and find_libraries_named_in_code(values[0]) == {"jax"}
        states = read_python_and_numpy_states()
        call: Callable[..., R] = function
        try:
            return call(*args, **{**kwargs, "library": "jax"}) if is_jax else function(*args, **kwargs)
        except OtherLibraryError as error:
            restore_python_and_numpy_states(states)
            return call(*args, **{**kwargs, "library": error.library})
        except LayoutMapError:
            raise
        except Exception as error:
            # A JAX model that names mesh dims needs a mesh, and only a scope for JAX sets one, so retry with JAX.
            if is_jax or "jax" not in imported[1:] or "mesh" not in str(error):
                raise
            restore_python_and_numpy_states(states)
            with suppress(Exception):
                return call(*args, **{**kwargs, "library": "jax"})
            raise

    return call_with_library_and_retry
