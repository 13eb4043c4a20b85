"""The layers, optimizers and variables of one scope, for as long as they live."""

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
    """A record of one variable; forgotten when the variable dies."""

    variable: weakref.ref[Any]
    parent: weakref.ref[object] | None = None
    tag: object = None
    layout: Layout | None = None
    layer: weakref.ref[object] | None = None
    kind: Kind = Kind.METRIC


class Registry:
    """The layers, optimizers and variables of one scope.

    Attributes:
        version: Rises with each layer and each variable that is added.
    """

    def __init__(self) -> None:
        self.version = 0
        self._layers: list[weakref.ref[Any]] = []
        self._optimizers: list[weakref.ref[object]] = []
        self._records: dict[int, _Record] = {}  # by id, in the order in which they were made
        self._tagged: dict[int, _Record] = {}  # by the id of the tag

    # -- layers and optimizers

    def add_layer(self, layer: object) -> None:
        """Add a layer."""
        self.version += 1
        self._layers.append(weakref.ref(layer))

    def add_optimizer(self, optimizer: object) -> None:
        """Add an optimizer, once."""
        if not any(ref() is optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def let_go(self, thing: object) -> None:
        """Forget a layer or an optimizer, with its variables."""
        self._layers = [ref for ref in self._layers if ref() is not thing]
        self._optimizers = [ref for ref in self._optimizers if ref() is not thing]
        for variable in getattr(thing, "variables", ()):
            self._forget(id(variable))

    def layers(self) -> list[Any]:
        """Return the layers that are alive."""
        self._layers = [ref for ref in self._layers if ref() is not None]
        layers = [layer for ref in self._layers if (layer := ref()) is not None]
        # Keras makes a hollow object, without __init__, when a Functional model is subclassed.
        return [layer for layer in layers if hasattr(layer, "built")]

    def optimizers(self) -> list[Any]:
        """Return the optimizers that are alive."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    # -- variables

    def add(self, variable: object, layer: object = None, kind: Kind = Kind.METRIC) -> None:
        """Add a variable, once.

        Args:
            variable: The variable.
            layer: The layer that made it, if it is known.
            kind: What it is, if it turns out to belong to no layer and no optimizer.
        """
        if id(variable) not in self._records:
            record = self._record_of(variable)
            record.layer, record.kind = None if layer is None else weakref.ref(layer), kind

    def layer_of(self, variable: object) -> object:
        """Return the layer that made a variable; `None` if none did, or it is not known."""
        record = self._records.get(id(variable))
        return record.layer() if record is not None and record.layer is not None else None

    def kind_of(self, variable: object) -> Kind:
        """Return what a variable is that belongs to no layer and no optimizer."""
        record = self._records.get(id(variable))
        return record.kind if record is not None else Kind.METRIC

    def forget(self, variable: object) -> None:
        """Forget a variable."""
        self._forget(id(variable))

    def knows(self, variable: object) -> bool:
        """Whether a variable was added."""
        return id(variable) in self._records

    def variables(self) -> list[Any]:
        """Return the variables that are alive, in the order in which they were made."""
        return [v for record in list(self._records.values()) if (v := record.variable()) is not None]

    def set_parent(self, variable: object, parent: object) -> None:
        """Say whose slot a variable is."""
        self._record_of(variable).parent = weakref.ref(parent)

    def parent_of(self, variable: object) -> Any:
        """Return the weight whose slot a variable is; `None` if none is known."""
        record = self._records.get(id(variable))
        return record.parent() if record is not None and record.parent is not None else None

    def set_layout(self, variable: object, layout: Layout, tag: object) -> None:
        """Note where a variable has been placed, and the object that is its `_layout` now."""
        record = self._record_of(variable)
        self._tagged.pop(id(record.tag), None)
        record.tag = tag
        self._tagged[id(tag)] = record
        record.layout = layout  # at last: an interrupt before leaves the variable to be placed again

    def layout_of(self, variable: object) -> Layout | None:
        """Return where a variable has been placed; `None`: nowhere yet."""
        record = self._records.get(id(variable))
        return record.layout if record is not None else None

    def weight_of(self, reference: object) -> object:
        """Return the variable whose `_layout` this is: Keras hands it on from a weight to the slots of an optimizer."""
        if isinstance(reference, weakref.ref):
            return reference()
        record = self._tagged.get(id(reference))
        return record.variable() if record is not None and record.tag is reference else None

    def _record_of(self, variable: object) -> _Record:
        key = id(variable)
        record = self._records.get(key)
        if record is None or record.variable() is not variable:  # an interrupt can keep one that is dead
            self.version += 1
            record = self._records[key] = _Record(weakref.ref(variable, lambda _: self._forget(key)))
        return record

    def _forget(self, key: int) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._tagged.pop(id(record.tag), None)


class Table(Generic[T]):
    """Something known of objects, which holds until anything is added to the registry."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._version = -1
        self._entries: Mapping[int, T] = {}

    def is_current(self) -> bool:
        """Whether it was filled and nothing has been added since."""
        return self._version == self._registry.version

    def fill(self, entries: Mapping[int, T]) -> None:
        """Take what is known now, by the id of the object."""
        self._version, self._entries = self._registry.version, entries

    def get(self, thing: object) -> T | None:
        """Return what is known of an object; `None`: nothing, or nothing that still holds."""
        return self._entries.get(id(thing)) if self.is_current() else None
