"""Lower a JAX training step once without layouts, and count it in any layouts.

The file is longer than others since tracing, counting and compiling go through the same few private classes.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.core
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from layoutmap.core.errors import EngineError, LayoutMapError, ScopeError, join_names
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.paths import find_repeated_layers, replace_numbers
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.steps import Key, Shape, TrainingStep
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.cost.jax.attention import name_attention_calls
from layoutmap.cost.jax.compiled import CompiledStep, compile_modules, partition_modules
from layoutmap.cost.jax.counting import Counts, count_collectives, count_flops, count_step
from layoutmap.cost.jax.explicit_axes import explain_refused_sharding
from layoutmap.cost.jax.graph import LAYER, UPDATE, parse_place
from layoutmap.cost.jax.memory import estimate_upper_bound
from layoutmap.cost.jax.partitioned import parse_step
from layoutmap.cost.jax.rewrites import rewrite_block, split_all_reduces
from layoutmap.cost.jax.targets import find_target
from layoutmap.cost.table import COMPILED, PARTITIONED, Collective, PeakTensors, StepCost
from layoutmap.cost.verified import Verified
from layoutmap.engines.jax import shardy
from layoutmap.engines.jax.ambient import make_abstract_mesh, use_mesh
from layoutmap.engines.jax.arrays import constrain
from layoutmap.engines.jax.corrections import lowered_without_devices
from layoutmap.engines.jax.devices import make_partition_spec
from layoutmap.engines.jax.programs import leave_program_context

_KEPT = 2  # always count the first and the last of equal blocks


# Tracing all equal blocks is slow, so two and three are counted and the rest extrapolated (decisions/0156).
class LoweredStep:
    """Training step on JAX that is traced once without layouts, and then counted quickly in any layouts.

    Of equal blocks two and three are traced. The third block's cost counts for each further block. Where layouts differ
    within a stack, all of its blocks are traced. `remat` selects layers that recompute activations: `"blocks"` or a
    regex.
    """

    def __init__(self, step: TrainingStep, remat: str | None = None, fuse_attention: bool = False):
        self._step = step
        self._fuses = fuse_attention
        self._recomputes = _make_remat_check(step, remat)
        self._notes = (*step.notes, *([f"{_NOTE} (remat={remat!r})"] if remat else []))
        # Key: skipped blocks, and layouts if the program depends on them.
        self._modules: dict[tuple[frozenset[str], Hashable], _LoweredModule] = {}
        self._needs_mesh = False  # whether the step's own code names mesh dims
        self._made: dict[tuple[bytes, int, str], CompiledStep] = {}  # key: hash of a module with its layouts
        self._loose: set[int] = set()  # stacks whose blocks cannot be skipped

    def count(
        self,
        assignments: Sequence[Assignment],
        policy: LayoutPolicy,
        *,
        with_held: bool = False,
        target: str | None = None,
        on_wait: Callable[[], object] = lambda: None,
    ) -> StepCost:
        """Count a step in given layouts, in the module of the partitioner or of a target's compiler."""
        if target and find_target(target).chip:
            raise EngineError(
                f"the cost of a step cannot be taken from XLA's compiler for {target!r}",
                why="XLA for TPUs computes parts of collectives inside fusions, where they cannot be counted",
                fix=f"leave target out, or print verify(.., target={target!r})",
            )
        layouts = {a.variable.key: a.layout for a in assignments}
        counts = self._count_blocks(layouts, policy, with_held, target, on_wait)
        batch = [
            Assignment(
                VariableSpec(each.name, each.shape, _canonicalize_dtype(each.dtype)),
                policy.derive_batch_layout(each.shape),
            )
            for each in self._step.batch
        ]
        # A step uses a weight from its beginning to its end, and a slot only in the update of its weight.
        arguments = sum(
            a.device_bytes if a.variable.kind is Kind.SLOT else a.shard_bytes for a in (*assignments, *batch)
        )
        collectives = [replace(each, calls=number) for each, number in _balance_counts(counts.collectives)]
        peaks = [0, 0]
        for (order, *_), peak in counts.peaks.items():
            peaks[order] = max(peaks[order], peak)
        peaks = [estimate_upper_bound(peak, collectives, counts.recomputes) for peak in peaks]
        held = _find_peak_tensors(counts)
        if target:
            peaks = [counts.compiled_bytes]
            # Replace the estimates by compiled peaks.
            sums = itertools.accumulate(each.num_bytes for each in held)
            held = tuple(each for each, num in zip(held, sums, strict=True) if num <= counts.compiled_bytes)
        return StepCost(
            policy.mesh,
            tuple(_merge_repeated(collectives)),
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
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """Shape of the first array that each layer returns, by path, for the layers traced so far."""
        traced = {p: s[0] for module in self._modules.values() for p, s in module.outputs.items() if s}
        equal = {p: traced[stack[0]] for stack in self._step.blocks for p in stack if stack[0] in traced}
        return {**equal, **traced}

    @property
    def fingerprint(self) -> str:
        """Text that is equal for equal steps, as far as they have been counted."""
        parts = [*map(repr, (self._step.variables, self._step.batch, self._step.blocks))]
        parts += sorted(str(module.module) for module in self._modules.values())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def _count_blocks(
        self,
        layouts: Mapping[Key, Layout],
        policy: LayoutPolicy,
        with_held: bool,
        target: str | None,
        on_wait: Callable[[], object],
    ) -> Counts:
        """Count the step with two and three blocks per stack, and extrapolate to all blocks."""
        tied = self._find_equal_stacks(layouts, policy)
        sizes = sorted({len(self._step.blocks[number]) for number in tied})
        kept = [dict.fromkeys(tied, _KEPT)]
        kept += [{n: _KEPT + (len(self._step.blocks[n]) == size) for n in tied} for size in sizes]
        try:
            modules = [self._lower_cached(self._choose_skipped(each), layouts, policy) for each in kept]
        except _UnequalBlockError as error:
            self._loose.add(next(n for n, stack in enumerate(self._step.blocks) if error.path in stack))
            return self._count_blocks(layouts, policy, with_held, target, on_wait)
        # Inner layers of blocks are known only after tracing.
        if self._find_equal_stacks(layouts, policy) != tied:
            return self._count_blocks(layouts, policy, with_held, target, on_wait)
        given = [shardy.serialize_module(self._place_module(each, layouts, policy)) for each in modules]
        texts = partition_modules(given, policy.mesh.size, on_wait)
        made = (
            self._compile_modules(given, policy.mesh.size, target, on_wait) if target else [None] * len(given)
        )
        low, *high = (
            self._count_module(text, each, policy, with_held, of)
            for text, each, of in zip(texts, modules, made, strict=True)
        )
        total = low
        for size, more in zip(sizes, high, strict=True):
            total = total.add_counts(more - low, size - _KEPT)
        peaks = {key: total.peaks[key] for key in low.peaks}
        return replace(total, peaks=peaks)

    def _choose_skipped(self, kept: Mapping[int, int]) -> dict[str, str]:
        """Return the path of each skipped block and of its equal. `kept` is how many remain per stack."""
        blocks = self._step.blocks
        return {path: blocks[n][0] for n, number in kept.items() for path in blocks[n][number - 1 : -1]}

    def _count_module(
        self,
        text: str,
        lowered: _LoweredModule,
        policy: LayoutPolicy,
        with_held: bool,
        made: CompiledStep | None,
    ) -> Counts:
        block = parse_step(text, policy.mesh)
        rewrite_block(block)
        names = [v.parent or v.path for v in lowered.variables] + [each.name for each in self._step.batch]
        names += [""] * lowered.num_unread
        donated = {number: number for number in range(len(lowered.variables))}
        found = count_step(block, names, donated, with_held=with_held)
        if made is None:
            return found
        block = parse_step(made.text, policy.mesh)
        split_all_reduces(block)
        return replace(
            found,
            collectives=count_collectives(block, names, len(donated)),
            flops=count_flops(block),
            compiled_bytes=made.peak_bytes - made.argument_bytes,
        )

    def _find_equal_stacks(self, layouts: Mapping[Key, Layout], policy: LayoutPolicy) -> list[int]:
        """Return the stacks of blocks with equal layouts, and so with equal costs."""
        below: dict[str, list[object]] = {path: [] for stack in self._step.blocks for path in stack}
        for variable in self._step.variables:
            if (block := _find_block(variable, below)) is not None:
                inner = (variable.parent or variable.path)[len(block) :]
                below[block].append((inner, variable.kind, layouts[variable.key].sharding_specs))
        return [
            number
            for number, stack in enumerate(self._step.blocks)
            if number not in self._loose
            and all(below[path] == below[stack[0]] for path in stack)
            and all(self._has_same_outputs(stack[0], path, policy) for path in stack)
        ]

    def _has_same_outputs(self, first: str, path: str, policy: LayoutPolicy) -> bool:
        if policy.activations is None:
            return True
        paths = {first, *(p for lowered in self._modules.values() for p in lowered.outputs)}
        below = [p[len(first) :] for p in paths if f"{p}.".startswith(f"{first}.")]
        layout_of = policy.find_activation_layout
        return all(layout_of(f"{first}{p}") == layout_of(f"{path}{p}") for p in below)

    def _place_module(
        self, lowered: _LoweredModule, layouts: Mapping[Key, Layout], policy: LayoutPolicy
    ) -> Any:
        given = [layouts[variable.key] for variable in lowered.variables]
        batch = [policy.derive_batch_layout(each.shape) for each in self._step.batch]
        outputs = lowered.make_output_lookup(policy)
        return shardy.place(
            lowered.module,
            policy.mesh,
            [*given, *batch, *[None] * lowered.num_unread],
            [*given, *[None] * lowered.num_others],
            lambda name, shape: outputs(parse_place(name)[0], shape),
        )

    def compile(
        self,
        assignments: Sequence[Assignment],
        policy: LayoutPolicy,
        target: str,
        on_wait: Callable[[], object] = lambda: None,
    ) -> CompiledStep:
        """Have XLA compile the step with all blocks, for devices that need not exist. See `count`."""
        layouts = {a.variable.key: a.layout for a in assignments}
        placed = self._place_module(self._lower_cached({}, layouts, policy), layouts, policy)
        return self._compile_modules([shardy.serialize_module(placed)], policy.mesh.size, target, on_wait)[0]

    # A GPU compile takes seconds to minutes, so each module is compiled only once (decisions/0156).
    def _compile_modules(
        self, modules: Sequence[bytes], num_devices: int, target: str, on_wait: Callable[[], object]
    ) -> list[CompiledStep]:
        """Return the compiled steps of modules. A module is compiled only once."""
        keys = [(hashlib.sha256(each).digest(), num_devices, target) for each in modules]
        new = {key: each for key, each in zip(keys, modules, strict=True) if key not in self._made}
        self._made.update(
            zip(new, compile_modules([*new.values()], num_devices, target, on_wait), strict=True)
        )
        return [self._made[key] for key in keys]

    def verify(
        self,
        assignments: Sequence[Assignment],
        policy: LayoutPolicy,
        target: str,
        counted: StepCost,
        on_wait: Callable[[], object] = lambda: None,
    ) -> Verified:
        """Return the counted figures next to XLA's figures of the same step. See `compile`."""
        made = self.compile(assignments, policy, target, on_wait)
        return Verified(counted, target, made.sent_by_kind, made.argument_bytes, made.peak_bytes)

    def _lower_cached(
        self, skipped: Mapping[str, str], layouts: Mapping[Key, Layout], policy: LayoutPolicy
    ) -> _LoweredModule:
        needs_mesh = self._needs_mesh or "explicit" in policy.mesh.axis_types
        place = _describe_place(layouts, policy) if needs_mesh else None
        key = frozenset(skipped), place
        if key not in self._modules:
            placed = layouts if needs_mesh else None
            try:
                self._modules[key] = _lower_without_blocks(
                    self._step, skipped, placed, policy, self._recomputes, self._fuses
                )
            except ScopeError:
                if needs_mesh:
                    self._needs_mesh = False
                    raise
                # Code that names mesh dims fails without a mesh, so the step is traced once more, in its layouts.
                self._needs_mesh = True
                return self._lower_cached(skipped, layouts, policy)
        return self._modules[key]


def _describe_place(layouts: Mapping[Key, Layout], policy: LayoutPolicy) -> Hashable:
    """Return a key of everything that a step in its layouts depends on."""
    mesh, activations = policy.mesh, getattr(policy.activations, "__self__", None)
    specs = tuple(layout.sharding_specs for layout in layouts.values())
    return Mesh(None, mesh.mesh_dims), mesh.axis_types, specs, policy.batch_dim, str(activations)


def _find_peak_tensors(counts: Counts) -> tuple[PeakTensors, ...]:
    """Return the tensors on a device at the peak, if memory is short."""
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


_NOTE = "activations inside of layers are computed again in the backward pass, whatever the model's code says"


def _make_remat_check(step: TrainingStep, remat: str | None) -> Callable[[str], bool] | None:
    """Return a check whether the layer at a path is recomputed, or None without `remat`."""
    if remat is None:
        return None
    if remat == "blocks":
        return find_repeated_layers(variable.path for variable in step.variables).__contains__
    pattern = re.compile(remat)
    return lambda path: pattern.match(path) is not None


class _UnequalBlockError(Exception):
    """Raised when a block cannot be skipped because it behaves differently from its equal."""

    def __init__(self, path: str):
        self.path = path


def _find_block(variable: VariableSpec, blocks: Mapping[str, object]) -> str | None:
    path = variable.parent or variable.path
    parts = path.split(".")
    return next((p for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in blocks), None)


@dataclass(frozen=True)
class _LoweredModule:
    module: Any
    variables: Sequence[VariableSpec]
    num_unread: int
    num_others: int
    outputs: Mapping[str, Sequence[tuple[int, ...]]]
    attention_notes: Sequence[str]

    def make_output_lookup(self, policy: LayoutPolicy) -> Callable[[str, tuple[int, ...]], Layout | None]:
        """Return a lookup of an output's layout by the layer's path and the output's shape."""
        known: dict[tuple[str, tuple[int, ...]], Layout | None] = {}
        for path, shapes in self.outputs.items():
            rule = policy.find_activation_layout(path)
            if rule is not None:
                for shape, layout in zip(
                    shapes, policy.choose_output_layouts(rule, shapes, path), strict=True
                ):
                    known[path, shape] = layout
        return lambda path, shape: known.get((path, shape))


def _lower_without_blocks(
    step: TrainingStep,
    skipped: Mapping[str, str],
    layouts: Mapping[Key, Layout] | None,
    policy: LayoutPolicy,
    recomputes: Callable[[str], bool] | None,
    fuses: bool,
) -> _LoweredModule:
    """Trace and lower a step without its `skipped` blocks, each given with the path of an equal block.

    `layouts` is None unless the code names mesh dims or axes are explicit. Without layouts, the outputs of layers are
    marked.
    """
    variables = [v for v in step.variables if _find_block(v, skipped) is None]
    unread = [v for v in step.variables if _find_block(v, skipped) is not None]
    keys = [variable.key for variable in variables]
    tracer = _Tracer(skipped, recomputes, policy=None if layouts is None else policy)
    mesh = make_abstract_mesh(policy.mesh)

    def describe(each: VariableSpec | Shape, layout: Layout) -> jax.ShapeDtypeStruct:
        sharding = None if layouts is None else NamedSharding(mesh, make_partition_spec(layout))
        return jax.ShapeDtypeStruct(each.shape, _convert_dtype(each.dtype), sharding=sharding)

    def run_step(values: Sequence[object], batch: Sequence[object], others: Sequence[object]) -> object:
        tracer.unread = dict(zip((variable.key for variable in unread), others, strict=True))
        after = dict(step.run(tracer, dict(zip(keys, values, strict=True)), batch))
        return [after.pop(key) for key in keys], list(after.values())

    known = layouts or {each.key: policy.replicated(len(each.shape)) for each in step.variables}
    values, others = ([describe(each, known[each.key]) for each in arrays] for arrays in (variables, unread))
    batch = [describe(each, policy.derive_batch_layout(each.shape)) for each in step.batch]
    with (
        leave_program_context(),
        use_mesh(mesh) if layouts is not None else nullcontext(),
        lowered_without_devices(),
        name_attention_calls(fuses) as calls,
        _explain_failures(step, tracer),
        explain_refused_sharding(step.name) if layouts is not None else nullcontext(),
    ):
        options: dict[str, Any] = {} if layouts is not None else {"in_shardings": _ABSTRACT}
        traced = jax.jit(run_step, keep_unused=True, **options).trace(values, batch, others)
        _check_unread(traced.jaxpr.jaxpr, unread, skipped)
        tracer.check_calls()
        with jax.default_device(_StandInDevice()):
            module = traced.lower(lowering_platforms=(_StandInDevice.platform,)).compiler_ir("stablehlo")
    if recomputes and not tracer.recomputed:
        raise _make_remat_error(step, tracer)
    if fuses and not calls.fused:
        raise _make_fusion_error(step)
    num_others = len(jax.tree.leaves(traced.out_info)) - len(keys)
    return _LoweredModule(module, variables, len(unread), num_others, tracer.outputs, calls.notes)


def _check_unread(jaxpr: Any, unread: Sequence[VariableSpec], skipped: Mapping[str, str]) -> None:
    """Refuse to skip a block if outer layers read its variables, since gradients would be missing."""
    _, is_used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    for variable, is_read in zip(unread, is_used[len(is_used) - len(unread) :], strict=True):
        if is_read and (block := _find_block(variable, skipped)) is not None:
            raise _UnequalBlockError(block)


def _convert_dtype(name: str) -> jax.typing.DTypeLike:
    impl = _KEYS.get(name)
    return name if impl is None else jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def _canonicalize_dtype(name: str) -> str:
    """Return the element type that JAX arrays get. JAX has no int64 without `jax_enable_x64`."""
    return name if name in _KEYS else str(jax.dtypes.canonicalize_dtype(name))


_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


@contextmanager
def _explain_failures(step: TrainingStep, tracer: _Tracer) -> Generator[None]:
    try:
        yield
    except Exception as error:
        if tracer.unequal:  # Keras replaces the exception, so raise the original
            raise _UnequalBlockError(tracer.unequal) from None
        if isinstance(error, LayoutMapError | _UnequalBlockError):
            raise
        inputs = ", ".join(f"{each.name}: {each.dtype}{list(each.shape)}" for each in step.batch)
        raise ScopeError(
            f"{step.name}: its training step fails when it is traced",
            facts={"inputs": inputs, type(error).__name__: str(error).strip().partition("\n")[0]},
            why="the step is traced with shapes, as in jax.jit, to count its cost",
            fix="pass inputs= with the shapes and dtypes of the model's inputs, and call the model with "
            "them in a test",
        ) from error


def _make_remat_error(step: TrainingStep, tracer: _Tracer) -> ScopeError:
    return ScopeError(
        f"{step.name}: remat matches none of its layers",
        facts={"layers": join_names(list(tracer.outputs)) or "none are known"},
        why='"blocks" stands for layers with paths that differ only in a number; any other text is a regex for paths',
        fix="pass a regex that matches layers, as in remat=r'blocks\\.\\d+$'"
        if tracer.outputs
        else "leave remat out, and use jax.checkpoint in the function that calls the model",
    )


def _make_fusion_error(step: TrainingStep) -> ScopeError:
    return ScopeError(
        f"{step.name}: fuse_attention finds no call of attention",
        why="it finds calls of jax.nn.dot_product_attention, which keras.ops.dot_product_attention and "
        "flax.nnx layers make; layers with dropout of attention scores do not call it",
        fix="leave fuse_attention out, or call jax.nn.dot_product_attention in the model",
    )


@dataclass(eq=False)
class _Tracer:
    """Tracer that marks the outputs of layers, and skips blocks that are called like their equals."""

    skipped: Mapping[str, str]
    chosen: Callable[[str], bool] | None = None
    recomputed: bool = False
    outputs: dict[str, list[tuple[int, ...]]] = field(default_factory=dict[str, list[tuple[int, ...]]])
    unread: Mapping[Key, object] = field(default_factory=dict[Key, object])
    unequal: str = ""
    policy: LayoutPolicy | None = None  # outputs under explicit axes have a layout during tracing
    _calls: dict[str, list[object]] = field(default_factory=dict[str, list[object]])
    # Layers whose outputs differ in shape from their inputs.
    _changing: set[str] = field(default_factory=set[str])
    _is_inside: bool = False

    def should_recompute(self, path: str) -> bool:
        return self.chosen is not None and not self._is_inside and self.chosen(path)

    def call(
        self, path: str, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        calls = self._calls.setdefault(path, [])
        calls.append(_describe_structure((args, kwargs)))
        if path in self.skipped:
            like = self.skipped[path]
            if like in self._changing or calls != self._calls.get(like, [])[: len(calls)]:
                self.unequal = path
                raise _UnequalBlockError(path)
            return args[0]
        with jax.named_scope(f"{LAYER}{path}"):
            found = self._call_layer(path, function, args, kwargs)
            leaves, tree = jax.tree.flatten(found)
            if not args or _describe_structure(found) != _describe_structure(args[0]):
                self._changing.add(path)
            arrays = [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]
            self.outputs[path] = [tuple(each.shape) for each in arrays]
            if self.policy is None:
                return jax.tree.unflatten(tree, [_mark_array(each) for each in leaves])
            return jax.tree.unflatten(tree, _constrain_output(leaves, self.policy, path))

    def check_calls(self) -> None:
        """Refuse to leave out a block that is called less often than its equal."""
        for path, like in self.skipped.items():
            if len(self._calls.get(path, [])) != len(self._calls.get(like, [])):
                raise _UnequalBlockError(path)

    def _call_layer(
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
    def open_update(self) -> Generator[None]:
        with jax.named_scope(UPDATE):
            yield


def _describe_structure(values: object) -> object:
    """Return the properties that two calls share if their results are equal, such as shapes and types."""
    leaves, tree = jax.tree.flatten(values)
    return tree, [
        (leaf.shape, leaf.dtype) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else leaf
        for leaf in leaves
    ]


_MARKED = AbstractMesh((1,), (shardy.MARK,))
_ABSTRACT = NamedSharding(_MARKED, PartitionSpec())


class _StandInDevice:
    """Stand-in for JAX's default device, since a search for a real one would start a backend."""

    platform = "tpu"

    @property
    def client(self) -> _StandInDevice:
        """The client that JAX asks for the platform."""
        return self


def _constrain_output(leaves: Sequence[Any], policy: LayoutPolicy, path: str) -> list[Any]:
    """Return a layer's output with its arrays in the layouts of a rule for activations."""
    rule = policy.find_activation_layout(path)
    arrays = [n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]
    placed = [*leaves]
    if rule is not None:
        layouts = policy.choose_output_layouts(rule, [leaves[n].shape for n in arrays], path)
        for n, layout in zip(arrays, layouts, strict=True):
            if layout is not None:
                sharding = NamedSharding(make_abstract_mesh(layout.mesh), make_partition_spec(layout))
                placed[n] = constrain(leaves[n], sharding)
    return placed


def _mark_array(array: object) -> object:
    if not isinstance(array, jax.core.Tracer) or not array.ndim:
        return array
    open_axes = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * array.ndim)
    return jax.lax.with_sharding_constraint(array, NamedSharding(_MARKED, open_axes))


def _balance_counts(numbers: Mapping[Collective, int]) -> Iterator[tuple[Collective, int]]:
    """Yield the calls of each collective. Equal collectives make up for negative counts.

    The count that two and three blocks give for many may be negative for one cause, where a collective has another
    cause in three blocks than in two. Then it is too high for the others, and is taken off these.
    """
    same: dict[Any, list[tuple[Collective, int]]] = {}
    for each, number in numbers.items():
        same.setdefault((each.kind, each.dims, each.group, each.tensor_bytes), []).append((each, number))
    for group in same.values():
        short = -sum(number for _, number in group if number < 0)
        for each, number in sorted(group, key=lambda pair: pair[1]):
            taken = min(max(number, 0), short)
            short -= taken
            if number > taken:
                yield each, number - taken


def _merge_repeated(collectives: Sequence[Collective]) -> list[Collective]:
    """Return collectives with one row for repeated layers, which has `*` for the layer's number."""
    groups: dict[Any, list[Collective]] = {}
    for each in collectives:
        key = each.kind, each.dims, each.tensor_bytes, replace_numbers(each.cause), each.phase, each.group
        groups.setdefault(key, []).append(each)
    return [
        same[0]
        if len(same) == 1
        else replace(same[0], calls=sum(each.calls for each in same), cause=replace_numbers(same[0].cause))
        for same in groups.values()
    ]
