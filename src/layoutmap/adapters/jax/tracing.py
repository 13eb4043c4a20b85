"""Trace a function that builds a model, and derive the program that initializes each array.

JAX models are made by functions that compute arrays at once. Here such a function is traced, so that it computes none,
and each array that it returns becomes an initializer: the operations that lead to it, and no others. Small arrays that
they begin with, random keys and numbers, are its seeds: they are computed one operation after the other, as eager JAX
does. Arrays of equal operations (those of a model's equal blocks) have equal programs, which an engine compiles once.
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

from layoutmap.adapters.jax.private import shorten_messages
from layoutmap.core.errors import ScopeError
from layoutmap.core.initializers import Initializer, Program
from layoutmap.engines.jax.ambient import use_mesh
from layoutmap.engines.jax.meshless import remove_mesh
from layoutmap.engines.jax.padded import PaddedArray
from layoutmap.engines.jax.programs import (
    find_global_reason,
    is_ref,
    leave_program_context,
    make_closed_jaxpr,
)

_MAX_SEED_SIZE = 1024
"""Arrays with at most this number of elements are computed in advance and passed to programs as seeds."""


def is_array(value: object) -> bool:
    """Return whether a value is a JAX or numpy array, or a planned one."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype == bool or jnp.issubdtype(value.dtype, jnp.number)
    return isinstance(value, (jax.Array, jax.ShapeDtypeStruct, PaddedArray))


def is_key(value: Any) -> bool:
    """Return whether an array holds random keys."""
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def trace(
    make: Callable[[], tuple[object, Sequence[object]]],
    mesh: jax.sharding.AbstractMesh,
    # A program may use a JAX array immediately, so trace the function and create arrays later in
    # their layouts (decisions/0073).
) -> tuple[Any, Sequence[Any]]:
    """Trace a function that builds a model.

    Args:
        make: Makes something, and returns it and arrays: traced ones, or ones that existed.
        mesh: The mesh of the layout map, which `jax.P` and `jax.shard_map` in the function refer to.

    Returns:
        What it made, and for each array the one that existed, or the `Traced` one.

    Raises:
        ScopeError: The function needs the value of an array, which has none here.
    """
    made: list[Any] = []

    def run_under_mesh() -> list[object]:
        made[:] = make()
        return [value for value in made[1] if isinstance(value, jax.core.Tracer)]

    try:
        with leave_program_context(), shorten_messages(), use_mesh(mesh):
            closed = remove_mesh(jax.make_jaxpr(run_under_mesh)())
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise ScopeError(
            "the model function reads the value of an array that it computes",
            facts={"jax": str(error).strip().partition("\n")[0]},
            why="the function is traced so that arrays are created in their layouts, and traced arrays have no values",
            fix="compute it with numpy, or build the model without a scope and shard it: layout_map.apply(model)",
        ) from error
    except Exception as error:
        if type(error).__name__ != "TraceContextError":  # compare the name, because flax may not be installed
            raise
        raise ScopeError(
            "the model function changes a flax object that was created outside it",
            facts={"flax": str(error).strip().partition(" (http")[0]},
            why="each draw changes the counter of nnx.Rngs, and a traced function may change only objects that it "
            "makes itself",
            fix="create the object inside the function: layout_map.build(lambda: Model(nnx.Rngs(0)))",
        ) from error
    operations = Operations(closed)
    results = iter(closed.jaxpr.outvars)
    model, arrays = made
    return model, [
        Traced(operations, next(results)) if isinstance(value, jax.core.Tracer) else value for value in arrays
    ]


@dataclass(frozen=True, eq=False)
class Traced:
    """An array that a traced function would compute."""

    operations: Operations
    result: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.result.aval.shape)

    @property
    def dtype(self) -> np.dtype:
        """The element type."""
        return self.result.aval.dtype

    def explain_global(self) -> str:
        """Return why one device must compute the global value, or an empty text."""
        return "" if self.is_seed else self.operations.slice(self.result).global_reason

    @property
    def is_seed(self) -> bool:
        """Whether it is small and computed in advance."""
        return self.operations.is_seed(self.result)

    def seed(self) -> jax.Array:
        """Compute the value of a seed."""
        return self.operations.read_seeds([self.result])[0]

    def make_initializer(self) -> Initializer:
        """Return an initializer that computes this array from its seeds."""
        part = self.operations.slice(self.result)
        seed = self.operations.read_seeds(part.takes)

        def compute_global_value() -> jax.Array:
            with leave_program_context():
                return part.run(seed)

        return Initializer(compute_global_value, Program(part.key, seed, part.run), recipe=part.format_text)


@dataclass(frozen=True, eq=False)
class _Slice:
    """The operations that compute one array from its seeds."""

    closed: ClosedJaxpr
    takes: Sequence[Var]
    key: Hashable
    global_reason: str

    def run(self, seed: Sequence[object]) -> jax.Array:
        """Compute the array, one operation at a time, like the function itself."""
        return jaxpr_as_fun(self.closed)(*seed)[0]

    def format_text(self) -> str:
        return str(self.closed)


