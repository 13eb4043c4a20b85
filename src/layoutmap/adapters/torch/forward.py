"""Calling a laid out model, or any layer of it: on its mesh, with plain tensors in and plain tensors out.

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
from layoutmap.adapters.torch.boundary import on_mesh, plain, summed_up, tensors_in
from layoutmap.adapters.torch.compiled import Compiled, as_called, by_options
from layoutmap.adapters.torch.dynamo import go_on_compiling, not_compiled, stop_compiling
from layoutmap.adapters.torch.fsdp_own import ModelCall
from layoutmap.adapters.torch.fsdp_units import Gathering, gathered
from layoutmap.adapters.torch.gradient_hooks import Watch
from layoutmap.adapters.torch.graph_errors import EXPORT_ATTRIBUTES, graph_error, refuse_graphs
from layoutmap.adapters.torch.mesh_context import here, is_running, running, summing_up
from layoutmap.adapters.torch.module_results import ModuleResults
from layoutmap.adapters.torch.process_checks import ProcessChecks
from layoutmap.core.errors import PlanError
from layoutmap.core.layout import Layout
from layoutmap.engines.patches import temporarily
from layoutmap.engines.torch.changes import keep
from layoutmap.engines.torch.dtensor_ops import batch_divides
from layoutmap.engines.torch.operators import Args, Function, Kwargs

_ATTRIBUTE = "forward"
_ALONE = "a module in layouts is a graph of its own: call torch.compile(module) or module.compile()"


class Forward:
    """The callable that takes the place of a module's `forward` while its model is laid out.

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
        self._module = weakref.ref(module)  # the module holds this: a circle would keep weights until gc runs
        self._before = _before(module)
        self.path = path
        self.context = context
        self.gather = gather
        self.valueless = valueless
        own = module.named_parameters(recurse=False) if layouts else ()
        self.weights = {name: layouts[id(each)] for name, each in own if layouts and id(each) in layouts}
        self._results = ModuleResults(module, path, context, layouts or {})
        self._watch: Watch | None = None
        self._comparisons = ProcessChecks(context)
        self._has_warned = False
        self.compiled: Compiled | None = None
        self._graphs = {} if graphs is None else graphs
        self._as_called: dict[object, Mapping[Forward, Compiled]] = {}

    def attach(self) -> None:
        """Put it in its place."""
        vars(self._the_module()).update({_ATTRIBUTE: self, "compile": functools.partial(_compile, self)})
        keep(self)  # torch stays changed while a model is in layouts

    def compile(self, options: Mapping[str, object]) -> None:
        """Have the module compiled when it is called, or the blocks in it that gather their weights.

        Raises:
            ScopeError: The devices are simulated, or shapes would be dynamic.
        """
        compiler = by_options(options)
        for each in self._gathering() or [self]:
            each.compiled = Compiled(each, compiler, self._graphs, each.gathered_at_once())

    def _gathering(self) -> list[Forward]:
        """The modules in this one that gather their weights when the model is called, without those in one of them."""
        found: list[Forward] = []
        inner: set[Forward] = set()
        for each in self.inside():  # a module comes before those in it
            if each.frees and each not in inner:
                found.append(each)
                inner.update(each.inside())
        return found

    @property
    def frees(self) -> bool:
        """Whether the module gathers its weights when the model is called, and frees them."""
        return self.gather is not None and self.gather.is_part and not self.gather.is_outermost

    def gathered_at_once(self) -> Gathering | None:
        """The weights of this module and of those in it, gathered before its graph; `None`: it gathers all itself."""
        inside = [each for each in self.inside() if each is self or each.frees]
        gathers = [each.gather for each in inside if each.gather is not None]
        if inside == [self] or not gathers:
            return None
        first = gathers[0]
        call, is_kept = (ModelCall(), False) if first.is_outermost else (first.model_call, first.is_kept)
        weights = [weight for each in gathers for weight in each.weights]
        return Gathering(weights, call, first.policy, is_kept, first.is_outermost)

    def inside(self) -> list[Forward]:
        """The forwards of the module and of those in it, a module before those in it."""
        return [each for module in self._the_module().modules() if (each := forward_of(module))]

    def _compiled_by(self, compiler: object) -> Mapping[Forward, Compiled]:
        """The compiled modules where `torch.compile(module)`, or a function that it has compiled, calls the module."""
        inside = self.inside()
        key = (compiler, *inside)
        if key not in self._as_called:
            made, blocks = as_called(compiler), self._gathering()
            compiled: dict[Forward, Compiled] = {}
            if made.is_strict and blocks not in ([], [self]):  # one graph, so all weights at once
                blocks = [self]
            for each in blocks or [self]:
                compiled[each] = Compiled(each, made, self._graphs, each.gathered_at_once())
            self._as_called[key] = compiled
        return self._as_called[key]

    def structure(self) -> object:
        """The parts of this forward that decide about the graph that its module is compiled to."""
        return id(self._before), self._results.output, id(self.context)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the module; plain tensors give plain tensors, and `DTensor`s give `DTensor`s.

        Raises:
            PlanError: The model has no values.
            LayoutError: A rule of `LayoutMap.activations` does not fit the module's output.
            EngineError: It is called inside of a transform of `torch.func`.
        """
        if self.valueless:
            raise PlanError(
                f"{type(self._the_module()).__name__}: {self.valueless}",
                why="the tensors of this model know their shapes only",
                fix="build it again, in a scope or with layout_map.build",
            )
        if torch.compiler.is_dynamo_compiling():
            return self._alone(args, kwargs)
        return self._compiled_or_called(args, kwargs)

    @torch.compiler.disable(recursive=False, reason=_ALONE)  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
    def _alone(self, args: Args, kwargs: Kwargs) -> object:
        """The call that Dynamo finds in the place of the module where it compiles a function that calls it."""
        return self._compiled_or_called(args, kwargs)

    def _compiled_or_called(self, args: Args, kwargs: Kwargs) -> object:
        compiler = stop_compiling()
        if compiler is None:
            return self._called(args, kwargs)
        try:
            with temporarily(here, "compiled", self._compiled_by(compiler)):
                return self._called(args, kwargs)
        finally:
            go_on_compiling(compiler)

    def _called(self, args: Args, kwargs: Kwargs) -> object:
        return self._run(args, kwargs) if is_running() else self._on_mesh(args, kwargs)

    def _on_mesh(self, args: Args, kwargs: Kwargs) -> object:
        refuse_graphs(self._the_module())
        if self.context.across:
            self._comparisons.compare_program(self._the_module(), (each._before for each in self.inside()))
        if torch.is_grad_enabled():
            if self._watch is None or not self._watch.is_of(self._the_module()):
                self._watch = self._new_watch()
            self._watch.look()
        is_plain = not any(isinstance(tensor, DTensor) for tensor in tensors_in((args, kwargs)))
        if torch.is_grad_enabled() and self._the_module().training:
            self.context.warn_of_idle_dims(type(self._the_module()).__name__, _sharded_dims((args, kwargs)))
        with self._comparisons.compared_call(args, kwargs), running(self.context):
            args, kwargs = on_mesh((args, kwargs), self.context)
            self._check_rows()
            with summing_up(not all(map(batch_divides, tensors_in((args, kwargs))))):
                result = self._run(args, kwargs)
        return plain(result) if is_plain else summed_up(result)

    def _check_rows(self) -> None:
        """Warn once of a model that is trained with batches that do not divide, where none has divided."""
        batches = self.context.policy.batches
        if not batches or True in batches or self._has_warned or not torch.is_grad_enabled():
            return
        self._has_warned = True
        self.context.policy.warn_of_uneven_batch(type(self._the_module()).__name__, "torch")

    def __getattr__(self, name: str) -> object:
        if name in EXPORT_ATTRIBUTES:
            raise graph_error(self._the_module(), EXPORT_ATTRIBUTES[name])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _new_watch(self) -> Watch:
        """The watch of a model that begins to train, or has other parts, after a look at adapters and the like."""
        module = self._the_module()
        if self.context.across:
            self._comparisons.compare_unsharded(module)
        layouts = {
            id(each): (forward.path, forward.weights)
            for each in module.modules()
            if (forward := forward_of(each))
        }
        return Watch(module, layouts)

    def _run(self, args: Args, kwargs: Kwargs) -> object:
        compiled = None if here.is_recording else here.compiled.get(self, self.compiled)
        gather = self.gather if compiled is None or compiled.gather is None else compiled.gather
        if gather is None:
            return self._computed(compiled, args, kwargs)
        args, kwargs = gather.given(args, kwargs)
        with gathered(gather, self.context, tensors_in((args, kwargs))):
            return gather.returned(self._computed(compiled, args, kwargs))

    def _computed(self, compiled: Compiled | None, args: Args, kwargs: Kwargs) -> object:
        if compiled is not None:
            return compiled(self._the_module(), args, kwargs)
        return self.compute(args, kwargs)

    def compute(self, args: Args, kwargs: Kwargs) -> object:
        """Compute the module as it is, on the mesh."""
        forward = self._before or _plain_forward(self._the_module())
        result = forward(*args, **kwargs)  # not module(): its hooks have run
        return self._results.place(self._the_module(), result)

    def _the_module(self) -> torch.nn.Module:
        module = self._module()
        assert module is not None, "a forward is called through its module"
        return module

    # -- what a bound method has

    __name__ = _ATTRIBUTE

    @property
    def __signature__(self) -> inspect.Signature:
        module = self._the_module()
        return inspect.signature(self._before or _plain_forward(module))

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        module = self._the_module()
        made = copy.copy(self)
        made._module = weakref.ref(memo.get(id(module), module))  # in the copy, if all is copied
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
        return _plain_forward, (self._the_module(),)  # a pickle has no mesh: what is loaded is plain code


for _function in (Forward.__call__, Forward._alone, Forward._compiled_or_called):  # pyright: ignore[reportPrivateUsage]
    not_compiled(_function)


def _plain_forward(module: torch.nn.Module) -> Function:
    """The forward of a module's class."""
    return functools.partial(type(module).forward, module)


