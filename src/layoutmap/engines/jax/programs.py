"""Split an initializer's program into segments that compute only shards. Values equal unsharded values bit for bit.

An unsharded model runs its initializer eagerly: each operation is a compiled program of its own. Compiled into one
program, `sample * stddev + mean` becomes a fused multiply-add, which rounds once instead of twice, and the values
differ in the last bit. So the program is traced, and each operation that rounds is again a program of its own, over the
devices of the mesh. Operations that never round (moves, integers) are compiled with the next one that does.

The result of an operation that sums elements (a matrix product, a sum, a QR decomposition) depends on the sharding of
its operand. A program with such an operation cannot be computed in shards. For such a program,
`explain_why_sharding_changes_values` returns the name of the operation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from layoutmap.engines.jax.ambient import make_auto_axes_mesh, suspend_ambient_mesh

_MAX_CONSTANT_SIZE = 1024

_MOVES = """
    bitcast_convert_type broadcast broadcast_in_dim concatenate copy copy_p dynamic_slice dynamic_update_slice
    expand_dims gather iota pad reshape rev select_n sharding_constraint slice split squeeze stop_gradient transpose
"""
_EXACT_MOVES = frozenset(_MOVES.split())
"""Operations that copy elements without rounding."""

_ELEMENTWISE = """
    abs acosh add add_any asinh atanh bessel_i0e bessel_i1e cbrt ceil clamp convert_element_type cos cosh digamma div eq
    erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg
    nextafter pow reduce_precision rem round rsqrt sign sin sinh sqrt square sub tan tanh
"""
_ORDERING = "argmax argmin reduce_max reduce_min sort"
_SAME_WHEN_SHARDED = _EXACT_MOVES.union(_ELEMENTWISE.split(), _ORDERING.split())
"""Operations whose results are equal bit for bit in every sharding of their operands.

On CPU devices `atan` is not among them (measured with JAX 0.10.2), so functions that use `atan` are left out, too.
"""

CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2")
"""Operations that run an inner program once, on their own operands."""


@contextmanager
def suspend_jax_context() -> Generator[None]:
    """Suspend tracing, the mesh of `jax.set_mesh`, and `jax.disable_jit` until the block ends."""
    with jax.core.eval_context(), ExitStack() as stack:
        stack.enter_context(suspend_ambient_mesh())
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            stack.enter_context(jax.disable_jit(False))
        yield


def trace_program(function: Callable[[Any], object], inputs: object) -> ClosedJaxpr:
    """Trace a function for inputs with these shapes and dtypes, without computing anything."""
    return jax.make_jaxpr(function)(inputs)


def make_closed_jaxpr(
    eqns: Sequence[JaxprEqn],
    invars: Sequence[Var],
    outvars: Sequence[Var],
    consts: dict[Var, Any] | None = None,
) -> ClosedJaxpr:
    """Return a program that consists of these operations.

    Args:
        eqns: The operations, in order.
        invars: The variables of its arguments.
        outvars: The variables of its results.
        consts: The values of constant variables.
    """
    consts = consts or {}
    debug_info = _make_empty_debug_info(len(consts) + len(invars))
    jaxpr = Jaxpr(list(consts), list(invars), list(outvars), list(eqns), debug_info=debug_info)
    return ClosedJaxpr(jaxpr, list(consts.values()))


@functools.lru_cache(64)
def _make_empty_debug_info(num_arguments: int) -> Any:
    """Make empty debug information, which JAX requires, for this number of arguments."""
    return jax.make_jaxpr(lambda *_: [])(*(0 for _ in range(num_arguments))).jaxpr.debug_info


def explain_why_sharding_changes_values(closed: ClosedJaxpr) -> str:
    """Return why computing a program in shards could change its result, or an empty text if that is safe."""
    if any(jnp.size(const) > _MAX_CONSTANT_SIZE for const in closed.consts):
        return "its value is computed from a constant array"
    found = next(_iterate_unshardable_operations(closed.jaxpr), None)
    return f"the last bits of {found} may differ if its operand is sharded" if found else ""


def _iterate_unshardable_operations(jaxpr: Jaxpr) -> Iterator[str]:
    """Yield the names of operations that may return different last bits if their operands are sharded."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = list(iterate_inner_jaxprs(eqn.params.values()))
        if name in CALLS:
            for nested in inner:
                yield from _iterate_unshardable_operations(nested)
            continue
        rounds = any(map(_has_rounding_dtype, (*eqn.invars, *eqn.outvars)))
        if any(map(is_mutable_ref, eqn.invars)) or (name not in _SAME_WHEN_SHARDED and rounds):
            yield name


