"""Import and run the code that creates a user's model, and separate its errors from layoutmap's."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from layoutmap.adapters.missing_backend import (
    make_missing_backend_error,
    set_backend_if_only_one_is_installed,
)
from layoutmap.cli.models import check_published_model_exists
from layoutmap.core.errors import LayoutMapError
from layoutmap.engines import get_engine

_LIBRARY_FILES = (
    str(Path(__file__).parents[1]) + os.sep,
    str(importlib.__file__),
    str(contextlib.__file__),
    "<frozen importlib",
)


class UsersCodeError(LayoutMapError):
    """Raised if a user's module or function raised an error. `trace` is its traceback from the user's first line on."""

    def __init__(self, name: str, error: BaseException):
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_LIBRARY_FILES):
            trace = trace.tb_next
        self.trace = "".join(traceback.TracebackException(type(error), error, trace).format()).rstrip()
        super().__init__(
            f"{name} raised {type(error).__name__}",
            why="the model could not be created, so there is no plan",
            fix="fix the error that is shown above, and run the command again"
            + _make_simulation_hint(self.trace),
        )


def _make_simulation_hint(trace: str) -> str:
    """Return a hint to simulate devices if a traceback is about devices and JAX has one CPU device, else ""."""
    code = [line for line in trace.splitlines() if not line.lstrip().startswith("File ")]
    if "jax" not in sys.modules or not re.search("mesh|devices", "\n".join(code), re.IGNORECASE):
        return ""
    try:
        names = get_engine("jax").list_device_names()
    except RuntimeError:  # JAX cannot start, which may be the error of the user's code
        return ""
    if names != ("CPU:0",):
        return ""
    return (
        "; JAX has one CPU device: to simulate 8, set XLA_FLAGS=--xla_force_host_platform_device_count=8, "
        "or call lm.simulate_devices(8) first"
    )


# A model's code may exit, change the working directory, or print, so run it only in this context (decisions/0034).
@contextlib.contextmanager
def isolate_users_code(
    name: str, backend_fix: str = "type KERAS_BACKEND={} layoutmap ..."
) -> Generator[None]:
    """Let the block run a user's code: it can import from the current folder, and cannot end the program.

    The code's output goes to stderr, so that stdout has only the plan. The current folder and stdout are restored.
    """
    set_backend_if_only_one_is_installed()
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (LayoutMapError, ModuleNotFoundError) as error:
        missing = make_missing_backend_error(error.__cause__ or error, backend_fix)
        if missing is not None:
            raise missing from error
        if isinstance(error, LayoutMapError):
            raise
        raise UsersCodeError(name, error) from error
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        raise LayoutMapError(
            f"{name} called sys.exit({'' if error.code is None else repr(error.code)})",
            why="the program would end before there is a plan",
            fix='move the code that runs the program under: if __name__ == "__main__":',
        ) from error
    except BaseException as error:
        raise UsersCodeError(name, error) from error
    finally:
        os.chdir(folder)
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def parse_function_name(name: str) -> tuple[str, str]:
    """Return the names of the module and the function in `module:function`. Raise if the name has no such form."""
    module, colon, function = name.partition(":")
    if not colon and all(map(str.isidentifier, parts := name.split("."))) and len(parts) > 1:
        module, function = ".".join(parts[:-1]), parts[-1]
    dotted = ".".join(Path(module.removesuffix(".py")).parts)
    in_folder = dotted and "" not in dotted.split(".") and not os.path.isabs(module)
    if colon and dotted == module and in_folder and function.isidentifier():
        return module, function
    raise LayoutMapError(
        f"{name!r} names no function that creates a model",
        why="a model is named as package.module:function, from the current folder, and a plan's file ends in .json",
        fix=f"layoutmap plan {dotted if in_folder else 'my_models'}:{function or 'make_model'}",
    )


def import_function(module_name: str, function_name: str) -> Callable[[], Any]:
    """Import a module, and return its function of this name, which must be callable without arguments."""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its own imports is missing
        raise LayoutMapError(
            f"{module_name} cannot be imported",
            why=str(error),
            fix="run the command in the folder with this module, or install it",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        check_published_model_exists(module_name, function_name)
        near = [n for n, value in vars(module).items() if not n.startswith("_") and callable(value)]
        raise LayoutMapError(
            f"{module_name} has no function {function_name!r}",
            facts={"functions": ", ".join(near[:10])},
            fix="name a function that creates and returns a model",
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise LayoutMapError(
            f"{module_name}:{function_name} cannot be called without arguments",
            why=str(error),
            fix=f"name a new function that calls {function_name} with its arguments and returns the model",
        ) from error
    except ValueError:  # builtins may have no signature
        pass
    return function
