"""Lower a JAX training step once without layouts, and compute its cost in any layouts.

The file is longer than others, because tracing, counting, and compiling share a few private classes.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.core
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from layoutmap.core.errors import EngineError, LayoutMapError, ScopeError, join_names
from layoutmap.core.garbage import pause_garbage_collection
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.paths import find_repeated_layers
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.steps import BatchArraySpec, Key, TrainingStep
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.cost.equal_blocks import BlockCallChecker, BlockDiffersFromFirstError
from layoutmap.cost.extrapolation import (
    BlockExtrapolation,
    StepCounts,
    cancel_negative_counts,
    find_block_path,
    merge_collectives_of_repeated_layers,
)
from layoutmap.cost.jax.attention import label_and_count_attention_calls
from layoutmap.cost.jax.compiled import CompiledStep, compile_modules, partition_modules
from layoutmap.cost.jax.counting import compute_step_counts, count_collectives, count_flops
from layoutmap.cost.jax.explicit_axes import translate_sharding_refusals
from layoutmap.cost.jax.graph import LAYER, UPDATE, parse_op_origin
from layoutmap.cost.jax.memory import estimate_memory_upper_bound
from layoutmap.cost.jax.partitioned import parse_partitioned_step
from layoutmap.cost.jax.rewrites import rewrite_collectives, split_combined_all_reduces
from layoutmap.cost.jax.targets import find_target
from layoutmap.cost.table import COMPILED, PARTITIONED, PeakTensors, StepCost
from layoutmap.cost.verified import Verified
from layoutmap.engines.jax import shardy
from layoutmap.engines.jax.ambient import make_abstract_mesh, use_mesh
from layoutmap.engines.jax.arrays import constrain_traced_array
from layoutmap.engines.jax.corrections import correct_lowering_without_devices_temporarily
from layoutmap.engines.jax.devices import make_partition_spec
from layoutmap.engines.jax.programs import suspend_jax_context


# Tracing is slow, so few of the model's equal blocks are traced (decisions/0156).
class StepCostCounter:
    """Training step on JAX that is traced once without layouts, so that its cost in any layouts is quick to compute.

    `remat` selects layers that recompute activations: `"blocks"` or a regex.
    """

    def __init__(self, step: TrainingStep, remat: str | None = None, fuse_attention: bool = False):
        self._step = step
        self._fuses = fuse_attention
        self._recomputes = _make_remat_predicate(step, remat)
        self._notes = (*step.notes, *([f"{_NOTE} (remat={remat!r})"] if remat else []))
        # The keys are the skipped blocks, and the layouts if the step depends on them.
        self._modules: dict[tuple[frozenset[str], Hashable], _LoweredModule] = {}
        self._needs_mesh = False  # whether the user's code of the step names mesh dims
        self._compiled: dict[tuple[bytes, int, str], CompiledStep] = {}  # keys: module hash, devices, target
        self._blocks = BlockExtrapolation(step)

    def compute_cost(
        self,
        assignments: Sequence[Assignment],
        policy: LayoutPolicy,
        *,
        with_peak_tensors: bool = False,
        target: str | None = None,
        on_wait: Callable[[], object] = lambda: None,
    ) -> StepCost:
        """Return the cost of a step, counted in the output of XLA's partitioner or, with `target`, its compiler."""
        if target and find_target(target).chip:
            raise EngineError(
                f"the cost of a step cannot be computed with XLA's compiler for {target!r}",
                why="XLA for TPUs computes parts of collectives inside fusions, where they cannot be counted",
                fix=f"leave target out, or print lowered.verify(.., target={target!r})",
            )
        layouts = {a.variable.key: a.layout for a in assignments}
        counts = self._blocks.compute_counts(
            layouts,
            policy,
            lambda skipped: self._lower_with_cache(skipped, layouts, policy),
            lambda: {path for module in self._modules.values() for path in module.output_shapes},
            lambda modules: self._count_modules(modules, layouts, policy, with_peak_tensors, target, on_wait),
        )
        batch = [
            Assignment(
                VariableSpec(each.name, each.shape, _canonicalize_dtype(each.dtype)),
                policy.derive_batch_layout(each.shape),
            )
            for each in self._step.batch
        ]
        # Count weights in host memory as device memory, too, because the whole step uses them. Leave out slots in host
        # memory, because only the update uses them.
        arguments = sum(
            a.device_bytes if a.variable.kind is Kind.SLOT else a.shard_bytes for a in (*assignments, *batch)
        )
        balanced = cancel_negative_counts(counts.collectives)
        collectives = [replace(each, calls=number) for each, number in balanced]
        peaks = [0, 0]
        for (order, *_), peak in counts.peaks.items():
            peaks[order] = max(peaks[order], peak)
        peaks = [estimate_memory_upper_bound(peak, collectives, counts.recomputes) for peak in peaks]
        held = _find_peak_tensors(counts)
        if target:
            peaks = [counts.compiled_bytes]
            # The compiled step's peak replaces the estimate, so list only the largest tensors that fit into it.
            sums = itertools.accumulate(each.num_bytes for each in held)
            held = tuple(each for each, num in zip(held, sums, strict=True) if num <= counts.compiled_bytes)
        return StepCost(
            policy.mesh,
            tuple(merge_collectives_of_repeated_layers(collectives)),
            {dtype: number for dtype, number in counts.flops.items() if number},
            counts.traffic,
            arguments,
            arguments + peaks[0],
            (
                *self._notes,
                *dict.fromkeys(note for m in self._modules.values() for note in m.attention_notes),
            ),
            arguments + min(peaks),
            held,
            f"{COMPILED}{target}" if target else PARTITIONED,
        )

    @property
    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        """Dict from the path of each layer that was traced so far to the shape of the first array that it returns."""
        traced = {p: s[0] for module in self._modules.values() for p, s in module.output_shapes.items() if s}
        equal = {p: traced[stack[0]] for stack in self._step.blocks for p in stack if stack[0] in traced}
        return {**equal, **traced}

    @property
    def fingerprint(self) -> str:
        """Hash that is equal for equal steps, if the same parts of both were traced."""
        parts = [*map(repr, (self._step.variables, self._step.batch, self._step.blocks))]
        parts += sorted(str(module.module) for module in self._modules.values())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def _count_modules(
        self,
        modules: Sequence[_LoweredModule],
        layouts: Mapping[Key, Layout],
        policy: LayoutPolicy,
        with_peak_tensors: bool,
        target: str | None,
        on_wait: Callable[[], object],
    ) -> list[StepCounts]:
        given = [
            shardy.serialize_module(self._make_module_with_layouts(each, layouts, policy)) for each in modules
        ]
        size = policy.mesh.size
        texts = partition_modules(given, size, on_wait)
        compiled = self._compile_new_modules(given, size, target, on_wait) if target else [None] * len(given)
        return [
            self._count_partitioned_module(text, each, policy, with_peak_tensors, of)
            for text, each, of in zip(texts, modules, compiled, strict=True)
        ]

    @pause_garbage_collection()
    def _count_partitioned_module(
        self,
        text: str,
        lowered: _LoweredModule,
        policy: LayoutPolicy,
        with_peak_tensors: bool,
        compiled: CompiledStep | None,
    ) -> StepCounts:
        block = parse_partitioned_step(text, policy.mesh)
        rewrite_collectives(block)
        names = [v.parent or v.path for v in lowered.variables] + [each.name for each in self._step.batch]
        names += [""] * lowered.num_skipped
        donated = {number: number for number in range(len(lowered.variables))}
        found = compute_step_counts(block, names, donated, with_peak_tensors=with_peak_tensors)
        if compiled is None:
            return found
        block = parse_partitioned_step(compiled.text, policy.mesh)
        split_combined_all_reduces(block)
        return replace(
            found,
            collectives=count_collectives(block, names, len(donated)),
            flops=count_flops(block),
            compiled_bytes=compiled.peak_bytes - compiled.argument_bytes,
        )

    def _make_module_with_layouts(
        self, lowered: _LoweredModule, layouts: Mapping[Key, Layout], policy: LayoutPolicy
    ) -> Any:
        placed = [layouts[variable.key] for variable in lowered.variables]
        batch = [policy.derive_batch_layout(each.shape) for each in self._step.batch]
        find_output_layout = lowered.make_layout_lookup(policy)
        return shardy.copy_module_with_layouts(
            lowered.module,
            policy.mesh,
            [*placed, *batch, *[None] * lowered.num_skipped],
            [*placed, *[None] * lowered.num_other_results],
            lambda name, shape: find_output_layout(parse_op_origin(name)[0], shape),
        )

    def compile(
        self,
        assignments: Sequence[Assignment],
        policy: LayoutPolicy,
        target: str,
        on_wait: Callable[[], object] = lambda: None,
    ) -> CompiledStep:
        """Compile the step with all of its blocks, for devices that need not exist, and return the compiled step."""
        layouts = {a.variable.key: a.layout for a in assignments}
        placed = self._make_module_with_layouts(self._lower_with_cache({}, layouts, policy), layouts, policy)
        modules = [shardy.serialize_module(placed)]
        return self._compile_new_modules(modules, policy.mesh.size, target, on_wait)[0]

    # Compiling for a GPU takes seconds to minutes, so no module is compiled twice (decisions/0156).
    def _compile_new_modules(
        self, modules: Sequence[bytes], num_devices: int, target: str, on_wait: Callable[[], object]
    ) -> list[CompiledStep]:
        """Return the compiled steps of modules. Modules that were compiled before are not compiled again."""
        keys = [(hashlib.sha256(each).digest(), num_devices, target) for each in modules]
        new = {key: each for key, each in zip(keys, modules, strict=True) if key not in self._compiled}
        self._compiled.update(
            zip(new, compile_modules([*new.values()], num_devices, target, on_wait), strict=True)
        )
        return [self._compiled[key] for key in keys]

    def verify(
        self,
        assignments: Sequence[Assignment],
        policy: LayoutPolicy,
        target: str,
        estimate: StepCost,
        on_wait: Callable[[], object] = lambda: None,
    ) -> Verified:
        """Compile the step, and return XLA's sizes together with the estimated cost `estimate`. See `compile`."""
        compiled = self.compile(assignments, policy, target, on_wait)
        return Verified(estimate, target, compiled.sent_by_kind, compiled.argument_bytes, compiled.peak_bytes)

    def _lower_with_cache(
        self, skipped: Mapping[str, str], layouts: Mapping[Key, Layout], policy: LayoutPolicy
    ) -> _LoweredModule:
        needs_mesh = self._needs_mesh or "explicit" in policy.mesh.axis_types
        layout_key = _make_trace_cache_key(layouts, policy) if needs_mesh else None
        key = frozenset(skipped), layout_key
        if key not in self._modules:
            needed = layouts if needs_mesh else None
            try:
                self._modules[key] = _lower_without_skipped_blocks(
                    self._step, skipped, needed, policy, self._recomputes, self._fuses
                )
            except ScopeError:
                if needs_mesh:
                    self._needs_mesh = False
                    raise
                # The step's code names mesh dims, which it cannot do without a mesh, so trace it again on the mesh.
                self._needs_mesh = True
                return self._lower_with_cache(skipped, layouts, policy)
        return self._modules[key]


