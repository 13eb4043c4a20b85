"""Find the places of layers in their blocks, if a model wraps layers in modules of their own.

Two sorts of modules have no role of their own:

    a module with one kernel, as `output.dense` beside `intermediate.dense`   the module is the layer
    the query, key, and value of attention, as `self.query`, beside one other kernel, as `output.dense`
                                                                              all are layers of the outer module
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from layoutmap.plan.lint.inferred_roles import ATTENTION_PARTS
from layoutmap.plan.lint.weights import Weight


def find_layer_places(kernels: Sequence[Weight]) -> Mapping[tuple[str, str], str]:
    """Return a dict from the model and path of a layer to its place, for layers with another place than their path.

    Args:
        kernels: The kernels of the plan, without low-rank factors and derived variables: a module with a kernel and its
            factors has one kernel.
    """
    counts = Counter(
        (w.assignment.variable.model, module) for w in kernels for module in _iterate_parent_modules(w.layer)
    )
    places: dict[tuple[str, str], str] = {}
    blocks: dict[tuple[str, str], dict[str, Weight]] = defaultdict(dict)
    for w in kernels:
        model, place = w.assignment.variable.model, w.layer
        for module in _iterate_parent_modules(w.layer):
            # A module with a number is an item of a list, so it is a block, even with one kernel.
            if counts[model, module] > 1 or module.rpartition(".")[2].isdigit():
                break
            place = module
        if place != w.layer:
            places[model, w.layer] = place
        blocks[model, place.rpartition(".")[0]][place.rpartition(".")[2]] = w
    for (model, path), block in blocks.items():
        outer = path.rpartition(".")[0]
        beside = blocks.get((model, outer), {})
        is_numbered = path.rpartition(".")[2].isdigit()
        if (
            outer
            and not is_numbered
            and len(beside) == 1
            and _is_query_key_value(block)
            and not {*beside} & {*block}
        ):
            places |= {(model, w.layer): f"{outer}.{name}" for name, w in block.items()}
    return places


def _iterate_parent_modules(layer: str) -> Iterable[str]:
    """Yield the paths of the modules that contain a layer, the nearest one first."""
    while layer := layer.rpartition(".")[0]:
        yield layer


def _is_query_key_value(block: Mapping[str, Weight]) -> bool:
    """Return whether the layers of a block are queries, keys, and values of attention by their names."""
    matches = [
        [pattern.fullmatch(name) is not None for name in block] for pattern in ATTENTION_PARTS.values()
    ]
    return all(map(any, matches)) and all(map(any, zip(*matches, strict=True)))
