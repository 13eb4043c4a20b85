"""A training step, lowered once without layouts, and counted in any.

The file is longer than others since tracing, counting and compiling go through the same few private classes.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.core
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from layoutmap.core.errors import EngineError, LayoutMapError, ScopeError, join_names
from layoutmap.core.layout import Layout
from layoutmap.core.paths import find_repeated_layers
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.steps import Key, TrainingStep
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.cost.jax.attention import attention_named
from layoutmap.cost.jax.compiled import CompiledStep, compile_modules, partitioned
from layoutmap.cost.jax.counting import Counts, collectives_of, count, flops_of
from layoutmap.cost.jax.graph import LAYER, UPDATE, place_of
from layoutmap.cost.jax.memory import upper_bound
from layoutmap.cost.jax.partitioned import read
from layoutmap.cost.jax.rewrites import rewrite, separate
from layoutmap.cost.jax.targets import target_named
from layoutmap.cost.table import COMPILED, PARTITIONED, Collective, Held, StepCost
from layoutmap.cost.verified import Verified
from layoutmap.engines.jax import shardy
from layoutmap.engines.jax.corrections import lowered_without_devices
from layoutmap.engines.jax.programs import undisturbed

_KEPT = 2
"""How many of equal blocks are always counted: the first and the last one."""


class LoweredStep:  # why: decisions/0156
    """A training step as it is before it has layouts: traced once, and counted in any layouts in a fraction of that.

    Of equal blocks two and three are traced; what the third one adds is what each of the others adds. Where layouts
    differ within a stack, all of its blocks are traced.

    Args:
        step: The step.
        remat: The layers whose activations are computed again in the backward pass: `"blocks"`, those that the model
            has several of, or a regex for their paths; `None`: as the model's own code says.
        fuse_attention: Whether each call of attention is counted as one fused kernel, whatever the model calls.
    """

    def __init__(self, step: TrainingStep, remat: str | None = None, fuse_attention: bool = False):
        self._step = step
        self._fuses = fuse_attention
        self._recomputes = _chosen(step, remat)
        self._notes = (*step.notes, *([f"{_NOTE} (remat={remat!r})"] if remat else []))
        self._modules: dict[frozenset[str], _Lowered] = {}
        self._made: dict[
            tuple[bytes, int, str], CompiledStep
        ] = {}  # by the hash of a module with its layouts
        self._loose: set[int] = set()  # stacks whose blocks cannot be left out

    def count(
        self,
        assignments: Sequence[Assignment],
        policy: LayoutPolicy,
        *,
        with_held: bool = False,
        target: str | None = None,
        on_wait: Callable[[], object] = lambda: None,
    ) -> StepCost:
        """Count what the step does in given layouts.

        Args:
            assignments: Each variable of the step and its layout, in their order.
            policy: The layouts of batches and of what layers return.
            with_held: Whether to say what is held at the peak.
            target: A name of `targets`: collectives, peak and FLOPs are of its compiler; `None`: of the partitioner.
            on_wait: Called several times a second while XLA compiles.

        Raises:
            EngineError: The compiler for the target is not installed, or fails.
            LayoutError: A rule for activations does not fit what a layer returns.
            ScopeError: The model fails while it is traced.
        """
        if target and target_named(target).chip:
            raise EngineError(
                f"a step is not counted as XLA compiles it for {target!r}",
                why="XLA for TPUs computes parts of collectives inside of fusions, which are not told apart",
                fix=f"leave target out, or print what verify(.., target={target!r}) says",
            )
        layouts = {a.variable.key: a.layout for a in assignments}
        counts = self._counts(layouts, policy, with_held, target, on_wait)
        batch = [
            Assignment(
                VariableSpec(each.name, each.shape, _held_dtype(each.dtype)),
                policy.derive_batch_layout(each.shape),
            )
            for each in self._step.batch
        ]
        arguments = sum(a.shard_bytes for a in (*assignments, *batch))
        collectives = [replace(each, calls=number) for each, number in _settled(counts.collectives)]
        peaks = [0, 0]
        for (order, *_), peak in counts.peaks.items():
            peaks[order] = max(peaks[order], peak)
        peaks = [upper_bound(peak, collectives, counts.recomputes) for peak in peaks]
        held = _held_at_the_peak(counts)
        if target:
            peaks = [counts.compiled_bytes]
            sums = itertools.accumulate(each.num_bytes for each in held)  # they were estimated
            held = tuple(each for each, num in zip(held, sums, strict=True) if num <= counts.compiled_bytes)
        return StepCost(
            policy.mesh,
            tuple(_merged(collectives)),
            {dtype: number for dtype, number in counts.flops.items() if number},
            counts.traffic,
            arguments,
            arguments + peaks[0],
            (*self._notes, *self._of_attention),
            arguments + min(peaks),
            held,
            f"{COMPILED}{target}" if target else PARTITIONED,
        )

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """The shape of the first array that each layer returns, by path, as far as the step has been counted."""
        traced = {p: s[0] for module in self._modules.values() for p, s in module.outputs.items() if s}
        equal = {p: traced[stack[0]] for stack in self._step.blocks for p in stack if stack[0] in traced}
        return {**equal, **traced}

    @property
    def _of_attention(self) -> Iterator[str]:
        yield from dict.fromkeys(note for module in self._modules.values() for note in module.of_attention)

    @property
    def fingerprint(self) -> str:
        """A text that is the same for steps that do the same, as far as the step has been counted."""
        parts = [*map(repr, (self._step.variables, self._step.batch, self._step.blocks))]
        parts += sorted(str(module.module) for module in self._modules.values())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def _counts(
        self,
        layouts: Mapping[Key, Layout],
        policy: LayoutPolicy,
        with_held: bool,
        target: str | None,
        on_wait: Callable[[], object],
    ) -> Counts:
        """Counts of the step with two of each kind of equal blocks, the others as the addition of a third."""
        tied = self._tied(layouts, policy)
        sizes = sorted({len(self._step.blocks[number]) for number in tied})
        kept = [dict.fromkeys(tied, _KEPT)]
        kept += [{n: _KEPT + (len(self._step.blocks[n]) == size) for n in tied} for size in sizes]
        try:
            modules = [self._lowered(self._left_out(each)) for each in kept]
        except _NotTied as error:
            self._loose.add(error.stack)
            return self._counts(layouts, policy, with_held, target, on_wait)
        if self._tied(layouts, policy) != tied:  # the layers inside of blocks are known only now
            return self._counts(layouts, policy, with_held, target, on_wait)
        given = [shardy.bytes_of(self._with_layouts(each, layouts, policy)) for each in modules]
        texts = partitioned(given, policy.mesh.size, on_wait)
        made = self._compiled(given, policy.mesh.size, target, on_wait) if target else [None] * len(given)
        low, *high = (
            self._counted(text, each, policy, with_held, of)
            for text, each, of in zip(texts, modules, made, strict=True)
        )
        total = low
        for size, more in zip(sizes, high, strict=True):
            total = total.plus(more - low, size - _KEPT)
        peaks = {key: total.peaks[key] for key in low.peaks}
        return replace(total, peaks=peaks)

    def _left_out(self, kept: Mapping[int, int]) -> dict[str, str]:
        """The path of each block that is left out, and of its equal; `kept`: how many stay of each stack."""
        blocks = self._step.blocks
        return {path: blocks[n][0] for n, number in kept.items() for path in blocks[n][number - 1 : -1]}

    def _counted(
        self, text: str, lowered: _Lowered, policy: LayoutPolicy, with_held: bool, made: CompiledStep | None
    ) -> Counts:
        block = read(text, policy.mesh)
        rewrite(block)
        names = [v.parent or v.path for v in lowered.variables] + [each.name for each in self._step.batch]
        names += [""] * lowered.num_unread
        donated = {number: number for number in range(len(lowered.variables))}
        found = count(block, names, donated, with_held=with_held)
        if made is None:
            return found
        block = read(made.text, policy.mesh)
        separate(block)
        return replace(
            found,
            collectives=collectives_of(block, names, len(donated)),
            flops=flops_of(block),
            compiled_bytes=made.peak_bytes - made.argument_bytes,
        )

    def _tied(self, layouts: Mapping[Key, Layout], policy: LayoutPolicy) -> list[int]:
        """The stacks whose blocks have equal layouts, and so cost the same."""
        below: dict[str, list[object]] = {path: [] for stack in self._step.blocks for path in stack}
        for variable in self._step.variables:
            if (block := _block_of(variable, below)) is not None:
                inner = (variable.parent or variable.path)[len(block) :]
                below[block].append((inner, variable.kind, layouts[variable.key].sharding_specs))
        return [
            number
            for number, stack in enumerate(self._step.blocks)
            if number not in self._loose
            and all(below[path] == below[stack[0]] for path in stack)
            and all(self._same_outputs(stack[0], path, policy) for path in stack)
        ]

    def _same_outputs(self, first: str, path: str, policy: LayoutPolicy) -> bool:
        if policy.activations is None:
            return True
        paths = {first, *(p for lowered in self._modules.values() for p in lowered.outputs)}
        below = [p[len(first) :] for p in paths if f"{p}.".startswith(f"{first}.")]
        layout_of = policy.find_activation_layout
        return all(layout_of(f"{first}{p}") == layout_of(f"{path}{p}") for p in below)

    def _with_layouts(self, lowered: _Lowered, layouts: Mapping[Key, Layout], policy: LayoutPolicy) -> Any:
        given = [layouts[variable.key] for variable in lowered.variables]
        batch = [policy.derive_batch_layout(each.shape) for each in self._step.batch]
        outputs = lowered.layouts_of(policy)
        return shardy.place(
            lowered.module,
            policy.mesh,
            [*given, *batch, *[None] * lowered.num_unread],
            [*given, *[None] * lowered.num_others],
            lambda name, shape: outputs(place_of(name)[0], shape),
        )

    def compile(
        self,
        assignments: Sequence[Assignment],
        policy: LayoutPolicy,
        target: str,
        on_wait: Callable[[], object] = lambda: None,
    ) -> CompiledStep:
        """Have XLA compile the step, all of its blocks, for devices that need not be there; see `count`.

        Args:
            assignments: See `count`.
            policy: See `count`.
            target: A name of `targets`.
            on_wait: Called several times a second while XLA compiles.
        """
        layouts = {a.variable.key: a.layout for a in assignments}
        placed = self._with_layouts(self._lowered({}), layouts, policy)
        return self._compiled([shardy.bytes_of(placed)], policy.mesh.size, target, on_wait)[0]

    def _compiled(  # why: decisions/0156
        self, modules: Sequence[bytes], num_devices: int, target: str, on_wait: Callable[[], object]
    ) -> list[CompiledStep]:
        """The steps that XLA compiles modules to; one that was compiled before is not compiled again."""
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
        """Return what was counted beside what XLA says of the same step; see `compile`."""
        made = self.compile(assignments, policy, target, on_wait)
        return Verified(counted, target, made.sent_by_kind, made.argument_bytes, made.peak_bytes)

    def _lowered(self, skipped: Mapping[str, str]) -> _Lowered:
        key = frozenset(skipped)
        if key not in self._modules:
            try:
                self._modules[key] = _lower(self._step, skipped, self._recomputes, self._fuses)
            except _Unequal as error:
                raise _NotTied(next(n for n, s in enumerate(self._step.blocks) if error.path in s)) from None
        return self._modules[key]


def _held_at_the_peak(counts: Counts) -> tuple[Held, ...]:
    """The tensors that are held at the peak where memory is short, worked out when somebody asks."""
    of_orders: dict[int, Any] = {}
    for key, peak in counts.peaks.items():
        if peak > counts.peaks.get(of_orders.get(key[0]), -1):
            of_orders[key[0]] = key
    if not counts.held or not of_orders:
        return ()
    highest = min(of_orders.values(), key=lambda key: counts.peaks[key])
    at_the_peak = {key[-1]: num_bytes for key, num_bytes in counts.held.items() if key[:-1] == highest}
    found = [Held(*what, num_bytes=num_bytes) for what, num_bytes in at_the_peak.items()]
    return tuple(sorted((each for each in found if each.num_bytes > 0), key=lambda each: -each.num_bytes))


_NOTE = "activations inside of layers are computed again in the backward pass, whatever the model's code says"


def _chosen(step: TrainingStep, remat: str | None) -> Callable[[str], bool] | None:
    """Which layers' activations are computed again, by path; `None`: no layer's."""
    if remat is None:
        return None
    if remat == "blocks":
        return find_repeated_layers(variable.path for variable in step.variables).__contains__
    pattern = re.compile(remat)
    return lambda path: pattern.match(path) is not None


class _Unequal(Exception):
    """A block cannot be left out: it returns something else than it is given, or does not do what its equal does."""

    def __init__(self, path: str):
        self.path = path


class _NotTied(Exception):
    def __init__(self, stack: int):
        self.stack = stack


def _block_of(variable: VariableSpec, blocks: Mapping[str, object]) -> str | None:
    path = variable.parent or variable.path
    parts = path.split(".")
    return next((p for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in blocks), None)


@dataclass(frozen=True)
class _Lowered:
    module: Any
    variables: Sequence[VariableSpec]
    num_unread: int
    num_others: int
    outputs: Mapping[str, Sequence[tuple[int, ...]]]
    of_attention: Sequence[str]

    def layouts_of(self, policy: LayoutPolicy) -> Callable[[str, tuple[int, ...]], Layout | None]:
        """Return what gives the layout of an array that a layer returns, by the layer's path and the array's shape."""
        known: dict[tuple[str, tuple[int, ...]], Layout | None] = {}
        for path, shapes in self.outputs.items():
            rule = policy.find_activation_layout(path)
            if rule is not None:
                for shape, layout in zip(
                    shapes, policy.choose_output_layouts(rule, shapes, path), strict=True
                ):
                    known[path, shape] = layout
        return lambda path, shape: known.get((path, shape))


def _lower(
    step: TrainingStep, skipped: Mapping[str, str], recomputes: Callable[[str], bool] | None, fuses: bool
) -> _Lowered:
    """Trace and lower a step without some of its blocks.

    Args:
        step: The step.
        skipped: The path of each block that is left out, and of one that is equal to it.
        recomputes: Whether the activations of a layer are computed again in the backward pass; `None`: of none.
        fuses: Whether each call of attention is one fused kernel.
    """
    variables = [v for v in step.variables if _block_of(v, skipped) is None]
    unread = [v for v in step.variables if _block_of(v, skipped) is not None]
    keys = [variable.key for variable in variables]
    tracer = _Tracer(skipped, recomputes)

    def run(values: Sequence[object], batch: Sequence[object], others: Sequence[object]) -> object:
        tracer.unread = dict(zip((variable.key for variable in unread), others, strict=True))
        after = dict(step.run(tracer, dict(zip(keys, values, strict=True)), batch))
        return [after.pop(key) for key in keys], list(after.values())

    values, batch, others = (
        [jax.ShapeDtypeStruct(each.shape, _dtype(each.dtype)) for each in arrays]
        for arrays in (variables, step.batch, unread)
    )
    with undisturbed(), lowered_without_devices(), attention_named(fuses) as calls, _failures(step, tracer):
        traced = jax.jit(run, keep_unused=True, in_shardings=_ABSTRACT).trace(values, batch, others)
        _check_unread(traced.jaxpr.jaxpr, unread, skipped)
        tracer.check_calls()
        with jax.default_device(_NoDevice()):
            module = traced.lower(lowering_platforms=(_NoDevice.platform,)).compiler_ir("stablehlo")
    if recomputes and not tracer.recomputed:
        raise _nothing_recomputed(step, tracer)
    if fuses and not calls.fused:
        raise _nothing_fused(step)
    num_others = len(jax.tree.leaves(traced.out_info)) - len(keys)
    return _Lowered(module, variables, len(unread), num_others, tracer.outputs, calls.notes)


def _check_unread(jaxpr: Any, unread: Sequence[VariableSpec], skipped: Mapping[str, str]) -> None:
    """Refuse to leave out a block whose variables the layers around it read: their gradients would be missing."""
    _, is_used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    for variable, is_read in zip(unread, is_used[len(is_used) - len(unread) :], strict=True):
        if is_read and (block := _block_of(variable, skipped)) is not None:
            raise _Unequal(block)


def _dtype(name: str) -> jax.typing.DTypeLike:
    impl = _KEYS.get(name)
    return name if impl is None else jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def _held_dtype(name: str) -> str:
    """The element type that JAX gives an array of some type: without `jax_enable_x64` it has no int64."""
    return name if name in _KEYS else str(jax.dtypes.canonicalize_dtype(name))


_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


@contextmanager
def _failures(step: TrainingStep, tracer: _Tracer) -> Generator[None]:
    try:
        yield
    except Exception as error:
        if tracer.unequal:  # Keras makes an exception of its own of that which was raised
            raise _Unequal(tracer.unequal) from None
        if isinstance(error, LayoutMapError | _Unequal):
            raise
        inputs = ", ".join(f"{each.name}: {each.dtype}{list(each.shape)}" for each in step.batch)
        raise ScopeError(
            f"{step.name}: its training step fails when it is traced",
            facts={"inputs": inputs, type(error).__name__: str(error).strip().partition("\n")[0]},
            why="the step is traced with shapes, as jax.jit does it, to count what it does",
            fix="pass inputs= of the shapes and types that the model is called with, and call it with them in a test",
        ) from error


def _nothing_recomputed(step: TrainingStep, tracer: _Tracer) -> ScopeError:
    return ScopeError(
        f"{step.name}: remat matches none of its layers",
        facts={"layers": join_names(list(tracer.outputs)) or "none are known"},
        why='"blocks" are layers whose paths differ in a number only; all else is a regex for paths',
        fix="pass a regex that matches layers, as remat=r'blocks\\.\\d+$'"
        if tracer.outputs
        else "leave remat out, and use jax.checkpoint in the function that calls the model",
    )


def _nothing_fused(step: TrainingStep) -> ScopeError:
    return ScopeError(
        f"{step.name}: fuse_attention finds no call of attention",
        why="calls of jax.nn.dot_product_attention are known, which keras.ops.dot_product_attention and layers of "
        "flax.nnx make; layers with dropout of their scores compute these themselves",
        fix="leave fuse_attention out, or call jax.nn.dot_product_attention in the model",
    )


@dataclass(eq=False)
class _Tracer:
    """Marks what layers return, and leaves out blocks that are called as their equals are."""

    skipped: Mapping[str, str]
    chosen: Callable[[str], bool] | None = None
    recomputed: bool = False
    outputs: dict[str, list[tuple[int, ...]]] = field(default_factory=dict[str, list[tuple[int, ...]]])
    unread: Mapping[Key, object] = field(default_factory=dict[Key, object])
    unequal: str = ""
    _calls: dict[str, list[object]] = field(default_factory=dict[str, list[object]])
    # Layers that return something else than they are given.
    _changing: set[str] = field(default_factory=set[str])
    _is_inside: bool = False

    def recomputes(self, path: str) -> bool:
        return self.chosen is not None and not self._is_inside and self.chosen(path)

    def call(
        self, path: str, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        calls = self._calls.setdefault(path, [])
        calls.append(_kind((args, kwargs)))
        if path in self.skipped:
            like = self.skipped[path]
            if like in self._changing or calls != self._calls.get(like, [])[: len(calls)]:
                self.unequal = path
                raise _Unequal(path)
            return args[0]
        with jax.named_scope(f"{LAYER}{path}"):
            found = self._called(path, function, args, kwargs)
            leaves, tree = jax.tree.flatten(found)
            if not args or _kind(found) != _kind(args[0]):
                self._changing.add(path)
            arrays = [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]
            self.outputs[path] = [tuple(each.shape) for each in arrays]
            return jax.tree.unflatten(tree, [_marked(each) for each in leaves])

    def check_calls(self) -> None:
        """Refuse to leave out a block that is called less often than its equal."""
        for path, like in self.skipped.items():
            if len(self._calls.get(path, [])) != len(self._calls.get(like, [])):
                raise _Unequal(path)

    def _called(
        self, path: str, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        if not self.recomputes(path):
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


def _kind(values: object) -> object:
    """The properties that two calls with equal results share: shapes and types of arrays, and all else as it is."""
    leaves, tree = jax.tree.flatten(values)
    return tree, [
        (leaf.shape, leaf.dtype) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else leaf
        for leaf in leaves
    ]


_MARKED = AbstractMesh((1,), (shardy.MARK,))
_ABSTRACT = NamedSharding(_MARKED, PartitionSpec())


class _NoDevice:
    """Stands where JAX looks for a default device, even on an abstract mesh: to look for one would start a backend."""

    platform = "tpu"

    @property
    def client(self) -> _NoDevice:
        """The client that JAX asks for the platform."""
        return self


def _marked(array: object) -> object:
    if not isinstance(array, jax.core.Tracer) or not array.ndim:
        return array
    open_axes = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * array.ndim)
    return jax.lax.with_sharding_constraint(array, NamedSharding(_MARKED, open_axes))


def _settled(numbers: Mapping[Collective, int]) -> Iterator[tuple[Collective, int]]:
    """Yield how often each collective is called, those of one kind and size as often in all as was counted.

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


def _merged(collectives: Sequence[Collective]) -> list[Collective]:
    """Rows that differ in the numbers of layers only as one, with `*` for the number; in a fixed order."""
    groups: dict[Any, list[Collective]] = {}
    for each in collectives:
        key = each.kind, each.dims, each.tensor_bytes, re.sub(r"\d+", "*", each.cause), each.phase, each.group
        groups.setdefault(key, []).append(each)
    return [
        Collective(
            kind,
            dims,
            sum(each.calls for each in same),
            size,
            cause if len(same) > 1 else same[0].cause,
            phase,
            group,
        )
        for (kind, dims, size, cause, phase, group), same in groups.items()
    ]
