"""Replace operators that XLA's partitioner computes wrongly for sharded arrays, when JAX lowers a program.

A lowering rule of JAX knows the number of devices, but not how arrays are sharded. So each replacement here is right in
every layout. docs/xla-faults.md has the faults, each as a program of its own:

    a convolution with a sharded spatial axis: XLA computes a multiple               the spatial axes are gathered
    the gradient of the kernel of a grouped or depthwise convolution: a multiple     it is computed by sums of products
    a convolution in groups of features: XLA takes other groups                      each shard gets whole groups
    the gradient of pooling along a sharded axis: wrong values                       the axes of windows are gathered
    a scatter that adds, as the gradient of a gather, to uneven shards: XLA adds the padding, too
                                                                                     updates in the padding are set to 0
    a scatter at unsigned indices, as the gradient of a sort, to uneven shards: the process ends
                                                                                     the indices are made signed
    padding between elements, and a dilation of windows                              the gaps are an axis of their own
    windows that move on an axis in uneven shards                                    the axis is gathered
    a slice with a stride that reads one element: XLA reads another                  the stride is 1
    a product that sums over three axes or more: XLA leaves out a mesh dim           these axes are merged into one
    a Fourier transform along an axis with too few elements in a shard               the axis is gathered
    a slice or an update that begins outside of a sharded axis: each shard moves it  the start is clamped before

Private names of JAX, tested on 0.10.2:

    jax.interpreters.mlir._lowerings, _platform_specific_lowerings    the rules, by primitive: dataclasses with a `rule`
    jax._src.interpreters.mlir._uncacheable_primitives                the rules of others are lowered once, without
                                                                      their operands, and then copied
    ModuleContext.cached_primitive_lowerings                          a dict for each program that is lowered
    jax._src.interpreters.mlir.lower_with_sharding_in_types           holds a result in the sharding of its type
    jaxlib.mlir.dialects.sdy                                          Shardy's constraints
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from layoutmap.engines.jax import far_products
from layoutmap.engines.jax.ambient import use_mesh
from layoutmap.engines.jax.meshless import remove_sharding_from_type
from layoutmap.engines.patches import PatchGroup, SelfClosingContext
from layoutmap.engines.tested import ImportErrorConverter

with ImportErrorConverter("jax"):
    from jax._src.interpreters.mlir import _uncacheable_primitives
    from jax._src.interpreters.mlir import lower_with_sharding_in_types as _lower_with_sharding
    from jax.interpreters.mlir import _lowerings, _platform_specific_lowerings
    from jaxlib.mlir import ir as _ir
    from jaxlib.mlir.dialects import sdy as _sdy

_MAX_PRODUCTS = 256
"""The largest number of products that replace a convolution. More products would make the program too large."""

_Axes = Sequence[int]
Computation = Callable[..., object]
"""A function that computes the result of a primitive from its operands and parameters."""
IsWrong = Callable[[Mapping[str, Any]], bool]

_without_devices: ContextVar[bool] = ContextVar("layoutmap_lowers_without_devices", default=False)
_is_lowering_replacement: ContextVar[bool] = ContextVar("layoutmap_lowers_a_form", default=False)
_num_devices: ContextVar[int | None] = ContextVar("layoutmap_lowers_for_devices", default=None)
"""Number of devices of the program that is being lowered. `None`: not known yet."""


def install_lowering_corrections(mesh_shape: Sequence[int]) -> None:
    """Replace the lowering rules of operators that XLA miscompiles, if a mesh of this shape has several devices.

    They stay registered, because sharded arrays and JAX's cached programs may exist until the process ends
    (decisions/0112).
    """
    if any(size > 1 for size in mesh_shape) and not _permanent_use:
        _permanent_use.append(_PATCHES.activate())
        _permanent_use[0].__enter__()


@contextmanager
def correct_lowering_without_devices_temporarily() -> Generator[None]:
    """Correct programs that are lowered without devices, too, until the block ends, because they will run on a mesh."""
    token = _without_devices.set(True)
    try:
        with _PATCHES.activate():
            yield
    finally:
        _without_devices.reset(token)


class _LoweringPatch:
    """Replace the lowering rule of a primitive in programs for several devices.

    Args:
        primitive: The primitive.
        replacement: Computes the same result with JAX operators. Inside it, JAX's own rule lowers the primitive.
        is_wrong: Returns whether XLA may compute the primitive wrongly for these parameters.
        shares_operands: Whether the replacement gathers an operand once for several uses of the primitive.
    """

    def __init__(
        self,
        primitive: Primitive,
        replacement: Computation,
        is_wrong: IsWrong = lambda _: True,
        *,
        shares_operands: bool = False,
    ):
        self._primitive, self._replacement, self._is_wrong = primitive, replacement, is_wrong
        # JAX's set, or an empty one if nothing is to change in it. When the process ends, this module's names are gone
        # before the last patch is removed, so the object keeps it.
        is_changed = shares_operands and primitive not in _uncacheable_primitives
        self._uncacheable: set[Primitive] = _uncacheable_primitives if is_changed else set()
        # Tuples of a table of rules, JAX's entry in it, and the replacement. A tuple is added before its table changes,
        # so that an interrupt loses no entry.
        self._replaced: list[tuple[dict[Primitive, Any], object, object]] = []

    def install(self) -> None:
        """Replace JAX's lowering rules of the primitive."""
        for table in (_lowerings, *list(_platform_specific_lowerings.values())):
            entry = table.get(self._primitive)
            if entry is not None and all(entry is not ours for _, _, ours in self._replaced):
                rule = functools.partial(
                    _lower_with_correction, self._replacement, self._is_wrong, entry.rule
                )
                ours = dataclasses.replace(entry, rule=rule)
                self._replaced.append((table, entry, ours))
                table[self._primitive] = ours
        self._uncacheable.add(self._primitive)

    def remove(self) -> None:
        """Restore JAX's rules in each table that still contains our replacement."""
        self._uncacheable.discard(self._primitive)
        for found in [each for each in self._replaced if each[0].get(self._primitive) is each[2]]:
            found[0][self._primitive] = found[1]
            self._replaced.remove(found)


