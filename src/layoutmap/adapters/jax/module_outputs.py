"""Constrain the outputs of flax.nnx modules to the layouts of activation rules.

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
from jax.sharding import AbstractMesh

from layoutmap.core.layout import Layout
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.specs import BatchDim
from layoutmap.core.steps import Tracer
from layoutmap.engines import get_engine
from layoutmap.engines.jax.ambient import change_axis_types, differs_from_ambient_mesh, use_mesh

_ATTRIBUTE = "_layoutmap_output"
_ORIGINAL_CLASS = "_layoutmap_plain"


@dataclass(frozen=True)
class OutputLayout:
    """Constrain a module's output to a layout.

    Args:
        layout: The layout of the rule.
        batch_dim: The mesh dim over which batches are sharded, or several.
        path: The module's path; blocks that differ in nothing else are equal, and compile one program.
    """

    layout: Layout
    batch_dim: BatchDim | None
    path: str = field(compare=False)

    def call_module(
        self, call: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call a module, and constrain its output."""
        return self._apply_layout(call(*args, **kwargs))

    def _apply_layout(self, result: object) -> object:
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
class OwnMesh:
    """Run a model on its own mesh while `jax.set_mesh` names another one.

    Args:
        mesh: The mesh that the model's arrays are on.
    """

    mesh: AbstractMesh

    def call_module(
        self, call: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call a module under its own mesh, and return the output on the mesh of `jax.set_mesh`."""
        if not differs_from_ambient_mesh(self.mesh):
            return call(*args, **kwargs)
        with use_mesh(self.mesh):
            args, kwargs = change_axis_types((args, kwargs), self.mesh)
            output = call(*args, **kwargs)
        return change_axis_types(output, jax.sharding.get_abstract_mesh())


@dataclass(frozen=True)
class TracedOutput:
    """Report each call of a module to a tracer.

    Args:
        tracer: The tracer.
        path: The module's path.
    """

    tracer: Tracer
    path: str

    def call_module(
        self, call: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call a module through the tracer, which may replace its output."""
        function = _make_recomputing_call(call) if self.tracer.should_recompute(self.path) else call
        return self.tracer.call(self.path, function, args, kwargs)


def _make_recomputing_call(call: Any) -> Callable[..., object]:
    """Wrap a module's call so that the backward pass recomputes activations. Python settings stay static."""

    def call_recomputing(*args: object, **kwargs: object) -> object:
        given = {str(number): value for number, value in enumerate(args)} | kwargs
        settings: dict[str, object] = {k: value for k, value in given.items() if isinstance(value, _SETTINGS)}
        arrays = {k: value for k, value in given.items() if k not in settings}

        def call_with_arrays(module: nnx.Module, arrays: dict[str, object]) -> object:
            every: dict[str, object] = settings | arrays
            return call.func(module, *(every.pop(str(number)) for number in range(len(args))), **every)

        remat: Any = nnx.remat(call_with_arrays)
        return remat(*call.args, arrays)

    return call_recomputing


_SETTINGS = (bool, int, float, str, type(None), types.FunctionType)


# Python looks up `__call__` on the class, so a module with a rule gets a subclass of its class (decisions/0073).
def set_output(module: nnx.Module, output: OutputLayout | OwnMesh | TracedOutput) -> None:
    """Set how a module treats its calls: constrain the output, use its own mesh, or report to a tracer."""
    remove_output(module)
    is_pytree = not jax.tree_util.all_leaves([module])
    # flax would register an attribute set by setattr as part of the model.
    object.__setattr__(module, "__class__", _make_subclass(type(module), is_pytree))
    vars(module)[_ATTRIBUTE] = output


def remove_output(module: nnx.Module) -> None:
    """Undo `set_output`."""
    plain = getattr(type(module), _ORIGINAL_CLASS, None)
    if plain is not None:
        object.__setattr__(module, "__class__", plain)
        vars(module).pop(_ATTRIBUTE, None)


@functools.cache
def _make_subclass(plain: Any, is_pytree: bool) -> type[nnx.Module]:
    """Make a subclass of a module class that applies the output settings of an instance."""

    @functools.wraps(plain.__call__)
    def call(self: object, *args: object, **kwargs: object) -> object:
        plain_call = functools.partial(plain.__call__, self)
        output = vars(self).get(_ATTRIBUTE)  # a new instance of the subclass has no output settings
        return plain_call(*args, **kwargs) if output is None else output.call_module(plain_call, args, kwargs)

    def copy_module(self: object) -> Any:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def reduce_module(self: object, protocol: object) -> tuple[object, ...]:
        """Pickle a module with its original class, because unpickled arrays are unsharded."""
        module = copy_module(self)
        remove_output(module)
        make, arguments, *rest = module.__reduce_ex__(protocol)
        return _restore_module, (make, arguments), *rest

    body = {"__call__": call, "__copy__": copy_module, "__reduce_ex__": reduce_module, _ORIGINAL_CLASS: plain}
    body |= {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain)(plain.__name__, (plain,), body, pytree=is_pytree)


def _restore_module(make: Callable[..., object], arguments: Sequence[object]) -> object:
    return make(*arguments)
