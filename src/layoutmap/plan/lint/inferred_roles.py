"""Infer the roles of axes from names and shapes, for weights of unknown use in the model.

A pytree of parameters, or a layer in the user's own code, does not tell how the model uses an array. Known roles of
adapters are never changed. An array is left without roles unless its name and its shape, or two shapes, agree:

    attention       wq, wk, wv, wo, as in `{"wq": (64, 64), "wk": (64, 32), "wv": (64, 32), "wo": (64, 64)}`
    two kernels     up and down, w1 and w3 before w2: (64, 256) and (256, 64), by names, or as the only such pair
    chain           layers of one name with numbers: (16, 64), (64, 64), (64, 10)
    single kernel   an array `kernel`, or one beside a bias of the size of one of its axes, or `head`
    table           `embed`, `wte`, `wpe`
    output layer    `head`, or the only array of the transposed shape of a table beside it
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from layoutmap.core.paths import find_repeated_layers, split_path_at_numbers
from layoutmap.core.variables import AxisRoles, Kind, VariableSpec

_PROJECTION_END = "(_(dense|lin|linear|proj|projector|projection))?"
ATTENTION_PARTS = {
    part: re.compile(rf"(.*_)?w?({names}){_PROJECTION_END}", re.IGNORECASE)
    for part, names in (("query", "q+|que|quer(y|ies)"), ("key", "k+|keys?"), ("value", "v+|val(ue)?s?"))
}
FUSED_KEY_VALUE = re.compile(rf"(.*_)?w?(kv|key_value){_PROJECTION_END}", re.IGNORECASE)
FUSED_QKV = re.compile(rf"(.*_)?w?(qkv|query_key_value){_PROJECTION_END}")
ATTENTION_OUTPUT = re.compile(rf"w?_?o|(attention_)?(o|out|output){_PROJECTION_END}", re.IGNORECASE)
_END = "(_(proj|projection|dense|kernel|weight|w))?"
FIRST_KERNEL = re.compile(
    rf"(.*_)?((w|fc|linear|dense)_?([13]|in)|w?_?(i|i_[01]|in|up|gate|gate_up|gate_and_up)|c_fc){_END}"
)
SECOND_KERNEL = re.compile(rf"(.*_)?((w|fc|linear|dense)_?(2|o|out)|down|out|c_proj|proj){_END}")
_PROJECTION = re.compile(r"(.*_)?proj")
_TABLE = re.compile(
    r"(?!.*(unembed|patch|time|proj|norm))(.*_)?(wte|wpe|emb(_table)?|embed.*|tok(en)?s?|vocab.*)"
)
HEAD = re.compile(r"(.*_)?(head|logits|unembed(ding)?|classifier|predictions)")
_KERNEL = re.compile(r"kernel|weights?|w|W|\d+")  # the name of an array that says nothing about its layer
_BIAS = re.compile(r"b|bias|\d+")


class InferredRoles(NamedTuple):
    """The inferred roles of a weight's axes, and the path of its layer. An array without a layer counts as a layer."""

    use: AxisRoles
    layer: str


class _UnknownWeight(NamedTuple):
    """An array of unknown use, with the path and the name of its layer, and the biases beside it."""

    variable: VariableSpec
    layer: str
    name: str
    biases: Sequence[VariableSpec]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.variable.shape

    @property
    def possible_output_axes(self) -> Sequence[int]:
        """The axes of two that may be the outputs: one of a `kernel` or a `weight`, otherwise either."""
        is_kernel = self.variable.path.rpartition(".")[2] == "kernel"
        return (1,) if is_kernel else (0,) if self.is_transposed else (0, 1)

    @property
    def is_transposed(self) -> bool:
        """Whether its first axis is the output, as in a torch or Equinox `weight`. A bias of another size denies it."""
        is_weight = self.variable.path.rpartition(".")[2] == "weight"
        return is_weight and (not self.biases or (self.shape[0],) in [bias.shape for bias in self.biases])


_Roles = Iterator[tuple[_UnknownWeight, tuple[str, ...]]]


