"""Replace the `forward` of sharded modules, so that they run on the mesh with unsharded inputs and outputs.

Each module of a laid out model has a `forward` of its own, a `Forward`, in front of that of its class. The outermost
one that is called takes the call to the mesh. Copies of a model are laid out, too; one that is unpickled is plain code
again.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.adapters.torch.boundary import list_tensors, place_inputs, reduce_partial_sums, unshard_tensors
from layoutmap.adapters.torch.compiled import Compiled, compiler_from_options, reuse_compiler
from layoutmap.adapters.torch.dynamo import resume_compiling, skip_compiling, stop_compiling
from layoutmap.adapters.torch.fsdp_own import ModelCall
from layoutmap.adapters.torch.fsdp_units import Gathering, gather_weights
from layoutmap.adapters.torch.gradient_hooks import GradientHooks
from layoutmap.adapters.torch.graph_errors import EXPORT_ATTRIBUTES, make_graph_error, refuse_graphs
from layoutmap.adapters.torch.mesh_context import compute_on_mesh, here, is_running, summing_up
from layoutmap.adapters.torch.module_results import ModuleResults
from layoutmap.adapters.torch.own_rows import OwnRows, has_own_rows
from layoutmap.adapters.torch.process_checks import ProcessChecks
from layoutmap.adapters.torch.slow_calls import SlowCalls
from layoutmap.core.errors import PlanError
from layoutmap.core.layout import Layout
from layoutmap.engines.patches import set_temporarily
from layoutmap.engines.torch.changes import keep_patches
from layoutmap.engines.torch.dtensor_ops import is_batch_divisible
from layoutmap.engines.torch.operators import Args, Function, Kwargs

_ATTRIBUTE = "forward"
_ALONE = "a module in layouts is a graph of its own: call torch.compile(module) or module.compile()"


class Forward:
    """Replace the `forward` of a module while its model is sharded.

    Args:
        module: The module.
        path: Its path in the model; empty for the model itself.
        context: The scope.
        gather: What is gathered while it computes.
        valueless: Why the model has no values and cannot be called; empty if it can.
        graphs: What was compiled for modules of the scope.
        layouts: The layouts of the model's tensors, by their ids.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        path: str,
        context: ScopeContext,
        *,
        gather: Gathering | None = None,
        valueless: str = "",
        graphs: dict[object, Any] | None = None,
        layouts: Mapping[int, Layout] | None = None,
    ) -> None:
        # A reference cycle would keep the weights until garbage collection, so reference the module weakly.
        self._module = weakref.ref(module)
        self._before = _find_previous_forward(module)
        self.path = path
        self.context = context
        self.gather = gather
        self.valueless = valueless
        own = module.named_parameters(recurse=False) if layouts else ()
        self.weights = {name: layouts[id(each)] for name, each in own if layouts and id(each) in layouts}
        self._results = ModuleResults(module, path, context, layouts or {})
        self._watch: GradientHooks | None = None
        self._comparisons = ProcessChecks(context)
        self._has_warned = False
        self._slow_calls = SlowCalls()
        self.compiled: Compiled | None = None
        self._graphs = {} if graphs is None else graphs
        self._as_called: dict[object, Mapping[Forward, Compiled]] = {}

    def attach(self) -> None:
        """Install this object as the module's `forward`."""
        vars(self._get_module()).update({_ATTRIBUTE: self, "compile": functools.partial(_compile, self)})
        keep_patches(self)  # torch stays patched while a sharded model exists

    def compile(self, options: Mapping[str, object]) -> None:
        """Compile the module, or the blocks in it that gather their weights, at their next call.

        Raises:
            ScopeError: The devices are simulated, or shapes would be dynamic.
        """
        compiler = compiler_from_options(options)
        for each in self._list_gathering_modules() or [self]:
            each.compiled = Compiled(each, compiler, self._graphs, each.merge_gatherings())

    def _list_gathering_modules(self) -> list[Forward]:
        """Return the outermost modules in this one that gather their weights when the model is called."""
        found: list[Forward] = []
        inner: set[Forward] = set()
        for each in self.list_forwards():  # outer modules are first in the list
            if each.frees_weights and each not in inner:
                found.append(each)
                inner.update(each.list_forwards())
        return found

    @property
    def frees_weights(self) -> bool:
        """Whether the module gathers its weights when the model is called, and frees them."""
        return self.gather is not None and self.gather.is_part and not self.gather.is_outermost

    def merge_gatherings(self) -> Gathering | None:
        """Merge the gatherings of this module and its submodules, or return None if its own is complete."""
        inside = [each for each in self.list_forwards() if each is self or each.frees_weights]
        gathers = [each.gather for each in inside if each.gather is not None]
        if inside == [self] or not gathers:
            return None
        first = gathers[0]
        call, is_kept = (ModelCall(), False) if first.is_outermost else (first.model_call, first.is_kept)
        weights = [weight for each in gathers for weight in each.weights]
        return Gathering(weights, call, first.policy, is_kept, first.is_outermost)

    def list_forwards(self) -> list[Forward]:
        """Return the forwards of this module and of its submodules, parents first."""
        return [each for module in self._get_module().modules() if (each := find_forward(module))]

    def _find_compiled(self, compiler: object) -> Mapping[Forward, Compiled]:
        """Return the compiled modules for the compiler of the function that calls this module."""
        inside = self.list_forwards()
        key = (compiler, *inside)
        if key not in self._as_called:
            made, blocks = reuse_compiler(compiler), self._list_gathering_modules()
            compiled: dict[Forward, Compiled] = {}
            # a full graph needs all weights gathered at once
            if made.is_strict and blocks not in ([], [self]):
                blocks = [self]
            for each in blocks or [self]:
                compiled[each] = Compiled(each, made, self._graphs, each.merge_gatherings())
            self._as_called[key] = compiled
        return self._as_called[key]

    def structure(self) -> object:
        """Return the parts of this forward that determine its module's graph."""
        return id(self._before), self._results.output, id(self.context)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the module. Unsharded inputs give unsharded outputs, and DTensor inputs give DTensor outputs.

        Raises:
            PlanError: The model has no values.
            LayoutError: A rule of `LayoutMap.activations` does not fit the module's output.
            EngineError: It is called inside of a transform of `torch.func`.
        """
        if self.valueless:
            raise PlanError(
                f"{type(self._get_module()).__name__}: {self.valueless}",
                why="the tensors of this model have shapes and no values",
                fix="build it again in a scope or with layout_map.build",
            )
        if torch.compiler.is_dynamo_compiling():
            return self._call_outside_graph(args, kwargs)
        return self._call_without_dynamo(args, kwargs)

    @torch.compiler.disable(recursive=False, reason=_ALONE)  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
    def _call_outside_graph(self, args: Args, kwargs: Kwargs) -> object:
        """Call the module outside the graph of a compiled function that calls it."""
        return self._call_without_dynamo(args, kwargs)

    def _call_without_dynamo(self, args: Args, kwargs: Kwargs) -> object:
        compiler = stop_compiling()
        if compiler is None:
            return self._dispatch_call(args, kwargs)
        try:
            with set_temporarily(here, "compiled", self._find_compiled(compiler)):
                return self._dispatch_call(args, kwargs)
        finally:
            resume_compiling(compiler)

    def _dispatch_call(self, args: Args, kwargs: Kwargs) -> object:
        return self._run(args, kwargs) if is_running() else self._on_mesh(args, kwargs)

    def _on_mesh(self, args: Args, kwargs: Kwargs) -> object:
        refuse_graphs(self._get_module())
        if self.context.across:
            self._comparisons.compare_program(
                self._get_module(), (each._before for each in self.list_forwards())
            )
        if torch.is_grad_enabled():
            if self._watch is None or not self._watch.has_same_submodules(self._get_module()):
                self._watch = self._make_watch()
            self._watch.look()
        is_plain = not any(isinstance(tensor, DTensor) for tensor in list_tensors((args, kwargs)))
        if torch.is_grad_enabled() and self._get_module().training:
            self.context.warn_of_idle_dims(
                type(self._get_module()).__name__, _find_sharded_dims((args, kwargs))
            )
        own = OwnRows((args, kwargs), self.context) if is_plain and has_own_rows(self.context) else None
        with (
            self._slow_calls.measure(self.context.options.progress),
            self._comparisons.compared_call(args, kwargs, own),
            compute_on_mesh(self.context),
        ):
            if own is not None:
                args, kwargs = own.place((args, kwargs))
            args, kwargs = place_inputs((args, kwargs), self.context)
            self._check_rows()
            with summing_up(not all(map(is_batch_divisible, list_tensors((args, kwargs))))):
                result = self._run(args, kwargs)
        if own is not None:
            return own.take(result)
        return unshard_tensors(result) if is_plain else reduce_partial_sums(result)

    def _check_rows(self) -> None:
        """Warn once of a model trained with uneven batches only."""
        batches = self.context.policy.batches
        if not batches or True in batches or self._has_warned or not torch.is_grad_enabled():
            return
        self._has_warned = True
        self.context.policy.warn_of_uneven_batch(type(self._get_module()).__name__, "torch")

    def __getattr__(self, name: str) -> object:
        if name in EXPORT_ATTRIBUTES:
            raise make_graph_error(self._get_module(), EXPORT_ATTRIBUTES[name])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _make_watch(self) -> GradientHooks:
        """Return a watch for the gradients of a model that starts to train or has new submodules."""
        module = self._get_module()
        if self.context.across:
            self._comparisons.compare_unsharded(module)
        layouts = {
            id(each): (forward.path, forward.weights)
            for each in module.modules()
            if (forward := find_forward(each))
        }
        return GradientHooks(module, layouts)

    def _run(self, args: Args, kwargs: Kwargs) -> object:
        compiled = None if here.is_recording else here.compiled.get(self, self.compiled)
        gather = self.gather if compiled is None or compiled.gather is None else compiled.gather
        if gather is None:
            return self._compute_compiled(compiled, args, kwargs)
        args, kwargs = gather.given(args, kwargs)
        with gather_weights(gather, self.context, list_tensors((args, kwargs))):
            return gather.cast_output(self._compute_compiled(compiled, args, kwargs))

    def _compute_compiled(self, compiled: Compiled | None, args: Args, kwargs: Kwargs) -> object:
        if compiled is not None:
            return compiled(self._get_module(), args, kwargs)
        return self.compute(args, kwargs)

    def compute(self, args: Args, kwargs: Kwargs) -> object:
        """Compute the module uncompiled on the mesh."""
        forward = self._before or _bind_class_forward(self._get_module())
        result = forward(*args, **kwargs)  # call `forward`, because `module()` would run hooks twice
        return self._results.place(self._get_module(), result)

    def _get_module(self) -> torch.nn.Module:
        module = self._module()
        assert module is not None, "a forward is called through its module"
        return module

    # -- attributes of a bound method

    __name__ = _ATTRIBUTE

    @property
    def __signature__(self) -> inspect.Signature:
        module = self._get_module()
        return inspect.signature(self._before or _bind_class_forward(module))

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        module = self._get_module()
        made = copy.copy(self)
        # Bind to the copied module if the copy contains it.
        made._module = weakref.ref(memo.get(id(module), module))
        made._before = copy.deepcopy(self._before, memo)
        made.gather = copy.deepcopy(self.gather, memo)
        made._watch = made.compiled = None
        made._comparisons = ProcessChecks(self.context)
        made._as_called = {}
        return made

    def __copy__(self) -> Forward:
        made = object.__new__(Forward)
        vars(made).update(vars(self))
        return made

    def __reduce__(self) -> tuple[object, ...]:
        # A pickle has no mesh, so unpickling restores the class's forward.
        return _bind_class_forward, (self._get_module(),)


for _function in (Forward.__call__, Forward._call_outside_graph, Forward._call_without_dynamo):  # pyright: ignore[reportPrivateUsage]
    skip_compiling(_function)


def _bind_class_forward(module: torch.nn.Module) -> Function:
    """Return the forward of a module's class, bound to the module."""
    return functools.partial(type(module).forward, module)


