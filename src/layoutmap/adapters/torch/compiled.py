"""Compile a sharded module into one graph of local operators and collectives, without DTensors.

`module.compile(...)` and `torch.compile(module)` compile what the module computes, below its hooks, so weights that are
sharded over the batch's dim are gathered outside of the graph. AOTAutograd records the very Python that runs otherwise,
with all that makes DTensors compute right. The graph is a function of tensors; `structure` has the key of all else.
What cannot be a function of both is computed as it is, with a warning.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from layoutmap.adapters.torch.boundary import list_tensors, map_tensors
from layoutmap.adapters.torch.dynamo import (
    call_compiled,
    find_unsupported_operator,
    has_dynamic_shapes,
    is_full_graph,
    nonstrict_trace,
)
from layoutmap.adapters.torch.fsdp_units import Gathering
from layoutmap.adapters.torch.mesh_context import compute_on_mesh, here, mark_recording, summing_up
from layoutmap.adapters.torch.structure import Structure, find_change, is_constant
from layoutmap.core.errors import LayoutMapWarning, ScopeError, format_message
from layoutmap.engines.patches import set_temporarily
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.backward import AutogradFunction, Ctx
from layoutmap.engines.torch.dtensor_ops import has_shard, refuse_shard
from layoutmap.engines.torch.modes import leave_function_modes, skip_function_modes
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import reduce_placements
from layoutmap.engines.torch.specs import DTensorSpec, get_local, get_spec, make_dtensor, replace_placements
from layoutmap.engines.torch.storages import is_view_of_another
from layoutmap.engines.torch.trees import tree_leaves


def check_compilable(what: str = "a model", *, is_dynamic: bool) -> None:
    """Raise for simulated devices, which have no graph per device.

    Args:
        what: The name of what is compiled.
        is_dynamic: Whether shapes are to be dynamic.

    Raises:
        ScopeError: The devices are simulated, or shapes would be dynamic.
    """
    if simulation.is_simulated():
        raise ScopeError(
            f"{what} on simulated devices cannot be compiled",
            why="one process computes for all devices in turn, and a compiled graph is for one device",
            fix="start a process for each device, as with torchrun, or do not compile it",
        )
    if is_dynamic:
        raise ScopeError(
            "dynamic=True does not work for a sharded model",
            why="the sharding of a tensor depends on its shape",
            fix="leave dynamic=True out: each shape gets its own graph",
        )


@dataclass(frozen=True, eq=False)
class Compiler:
    """A function that compiles functions, with a key that identifies its settings.

    Attributes:
        key: Equal for compilers with the same settings.
        compile: Compiles a function of one argument.
        is_strict: Whether uncompilable code is an error (`fullgraph=True`).
        kept: Objects whose ids are in the key.
    """

    key: object
    compile: Callable[[Function], Function]
    is_strict: bool
    kept: object


def compiler_from_options(options: Mapping[str, Any]) -> Compiler:
    """Return a compiler that calls `torch.compile` with these options.

    Raises:
        ScopeError: The devices are simulated, or shapes would be dynamic.
    """
    check_compilable(is_dynamic=bool(options.get("dynamic")))
    key = tuple((name, id(value)) for name, value in options.items())
    given = {**options, "dynamic": False}  # DTensor hashes shapes, but symbolic sizes have no hash
    return Compiler(key, partial(torch.compile, **given), bool(options.get("fullgraph")), given)  # pyright: ignore[reportUnknownMemberType]


def reuse_compiler(compiler: Any) -> Compiler:
    """Return the compiler that `torch.compile` uses for the function that calls a module now.

    Args:
        compiler: What `stop_compiling` has returned.

    Raises:
        ScopeError: The devices are simulated, or shapes would be dynamic.
    """
    check_compilable(is_dynamic=has_dynamic_shapes())
    compiled = partial(partial, call_compiled, compiler)
    return Compiler(id(compiler), compiled, is_full_graph(compiler), compiler)


# Dynamo cannot trace DTensors and gathers, so give it one function of local tensors per module (decisions/0105).
class Compiled:
    """Run a module with graphs from torch.compile, or uncompiled if recording a graph fails.

    Args:
        forward: The module's `Forward`.
        compiler: What compiles it.
        graphs: What was compiled for modules of the same scope, by key.
        gather: What is gathered meanwhile; `None`: what the module gathers.
    """

    def __init__(
        self, forward: Any, compiler: Compiler, graphs: dict[Any, Any], gather: Gathering | None = None
    ) -> None:
        self._forward, self._compiler, self._graphs, self.gather = forward, compiler, graphs, gather
        self._gave_up = False

    def __call__(self, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> object:
        """Compute the module."""
        if self._gave_up:
            return self._forward.compute(args, kwargs)
        # The key contains all properties that Dynamo does not guard.
        call = _Call(self._forward, module, args, kwargs)
        key = (call.key, self._compiler.key)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = _CompiledGraphs(self._compiler, call.kept)
        result = graph(call)
        self._gave_up = call.was_recorded and bool(call.why_not)
        return result


class _CompiledGraphs:
    """Compiled graphs for one key, with their own code object, because Dynamo limits graphs per code object."""

    def __init__(self, compiler: Compiler, kept: list[object]) -> None:
        self._kept, self._is_strict = [*kept, compiler.kept], compiler.is_strict
        self._why_not = ""
        self._results: dict[object, object] = {}
        code = _compute_call.__code__.replace()
        function = types.FunctionType(code, _compute_call.__globals__, _compute_call.__name__)
        self._function = compiler.compile(function)

    def __call__(self, call: _Call) -> object:
        if not self._why_not:
            tensors = self._run(call)
            if not call.why_not:
                results = self._results.setdefault(call.inputs, call.results)
                found = _fill_missing_gradients(tensors)
                return map_tensors(lambda place: found[place.number], results, _TensorNumber)  # pyright: ignore[reportUnknownLambdaType]
            self._refuse(call)
        return call.compute()

    def _run(self, call: _Call) -> list[torch.Tensor]:
        try:
            if not call.why_not:
                with set_temporarily(here, "call", call), leave_function_modes():
                    return self._function(call.tensors)
        except Exception as error:
            if not call.why_not:
                operator = find_unsupported_operator(error)
                if not operator:
                    raise
                call.why_not = f"recording its gradient failed: {operator}"
        return []

    def _refuse(self, call: _Call) -> None:
        self._why_not = call.why_not
        what, inside = f"{call.name} cannot be compiled", "call compile() of modules inside of it"
        if self._is_strict:
            self._why_not = ""  # each call reports it again
            raise ScopeError(what, why=call.why_not, fix=f"{inside}, or leave fullgraph=True out")
        text = format_message(
            f"{what}, and runs as it is", {}, call.why_not, f"{inside}, or do not compile it"
        )
        warnings.warn(text, LayoutMapWarning, stacklevel=2)


@skip_function_modes
def _fill_missing_gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a graph's outputs so that in backward a DTensor without a gradient gets zeros."""
    places = [n for n, each in enumerate(tensors) if each.requires_grad and isinstance(each, DTensor)]
    if len(places) < 2 or not torch.is_grad_enabled():
        return tensors
    found = dict(zip(places, _WithZeros.apply(*(tensors[n] for n in places)), strict=True))
    return [found.get(n, each) for n, each in enumerate(tensors)]


