"""Track the layers, optimizers, and variables of one scope while they exist."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from layoutmap.core.layout import Layout
from layoutmap.core.variables import Kind, number_inputs

T = TypeVar("T")


@dataclass(slots=True)
class _VariableRecord:
    """Hold the weight of a slot, and the `_layout`, layout, layer, and kind of a variable, until it is deleted."""

    variable: weakref.ref[Any]
    weight: weakref.ref[object] | None = None
    keras_layout: object = None
    layout: Layout | None = None
    layer: weakref.ref[object] | None = None
    kind: Kind = Kind.METRIC


class Registry:
    """Track the layers, optimizers, and variables of one scope."""

    def __init__(self) -> None:
        self.version = 0
        self._layers: list[weakref.ref[Any]] = []
        self._optimizers: list[weakref.ref[object]] = []
        # Last inputs of layers in the order of the calls. A stored input keeps its id, which a new one could get.
        self._inputs = weakref.WeakKeyDictionary[Any, object]()
        self._records: dict[int, _VariableRecord] = {}  # records by the variable's id, in order of creation
        self._records_by_keras_layout: dict[int, _VariableRecord] = {}  # by the id of a variable's `_layout`

    # -- layers and optimizers

    def add_layer(self, layer: object) -> None:
        """Add a layer."""
        self.version += 1
        self._layers.append(weakref.ref(layer))

    def add_optimizer(self, optimizer: object) -> None:
        """Add an optimizer, unless it was added before."""
        if not any(ref() is optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def remove_layer_or_optimizer(self, owner: object) -> None:
        """Remove a layer or an optimizer, and its variables."""
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

    def record_input(self, layer: object, layer_input: object) -> None:
        """Record the input of a layer in its latest call."""
        self._inputs.pop(layer, None)
        self._inputs[layer] = layer_input

    def number_inputs(self) -> Mapping[int, int]:
        """Return a dict from the id of each called layer to the number of its input, equal for the same input."""
        return number_inputs({id(layer): layer_input for layer, layer_input in self._inputs.items()})

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

    def find_standalone_kind(self, variable: object) -> Kind:
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

    def set_slot_weight(self, slot: object, weight: object) -> None:
        """Record that a variable is an optimizer slot of `weight`."""
        self._get_or_create_record(slot).weight = weakref.ref(weight)

    def find_slot_weight(self, slot: object) -> Any:
        """Return the weight that a slot belongs to, or None."""
        record = self._records.get(id(slot))
        return record.weight() if record is not None and record.weight is not None else None

    def set_layout(self, variable: object, layout: Layout, keras_layout: object) -> None:
        """Record the layout of a variable, and the object that is now its `_layout`."""
        record = self._get_or_create_record(variable)
        self._records_by_keras_layout.pop(id(record.keras_layout), None)
        record.keras_layout = keras_layout
        self._records_by_keras_layout[id(keras_layout)] = record
        record.layout = layout  # set last, so that after an interrupt it is missing, and is set again

    def get_layout(self, variable: object) -> Layout | None:
        """Return the layout that was recorded for a variable, or None if it has no layout yet."""
        record = self._records.get(id(variable))
        return record.layout if record is not None else None

    def find_variable_by_keras_layout(self, keras_layout: object) -> object:
        """Return the variable with this `_layout`, or None. Keras copies the `_layout` of a weight to its slots."""
        if isinstance(keras_layout, weakref.ref):
            return keras_layout()
        record = self._records_by_keras_layout.get(id(keras_layout))
        return record.variable() if record is not None and record.keras_layout is keras_layout else None

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
            self._records_by_keras_layout.pop(id(record.keras_layout), None)


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
        """Store a dict from the id of an object to its entry, for the present state of the registry."""
        self._version, self._entries = self._registry.version, entries

    def get_entry(self, key_object: object) -> T | None:
        """Return the entry of an object, or None if it is missing or outdated."""
        return self._entries.get(id(key_object)) if self.is_current() else None
