"""Insert barriers after products, gathers, and scatters that XLA would otherwise partition wrongly.

XLA's partitioner gives each group of devices a part of the sum. Where the result is wanted over the dims that tell the
groups apart, it takes the devices of a group in the order that the result's layout has, which need not be that in
which the operands' layouts had them compute (docs/xla-faults.md). A rule for lowering sees no layouts, so this looks
at each program for a mesh of several dims once it is lowered. On a copy Shardy's passes say which layouts its values
get. Behind a product that XLA could compute wrongly goes a barrier: then the layout of its result follows from its
operands', and an operation of its own redistributes it to the wanted one. A result that could be wrong so, too, is
replicated. Where the operands are sharded over other
dims along what is added up, so that one of them must be redistributed in any case, the smaller one is gathered.
At the end each product is held in the layouts that were found, since XLA could find others (docs/decisions/0112).

A gather from a sharded operand, such as an embedding's table, can be wrong where its result is wanted over a mesh dim
that shards neither its operand nor its indices along that axis. A scatter to a batch of tables ends the process where
its result is wanted over a mesh dim along the batch that does not shard its updates along that.

Private names, tested on JAX 0.9.2 and 0.10.2:

    jax._src.interpreters.mlir.lower_jaxpr_to_module    lowers a program: its result has a `module`
    jaxlib.mlir.ir, jaxlib.mlir.dialects.sdy, .stablehlo  operations and their layouts
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import jax

from layoutmap.core.errors import EngineError
from layoutmap.engines.jax.shardy import list_operations, propagate
from layoutmap.engines.patches import Attribute
from layoutmap.engines.tested import Needed

with Needed("jax"):
    from jax._src.interpreters import mlir as _mlir
    from jaxlib.mlir import ir as _ir
    from jaxlib.mlir.dialects import sdy as _sdy
    from jaxlib.mlir.dialects import stablehlo as _hlo

    _mlir.lower_jaxpr_to_module  # noqa: B018

_NUMBER_ATTRIBUTE = "layoutmap.number"
"""The attribute that identifies a product after Shardy's passes, which copy functions."""

_RESULT = 2
"""The position of the result among a product's values. Its operands have the positions 0 and 1."""

_GRID_LAYOUT = re.compile(r"devices=\[(?:1,)*(?!1[,\]])\d+,(?:1,)*(?!1[,\]])\d")
"""Matches a GSPMD layout with more than one shard, or copy, along two axes."""

_Sharding = _sdy.TensorShardingAttr | None
Piece = tuple[str, int, int]
"""A mesh dim or a part of one: name, start, and stop. `("x", 2, 4)` is the minor half of a dim of size 4."""

Axes = Sequence[Sequence[Piece]]
"""For each axis of a tensor the pieces of mesh dims that shard it, major to minor."""


def _wrap_lowering(lower: Callable[..., _mlir.LoweringResult]) -> Callable[..., _mlir.LoweringResult]:
    @functools.wraps(lower)
    def lower_and_correct(name: str, *args: object, **kwargs: Any) -> _mlir.LoweringResult:
        result = lower(name, *args, **kwargs)
        if kwargs.get("num_partitions", 1) > 1:
            insert_barriers(result.module, name)
        return result

    return lower_and_correct


PATCH = Attribute(_mlir, "lower_jaxpr_to_module", _wrap_lowering)
"""Corrects each program for several devices that JAX lowers."""