def _make_trace_cache_key(layouts: Mapping[Key, Layout], policy: LayoutPolicy) -> Hashable:
    """Return a key that is equal for equal traces of a step: its mesh, layouts, batch dim, and activation rules."""
    mesh, activations = policy.mesh, getattr(policy.activations, "__self__", None)
    specs = tuple(layout.sharding_specs for layout in layouts.values())
    return Mesh(None, mesh.mesh_dims), mesh.axis_types, specs, policy.batch_dim, str(activations)


def _find_peak_tensors(counts: StepCounts) -> tuple[PeakTensors, ...]:
    """Return a device's tensors at the peak, the largest first, for the order of operations with the lower peak."""
    of_orders: dict[int, Any] = {}
    for key, peak in counts.peaks.items():
        if peak > counts.peaks.get(of_orders.get(key[0]), -1):
            of_orders[key[0]] = key
    if not counts.held or not of_orders:
        return ()
    highest = min(of_orders.values(), key=lambda key: counts.peaks[key])
    at_the_peak = {key[-1]: num_bytes for key, num_bytes in counts.held.items() if key[:-1] == highest}
    found = [PeakTensors(*what, num_bytes=num_bytes) for what, num_bytes in at_the_peak.items()]
    return tuple(sorted((each for each in found if each.num_bytes > 0), key=lambda each: -each.num_bytes))


