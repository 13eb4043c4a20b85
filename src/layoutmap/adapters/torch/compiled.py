"""Compile a sharded module into one graph of local operators and collectives, without DTensors.

`module.compile(...)` and `torch.compile(module)` compile what the module computes, below its hooks, so weights that are
sharded over the batch's dim are gathered outside of the graph. AOTAutograd records the Python code that would run
uncompiled, so corrections of DTensors are in the graph. The graph is a function of tensors; `structure` has the key of
all else. A module whose result depends on anything else runs uncompiled, with a warning.
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
    call_with_dynamo_compiler,
    find_unsupported_operator_message,
    is_compiling_dynamic_shapes,
    needs_full_graph,
    nonstrict_trace,
)
from layoutmap.adapters.torch.fsdp_units import WeightGroup
from layoutmap.adapters.torch.mesh_context import (
    compute_on_mesh,
    mark_graph_recording_temporarily,
    reduce_partial_sums_early,
    thread_state,
)
from layoutmap.adapters.torch.structure import ModuleStructure, find_changed_attribute, is_graph_constant
from layoutmap.core.errors import LayoutMapWarning, ScopeError, format_message
from layoutmap.engines.patches import set_attribute_temporarily
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.backward import Ctx, TypedAutogradFunction
from layoutmap.engines.torch.dtensor_ops import check_value_is_not_shard, has_shard
from layoutmap.engines.torch.modes import skip_function_modes, suspend_function_modes
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import replace_partial_placements
from layoutmap.engines.torch.specs import (
    DTensorSpec,
    copy_spec_with_placements,
    get_local,
    get_spec,
    make_dtensor,
)
from layoutmap.engines.torch.storages import is_view_of_another
from layoutmap.engines.torch.trees import tree_leaves


def check_can_be_compiled(subject: str = "a model", *, is_dynamic: bool) -> None:
    """Raise if devices are simulated, because a compiled graph is for one device, or if shapes would be dynamic.

    Args:
        subject: The name in the message of the thing that would be compiled.
        is_dynamic: Whether shapes are to be dynamic.
    """
    if simulation.is_simulated():
        raise ScopeError(
            f"{subject} on simulated devices cannot be compiled",
            why="one process computes for all devices in turn, and a compiled graph is for one device",
            fix="start a process for each device, as with torchrun, or do not compile it",
        )
    if is_dynamic:
        raise ScopeError(
            "torch.compile(dynamic=True) does not work for a sharded model",
            why="the sharding of a tensor depends on its shape",
            fix="leave dynamic=True out: each shape gets its own graph",
        )


@dataclass(frozen=True, eq=False)
class Compiler:
    """A compiling function, such as `torch.compile` with options, and a key that identifies its settings.

    Attributes:
        key: Equal for compilers with the same settings.
        compile: Compiles a function of one argument.
        is_strict: Whether uncompilable code is an error (`fullgraph=True`).
        kept_objects: Objects whose ids are in the key. They must stay alive, because ids are reused.
    """

    key: object
    compile: Callable[[Function], Function]
    is_strict: bool
    kept_objects: object


def make_compiler_from_options(options: Mapping[str, Any]) -> Compiler:
    """Return a compiler that calls `torch.compile` with these options.

    Raises:
        ScopeError: The devices are simulated, or shapes would be dynamic.
    """
    check_can_be_compiled(is_dynamic=bool(options.get("dynamic")))
    key = tuple((name, id(value)) for name, value in options.items())
    used = {**options, "dynamic": False}  # symbolic sizes have no hash, which DTensor needs
    return Compiler(key, partial(torch.compile, **used), bool(options.get("fullgraph")), used)  # pyright: ignore[reportUnknownMemberType]


def make_compiler_from_dynamo(dynamo_compiler: Any) -> Compiler:
    """Return a `Compiler` that compiles like Dynamo's compiler of the function that calls a module.

    Args:
        dynamo_compiler: The result of `disable_dynamo_in_thread`.

    Raises:
        ScopeError: The devices are simulated, or shapes would be dynamic.
    """
    check_can_be_compiled(is_dynamic=is_compiling_dynamic_shapes())
    compiled = partial(partial, call_with_dynamo_compiler, dynamo_compiler)
    return Compiler(id(dynamo_compiler), compiled, needs_full_graph(dynamo_compiler), dynamo_compiler)


# Dynamo cannot trace DTensors and gathers, so give it one function of local tensors per module (decisions/0105).
class CompiledModule:
    """Run a module with graphs from torch.compile, or uncompiled if recording a graph fails.

    Args:
        forward: The module's `ShardedForward`.
        compiler: The compiler.
        graphs: Graphs of all modules of the scope, by key.
        group: Weights to gather during a compiled call; `None`: those that the module gathers itself.
    """

    def __init__(
        self, forward: Any, compiler: Compiler, graphs: dict[Any, Any], group: WeightGroup | None = None
    ) -> None:
        self._forward, self._compiler, self._graphs, self.group = forward, compiler, graphs, group
        self._runs_uncompiled = False

    def __call__(self, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> object:
        """Return the module's result for these arguments."""
        if self._runs_uncompiled:
            return self._forward.run_python_forward(args, kwargs)
        # Dynamo does not guard all properties that a graph depends on, so the key contains the rest.
        call = _ModuleCall(self._forward, module, args, kwargs)
        key = (call.key, self._compiler.key)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = _CompiledGraphs(self._compiler, call.kept_objects)
        result = graph(call)
        self._runs_uncompiled = call.was_recorded and bool(call.why_not)
        return result