def insert_barriers(module: _ir.Module, name: str) -> None:
    """Insert a barrier after each product of a lowered program that XLA could compute wrongly, in place.

    Args:
        module: The program.
        name: What it is called.

    Raises:
        EngineError: A product could be wrong all the same.
    """
    with module.context, _ir.Location.unknown():
        products = _list_products(module)
        if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
            if products and _GRID_LAYOUT.search(str(module)):
                raise _make_error(name, products[0], "set jax_use_shardy_partitioner, as it is by default")
            return
        has_several_dims = any(
            sum(n > 1 for n in dims.values()) > 1 for dims in _read_meshes(module).values()
        )
        if not products or not has_several_dims:
            return
        _copy_shared_functions(module)
        products = _list_products(module)
        apart: set[tuple[int, int]] = set()
        replicated: set[tuple[int, int]] = set()
        while True:  # changing the layouts of one product can change others, so repeat
            layouts, found = _propagate_layouts(module)
            if not found:
                break
            if refused := {each for each in apart & found if each[1] != _RESULT or each in replicated}:
                fix = "constrain its operands to be replicated: lm.dtensor.relayout(operand, layout)"
                raise _make_error(name, products[min(refused)[0]], fix)
            for number, value in sorted(found):
                result = products[number].results[0]
                if value != _RESULT:
                    _gather(module, products[number], value)
                elif (number, value) in apart:  # layouts propagated from it may be wrong, too
                    _replicate(module, result)
                    replicated.add((number, value))
                else:
                    _insert_barrier_after(result)
            apart |= found
        if layouts:
            _pin_layouts(module, layouts)


def _copy_shared_functions(module: _ir.Module) -> None:
    """Give each call its own copy of a function, because calls with different layouts share one in JAX."""
    table, called = _ir.SymbolTable(module.operation), set[str]()

    def visit(function: _ir.Operation) -> None:
        for call in list_operations(function, "func.call"):
            name = _ir.FlatSymbolRefAttr(call.attributes["callee"]).value
            if name in called:
                copy = table[name].operation.clone(ip=_ir.InsertionPoint(module.body))
                name = table.insert(copy).value
                call.attributes["callee"] = _ir.FlatSymbolRefAttr.get(name)
            called.add(name)
            visit(table[name].operation)

    visit(table["main"].operation)


def _insert_barrier_after(result: Any) -> None:
    with _ir.InsertionPoint.after(result.owner):
        barrier = _sdy.PropagationBarrierOp(result, _sdy.PropagationDirection.FORWARD.value)
    result.replace_all_uses_except(barrier.result, barrier.operation)


def _replicate(module: _ir.Module, result: Any) -> None:
    """Replicate a result, so that each device then takes its shard."""
    layout = _sdy.TensorShardingAttr.get(
        _find_largest_mesh(module),
        [_sdy.DimensionShardingAttr.get([], is_closed=True) for _ in result.type.shape],
    )
    with _ir.InsertionPoint.after(result.owner):
        whole = _sdy.ShardingConstraintOp(result, layout)
    result.replace_all_uses_except(whole.result, whole.operation)


def _gather(module: _ir.Module, op: _ir.OpView, operand: int) -> None:
    """Gather an operand of a product along its summed axes."""
    lhs, rhs, result = _LABELS[op.name](op)
    closed = [label in {*lhs} & {*rhs} - {*result} for label in (lhs, rhs)[operand]]
    layout = _sdy.TensorShardingAttr.get(
        _find_largest_mesh(module),
        [_sdy.DimensionShardingAttr.get([], is_closed=each) for each in closed],
    )
    with _ir.InsertionPoint(op):
        op.operands[operand] = _sdy.ShardingConstraintOp(op.operands[operand], layout).result


def _pin_layouts(module: _ir.Module, layouts: Mapping[int, Sequence[_Sharding]]) -> None:
    """Constrain the operands and results of products to the layouts found for them, by number.

    XLA simplifies a program before it propagates layouts; where some conflict, others could win then. A value has one
    constraint for all products that take it, so that XLA gathers it once.
    """
    mesh, products = _find_largest_mesh(module), _list_products(module)
    pinned: dict[tuple[object, _sdy.TensorShardingAttr], Any] = {}
    for number, (*of_operands, of_result) in layouts.items():
        op = products[number]
        for operand, layout in zip(_find_operands(op), of_operands, strict=True):
            value = op.operands[operand]
            key = value, _close_sharding(layout, mesh, value)
            if key not in pinned:
                pinned[key] = _constrain_value(*key)
            op.operands[operand] = pinned[key]
        layout = _close_sharding(of_result, mesh, op.results[0])
        result = _constrain_value(op.results[0], layout)
        op.results[0].replace_all_uses_except(result, result.owner.operation)
        pinned[result, layout] = result


