"""Remove meshes and shardings from a traced program.

A model is traced under the mesh of its layout map, so that its code can name mesh dims. Its initial values are then
computed one operation at a time, on one device or in shards, which needs the same operations without the mesh.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import jax
import jax.core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh

from layoutmap.engines.jax.ambient import use_mesh

_IDENTITIES = ("sharding_constraint", "reshard", "mesh_cast")
_SHARDINGS = ("sharding", "out_sharding")
_JIT_SHARDINGS = ("in_shardings", "out_shardings")
_EMPTY = AbstractMesh((), ())


def remove_mesh_from_program(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program without the mesh under which it was traced. Its results stay equal bit for bit."""
    return closed.replace(jaxpr=_MeshRemover().remove_mesh_from_jaxpr(closed.jaxpr))


def remove_sharding_from_type(aval: jax.core.ShapedArray) -> jax.core.ShapedArray:
    """Return the type of a value without its sharding."""
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


class _MeshRemover:
    """Remove meshes and shardings from one program. Equal layers keep sharing their inner programs."""

    def __init__(self) -> None:
        self._vars: dict[Var, Var | Literal] = {}

    def remove_mesh_from_jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        """Return a program without meshes and shardings."""
        eqns = [new for eqn in jaxpr.eqns if (new := self._remove_mesh_from_eqn(eqn)) is not None]
        # `Any`, because JAX annotates variables only, but literals can be results, too
        outvars: Any = list(map(self._remove_mesh_from_var, jaxpr.outvars))
        return jaxpr.replace(
            constvars=list(map(self._remove_mesh_from_var, jaxpr.constvars)),
            invars=list(map(self._remove_mesh_from_var, jaxpr.invars)),
            outvars=outvars,
            eqns=eqns,
        )

    def _remove_mesh_from_eqn(self, eqn: JaxprEqn) -> JaxprEqn | None:
        if eqn.primitive.name in _IDENTITIES:
            self._vars[eqn.outvars[0]] = self._remove_mesh_from_var(eqn.invars[0])
            return None
        return eqn.replace(
            invars=list(map(self._remove_mesh_from_var, eqn.invars)),
            outvars=[self._remove_mesh_from_result(var) for var in eqn.outvars],
            params={key: _remove_mesh_from_param(key, value) for key, value in eqn.params.items()},
            ctx=_make_meshless_context(eqn.ctx),
        )

    def _remove_mesh_from_result(self, var: Var) -> Var:
        converted = self._remove_mesh_from_var(var)
        assert isinstance(converted, Var), "an operation returns variables"
        return converted

    def _remove_mesh_from_var(self, var: Var | Literal) -> Var | Literal:
        if isinstance(var, Literal):
            return var
        aval = var.aval
        if var not in self._vars and isinstance(aval, jax.core.ShapedArray) and not aval.sharding.mesh.empty:
            self._vars[var] = Var(remove_sharding_from_type(aval))
        return self._vars.get(var, var)


def _remove_mesh_from_param(key: str, value: object) -> object:
    if key in _SHARDINGS:
        return None
    if key in _JIT_SHARDINGS and isinstance(value, tuple):
        return (_get_unspecified_sharding(),) * len(value)
    if key == "ctx_mesh":
        return _EMPTY
    if isinstance(value, ClosedJaxpr):
        return _remove_mesh_cached(value)
    if isinstance(value, Jaxpr):
        return _remove_mesh_cached(ClosedJaxpr(value, [])).jaxpr
    if type(value) is tuple:
        return tuple(_remove_mesh_from_param("", each) for each in value)
    return value


_inner: weakref.WeakKeyDictionary[Jaxpr, ClosedJaxpr] = weakref.WeakKeyDictionary()


def _remove_mesh_cached(closed: ClosedJaxpr) -> ClosedJaxpr:
    if closed.consts:
        return remove_mesh_from_program(closed)
    if closed.jaxpr not in _inner:
        _inner[closed.jaxpr] = remove_mesh_from_program(closed)
    return _inner[closed.jaxpr]


@functools.cache
def _get_unspecified_sharding() -> object:
    """Return the value with which `jax.jit` marks a sharding that is not given."""
    return jax.make_jaxpr(jax.jit(lambda x: x))(0.0).eqns[0].params["in_shardings"][0]


@functools.lru_cache(256)
def _make_meshless_context(context: Any) -> Any:
    """Return the context of an operation without its mesh. Its random settings and compute type remain."""
    with context.manager, use_mesh(_EMPTY):
        return jax.make_jaxpr(lambda x: x + 1)(0.0).eqns[0].ctx
