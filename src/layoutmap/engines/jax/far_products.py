"""Insert barriers after products, gathers, and scatters that XLA would otherwise partition wrongly.

XLA's partitioner lets each group of devices compute a part of the sum. If the result is sharded over the dims that
separate the groups, XLA orders the devices of a group as the result's layout does. That order can differ from the one
in which the devices computed (docs/xla-faults.md). A lowering rule sees no layouts, so this module corrects each
program for a mesh of several dims after it is lowered. Shardy's passes on a copy of the program return the layout of
each value. A barrier follows each product that XLA could compute wrongly. Then the layout of the result follows from
the operands, and a separate operation redistributes the result. If that could still be wrong, the result is replicated.
If the operands' summed axes are sharded over different dims, one operand must be redistributed anyway, so the smaller
one is gathered. At the end, each product is constrained to its layouts, since XLA could choose others (decisions/0112).

A gather from a sharded operand, such as an embedding's table, can be wrong if its result is sharded over a mesh dim
that shards neither the operand nor the indices along that axis. A scatter to a batch of tables ends the process if its
result is sharded along the batch over a mesh dim that does not shard the updates along the batch.

Private names, tested on JAX 0.10.2:

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
from layoutmap.engines.jax.shardy import get_location_name, list_operations, propagate_layouts
from layoutmap.engines.patches import AttributePatch
from layoutmap.engines.tested import ImportErrorConverter

with ImportErrorConverter("jax"):
    from jax._src.interpreters import mlir as _mlir
    from jaxlib.mlir import ir as _ir
    from jaxlib.mlir.dialects import sdy as _sdy
    from jaxlib.mlir.dialects import stablehlo as _hlo

    _mlir.lower_jaxpr_to_module  # noqa: B018

_NUMBER_ATTRIBUTE = "layoutmap.number"
"""The attribute that identifies a product after Shardy's passes, which copy functions."""

_RESULT = 2
"""The position of the result among a product's values. The operands have the positions 0 and 1."""

_GRID_LAYOUT = re.compile(r"devices=\[(?:1,)*(?!1[,\]])\d+,(?:1,)*(?!1[,\]])\d")
"""Matches a GSPMD layout that splits the devices along two axes, one of which may count copies."""

_Sharding = _sdy.TensorShardingAttr | None
DimPart = tuple[str, int, int]
"""A mesh dim or a part of a dim: name, start, and stop. `("x", 2, 4)` is the minor half of a dim of size 4."""

Axes = Sequence[Sequence[DimPart]]
"""For each axis of a tensor, the mesh dims or parts of dims that shard it, major to minor."""


def _wrap_lowering_to_correct_products(
    lower: Callable[..., _mlir.LoweringResult],
) -> Callable[..., _mlir.LoweringResult]:
    """Wrap JAX's lowering of a program so that it inserts barriers into programs for several devices."""

    @functools.wraps(lower)
    def lower_and_correct(program_name: str, *args: object, **kwargs: Any) -> _mlir.LoweringResult:
        result = lower(program_name, *args, **kwargs)
        if kwargs.get("num_partitions", 1) > 1:
            correct_products_in_module(result.module, program_name)
        return result

    return lower_and_correct


PATCH = AttributePatch(_mlir, "lower_jaxpr_to_module", _wrap_lowering_to_correct_products)
"""Corrects each program for several devices that JAX lowers."""


