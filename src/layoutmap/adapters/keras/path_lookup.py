"""Find the path of a single variable without walking the whole model.

It is the path that a walk over everything would find at this moment, without its aliases. The model may still grow
around it; what is placed early is placed again where the final path has another layout.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from weakref import WeakKeyDictionary, ref

import keras

from layoutmap.adapters.keras.describing import Entry, describe_below
from layoutmap.adapters.keras.names import renumber_names
from layoutmap.adapters.keras.paths import name_sublayers
from layoutmap.adapters.keras.registry import Registry


# A walk over the model for each variable would be slow, so look up single variables from their layer (decisions/0005).
class PathLookup:
    """Look up the paths of single variables in a scope."""

    def __init__(self, registry: Registry):
        self._registry = registry
        # For each layer: its number of sublayers at the last visit, its parent, and its sublayers' names at that time.
        self._num_below: MutableMapping[keras.Layer, int] = WeakKeyDictionary()
        self._above: MutableMapping[object, ref[keras.Layer]] = WeakKeyDictionary()
        self._names: MutableMapping[object, tuple[tuple[int, int], dict[int, str]]] = WeakKeyDictionary()

    def find_entry(self, variable: object, layer: object) -> Entry | None:
        """Return the entry of a variable in a layer, or None if the layer does not contain it."""
        prefix = ""
        top, seen = layer, {id(layer)}
        while (above := self._find_holder(top)) is not None and id(above) not in seen:
            seen.add(id(above))
            prefix = f"{self._name_in(above, top)}.{prefix}"
            top = above
        if not isinstance(top, keras.Model):
            prefix = f"{self._find_name(top)}.{prefix}"
        return describe_below(layer, prefix, variable)

    def _find_holder(self, layer: keras.Layer) -> keras.Layer:
        for each in self._registry.layers():
            if self._num_below.get(each, 0) != len(each._layers):
                self._num_below[each] = len(each._layers)
                for below in each._layers:
                    self._above.setdefault(below, ref(each))
        found = self._above.get(layer)
        above = found() if found is not None else None
        return above if above is not None and any(below is layer for below in above._layers) else None

    def _name_in(self, above: keras.Layer, layer: keras.Layer) -> str:
        state = len(vars(above)), len(above._layers)
        before, names = self._names.get(above, (None, dict[int, str]()))
        if before != state or id(layer) not in names:
            names = name_sublayers(above)
            self._names[above] = state, names
        return names[id(layer)] if id(layer) in names else str(layer.name)

    def _find_name(self, layer: keras.Layer) -> str:
        (name,) = renumber_names([layer])
        if name == layer.name:
            return name
        beside = [each for each in self._registry.layers() if type(each) is type(layer)]
        alone = [each for each in beside if each is layer or each not in self._above]
        return renumber_names(alone)[next(i for i, each in enumerate(alone) if each is layer)]
