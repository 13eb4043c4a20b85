"""Describe a program by named texts, which processes compare before its first call (decisions/0181)."""

# pyright: basic
# pyright cannot type the inspection of arbitrary values.

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import zlib
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

from layoutmap.engines.agreement import NamedText


def iterate_versions(*packages: str) -> Iterator[NamedText]:
    """Yield pairs of a name and a version: of Python, layoutmap, and each package in `packages` that is imported."""
    yield "Python", "{}.{}".format(*sys.version_info)
    for name in ("layoutmap", *packages):
        if name in sys.modules:
            yield name, str(sys.modules[name].__version__)


def hash_lowered_step(step_name: str, lowered_step: Any) -> NamedText:
    """Return the name of a lowered JAX step, and a hash of its text, which has no source lines or addresses."""
    digest = hashlib.sha256(lowered_step.as_text().encode()).hexdigest()
    return f"the lowered {step_name}", f"hash {digest[:16]}"


def format_function_fingerprint(function: Any) -> str:
    """Return the qualified name of a function and, if available, a hash of its source."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    try:
        return f"{name}, source {zlib.crc32(dedent(inspect.getsource(function)).encode()):08x}"
    except (OSError, TypeError):  # an interactive or compiled function has no source, so use its name
        return name


def format_setting(value: Any) -> str:
    """Return a setting as text: a simple value as its repr, a function by its source, and others by their type."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_setting, value))}]"
    return format_function_fingerprint(value) if inspect.isroutine(value) else type(value).__qualname__
