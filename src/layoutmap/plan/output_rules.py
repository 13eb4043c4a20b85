"""Write rules for layer outputs, for the fixes of problems and of lint: `layout_map.activations[...] = ...`.

The plan knows the paths of layers, and for some layers the rank of the output. A fix that has both can be copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from layoutmap.core.mesh import Mesh
from layoutmap.core.paths import format_path_regex_as_python, replace_numbers_with_stars
from layoutmap.core.specs import BatchDim, format_batch_dim


class OutputRanks(dict[str, int | None]):
    """Map the path of each layer to the rank of the layer's output, or to None if the rank is unknown."""

    @cached_property
    def layers_by_starred_path(self) -> Mapping[str, Sequence[str]]:
        """A dict from a path with a star for each number to the paths of the layers that it stands for."""
        groups: dict[str, list[str]] = {}
        for path in self:
            groups.setdefault(replace_numbers_with_stars(path), []).append(path)
        return groups


NAMES_OF_BATCH = ("batch", "data", "dp", "fsdp")

_PYTREE_FIX = "in the function that computes them: x = jax.lax.with_sharding_constraint(x, jax.P({}))"


def make_activation_rule_fix(
    ranks: OutputRanks | None, weights: Collection[str], mesh: Mesh, batch_dim: BatchDim | None
) -> str:
    """Return the fix to shard layer outputs by rows: a rule for the repeated blocks, or for a layer if there are none.

    Args:
        ranks: The layers of the model; `None`: the model is a pytree, whose activations have no paths.
        weights: The paths of the weights whose layers need the rule.
        mesh: The mesh.
        batch_dim: The mesh dim over which batches are sharded; `None`: unknown.
    """
    sizes = {dim: mesh.dim_size(dim) for dim in mesh.dim_names}
    named = max((dim for dim in sizes if dim in NAMES_OF_BATCH), key=sizes.__getitem__, default=None)
    dim = batch_dim or named or next(dim for dim in sizes if sizes[dim] > 1)
    note = (
        ""
        if batch_dim or named
        else f", if batches are sharded over {dim}, else with the dim that shards them"
    )
    if ranks is None:
        return f"constrain activations {_PYTREE_FIX.format(repr(dim))}{note}"
    layer = _find_example_layer(ranks, weights)
    if layer is None:
        return (
            f"add a rule to layout_map.activations for the output of a layer, with {dim!r} for its first axis{note}; "
            "the path of a layer is that of its variables without the last part"
        )
    pattern, rank = _find_layer_regex_and_rank(ranks, layer)
    is_block = r"\d" in pattern
    note += "" if rank else ", with one None for each axis but the first"
    specs = (dim, *[None] * ((rank or 3) - 1))
    place = "the outputs of the blocks" if is_block else "layer outputs"
    return f"add a rule for {place}, as in layout_map.activations[{pattern}] = {specs}{note}"


def make_output_rule_text(
    ranks: OutputRanks | None, layer: str, first: BatchDim | None, last: BatchDim | None = None
) -> str:
    """Return the rule that lays out the output of a layer, as Python source if the rank is known, else in words.

    Args:
        ranks: The layers of the model; `None`: unknown, or the model is a pytree.
        layer: The path of the layer, in which `*` stands for the numbers of repeated blocks.
        first: The mesh dims of the output's first axis.
        last: The mesh dims of the output's last axis.
    """
    pattern, rank = _find_layer_regex_and_rank(ranks or OutputRanks(), layer)
    if pattern and rank and rank > bool(last):
        specs = (first, *[None] * (rank - 1 - bool(last)), *[last] * bool(last))
        return f"layout_map.activations[{pattern}] = {specs}"
    parts = [
        f"its {name} axis over {format_batch_dim(dims)}"
        for name, dims in (("first", first), ("last", last))
        if dims
    ]
    pytree = " (of a pytree: jax.lax.with_sharding_constraint where it is computed)" if ranks is None else ""
    rule = f"a rule of layout_map.activations for the output of {pattern or layer}"
    return f"{rule}{pytree} that shards {' and '.join(parts)}"


def _find_layer_regex_and_rank(ranks: OutputRanks, layer: str) -> tuple[str, int | None]:
    """Return Python source of a regex for a layer and its repetitions, or "", and the output's rank, or None."""
    same = ranks.layers_by_starred_path.get(replace_numbers_with_stars(layer), ())
    return format_path_regex_as_python(same) if same else "", next(filter(None, map(ranks.get, same)), None)


def _find_example_layer(ranks: OutputRanks, weights: Collection[str]) -> str | None:
    """Return a layer that contains some of the weights, preferably a repeated block, or None if there is none."""
    parts = [replace_numbers_with_stars(path).split(".") for path in weights]
    owners = Counter(".".join(each[:n]) for each in parts for n in range(1, len(each)))

    def make_owner_sort_key(owner: str) -> tuple[bool, int]:
        is_repeated = (
            len(ranks.layers_by_starred_path[owner]) > 1
            and "*" in owner.rpartition(".")[2]
            and 2 * owners[owner] >= len(parts)
        )
        return is_repeated, -owner.count(".")

    paths = ranks.layers_by_starred_path
    layers = {owner: path for owner in owners for path in paths.get(owner, ()) if ranks[path] != 1}
    return layers[max(layers, key=make_owner_sort_key)] if layers else None
