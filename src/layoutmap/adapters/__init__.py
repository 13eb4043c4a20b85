"""Support one model library per adapter. An adapter's module is imported on first use."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn, TypeVar

from layoutmap.adapters.missing_backend import (
    make_missing_backend_error,
    set_backend_if_only_one_is_installed,
)
from layoutmap.adapters.protocol import (
    Adapter,
    CheckpointAdapter,
    InspectionAdapter,
    ModelAdapter,
    TrainingAdapter,
)
from layoutmap.core.errors import LayoutMapError, ScopeError
from layoutmap.engines.tested import import_module_needing_framework

__all__ = [
    "ADAPTERS",
    "REFUSED_LIBRARIES",
    "Adapter",
    "ModelAdapter",
    "InspectionAdapter",
    "CheckpointAdapter",
    "TrainingAdapter",
    "get_model_adapter",
    "require_capability",
    "get_adapter",
    "get_adapter_of_imported_library",
    "forbid_models_of_other_libraries",
    "raise_unsupported_library_error",
]

Capable = TypeVar("Capable", bound=ModelAdapter)

ADAPTERS = {
    "keras": "layoutmap.adapters.keras",
    "torch": "layoutmap.adapters.torch",
    "jax": "layoutmap.adapters.jax",
}
"""The module of each library's adapter. The name is also that of the package and of the extra that installs it.

`jax` is last, because its models may be of any type, so it gets those that no other adapter owns.
"""


# DTensor trains tf.keras variables wrongly, so refuse this library by name (decisions/0011).
REFUSED_LIBRARIES = {
    "tf_keras": (
        "tf.keras of TF_USE_LEGACY_KERAS=1 makes variables and takes data in ways that DTensor trains wrongly",
        "build the model with Keras 3: unset TF_USE_LEGACY_KERAS, or import keras with KERAS_BACKEND=tensorflow",
    )
}
"""Unsupported libraries that users may expect, each with the reason and the fix."""


def raise_unsupported_library_error(library: str, subject: str) -> NoReturn:
    """Raise a `ScopeError` for a library of `REFUSED_LIBRARIES`, with the reason and a fix.

    Args:
        library: One of `REFUSED_LIBRARIES`.
        subject: The argument or model that belongs to it.
    """
    why, fix = REFUSED_LIBRARIES[library]
    raise ScopeError(f"{subject}: layout maps do not work with {library}", why=why, fix=fix)


_SYNONYMS = {
    "flax": "jax",
    "nnx": "jax",
    "flax.nnx": "jax",
    "pytree": "jax",
    "pytrees": "jax",
    "pytorch": "torch",
}
"""Other names of a library."""


def get_adapter(name: str) -> ModelAdapter:
    """Return the adapter of a model library.

    Args:
        name: One of `ADAPTERS`, such as `"keras"`, or a synonym, such as `"flax"`.

    Raises:
        ScopeError: There is no such adapter, or its library or the backend of Keras is not installed.
        EngineError: The library lacks names that are needed.
    """
    if name in REFUSED_LIBRARIES:
        raise_unsupported_library_error(name, f"library={name!r}")
    name = _SYNONYMS.get(name, name)
    if name not in ADAPTERS:
        raise ScopeError(
            f"there is no adapter {name!r}",
            why=f"the adapters are {', '.join(map(repr, ADAPTERS))}",
            fix="pass one of these names as library=",
        )
    if importlib.util.find_spec(name) is None:
        raise ScopeError(
            f"the {name} adapter needs {name}, which is not installed",
            why=f"no package {name!r} is found in this environment",
            fix=f'pip install "layoutmap[{name}]"',
        )
    if name == "keras":
        set_backend_if_only_one_is_installed()
    try:
        return import_module_needing_framework(name, ADAPTERS[name]).make_adapter()
    except ModuleNotFoundError as error:
        if (missing := make_missing_backend_error(error)) is not None:
            raise missing from error
        raise


def require_capability(adapter: ModelAdapter, capability: type[Capable], function_name: str) -> Capable:
    """Return the adapter if it has all methods of a protocol, such as `TrainingAdapter`, or raise a `ScopeError`.

    Args:
        adapter: The adapter.
        capability: `TrainingAdapter`, `CheckpointAdapter`, `InspectionAdapter`, or `Adapter` for all of them.
        function_name: The name of the calling function, such as `"save"`.

    Raises:
        ScopeError: The adapter lacks methods of the protocol.
    """
    if isinstance(adapter, capability):
        return adapter
    known = {name for name in dir(capability) if not name.startswith("_")}
    missing = sorted(name for name in known if not hasattr(adapter, name))
    raise ScopeError(
        f"{function_name} does not support {adapter.name} models",
        facts={"missing": ", ".join(missing)},
        why=f"{function_name} needs an adapter that implements the protocol {capability.__name__}",
        fix=f"write the missing methods, which layoutmap.adapters.protocol.{capability.__name__} describes",
    )


def get_adapter_of_imported_library() -> ModelAdapter:
    """Return the adapter of the model library that is imported. If several are, the first in `ADAPTERS` wins.

    Raises:
        ScopeError: It has imported none.
    """
    for name in ADAPTERS:
        if name in sys.modules:
            return get_adapter(name)
    for name in REFUSED_LIBRARIES:
        if name in sys.modules:
            raise_unsupported_library_error(name, "the model library that is imported")
    raise ScopeError(
        "no model library is imported",
        why=f"a scope works inside one of {', '.join(ADAPTERS)}, and none of them is imported",
        fix='import your library before opening the scope, or pass library="keras"',
    )


@contextmanager
def forbid_models_of_other_libraries(adapter: ModelAdapter) -> Generator[None]:
    """Raise if models of other imported libraries are built until the block ends, because they would stay unsharded."""
    with ExitStack() as stack:
        for name in ADAPTERS:
            if name != adapter.name and name in sys.modules and importlib.util.find_spec(name) is not None:
                # get_adapter raises for an unsupported release, which must not prevent a scope for another library.
                with suppress(LayoutMapError):
                    stack.enter_context(get_adapter(name).forbid_building_models(adapter.name))
        yield


def find_model_adapter(model: Any) -> ModelAdapter | None:
    """Return the adapter of the library that a model belongs to, or None if it belongs to no library."""
    packages = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    names = [name for name in ADAPTERS if name in packages]
    if not names and "jax" in sys.modules:
        names = ["jax"]
    adapters = map(get_adapter, names)
    return next((adapter for adapter in adapters if adapter.owns_model(model)), None)


def get_model_adapter(model: Any) -> ModelAdapter:
    """Return the adapter of the library that a model belongs to.

    Raises:
        ScopeError: No adapter knows the object.
    """
    if (adapter := find_model_adapter(model)) is not None:
        return adapter
    for base in type(model).__mro__:
        root = base.__module__.partition(".")[0]
        if root in REFUSED_LIBRARIES:
            raise_unsupported_library_error(root, f"{type(model).__module__}.{type(model).__qualname__}")
    raise ScopeError(
        f"{type(model).__module__}.{type(model).__qualname__} is not a model",
        why=f"it belongs to none of the supported libraries: {', '.join(ADAPTERS)}",
        fix="pass a model, or a function that builds and returns one",
    )