def _constrain_value(value: Any, layout: _sdy.TensorShardingAttr) -> Any:
    """Constrain a value to a layout directly after its computation."""
    is_argument = isinstance(value.owner, _ir.Block)
    begins = _ir.InsertionPoint.at_block_begin if is_argument else _ir.InsertionPoint.after
    with begins(value.owner):
        return _sdy.ShardingConstraintOp(value, layout).result


def _close_sharding(layout: _Sharding, mesh: str, value: Any) -> _sdy.TensorShardingAttr:
    if layout is None:
        whole = [_sdy.DimensionShardingAttr.get([], is_closed=True)] * len(value.type.shape)
        return _sdy.TensorShardingAttr.get(mesh, whole)
    dims = map(_sdy.DimensionShardingAttr, layout.dimension_shardings)
    return _sdy.TensorShardingAttr.get(
        layout.mesh_or_ref,
        [_sdy.DimensionShardingAttr.get(dim.axes, is_closed=True) for dim in dims],
        unreduced_axes=layout.unreduced_axes,
    )


def _find_largest_mesh(module: _ir.Module) -> str:
    meshes = _read_meshes(module)
    return max(meshes, key=lambda name: len(meshes[name]))


def _make_error(name: str, op: _ir.OpView, fix: str) -> EngineError:
    return EngineError(
        f"{name}: XLA could compute wrong numbers",
        facts={"operation": op.name, "where": getattr(op.location, "name_str", "unknown")},
        why="for some products, gathers, and scatters with results sharded over other mesh dims than "
        "their operands, XLA uses a wrong order of devices (docs/xla-faults.md)",
        fix=fix,
    )


def _propagate_layouts(module: _ir.Module) -> tuple[dict[int, Sequence[_Sharding]], set[tuple[int, int]]]:
    """Return the layouts of a program's products by number, and the products that XLA may compute wrongly.

    Returns:
        The layouts of the values of each product, `None` for replicated, unless all are; of each product that could be
        wrong its number, and that of the value to change.
    """
    copy = module.operation.clone()
    kind = _ir.IntegerType.get_signless(64)
    for number, op in enumerate(_list_products(copy)):
        op.attributes[_NUMBER_ATTRIBUTE] = _ir.IntegerAttr.get(kind, number)
    propagate(copy)
    meshes = _read_meshes(copy)
    layouts: dict[int, Sequence[_Sharding]] = {}
    found: set[tuple[int, int]] = set()
    for op in _list_products(copy):
        number = op.attributes[_NUMBER_ATTRIBUTE].value
        # Sharding constraints are errors inside `shard_map`.
        layouts[number] = () if _is_in_shard_map(op) else tuple(map(_find_layout, _list_values(op)))
        to_change = _KINDS.get(op.name, _Product).from_operation(op, meshes).find_value_to_change()
        if to_change is not None:
            found.add((number, to_change))
    return {number: each for number, each in layouts.items() if any(each)}, found


def _is_in_shard_map(op: _ir.OpView) -> bool:
    parent = op.operation.parent
    while parent is not None and parent.name != "sdy.manual_computation":
        parent = parent.operation.parent
    return parent is not None


def _list_values(op: _ir.OpView) -> Sequence[Any]:
    lhs, rhs = _find_operands(op)
    return op.operands[lhs], op.operands[rhs], op.results[0]


def _find_operands(op: _ir.OpView) -> tuple[int, int]:
    """Return the positions of the two operands of a product."""
    return (2, 1) if op.name == _SCATTER else (0, 1)


def _list_products(module: _ir.Module | _ir.Operation) -> list[Any]:
    return [op for op in list_operations(module, "stablehlo.") if op.name in _LABELS]


def _read_meshes(module: _ir.Module | _ir.Operation) -> dict[str, dict[str, int]]:
    """Return the meshes of a program by name, as sizes by dim."""
    found = {
        view.attributes["sym_name"].value: _sdy.MeshAttr(view.attributes["mesh"])
        for view in module.operation.regions[0].blocks[0]
        if view.operation.name == "sdy.mesh"
    }
    return {
        name: {axis.name: axis.size for axis in map(_sdy.MeshAxisAttr, mesh.axes)}
        for name, mesh in found.items()
    }