def correct_products_in_module(module: _ir.Module, program_name: str) -> None:
    """Change a lowered program in place so that XLA computes its products, gathers, and scatters correctly.

    Args:
        module: The program.
        program_name: The name of the program, for the error.

    Raises:
        EngineError: A product could be wrong even with a barrier.
    """
    with module.context, _ir.Location.unknown():
        products = _list_products(module)
        if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
            if products and _GRID_LAYOUT.search(str(module)):
                fix = "enable the Shardy partitioner: jax.config.update('jax_use_shardy_partitioner', True)"
                raise _make_wrong_product_error(program_name, products[0], fix)
            return
        has_several_dims = any(
            sum(n > 1 for n in dims.values()) > 1 for dims in _read_mesh_dim_sizes(module).values()
        )
        if not products or not has_several_dims:
            return
        _copy_shared_functions(module)
        products = _list_products(module)
        apart: set[tuple[int, int]] = set()
        replicated: set[tuple[int, int]] = set()
        while True:  # a change to the layouts of one product can change those of other products, so repeat
            layouts, to_change = _find_product_layouts(module)
            if not to_change:
                break
            if refused := {each for each in apart & to_change if each[1] != _RESULT or each in replicated}:
                fix = "constrain its operands to be replicated: lm.dtensor.relayout(operand, layout)"
                raise _make_wrong_product_error(program_name, products[min(refused)[0]], fix)
            for number, position in sorted(to_change):
                result = products[number].results[0]
                if position != _RESULT:
                    _gather_summed_axes(module, products[number], position)
                # A barrier is already behind this result, and has not changed its layout, so replicate the result.
                elif (number, position) in apart:
                    _replicate_product_result(module, result)
                    replicated.add((number, position))
                else:
                    _insert_barrier_after(result)
            apart |= to_change
        if layouts:
            _constrain_products(module, layouts)


def _copy_shared_functions(module: _ir.Module) -> None:
    """Copy functions so that each call has its own function, because calls may need different layouts."""
    table, called = _ir.SymbolTable(module.operation), set[str]()

    def copy_called_functions(function: _ir.Operation) -> None:
        for call in list_operations(function, "func.call"):
            name = _ir.FlatSymbolRefAttr(call.attributes["callee"]).value
            if name in called:
                copy = table[name].operation.clone(ip=_ir.InsertionPoint(module.body))
                name = table.insert(copy).value
                call.attributes["callee"] = _ir.FlatSymbolRefAttr.get(name)
            called.add(name)
            copy_called_functions(table[name].operation)

    copy_called_functions(table["main"].operation)


def _insert_barrier_after(result: Any) -> None:
    with _ir.InsertionPoint.after(result.owner):
        barrier = _sdy.PropagationBarrierOp(result, _sdy.PropagationDirection.FORWARD.value)
    result.replace_all_uses_except(barrier.result, barrier.operation)


def _replicate_product_result(module: _ir.Module, result: Any) -> None:
    """Constrain a result to be replicated, so that later operations slice each device's shard from the whole."""
    layout = _sdy.TensorShardingAttr.get(
        _find_name_of_largest_mesh(module),
        [_sdy.DimensionShardingAttr.get([], is_closed=True) for _ in result.type.shape],
    )
    with _ir.InsertionPoint.after(result.owner):
        whole = _sdy.ShardingConstraintOp(result, layout)
    result.replace_all_uses_except(whole.result, whole.operation)


def _gather_summed_axes(module: _ir.Module, op: _ir.OpView, position: int) -> None:
    """Gather one operand of a product, the one at `position`, along the axes that the product sums."""
    lhs, rhs, result = _LABELS[op.name](op)
    closed = [label in {*lhs} & {*rhs} - {*result} for label in (lhs, rhs)[position]]
    layout = _sdy.TensorShardingAttr.get(
        _find_name_of_largest_mesh(module),
        [_sdy.DimensionShardingAttr.get([], is_closed=each) for each in closed],
    )
    with _ir.InsertionPoint(op):
        op.operands[position] = _sdy.ShardingConstraintOp(op.operands[position], layout).result


def _constrain_products(module: _ir.Module, layouts: Mapping[int, Sequence[_Sharding]]) -> None:
    """Constrain the operands and results of products to `layouts`. The keys are the numbers of the products.

    XLA simplifies a program before it propagates layouts, so it could resolve conflicts of layouts differently.
    Products that use the same value share one constraint, so that XLA gathers the value once.
    """
    mesh, products = _find_name_of_largest_mesh(module), _list_products(module)
    pinned: dict[tuple[object, _sdy.TensorShardingAttr], Any] = {}
    for number, (*of_operands, of_result) in layouts.items():
        op = products[number]
        for operand, layout in zip(_get_compared_operand_positions(op), of_operands, strict=True):
            value = op.operands[operand]
            key = value, _make_closed_sharding(layout, mesh, value)
            if key not in pinned:
                pinned[key] = _constrain_value(*key)
            op.operands[operand] = pinned[key]
        layout = _make_closed_sharding(of_result, mesh, op.results[0])
        result = _constrain_value(op.results[0], layout)
        op.results[0].replace_all_uses_except(result, result.owner.operation)
        pinned[result, layout] = result