_NOTE = "activations inside of layers are recomputed in the backward pass, whatever the model's code does"


def _make_remat_predicate(step: TrainingStep, remat: str | None) -> Callable[[str], bool] | None:
    """Return a function that tells from a layer's path whether the layer is recomputed, or None without `remat`."""
    if remat is None:
        return None
    if remat == "blocks":
        return find_repeated_layers(variable.path for variable in step.variables).__contains__
    pattern = re.compile(remat)
    return lambda path: pattern.match(path) is not None


@dataclass(frozen=True)
class _LoweredModule:
    module: Any  # module of a step without its skipped blocks
    variables: Sequence[VariableSpec]  # variables of the first arguments and results of the module
    num_skipped: int  # number of variables of skipped blocks, which are the last arguments of the module
    num_other_results: int
    output_shapes: Mapping[str, Sequence[tuple[int, ...]]]
    attention_notes: Sequence[str]

    def make_layout_lookup(self, policy: LayoutPolicy) -> Callable[[str, tuple[int, ...]], Layout | None]:
        """Return a function from a layer's path and an output's shape to the layout of this output, or None."""
        known: dict[tuple[str, tuple[int, ...]], Layout | None] = {}
        for path, shapes in self.output_shapes.items():
            rule = policy.find_activation_layout(path)
            if rule is not None:
                for shape, layout in zip(
                    shapes, policy.choose_output_layouts(rule, shapes, path), strict=True
                ):
                    known[path, shape] = layout
        return lambda path, shape: known.get((path, shape))