# -- matrix products


@dataclass(frozen=True, slots=True)
class _Product:
    """The layouts of a product's operands and result.

    Args:
        axes: For both operands and the result, the pieces that shard each axis.
        labels: For both operands and the result, a label for each axis, like the letters of `einsum`.
        dims: All pieces of the mesh, in its order.
        sizes: The number of elements of each operand.
    """

    axes: tuple[Axes, Axes, Axes]
    labels: tuple[Sequence[Hashable], Sequence[Hashable], Sequence[Hashable]]
    dims: Sequence[Piece]
    sizes: tuple[int, int]

    @classmethod
    def from_operation(cls, op: _ir.OpView, meshes: Mapping[str, Mapping[str, int]]) -> Self:
        values = _list_values(op)
        layouts = [_find_layout(value) for value in values]
        named = [meshes.get(str(layout.mesh_or_ref).lstrip("@"), {}) for layout in layouts if layout]
        mesh = max(named, key=len, default={})
        given = [list(_iterate_dims(layout)) if layout else [] for layout in layouts]
        ends = {name: {1, size} for name, size in mesh.items()}
        for name, begin, end in (part for axes in given for axis in axes for part in axis):
            ends[name] |= {begin, end or mesh[name]}

        def split_dim(name: str, begin: int = 1, end: int | None = None) -> Iterator[Piece]:
            inside = sorted(n for n in ends[name] if begin <= n <= (end or mesh[name]))
            return ((name, *pair) for pair in pairwise(inside))

        axes = [[[piece for part in axis for piece in split_dim(*part)] for axis in each] for each in given]
        dims = [piece for name in mesh for piece in split_dim(name)]
        sizes = [math.prod(operand.type.shape) for operand in values[:2]]
        return cls(tuple(axes), _LABELS[op.name](op), dims, tuple(sizes))  # type: ignore[arg-type]

    def find_value_to_change(self) -> int | None:
        """Return the position of the value to redistribute, or None if XLA computes the product correctly."""
        lhs, rhs = (self._find_summed_dims(operand) for operand in (0, 1))
        if lhs & rhs:
            of_others = lhs != rhs and self._is_result_sharded(lhs & rhs)
            return _RESULT if of_others or self._has_other_device_order(lhs & rhs, (0, 1)) else None
        if not any(
            _count_shards(each) > 1 and _count_shards(each) == _count_shards(other)
            for each, other in self._iterate_summed_dims()
        ):
            return None
        if self._has_other_device_order(lhs, (0,)) or self._has_other_device_order(rhs, (1,)):
            return min((0, 1), key=lambda operand: self.sizes[operand])
        return None

    def _iterate_summed_dims(self) -> Iterator[tuple[set[Piece], set[Piece]]]:
        """Yield the mesh dims that shard the summed axes of both operands: of all axes, then of each."""
        yield self._find_summed_dims(0), self._find_summed_dims(1)
        for label in self.labels[0]:
            yield self._find_summed_dims(0, label), self._find_summed_dims(1, label)

    def _find_summed_dims(self, operand: int, only: Hashable = None) -> set[Piece]:
        """Return the mesh dims that shard the summed axes of an operand, or one of these axes."""
        summed = {*self.labels[0]} & {*self.labels[1]} - {*self.labels[2]}
        placed = self._label_pieces(operand).items()
        return {piece for piece, label in placed if label in summed and only in (None, label)}

    def _label_pieces(self, value: int) -> dict[Piece, Hashable]:
        """Map each piece of the mesh to the label of the axis that it shards."""
        axes = zip(self.axes[value], self.labels[value], strict=False)
        return {piece: label for pieces, label in axes for piece in pieces}

    def _is_result_sharded(self, groups: set[Piece]) -> bool:
        return bool(groups & self._label_pieces(_RESULT).keys())

    def _has_other_device_order(self, groups: set[Piece], operands: tuple[int, ...]) -> bool:
        """Return whether XLA may read the result in another device order than the one that computed it.

        It could not where no piece that tells groups apart shards the result; or where those pieces alone shard axes
        of it, and the others shard it in the order of the operands, each along an axis that it shards in one of them.

        Args:
            groups: What tells the groups apart.
            operands: Which operands the groups compute with as they are.
        """
        if not self._is_result_sharded(groups):
            return False
        orders = {
            tuple(piece for piece in self._order_pieces(self.axes[value]) if piece not in groups)
            for value in (*operands, _RESULT)
        }
        return (
            len(orders) > 1
            or any(groups & {*axis} and {*axis} - groups for axis in self.axes[_RESULT])
            or any(
                label not in (self._label_pieces(0).get(piece), self._label_pieces(1).get(piece))
                for piece, label in self._label_pieces(_RESULT).items()
                if piece not in groups
            )
        )

    def _order_pieces(self, axes: Axes) -> list[Piece]:
        """Return all pieces of the mesh in XLA's shard order. Pieces that shard no axis are last."""
        sharded = [piece for axis in axes for piece in axis]
        return sharded + [piece for piece in self.dims if piece not in sharded]


