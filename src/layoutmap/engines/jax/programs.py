"""Split an initializer's program into steps that compute only shards, with the bits of the unsharded program.

The plain, unsharded model runs its initializer eagerly: each operation is a compiled program of its own. Compiled into
one program, `sample * stddev + mean` becomes a fused multiply-add, which rounds once instead of twice, and the values
differ in the last bit. So the program is traced, and each operation that rounds is again a program of its own, over the
devices of the mesh; operations that are exact whatever they are compiled with (moves, whole numbers) join the next one.

An operation that adds elements up (a matrix product, a sum, a QR decomposition) returns other bits when its
operand is sharded. A program with such an operation cannot be computed in shards; `find_global_reason` says so.
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
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from layoutmap.engines.jax.ambient import leave_ambient_mesh, use_auto_axes

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
"""Operations that return the same bits however their operands are sharded.

On CPU devices `atan` does not (measured with JAX 0.10.2), and so nothing that is built on it is here.
"""

CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2")
"""Operations that run an inner program once, on their own operands."""


@contextmanager
def leave_program_context() -> Generator[None]:
    """Suspend tracing, the mesh of `jax.set_mesh`, and `jax.disable_jit` while the context is open."""
    with jax.core.eval_context(), ExitStack() as stack:
        stack.enter_context(leave_ambient_mesh())
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            stack.enter_context(jax.disable_jit(False))
        yield


def trace(function: Callable[[Any], object], seed: object) -> ClosedJaxpr:
    """Trace a program for seeds of this structure, without computing anything."""
    return jax.make_jaxpr(function)(seed)


def make_closed_jaxpr(
    eqns: Sequence[JaxprEqn], takes: Sequence[Var], gives: Sequence[Var], consts: dict[Var, Any] | None = None
) -> ClosedJaxpr:
    """Make a program of some operations.

    Args:
        eqns: The operations, in order.
        takes: The variables that it is called with.
        gives: The variables that it returns.
        consts: The values of constant variables.
    """
    consts = consts or {}
    debug_info = _make_debug_info(len(consts) + len(takes))
    jaxpr = Jaxpr(list(consts), list(takes), list(gives), list(eqns), debug_info=debug_info)
    return ClosedJaxpr(jaxpr, list(consts.values()))


@functools.lru_cache(64)
def _make_debug_info(num_arguments: int) -> DebugInfo:
    """Make empty debug information, which JAX requires, for this number of arguments."""
    return jax.make_jaxpr(lambda *_: [])(*(0 for _ in range(num_arguments))).jaxpr.debug_info


def find_global_reason(closed: ClosedJaxpr) -> str:
    """Return why computing in shards would change a program's bits, or an empty text."""
    if any(jnp.size(const) > _MAX_CONSTANT_SIZE for const in closed.consts):
        return "its value is computed from a constant array"
    found = next(_find_mixing_operations(closed.jaxpr), None)
    return f"{found} returns other bits when its operand is sharded" if found else ""


def _find_mixing_operations(jaxpr: Jaxpr) -> Iterator[str]:
    """Yield the names of operations that return other bits if their operands are sharded."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = list(iterate_inner_jaxprs(eqn.params.values()))
        if name in CALLS:
            for nested in inner:
                yield from _find_mixing_operations(nested)
            continue
        rounds = any(map(_is_rounded, (*eqn.invars, *eqn.outvars)))
        if any(map(is_ref, eqn.invars)) or (name not in _SAME_WHEN_SHARDED and rounds):
            yield name


def iterate_inner_jaxprs(params: Iterable[object]) -> Iterator[Jaxpr]:
    """Yield the programs among the parameters of an operation."""
    for param in params:
        if isinstance(param, ClosedJaxpr):
            yield param.jaxpr
        elif isinstance(param, Jaxpr):
            yield param


def is_ref(var: object) -> TypeGuard[Var]:
    """Return whether a variable is a Ref, which operations modify."""
    return isinstance(var, Var) and not isinstance(var.aval, jax.core.ShapedArray)


def _is_rounded(var: Any) -> bool:
    """Return whether a value has a dtype that rounds."""
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Operations that are compiled together."""

    run: Callable[..., Sequence[jax.Array]]
    takes: tuple[Var, ...]
    gives: tuple[Var, ...]
    last_use_of: tuple[Var, ...]