def _lower_without_skipped_blocks(
    step: TrainingStep,
    skipped: Mapping[str, str],
    layouts: Mapping[Key, Layout] | None,
    policy: LayoutPolicy,
    is_recomputed_path: Callable[[str], bool] | None,
    fuses_all_calls: bool,
) -> _LoweredModule:
    """Trace and lower a step without its skipped blocks, and return the module.

    `skipped` maps the path of each to that of an equal block. `layouts` is None unless the code names mesh dims or axes
    are explicit. Without layouts, the outputs of layers are marked, so that layouts can be added later.
    """
    variables = [v for v in step.variables if find_block_path(v.parent or v.path, skipped) is None]
    unread = [v for v in step.variables if find_block_path(v.parent or v.path, skipped) is not None]
    keys = [variable.key for variable in variables]
    blocks = BlockCallChecker(skipped, _make_comparable_structure)
    tracer = _LayerTracer(blocks, is_recomputed_path, policy=None if layouts is None else policy)
    mesh = make_abstract_mesh(policy.mesh)

    def make_shape_struct(each: VariableSpec | BatchArraySpec, layout: Layout) -> jax.ShapeDtypeStruct:
        sharding = None if layouts is None else NamedSharding(mesh, make_partition_spec(layout))
        return jax.ShapeDtypeStruct(each.shape, _convert_to_jax_dtype(each.dtype), sharding=sharding)

    def run_step(values: Sequence[object], batch: Sequence[object], others: Sequence[object]) -> object:
        tracer.unread = dict(zip((variable.key for variable in unread), others, strict=True))
        after = dict(step.run(tracer, dict(zip(keys, values, strict=True)), batch))
        return [after.pop(key) for key in keys], list(after.values())

    known = layouts or {each.key: policy.make_replicated_layout(len(each.shape)) for each in step.variables}
    values, others = ([make_shape_struct(v, known[v.key]) for v in arrays] for arrays in (variables, unread))
    batch = [make_shape_struct(each, policy.derive_batch_layout(each.shape)) for each in step.batch]
    with (
        suspend_jax_context(),
        use_mesh(mesh) if layouts is not None else nullcontext(),
        correct_lowering_without_devices_temporarily(),
        label_and_count_attention_calls(fuses_all_calls) as calls,
        _translate_trace_errors(step, tracer),
        translate_sharding_refusals(step.name) if layouts is not None else nullcontext(),
    ):
        options: dict[str, Any] = {} if layouts is not None else {"in_shardings": _ABSTRACT}
        traced = jax.jit(run_step, keep_unused=True, **options).trace(values, batch, others)
        _check_skipped_blocks_are_unread(traced.jaxpr.jaxpr, unread, skipped)
        tracer.blocks.check_all_calls()
        with jax.default_device(_StandInDevice()):
            module = traced.lower(lowering_platforms=(_StandInDevice.platform,)).compiler_ir("stablehlo")
    if is_recomputed_path and not tracer.recomputed:
        raise _make_unmatched_remat_error(step, tracer)
    if fuses_all_calls and not calls.num_fused:
        raise _make_no_attention_call_error(step)
    num_other_results = len(jax.tree.leaves(traced.out_info)) - len(keys)
    return _LoweredModule(
        module, variables, len(unread), num_other_results, tracer.output_shapes, calls.notes
    )