def _lower_with_correction(
    replacement: Computation,
    is_wrong: IsWrong,
    original: Computation,
    context: Any,
    *operands: object,
    **params: object,
) -> object:
    """Lower a primitive by its replacement if XLA would compute it wrongly, and otherwise by its original rule."""
    axis_context = context.module_context.axis_context
    if _is_lowering_replacement.get() or not _is_program_partitioned(axis_context) or not is_wrong(params):
        return original(context, *operands, **params)
    token = _is_lowering_replacement.set(True)
    _num_devices.set(None if _without_devices.get() else _count_devices(axis_context))
    try:
        if not any(map(_has_explicit_sharding, (*context.avals_in, *context.avals_out))):
            return mlir.lower_fun(functools.partial(replacement, **params), multiple_results=False)(
                context, *operands
            )
        return _lower_replacement_under_explicit_axes(replacement, context, operands, params)
    finally:
        _is_lowering_replacement.reset(token)


def _lower_replacement_under_explicit_axes(
    replacement: Computation, context: Any, operands: Sequence[object], params: dict[str, object]
) -> Sequence[object]:
    """Lower a replacement for explicit axes. It is traced without a mesh, so that reshapes need no `out_sharding`."""
    if "out_sharding" in params:
        params = {**params, "out_sharding": None}
    untyped = context.replace(
        avals_in=[*map(remove_sharding_from_type, context.avals_in)],
        avals_out=[*map(remove_sharding_from_type, context.avals_out)],
    )
    with use_mesh(AbstractMesh((), ())):
        lower = mlir.lower_fun(functools.partial(replacement, **params), multiple_results=False)
        results = lower(untyped, *operands)
    return [
        _lower_with_sharding(context, result, aval)
        for result, aval in zip(results, context.avals_out, strict=True)
    ]