# XLA rounds a fused multiply-add only once, so split the program after each rounding (decisions/0006).
class ShardedProgram:
    """Compile a traced program step by step for one sharding.

    Args:
        closed: The result of `trace`, for which `find_global_reason` returns an empty text.
        sharding: The sharding of the result.
    """

    def __init__(self, closed: ClosedJaxpr, sharding: NamedSharding):
        self._closed = closed
        self._sharding = sharding
        # The program contains no shardings, so compile it under auto axes, even for an explicit result.
        assert isinstance(sharding.mesh, jax.sharding.Mesh), "an array has devices"
        mesh = use_auto_axes(sharding.mesh)
        sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
        jaxpr = closed.jaxpr
        (self._result,) = jaxpr.outvars
        eqns, self._literals = _replace_literals(jaxpr.eqns)
        groups: list[list[JaxprEqn]] = [[]]
        for eqn in eqns:
            groups[-1].append(eqn)
            if eqn.primitive.name not in _EXACT_MOVES and any(map(_is_rounded, eqn.outvars)):
                groups.append([])
        groups = [group for group in groups if group]
        needs = [_find_inputs(group) for group in groups]
        shape = self._result.aval.shape
        steps: list[_Segment] = []
        for i, group in enumerate(groups):
            later: set[Var] = set().union(*needs[i + 1 :])
            wanted = later if isinstance(self._result, Literal) else later | {self._result}
            gives = tuple(var for eqn in group for var in eqn.outvars if var in wanted)
            if gives:
                last = tuple(var for var in needs[i] if var not in wanted)
                out = [_choose_sharding(var.aval, shape, sharding) for var in gives]
                steps.append(_Segment(_compile(group, needs[i], gives, out), tuple(needs[i]), gives, last))
        self._steps = steps
        self._place = jax.jit(lambda x: x, out_shardings=sharding)

    def __call__(self, seed: object) -> jax.Array:
        """Compute the value for a seed. Each device computes only its shard."""
        values = self._list_first_values(jax.tree.leaves(seed))
        for step in self._steps:
            made = step.run(*(values[var] for var in step.takes))
            for var in step.last_use_of:
                values.pop(var, None)
            values.update(zip(step.gives, made, strict=True))
            del made
        if self._steps and self._result in self._steps[-1].gives:
            made = values[self._result]
        else:
            made = self._place(
                self._result.val if isinstance(self._result, Literal) else values[self._result]
            )
        return made if made.sharding == self._sharding else jax.device_put(made, self._sharding)

    def _list_first_values(self, seed: Sequence[jax.Array]) -> dict[Var, Any]:
        """Return the values available to the first step."""
        jaxpr = self._closed.jaxpr
        values = dict(zip(jaxpr.invars, seed, strict=True))
        return values | dict(zip(jaxpr.constvars, self._closed.consts, strict=True)) | self._literals

    def lower(self) -> list[jax.stages.Lowered]:
        """Lower each step, to inspect the compiler's result."""
        values = self._list_first_values([jnp.zeros(a.shape, a.dtype) for a in self._closed.in_avals])  # type: ignore[attr-defined]
        lowered: list[jax.stages.Lowered] = []
        for step in self._steps:
            arguments = [values[var] for var in step.takes]
            lowered.append(step.run.lower(*arguments))  # type: ignore[attr-defined]
            values.update(zip(step.gives, step.run(*arguments), strict=True))
        return lowered


def _replace_literals(eqns: Sequence[JaxprEqn]) -> tuple[list[JaxprEqn], dict[Var, np.ndarray]]:
    """Replace constants in operations by variables, and return their values.

    A plain model passes them to its programs. Of a constant in a program the compiler makes something else: it
    multiplies by the reciprocal instead of dividing, and has its own square root, so the last bit differs.
    """
    literals: dict[Var, np.ndarray] = {}

    def replace_literal(var: Var | Literal) -> Var:
        if not isinstance(var, Literal):
            return var
        new = Var(var.aval)
        literals[new] = np.asarray(var.val, var.aval.dtype)  # type: ignore[attr-defined]
        return new

    return [eqn.replace(invars=[replace_literal(var) for var in eqn.invars]) for eqn in eqns], literals


def _find_inputs(group: Sequence[JaxprEqn]) -> list[Var]:
    """Return the outside values that a group of operations uses, each once, in order."""
    made: set[Var] = {var for eqn in group for var in eqn.outvars}
    return list(
        dict.fromkeys(
            var for eqn in group for var in eqn.invars if not isinstance(var, Literal) and var not in made
        )
    )


def _compile(
    group: Sequence[JaxprEqn], takes: Sequence[Var], gives: Sequence[Var], out_shardings: object
) -> Callable[..., Sequence[jax.Array]]:
    return jax.jit(jaxpr_as_fun(make_closed_jaxpr(group, takes, gives)), out_shardings=out_shardings)


def _choose_sharding(aval: Any, result_shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of a value between two steps: the result's, over all devices, or replicated if small."""
    plain = not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    if plain and aval.shape == result_shape:
        return sharding
    mesh, specs = sharding.mesh, [None] * len(aval.shape)
    if plain and math.prod(aval.shape) > _MAX_CONSTANT_SIZE:
        axis = next((i for i, n in enumerate(aval.shape) if n % mesh.size == 0), None)
        if axis is not None:
            specs[axis] = tuple(mesh.axis_names)  # type: ignore[call-overload]
    return NamedSharding(mesh, PartitionSpec(*specs))