class _Gather(_Product):
    """The layouts of a gather's operand, indices, and result."""

    def find_value_to_change(self) -> int | None:
        """Return the result if a mesh dim shards an axis of it that is unsharded in the operand or indices."""
        if not self._label_pieces(0):
            return None
        found = self._label_pieces(_RESULT).items()
        is_apart = any(
            label not in (self._label_pieces(0).get(piece), self._label_pieces(1).get(piece))
            for piece, label in found
        )
        return _RESULT if is_apart else None


class _Scatter(_Product):
    """The layouts of a scatter's updates, indices, and result."""

    def find_value_to_change(self) -> int | None:
        """Return the result if a mesh dim shards its batch of tables, but not the batch of the updates."""
        batch = {*self.labels[1]} & {*self.labels[_RESULT]}
        found = self._label_pieces(_RESULT).items()
        is_apart = any(label in batch and label != self._label_pieces(0).get(piece) for piece, label in found)
        return _RESULT if is_apart else None


def _count_shards(pieces: Iterable[Piece]) -> int:
    """Return the number of shards along an axis that these pieces split."""
    return math.prod(end // begin for _, begin, end in pieces)


def _iterate_dims(layout: _sdy.TensorShardingAttr) -> Iterator[list[tuple[str, int, int | None]]]:
    """Yield, for each axis, the mesh dims that shard it, with start and stop for a part of a dim."""
    for axis in map(_sdy.DimensionShardingAttr, layout.dimension_shardings):
        found: list[tuple[str, int, int | None]] = []
        for dim in map(_sdy.AxisRefAttr, axis.axes):
            part = dim.sub_axis_info and _sdy.SubAxisInfoAttr(dim.sub_axis_info)
            found.append(
                (dim.name, part.pre_size, part.pre_size * part.size) if part else (dim.name, 1, None)
            )
        yield found


def _find_layout(value: Any) -> _Sharding:
    """Return the layout that Shardy gave a value, or None for a replicated one."""
    owner = value.owner
    if isinstance(owner, _ir.Block):
        op, number = owner.owner.operation, _ir.BlockArgument(value).arg_number
        if op.name == "func.func":
            if "arg_attrs" not in op.attributes:
                return None
            given = _ir.DictAttr(_ir.ArrayAttr(op.attributes["arg_attrs"])[number])
            return _sdy.TensorShardingAttr(given["sdy.sharding"]) if "sdy.sharding" in given else None
        name = "in_shardings" if op.name == "sdy.manual_computation" else "sdy.sharding"
    else:
        op, number = owner, _ir.OpResult(value).result_number
        name = "out_shardings" if op.name == "sdy.manual_computation" else "sdy.sharding"
    if op.name == "sdy.reshard":
        return _sdy.TensorShardingAttr(op.attributes["sharding"])
    if name not in op.attributes:
        return None
    return _sdy.TensorShardingAttr(_sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings[number])


def _label_dot(op: _ir.OpView) -> tuple[list[Hashable], list[Hashable], list[Hashable]]:
    numbers = _hlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    lhs: list[Hashable] = [("lhs", axis) for axis in range(len(op.operands[0].type.shape))]
    rhs: list[Hashable] = [("rhs", axis) for axis in range(len(op.operands[1].type.shape))]
    batch, summed = list(numbers.lhs_batching_dimensions), list(numbers.lhs_contracting_dimensions)
    same = [*numbers.rhs_batching_dimensions, *numbers.rhs_contracting_dimensions]
    for axis, other in zip([*batch, *summed], same, strict=True):
        rhs[other] = lhs[axis]
    free = [lhs[axis] for axis in range(len(lhs)) if axis not in (*batch, *summed)]
    others = [rhs[axis] for axis in range(len(rhs)) if axis not in same]
    return lhs, rhs, [lhs[axis] for axis in batch] + free + others


def _label_convolution(op: Any) -> tuple[list[Hashable], list[Hashable], list[Hashable]]:
    numbers = _hlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    lhs, rhs, result = ([(of, axis) for axis in range(len(op.results[0].type.shape))] for of in range(3))
    groups = any(op.attributes[name].value > 1 for name in ("feature_group_count", "batch_group_count"))
    lhs[numbers.input_batch_dimension] = result[numbers.output_batch_dimension]
    rhs[numbers.kernel_output_feature_dimension] = result[numbers.output_feature_dimension]
    if groups:  # the feature axis is sharded between groups only
        lhs[numbers.input_feature_dimension] = result[numbers.output_feature_dimension]
    else:
        lhs[numbers.input_feature_dimension] = rhs[numbers.kernel_input_feature_dimension]
    return lhs, rhs, result  # type: ignore[return-value]


def _label_gather(op: _ir.OpView) -> tuple[list[Hashable], list[Hashable], list[Hashable]]:
    numbers = _hlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    batch = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    table, indices, result = _label_rows(op, 0, batch, numbers.index_vector_dim, numbers.offset_dims)
    sliced = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(table)) if axis not in sliced]
    shape, sizes = op.operands[0].type.shape, _ir.DenseI64ArrayAttr(op.attributes["slice_sizes"])
    for axis, other in zip(numbers.offset_dims, kept, strict=True):
        if sizes[other] == shape[other]:
            result[axis] = table[other]
    return table, indices, result