def _compile(forward: Any, **options: Any) -> None:
    """`Module.compile` of a module in layouts, or of one that was unpickled and is plain code again."""
    if not isinstance(forward, Forward):
        module: torch.nn.Module = forward.args[0]
        return type(module).compile(module, **options)  # pyright: ignore[reportUnknownMemberType]
    return forward.compile(options)


def _before(module: torch.nn.Module) -> Any:
    """The forward that was set on a module itself, by the program or an earlier scope; `None`: that of its class."""
    own = vars(module).get(_ATTRIBUTE)
    return own._before if isinstance(own, Forward) else own  # pyright: ignore[reportPrivateUsage]


def forward_of(module: torch.nn.Module) -> Forward | None:
    """The forward that a scope has given a module, if it has."""
    own = vars(module).get(_ATTRIBUTE)
    return own if isinstance(own, Forward) else None


def is_planned(module: torch.nn.Module) -> bool:
    """Whether a model has no values: it was only planned, or its scope failed."""
    own = forward_of(module)
    return own is not None and bool(own.valueless)


def _sharded_dims(values: object) -> set[str]:
    """Return the mesh dims over which the program has sharded what it calls a module with."""
    found: set[str] = set()
    for tensor in tensors_in(values, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        found.update(name for name, place in zip(names, tensor.placements, strict=True) if place.is_shard())
    return found