def _compile(forward: Any, **options: Any) -> None:
    """Compile a sharded module in place of `Module.compile`, or one that is unsharded again after unpickling."""
    if not isinstance(forward, Forward):
        module: torch.nn.Module = forward.args[0]
        return type(module).compile(module, **options)  # pyright: ignore[reportUnknownMemberType]
    return forward.compile(options)


def _find_previous_forward(module: torch.nn.Module) -> Any:
    """Return the forward that was set on a module before this scope, or None for its class's forward."""
    own = vars(module).get(_ATTRIBUTE)
    return own._before if isinstance(own, Forward) else own  # pyright: ignore[reportPrivateUsage]


def find_forward(module: torch.nn.Module) -> Forward | None:
    """Return the `Forward` that a scope has set on a module, or None."""
    own = vars(module).get(_ATTRIBUTE)
    return own if isinstance(own, Forward) else None


def is_planned(module: torch.nn.Module) -> bool:
    """Return whether a model has no values, because it was only planned or its scope failed."""
    own = find_forward(module)
    return own is not None and bool(own.valueless)


def _find_sharded_dims(values: object) -> set[str]:
    """Return the mesh dims over which the program has sharded a module's inputs."""
    found: set[str] = set()
    for tensor in list_tensors(values, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        found.update(name for name, place in zip(names, tensor.placements, strict=True) if place.is_shard())
    return found
