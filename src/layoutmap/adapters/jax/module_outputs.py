"""Constrain the outputs of flax.nnx modules to the layouts of activation rules.

Python looks up `__call__` on the class, so a module with a rule gets a subclass of its class with the same name. The
handler of its output is a static attribute of the module, as flax's own settings are, so copies, `nnx.split`, and
`nnx.merge` keep both.
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
from layoutmap.core.steps import StepTracer
from layoutmap.engines import get_engine
from layoutmap.engines.jax.ambient import convert_to_axis_types_of_mesh, differs_from_ambient_mesh, use_mesh

_ATTRIBUTE = "_layoutmap_output"
_ORIGINAL_CLASS = "_layoutmap_plain"


@dataclass(frozen=True)
class OutputLayoutHandler:
    """Handle the calls of a module: constrain its output to a layout.

    Args:
        layout: The layout of the rule.
        batch_dim: The mesh dim over which batches are sharded, or several.
        path: The module's path. It is not compared, so equal blocks with different paths compile one program.
    """

    layout: Layout
    batch_dim: BatchDim | None
    path: str = field(compare=False)

    def call_module(
        self, call: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call a module, and return its output in the layout of the rule."""
        return self._constrain_output_arrays(call(*args, **kwargs))

    def _constrain_output_arrays(self, result: object) -> object:
        policy, relayout = LayoutPolicy(self.layout.mesh, self.batch_dim), get_engine("jax").relayout
        leaves, tree_def = jax.tree.flatten(result)
        positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        shapes = [leaves[position].shape for position in positions]
        layouts = policy.choose_output_layouts(self.layout, shapes, self.path)
        for position, layout in zip(positions, layouts, strict=True):
            if layout is not None:
                leaves[position] = relayout(leaves[position], layout)
        return jax.tree.unflatten(tree_def, leaves)


@dataclass(frozen=True)
class ModelMeshHandler:
    """Handle the calls of a model: run it on the mesh of its arrays although `jax.set_mesh` has set a different mesh.

    Args:
        mesh: The mesh that the model's arrays are on.
    """

    mesh: AbstractMesh

    def call_module(
        self, call: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call a module on the mesh of its arrays, and return the output on the mesh of `jax.set_mesh`."""
        if not differs_from_ambient_mesh(self.mesh):
            return call(*args, **kwargs)
        with use_mesh(self.mesh):
            args, kwargs = convert_to_axis_types_of_mesh((args, kwargs), self.mesh)
            output = call(*args, **kwargs)
        return convert_to_axis_types_of_mesh(output, jax.sharding.get_abstract_mesh())


@dataclass(frozen=True)
class CallTracingHandler:
    """Handle the calls of a module: report each call to a tracer.

    Args:
        tracer: The tracer.
        path: The module's path.
    """

    tracer: StepTracer
    path: str

    def call_module(
        self, call: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call a module through the tracer, which may replace its output."""
        function = _wrap_with_recomputation(call) if self.tracer.should_recompute(self.path) else call
        return self.tracer.call_layer(self.path, function, args, kwargs)


def _wrap_with_recomputation(call: Any) -> Callable[..., object]:
    """Return a function that calls a module, and recomputes its activations in the backward pass."""

    def call_with_recomputation(*args: object, **kwargs: object) -> object:
        named = {str(number): value for number, value in enumerate(args)} | kwargs
        settings: dict[str, object] = {k: value for k, value in named.items() if isinstance(value, _SETTINGS)}
        arrays = {k: value for k, value in named.items() if k not in settings}

        def call_with_arrays(module: nnx.Module, arrays: dict[str, object]) -> object:
            merged: dict[str, object] = settings | arrays
            return call.func(module, *(merged.pop(str(number)) for number in range(len(args))), **merged)

        remat: Any = nnx.remat(call_with_arrays)
        return remat(*call.args, arrays)

    return call_with_recomputation


_SETTINGS = (bool, int, float, str, type(None), types.FunctionType)


# Python looks up `__call__` on the class, so give a module with a handler a subclass of its class (decisions/0073).
def set_call_handler(
    module: nnx.Module, handler: OutputLayoutHandler | ModelMeshHandler | CallTracingHandler
) -> None:
    """Pass each call of a module to a handler, which constrains the output, enters a mesh, or reports to a tracer."""
    remove_call_handler(module)
    is_pytree = not jax.tree_util.all_leaves([module])
    # Bypass `setattr` of flax, because it would register the attribute as a part of the model.
    object.__setattr__(module, "__class__", _make_subclass_with_call_handler(type(module), is_pytree))
    vars(module)[_ATTRIBUTE] = handler


def remove_call_handler(module: nnx.Module) -> None:
    """Undo `set_call_handler`. Do nothing for a module without a handler."""
    original = getattr(type(module), _ORIGINAL_CLASS, None)
    if original is not None:
        object.__setattr__(module, "__class__", original)
        vars(module).pop(_ATTRIBUTE, None)


@functools.cache
def _make_subclass_with_call_handler(original: Any, is_pytree: bool) -> type[nnx.Module]:
    """Return a subclass of a module class that passes each call to the handler of the instance."""

    @functools.wraps(original.__call__)
    def call_through_handler(self: object, *args: object, **kwargs: object) -> object:
        call = functools.partial(original.__call__, self)
        # Code such as `type(layer)(..)` creates further instances of this subclass. These have no handler, so call them
        # as usual.
        output = vars(self).get(_ATTRIBUTE)
        return call(*args, **kwargs) if output is None else output.call_module(call, args, kwargs)

    def copy_module(self: object) -> Any:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def reduce_module_for_pickle(self: object, protocol: object) -> tuple[object, ...]:
        """Let pickle restore a module with its original class, because unpickled arrays are unsharded."""
        module = copy_module(self)
        remove_call_handler(module)
        make, arguments, *rest = module.__reduce_ex__(protocol)
        return _restore_module, (make, arguments), *rest

    body = {
        "__call__": call_through_handler,
        "__copy__": copy_module,
        "__reduce_ex__": reduce_module_for_pickle,
    }
    body[_ORIGINAL_CLASS] = original
    body |= {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original)(original.__name__, (original,), body, pytree=is_pytree)


def _restore_module(make: Callable[..., object], arguments: Sequence[object]) -> object:
    return make(*arguments)