def iterate_inner_jaxprs(params: Iterable[object]) -> Iterator[Jaxpr]:
    """Yield the programs among the parameters of an operation, such as the branches of a condition."""
    for param in params:
        if isinstance(param, ClosedJaxpr):
            yield param.jaxpr
        elif isinstance(param, Jaxpr):
            yield param


def is_mutable_ref(var: object) -> TypeGuard[Var]:
    """Return whether a variable is a mutable `Ref`."""
    return isinstance(var, Var) and not isinstance(var.aval, jax.core.ShapedArray)


def _has_rounding_dtype(var: Any) -> bool:
    """Return whether a value has an inexact dtype, so that operations may round it."""
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


@dataclass(frozen=True, slots=True)
class _ProgramSegment:
    """Operations that are compiled together. No later segment uses the variables in `freed_inputs`."""

    compiled: Callable[..., Sequence[jax.Array]]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    freed_inputs: tuple[Var, ...]


# XLA rounds a product and a sum only once if it fuses them, so split the program after each rounding (decisions/0006).
class ShardedProgram:
    """Compile a traced program in segments, and compute its result in one sharding.

    Args:
        closed: The result of `trace_program`, for which `explain_why_sharding_changes_values` returns an empty text.
        sharding: The sharding of the result.
    """

    def __init__(self, closed: ClosedJaxpr, sharding: NamedSharding):
        self._closed = closed
        self._sharding = sharding
        # The traced program has no shardings, so compile it under auto axes, even if the result has explicit axes.
        assert isinstance(sharding.mesh, jax.sharding.Mesh), "an array has devices"
        mesh = make_auto_axes_mesh(sharding.mesh)
        sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
        jaxpr = closed.jaxpr
        (self._result,) = jaxpr.outvars
        eqns, self._literals = _replace_literals(jaxpr.eqns)
        groups: list[list[JaxprEqn]] = [[]]
        for eqn in eqns:
            groups[-1].append(eqn)
            if eqn.primitive.name not in _EXACT_MOVES and any(map(_has_rounding_dtype, eqn.outvars)):
                groups.append([])
        groups = [group for group in groups if group]
        needs = [_list_inputs_of_operations(group) for group in groups]
        shape = self._result.aval.shape
        segments: list[_ProgramSegment] = []
        for i, group in enumerate(groups):
            later: set[Var] = set().union(*needs[i + 1 :])
            wanted = later if isinstance(self._result, Literal) else later | {self._result}
            outputs = tuple(var for eqn in group for var in eqn.outvars if var in wanted)
            if outputs:
                last = tuple(var for var in needs[i] if var not in wanted)
                out = [_choose_intermediate_sharding(var.aval, shape, sharding) for var in outputs]
                segments.append(
                    _ProgramSegment(
                        _compile_operations(group, needs[i], outputs, out), tuple(needs[i]), outputs, last
                    )
                )
        self._segments = segments
        self._relayout_result = jax.jit(lambda x: x, out_shardings=sharding)

    def __call__(self, seed: object) -> jax.Array:
        """Return the result for a seed. Each device computes only its shard."""
        values = self._map_inputs_to_values(jax.tree.leaves(seed))
        for segment in self._segments:
            made = segment.compiled(*(values[var] for var in segment.inputs))
            for var in segment.freed_inputs:
                values.pop(var, None)
            values.update(zip(segment.outputs, made, strict=True))
            del made
        if self._segments and self._result in self._segments[-1].outputs:
            made = values[self._result]
        else:
            made = self._relayout_result(
                self._result.val if isinstance(self._result, Literal) else values[self._result]
            )
        return made if made.sharding == self._sharding else jax.device_put(made, self._sharding)

    def _map_inputs_to_values(self, seed_leaves: Sequence[jax.Array]) -> dict[Var, Any]:
        """Return a dict from the variables of the program's inputs, constants, and literals to their values."""
        jaxpr = self._closed.jaxpr
        values = dict(zip(jaxpr.invars, seed_leaves, strict=True))
        return values | dict(zip(jaxpr.constvars, self._closed.consts, strict=True)) | self._literals

    def lower_segments(self) -> list[jax.stages.Lowered]:
        """Run each segment with zeros as the seed, and return the lowered segments, for tests and benchmarks."""
        values = self._map_inputs_to_values([jnp.zeros(a.shape, a.dtype) for a in self._closed.in_avals])  # type: ignore[attr-defined]
        lowered: list[jax.stages.Lowered] = []
        for segment in self._segments:
            arguments = [values[var] for var in segment.inputs]
            lowered.append(segment.compiled.lower(*arguments))  # type: ignore[attr-defined]
            values.update(zip(segment.outputs, segment.compiled(*arguments), strict=True))
        return lowered