def _label_scatter(op: _ir.OpView) -> tuple[list[Hashable], list[Hashable], list[Hashable]]:
    numbers = _hlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    batch = zip(numbers.input_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    return _label_rows(op, _RESULT, batch, numbers.index_vector_dim, numbers.update_window_dims)


def _label_rows(
    op: _ir.OpView, table: int, batch: Iterable[tuple[int, int]], vector: int, windows: Sequence[int]
) -> tuple[list[Hashable], list[Hashable], list[Hashable]]:
    """Label the axes of a table, of the indices into it, and of the rows read or written.

    Args:
        op: The operation.
        table: The number of the table among its values; the rows are the other one.
        batch: The axes of a batch, in the table and in the indices.
        vector: The axis of the indices along which one index lies.
        windows: The axes of the rows that lie inside of one.
    """
    ranks = [len(value.type.shape) for value in _list_values(op)]
    labels: list[list[Hashable]] = [[(of, axis) for axis in range(rank)] for of, rank in enumerate(ranks)]
    rows, indices = labels[_RESULT - table], labels[1]
    for axis, other in batch:
        labels[table][axis] = indices[other]
    of_indices = [axis for axis in range(ranks[1]) if axis != vector]
    of_rows = [axis for axis in range(len(rows)) if axis not in windows]
    for axis, other in zip(of_rows, of_indices, strict=True):
        rows[axis] = indices[other]
    return labels[0], labels[1], labels[2]


_SCATTER = "stablehlo.scatter"
_GATHER = "stablehlo.gather"
_KINDS: dict[str, type[_Product]] = {_GATHER: _Gather, _SCATTER: _Scatter}
_LABELS = {
    "stablehlo.dot_general": _label_dot,
    "stablehlo.convolution": _label_convolution,
    _GATHER: _label_gather,
    _SCATTER: _label_scatter,
}
