"""Record the scope that sharded a model, while the model exists."""

from __future__ import annotations

import weakref
from contextlib import suppress

from layoutmap.adapters.protocol import ScopeContext

_contexts: dict[int, tuple[weakref.ref[object], ScopeContext]] = {}


def record_scope_context(model: object, context: ScopeContext) -> None:
    """Record the context of the scope that sharded a model. Ignore dicts and tuples, which allow no weak references."""
    key = id(model)
    with suppress(TypeError):
        _contexts[key] = weakref.ref(model, lambda _: _contexts.pop(key, None)), context


def find_scope_context(model: object) -> ScopeContext | None:
    """Return the context of the scope that sharded a model, or None."""
    ref, context = _contexts.get(id(model), (None, None))
    return context if ref is not None and ref() is model else None