def _check_skipped_blocks_are_unread(
    jaxpr: Any, unread: Sequence[VariableSpec], skipped: Mapping[str, str]
) -> None:
    """Raise if other layers read variables of a skipped block, because the gradients of these would be missing."""
    _, is_used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    for variable, is_read in zip(unread, is_used[len(is_used) - len(unread) :], strict=True):
        if is_read and (block := find_block_path(variable.parent or variable.path, skipped)) is not None:
            raise BlockDiffersFromFirstError(block)


def _convert_to_jax_dtype(name: str) -> jax.typing.DTypeLike:
    impl = _KEYS.get(name)
    return name if impl is None else jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def _canonicalize_dtype(name: str) -> str:
    """Return the element type that JAX uses for `name`, such as int32 for int64 without `jax_enable_x64`."""
    return name if name in _KEYS else str(jax.dtypes.canonicalize_dtype(name))


_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


@contextmanager
def _translate_trace_errors(step: TrainingStep, tracer: _LayerTracer) -> Generator[None]:
    try:
        yield
    except Exception as error:
        if tracer.blocks.differing_path:  # Keras has replaced the tracer's exception, so raise it again
            raise BlockDiffersFromFirstError(tracer.blocks.differing_path) from None
        if isinstance(error, LayoutMapError | BlockDiffersFromFirstError):
            raise
        inputs = ", ".join(f"{each.name}: {each.dtype}{list(each.shape)}" for each in step.batch)
        raise ScopeError(
            f"{step.name}: the training step fails when it is traced",
            facts={"inputs": inputs, type(error).__name__: str(error).strip().partition("\n")[0]},
            why="for its cost, the step is traced with shapes instead of values, as in jax.jit",
            fix="pass inputs= with the shapes and dtypes of the model's inputs, and call the model with "
            "them in a test",
        ) from error


def _make_unmatched_remat_error(step: TrainingStep, tracer: _LayerTracer) -> ScopeError:
    return ScopeError(
        f"{step.name}: remat does not match any layer of the model",
        facts={"layers": join_names(list(tracer.output_shapes)) or "none are known"},
        why='"blocks" selects layers whose paths differ only in a number; any other text is a regex for paths',
        fix="pass a regex that matches layers, as in remat=r'blocks\\.\\d+$'"
        if tracer.output_shapes
        else "leave remat out, and use jax.checkpoint in the function that calls the model",
    )


