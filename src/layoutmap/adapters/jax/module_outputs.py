"""Outputs of modules of flax.nnx, in the layouts of rules of `LayoutMap.activations`.

Python looks `__call__` up on the class, so a module with a rule gets a class of its own kind: a subclass of its class
under the same name, one for each class. Its layout is a static attribute of the module, as flax's own settings are, so
that copies, `nnx.split` and `nnx.merge` keep both.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from layoutmap.core.layout import Layout
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.steps import Tracer
from layoutmap.engines import get_engine

_ATTRIBUTE = "_layoutmap_output"
_PLAIN = "_layoutmap_plain"


@dataclass(frozen=True)
class Output:
    """The layout of what a module returns.

    Args:
        layout: The layout of the rule.
        batch_dim: The mesh dim over which batches are sharded.
        path: The module's path; blocks that differ in nothing else are equal, and compile one program.
    """

    layout: Layout
    batch_dim: str | None
    path: str = field(compare=False)

    def of(self, call: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Return what a module returns, its arrays in their layouts."""
        return self._laid_out(call(*args, **kwargs))

    def _laid_out(self, result: object) -> object:
        policy, relayout = LayoutPolicy(self.layout.mesh, self.batch_dim), get_engine("jax").relayout
        leaves, tree_def = jax.tree.flatten(result)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        shapes = [leaves[place].shape for place in places]
        layouts = policy.choose_output_layouts(self.layout, shapes, self.path)
        for place, layout in zip(places, layouts, strict=True):
            if layout is not None:
                leaves[place] = relayout(leaves[place], layout)
        return jax.tree.unflatten(tree_def, leaves)


@dataclass(frozen=True)
class TracedOutput:
    """Tells a tracer of each call of a module.

    Args:
        tracer: The tracer.
        path: The module's path.
    """

    tracer: Tracer
    path: str

    def of(self, call: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Return what a module returns, or what the tracer has in its place."""
        function = _recomputed(call) if self.tracer.recomputes(self.path) else call
        return self.tracer.call(self.path, function, args, kwargs)


def _recomputed(call: Any) -> Callable[..., object]:
    """A module's call of which only the input is kept for the backward pass; settings of Python stay what they are."""

    def recomputed(*args: object, **kwargs: object) -> object:
        given = {str(number): value for number, value in enumerate(args)} | kwargs
        settings: dict[str, object] = {k: value for k, value in given.items() if isinstance(value, _SETTINGS)}
        arrays = {k: value for k, value in given.items() if k not in settings}

        def plain(module: nnx.Module, arrays: dict[str, object]) -> object:
            every: dict[str, object] = settings | arrays
            return call.func(module, *(every.pop(str(number)) for number in range(len(args))), **every)

        remat: Any = nnx.remat(plain)
        return remat(*call.args, arrays)

    return recomputed


_SETTINGS = (bool, int, float, str, type(None), types.FunctionType)


def with_output(module: nnx.Module, output: Output | TracedOutput) -> None:  # why: decisions/0073
    """Have a module return arrays in a layout, or tell a tracer of its calls."""
    without_output(module)
    is_pytree = not jax.tree_util.all_leaves([module])
    # Not setattr: flax takes what is set so for an attribute of the model.
    object.__setattr__(module, "__class__", _class(type(module), is_pytree))
    vars(module)[_ATTRIBUTE] = output


def without_output(module: nnx.Module) -> None:
    """Make a module again what it was."""
    plain = getattr(type(module), _PLAIN, None)
    if plain is not None:
        object.__setattr__(module, "__class__", plain)
        vars(module).pop(_ATTRIBUTE, None)


@functools.cache
def _class(plain: Any, is_pytree: bool) -> type[nnx.Module]:
    """Return the class of modules of a class whose output has a layout."""

    @functools.wraps(plain.__call__)
    def call(self: object, *args: object, **kwargs: object) -> object:
        plain_call = functools.partial(plain.__call__, self)
        output = vars(self).get(_ATTRIBUTE)  # a module that is made anew, of this type, has none
        return plain_call(*args, **kwargs) if output is None else output.of(plain_call, args, kwargs)

    def copied(self: object) -> Any:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def reduced(self: object, protocol: object) -> tuple[object, ...]:
        """Of what is unpickled, no array is in a layout, so it is a plain module."""
        module = copied(self)
        without_output(module)
        make, arguments, *rest = module.__reduce_ex__(protocol)
        return _unpickled, (make, arguments), *rest

    body = {"__call__": call, "__copy__": copied, "__reduce_ex__": reduced, _PLAIN: plain}
    body |= {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain)(plain.__name__, (plain,), body, pytree=is_pytree)


def _unpickled(make: Callable[..., object], arguments: Sequence[object]) -> object:
    return make(*arguments)