def _constrain_value(value: Any, layout: _sdy.TensorShardingAttr) -> Any:
    """Insert a constraint to a layout directly after the computation of a value, and return the constrained value."""
    is_argument = isinstance(value.owner, _ir.Block)
    begins = _ir.InsertionPoint.at_block_begin if is_argument else _ir.InsertionPoint.after
    with begins(value.owner):
        return _sdy.ShardingConstraintOp(value, layout).result


def _make_closed_sharding(layout: _Sharding, mesh_name: str, value: Any) -> _sdy.TensorShardingAttr:
    if layout is None:
        whole = [_sdy.DimensionShardingAttr.get([], is_closed=True)] * len(value.type.shape)
        return _sdy.TensorShardingAttr.get(mesh_name, whole)
    dims = map(_sdy.DimensionShardingAttr, layout.dimension_shardings)
    return _sdy.TensorShardingAttr.get(
        layout.mesh_or_ref,
        [_sdy.DimensionShardingAttr.get(dim.axes, is_closed=True) for dim in dims],
        unreduced_axes=layout.unreduced_axes,
    )


def _find_name_of_largest_mesh(module: _ir.Module) -> str:
    meshes = _read_mesh_dim_sizes(module)
    return max(meshes, key=lambda name: len(meshes[name]))


def _make_wrong_product_error(program_name: str, op: _ir.OpView, fix: str) -> EngineError:
    return EngineError(
        f"{program_name}: XLA could compute wrong numbers",
        facts={"operation": op.name, "where": get_location_name(op) or "unknown"},
        why="XLA uses a wrong order of devices for some products, gathers, and scatters whose result is "
        "sharded over different mesh dims than the operands (docs/xla-faults.md)",
        fix=fix,
    )


def _find_product_layouts(module: _ir.Module) -> tuple[dict[int, Sequence[_Sharding]], set[tuple[int, int]]]:
    """Return the layouts of a program's products, and the values to redistribute so that XLA computes them correctly.

    Returns:
        The layouts of the operands and the result by number of the product, without products whose values are all
        replicated; and for each product that XLA could compute wrongly, its number and the position of the value to
        redistribute.
    """
    copy = module.operation.clone()
    int64 = _ir.IntegerType.get_signless(64)
    for number, op in enumerate(_list_products(copy)):
        op.attributes[_NUMBER_ATTRIBUTE] = _ir.IntegerAttr.get(int64, number)
    propagate_layouts(copy)
    meshes = _read_mesh_dim_sizes(copy)
    layouts: dict[int, Sequence[_Sharding]] = {}
    to_change: set[tuple[int, int]] = set()
    for op in _list_products(copy):
        number = op.attributes[_NUMBER_ATTRIBUTE].value
        # A sharding constraint inside `shard_map` is an error, so record no layouts there.
        layouts[number] = (
            ()
            if _is_in_shard_map(op)
            else tuple(map(_read_shardy_layout, _get_compared_operands_and_result(op)))
        )
        product_layouts = _LAYOUT_CLASSES.get(op.name, _ProductLayouts).from_operation(op, meshes)
        if (position := product_layouts.find_position_of_value_to_redistribute()) is not None:
            to_change.add((number, position))
    return {number: each for number, each in layouts.items() if any(each)}, to_change


def _is_in_shard_map(op: _ir.OpView) -> bool:
    parent = op.operation.parent
    while parent is not None and parent.name != "sdy.manual_computation":
        parent = parent.operation.parent
    return parent is not None


def _get_compared_operands_and_result(op: _ir.OpView) -> Sequence[Any]:
    lhs, rhs = _get_compared_operand_positions(op)
    return op.operands[lhs], op.operands[rhs], op.results[0]


