"""Track the layers, optimizers, and variables of one scope while they exist."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from layoutmap.core.layout import Layout
from layoutmap.core.variables import Kind

T = TypeVar("T")


@dataclass(slots=True)
class _Record:
    """Record of one variable, removed when the variable is deleted."""

    variable: weakref.ref[Any]
    parent: weakref.ref[object] | None = None
    tag: object = None
    layout: Layout | None = None
    layer: weakref.ref[object] | None = None
    kind: Kind = Kind.METRIC


class Registry:
    """Track the layers, optimizers, and variables of one scope."""

    def __init__(self) -> None:
        self.version = 0
        self._layers: list[weakref.ref[Any]] = []
        self._optimizers: list[weakref.ref[object]] = []
        self._records: dict[int, _Record] = {}  # by the variable's id, in order of creation
        self._tagged: dict[int, _Record] = {}  # by id of the tag

    # -- layers and optimizers

    def add_layer(self, layer: object) -> None:
        """Add a layer."""
        self.version += 1
        self._layers.append(weakref.ref(layer))

    def add_optimizer(self, optimizer: object) -> None:
        """Add an optimizer, once."""
        if not any(ref() is optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def remove_owner(self, thing: object) -> None:
        """Remove a layer or an optimizer with its variables."""
        self._layers = [ref for ref in self._layers if ref() is not thing]
        self._optimizers = [ref for ref in self._optimizers if ref() is not thing]
        for variable in getattr(thing, "variables", ()):
            self._remove_record(id(variable))

    def layers(self) -> list[Any]:
        """Return the layers that still exist."""
        self._layers = [ref for ref in self._layers if ref() is not None]
        layers = [layer for ref in self._layers if (layer := ref()) is not None]
        # Keras creates an object without calling __init__ if a Functional model is subclassed.
        return [layer for layer in layers if hasattr(layer, "built")]

    def optimizers(self) -> list[Any]:
        """Return the optimizers that still exist."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    # -- variables

    def add(self, variable: object, layer: object = None, kind: Kind = Kind.METRIC) -> None:
        """Add a variable once. `kind` applies if no layer or optimizer owns it."""
        if id(variable) not in self._records:
            record = self._get_record(variable)
            record.layer, record.kind = None if layer is None else weakref.ref(layer), kind

    def find_layer(self, variable: object) -> object:
        """Return the layer that created a variable, or None."""
        record = self._records.get(id(variable))
        return record.layer() if record is not None and record.layer is not None else None

    def find_kind(self, variable: object) -> Kind:
        """Return the kind of a variable that belongs to no layer and no optimizer."""
        record = self._records.get(id(variable))
        return record.kind if record is not None else Kind.METRIC

    def remove_variable(self, variable: object) -> None:
        """Remove a variable."""
        self._remove_record(id(variable))

    def has_variable(self, variable: object) -> bool:
        """Return whether a variable was added."""
        return id(variable) in self._records

    def variables(self) -> list[Any]:
        """Return the variables that are alive, in the order in which they were made."""
        return [v for record in list(self._records.values()) if (v := record.variable()) is not None]

    def set_parent(self, variable: object, parent: object) -> None:
        """Record that a variable is a slot of `parent`."""
        self._get_record(variable).parent = weakref.ref(parent)

    def find_parent(self, variable: object) -> Any:
        """Return the weight that a slot belongs to, or None."""
        record = self._records.get(id(variable))
        return record.parent() if record is not None and record.parent is not None else None

    def set_layout(self, variable: object, layout: Layout, tag: object) -> None:
        """Record the layout of a variable, and the object that is now its `_layout`."""
        record = self._get_record(variable)
        self._tagged.pop(id(record.tag), None)
        record.tag = tag
        self._tagged[id(tag)] = record
        record.layout = layout  # last, so that after an interrupt the variable is placed again

    def get_layout(self, variable: object) -> Layout | None:
        """Return the layout in which a variable has been placed, or `None` if it has not been placed yet."""
        record = self._records.get(id(variable))
        return record.layout if record is not None else None

    def find_tagged_weight(self, reference: object) -> object:
        """Return the variable with this `_layout` tag, which Keras copies from a weight to its slots."""
        if isinstance(reference, weakref.ref):
            return reference()
        record = self._tagged.get(id(reference))
        return record.variable() if record is not None and record.tag is reference else None

    def _get_record(self, variable: object) -> _Record:
        key = id(variable)
        record = self._records.get(key)
        # An interrupt can leave the record of a deleted variable.
        if record is None or record.variable() is not variable:
            self.version += 1
            record = self._records[key] = _Record(weakref.ref(variable, lambda _: self._remove_record(key)))
        return record

    def _remove_record(self, key: int) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._tagged.pop(id(record.tag), None)


class Table(Generic[T]):
    """Cache values of objects until the registry changes."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._version = -1
        self._entries: Mapping[int, T] = {}

    def is_current(self) -> bool:
        """Return whether the table was filled and the registry has not changed since."""
        return self._version == self._registry.version

    def fill(self, entries: Mapping[int, T]) -> None:
        """Store the current entries by the id of the object."""
        self._version, self._entries = self._registry.version, entries

    def get(self, thing: object) -> T | None:
        """Return the entry of an object, or None if it is missing or outdated."""
        return self._entries.get(id(thing)) if self.is_current() else None