def _has_explicit_sharding(aval: object) -> bool:
    """Return whether the sharding of a value is part of its type."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def _is_program_partitioned(axis_context: Any) -> bool:
    """Return whether XLA partitions the program. False for one device, and in a `shard_map` over all mesh dims."""
    if hasattr(axis_context, "manual_axes"):
        return len(axis_context.manual_axes) < len(axis_context.mesh.axis_names)
    return getattr(axis_context, "num_devices", 1) > 1 or _without_devices.get()


def _count_devices(axis_context: Any) -> int:
    """Return the number of devices of the program being lowered."""
    return axis_context.mesh.size if hasattr(axis_context, "manual_axes") else axis_context.num_devices


def _is_divisible_by_devices(size: int, power: int = 1) -> bool:
    """Return whether the number of devices is known and divides an axis size, so that all shards are equal.

    Args:
        size: The size of the axis.
        power: With 2, whether each shard can be split again into as many equal parts as there are devices.
    """
    devices = _num_devices.get()
    return devices is not None and size % devices**power == 0


# -- gathering


class _SharedUse(NamedTuple):
    """The use of a gathered value in a convolution, or in the gradient of its kernel.

    Args:
        sizes: The sizes of the other operand and of the result. The gradient has those of the kernel.
        axes: The axes of the batch and of the features. In the gradient, these are exchanged.
    """

    sizes: frozenset[tuple[int, ...]]
    axes: tuple[int, ...]


_gather_axes_p = Primitive("layoutmap_gathered")
_gather_axes_p.def_abstract_eval(lambda value, axes, use: value)


def _gather_axes(value: jax.Array, axes: Collection[int], use: _SharedUse | None = None) -> jax.Array:
    """Gather a value along these axes. Other axes keep their sharding.

    Each gathered copy of a value can get other shards, and XLA then sends the value for each copy. So two operations
    with opposite uses share one copy. `None`: the copy has one use.
    """
    return _gather_axes_p.bind(value, axes=frozenset(axes), use=use) if axes else value


def _lower_gather_axes(
    context: Any, value: Any, *, axes: Collection[int], use: _SharedUse | None
) -> Sequence[Any]:
    if use is None:
        return _lower_gathered_copy(context, value, axes)
    # A copy in another block, such as the body of a loop, may not be visible in this one.
    here: Any = _ir.InsertionPoint.current
    key = _gather_axes_p, here.block, value, axes, use.sizes
    copies = context.module_context.cached_primitive_lowerings.setdefault(key, [])
    # Backward passes run in the reverse order, so the last copy is that of the same operation.
    if copies and copies[-1][0] == use.axes[::-1]:
        return copies.pop()[1]
    copies.append((use.axes, _lower_gathered_copy(context, value, axes)))
    return copies[-1][1]


def _lower_gathered_copy(context: Any, value: Any, axes: Collection[int]) -> Sequence[Any]:
    (aval,) = context.avals_in
    if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
        specs = [None if axis in axes else PartitionSpec.UNCONSTRAINED for axis in range(aval.ndim)]
        sharding = NamedSharding(AbstractMesh((1,), ("none",)), PartitionSpec(*specs))
        constrain = functools.partial(lax.with_sharding_constraint, shardings=sharding)
        return mlir.lower_fun(constrain, multiple_results=False)(context, value)
    # Constrain without a mesh, because a lowering rule does not know the module's mesh, and Shardy would gather all
    # axes for a constraint on a different mesh.
    dims = [_sdy.DimensionShardingAttr.get([], is_closed=axis in axes) for axis in range(aval.ndim)]
    return [_sdy.ShardingConstraintOp(value, _sdy.TensorShardingAttr.get(_sdy.MeshAttr.get([]), dims)).result]


mlir.register_lowering(_gather_axes_p, _lower_gather_axes, cacheable=False)


# -- pooling


def _select_and_scatter_gathered_operands(
    operand: jax.Array, source: jax.Array, initial: jax.Array, **params: Any
) -> jax.Array:
    """Compute `select_and_scatter_p` with operands and result gathered along the axes on which its windows move."""
    axes = _find_window_axes(**params)
    result = lax.select_and_scatter_p.bind(
        _gather_axes(operand, axes), _gather_axes(source, axes), initial, **params
    )
    return _gather_axes(result, axes)


def _select_and_gather_gathered_operands(tangents: jax.Array, operand: jax.Array, **params: Any) -> jax.Array:
    """Compute `select_and_gather_add_p` with operands gathered along the axes on which its windows move."""
    axes = _find_window_axes(**params)
    result = lax.select_and_gather_add_p.bind(
        _gather_axes(tangents, axes), _gather_axes(operand, axes), **params
    )
    return _gather_axes(result, axes)


def _find_window_axes(*, window_dimensions: Sequence[int], **_: object) -> set[int]:
    return {axis for axis, size in enumerate(window_dimensions) if size > 1}


def _reduce_gathered_windows(primitive: Primitive, operand: jax.Array, **params: Any) -> jax.Array:
    """Reduce windows after gathering the axes on which windows move, except axes with equal shards.

    XLA shards a base dilation wrongly, so insert its gaps first. Only sums need this, because in gradients no other
    reduction has a dilation on a sharded axis.
    """
    dilation = params["base_dilation"]
    if primitive is lax.reduce_window_sum_p and max(dilation, default=1) > 1:
        operand = _insert_gaps(operand, jnp.zeros((), operand.dtype), [step - 1 for step in dilation])
        params["base_dilation"] = (1,) * operand.ndim
    shape = jax.eval_shape(functools.partial(primitive.bind, **params), operand).shape
    moved = [params[name] for name in ("window_dimensions", "window_strides", "base_dilation", "padding")]
    axes = {
        axis
        for axis, (size, stride, step, padding) in enumerate(zip(*moved, strict=True))
        if (size, stride, step, *padding) != (1, 1, 1, 0, 0)
        and not (_is_divisible_by_devices(operand.shape[axis]) and _is_divisible_by_devices(shape[axis]))
    }
    return _gather_axes(primitive.bind(_gather_axes(operand, axes), **params), axes)


def _pad_array(operand: jax.Array, value: jax.Array, *, padding_config: Sequence[Sequence[int]]) -> jax.Array:
    """Pad an operand. Padding between elements is inserted separately, because XLA partitions it wrongly."""
    operand = _insert_gaps(operand, value, [interior for _, _, interior in padding_config])
    return lax.pad_p.bind(
        operand, value, padding_config=tuple((low, high, 0) for low, high, _ in padding_config)
    )


def _insert_gaps(operand: jax.Array, value: jax.Array, gaps: Sequence[int]) -> jax.Array:
    """Insert `gaps[axis]` copies of `value` between neighboring elements along each axis."""
    for axis, gap in enumerate(gaps):
        length = operand.shape[axis]
        if gap and length > 1:
            rows = jnp.expand_dims(operand, axis + 1)
            config = tuple((0, gap * (each == axis + 1), 0) for each in range(rows.ndim))
            rows = lax.pad_p.bind(rows, value, padding_config=config)
            joined = rows.reshape(*operand.shape[:axis], length * (gap + 1), *operand.shape[axis + 1 :])
            operand = lax.slice_in_dim(joined, 0, length * (gap + 1) - gap, axis=axis)
    return operand


# -- scatters


def _scatter_without_padding(
    primitive: Primitive, operand: jax.Array, indices: jax.Array, updates: jax.Array, **params: Any
) -> jax.Array:
    """Scatter so that the padding of uneven shards adds nothing: set the updates in the padding to 0, or gather."""
    numbers = params["dimension_numbers"]
    written = _find_one_element_window_axes(operand, updates, numbers)
    operand = _gather_axes(operand, written)
    indices = _convert_to_signed_indices(indices)
    if primitive is lax.scatter_p:
        return _gather_axes(primitive.bind(operand, indices, updates, **params), written)
    rows = [axis for axis in range(updates.ndim) if axis not in numbers.update_window_dims]
    uneven = {axis for axis in rows if not _is_divisible_by_devices(updates.shape[axis])}
    # Mask only if the scatter adds, because 0 is neutral only then. Gather an axis of size 1, because XLA assumes index
    # 0 on it, even in shards without this element.
    masked = {axis for axis in uneven if updates.shape[axis] > 1 and primitive is lax.scatter_add_p}
    for axis in masked:
        # Without the barrier, XLA would replace the comparison by True before it pads the shards.
        end = lax.optimization_barrier(np.int32(updates.shape[axis]))
        is_element = lax.broadcasted_iota(np.int32, updates.shape, axis) < end
        updates = lax.select(is_element, updates, jnp.zeros_like(updates))
    indices = _gather_axes(indices, {rows.index(axis) for axis in uneven - masked})
    result = primitive.bind(operand, indices, _gather_axes(updates, uneven - masked), **params)
    return _gather_axes(result, written)


def _convert_to_signed_indices(indices: jax.Array) -> jax.Array:
    """Convert unsigned indices to a signed type, because XLA ends the process for unsigned ones in padded shards."""
    if not jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
        return indices
    signed = np.int64 if indices.dtype.itemsize == 8 else np.int32
    largest = indices.dtype.type(min(jnp.iinfo(indices.dtype).max, jnp.iinfo(signed).max))
    return lax.min(indices, largest).astype(signed)


def _find_one_element_window_axes(
    operand: jax.Array, updates: jax.Array, dimension_numbers: lax.ScatterDimensionNumbers
) -> set[int]:
    """Return the axes on which a window covers one of several elements. XLA writes such windows into all shards."""
    without = {*dimension_numbers.inserted_window_dims, *dimension_numbers.operand_batching_dims}
    covered = [axis for axis in range(operand.ndim) if axis not in without]
    pairs = zip(dimension_numbers.update_window_dims, covered, strict=True)
    return {axis for own, axis in pairs if updates.shape[own] == 1 < operand.shape[axis]}


# -- slices


def _slice_inside_bounds(operand: jax.Array, *starts: jax.Array, slice_sizes: Sequence[int]) -> jax.Array:
    """Slice after clamping the start indices to the bounds. For one-element slices, XLA itself clamps correctly."""
    starts = _clamp_starts(starts, operand.shape, [size if size > 1 else 0 for size in slice_sizes])
    return lax.dynamic_slice_p.bind(operand, *starts, slice_sizes=slice_sizes)


def _slice_without_stride(
    operand: jax.Array, *, start_indices: _Axes, limit_indices: _Axes, strides: _Axes | None
) -> jax.Array:
    """Slice with stride 1 on axes with one result element, because XLA reads a wrong element for larger strides."""
    strides = list(strides or (1,) * operand.ndim)
    limits = list(limit_indices)
    for axis, start in enumerate(start_indices):
        if 0 < limits[axis] - start <= strides[axis]:
            limits[axis], strides[axis] = start + 1, 1
    return lax.slice_p.bind(
        operand, start_indices=start_indices, limit_indices=tuple(limits), strides=tuple(strides)
    )


def _update_slice_inside_bounds(operand: jax.Array, update: jax.Array, *starts: jax.Array) -> jax.Array:
    """Update a slice after clamping its start indices, so that it lies inside the operand."""
    return lax.dynamic_update_slice_p.bind(
        operand, update, *_clamp_starts(starts, operand.shape, update.shape)
    )


def _clamp_starts(starts: Sequence[jax.Array], shape: _Axes, sizes: _Axes) -> tuple[jax.Array, ...]:
    """Return start indices clamped so that slices lie inside the shape. A start with size 0 is not clamped."""
    return tuple(
        lax.clamp(
            start.dtype.type(0), start, start.dtype.type(min(length - size, jnp.iinfo(start.dtype).max))
        )
        if 0 < size < length
        else start
        for start, length, size in zip(starts, shape, sizes, strict=True)
    )


# -- products of matrices


def _multiply_with_merged_axes(
    lhs: jax.Array, rhs: jax.Array, *, dimension_numbers: Any, **params: object
) -> jax.Array:
    """Multiply after merging three or more summed axes, because XLA may ignore a mesh dim that shards one of them."""
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = dimension_numbers
    if len(lhs_summed) > 2:
        lhs, lhs_batch, lhs_summed = _merge_summed_axes(lhs, lhs_batch, lhs_summed)
        rhs, rhs_batch, rhs_summed = _merge_summed_axes(rhs, rhs_batch, rhs_summed)
        dimension_numbers = (lhs_summed, rhs_summed), (lhs_batch, rhs_batch)
    return lax.dot_general_p.bind(lhs, rhs, dimension_numbers=dimension_numbers, **params)


def _merge_summed_axes(value: jax.Array, batch: _Axes, summed: _Axes) -> tuple[jax.Array, _Axes, _Axes]:
    """Move an operand's batch axes first, and merge its summed axes. Return it, its batch axes, and its merged axis."""
    others = [axis for axis in range(value.ndim) if axis not in (*batch, *summed)]
    shape = [value.shape[axis] for axis in (*batch, *others)]
    merged_size = math.prod(value.shape[axis] for axis in summed)
    first = len(batch)
    value = jnp.transpose(value, (*batch, *summed, *others))
    return value.reshape(*shape[:first], merged_size, *shape[first:]), tuple(range(first)), (first,)