def _get_compared_operand_positions(op: _ir.OpView) -> tuple[int, int]:
    """Return the positions of the two operands to compare: (0, 1), or for a scatter (2, 1), its updates and indices."""
    return (2, 1) if op.name == _SCATTER else (0, 1)


def _list_products(module: _ir.Module | _ir.Operation) -> list[Any]:
    return [op for op in list_operations(module, "stablehlo.") if op.name in _LABELS]


def _read_mesh_dim_sizes(module: _ir.Module | _ir.Operation) -> dict[str, dict[str, int]]:
    """Return a dict from the name of each mesh of a program to a dict from the names of its dims to their sizes."""
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
class _ProductLayouts:
    """The layouts of a product's operands and result.

    Args:
        axes: For both operands and the result, the parts of mesh dims that shard each axis.
        labels: For both operands and the result, a label for each axis, like the letters of `einsum`.
        dims: All parts of the mesh's dims, in its order.
        sizes: The number of elements of each operand.
    """

    axes: tuple[Axes, Axes, Axes]
    labels: tuple[Sequence[Hashable], Sequence[Hashable], Sequence[Hashable]]
    dims: Sequence[DimPart]
    sizes: tuple[int, int]

    @classmethod
    def from_operation(cls, op: _ir.OpView, meshes: Mapping[str, Mapping[str, int]]) -> Self:
        """Read the layouts of an operation. If one uses only a part of a mesh dim, split that dim in all layouts."""
        values = _get_compared_operands_and_result(op)
        layouts = [_read_shardy_layout(value) for value in values]
        named = [meshes.get(str(layout.mesh_or_ref).lstrip("@"), {}) for layout in layouts if layout]
        mesh = max(named, key=len, default={})
        given = [list(_iterate_dim_parts_by_axis(layout)) if layout else [] for layout in layouts]
        ends = {name: {1, size} for name, size in mesh.items()}
        for name, begin, end in (part for axes in given for axis in axes for part in axis):
            ends[name] |= {begin, end or mesh[name]}

        def split_dim(name: str, begin: int = 1, end: int | None = None) -> Iterator[DimPart]:
            inside = sorted(n for n in ends[name] if begin <= n <= (end or mesh[name]))
            return ((name, *pair) for pair in pairwise(inside))

        axes = [[[piece for part in axis for piece in split_dim(*part)] for axis in each] for each in given]
        dims = [piece for name in mesh for piece in split_dim(name)]
        sizes = [math.prod(operand.type.shape) for operand in values[:2]]
        return cls(tuple(axes), _LABELS[op.name](op), dims, tuple(sizes))  # type: ignore[arg-type]

    def find_position_of_value_to_redistribute(self) -> int | None:
        """Return the position of the value to redistribute, or None if XLA computes the product correctly."""
        lhs, rhs = (self._find_dims_of_summed_axes(operand) for operand in (0, 1))
        if lhs & rhs:
            of_others = lhs != rhs and self._is_result_sharded_over(lhs & rhs)
            return _RESULT if of_others or self._can_reorder_result(lhs & rhs, (0, 1)) else None
        if not any(
            _count_shards(each) > 1 and _count_shards(each) == _count_shards(other)
            for each, other in self._iterate_dim_pairs_of_summed_axes()
        ):
            return None
        if self._can_reorder_result(lhs, (0,)) or self._can_reorder_result(rhs, (1,)):
            return min((0, 1), key=lambda operand: self.sizes[operand])
        return None

    def _iterate_dim_pairs_of_summed_axes(self) -> Iterator[tuple[set[DimPart], set[DimPart]]]:
        """Yield pairs of sets: the mesh dims that shard summed axes of the first operand, and those of the second.

        The first pair is for all summed axes together, and the others are for one axis each.
        """
        yield self._find_dims_of_summed_axes(0), self._find_dims_of_summed_axes(1)
        for label in self.labels[0]:
            yield self._find_dims_of_summed_axes(0, label), self._find_dims_of_summed_axes(1, label)

    def _find_dims_of_summed_axes(self, position: int, summed_label: Hashable = None) -> set[DimPart]:
        """Return the parts of mesh dims that shard the summed axes of an operand, or only the axis `summed_label`."""
        summed = {*self.labels[0]} & {*self.labels[1]} - {*self.labels[2]}
        placed = self._map_dim_parts_to_axis_labels(position).items()
        return {piece for piece, label in placed if label in summed and summed_label in (None, label)}

    def _map_dim_parts_to_axis_labels(self, position: int) -> dict[DimPart, Hashable]:
        """Map each part of a mesh dim that shards a value to the label of the axis that it shards."""
        axes = zip(self.axes[position], self.labels[position], strict=False)
        return {part: label for parts, label in axes for part in parts}

    def _is_result_sharded_over(self, parts: set[DimPart]) -> bool:
        return bool(parts & self._map_dim_parts_to_axis_labels(_RESULT).keys())

    def _can_reorder_result(self, group_parts: set[DimPart], operand_positions: tuple[int, ...]) -> bool:
        """Return whether XLA may read the result in a different device order than the order that computed it.

        XLA does not if no part in `group_parts` shards the result. It also does not if these parts share no
        axis of the result with other parts, and each other part shards the same axis in an operand, in the same order.

        Args:
            group_parts: The parts of mesh dims that separate the groups of devices.
            operand_positions: The positions of the operands that are not redistributed.
        """
        if not self._is_result_sharded_over(group_parts):
            return False
        orders = {
            tuple(
                piece
                for piece in self._list_dim_parts_in_shard_order(self.axes[value])
                if piece not in group_parts
            )
            for value in (*operand_positions, _RESULT)
        }
        return (
            len(orders) > 1
            or any(group_parts & {*axis} and {*axis} - group_parts for axis in self.axes[_RESULT])
            or any(
                label
                not in (
                    self._map_dim_parts_to_axis_labels(0).get(piece),
                    self._map_dim_parts_to_axis_labels(1).get(piece),
                )
                for piece, label in self._map_dim_parts_to_axis_labels(_RESULT).items()
                if piece not in group_parts
            )
        )

    def _list_dim_parts_in_shard_order(self, axes: Axes) -> list[DimPart]:
        """Return all parts of the mesh's dims in XLA's shard order. Parts that shard no axis are last."""
        sharded = [part for axis in axes for part in axis]
        return sharded + [part for part in self.dims if part not in sharded]


