"""Find the path of a single variable without walking the whole model.

The path is the one that a walk over the whole model would find now, without aliases. The model may still grow, so a
variable that gets its value early is converted later if its final path has another layout.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from weakref import WeakKeyDictionary, ref

import keras

from layoutmap.adapters.keras.describing import DescribedVariable, describe_layer_variable
from layoutmap.adapters.keras.names import renumber_names
from layoutmap.adapters.keras.paths import collect_sublayer_names_by_layer_id
from layoutmap.adapters.keras.registry import Registry


# A walk over the model for each variable would be slow, so look up single variables from their layer (decisions/0005).
class PathLookup:
    """Look up the paths of single variables in a scope."""

    def __init__(self, registry: Registry):
        self._registry = registry
        # Cached for each layer: its number of sublayers, its parent, and the names of its sublayers. The names are
        # valid while the layer has the numbers of attributes and sublayers that are stored with them.
        self._num_sublayers: MutableMapping[keras.Layer, int] = WeakKeyDictionary()
        self._parents: MutableMapping[object, ref[keras.Layer]] = WeakKeyDictionary()
        self._names: MutableMapping[object, tuple[tuple[int, int], dict[int, str]]] = WeakKeyDictionary()

    def describe_variable(self, variable: object, layer: object) -> DescribedVariable | None:
        """Return a variable with its description, or None if the layer does not contain it."""
        prefix = ""
        top, seen = layer, {id(layer)}
        while (parent := self._find_parent(top)) is not None and id(parent) not in seen:
            seen.add(id(parent))
            prefix = f"{self._find_name_in_parent(parent, top)}.{prefix}"
            top = parent
        if not isinstance(top, keras.Model):
            prefix = f"{self._find_root_name(top)}.{prefix}"
        return describe_layer_variable(layer, prefix, variable)

    def _find_parent(self, layer: keras.Layer) -> keras.Layer:
        """Return the layer that contains a layer directly, or None."""
        for each in self._registry.list_layers():
            if self._num_sublayers.get(each, 0) != len(each._layers):
                self._num_sublayers[each] = len(each._layers)
                for below in each._layers:
                    self._parents.setdefault(below, ref(each))
        found = self._parents.get(layer)
        parent = found() if found is not None else None
        return parent if parent is not None and any(below is layer for below in parent._layers) else None

    def _find_name_in_parent(self, parent: keras.Layer, layer: keras.Layer) -> str:
        """Return the path from a parent layer to a layer in it."""
        state = len(vars(parent)), len(parent._layers)
        before, names = self._names.get(parent, (None, dict[int, str]()))
        if before != state or id(layer) not in names:
            names = collect_sublayer_names_by_layer_id(parent)
            self._names[parent] = state, names
        return names[id(layer)] if id(layer) in names else str(layer.name)

    def _find_root_name(self, layer: keras.Layer) -> str:
        """Return the name of a layer without a parent, numbered among such layers of its class."""
        (name,) = renumber_names([layer])
        if name == layer.name:
            return name
        beside = [each for each in self._registry.list_layers() if type(each) is type(layer)]
        alone = [each for each in beside if each is layer or each not in self._parents]
        return renumber_names(alone)[next(i for i, each in enumerate(alone) if each is layer)]
