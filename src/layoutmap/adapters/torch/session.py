"""Build modules without values in a scope, then compute each tensor in its layout.

defer        a tape defers large tensors, and hooks report modules and optimizers that are created in the scope
describe     list the parameters and buffers of the models that contain these modules
materialize  ask the scope for all layouts at once, then compute deferred tensors and relayout existing ones

The file is long, since all ways of torch to create a tensor or a module lead to this class.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from layoutmap.adapters.current import activate_session, get_current_session, is_session_active
from layoutmap.adapters.protocol import ScopeContext
from layoutmap.adapters.torch import module_hooks
from layoutmap.adapters.torch.forward import ShardedForward, find_forward
from layoutmap.adapters.torch.from_pretrained import FromPretrainedPatches
from layoutmap.adapters.torch.fsdp_units import plan_weight_groups
from layoutmap.adapters.torch.lora import find_lora_factors, list_names_before_peft
from layoutmap.adapters.torch.optimizer_hooks import record_replaced_tensor
from layoutmap.adapters.torch.paths import (
    DescribedTensor,
    find_paths_by_module_id,
    find_root_modules,
    is_keras_module,
    iterate_descendants,
    list_lazy_layer_paths,
    list_model_tensors,
    make_model_names,
)
from layoutmap.adapters.torch.roles import (
    find_axis_roles_and_head_size,
    find_head_sizes_by_module_id,
    number_module_inputs,
)
from layoutmap.adapters.torch.swap import (
    copy_user_attributes,
    replace_tensors_in_module,
    replace_tensors_in_optimizer,
)
from layoutmap.adapters.torch.tensor_classes import find_stored_dtype
from layoutmap.adapters.torch.tools import patch_training_libraries
from layoutmap.adapters.torch.unsupported import find_unsupported_tensors
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import ScopeError
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.unsupported import UnsupportedFeature, make_failed_call_note
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.agreement import check_same_values
from layoutmap.engines.patches import SelfClosingContext
from layoutmap.engines.torch.deferred_init import FakeTensor, Tape
from layoutmap.engines.torch.element_types import format_dtype
from layoutmap.engines.torch.modules import get_parameters_and_buffers

R = TypeVar("R")
_ONLY_A_PLAN = "it was only planned, so it has no values"
_FAILED = "its scope failed, so it has no values"


def describe_tensors(
    roots: Sequence[torch.nn.Module],
    *,
    skips_dtensors: bool = False,
    inputs: Mapping[int, int] | None = None,
) -> Iterator[DescribedTensor]:
    """Yield each tensor of models with its description as a variable of a plan.

    Args:
        roots: The models.
        skips_dtensors: Whether to leave out DTensors, which in a scope come from an inner scope that sharded them.
        inputs: The number of the input of each called module, by the id of the module.
    """
    seen: set[int] = set()
    for name, root in zip(make_model_names(roots), roots, strict=True):
        sizes = find_head_sizes_by_module_id(root)
        derived = find_lora_factors(root)
        for model_tensor in list_model_tensors(root):
            tensor = model_tensor.tensor
            if id(tensor) in seen or is_lazy(tensor) or (skips_dtensors and isinstance(tensor, DTensor)):
                continue
            seen.add(id(tensor))
            kind = Kind.STATE if model_tensor.is_buffer else Kind.WEIGHT
            shape = tuple(int(n) for n in tensor.shape)
            parent, axes = derived.get(id(tensor), (None, None))
            yield DescribedTensor(
                model_tensor,
                VariableSpec(
                    model_tensor.path,
                    shape,
                    format_dtype(find_stored_dtype(tensor)),
                    kind,
                    (*model_tensor.aliases, *list_names_before_peft(model_tensor, root)),
                    parent,
                    axes,
                    model=name,
                    use=find_axis_roles_and_head_size(model_tensor, sizes, inputs),
                    trainable=model_tensor.is_buffer or tensor.requires_grad,
                ),
            )


class TorchSession:
    """Build or shard the torch models of one scope.

    Args:
        context: The scope, which knows rules, meshes and arrays.
    """

    library = "torch"

    def __init__(self, context: ScopeContext):
        self.context = context
        self._tape = self._make_tape()
        self._recording: AbstractContextManager[Tape] | None = None
        # The modules by id, in order of creation.
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._unbuilt: list[str] = []
        self._inputs: Mapping[int, int] = {}  # the numbers of the inputs of modules in a plan, by id
        self._failed_calls: list[UnsupportedFeature] = []  # calls that did not show these numbers
        self.patches = FromPretrainedPatches()
        self.planned_tensors: Sequence[DescribedTensor] = ()  # set if the scope makes only a plan

    def _make_tape(self) -> Tape:
        return Tape(
            shapes_only=self.context.plan_only,
            tiles=self.context.options.own.draws == "tiles",
            # This is called for each operation, so that other threads and tasks record nothing.
            should_record=partial(is_session_active, self),
        )

    # -- deferring

    @contextmanager
    def defer_variables(self) -> Generator[None]:
        """Defer the values of large tensors until the outermost block ends, and then materialize them."""
        if self._recording is not None:
            yield
            return
        outer = get_current_session()
        with _suspend_outer_recording(outer):  # only one tape may record, so suspend the outer one
            with (
                module_hooks.install_creation_hooks(),
                self.patches,
                activate_session(self),
                _TapeRecording(self),
            ):
                yield
            self._shard_models(self._find_new_models(), is_new=True)

    def start_recording(self) -> None:
        """Start recording new tensors on the tape."""
        recording = self._tape.record_operations()
        recording.__enter__()
        # An interrupt before this line must not end a recording that never began, so set it last.
        self._recording = recording

    def stop_recording(self) -> None:
        """Stop the tape if it records."""
        recording, self._recording = self._recording, None
        if recording is not None:  # None while an inner scope has suspended the recording
            recording.__exit__(None, None, None)

    @contextmanager
    def suspend_recording(self) -> Generator[None]:
        """Stop deferring values until the block ends, because an inner scope records instead."""
        if self._recording is None:
            yield
            return
        self.stop_recording()
        try:
            yield
        finally:
            if is_session_active(self):  # the scope may be closed meanwhile
                self.start_recording()

    def track_module(self, module: torch.nn.Module) -> None:
        """Store a reference to a module that gets a tensor or child in this scope, or raise for a Keras layer."""
        key = id(module)
        if key not in self._modules:
            # Keras layers on torch are modules, too, but the Keras adapter handles them.
            if is_keras_module(module):
                raise ScopeError(
                    f"{type(module).__name__}: a Keras layer is built in a scope for torch modules",
                    why="a scope is for one library, and Keras models need a scope for Keras",
                    fix='pass library="keras" to the scope, or build the layer outside of it',
                )
            self._modules[key] = weakref.ref(module, lambda _: self._modules.pop(key, None))
            self.patches.install_if_imported()  # the user's code may import transformers inside the scope

    def defer_file_read(self, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a deferred tensor that is read from a file (see `Tape.defer_file_read`)."""
        return self._tape.defer_file_read(read)

    def has_built(self, model: torch.nn.Module) -> bool:
        """Return whether a module was built in this scope. A module without tensors counts as built in it."""
        return id(model) in self._modules or not model.state_dict(keep_vars=True)

    def track_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Store a reference to an optimizer that gets parameters in this scope."""
        key = id(optimizer)
        self._optimizers.setdefault(key, weakref.ref(optimizer, lambda _: self._optimizers.pop(key, None)))

    def _find_new_models(self) -> list[torch.nn.Module]:
        """Return the models built in this scope: modules that are inside no other module."""
        roots = find_root_modules(_list_live_objects(self._modules))
        if len(roots) > 1:  # some may be garbage that Python has not collected yet, so collect it
            del roots
            gc.collect()
            roots = find_root_modules(_list_live_objects(self._modules))
        return roots

    def list_unbuilt_layer_names(self) -> list[str]:
        """Return the names of layers that create weights in their first call."""
        return self._unbuilt

    # -- materializing

    def _shard_models(self, roots: Sequence[torch.nn.Module], *, is_new: bool) -> None:
        """Choose layouts, and give the models sharded tensors. For a plan, mark the models as valueless instead."""
        self._unbuilt = [path for root in roots for path in list_lazy_layer_paths(root)]
        if self._unbuilt and not self.context.plan_only:
            self._raise_lazy_layers_error(roots)
        entries = list(describe_tensors(roots, skips_dtensors=is_new, inputs=self._inputs))
        recipes = {
            e.spec.key: self._tape.make_recipe(t)
            for e in entries
            if self._tape.is_deferred(t := e.source.tensor)
        }
        layers = [path for root in roots for path in find_paths_by_module_id(root).values()]
        try:
            assignments = self.context.assign_layouts(
                [e.spec for e in entries],
                {key: recipe.why_global for key, recipe in recipes.items() if recipe.why_global},
                [
                    *find_unsupported_tensors([(e.source, e.spec.model) for e in entries]),
                    *self._failed_calls,
                ],
                not self._unbuilt,
                layers,
            )
            if self.context.plan_only:
                self.planned_tensors = entries
                self._mark_valueless(roots, _ONLY_A_PLAN)
            else:
                self._create_and_install_arrays(roots, entries, assignments)
        except BaseException:
            if is_new:  # the tensors of a new model have no values, but an existing model keeps its own
                self._mark_valueless(roots, _FAILED)
            raise
        finally:
            self._tape = self._make_tape()  # the old tape references many tensors, so drop it
            self._modules.clear()
            self._optimizers.clear()

    def _raise_lazy_layers_error(self, roots: Sequence[torch.nn.Module]) -> NoReturn:
        self._mark_valueless(roots, _FAILED)
        raise ScopeError(
            f"{self._unbuilt[0]}: the size of a lazy layer is unknown at the end of the scope",
            facts={"lazy layers": ", ".join(self._unbuilt[:10])},
            why="the layer creates its weights in its first call, after the scope",
            fix="give the layer its sizes, as in torch.nn.Linear(in_features, out_features)",
        )

    def _create_and_install_arrays(
        self,
        roots: Sequence[torch.nn.Module],
        entries: Sequence[DescribedTensor],
        assignments: Sequence[Assignment],
    ) -> None:
        """Compute deferred values, relayout existing ones, and install all in their modules."""
        pairs = {
            f"{index}:{e.spec.path}": (e, a)
            for index, (e, a) in enumerate(zip(entries, assignments, strict=True))
        }
        deferred = {key: pair for key, pair in pairs.items() if self._tape.is_deferred(pair[0].source.tensor)}
        if self.context.spans_processes:  # each process created these values separately, so compare them
            self._check_equal_values(entry for key, (entry, _) in pairs.items() if key not in deferred)
        created = self.context.create_arrays(
            {key: assignment for key, (_, assignment) in deferred.items()},
            {key: self._make_initializer(entry.source.tensor) for key, (entry, _) in deferred.items()},
        )
        arrays = (
            created[key]
            if key in deferred
            else self.context.engine.relayout(e.source.tensor.detach(), a.layout, pad=a.is_padded)
            for key, (e, a) in pairs.items()
        )
        self.install_arrays(
            roots, [(e, array, a.layout) for (e, a), array in zip(pairs.values(), arrays, strict=True)]
        )

    def install_arrays(
        self, roots: Sequence[torch.nn.Module], sharded: Sequence[tuple[DescribedTensor, DTensor, Layout]]
    ) -> None:
        """Replace tensors of models by sharded arrays, and install the `ShardedForward` of each module."""
        replaced = {
            id(e.source.tensor): self._make_replacement(e, array, layout) for e, array, layout in sharded
        }
        for entry, _, _ in sharded:
            for attribute in entry.source.attributes:
                attribute.set_tensor(replaced[id(entry.source.tensor)])
        layouts = {id(replaced[id(e.source.tensor)]): layout for e, _, layout in sharded}
        self._replace_other_tensor_references(roots, replaced, layouts)
        for entry, _, _ in sharded:
            # An optimizer may still reference the replaced tensor, so record it: a step then raises.
            record_replaced_tensor(entry.source.tensor, entry.spec.path)
        self._install_forwards(roots, layouts)

    def _check_equal_values(self, entries: Iterable[DescribedTensor]) -> None:
        """Raise if existing tensors, their gradients, or their optimizer slots differ between processes."""
        paths = {entry.source.tensor: entry.spec.path for entry in entries}
        values: list[tuple[str, torch.Tensor]] = []
        for tensor, path in paths.items():
            values.append((path, tensor.detach()))
            if tensor.is_leaf and tensor.grad is not None:
                values.append((f"{path}.grad", tensor.grad))
        values += [
            (f"{paths[tensor]}.{name}", value)
            for optimizer in _list_live_objects(self._optimizers)
            for tensor, slots in optimizer.state.items()
            for name, value in slots.items()
            if tensor in paths and isinstance(value, torch.Tensor)
        ]
        unsharded = [(path, tensor) for path, tensor in values if not isinstance(tensor, DTensor)]
        sums = ((path, compute_checksum(self.context.engine.to_numpy(tensor))) for path, tensor in unsharded)
        check_same_values(sums, self.context.gather_from_processes)

    def _make_initializer(self, tensor: torch.Tensor) -> Initializer:
        recipe = self._tape.make_recipe(tensor)
        blocks = None if recipe.why_global else recipe.compute_blocks
        return Initializer(recipe.compute_global_value, blocks=blocks, recipe=recipe.format_text)

    def _make_replacement(self, entry: DescribedTensor, array: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return the sharded parameter or buffer that replaces an entry's tensor in its modules."""
        old = entry.source.tensor
        new = array
        if isinstance(old, torch.nn.Parameter):
            new = self.context.engine.make_variable(array, name=entry.spec.path, trainable=old.requires_grad)
        copy_user_attributes(old, new)
        if not isinstance(old, FakeTensor) and old.is_leaf and old.grad is not None:
            new.grad = self.context.engine.relayout(old.grad, layout, pad=True)
        return new

    def _replace_other_tensor_references(
        self, roots: Sequence[torch.nn.Module], replacements: dict[int, Any], layouts: Mapping[int, Layout]
    ) -> None:
        """Replace the tensors that modules and optimizers reference outside of parameters and buffers."""
        kept: dict[int, torch.Tensor] = {}  # ids are reused, so keep the tensors alive

        def get_replacement(tensor: torch.Tensor) -> object:
            if id(tensor) not in replacements and self._tape.is_deferred(tensor):
                # Tensors that are neither parameters nor buffers stay unsharded, but also get values.
                kept[id(tensor)] = tensor
                trainable = tensor.requires_grad and tensor.is_leaf
                value = self._tape.make_recipe(tensor).compute_global_value()
                replacements[id(tensor)] = value.requires_grad_(trainable)
            return replacements.get(id(tensor), tensor)

        def make_slot_replacement(parameter: DTensor, value: torch.Tensor) -> object:
            if value.shape == parameter.shape:
                return self._shard_slot(value, layouts[id(parameter)])
            return get_replacement(value)

        for root in roots:
            for module in (root, *iterate_descendants(root)):
                replace_tensors_in_module(module, get_replacement)
        for optimizer in _list_live_objects(self._optimizers):
            replace_tensors_in_optimizer(optimizer, get_replacement, make_slot_replacement)

    def _shard_slot(self, tensor: torch.Tensor, layout: Layout) -> object:
        """Relayout an optimizer slot, or compute it in the layout if it is deferred."""
        if not self._tape.is_deferred(tensor):
            return self.context.engine.relayout(tensor, layout, pad=True)
        spec = VariableSpec("slot", tuple(tensor.shape), format_dtype(tensor.dtype), Kind.SLOT)
        return self.context.create_arrays(
            {"slot": Assignment(spec, layout, is_padded=True)}, {"slot": self._make_initializer(tensor)}
        )["slot"]

    def _install_forwards(self, roots: Sequence[torch.nn.Module], layouts: Mapping[int, Layout]) -> None:
        """Give each module of the models a `ShardedForward`, and patch the libraries that may train or save them."""
        patch_training_libraries()
        for root in roots:
            paths = find_paths_by_module_id(root)
            groups = plan_weight_groups(root, layouts, self.context)
            graphs: dict[object, Any] = {}
            for module in (root, *iterate_descendants(root)):
                if find_forward(module) is None:  # a module that was sharded before has the hook already
                    module.register_load_state_dict_pre_hook(_redistribute_state_dict)  # pyright: ignore[reportUnknownMemberType]
                path = paths.get(id(module), "")
                group = groups.get(id(module))
                new = ShardedForward(module, path, self.context, group=group, graphs=graphs, layouts=layouts)
                new.install_in_module()

    def _mark_valueless(self, roots: Sequence[torch.nn.Module], why: str) -> None:
        """Install in each module a `ShardedForward` that raises an error with this reason when the module is called."""
        for root in roots:
            for module in (root, *iterate_descendants(root)):
                ShardedForward(module, "", self.context, why_valueless=why).install_in_module()

    # -- entry points

    def build_model(self, make_model: Callable[[], object]) -> object:
        """Call a function that builds a model, and return the materialized model."""
        with self.defer_variables():
            return make_model()

    def shard_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard an existing model as if it had been built in this scope, and return it."""
        with _suspend_outer_recording(get_current_session()):
            self._shard_models([model], is_new=False)
        return model

    def create_lazy_variables(self, model: torch.nn.Module, inputs: object) -> None:
        """Record for a plan which inputs modules read. A torch model has its weights once it is built."""
        if self.context.plan_only and inputs is not None:
            with self.suspend_recording():
                try:
                    self._inputs = number_module_inputs(model, inputs, self._tape.fake_mode)
                except Exception as error:  # the user's code may raise any error
                    self._failed_calls.append(make_failed_call_note(model, error))


class _TapeRecording(SelfClosingContext):
    """Context in which a session's tape records new tensors."""

    def __init__(self, session: TorchSession):
        self._session = session

    def open_context(self) -> None:
        self._session.start_recording()

    def close_context(self) -> None:
        self._session.stop_recording()


def _list_live_objects(refs: Mapping[int, weakref.ref[R]]) -> list[R]:
    return [each for ref in list(refs.values()) if (each := ref()) is not None]


@contextmanager
def _suspend_outer_recording(outer_session: object) -> Generator[None]:
    if isinstance(outer_session, TorchSession):
        with outer_session.suspend_recording():
            yield
    else:
        yield


def _redistribute_state_dict(
    module: torch.nn.Module, state_dict: dict[str, object], prefix: str, *_: object
) -> None:
    """Redistribute the tensors passed to `load_state_dict` to the layouts of the module's tensors."""
    engine = get_engine("torch")
    for members in get_parameters_and_buffers(module):
        for name, tensor in members.items():
            value = state_dict.get(prefix + name)
            if not isinstance(tensor, DTensor) or not isinstance(value, torch.Tensor):
                continue
            layout = engine.get_layout(tensor)
            if value.shape == tensor.shape and layout is not None and engine.get_layout(value) != layout:
                state_dict[prefix + name] = engine.relayout(value.detach(), layout, pad=True)