# Lint and the list of replicated variables ask for the same variables, one after the other.
@lru_cache(2)
def infer_axis_roles(variables: tuple[VariableSpec, ...]) -> Mapping[tuple[str, str], InferredRoles]:
    """Return a dict from weight key to inferred roles, for weights of unknown use with roles that can be inferred."""
    weights = [v for v in variables if v.kind is Kind.WEIGHT]
    unknown = [v for v in weights if v.use is None and v.parent is None]
    if not any(len(v.shape) > 1 for v in unknown):
        return {}
    # A vector can be of the width of the model, such as a scale, or of a size between two kernels, such as a bias.
    counts = Counter(size for v in weights if len(v.shape) > 1 for size in v.shape)
    containers: dict[tuple[str, str], list[VariableSpec]] = defaultdict(list)
    for v in unknown:
        containers[v.model, v.path.rpartition(".")[0]].append(v)
    blocks: dict[tuple[str, str], list[_UnknownWeight]] = defaultdict(list)
    for (model, _), members in containers.items():
        for array in _iterate_unknown_weights(members):
            blocks[model, array.layer.rpartition(".")[0]].append(array)
    found: dict[tuple[str, str], InferredRoles] = {}
    sizes_of_blocks = _find_sizes_of_repeated_blocks(weights, blocks)
    for key, block in blocks.items():
        tables = [array for array in block if _TABLE.fullmatch(array.name)]
        # A table and an output layer have transposed shapes, too, and no name may tell them from two kernels. So beside
        # repeated blocks of the same width, shapes alone give no roles.
        alone = [
            array
            for array in block
            if array not in tables
            and not HEAD.fullmatch(array.name)
            and not {*array.shape} & sizes_of_blocks[key]
        ]
        for infer, members in (
            (partial(_infer_table_roles, counts=counts), block),
            (_infer_attention_roles, block),
            (partial(_infer_roles_by_names, counts=counts), block),
            (partial(_infer_chain_roles, least=3), block),
            (partial(_infer_roles_by_transposed_shapes, others=alone, counts=counts), alone),
            (partial(_infer_chain_roles, least=2), alone),
            (_infer_single_kernel_roles, block),
            (partial(_infer_output_layer_roles, tables=tables), block),
        ):
            rest = [array for array in members if array.variable.key not in found]
            found |= {
                array.variable.key: InferredRoles(AxisRoles(roles), array.layer)
                for array, roles in infer(rest)
            }
        for array in block:
            if use := found.get(array.variable.key):
                found |= _infer_bias_roles(array, use)
    return found


def _iterate_unknown_weights(container: Sequence[VariableSpec]) -> Iterator[_UnknownWeight]:
    """Yield the arrays with more than one axis in a container, except biases, each with the path of its layer.

    The container is the layer if its only kernel has a general name, as in `{"kernel": .., "bias": ..}` or `(w, b)`.
    """
    arrays = [v for v in container if len(v.shape) > 1 and v.path.rpartition(".")[2] not in ("b", "bias")]
    # A bias of several heads has several axes, too.
    biases = {
        id(bias) for v in arrays for bias in _list_biases(v, container, True) if v.shape[1:] == bias.shape
    }
    arrays = [v for v in arrays if id(v) not in biases]
    for v in arrays:
        layer, _, name = v.path.rpartition(".")
        is_container = len(arrays) == 1 and layer and _KERNEL.fullmatch(name)
        path = layer if is_container else v.path
        yield _UnknownWeight(v, path, path.rpartition(".")[2], _list_biases(v, container, path == v.path))


def _infer_table_roles(block: Sequence[_UnknownWeight], counts: Mapping[int, int]) -> _Roles:
    """Yield the roles of embedding tables.

    Of two arrays of transposed shapes, the first axis of the table is the rarer size, or the larger one. The other
    array is an output layer.
    """
    tables = [array for array in block if len(array.shape) == 2 and _TABLE.fullmatch(array.name)]
    shapes = {array.shape for array in tables}
    for array in tables:
        rows, width = ((-counts[size], size) for size in array.shape)
        if rows >= width or array.shape[::-1] not in shapes:
            yield array, ("rows", "out.0")


