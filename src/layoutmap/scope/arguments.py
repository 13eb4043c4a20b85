"""Check the arguments of `plan`, `build`, `apply`, `scope`, and `check_parity`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from layoutmap.adapters import find_model_adapter
from layoutmap.adapters.options import ScopeOptions
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import ScopeError, shorten_repr
from layoutmap.rules.rule_set import RuleSet

F = TypeVar("F", bound=Callable[..., Any])


def document_scope_options(function: F) -> F:
    """Return the function, with the scope's options in place of `**options` in its signature and docstring."""
    parameters = list(inspect.signature(function).parameters.values())[:-1]
    for field in dataclasses.fields(ScopeOptions):
        kind, default = inspect.Parameter.KEYWORD_ONLY, field.default
        if field.name == "own":
            kind, default = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.empty
        parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=field.type))
    documented: Any = function
    documented.__signature__ = inspect.signature(function).replace(parameters=parameters)
    if function.__doc__ is not None and ScopeOptions.__doc__ is not None:
        options = inspect.cleandoc(ScopeOptions.__doc__).partition("Args:\n")[2].partition("\n\n")[0]
        documented.__doc__ = re.sub(
            r"    \*\*options: .*\n", lambda _: f"{options}\n", inspect.cleandoc(function.__doc__), count=1
        )
    return function


def check_model_function(make_model: object, layout_map: object, caller: str) -> None:
    """Raise unless the two arguments of a call are a function that creates a model and a layout map."""
    _check_arguments_not_swapped(make_model, layout_map, caller, "make_model")
    check_layout_map(layout_map, caller)
    if find_model_adapter(make_model) is not None:
        raise ScopeError(
            f"{caller}: {type(make_model).__name__} is a model, not a function that creates one",
            why=f"{caller} creates the model itself, so that every variable is created in its layout",
            fix=f"pass the function: lm.{caller}(make_model, layout_map); "
            "to shard an existing model, call lm.apply(model, layout_map)",
        )
    if not callable(make_model):
        raise ScopeError(
            f"{caller}: make_model is not a function that creates a model",
            why=f"it is {describe_type(make_model)}",
            fix=f"pass a function: lm.{caller}(lambda: keras.Sequential([...]), layout_map)",
        )


def check_apply_arguments(model: object, layout_map: object) -> None:
    """Raise unless the arguments of `apply` are a model and a layout map.

    Raises:
        ScopeError: The first argument is a function, the arguments are swapped, or there is no layout map.
    """
    _check_arguments_not_swapped(model, layout_map, "apply", "model")
    check_layout_map(layout_map, "apply")
    if _is_function(model):
        raise ScopeError(
            f"apply: {getattr(model, '__name__', type(model).__name__)} is a function, not a model",
            why="apply shards an existing model",
            fix="pass the model that the function returns, or call lm.build(make_model, layout_map)",
        )


def check_layout_map(layout_map: object, caller: str) -> None:
    """Raise unless the layout map argument of a call is a layout map."""
    if isinstance(layout_map, RuleSet):
        return
    rules = "rules" if isinstance(layout_map, Mapping) else "{...}"
    raise ScopeError(
        f"{caller}: layout_map is not a LayoutMap",
        why=f"it is {describe_type(layout_map)}",
        fix=f'pass lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {rules})',
    )


def _is_function(value: object) -> bool:
    """Return whether a value is a function, a class, or a `functools.partial`. Callable models are none of these."""
    return inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, functools.partial)


def _check_arguments_not_swapped(model: object, layout_map: object, caller: str, model_argument: str) -> None:
    """Raise if the model and the layout map of a call are swapped."""
    if isinstance(model, RuleSet) and not isinstance(layout_map, RuleSet):
        raise ScopeError(
            f"{caller}: the arguments are swapped",
            why="the layout map is the second argument",
            fix=f"write lm.{caller}({model_argument}, layout_map)",
        )


def check_cost_options(on: object, num_devices: int, options: Mapping[str, object]) -> None:
    """Raise if `plan` gets an option for the cost of a step, but no machine that the cost is for.

    Args:
        on: The machine; `None`: no cost is computed.
        num_devices: The size of the mesh, for the fix in the message.
        options: The options by name.
    """
    for name, value in options.items():
        if on is None and value not in (None, False):
            raise ScopeError(
                f"plan: {name}={value!r} has no effect without on=",
                why="it affects the cost of a training step, which is computed only with on=",
                fix=f"leave {name} out, or name the machine, as in on='h100:{num_devices}'",
            )


# Layers recompute activations as a whole, so `remat` is a regex over layer paths (decisions/0094).
def check_remat(remat: Any) -> None:
    """Raise unless `remat` is `None` or a regex for the layers that recompute activations."""
    try:
        if remat is not None:
            re.compile(remat)
    except (re.error, TypeError) as error:
        raise ScopeError(
            f"remat={shorten_repr(remat)} is not a regex for layers",
            why=f"{error}",
            fix="write remat='blocks', or a regex for the paths of layers, as in remat=r'blocks\\.0$'",
        ) from error
