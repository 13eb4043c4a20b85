"""Defer the variables of one scope, then compute each in its layout.

    defer        the constructor hooks report layers and variables that are created in the open scope: `registry`
    describe     walk the models that the layers form, and name every variable by its object path: `describing`
    materialize  ask the scope for all layouts at once, then initialize pending variables and convert the others

A scope often ends before the weights exist, because Keras creates them in a model's first call, or in `fit`. So each
layer that was created in a scope keeps the session, and its `build` and similar methods reopen the scope while they
run.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import keras

from layoutmap.adapters.current import activate_session, is_session_active
from layoutmap.adapters.keras import private
from layoutmap.adapters.keras.call_stack import (
    count_user_frames,
    format_running_layer,
    is_calling_layer,
    iterate_running_keras_objects,
)
from layoutmap.adapters.keras.copies import make_load_warning_context
from layoutmap.adapters.keras.describing import (
    DescribedVariable,
    describe_standalone_variable,
    describe_variables,
    find_unsupported_features,
    list_layer_paths,
)
from layoutmap.adapters.keras.existing_layers import find_unscoped_layers, make_existing_object_error
from layoutmap.adapters.keras.hooks import install_hooks_temporarily
from layoutmap.adapters.keras.initializers import explain_why_initialized_unsharded
from layoutmap.adapters.keras.loading import check_value_shape
from layoutmap.adapters.keras.materialize import Materializer
from layoutmap.adapters.keras.names import has_constructor_texts, record_constructor_texts
from layoutmap.adapters.keras.path_lookup import PathLookup
from layoutmap.adapters.keras.paths import find_variables
from layoutmap.adapters.keras.pending import is_pending, make_variable_pending
from layoutmap.adapters.keras.protocol import Backend, KerasSession, ThreadState
from layoutmap.adapters.keras.registry import Registry, RegistryCache
from layoutmap.adapters.keras.training import (
    create_missing_variables,
    list_layers_to_build,
    register_training_variables,
)
from layoutmap.adapters.keras.untracked import find_possible_garbage_ids
from layoutmap.adapters.keras.wraps import get_session, unwrap_optimizer, wrap_layer, wrap_optimizer
from layoutmap.adapters.protocol import ScopeContext
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import PlanError, ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.variables import Assignment, Kind, VariableSpec, format_variable_names
from layoutmap.engines.agreement import check_same_values
from layoutmap.engines.protocol import Engine

_MAX_ZEROS = 2**28  # a plan returns at most this many zeros as the value of a weight


class Session(KerasSession):
    """Build or shard the Keras models of one scope."""

    library = "keras"

    def __init__(self, context: ScopeContext, backend: Backend):
        self.context = context
        self.policy = context.policy
        self.backend = backend
        self.thread_state = ThreadState()
        self.gathering_level = 0
        self.load_warning_context = make_load_warning_context()
        self.checked_outer_models = weakref.WeakSet[object]()
        self.lock = threading.RLock()
        self.registry = Registry()
        self._materializer = Materializer(self)
        self._version_planned = 0
        self._specs = RegistryCache[VariableSpec](self.registry)
        self._path_lookup = PathLookup(self.registry)
        self._planned_ahead = RegistryCache[Assignment](self.registry)
        self._outputs = RegistryCache[tuple[str, Layout | None]](self.registry)
        self._unfreed_ids: set[int] = set()  # ids of objects in no model that garbage collection did not free
        self._is_materializing = False
        self._failed = False
        self._names_before = private.count_generated_names_by_prefix()

    @property
    def engine(self) -> Engine:
        """Engine of the scope's arrays. A plan has no engine."""
        return self.context.engine

    # -- objects created in the scope

    @contextmanager
    def defer_variables(self) -> Iterator[None]:
        """Create variables without values in the block. After the outermost block, they get layouts and values."""
        inside = self._is_scope_open
        if not inside:
            self.thread_state.opening_depth = count_user_frames()
        with install_hooks_temporarily(self.backend.methods_disabled_in_scope), activate_session(self):
            yield
        if not inside:
            if private.in_stateless_scope() and self.backend.is_tracing():
                private.call_after_stateless_scope(self._materialize_unless_scope_is_open)
            else:
                self.materialize_variables()

    def record_and_wrap_layer(self, layer: object, *, constructor_texts: Iterable[str] | None = None) -> None:
        """Record and wrap a layer. `constructor_texts` is None if the layer existed before the scope."""
        if constructor_texts is not None:
            # Another library's wrapper of `Layer.__new__` can make the hook run twice for one layer.
            if has_constructor_texts(layer):
                return
            record_constructor_texts(layer, constructor_texts)
        self.registry.add_layer(layer)
        wrap_layer(layer, self)

    def has_built(self, model: object) -> bool:
        """Return whether a model was built in this scope."""
        return get_session(model) is self

    def find_preexisting_owner_error(self) -> ScopeError | None:
        """Return an error if the owner of the variable being created existed before the scope, otherwise None.

        A layer that is built by a layer of this scope is sharded with it, so it is no error. In a plan it is
        one, because a plan must leave existing layers unchanged.
        """
        plan_only, outermost = self.context.plan_only, None
        for maker in iterate_running_keras_objects(self.thread_state.opening_depth):
            is_layer = isinstance(maker, keras.layers.Layer)
            if is_layer and get_session(maker) is not None:
                has_outer = outermost is not None and plan_only
                return make_existing_object_error(outermost, plan_only) if has_outer else None
            if is_layer:
                outermost = maker
            elif plan_only and isinstance(maker, keras.Optimizer) and get_session(maker) is None:
                return make_existing_object_error(maker, plan_only)
        return None if outermost is None else make_existing_object_error(outermost, plan_only)

    @contextmanager
    def order_or_undo_seed_draw(self, generator: Any) -> Iterator[None]:
        """Make the block draw a seed in the order of unsharded Keras, or undo the draw at its end in a plan.

        For the order, first draw the seeds of variables that were created earlier. In a plan, restore the generator's
        state after the block instead.
        """
        if private.in_stateless_scope():
            yield
        elif self.context.plan_only:
            before = generator.state.value * 1
            yield
            generator.state.assign(before)
        else:
            self.draw_seeds_of_earlier_variables()
            yield

    def draw_seeds_of_earlier_variables(self, variable: object = None) -> None:
        """Draw the seeds of variables created before `variable`, or of all if it is None, as unsharded Keras does."""
        with self.lock, self._suspend_tracing_unless_planning():
            self._materializer.draw_seeds_of_earlier_variables(variable, self.initialize_pending_variable)

    def record_and_wrap_optimizer(self, optimizer: object) -> None:
        """Wrap an optimizer that is being constructed in this scope."""
        # On torch, Keras 3.14 calls `__init__` twice, so remove the variables of the first call, which nothing uses.
        self.registry.remove_layer_or_optimizer(optimizer)
        wrap_optimizer(optimizer, self)
        self.registry.add_optimizer(optimizer)

    def unwrap_optimizer_if_unused(self, optimizer: object) -> None:
        """Restore the methods of an optimizer, unless a model of the scope still uses it."""
        if not any(getattr(layer, "optimizer", None) is optimizer for layer in self.registry.list_layers()):
            unwrap_optimizer(optimizer)

    def construct_variable(
        self, variable: Any, original_init: Callable[..., None], initializer: Any, args: Any, kwargs: Any
    ) -> None:
        """Construct and record a variable, without a value unless its initializer is an array or a number."""
        reference = kwargs.get("layout")
        if self.context.plan_only and isinstance(initializer, (int, float)) and kwargs.get("dtype"):
            # Keras would create an array from a number and start the backend, so pass an initializer instead.
            initializer, kwargs = keras.initializers.Constant(initializer), {**kwargs, "shape": ()}
        if callable(initializer) or isinstance(initializer, str):
            with private.defer_values():
                original_init(variable, initializer, *args, **kwargs)
            make_variable_pending(variable, self)
            self._materializer.record_pending_variable(variable)
            # Keras copies `_layout` of a weight to its slots. The weight has no layout yet, so store a reference to the
            # weight there. By this reference, layoutmap finds the weight of a slot.
            variable._layout = weakref.ref(variable)
        else:
            original_init(variable, initializer, *args, **kwargs)
        found = list(iterate_running_keras_objects(self.thread_state.opening_depth))
        if found:
            layer = next((maker for maker in found if isinstance(maker, keras.layers.Layer)), None)
            self.registry.add_variable(variable, layer)
        else:  # user code created a standalone variable
            record_constructor_texts(variable, [v for v in (*args, *kwargs.values()) if isinstance(v, str)])
            self.registry.add_variable(variable, kind=Kind.WEIGHT if variable.trainable else Kind.STATE)
        parent = self.registry.find_variable_by_keras_layout(reference)
        if parent is not None:
            self.registry.set_slot_weight(variable, parent)

    # -- describing variables

    def list_unbuilt_layer_names(self) -> list[str]:
        """Return the names of layers that have no weights yet, because they create them in their first call."""
        return [layer.name for layer in list_layers_to_build(self.registry.list_layers())]

    # -- giving variables layouts and values

    def _suspend_tracing_unless_planning(self) -> AbstractContextManager[object]:
        """Leave any trace until the block ends. In a plan, stay in it, because leaving might start a backend."""
        return nullcontext() if self.context.plan_only else self.backend.suspend_tracing()

    def materialize_variables(self) -> None:
        """Give every variable of the scope its layout, and every pending one its value."""
        with self.lock, self._suspend_tracing_unless_planning():
            waiting = self.registry.list_variables()
            # A new variable that was read early already has a value and layout, so detect it by the registry's version.
            has_new = self.registry.version != self._version_planned
            if not has_new and not any(is_pending(v) or self.registry.get_layout(v) is None for v in waiting):
                return
            del waiting
            self._collect_garbage_if_needed()
            waiting = self.registry.list_variables()
            self._is_materializing = self._failed = True
            try:
                self._plan_and_materialize(waiting)
                self._failed = False
            finally:
                self._is_materializing = False

    def _collect_garbage_if_needed(self) -> None:
        """Delete unreferenced objects, so that a plan does not depend on when Python collects garbage.

        With several processes the garbage collector always runs, so that all of them describe the same variables.
        """
        if self.context.spans_processes or not find_possible_garbage_ids(self.registry) <= self._unfreed_ids:
            gc.collect()
            self._unfreed_ids = find_possible_garbage_ids(self.registry)

    def _plan_and_materialize(self, variables: list[object]) -> None:
        """Assign layouts to all variables. Unless this is a plan, initialize pending ones, and convert the others."""
        entries = describe_variables(self.registry)
        assignments = self._assign_layouts(entries, is_complete=not self.list_unbuilt_layer_names())
        if not self.context.plan_only:
            # The plan has the weights of existing layers inside models of this scope, so shard these layers, too.
            for layer in list(find_unscoped_layers(self.registry.list_layers(), get_session)):
                self._wrap_existing_layer(layer)
        self._version_planned = self.registry.version
        if self.context.plan_only:
            return
        self._materializer.draw_seeds_in_creation_order(self.initialize_pending_variable)
        pairs = list(zip(entries, assignments, strict=True))
        self._materializer.initialize_variables([(e, a) for e, a in pairs if is_pending(e.variable)])
        if self.context.spans_processes:
            named = zip(format_variable_names([e.spec for e in entries]), entries, strict=True)
            new = [(name, e.variable) for name, e in named if self.registry.get_layout(e.variable) is None]
            check_same_values(
                ((name, compute_checksum(self.engine.to_numpy(v._value))) for name, v in new),
                self.context.gather_from_processes,
            )
        for entry, assignment in pairs:
            if self.registry.get_layout(entry.variable) != assignment.layout:
                self._materializer.relayout_variable(entry.variable, assignment)
        for variable in variables:
            if is_pending(variable) and private.is_global_seed_variable(variable):
                self._materializer.initialize_variable_unsharded(variable)
        self.backend.update_value_references(self.registry.list_optimizers(), self.registry.list_layers())

    def _wrap_existing_layer(self, layer: object) -> None:
        """Wrap an existing layer. Drop a model's compiled steps, because they were made for unsharded weights."""
        self.record_and_wrap_layer(layer)
        if isinstance(layer, keras.Model):
            layer.train_function = layer.test_function = layer.predict_function = None

    def _assign_layouts(self, entries: list[DescribedVariable], *, is_complete: bool) -> Sequence[Assignment]:
        """Return the planned layouts of variables. `is_complete` means that all layers are built."""
        return self.context.assign_layouts(
            [self._rename_as_in_new_process(e.spec) for e in entries],
            {e.spec.key: why for e in entries if (why := self._explain_why_initialized_unsharded(e))},
            find_unsupported_features(self.backend, self.registry.list_layers(), entries),
            is_complete,
            {path: _find_output_rank(layer) for path, layer in list_layer_paths(self.registry.list_layers())}
            if self.policy.activations or self.backend.compiler_chooses_layouts
            else None,
            self.backend.compiler_chooses_layouts,
        )

    def _rename_as_in_new_process(self, spec: VariableSpec) -> VariableSpec:
        """Return a spec with the name that Keras would give the variable in a new process.

        Keras numbers names by the objects made before, so a plan and the model that is built after it would differ.
        """
        prefix, sign, path = spec.name.partition(":")
        name = f"{prefix}{sign}{private.renumber_keras_path(path, self._names_before)}"
        return spec if name == spec.name else replace(spec, name=name)

    # -- activations

    def find_path_and_output_layout(self, layer: object) -> tuple[str, Layout | None]:
        """Return a layer's path and the layout of its outputs, which is None if no activation rule matches."""
        if not self._outputs.is_current():
            found: dict[int, tuple[str, Layout | None]] = {}
            for path, each in list_layer_paths(self.registry.list_layers()):
                # A rule may match any path of a shared layer, so take the first path with a layout.
                if found.get(id(each), ("", None))[1] is None:
                    found[id(each)] = path, self.policy.find_activation_layout(path)
            self._outputs.store_entries(found)
        return self._outputs.get_entry(layer) or ("", None)

    def _explain_why_initialized_unsharded(self, entry: DescribedVariable) -> str:
        """Return why a pending variable's value must be computed on one device, or an empty text if it need not."""
        if entry.spec.kind not in (Kind.WEIGHT, Kind.STATE) or not is_pending(entry.variable):
            return ""
        return explain_why_initialized_unsharded(
            entry.variable._initializer, self.backend.global_init_reasons
        )

    def _materialize_unless_scope_is_open(self) -> None:
        """Materialize the variables, unless the scope is open, because its end materializes them.

        Keras calls this when it leaves its symbolic code, often where it catches every exception. So the errors of a
        plan would be lost there.
        """
        if not self._is_scope_open:
            self.materialize_variables()

    @property
    def _is_scope_open(self) -> bool:
        return is_session_active(self)

    def initialize_pending_variable(self, variable: object) -> None:
        """Compute the value of a pending variable that is being read.

        Inside the scope, only this variable is initialized, and in a plan it stays pending. After the scope, variables
        are pending only if an error stopped `materialize_variables`, so call it again.
        """
        with self.lock, self._suspend_tracing_unless_planning():
            if is_pending(variable) and private.is_global_seed_variable(variable):
                self._materializer.initialize_variable_unsharded(variable)
            elif not self._is_scope_open and not self._is_materializing:
                self.materialize_variables()
            if not is_pending(variable):
                return
            if self.context.plan_only:
                self._check_value_read_in_plan(variable)
                return
            self.draw_seeds_of_earlier_variables(variable)
            entry = self._describe_variable(variable)
            self._materializer.initialize_variables([(entry, self._assign_layout_ahead_of_plan(entry))])

    def assign_to_pending_variable(self, variable: keras.Variable, value: Any) -> None:
        """Store a value in a pending variable without running its initializer. In a plan, only check its shape."""
        with self.lock, self._suspend_tracing_unless_planning():
            if self._failed and not self._is_scope_open and not self._is_materializing:
                self.materialize_variables()
            if self.context.plan_only and self._is_scope_open:
                if tuple(variable.shape) != tuple(value.shape):
                    check_value_shape(variable, self.find_variable_path(variable), value)
                return
            entry = self._describe_variable(variable)
            self.raise_if_plan_only(entry.spec.path)
            self.draw_seeds_of_earlier_variables(variable)
            self._materializer.assign_first_value(variable, self._assign_layout_ahead_of_plan(entry), value)

    def assign_layouts_before_loading(self) -> None:
        """Assign layouts to pending variables before their values are assigned one by one from a file."""
        with self.lock, self._suspend_tracing_unless_planning():
            if self.registry.version != self._version_planned and not self._planned_ahead.is_current():
                entries = describe_variables(self.registry)
                found = self._assign_layouts(entries, is_complete=False)
                pairs = zip(entries, found, strict=True)
                self._planned_ahead.store_entries({id(e.variable): a for e, a in pairs})

    def find_variable_path(self, variable: object) -> str:
        """Return the object path of a variable for messages."""
        with self.lock, self._suspend_tracing_unless_planning():
            return self._describe_variable(variable).spec.path

    def _assign_layout_ahead_of_plan(self, entry: DescribedVariable) -> Assignment:
        """Return the layout of a variable that gets its value before the layouts of all variables are assigned."""
        return self._planned_ahead.get_entry(entry.variable) or self.context.assign_single_layout(
            self._rename_as_in_new_process(entry.spec)
        )

    def raise_if_plan_only(self, subject: str) -> None:
        """Raise a `PlanError` that begins with `subject` if the scope is that of a plan."""
        if self.context.plan_only:
            raise PlanError(
                f"{subject}: this model is only a plan, so it has no values",
                facts={"read by": format_running_layer()},
                why="plan() builds a model without allocating anything",
                fix="leave calls with arrays, fit, and predict out of the function that creates the "
                "model; to create its weights, call it with keras.Input(...), or pass inputs= to plan(); call a layer "
                "that takes a constant, as Embedding(...)(arange(64)), in the call of a layer of your own, because "
                "Keras does not train it outside of one"
                if self._is_scope_open
                else "build it with values: with layout_map.scope(): model = make_model()",
            )

    def _check_value_read_in_plan(self, variable: Any) -> None:
        """Raise if a plan cannot return zeros as the value of a weight that is being read."""
        if not self._is_scope_open or is_calling_layer():
            self.raise_if_plan_only(self.find_variable_path(variable))
        elif math.prod(variable.shape) > _MAX_ZEROS:
            raise PlanError(
                f"{self.find_variable_path(variable)}: its value is read while the model is planned, and is too "
                "large to be replaced by zeros",
                facts={"shape": tuple(variable.shape), "read by": format_running_layer()},
                why=f"plan() returns zeros for such a read, but at most {_MAX_ZEROS:,} elements",
                fix="read the weight after the model is made, or plan the model with a smaller weight",
            )

    def _describe_variable(self, variable: object) -> DescribedVariable:
        """Describe a variable for the plan. If its layer is known, read only this layer, which is faster than all."""
        layer = self.registry.find_creating_layer(variable)
        found = self._path_lookup.describe_variable(variable, layer) if layer is not None else None
        if found is not None:
            return found
        # Only slots, metrics, and seeds have no known layer, and they are rarely read before the plan exists. So
        # describe all variables, which is slow, only now.
        if not self._specs.is_current():
            self._specs.store_entries({id(e.variable): e.spec for e in describe_variables(self.registry)})
        spec = self._specs.get_entry(variable)
        if spec:
            return DescribedVariable(variable, spec)
        return describe_standalone_variable(variable, self.registry.find_standalone_kind(variable))

    # -- entry points

    def build_model(self, make_model: Callable[[], object]) -> Any:
        """Call `make_model` in the scope, and return its model after all its variables got their layouts."""
        with self.defer_variables():
            return make_model()

    def shard_model(self, model: keras.Model) -> object:
        """Shard an existing model as if it had been built in this scope, and return it."""
        for layer in model._flatten_layers():
            self._wrap_existing_layer(layer)
        for found in find_variables(model):
            self.registry.add_variable(found.variable)
        if isinstance(model, keras.Model):
            if getattr(model, "optimizer", None) is not None:
                wrap_optimizer(model.optimizer, self)
            register_training_variables(model, self)
        self.materialize_variables()
        return model

    def create_lazy_variables(self, model: object, inputs: object) -> None:
        """Create the variables that a first call and a training step would create, without running either."""
        create_missing_variables(model, inputs)


def _find_output_rank(layer: object) -> int | None:
    """Return the rank of a layer's output, or None if it is unknown, as inside of a layer's own `call`."""
    output = getattr(layer, "output", None)
    return len(output.shape) if isinstance(output, keras.KerasTensor) else None
