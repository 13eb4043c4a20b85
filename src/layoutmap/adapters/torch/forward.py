"""Replace the `forward` of sharded modules, so that they run on the mesh with unsharded inputs and outputs.

Each module of a sharded model has a `forward` of its own, a `ShardedForward`, in front of that of its class. The
outermost one that is called takes the call to the mesh. Copies of a model are sharded, too, but an unpickled model is
unsharded.
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
from layoutmap.adapters.torch.boundary import list_tensors, reduce_partial_sums, shard_inputs, unshard_tensors
from layoutmap.adapters.torch.compiled import (
    CompiledModule,
    make_compiler_from_dynamo,
    make_compiler_from_options,
)
from layoutmap.adapters.torch.dynamo import disable_dynamo_in_thread, restore_dynamo, skip_compiling
from layoutmap.adapters.torch.experts import compute_experts, is_layer_of_experts
from layoutmap.adapters.torch.fsdp_own import ModelCallState
from layoutmap.adapters.torch.fsdp_units import WeightGroup, gather_weights_temporarily
from layoutmap.adapters.torch.gradient_hooks import GradientHooks
from layoutmap.adapters.torch.graph_errors import (
    EXPORT_ATTRIBUTES,
    check_not_transformed_or_traced,
    make_untraceable_module_error,
)
from layoutmap.adapters.torch.mesh_context import (
    compute_on_mesh,
    is_in_model_call,
    reduce_partial_sums_early,
    thread_state,
)
from layoutmap.adapters.torch.module_results import ModuleResultRelayout
from layoutmap.adapters.torch.own_rows import RowsOfThisProcess, has_own_rows_per_process
from layoutmap.adapters.torch.process_checks import ProcessChecks
from layoutmap.adapters.torch.slow_calls import SlowCallNotice
from layoutmap.core.errors import PlanError
from layoutmap.core.layout import Layout
from layoutmap.engines.patches import set_attribute_temporarily
from layoutmap.engines.torch.changes import keep_patches_while_alive
from layoutmap.engines.torch.dtensor_ops import is_batch_divisible
from layoutmap.engines.torch.operators import Args, Function, Kwargs

_ATTRIBUTE = "forward"
_NO_OUTER_GRAPH = "a module in layouts is a graph of its own: call torch.compile(module) or module.compile()"


class ShardedForward:
    """Replace a module's `forward`. The outermost call enters the mesh, and converts inputs and outputs.

    Args:
        module: The module.
        path: Its path in the model; empty for the model itself.
        context: The scope.
        group: The weights that are gathered while it computes; `None`: it gathers no weights.
        why_valueless: Why the model has no values and cannot be called; empty if it can.
        graphs: The compiled graphs of all modules of the scope, by key.
        layouts: The layouts of the model's tensors, by their ids.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        path: str,
        context: ScopeContext,
        *,
        group: WeightGroup | None = None,
        why_valueless: str = "",
        graphs: dict[object, Any] | None = None,
        layouts: Mapping[int, Layout] | None = None,
    ) -> None:
        # A reference cycle would keep the weights until garbage collection, so reference the module weakly.
        self._module = weakref.ref(module)
        self._original = _find_forward_set_by_user(module)
        self.path = path
        self.context = context
        self.group = group
        self.why_valueless = why_valueless
        parameters = module.named_parameters(recurse=False) if layouts else ()
        self.weights = {n: layouts[id(each)] for n, each in parameters if layouts and id(each) in layouts}
        self._results = ModuleResultRelayout(module, path, context, layouts or {})
        self._gradient_hooks: GradientHooks | None = None
        self._process_checks = ProcessChecks(context)
        self._has_warned = False
        self._slow_calls = SlowCallNotice()
        self.compiled: CompiledModule | None = None
        self._graphs = {} if graphs is None else graphs
        self._compiled_by_caller: dict[object, Mapping[ShardedForward, CompiledModule]] = {}

    def install_in_module(self) -> None:
        """Install this object as the module's `forward`."""
        compile_module = functools.partial(_compile_module, self)
        vars(self._get_module()).update({_ATTRIBUTE: self, "compile": compile_module})
        keep_patches_while_alive(self)  # torch stays patched while a sharded model exists

    def compile_at_next_call(self, options: Mapping[str, object]) -> None:
        """Compile the module at its next call. If modules in it gather their own weights, compile these instead.

        Raises:
            ScopeError: The devices are simulated, or shapes would be dynamic.
        """
        compiler = make_compiler_from_options(options)
        for each in self._list_gathering_forwards() or [self]:
            each.compiled = CompiledModule(
                each, compiler, self._graphs, each.merge_weight_groups_of_submodules()
            )

    def _list_gathering_forwards(self) -> list[ShardedForward]:
        """Return the outermost `ShardedForward`s, of this module or inside it, that have `frees_weights_after_call`."""
        gathering_forwards: list[ShardedForward] = []
        nested_forwards: set[ShardedForward] = set()
        for each in self.list_forwards():  # outer modules come first, so skip those inside them
            if each.frees_weights_after_call and each not in nested_forwards:
                gathering_forwards.append(each)
                nested_forwards.update(each.list_forwards())
        return gathering_forwards

    @property
    def frees_weights_after_call(self) -> bool:
        """Whether a call of the model gathers this module's weights when it reaches the module, and then frees them."""
        return self.group is not None and self.group.gathers_in_each_call and not self.group.is_outermost

    def merge_weight_groups_of_submodules(self) -> WeightGroup | None:
        """Return one group of weights for this module and its submodules, or None if submodules have no groups."""
        forwards = [each for each in self.list_forwards() if each is self or each.frees_weights_after_call]
        weight_groups = [each.group for each in forwards if each.group is not None]
        if forwards == [self] or not weight_groups:
            return None
        first = weight_groups[0]
        call, is_kept = (ModelCallState(), False) if first.is_outermost else (first.model_call, first.is_kept)
        weights = [weight for each in weight_groups for weight in each.weights]
        return WeightGroup(weights, call, first.policy, is_kept, first.is_outermost)

    def list_forwards(self) -> list[ShardedForward]:
        """Return the forwards of this module and of its submodules, parents first."""
        return [each for module in self._get_module().modules() if (each := find_forward(module))]

    def _get_modules_compiled_with(self, compiler: object) -> Mapping[ShardedForward, CompiledModule]:
        """Return a dict from `ShardedForward`s to modules compiled with the compiler of this module's caller."""
        forwards = self.list_forwards()
        key = (compiler, *forwards)
        if key not in self._compiled_by_caller:
            outer, blocks = make_compiler_from_dynamo(compiler), self._list_gathering_forwards()
            compiled: dict[ShardedForward, CompiledModule] = {}
            # a full graph cannot gather weights block by block, so compile the whole module
            if outer.is_strict and blocks not in ([], [self]):
                blocks = [self]
            for each in blocks or [self]:
                compiled[each] = CompiledModule(
                    each, outer, self._graphs, each.merge_weight_groups_of_submodules()
                )
            self._compiled_by_caller[key] = compiled
        return self._compiled_by_caller[key]

    def make_structure_key(self) -> object:
        """Return a key that is equal for forwards that compile to the same graph for one module."""
        return id(self._original), self.output_layout, id(self.context)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the module. Unsharded inputs give unsharded outputs, and DTensor inputs give DTensor outputs.

        Raises:
            PlanError: The model has no values.
            LayoutError: A rule of `LayoutMap.activations` does not fit the module's output.
            EngineError: It is called inside of a transform of `torch.func`.
        """
        if self.why_valueless:
            raise PlanError(
                f"{type(self._get_module()).__name__}: {self.why_valueless}",
                why="the tensors of this model have shapes and no values",
                fix="build it again in a scope or with layout_map.build",
            )
        if torch.compiler.is_dynamo_compiling():
            return self._call_outside_graph(args, kwargs)
        return self._call_without_dynamo(args, kwargs)

    @torch.compiler.disable(recursive=False, reason=_NO_OUTER_GRAPH)  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
    def _call_outside_graph(self, args: Args, kwargs: Kwargs) -> object:
        """Call the module outside the graph of a compiled function that calls it."""
        return self._call_without_dynamo(args, kwargs)

    def _call_without_dynamo(self, args: Args, kwargs: Kwargs) -> object:
        """Call the module with Dynamo off.

        If a compiled function is the caller, compile this module or its blocks with that function's compiler.
        """
        compiler = disable_dynamo_in_thread()
        if compiler is None:
            return self._call_as_outer_or_inner_module(args, kwargs)
        try:
            with set_attribute_temporarily(
                thread_state, "compiled", self._get_modules_compiled_with(compiler)
            ):
                return self._call_as_outer_or_inner_module(args, kwargs)
        finally:
            restore_dynamo(compiler)

    def _call_as_outer_or_inner_module(self, args: Args, kwargs: Kwargs) -> object:
        call = self._gather_and_compute if is_in_model_call() else self._call_on_mesh
        return call(args, kwargs)

    def _call_on_mesh(self, args: Args, kwargs: Kwargs) -> object:
        """Call the outermost module: check it, distribute the inputs, compute on the mesh, and convert the outputs."""
        check_not_transformed_or_traced(self._get_module())
        if self.context.spans_processes:
            self._process_checks.check_program_of_module(
                self._get_module(), (each._original for each in self.list_forwards())
            )
        if torch.is_grad_enabled():
            hooks = self._gradient_hooks
            if hooks is None or not hooks.has_same_submodules(self._get_module()):
                hooks = self._gradient_hooks = self._make_gradient_hooks()
            hooks.install_missing_hooks()
        is_unsharded = not any(isinstance(tensor, DTensor) for tensor in list_tensors((args, kwargs)))
        if torch.is_grad_enabled() and self._get_module().training:
            self.context.warn_of_idle_dims(
                type(self._get_module()).__name__, _find_sharded_input_dims((args, kwargs))
            )
        takes_own_rows = is_unsharded and has_own_rows_per_process(self.context)
        own_rows = RowsOfThisProcess((args, kwargs), self.context) if takes_own_rows else None
        with (
            self._slow_calls.time_call(self.context.options.progress),
            self._process_checks.compare_call_between_processes(args, kwargs, own_rows),
            compute_on_mesh(self.context),
        ):
            if own_rows is not None:
                args, kwargs = own_rows.convert_rows_to_dtensors((args, kwargs))
            args, kwargs = shard_inputs((args, kwargs), self.context)
            self._warn_of_uneven_batch()
            with reduce_partial_sums_early(not all(map(is_batch_divisible, list_tensors((args, kwargs))))):
                result = self._gather_and_compute(args, kwargs)
        if own_rows is not None:
            return own_rows.extract_outputs_for_own_rows(result)
        return unshard_tensors(result) if is_unsharded else reduce_partial_sums(result)

    def _warn_of_uneven_batch(self) -> None:
        """Warn once if a model is trained and none of its batches so far could be split evenly."""
        batches = self.context.policy.batches
        if not batches or True in batches or self._has_warned or not torch.is_grad_enabled():
            return
        self._has_warned = True
        self.context.policy.warn_of_uneven_batch(type(self._get_module()).__name__, "torch")

    def __getattr__(self, name: str) -> object:
        if name in EXPORT_ATTRIBUTES:
            raise make_untraceable_module_error(self._get_module(), EXPORT_ATTRIBUTES[name])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _make_gradient_hooks(self) -> GradientHooks:
        """Return gradient hooks for a model that starts to train or has new submodules."""
        module = self._get_module()
        if self.context.spans_processes:
            self._process_checks.check_equal_unsharded_parameters(module)
        layouts = {
            id(each): (forward.path, forward.weights)
            for each in module.modules()
            if (forward := find_forward(each))
        }
        return GradientHooks(module, layouts)

    def _gather_and_compute(self, args: Args, kwargs: Kwargs) -> object:
        """Gather the weights of the module's group, if there is one, and return the module's result."""
        compiled = None if thread_state.is_recording else thread_state.compiled.get(self, self.compiled)
        group = self.group if compiled is None or compiled.group is None else compiled.group
        if group is None:
            return self._run_graph_or_python_forward(compiled, args, kwargs)
        args, kwargs = group.cast_inputs(args, kwargs)
        with gather_weights_temporarily(group, self.context, list_tensors((args, kwargs))):
            return group.cast_output(self._run_graph_or_python_forward(compiled, args, kwargs))

    def _run_graph_or_python_forward(
        self, compiled: CompiledModule | None, args: Args, kwargs: Kwargs
    ) -> object:
        if compiled is not None:
            return compiled(self._get_module(), args, kwargs)
        return self.run_python_forward(args, kwargs)

    def run_python_forward(self, args: Args, kwargs: Kwargs) -> object:
        """Run the module's Python `forward` on the mesh, and return its output in the layout of its rule."""
        module = self._get_module()
        forward = self._original or _bind_class_forward(module)
        if not kwargs and is_layer_of_experts(module) and not self._has_inner_code_of_user():
            forward = functools.partial(compute_experts, module, forward)
        result = forward(*args, **kwargs)  # call `forward`, because `module()` would run hooks twice
        return self._results.relayout_results(module, result)

    @property
    def output_layout(self) -> Layout | None:
        """The layout that a rule gives the module's output, or None if no rule does."""
        return self._results.output_layout

    def _has_inner_code_of_user(self) -> bool:
        """Return whether a `forward` here or inside is the user's, or a rule lays out the output of an inner module."""
        return any(
            _find_forward_set_by_user(each) is not None for each in self._get_module().modules()
        ) or any(each is not self and each.output_layout is not None for each in self.list_forwards())

    def _get_module(self) -> torch.nn.Module:
        module = self._module()
        assert module is not None, "a forward is called through its module"
        return module

    # -- attributes that a bound method has

    __name__ = _ATTRIBUTE

    @property
    def __signature__(self) -> inspect.Signature:
        module = self._get_module()
        return inspect.signature(self._original or _bind_class_forward(module))

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        module = self._get_module()
        copied = copy.copy(self)
        # If the deep copy also copies the module, this forward belongs to that copy, otherwise to the same module.
        copied._module = weakref.ref(memo.get(id(module), module))
        copied._original = copy.deepcopy(self._original, memo)
        copied.group = copy.deepcopy(self.group, memo)
        copied._gradient_hooks = copied.compiled = None
        copied._process_checks = ProcessChecks(self.context)
        copied._compiled_by_caller = {}
        return copied

    def __copy__(self) -> ShardedForward:
        copied = object.__new__(ShardedForward)
        vars(copied).update(vars(self))
        return copied

    def __reduce__(self) -> tuple[object, ...]:
        # A pickle has no mesh, so unpickling restores the class's forward.
        return _bind_class_forward, (self._get_module(),)


