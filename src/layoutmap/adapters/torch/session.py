"""Build modules without values in a scope, then compute each tensor in its layout.

defer        a tape defers large tensors, and hooks report modules and optimizers made in the scope
describe     walk the models that the modules form, and name every parameter and buffer
materialize  ask the scope for all layouts at once, then make what was deferred and place what exists

The file is longer than others since each of torch's ways to make a tensor or a module comes to this class.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from layoutmap.adapters.current import active_session, get_current_session, is_session_active
from layoutmap.adapters.protocol import ScopeContext
from layoutmap.adapters.torch import module_hooks
from layoutmap.adapters.torch.forward import Forward, find_forward
from layoutmap.adapters.torch.from_pretrained import FromPretrainedPatches
from layoutmap.adapters.torch.fsdp_units import plan_gatherings
from layoutmap.adapters.torch.lora import find_lora_factors, list_unwrapped_names
from layoutmap.adapters.torch.optimizer_hooks import note_replaced_tensor
from layoutmap.adapters.torch.paths import (
    Entry,
    find_layer_paths,
    find_lazy_layers,
    find_roots,
    find_tensors,
    is_keras_module,
    iterate_descendants,
    make_model_names,
)
from layoutmap.adapters.torch.roles import describe_use, find_head_sizes
from layoutmap.adapters.torch.swap import copy_user_attributes, replace_in_module, replace_in_optimizer
from layoutmap.adapters.torch.tensor_classes import find_stored_dtype
from layoutmap.adapters.torch.tools import patch_tools
from layoutmap.adapters.torch.unsupported import find_unsupported
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import ScopeError
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.agreement import check_values
from layoutmap.engines.patches import Closing
from layoutmap.engines.torch.deferred_init import FakeTensor, Tape
from layoutmap.engines.torch.element_types import format_dtype
from layoutmap.engines.torch.modules import get_members

R = TypeVar("R")
_ONLY_A_PLAN = "it has no values"
_FAILED = "its scope failed, so it has no values"


def make_entries(roots: Sequence[torch.nn.Module], *, is_new: bool = False) -> Iterator[Entry]:
    """Describe the tensors of models as variables of a plan.

    Args:
        roots: The models.
        is_new: Whether they were made in a scope: then what is laid out already was made in an inner one, or before.
    """
    seen: set[int] = set()
    for name, root in zip(make_model_names(roots), roots, strict=True):
        sizes = find_head_sizes(root)
        derived = find_lora_factors(root)
        for found in find_tensors(root):
            tensor = found.tensor
            if id(tensor) in seen or is_lazy(tensor) or (is_new and isinstance(tensor, DTensor)):
                continue
            seen.add(id(tensor))
            kind = Kind.STATE if found.is_buffer else Kind.WEIGHT
            shape = tuple(int(n) for n in tensor.shape)
            parent, axes = derived.get(id(tensor), (None, None))
            yield Entry(
                found,
                VariableSpec(
                    found.path,
                    shape,
                    format_dtype(find_stored_dtype(tensor)),
                    kind,
                    (*found.aliases, *list_unwrapped_names(found, root)),
                    parent,
                    axes,
                    model=name,
                    use=describe_use(found, sizes),
                    trainable=found.is_buffer or tensor.requires_grad,
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
        self.reading = FromPretrainedPatches()
        self.planned: Sequence[Entry] = ()  # set by a dry run

    def _make_tape(self) -> Tape:
        return Tape(
            dry=self.context.plan_only,
            tiles=self.context.options.own.draws == "tiles",
            is_here=partial(is_session_active, self),  # the tape calls it for each operation
        )

    # -- deferring

    @contextmanager
    def defer(self) -> Generator[None]:
        """Defer the values of large tensors until the outermost block ends, and then materialize them."""
        if self._recording is not None:
            yield
            return
        outer = get_current_session()
        with _suspend_outer(outer):  # only one tape may record, so suspend the outer one
            with module_hooks.install_hooks(), self.reading, active_session(self), _Recording(self):
                yield
            self._materialize(self._find_new_models(), is_new=True)

    def record(self) -> None:
        """Start recording new tensors on the tape."""
        recording = self._tape.record_operations()
        recording.__enter__()
        # An interrupt before this line must not end a recording that never began, so set it last.
        self._recording = recording

    def stop(self) -> None:
        """Stop the tape if it records."""
        recording, self._recording = self._recording, None
        if recording is not None:  # an inner scope may still record
            recording.__exit__(None, None, None)

    @contextmanager
    def suspend_recording(self) -> Generator[None]:
        """Stop deferring values until the block ends, since a scope opened in this one takes over."""
        if self._recording is None:
            yield
            return
        self.stop()
        try:
            yield
        finally:
            if is_session_active(self):  # the scope may be closed meanwhile
                self.record()

    def note_module(self, module: torch.nn.Module) -> None:
        """Remember a module that gets a tensor or child in this scope."""
        key = id(module)
        if key not in self._modules:
            # Keras layers on torch are modules, too, but the Keras adapter handles them.
            if is_keras_module(module):
                raise ScopeError(
                    f"{type(module).__name__}: a Keras layer is built in a scope for torch modules",
                    why="a scope is for one library, and Keras models need a scope for Keras",
                    fix='pass library="keras"',
                )
            self._modules[key] = weakref.ref(module, lambda _: self._modules.pop(key, None))
            self.reading.update()  # the program may have imported transformers meanwhile, so patch it

    def read_later(self, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a deferred tensor that is read from a file (see `Tape.read_later`)."""
        return self._tape.read_later(read)

    def made(self, model: torch.nn.Module) -> bool:
        """Return whether a module was built in this scope. A module without tensors and children always counts."""
        return id(model) in self._modules or not model.state_dict(keep_vars=True)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer that gets parameters in this scope."""
        key = id(optimizer)
        self._optimizers.setdefault(key, weakref.ref(optimizer, lambda _: self._optimizers.pop(key, None)))

    def _find_new_models(self) -> list[torch.nn.Module]:
        """Return the models built in this scope: modules that are inside no other module."""
        roots = find_roots(_list_alive(self._modules))
        if len(roots) > 1:  # a root may be garbage that Python has not collected yet
            del roots
            gc.collect()
            roots = find_roots(_list_alive(self._modules))
        return roots

    def list_unbuilt_layers(self) -> list[str]:
        """Return the names of layers that create weights in their first call."""
        return self._unbuilt

    # -- materializing

    def _materialize(self, roots: Sequence[torch.nn.Module], *, is_new: bool) -> None:
        self._unbuilt = [path for root in roots for path in find_lazy_layers(root)]
        if self._unbuilt and not self.context.plan_only:
            self._refuse_lazy(roots)
        entries = list(make_entries(roots, is_new=is_new))
        recipes = {
            e.spec.key: self._tape.recipe(t) for e in entries if self._tape.is_deferred(t := e.found.tensor)
        }
        layers = [path for root in roots for path in find_layer_paths(root).values()]
        try:
            assignments = self.context.assign(
                [e.spec for e in entries],
                {key: recipe.why_global for key, recipe in recipes.items() if recipe.why_global},
                find_unsupported([(e.found, e.spec.model) for e in entries]),
                not self._unbuilt,
                layers,
            )
            if self.context.plan_only:
                self.planned = entries
                self._mark_valueless(roots, _ONLY_A_PLAN)
            else:
                self._create_arrays(roots, entries, assignments)
        except BaseException:
            if is_new:  # only new models get initial values
                self._mark_valueless(roots, _FAILED)
            raise
        finally:
            self._tape = self._make_tape()  # the old tape references many tensors, so drop it
            self._modules.clear()
            self._optimizers.clear()

    def _refuse_lazy(self, roots: Sequence[torch.nn.Module]) -> None:
        self._mark_valueless(roots, _FAILED)
        raise ScopeError(
            f"{self._unbuilt[0]}: the size of a lazy layer is unknown at the end of the scope",
            facts={"lazy layers": ", ".join(self._unbuilt[:10])},
            why="it creates its weights in its first call, after the scope",
            fix="give the layer its sizes, as in torch.nn.Linear(in_features, out_features)",
        )

    def _create_arrays(
        self, roots: Sequence[torch.nn.Module], entries: Sequence[Entry], assignments: Sequence[Assignment]
    ) -> None:
        pairs = {
            f"{number}:{e.spec.path}": (e, a)
            for number, (e, a) in enumerate(zip(entries, assignments, strict=True))
        }
        deferred = {key: pair for key, pair in pairs.items() if self._tape.is_deferred(pair[0].found.tensor)}
        if self.context.across:  # each process created these values separately, so compare them
            self._check_values(entry for key, (entry, _) in pairs.items() if key not in deferred)
        made = self.context.create(
            {key: assignment for key, (_, assignment) in deferred.items()},
            {key: self._initializer(entry.found.tensor) for key, (entry, _) in deferred.items()},
        )
        arrays = (
            made[key]
            if key in deferred
            else self.context.engine.relayout(e.found.tensor.detach(), a.layout, pad=a.is_padded)
            for key, (e, a) in pairs.items()
        )
        self.install(
            roots, [(e, array, a.layout) for (e, a), array in zip(pairs.values(), arrays, strict=True)]
        )

    def install(
        self, roots: Sequence[torch.nn.Module], placed: Sequence[tuple[Entry, DTensor, Layout]]
    ) -> None:
        """Replace tensors of models by sharded arrays, and attach the forward that computes in these layouts."""
        replaced = {
            id(e.found.tensor): self._make_replacement(e, array, layout) for e, array, layout in placed
        }
        for entry, _, _ in placed:
            for place in entry.found.places:
                place.put(replaced[id(entry.found.tensor)])
        layouts = {id(replaced[id(e.found.tensor)]): layout for e, _, layout in placed}
        self._replace_references(roots, replaced, layouts)
        for entry, _, _ in placed:
            # An optimizer may still reference the replaced tensor.
            note_replaced_tensor(entry.found.tensor, entry.spec.path)
        self._attach(roots, layouts)

    def _check_values(self, entries: Iterable[Entry]) -> None:
        """Raise if existing tensors, their gradients, or slots differ between processes."""
        paths = {entry.found.tensor: entry.spec.path for entry in entries}
        found: list[tuple[str, torch.Tensor]] = []
        for tensor, path in paths.items():
            found.append((path, tensor.detach()))
            if tensor.is_leaf and tensor.grad is not None:
                found.append((f"{path}.grad", tensor.grad))
        found += [
            (f"{paths[tensor]}.{name}", value)
            for optimizer in _list_alive(self._optimizers)
            for tensor, slots in optimizer.state.items()
            for name, value in slots.items()
            if tensor in paths and isinstance(value, torch.Tensor)
        ]
        plain = [(path, tensor) for path, tensor in found if not isinstance(tensor, DTensor)]
        sums = ((path, compute_checksum(self.context.engine.to_numpy(tensor))) for path, tensor in plain)
        check_values(sums, self.context.gather)

    def _initializer(self, tensor: torch.Tensor) -> Initializer:
        recipe = self._tape.recipe(tensor)
        return Initializer(
            recipe.global_value, blocks=None if recipe.why_global else recipe.blocks, recipe=recipe.text
        )

    def _make_replacement(self, entry: Entry, array: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return the sharded parameter or buffer that replaces an entry's tensor in its modules."""
        old = entry.found.tensor
        new = array
        if isinstance(old, torch.nn.Parameter):
            new = self.context.engine.variable(array, name=entry.spec.path, trainable=old.requires_grad)
        copy_user_attributes(old, new)
        if not isinstance(old, FakeTensor) and old.is_leaf and old.grad is not None:
            new.grad = self.context.engine.relayout(old.grad, layout, pad=True)
        return new

    def _replace_references(
        self, roots: Sequence[torch.nn.Module], replaced: dict[int, Any], layouts: Mapping[int, Layout]
    ) -> None:
        kept: dict[int, torch.Tensor] = {}  # ids are reused, so keep the tensors alive

        def swap(tensor: torch.Tensor) -> object:
            if id(tensor) not in replaced and self._tape.is_deferred(tensor):
                # Tensors that are neither parameters nor buffers stay unsharded, but also get values.
                kept[id(tensor)] = tensor
                trainable = tensor.requires_grad and tensor.is_leaf
                replaced[id(tensor)] = self._tape.recipe(tensor).global_value().requires_grad_(trainable)
            return replaced.get(id(tensor), tensor)

        def place_slot(parameter: DTensor, value: torch.Tensor) -> object:
            if value.shape == parameter.shape:
                return self._place_slot(value, layouts[id(parameter)])
            return swap(value)

        for root in roots:
            for module in (root, *iterate_descendants(root)):
                replace_in_module(module, swap)
        for optimizer in _list_alive(self._optimizers):
            replace_in_optimizer(optimizer, swap, place_slot)

    def _place_slot(self, tensor: torch.Tensor, layout: Layout) -> object:
        if not self._tape.is_deferred(tensor):
            return self.context.engine.relayout(tensor, layout, pad=True)
        spec = VariableSpec("slot", tuple(tensor.shape), format_dtype(tensor.dtype), Kind.SLOT)
        return self.context.create(
            {"slot": Assignment(spec, layout, is_padded=True)}, {"slot": self._initializer(tensor)}
        )["slot"]

    def _attach(self, roots: Sequence[torch.nn.Module], layouts: Mapping[int, Layout]) -> None:
        patch_tools()
        for root in roots:
            paths = find_layer_paths(root)
            gather = plan_gatherings(root, layouts, self.context)
            graphs: dict[object, Any] = {}
            for module in (root, *iterate_descendants(root)):
                if find_forward(module) is None:  # a module of a second `apply` already has the hook
                    module.register_load_state_dict_pre_hook(_redistribute_state_dict)  # pyright: ignore[reportUnknownMemberType]
                path = paths.get(id(module), "")
                gathers = gather.get(id(module))
                Forward(module, path, self.context, gather=gathers, graphs=graphs, layouts=layouts).attach()

    def _mark_valueless(self, roots: Sequence[torch.nn.Module], why: str) -> None:
        for root in roots:
            for module in (root, *iterate_descendants(root)):
                Forward(module, "", self.context, valueless=why).attach()

    # -- entry points

    def build(self, make: Callable[[], object]) -> object:
        """Return the model that a function makes, materialized."""
        with self.defer():
            return make()

    def take(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard an existing model as if it had been built in this scope, and return it."""
        with _suspend_outer(get_current_session()):
            self._materialize([model], is_new=False)
        return model

    def complete(self, model: torch.nn.Module, inputs: object) -> None:
        """Do nothing, since a torch model has its weights once it is built."""


class _Recording(Closing):
    """Context in which a session's tape records, until the scope ends."""

    def __init__(self, session: TorchSession):
        self._session = session

    def open(self) -> None:
        self._session.record()

    def close(self) -> None:
        self._session.stop()


def _list_alive(refs: Mapping[int, weakref.ref[R]]) -> list[R]:
    return [each for ref in list(refs.values()) if (each := ref()) is not None]


@contextmanager
def _suspend_outer(outer: object) -> Generator[None]:
    if isinstance(outer, TorchSession):
        with outer.suspend_recording():
            yield
    else:
        yield


def _redistribute_state_dict(
    module: torch.nn.Module, state_dict: dict[str, object], prefix: str, *_: object
) -> None:
    """Redistribute the tensors passed to `load_state_dict` to the layouts of the module's tensors."""
    engine = get_engine("torch")
    for members in get_members(module):
        for name, tensor in members.items():
            value = state_dict.get(prefix + name)
            if not isinstance(tensor, DTensor) or not isinstance(value, torch.Tensor):
                continue
            layout = engine.get_layout(tensor)
            if value.shape == tensor.shape and layout is not None and engine.get_layout(value) != layout:
                state_dict[prefix + name] = engine.relayout(value.detach(), layout, pad=True)