class _GatherLayouts(_ProductLayouts):
    """The layouts of a gather's operand, indices, and result."""

    def find_position_of_value_to_redistribute(self) -> int | None:
        """Return `_RESULT` if the operand is sharded and a mesh dim shards an axis only in the result, else None."""
        if not self._map_dim_parts_to_axis_labels(0):
            return None
        found = self._map_dim_parts_to_axis_labels(_RESULT).items()
        is_apart = any(
            label
            not in (
                self._map_dim_parts_to_axis_labels(0).get(piece),
                self._map_dim_parts_to_axis_labels(1).get(piece),
            )
            for piece, label in found
        )
        return _RESULT if is_apart else None


class _ScatterLayouts(_ProductLayouts):
    """The layouts of a scatter's updates, indices, and result."""

    def find_position_of_value_to_redistribute(self) -> int | None:
        """Return `_RESULT` if a mesh dim shards a batch axis in the result, but not in the updates, else None."""
        batch = {*self.labels[1]} & {*self.labels[_RESULT]}
        found = self._map_dim_parts_to_axis_labels(_RESULT).items()
        is_apart = any(
            label in batch and label != self._map_dim_parts_to_axis_labels(0).get(piece)
            for piece, label in found
        )
        return _RESULT if is_apart else None


def _count_shards(parts: Iterable[DimPart]) -> int:
    """Return the number of shards along an axis that these parts of mesh dims shard."""
    return math.prod(end // begin for _, begin, end in parts)


def _iterate_dim_parts_by_axis(
    layout: _sdy.TensorShardingAttr,
) -> Iterator[list[tuple[str, int, int | None]]]:
    """Yield a list for each axis: the mesh dims that shard it, with start and stop. A whole dim has the stop None."""
    for axis in map(_sdy.DimensionShardingAttr, layout.dimension_shardings):
        found: list[tuple[str, int, int | None]] = []
        for dim in map(_sdy.AxisRefAttr, axis.axes):
            part = dim.sub_axis_info and _sdy.SubAxisInfoAttr(dim.sub_axis_info)
            found.append(
                (dim.name, part.pre_size, part.pre_size * part.size) if part else (dim.name, 1, None)
            )
        yield found


def _read_shardy_layout(value: Any) -> _Sharding:
    """Return the layout that Shardy gave a value, or None if the value is replicated."""
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


def _label_dot_axes(op: _ir.OpView) -> tuple[list[Hashable], list[Hashable], list[Hashable]]:
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


def _label_convolution_axes(op: Any) -> tuple[list[Hashable], list[Hashable], list[Hashable]]:
    numbers = _hlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    lhs, rhs, result = ([(of, axis) for axis in range(len(op.results[0].type.shape))] for of in range(3))
    groups = any(op.attributes[name].value > 1 for name in ("feature_group_count", "batch_group_count"))
    lhs[numbers.input_batch_dimension] = result[numbers.output_batch_dimension]
    rhs[numbers.kernel_output_feature_dimension] = result[numbers.output_feature_dimension]
    if groups:  # each shard contains whole groups, so no sum needs values of another shard
        lhs[numbers.input_feature_dimension] = result[numbers.output_feature_dimension]
    else:
        lhs[numbers.input_feature_dimension] = rhs[numbers.kernel_input_feature_dimension]
    return lhs, rhs, result  # type: ignore[return-value]


def _label_gather_axes(op: _ir.OpView) -> tuple[list[Hashable], list[Hashable], list[Hashable]]:
    numbers = _hlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    batch = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    table, indices, result = _label_table_axes(op, 0, batch, numbers.index_vector_dim, numbers.offset_dims)
    sliced = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(table)) if axis not in sliced]
    shape, sizes = op.operands[0].type.shape, _ir.DenseI64ArrayAttr(op.attributes["slice_sizes"])
    for axis, other in zip(numbers.offset_dims, kept, strict=True):
        if sizes[other] == shape[other]:
            result[axis] = table[other]
    return table, indices, result