class _CompiledGraphs:
    """Compiled graphs for one key. Dynamo limits the graphs of a code object, so each key gets its own code object."""

    def __init__(self, compiler: Compiler, kept_objects: list[object]) -> None:
        self._kept_objects, self._is_strict = [*kept_objects, compiler.kept_objects], compiler.is_strict
        self._why_not = ""
        self._results: dict[object, object] = {}
        code = _run_current_call.__code__.replace()
        function = types.FunctionType(code, _run_current_call.__globals__, _run_current_call.__name__)
        self._function = compiler.compile(function)

    def __call__(self, call: _ModuleCall) -> object:
        if not self._why_not:
            tensors = self._run_graph(call)
            if not call.why_not:
                results = self._results.setdefault(call.inputs, call.results)
                outputs = _attach_zero_gradients(tensors)
                return map_tensors(lambda at: outputs[at.position], results, _TensorPosition)  # pyright: ignore[reportUnknownLambdaType]
            self._report_uncompilable_call(call)
        return call.compute_without_graph()

    def _run_graph(self, call: _ModuleCall) -> list[torch.Tensor]:
        """Run the compiled function, and return its tensors. If that fails, set `call.why_not` to the reason."""
        try:
            if not call.why_not:
                with set_attribute_temporarily(thread_state, "call", call), suspend_function_modes():
                    return self._function(call.tensors)
        except Exception as error:
            if not call.why_not:
                operator = find_unsupported_operator_message(error)
                if not operator:
                    raise
                call.why_not = f"recording its gradient failed: {operator}"
        return []

    def _report_uncompilable_call(self, call: _ModuleCall) -> None:
        """Warn that a call cannot be compiled, or raise if the compiler is strict."""
        self._why_not = call.why_not
        subject, advice = f"{call.name} cannot be compiled", "compile modules inside of it"
        if self._is_strict:
            self._why_not = ""  # forget the reason, so that each later call raises, too
            raise ScopeError(subject, why=call.why_not, fix=f"{advice}, or leave fullgraph=True out")
        text = format_message(
            f"{subject}, and runs eagerly", {}, call.why_not, f"{advice}, or do not compile it"
        )
        warnings.warn(text, LayoutMapWarning, stacklevel=2)