class _WithZeros(AutogradFunction):
    @staticmethod
    def forward(ctx: Ctx, *tensors: torch.Tensor) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)  # otherwise torch creates zeros that are not DTensors
        ctx.forms = [(each.dtype, tuple(get_local(each).shape), get_spec(each)) for each in tensors]
        return tuple(make_dtensor(get_local(each), get_spec(each)) for each in tensors)

    @staticmethod
    @skip_function_modes
    def backward(ctx: Ctx, *upstream: torch.Tensor | None) -> object:
        return tuple(
            _make_zero_gradient(*form) if each is None else each
            for each, form in zip(upstream, ctx.forms, strict=True)
        )


def _make_zero_gradient(dtype: torch.dtype, shape: tuple[int, ...], spec: DTensorSpec) -> DTensor:
    """Return a zero gradient for a DTensor output that the loss does not depend on."""
    local = torch.zeros(shape, dtype=dtype, device=spec.mesh.device_type)
    return make_dtensor(local, replace_placements(spec, reduce_placements(spec.placements), dtype))


def _compute_call(tensors: list[torch.Tensor]) -> object:
    return _record_call(tensors)


@nonstrict_trace
def _record_call(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return here.call.record(tensors)


class _Call:
    """One call of a module.

    Attributes:
        name: What is called.
        key: All that decides about the graph beside the tensors.
        kept: What the key names by its id.
        tensors: Parameters, buffers, and the tensors among the arguments, each once.
        inputs: What of the tensors may decide about the form of the results.
        results: What is returned, with places for tensors, once it was recorded.
        was_recorded: Whether that was tried.
        why_not: Why it cannot be recorded.
    """

    def __init__(self, forward: Any, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        self._forward, self._module, self._args = forward, module, (args, kwargs)
        self._is_odd = here.is_odd
        self._structure = structure = Structure(module)
        self.name, self.kept, self.why_not = type(module).__name__, structure.kept, ""
        self.results: object = None
        self.was_recorded = False
        form = self._describe_form(self._args)
        self.key = (*structure.parts, form, self._is_odd, id(forward.context))
        self.tensors = structure.tensors
        given = list_tensors(self._args)
        if has_shard(given):
            self.why_not = "an argument is a shard, which the graph would take for the global tensor"
        self.inputs = (torch.is_grad_enabled(), *((each.shape, each.requires_grad) for each in given))

    def _describe_form(self, value: Any) -> object:
        """Return a hashable description of an argument, with numbers for its tensors."""
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, torch.Tensor):
            return self._structure.number(value)
        if kind in (list, tuple):
            return (kind, *map(self._describe_form, value))
        if kind is dict:
            return (kind, *((name, self._describe_form(each)) for name, each in value.items()))
        if is_constant(value):
            return kind, str(value)  # pyright: ignore[reportUnknownVariableType]
        self.why_not = f"an argument is a {kind.__name__}, of which a graph knows nothing"
        return kind  # pyright: ignore[reportUnknownVariableType]

    def compute(self) -> object:
        """Compute the call uncompiled."""
        return self._forward.compute(*self._args)

    def record(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Compute the call with traced tensors in place of the stored ones, and return all tensors of the result."""
        if self.why_not:  # raise now, because Dynamo would fall back to eager code that has partly run
            raise RuntimeError(self.why_not)
        self.was_recorded = True
        if not any(map(_is_traced, tensors)):  # without traced tensors, the backend did not trace the call
            with self._swap_tensors(tensors) as given:
                return self._compute_outputs(given)
        try:
            with (
                _restore_attributes(self._structure),
                self._swap_tensors(tensors) as given,
                _RefusedConstants(),
            ):
                found = self._compute_outputs(given)
                name = self._find_assigned(given) or find_change(self._structure, Structure(self._module))
        except Exception as error:
            first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            self.why_not = f"recording it failed: {first_line}"
            raise
        if name:
            self.why_not = f"its forward changes {name}"
            raise RuntimeError(self.why_not)
        return found

    @contextmanager
    def _swap_tensors(self, tensors: list[torch.Tensor]) -> Generator[dict[int, torch.Tensor]]:
        """Put these tensors into the modules in place of the stored ones, on the mesh, until the block ends."""
        given = {id(old): new for old, new in zip(self.tensors, tensors, strict=True)}
        context = self._forward.context
        try:
            for members, name, tensor in self._structure.places:
                members[name] = given[id(tensor)]
            with leave_function_modes(), mark_recording(), compute_on_mesh(context), summing_up(self._is_odd):
                yield given
        finally:
            for members, name, tensor in self._structure.places:
                if members.get(name) is given[id(tensor)]:
                    members[name] = tensor

    def _find_assigned(self, given: Mapping[int, torch.Tensor]) -> str:
        """Return the name of a tensor that the forward replaced in its module, or an empty text."""
        places = self._structure.places
        return next((name for members, name, old in places if members.get(name) is not given[id(old)]), "")

    def _compute_outputs(self, given: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = map_tensors(lambda tensor: given[id(tensor)], self._args)
        result = self._forward.compute(args, kwargs)
        seen = {id(each) for each in given.values()}
        found: list[torch.Tensor] = []
        for each in list_tensors(result):
            refuse_shard("an output of a graph", each)
            # torch.compile may return views of shared memory, which DTensors do not support, so clone them.
            found.append(each.clone() if is_view_of_another(each) or id(each) in seen else each)
            seen.add(id(each))
        numbers = iter(range(len(found)))
        self.results = map_tensors(lambda _: _TensorNumber(next(numbers)), result)
        return found


@contextmanager
def _restore_attributes(structure: Structure) -> Generator[None]:
    """Restore the attributes of modules, and the contents of their lists and dicts, when the block ends."""
    held = [(members, dict(members)) for members in structure.members]
    inner = [
        (each, each.copy()) for _, known in held for each in known.values() if type(each) in (list, dict)
    ]
    try:
        yield
    finally:
        for each, known in (*held, *inner):
            each.clear()
            (each.update if isinstance(each, dict) else each.extend)(known)  # pyright: ignore[reportUnknownMemberType]


def _is_traced(tensor: torch.Tensor) -> bool:
    """Return whether a tensor belongs to a graph that is being traced, and so has no values."""
    local = get_local(tensor) if isinstance(tensor, DTensor) else tensor
    return type(local) not in (torch.Tensor, torch.nn.Parameter)


class _RefusedConstants(TorchFunctionMode):
    """Raise for tensors with values, which a graph would store as constants."""

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not _is_traced(leaf):
                raise RuntimeError(
                    f"a tensor of shape {tuple(leaf.shape)} is no argument, and no attribute of a module"
                )
        return func(*args, **(kwargs or {}))


class _TensorNumber:
    """The number of a tensor in a result."""

    def __init__(self, number: int) -> None:
        self.number = number