def _replace_literals(eqns: Sequence[JaxprEqn]) -> tuple[list[JaxprEqn], dict[Var, np.ndarray]]:
    """Return operations with variables in place of literal constants, and the values of these variables.

    An unsharded model passes constants to its programs as arguments. For a constant inside a program, the compiler
    multiplies by the reciprocal instead of dividing, and has its own square root, so the last bit would differ.
    """
    literals: dict[Var, np.ndarray] = {}

    def replace_literal(var: Var | Literal) -> Var:
        if not isinstance(var, Literal):
            return var
        new = Var(var.aval)
        literals[new] = np.asarray(var.val, var.aval.dtype)  # type: ignore[attr-defined]
        return new

    return [eqn.replace(invars=[replace_literal(var) for var in eqn.invars]) for eqn in eqns], literals


def _list_inputs_of_operations(group: Sequence[JaxprEqn]) -> list[Var]:
    """Return the variables that a group of operations uses and does not compute, each once, in order."""
    made: set[Var] = {var for eqn in group for var in eqn.outvars}
    return list(
        dict.fromkeys(
            var for eqn in group for var in eqn.invars if not isinstance(var, Literal) and var not in made
        )
    )


def _compile_operations(
    group: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Var], out_shardings: object
) -> Callable[..., Sequence[jax.Array]]:
    return jax.jit(jaxpr_as_fun(make_closed_jaxpr(group, inputs, outputs)), out_shardings=out_shardings)


def _choose_intermediate_sharding(
    aval: Any, result_shape: tuple[int, ...], sharding: NamedSharding
) -> NamedSharding:
    """Return the sharding of a value between two segments: the result's sharding if it has the result's shape.

    Other values are sharded over all devices along one axis if they are large and that is possible, or replicated.
    """
    is_random_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    if not is_random_key and aval.shape == result_shape:
        return sharding
    mesh, specs = sharding.mesh, [None] * len(aval.shape)
    if not is_random_key and math.prod(aval.shape) > _MAX_CONSTANT_SIZE:
        axis = next((i for i, n in enumerate(aval.shape) if n % mesh.size == 0), None)
        if axis is not None:
            specs[axis] = tuple(mesh.axis_names)  # type: ignore[call-overload]
    return NamedSharding(mesh, PartitionSpec(*specs))