# -- Fourier transforms


def _compute_fft(value: jax.Array, *, fft_type: lax.FftType | str | int, **params: object) -> jax.Array:
    """Compute a Fourier transform. First gather the last axis if XLA would split it incorrectly.

    XLA itself gathers the operands of transforms that are real or inverse, or have fewer than three axes. On CPUs, XLA
    may choose an axis order in memory that its kernel does not support, so the result's order is constrained.
    """

    def compute_fft_of_shards(value: jax.Array) -> jax.Array:
        result = lax.fft_p.bind(value, fft_type=fft_type, **params)
        return with_layout_constraint(result, Layout(tuple(range(result.ndim))))

    is_shared_out = fft_type == lax.FftType.FFT and value.ndim > 2
    if not is_shared_out or _is_divisible_by_devices(value.shape[-1], 2):
        return compute_fft_of_shards(value)
    last = {value.ndim - 1}
    return _gather_axes(compute_fft_of_shards(_gather_axes(value, last)), last)


# -- convolutions


def _compute_convolution(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Compute a convolution by operations that XLA partitions correctly (see the module's docstring)."""
    lhs_spec, rhs_spec, _ = numbers = params["dimension_numbers"]
    groups, by_batch = params["feature_group_count"], params["batch_group_count"] > 1
    shape = jax.eval_shape(functools.partial(lax.conv_general_dilated_p.bind, **params), lhs, rhs).shape
    result_sizes = [shape[axis] for axis in numbers.out_spec[2:]]
    windows = [rhs.shape[axis] for axis in rhs_spec[2:]]
    if by_batch and math.prod(result_sizes) > _MAX_PRODUCTS:
        operands = [_gather_axes(each, range(each.ndim)) for each in (lhs, rhs)]
        return lax.conv_general_dilated_p.bind(*operands, **params)
    is_product = groups > 1 and math.prod(map(min, windows, result_sizes)) == 1
    # If one of several mesh dims shards a spatial axis, XLA computes a multiple of the result, so gather the spatial
    # axes. Gather them on a mesh with one dim, too, because Shardy may split that dim into several. Axes on which the
    # window has one element need it, too: without it, XLA computed some of 150 drawn convolutions wrongly.
    use = _SharedUse(frozenset(tuple(sorted(each)) for each in (rhs.shape, shape)), tuple(lhs_spec[:2]))
    lhs, rhs = _gather_axes(lhs, lhs_spec[2:], use), _gather_axes(rhs, rhs_spec[2:])
    if by_batch and math.prod(result_sizes):
        return _convolve_batch_groups(result_sizes, lhs, rhs, **params)
    lhs, rhs = (
        _gather_within_groups(lhs, lhs_spec[1], groups),
        _gather_within_groups(rhs, rhs_spec[0], groups),
    )
    if is_product:
        return _convolve_as_einsum(result_sizes, lhs, rhs, **params)
    if groups > 1:  # XLA would transpose the result in the wrong direction, so transpose it here
        numbers = lax.ConvDimensionNumbers(lhs_spec, rhs_spec, lhs_spec)
    result = lax.conv_general_dilated_p.bind(lhs, rhs, **{**params, "dimension_numbers": numbers})
    result = _gather_axes(_gather_within_groups(result, numbers.out_spec[1], groups), numbers.out_spec[2:])
    if groups == 1:
        return result
    return _restore_axis_order(jnp.transpose(result, lhs_spec), params["dimension_numbers"])


def _gather_within_groups(value: jax.Array, axis: int, groups: int) -> jax.Array:
    """Gather features so that each shard has whole groups, because XLA would treat any shard as a group."""
    size = value.shape[axis] // groups
    if groups == 1 or size == 1:
        return value
    parted = value.reshape(*value.shape[:axis], groups, size, *value.shape[axis + 1 :])
    return _gather_axes(parted, {axis + 1}).reshape(value.shape)


def _convolve_batch_groups(
    result_sizes: Sequence[int], lhs: jax.Array, rhs: jax.Array, **params: Any
) -> jax.Array:
    """Compute a convolution with `batch_group_count` as one sum of products for each position of the result.

    It is the gradient of a kernel, so `result_sizes` is the shape of a window, and it sums over the rows of a batch.
    XLA sums products over shards correctly. On CPU devices this is also faster than XLA's own lowering, which
    multiplies all groups with one another.
    """
    groups, strides, dilation = (
        params[name] for name in ("batch_group_count", "window_strides", "rhs_dilation")
    )
    lhs, rhs, sums, dtype = _transpose_and_pad_operands(lhs, rhs, **params)
    lhs, rhs = (each.reshape(groups, -1, *each.shape[1:]) for each in (lhs, rhs))
    lengths = list(map(_compute_dilated_length, rhs.shape[3:], dilation))
    parts: list[jax.Array] = []
    for place in np.ndindex(*result_sizes):
        first = [n * stride for n, stride in zip(place, strides, strict=True)]
        last = [start + length for start, length in zip(first, lengths, strict=True)]
        window = lax.slice(lhs, (0, 0, 0, *first), (*lhs.shape[:3], *last), (1, 1, 1, *dilation))
        if lhs.shape[1] == rhs.shape[1] == 1:  # groups have one feature, so multiply elements, not matrices
            products = window.astype(sums) * rhs.astype(sums)
            parts.append(products.sum(tuple(range(2, products.ndim)))[:, :, None])
        else:
            parts.append(_multiply_by_einsum("gbf...,gof...->gbo", window, rhs, sums, **params))
    result = jnp.moveaxis(jnp.stack(parts, -1), 0, 1)  # now the axes are batch, groups, features, positions
    return _restore_axis_order(
        result.reshape(result.shape[0], -1, *result_sizes).astype(dtype), params["dimension_numbers"]
    )


def _convolve_as_einsum(
    result_sizes: Sequence[int], lhs: jax.Array, rhs: jax.Array, **params: Any
) -> jax.Array:
    """Compute a convolution in feature groups as one `einsum`. On each spatial axis, window or result has size 1.

    As a convolution, XLA ends the process on CPU devices if the features are sharded: "free(): invalid pointer".
    """
    groups, strides, dilation = (
        params[name] for name in ("feature_group_count", "window_strides", "rhs_dilation")
    )
    lhs, rhs, sums, dtype = _transpose_and_pad_operands(lhs, rhs, **params)
    windows = rhs.shape[2:]
    steps = [
        stride if window == 1 else each
        for window, stride, each in zip(windows, strides, dilation, strict=True)
    ]
    ends = map(_compute_dilated_length, map(max, windows, result_sizes), steps)
    lhs = lax.slice(lhs, [0] * lhs.ndim, (*lhs.shape[:2], *ends), (1, 1, *steps))
    lhs = lhs.reshape(lhs.shape[0], groups, -1, *lhs.shape[2:])
    rhs = rhs.reshape(groups, -1, rhs.shape[1], *(window for window in windows if window > 1))
    letters = "stuvwxyz"[: len(windows)]
    summed = "".join(letter for letter, window in zip(letters, windows, strict=True) if window > 1)
    kept = "".join(letter for letter, window in zip(letters, windows, strict=True) if window == 1)
    result = _multiply_by_einsum(f"bgf{letters},gof{summed}->bgo{kept}", lhs, rhs, sums, **params)
    return _restore_axis_order(
        result.reshape(result.shape[0], -1, *result_sizes).astype(dtype), params["dimension_numbers"]
    )


def _transpose_and_pad_operands(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    dimension_numbers: lax.ConvDimensionNumbers,
    preferred_element_type: np.dtype[Any] | None,
    **_: object,
) -> tuple[jax.Array, jax.Array, np.dtype[Any], np.dtype[Any]]:
    """Convert both operands to the axis order batch, features, positions. Also return the dtypes of sums and result."""
    dtype = jnp.result_type(lhs if preferred_element_type is None else preferred_element_type)
    sums = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
    edges = [(low, high, dilation - 1) for (low, high), dilation in zip(padding, lhs_dilation, strict=True)]
    # XLA ends the process if one pad has gaps between elements and a negative edge, so insert the gaps separately.
    lhs = _pad_array(
        jnp.transpose(lhs, dimension_numbers.lhs_spec),
        jnp.zeros((), lhs.dtype),
        padding_config=[(0, 0, 0)] * 2 + edges,
    )
    return lhs, jnp.transpose(rhs, dimension_numbers.rhs_spec), sums, dtype


def _compute_dilated_length(count: int, step: int) -> int:
    """Return the length of an axis that contains `count` elements at a distance of `step`."""
    return (count - 1) * step + 1


def _multiply_by_einsum(
    spec: str,
    lhs: jax.Array,
    rhs: jax.Array,
    sum_dtype: np.dtype[Any],
    *,
    precision: jax.lax.PrecisionLike,
    **_: object,
) -> jax.Array:
    return jnp.einsum(spec, lhs, rhs, precision=precision, preferred_element_type=sum_dtype)


def _restore_axis_order(result: jax.Array, dimension_numbers: lax.ConvDimensionNumbers) -> jax.Array:
    """Transpose a result from the order batch, features, positions to the convolution's own axis order."""
    return jnp.transpose(result, list(map(dimension_numbers.out_spec.index, range(result.ndim))))


_PATCHES = PatchGroup(
    [
        _LoweringPatch(lax.dot_general_p, _multiply_with_merged_axes),
        _LoweringPatch(lax.conv_general_dilated_p, _compute_convolution, shares_operands=True),
        _LoweringPatch(lax.select_and_scatter_p, _select_and_scatter_gathered_operands),
        _LoweringPatch(lax.select_and_gather_add_p, _select_and_gather_gathered_operands),
        *(
            _LoweringPatch(each, functools.partial(_scatter_without_padding, each))
            for each in (
                lax.scatter_p,
                lax.scatter_add_p,
                lax.scatter_mul_p,
                lax.scatter_min_p,
                lax.scatter_max_p,
            )
        ),
        _LoweringPatch(lax.fft_p, _compute_fft),
        _LoweringPatch(
            lax.pad_p, _pad_array, lambda params: any(gap for *_, gap in params["padding_config"])
        ),
        *(
            _LoweringPatch(each, functools.partial(_reduce_gathered_windows, each))
            for each in (lax.reduce_window_sum_p, lax.reduce_window_max_p, lax.reduce_window_min_p)
        ),
        _LoweringPatch(lax.dynamic_slice_p, _slice_inside_bounds),
        _LoweringPatch(lax.slice_p, _slice_without_stride, lambda params: params["strides"] is not None),
        _LoweringPatch(lax.dynamic_update_slice_p, _update_slice_inside_bounds),
        far_products.PATCH,
    ]
)
_permanent_use: list[SelfClosingContext] = []