def _infer_attention_roles(block: Sequence[_UnknownWeight]) -> _Roles:
    """Yield the roles of the query, key, value, and output kernels of a block, fused or not, by their names."""
    outputs = [a for a in block if ATTENTION_OUTPUT.fullmatch(a.name)]
    projections = [a for a in block if _PROJECTION.fullmatch(a.name)]
    for fused in block:
        if len(fused.shape) == 2 and FUSED_QKV.fullmatch(fused.name):
            out = int(fused.shape[1] > fused.shape[0])
            for taker in (*projections, *outputs):
                is_matrix = len(taker.shape) == 2 and taker.shape[out] == fused.shape[1 - out]
                if is_matrix and taker.shape[1 - out] < fused.shape[out]:
                    yield fused, _make_matrix_roles(out)
                    yield taker, _make_matrix_roles(out)
                    return
    parts = [[a for a in block if pattern.fullmatch(a.name)] for pattern in ATTENTION_PARTS.values()]
    if any(len(part) != 1 for part in parts) or len({len(part[0].shape) for part in parts}) > 1:
        return
    query, key, value = (part[0] for part in parts)
    rest = [a for a in block if not any(a in part for part in parts)]
    transposed = query.shape[::-1] if len(query.shape) == 2 else (*query.shape[1:], query.shape[0])
    takers = [a for a in outputs or rest if a.shape == transposed]
    if not outputs and len(takers) > 1:
        takers = []
    if len(query.shape) == 3:  # (features, heads, size), and (heads, size, features) of the output
        for array in (query, key, value):
            yield array, ("in.0", "out.0", "out.1")
        for taker in takers:
            yield taker, ("in.0", "in.1", "out.0")
    elif len(query.shape) == 2:
        into = {*query.shape} & {*key.shape} & {*value.shape}
        known = [axis for axis in (0, 1) if any(a.shape[1 - axis] not in into for a in (query, key, value))]
        is_known = len(known) == 1 and 1 - known[0] in query.possible_output_axes
        out = 1 - known[0] if is_known else int(not query.is_transposed)
        for array in (query, key, value):
            yield array, _make_matrix_roles(out)
        for taker in takers[:1]:
            yield taker, _make_matrix_roles(out)


def _infer_roles_by_names(block: Sequence[_UnknownWeight], counts: Mapping[int, int]) -> _Roles:
    """Yield the roles of first kernels, such as up or w1, and of the second kernel, such as down or w2, by names."""
    arrays = [array for array in block if len(array.shape) == 2]
    seconds = [array for array in arrays if SECOND_KERNEL.fullmatch(array.name)]
    if len(seconds) == 1:
        firsts = [array for array in arrays if FIRST_KERNEL.fullmatch(array.name)]
        yield from _infer_consecutive_kernel_roles(firsts, seconds[0], counts)


def _infer_roles_by_transposed_shapes(
    block: Sequence[_UnknownWeight], others: Sequence[_UnknownWeight], counts: Mapping[int, int]
) -> _Roles:
    """Yield the roles of first kernels and the second kernel, if they are the only ones with transposed shapes.

    Beside two kernels that names show, in `others`, two arrays can be a table and an output layer.
    """
    shapes: dict[tuple[int, ...], list[_UnknownWeight]] = defaultdict(list)
    for array in others:
        if len(array.shape) == 2:
            shapes[array.shape].append(array)
    pairs = [
        (group, shapes[shape[::-1]])
        for shape, group in shapes.items()
        if shape[0] < shape[1] and shape[::-1] in shapes
    ]
    # A table has no bias. So if only some of the arrays have one, of the larger size, the others can be tables.
    arrays = [array for pair in pairs for group in pair for array in group]
    if (
        len(pairs) == 1
        and all(array in block for array in arrays)
        and min(map(len, pairs[0])) == 1
        and (
            all(array.biases for array in arrays)
            or all(bias.shape == (min(array.shape),) for array in arrays for bias in array.biases)
        )
    ):
        wide, tall = pairs[0]
        # If both are equally frequent, `max` returns axis 1, the larger one.
        shared = max((1, 0), key=lambda axis: -counts[wide[0].shape[axis]])
        is_wide_first = len(tall) == 1 and (len(wide) > 1 or bool(shared) != wide[0].is_transposed)
        firsts, (second, *_) = (wide, tall) if is_wide_first else (tall, wide)
        yield from _infer_consecutive_kernel_roles(firsts, second, counts)


def _infer_consecutive_kernel_roles(
    firsts: Sequence[_UnknownWeight], second: _UnknownWeight, counts: Mapping[int, int]
) -> _Roles:
    """Yield the roles of first kernels and of the second kernel, which takes their outputs, if their shapes fit.

    Args:
        firsts: The kernels with the outputs.
        second: The kernel after them.
        counts: How often each size occurs in the model. The size between the kernels occurs less often than the width
            of the model, or is the larger one.
    """
    axes = {id(first): _list_possible_output_axes(first, second) for first in firsts if first is not second}
    if not any(axes.values()):
        return
    out = max(
        (axis for fitting in axes.values() for axis in fitting),
        key=lambda axis: (
            -counts[second.shape[1 - axis]],
            second.shape[1 - axis],
            axis != second.is_transposed,
        ),
    )
    for first in firsts:
        if out in axes.get(id(first), ()):
            yield first, _make_matrix_roles(out)
    yield second, _make_matrix_roles(out)