class Operations:
    """The operations of a traced function."""

    def __init__(self, closed: ClosedJaxpr):
        jaxpr = closed.jaxpr
        self._consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._eqns = jaxpr.eqns
        self._makers = {var: number for number, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        # Operations on a Ref depend on all earlier operations on it.
        self._on_refs: dict[Var, list[int]] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            for var in filter(is_ref, eqn.invars):
                self._on_refs.setdefault(var, []).append(number)
        reads = (*jaxpr.outvars, *(var for eqn in jaxpr.eqns for var in eqn.invars))
        self._used = {var for var in reads if not isinstance(var, Literal)}
        self._seed_eqns: list[JaxprEqn] = []
        self._seeds: set[Var] = {var for var in jaxpr.constvars if _can_be_seed(var.aval)}
        for eqn in jaxpr.eqns:
            from_seeds = all(isinstance(v, Literal) or v in self._seeds for v in eqn.invars)
            if from_seeds and not eqn.effects and all(_can_be_seed(v.aval) for v in eqn.outvars):
                self._seed_eqns.append(eqn)
                self._seeds.update(eqn.outvars)
        self._slices: dict[Var, _Slice] = {}
        self._whys: dict[Hashable, str] = {}

    def is_seed(self, var: Var) -> bool:
        """Return whether a value is computed in advance."""
        return isinstance(var, Literal) or var in self._seeds

    def read_seeds(self, wanted: Sequence[Var]) -> list[jax.Array]:
        """Compute the values of seeds."""
        return [
            jnp.asarray(var.val, _read_dtype(var)) if isinstance(var, Literal) else self._seed_values[var]
            for var in wanted
        ]

    @functools.cached_property
    def _seed_values(self) -> dict[Var, jax.Array]:
        """All seeds, computed one operation at a time, so that each has the bits of the function itself."""
        values = {var: self._consts[var] for var in self._consts if var in self._seeds}
        made = [var for eqn in self._seed_eqns for var in eqn.outvars if var in self._used]
        takes = list(values)
        with leave_program_context():
            results = jaxpr_as_fun(make_closed_jaxpr(self._seed_eqns, takes, made))(*values.values())
        return values | dict(zip(made, results, strict=True))

    def slice(self, result: Var) -> _Slice:
        """Return the operations that compute a value from its seeds."""
        if result not in self._slices:
            eqns, needs = self._find_operations(result)
            takes = [var for var in needs if var in self._seeds]
            consts = {var: self._consts[var] for var in needs if var not in self._seeds}
            closed = make_closed_jaxpr(eqns, takes, [result], consts)
            key = _make_key(closed)
            if key not in self._whys:
                self._whys[key] = find_global_reason(closed)
            self._slices[result] = _Slice(closed, takes, key, self._whys[key])
        return self._slices[result]

    def _find_operations(self, result: Var) -> tuple[list[JaxprEqn], list[Var]]:
        """Return the operations that compute a value, in order, and the seeds and constants they use."""
        numbers: set[int] = set()
        needs: dict[Var, None] = {}
        todo = [result]
        while todo:
            var = todo.pop()
            number = None if var in self._seeds else self._makers.get(var)
            if number is None:
                needs[var] = None
                continue
            leading = [number]
            while leading:
                number = leading.pop()
                if number not in numbers:
                    numbers.add(number)
                    takes = [v for v in self._eqns[number].invars if not isinstance(v, Literal)]
                    todo += takes
                    leading += [n for v in takes for n in self._on_refs.get(v, ()) if n < number]
        order = sorted(needs, key=lambda var: self._makers.get(var, -1))
        return [self._eqns[number] for number in sorted(numbers)], order


def _read_dtype(var: Any) -> np.dtype:
    return var.aval.dtype


def _can_be_seed(aval: Any) -> bool:
    return isinstance(aval, jax.core.ShapedArray) and math.prod(aval.shape) <= _MAX_SEED_SIZE


def _make_key(closed: ClosedJaxpr) -> Hashable:
    """Return a key that is equal only for slices that compute the same values from their seeds."""
    jaxpr = closed.jaxpr
    numbers: dict[Var, int] = {}

    def describe_variables(variables: Iterable[Var | Literal]) -> tuple[Hashable, ...]:
        return tuple(
            (v.aval, np.asarray(v.val).tobytes())
            if isinstance(v, Literal)
            else (v.aval, numbers.setdefault(v, len(numbers)))
            for v in variables
        )

    consts = _UnequalToAll() if closed.consts else None
    takes = describe_variables((*jaxpr.constvars, *jaxpr.invars))
    steps = tuple(
        (
            eqn.primitive,
            describe_variables(eqn.invars),
            describe_variables(eqn.outvars),
            tuple(map(_make_hashable, sorted(eqn.params.items()))),
        )
        for eqn in jaxpr.eqns
    )
    return consts, takes, steps, describe_variables(jaxpr.outvars)


class _UnequalToAll:
    """Stand in for a value that cannot be compared, and equal only itself."""


def _make_hashable(parameter: tuple[str, object]) -> Hashable:
    try:
        hash(parameter)
    except TypeError:
        return _UnequalToAll()
    return parameter