def _label_scatter_axes(op: _ir.OpView) -> tuple[list[Hashable], list[Hashable], list[Hashable]]:
    numbers = _hlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    batch = zip(numbers.input_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    return _label_table_axes(op, _RESULT, batch, numbers.index_vector_dim, numbers.update_window_dims)


def _label_table_axes(
    op: _ir.OpView,
    table_position: int,
    batch_axes: Iterable[tuple[int, int]],
    vector_axis: int,
    window_axes: Sequence[int],
) -> tuple[list[Hashable], list[Hashable], list[Hashable]]:
    """Return labels for the axes of a table, of the indices into it, and of the rows read or written.

    Args:
        op: A gather or scatter.
        table_position: The position of the table among its values, 0 or 2. The rows have the other position.
        batch_axes: Pairs of batch axes: the axis in the table, and in the indices.
        vector_axis: The axis of the indices that contains the coordinates of one index.
        window_axes: The axes of the rows inside one window.
    """
    ranks = [len(value.type.shape) for value in _get_compared_operands_and_result(op)]
    labels: list[list[Hashable]] = [[(of, axis) for axis in range(rank)] for of, rank in enumerate(ranks)]
    rows, indices = labels[_RESULT - table_position], labels[1]
    for axis, other in batch_axes:
        labels[table_position][axis] = indices[other]
    of_indices = [axis for axis in range(ranks[1]) if axis != vector_axis]
    of_rows = [axis for axis in range(len(rows)) if axis not in window_axes]
    for axis, other in zip(of_rows, of_indices, strict=True):
        rows[axis] = indices[other]
    return labels[0], labels[1], labels[2]


_SCATTER = "stablehlo.scatter"
_GATHER = "stablehlo.gather"
_LAYOUT_CLASSES: dict[str, type[_ProductLayouts]] = {_GATHER: _GatherLayouts, _SCATTER: _ScatterLayouts}
_LABELS = {
    "stablehlo.dot_general": _label_dot_axes,
    "stablehlo.convolution": _label_convolution_axes,
    _GATHER: _label_gather_axes,
    _SCATTER: _label_scatter_axes,
}