def _list_possible_output_axes(first: _UnknownWeight, second: _UnknownWeight) -> Sequence[int]:
    """Return the possible output axes of two kernels, if the second takes all or half of the outputs of the first."""
    return [
        out
        for out in first.possible_output_axes
        if out in second.possible_output_axes
        and first.shape[1 - out] == second.shape[out]
        and first.shape[out] in (second.shape[1 - out], 2 * second.shape[1 - out])
    ]


def _infer_chain_roles(block: Sequence[_UnknownWeight], least: int) -> _Roles:
    """Yield the roles of at least `least` numbered kernels, each of which takes the output of the one before.

    The order of two is less certain than their shapes: the first module that flax numbers can be the second to run.
    """
    chains: dict[tuple[str, ...], list[_UnknownWeight]] = defaultdict(list)
    for array in block:
        if len(array.shape) == 2:
            chains[split_path_at_numbers(array.layer)].append(array)
    for chain in chains.values():
        out = int(not chain[0].is_transposed)
        if len(chain) >= least and all(
            a.shape[out] == b.shape[1 - out] for a, b in itertools.pairwise(chain)
        ):
            for array in chain:
                yield array, _make_matrix_roles(out)


def _infer_single_kernel_roles(block: Sequence[_UnknownWeight]) -> _Roles:
    """Yield the roles of kernels that a name or a bias shows."""
    for array in block:
        if len(array.shape) != 2:
            continue
        is_kernel = array.variable.path.endswith(".kernel") or HEAD.fullmatch(array.name)
        biases = {bias.shape[0] for bias in array.biases if len(bias.shape) == 1}
        fitting = [axis for axis in array.possible_output_axes if array.shape[axis] in biases]
        if fitting or is_kernel:
            yield array, _make_matrix_roles(fitting[0] if len(fitting) == 1 else int(not array.is_transposed))


def _infer_output_layer_roles(block: Sequence[_UnknownWeight], tables: Sequence[_UnknownWeight]) -> _Roles:
    """Yield the roles of the only array with the transposed shape of a table."""
    shapes = {table.shape[::-1] for table in tables}
    found = [array for array in block if array.shape in shapes]
    if len(found) == 1:
        yield found[0], _make_matrix_roles(1)


def _find_sizes_of_repeated_blocks(
    weights: Sequence[VariableSpec], blocks: Mapping[tuple[str, str], Sequence[_UnknownWeight]]
) -> Mapping[tuple[str, str], set[int]]:
    """Return a dict from the model and path of a module to the sizes of unknown arrays in repeated blocks in it.

    A list of one block counts, too.
    """
    layers = find_repeated_layers(v.path for v in weights)
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for (model, path), block in blocks.items():
        while path:
            module, _, name = path.rpartition(".")
            if path in layers or name.isdigit():
                modules = {module, module.rpartition(".")[0]} if name.isdigit() else {module}
                for each in modules:
                    found[model, each] |= {size for array in block for size in array.shape}
            path = module
    return found


def _infer_bias_roles(
    kernel: _UnknownWeight, use: InferredRoles
) -> Iterator[tuple[tuple[str, str], InferredRoles]]:
    """Yield the key and the use of each bias of a kernel."""
    outs = {role: kernel.shape[axis] for axis, role in enumerate(use.use.roles) if role.startswith("out")}
    for bias in kernel.biases if "rows" not in use.use.roles else ():
        if bias.shape == tuple(outs.values()):
            yield bias.key, InferredRoles(AxisRoles(tuple(outs)), kernel.layer)


def _list_biases(
    kernel: VariableSpec, container: Iterable[VariableSpec], is_own_layer: bool
) -> Sequence[VariableSpec]:
    """Return the arrays beside a kernel that have the name of a bias: `bias` beside `kernel`, `b1` beside `w1`."""
    name = kernel.path.rpartition(".")[2]
    names = {re.sub("^w", "b", name), f"{name}_bias", f"{name}_b", f"b_{name}"} - {name}
    return [
        v
        for v in container
        if (leaf := v.path.rpartition(".")[2]) in names or (not is_own_layer and _BIAS.fullmatch(leaf))
        if v is not kernel
    ]


def _make_matrix_roles(out: int) -> tuple[str, str]:
    """Return the roles of a kernel with two axes, of which `out` is the output."""
    return ("in.0", "out.0") if out else ("out.0", "in.0")