def _make_no_attention_call_error(step: TrainingStep) -> ScopeError:
    return ScopeError(
        f"{step.name}: fuse_attention finds no call of attention",
        why="only calls of jax.nn.dot_product_attention are found; keras.ops.dot_product_attention and flax.nnx layers "
        "call it, except layers with dropout of attention scores",
        fix="leave fuse_attention out, or call jax.nn.dot_product_attention in the model",
    )


@dataclass(eq=False)
class _LayerTracer:
    """Tracer that marks outputs of layers, and skips blocks that are called like the first block of their stack."""

    blocks: BlockCallChecker
    is_recomputed_path: Callable[[str], bool] | None = None
    recomputed: bool = False
    output_shapes: dict[str, list[tuple[int, ...]]] = field(default_factory=dict[str, list[tuple[int, ...]]])
    unread: Mapping[Key, object] = field(default_factory=dict[Key, object])
    # Policy for the layouts of outputs during tracing; None: the step is traced without layouts.
    policy: LayoutPolicy | None = None
    _is_inside: bool = False

    def should_recompute(self, path: str) -> bool:
        return self.is_recomputed_path is not None and not self._is_inside and self.is_recomputed_path(path)

    def call_layer(
        self, path: str, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        if self.blocks.record_call(path, args, kwargs):
            return args[0]
        with jax.named_scope(f"{LAYER}{path}"):
            found = self._call_unskipped_layer(path, function, args, kwargs)
            leaves, tree = jax.tree.flatten(found)
            self.blocks.record_output(path, args, found)
            arrays = [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]
            self.output_shapes[path] = [tuple(each.shape) for each in arrays]
            if self.policy is None:
                return jax.tree.unflatten(tree, [_insert_layer_output_marker(each) for each in leaves])
            return jax.tree.unflatten(tree, _constrain_output_leaves(leaves, self.policy, path))

    def _call_unskipped_layer(
        self, path: str, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        if not self.should_recompute(path):
            return function(*args, **kwargs)
        self.recomputed = self._is_inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_inside = False

    @contextmanager
    def mark_optimizer_update(self) -> Generator[None]:
        with jax.named_scope(UPDATE):
            yield


def _make_comparable_structure(values: object) -> object:
    """Return the tree structure and leaves of values, with arrays as shape and dtype, to compare calls of blocks."""
    leaves, tree = jax.tree.flatten(values)
    return tree, [
        (leaf.shape, leaf.dtype) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else leaf
        for leaf in leaves
    ]


_MARKED = AbstractMesh((1,), (shardy.MARK,))
_ABSTRACT = NamedSharding(_MARKED, PartitionSpec())


class _StandInDevice:
    """Stand-in for JAX's default device, because looking for a real one would start a backend."""

    platform = "tpu"

    @property
    def client(self) -> _StandInDevice:
        """Object that JAX asks for the platform of the device."""
        return self


def _constrain_output_leaves(leaves: Sequence[Any], policy: LayoutPolicy, path: str) -> list[Any]:
    """Return the leaves of a layer's output. If a rule matches the layer, the arrays get the layouts of the rule."""
    rule = policy.find_activation_layout(path)
    arrays = [n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]
    placed = [*leaves]
    if rule is not None:
        layouts = policy.choose_output_layouts(rule, [leaves[n].shape for n in arrays], path)
        for n, layout in zip(arrays, layouts, strict=True):
            if layout is not None:
                sharding = NamedSharding(make_abstract_mesh(layout.mesh), make_partition_spec(layout))
                placed[n] = constrain_traced_array(leaves[n], sharding)
    return placed


def _insert_layer_output_marker(array: object) -> object:
    if not isinstance(array, jax.core.Tracer) or not array.ndim:
        return array
    open_axes = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * array.ndim)
    return jax.lax.with_sharding_constraint(array, NamedSharding(_MARKED, open_axes))
