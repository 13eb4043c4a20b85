"""Trace a function that builds a model, and derive the program that initializes each array.

Functions that build JAX models compute arrays immediately. Here such a function is traced, so that it computes nothing,
and each array that it returns becomes an initializer: a program of only the operations that lead to it. Small arrays
with which a program begins, such as random keys and numbers, are its inputs. They are precomputed one operation at a
time, as in eager JAX. Arrays of equal operations (those of a model's equal blocks) have equal programs, which an engine
compiles once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from layoutmap.adapters.jax.private import shorten_error_messages
from layoutmap.core.errors import ScopeError
from layoutmap.core.initializers import Initializer, InitializerProgram
from layoutmap.engines.jax.ambient import use_mesh
from layoutmap.engines.jax.meshless import remove_mesh_from_program
from layoutmap.engines.jax.padded import PaddedArray
from layoutmap.engines.jax.programs import (
    explain_why_sharding_changes_values,
    is_mutable_ref,
    make_closed_jaxpr,
    suspend_jax_context,
)

_MAX_PRECOMPUTED_SIZE = 1024
"""Arrays with at most this number of elements are computed in advance and passed to programs as inputs."""


def is_array(value: object) -> bool:
    """Return whether a value is a numeric array of JAX or numpy, or the `ShapeDtypeStruct` of a planned one."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype == bool or jnp.issubdtype(value.dtype, jnp.number)
    return isinstance(value, (jax.Array, jax.ShapeDtypeStruct, PaddedArray))


def is_random_key(value: Any) -> bool:
    """Return whether an array contains random keys of JAX."""
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


# JAX computes an array when it is created, so trace the function, and create the arrays later in their
# layouts (decisions/0073).
def trace_build_function(
    make: Callable[[], tuple[object, Sequence[object]]],
    mesh: jax.sharding.AbstractMesh,
) -> tuple[Any, Sequence[Any]]:
    """Trace a function that builds a model or arrays, so that it computes nothing.

    Args:
        make: Builds a model, and returns it and a list of its arrays: traced ones, or ones that existed before.
        mesh: The mesh of the layout map, which `jax.P` and `jax.shard_map` in the function refer to.

    Returns:
        The model, and for each array a `TracedArray`, or the array itself if it existed before.

    Raises:
        ScopeError: The function needs the value of a traced array, or changes a flax object that it did not create.
    """
    made: list[Any] = []

    def list_traced_arrays() -> list[object]:
        made[:] = make()
        return [value for value in made[1] if isinstance(value, jax.core.Tracer)]

    try:
        with suspend_jax_context(), shorten_error_messages(), use_mesh(mesh):
            closed = remove_mesh_from_program(jax.make_jaxpr(list_traced_arrays)())
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise ScopeError(
            "the function that creates the model reads the value of an array that it computes",
            facts={"jax": str(error).strip().partition("\n")[0]},
            why="the function is traced, so that arrays are created in their layouts: in it, arrays "
            "have shapes and no values",
            fix="compute that value with numpy; or create the unsharded model, and shard it: "
            "layout_map.apply(model)",
        ) from error
    except Exception as error:
        if type(error).__name__ != "TraceContextError":  # compare the name, because flax may not be installed
            raise
        raise ScopeError(
            "the function that creates the model changes a flax object that it did not create",
            facts={"flax": str(error).strip().partition(" (http")[0]},
            why="each draw changes the counter of nnx.Rngs, and a traced function may change only "
            "objects that it creates",
            fix="create the object inside the function: layout_map.build(lambda: Model(nnx.Rngs(0)))",
        ) from error
    operations = TracedOperations(closed)
    results = iter(closed.jaxpr.outvars)
    model, arrays = made
    return model, [
        TracedArray(operations, next(results)) if isinstance(value, jax.core.Tracer) else value
        for value in arrays
    ]


@dataclass(frozen=True, eq=False)
class TracedArray:
    """Describe an array that a traced function would compute."""

    operations: TracedOperations
    result: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.result.aval.shape)

    @property
    def dtype(self) -> np.dtype:
        """The element type."""
        return self.result.aval.dtype

    def explain_why_initialized_unsharded(self) -> str:
        """Return why one device must compute the whole array, or an empty string if shards can be computed."""
        return "" if self.is_precomputed else self.operations.find_array_program(self.result).global_reason

    @property
    def is_precomputed(self) -> bool:
        """Whether the array is small and computed in advance, one operation at a time."""
        return self.operations.is_precomputed(self.result)

    def compute_precomputed_value(self) -> jax.Array:
        """Compute the value of a precomputed array."""
        return self.operations.get_precomputed_values([self.result])[0]

    def make_initializer(self) -> Initializer:
        """Return an initializer that computes this array from precomputed arrays."""
        program = self.operations.find_array_program(self.result)
        values = self.operations.get_precomputed_values(program.inputs)

        def compute_global_value() -> jax.Array:
            with suspend_jax_context():
                return program.compute_array(values)

        by_shards = InitializerProgram(program.key, values, program.compute_array)
        return Initializer(compute_global_value, by_shards, recipe=program.format_operations)


@dataclass(frozen=True, eq=False)
class _ArrayProgram:
    """Store the operations that compute one array from precomputed arrays."""

    closed: ClosedJaxpr
    inputs: Sequence[Var]
    key: Hashable
    global_reason: str

    def compute_array(self, inputs: Sequence[object]) -> jax.Array:
        """Compute the array one operation at a time, as the function itself would."""
        return jaxpr_as_fun(self.closed)(*inputs)[0]

    def format_operations(self) -> str:
        return str(self.closed)