for _name in ("__call__", "_call_outside_graph", "_call_without_dynamo"):
    skip_compiling(getattr(ShardedForward, _name))


def _bind_class_forward(module: torch.nn.Module) -> Function:
    """Return the `forward` of a module's class, bound to the module."""
    return functools.partial(type(module).forward, module)


def _compile_module(forward: Any, **options: Any) -> None:
    """Replace `module.compile`. An unpickled module is unsharded, so for it call the original `compile` of torch."""
    if not isinstance(forward, ShardedForward):
        module: torch.nn.Module = forward.args[0]
        return type(module).compile(module, **options)  # pyright: ignore[reportUnknownMemberType]
    return forward.compile_at_next_call(options)


def _find_forward_set_by_user(module: torch.nn.Module) -> Any:
    """Return the `forward` that the user's code set on a module, or None if it has only that of its class."""
    forward = vars(module).get(_ATTRIBUTE)
    return forward._original if isinstance(forward, ShardedForward) else forward  # pyright: ignore[reportPrivateUsage]


def find_forward(module: torch.nn.Module) -> ShardedForward | None:
    """Return the `ShardedForward` that a scope has set on a module, or None."""
    forward = vars(module).get(_ATTRIBUTE)
    return forward if isinstance(forward, ShardedForward) else None


def is_valueless(module: torch.nn.Module) -> bool:
    """Return whether a model has no values, because it was only planned or because its scope failed."""
    forward = find_forward(module)
    return forward is not None and bool(forward.why_valueless)


def _find_sharded_input_dims(values: object) -> set[str]:
    """Return the names of the mesh dims over which the user's code has sharded a module's inputs."""
    dims: set[str] = set()
    for tensor in list_tensors(values, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        placements = zip(names, tensor.placements, strict=True)
        dims.update(name for name, placement in placements if placement.is_shard())
    return dims