@skip_function_modes
def _attach_zero_gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a graph's outputs, such that each DTensor that the loss does not use gets a gradient of zeros."""
    positions = [n for n, each in enumerate(tensors) if each.requires_grad and isinstance(each, DTensor)]
    if len(positions) < 2 or not torch.is_grad_enabled():
        return tensors
    zeroed = dict(zip(positions, _ZeroGradientFunction.apply(*(tensors[n] for n in positions)), strict=True))
    return [zeroed.get(n, each) for n, each in enumerate(tensors)]


class _ZeroGradientFunction(TypedAutogradFunction):
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
    return make_dtensor(
        local, copy_spec_with_placements(spec, replace_partial_placements(spec.placements), dtype)
    )


def _run_current_call(tensors: list[torch.Tensor]) -> object:
    """Call `_trace_current_call`, which Dynamo does not look into. Each key compiles a copy of this function."""
    return _trace_current_call(tensors)


@nonstrict_trace
def _trace_current_call(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return thread_state.call.compute_on_traced_tensors(tensors)


class _ModuleCall:
    """One call of a module, as a function of tensors and a key of everything else that determines its graph.

    Attributes:
        name: The name of the module's class.
        key: Everything that determines the graph except the tensors.
        kept_objects: Objects whose ids are in the key.
        tensors: Parameters, buffers, and the tensors among the arguments, each once.
        inputs: Properties of the tensors that may determine the nesting of the results.
        results: The result with a `_TensorPosition` in place of each tensor, after the call was recorded.
        was_recorded: Whether a recording was tried.
        why_not: Why the call cannot be recorded, or an empty text.
    """

    def __init__(self, forward: Any, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        self._forward, self._module, self._args = forward, module, (args, kwargs)
        self._is_uneven = thread_state.is_uneven
        self._structure = structure = ModuleStructure(module)
        self.name, self.kept_objects, self.why_not = type(module).__name__, structure.kept_objects, ""
        self.results: object = None
        self.was_recorded = False
        form = self._describe_argument(self._args)
        self.key = (*structure.parts, form, self._is_uneven, id(forward.context))
        self.tensors = structure.tensors
        arguments = list_tensors(self._args)
        if has_shard(arguments):
            self.why_not = "an argument is a shard, which the graph would take for the global tensor"
        self.inputs = (torch.is_grad_enabled(), *((each.shape, each.requires_grad) for each in arguments))

    def _describe_argument(self, value: Any) -> object:
        """Return a hashable description of an argument, with the index in `tensors` in place of each tensor."""
        value_type = type(value)  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, torch.Tensor):
            return self._structure.get_or_add_tensor_index(value)
        if value_type in (list, tuple):
            return (value_type, *map(self._describe_argument, value))
        if value_type is dict:
            return (value_type, *((name, self._describe_argument(each)) for name, each in value.items()))
        if is_graph_constant(value):
            return value_type, str(value)  # pyright: ignore[reportUnknownVariableType]
        self.why_not = f"an argument is a {value_type.__name__}, which cannot be a constant of a graph"
        return value_type  # pyright: ignore[reportUnknownVariableType]

    def compute_without_graph(self) -> object:
        """Return the result of the call without a graph."""
        return self._forward.run_python_forward(*self._args)

    def compute_on_traced_tensors(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Compute the call with traced tensors in place of the stored ones, and return all tensors of the result."""
        # Raise before any operation runs, because after a later error Dynamo would run them again, eagerly.
        if self.why_not:
            raise RuntimeError(self.why_not)
        self.was_recorded = True
        if not any(map(_is_traced, tensors)):  # the backend does not trace the call, so constants are allowed
            with self._swap_tensors_temporarily(tensors) as new_tensors:
                return self._compute_outputs(new_tensors)
        try:
            with (
                _restore_attributes_afterwards(self._structure),
                self._swap_tensors_temporarily(tensors) as new_tensors,
                _ConstantTensorCheck(),
            ):
                outputs = self._compute_outputs(new_tensors)
                after = ModuleStructure(self._module)
                name = self._find_reassigned_name(new_tensors) or find_changed_attribute(
                    self._structure, after
                )
        except Exception as error:
            first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            self.why_not = f"recording the graph failed: {first_line}"
            raise
        if name:
            self.why_not = f"its forward changes {name}"
            raise RuntimeError(self.why_not)
        return outputs

    @contextmanager
    def _swap_tensors_temporarily(self, tensors: list[torch.Tensor]) -> Generator[dict[int, torch.Tensor]]:
        """Use new tensors in the modules, on the mesh, until the block ends. Yield a dict from old ids to them."""
        new_tensors = {id(old): new for old, new in zip(self.tensors, tensors, strict=True)}
        context = self._forward.context
        try:
            for members, name, tensor in self._structure.slots:
                members[name] = new_tensors[id(tensor)]
            reduction = reduce_partial_sums_early(self._is_uneven)
            with (
                suspend_function_modes(),
                mark_graph_recording_temporarily(),
                compute_on_mesh(context),
                reduction,
            ):
                yield new_tensors
        finally:
            for members, name, tensor in self._structure.slots:
                if members.get(name) is new_tensors[id(tensor)]:
                    members[name] = tensor

    def _find_reassigned_name(self, new_tensors: Mapping[int, torch.Tensor]) -> str:
        """Return the name of an attribute to which the forward assigned a different tensor, or an empty text."""
        slots = self._structure.slots
        return next((name for at, name, old in slots if at.get(name) is not new_tensors[id(old)]), "")

    def _compute_outputs(self, new_tensors: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Run the forward, return the tensors of its result, and store the rest of the result in `results`."""
        args, kwargs = map_tensors(lambda tensor: new_tensors[id(tensor)], self._args)
        result = self._forward.run_python_forward(args, kwargs)
        seen = {id(each) for each in new_tensors.values()}
        outputs: list[torch.Tensor] = []
        for each in list_tensors(result):
            check_value_is_not_shard("an output of a graph", each)
            # torch.compile may return views of shared memory, which DTensors do not support, so clone them.
            outputs.append(each.clone() if is_view_of_another(each) or id(each) in seen else each)
            seen.add(id(each))
        positions = iter(range(len(outputs)))
        self.results = map_tensors(lambda _: _TensorPosition(next(positions)), result)
        return outputs


@contextmanager
def _restore_attributes_afterwards(structure: ModuleStructure) -> Generator[None]:
    """Restore the attributes of modules, and the contents of their lists and dicts, when the block ends."""
    saved_dicts = [(attributes, dict(attributes)) for attributes in structure.attribute_dicts]
    values = [each for _, copied in saved_dicts for each in copied.values()]
    saved_containers = [(each, each.copy()) for each in values if type(each) in (list, dict)]
    try:
        yield
    finally:
        for each, copied in (*saved_dicts, *saved_containers):
            each.clear()
            (each.update if isinstance(each, dict) else each.extend)(copied)  # pyright: ignore[reportUnknownMemberType]


def _is_traced(tensor: torch.Tensor) -> bool:
    """Return whether a tensor belongs to a graph that is being traced, so that it has no values."""
    local = get_local(tensor) if isinstance(tensor, DTensor) else tensor
    return type(local) not in (torch.Tensor, torch.nn.Parameter)


class _ConstantTensorCheck(TorchFunctionMode):
    """Raise for tensors with values, which a graph would store as constants."""

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not _is_traced(leaf):
                raise RuntimeError(
                    f"a tensor of shape {tuple(leaf.shape)} is neither an argument nor an attribute of a module: "
                    "store it by register_buffer"
                )
        return func(*args, **(kwargs or {}))


class _TensorPosition:
    """Placeholder for a tensor in a result, with the tensor's position among the outputs of the graph."""

    def __init__(self, position: int) -> None:
        self.position = position