class TracedOperations:
    """Store the operations of a traced function, and find those that compute a certain array."""

    def __init__(self, closed: ClosedJaxpr):
        jaxpr = closed.jaxpr
        self._consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._eqns = jaxpr.eqns
        self._eqn_indices = {var: number for number, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        # An operation on a Ref depends on all earlier operations on this Ref, so store their indices.
        self._on_refs: dict[Var, list[int]] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            for var in filter(is_mutable_ref, eqn.invars):
                self._on_refs.setdefault(var, []).append(number)
        reads = (*jaxpr.outvars, *(var for eqn in jaxpr.eqns for var in eqn.invars))
        self._used = {var for var in reads if not isinstance(var, Literal)}
        self._precomputed_eqns: list[JaxprEqn] = []
        self._precomputed: set[Var] = {var for var in jaxpr.constvars if _can_precompute(var.aval)}
        for eqn in jaxpr.eqns:
            from_precomputed = all(isinstance(v, Literal) or v in self._precomputed for v in eqn.invars)
            if from_precomputed and not eqn.effects and all(_can_precompute(v.aval) for v in eqn.outvars):
                self._precomputed_eqns.append(eqn)
                self._precomputed.update(eqn.outvars)
        self._programs: dict[Var, _ArrayProgram] = {}
        self._global_reasons: dict[Hashable, str] = {}

    def is_precomputed(self, var: Var) -> bool:
        """Return whether the value of a variable is computed in advance."""
        return isinstance(var, Literal) or var in self._precomputed

    def get_precomputed_values(self, variables: Sequence[Var]) -> list[jax.Array]:
        """Return the values of literals and precomputed variables."""
        return [
            jnp.asarray(var.val, _get_dtype(var))
            if isinstance(var, Literal)
            else self._precomputed_values[var]
            for var in variables
        ]

    @functools.cached_property
    def _precomputed_values(self) -> dict[Var, jax.Array]:
        """A dict from precomputed variables to their values, which equal those of the untraced function bit for bit."""
        values = {var: self._consts[var] for var in self._consts if var in self._precomputed}
        made = [var for eqn in self._precomputed_eqns for var in eqn.outvars if var in self._used]
        inputs = list(values)
        with suspend_jax_context():
            results = jaxpr_as_fun(make_closed_jaxpr(self._precomputed_eqns, inputs, made))(*values.values())
        return values | dict(zip(made, results, strict=True))

    def find_array_program(self, result: Var) -> _ArrayProgram:
        """Return the operations that compute a variable from precomputed variables."""
        if result not in self._programs:
            eqns, needs = self._find_operations_and_inputs(result)
            inputs = [var for var in needs if var in self._precomputed]
            consts = {var: self._consts[var] for var in needs if var not in self._precomputed}
            closed = make_closed_jaxpr(eqns, inputs, [result], consts)
            key = _make_program_key(closed)
            if key not in self._global_reasons:
                self._global_reasons[key] = explain_why_sharding_changes_values(closed)
            self._programs[result] = _ArrayProgram(closed, inputs, key, self._global_reasons[key])
        return self._programs[result]

    def _find_operations_and_inputs(self, result: Var) -> tuple[list[JaxprEqn], list[Var]]:
        """Return the operations that compute a variable, in order, and the precomputed or constant variables read."""
        numbers: set[int] = set()
        needs: dict[Var, None] = {}
        todo = [result]
        while todo:
            var = todo.pop()
            number = None if var in self._precomputed else self._eqn_indices.get(var)
            if number is None:
                needs[var] = None
                continue
            leading = [number]
            while leading:
                number = leading.pop()
                if number not in numbers:
                    numbers.add(number)
                    inputs = [v for v in self._eqns[number].invars if not isinstance(v, Literal)]
                    todo += inputs
                    leading += [n for v in inputs for n in self._on_refs.get(v, ()) if n < number]
        order = sorted(needs, key=lambda var: self._eqn_indices.get(var, -1))
        return [self._eqns[number] for number in sorted(numbers)], order


def _get_dtype(var: Any) -> np.dtype:
    return var.aval.dtype


def _can_precompute(aval: Any) -> bool:
    """Return whether an array is small enough to be computed in advance."""
    return isinstance(aval, jax.core.ShapedArray) and math.prod(aval.shape) <= _MAX_PRECOMPUTED_SIZE


def _make_program_key(closed: ClosedJaxpr) -> Hashable:
    """Return a key that is equal only for programs that compute the same result from the same inputs."""
    jaxpr = closed.jaxpr
    numbers: dict[Var, int] = {}

    def make_variable_keys(variables: Iterable[Var | Literal]) -> tuple[Hashable, ...]:
        return tuple(
            (v.aval, np.asarray(v.val).tobytes())
            if isinstance(v, Literal)
            else (v.aval, numbers.setdefault(v, len(numbers)))
            for v in variables
        )

    consts = _IncomparableValue() if closed.consts else None
    inputs = make_variable_keys((*jaxpr.constvars, *jaxpr.invars))
    steps = tuple(
        (
            eqn.primitive,
            make_variable_keys(eqn.invars),
            make_variable_keys(eqn.outvars),
            tuple(map(_make_parameter_hashable, sorted(eqn.params.items()))),
        )
        for eqn in jaxpr.eqns
    )
    return consts, inputs, steps, make_variable_keys(jaxpr.outvars)


class _IncomparableValue:
    """Replace a value that cannot be compared in a key. An instance equals only itself."""


def _make_parameter_hashable(parameter: tuple[str, object]) -> Hashable:
    """Return a parameter of an operation, or an object that equals only itself if the parameter cannot be hashed."""
    try:
        hash(parameter)
    except TypeError:
        return _IncomparableValue()
    return parameter
