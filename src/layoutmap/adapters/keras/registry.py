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
class _VariableRecord:
    """Hold the parent, tag, layout, layer, and kind of a variable until it is deleted."""

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
        self._records: dict[int, _VariableRecord] = {}  # records by the variable's id, in order of creation
        self._tagged: dict[int, _VariableRecord] = {}  # records by the id of the variable's tag

    # -- layers and optimizers

    def add_layer(self, layer: object) -> None:
        """Add a layer."""
        self.version += 1
        self._layers.append(weakref.ref(layer))

    def add_optimizer(self, optimizer: object) -> None:
        """Add an optimizer, unless it was added before."""
        if not any(ref() is optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def remove_owner(self, owner: object) -> None:
        """Remove a layer or an optimizer with its variables."""
        self._layers = [ref for ref in self._layers if ref() is not owner]
        self._optimizers = [ref for ref in self._optimizers if ref() is not owner]
        for variable in getattr(owner, "variables", ()):
            self._remove_record(id(variable))

    def list_layers(self) -> list[Any]:
        """Return the layers that still exist."""
        self._layers = [ref for ref in self._layers if ref() is not None]
        layers = [layer for ref in self._layers if (layer := ref()) is not None]
        # For a subclass of a Functional model, Keras creates a first object without `__init__`, which is no layer.
        return [layer for layer in layers if hasattr(layer, "built")]

    def list_optimizers(self) -> list[Any]:
        """Return the optimizers that still exist."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    # -- variables

    def add_variable(self, variable: object, layer: object = None, kind: Kind = Kind.METRIC) -> None:
        """Add a variable, unless it was added before. `kind` applies if no layer or optimizer owns it."""
        if id(variable) not in self._records:
            record = self._get_or_create_record(variable)
            record.layer, record.kind = None if layer is None else weakref.ref(layer), kind

    def find_creating_layer(self, variable: object) -> object:
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

    def list_variables(self) -> list[Any]:
        """Return the variables that still exist, in the order of creation."""
        return [v for record in list(self._records.values()) if (v := record.variable()) is not None]

    def set_parent(self, variable: object, parent: object) -> None:
        """Record that a variable is a slot of `parent`."""
        self._get_or_create_record(variable).parent = weakref.ref(parent)

    def find_parent(self, variable: object) -> Any:
        """Return the weight that a slot belongs to, or None."""
        record = self._records.get(id(variable))
        return record.parent() if record is not None and record.parent is not None else None

    def set_layout(self, variable: object, layout: Layout, tag: object) -> None:
        """Record the layout of a variable, and the object that is now its `_layout`."""
        record = self._get_or_create_record(variable)
        self._tagged.pop(id(record.tag), None)
        record.tag = tag
        self._tagged[id(tag)] = record
        record.layout = layout  # set last, so that after an interrupt the variable gets its layout again

    def get_layout(self, variable: object) -> Layout | None:
        """Return the layout that was recorded for a variable, or None if it has no layout yet."""
        record = self._records.get(id(variable))
        return record.layout if record is not None else None

    def find_variable_by_tag(self, tag: object) -> object:
        """Return the variable with this `_layout` tag, or None. Keras copies a weight's tag to its slots."""
        if isinstance(tag, weakref.ref):
            return tag()
        record = self._tagged.get(id(tag))
        return record.variable() if record is not None and record.tag is tag else None

    def _get_or_create_record(self, variable: object) -> _VariableRecord:
        variable_id = id(variable)
        record = self._records.get(variable_id)
        # After an interrupt, the record of a deleted variable with this id may remain, so replace it.
        if record is None or record.variable() is not variable:
            self.version += 1
            record = self._records[variable_id] = _VariableRecord(
                weakref.ref(variable, lambda _: self._remove_record(variable_id))
            )
        return record

    def _remove_record(self, variable_id: int) -> None:
        record = self._records.pop(variable_id, None)
        if record is not None:
            self._tagged.pop(id(record.tag), None)


class RegistryCache(Generic[T]):
    """Cache values of objects until the registry changes."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._version = -1
        self._entries: Mapping[int, T] = {}

    def is_current(self) -> bool:
        """Return whether entries were stored, and the registry has not changed since."""
        return self._version == self._registry.version

    def store_entries(self, entries: Mapping[int, T]) -> None:
        """Store the current entries by the id of the object."""
        self._version, self._entries = self._registry.version, entries

    def get_entry(self, key_object: object) -> T | None:
        """Return the entry of an object, or None if it is missing or outdated."""
        return self._entries.get(id(key_object)) if self.is_current() else None
