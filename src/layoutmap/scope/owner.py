"""Find the library of a model from the model that a function returns, if several libraries are imported."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

from layoutmap.adapters import ADAPTERS, get_model_adapter
from layoutmap.core.errors import LayoutMapError, ScopeError

P = ParamSpec("P")
R = TypeVar("R")


class OtherLibraryError(ScopeError):
    """Raised for a model of another library than that of the scope.

    Attributes:
        library: The library of the model.
    """

    def __init__(self, model: object, owner: str, library: str):
        self.library = owner
        super().__init__(
            f"{type(model).__name__}: a {owner} model is built in a scope for {library} models",
            why="a scope is for one library",
            fix=f"pass library={owner!r}",
        )


def check_owner(model: object, library: str) -> None:
    """Raise if a model is not of the library of the scope.

    Raises:
        OtherLibraryError: It is of another library.
        ScopeError: It is no model.
    """
    owner = get_model_adapter(model).name
    if owner != library:
        raise OtherLibraryError(model, owner, library)


def infer_library(function: Callable[P, R]) -> Callable[P, R]:
    """Call a function again with the library of the model, if `library` is None and the first call found another one.

    The first call is for the first imported library, since a Keras program on JAX has imported both. It has changed
    nothing but random states, which are restored, so values are those of one call.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        imported = [name for name in ADAPTERS if name in sys.modules]
        if kwargs.get("library") is not None or len(imported) < 2:
            return function(*args, **kwargs)
        from layoutmap.adapters.random_states import read_states, restore_states  # late: it imports numpy

        states = read_states()
        again: Callable[..., R] = function
        try:
            return function(*args, **kwargs)
        except OtherLibraryError as error:
            restore_states(states)
            return again(*args, **{**kwargs, "library": error.library})
        except LayoutMapError:
            raise
        except Exception as error:
            # Code of a JAX model that names mesh dims fails without a mesh, and only a scope for JAX has one.
            if "jax" not in imported[1:] or "mesh" not in str(error):
                raise
            restore_states(states)
            with suppress(Exception):
                return again(*args, **{**kwargs, "library": "jax"})
            raise

    return run
