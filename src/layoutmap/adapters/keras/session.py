"""Defer the variables of one scope, then compute each in its layout.

    defer        the constructor hooks report each layer and variable that is made while the scope is open: `registry`
    describe     walk the models that the layers form, and name every variable by its object path: `describing`
    materialize  ask the scope for all layouts at once, then initialize what is pending and place the rest

A scope is often left before the weights exist: Keras makes them at a model's first call, or in `fit`. So each layer
made in a scope carries the scope with it: its `build` and its like open it again for as long as they run. The file is
longer than others since each of Keras's ways to make a weight comes to this class.
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

from layoutmap.adapters.current import active_session, is_session_active
from layoutmap.adapters.keras import private
from layoutmap.adapters.keras.call_stack import count_user_frames, describe_reader, find_makers, is_in_call
from layoutmap.adapters.keras.copies import watch_loads
from layoutmap.adapters.keras.describing import (
    Entry,
    describe_alone,
    describe_variables,
    find_unsupported,
    list_layer_paths,
)
from layoutmap.adapters.keras.existing_layers import find_existing_layers, make_existing_error
from layoutmap.adapters.keras.hooks import install_hooks
from layoutmap.adapters.keras.initializers import find_global_reason
from layoutmap.adapters.keras.loading import check_shape
from layoutmap.adapters.keras.materialize import Materializer
from layoutmap.adapters.keras.names import is_noted, note_given
from layoutmap.adapters.keras.path_lookup import PathLookup
from layoutmap.adapters.keras.paths import find_variables
from layoutmap.adapters.keras.pending import is_pending, make_pending
from layoutmap.adapters.keras.protocol import Backend, KerasSession, ThreadState
from layoutmap.adapters.keras.registry import Registry, Table
from layoutmap.adapters.keras.training import adopt_for_training, complete
from layoutmap.adapters.keras.untracked import find_loose_ids
from layoutmap.adapters.keras.wraps import get_session, unwrap_optimizer, wrap_layer, wrap_optimizer
from layoutmap.adapters.protocol import ScopeContext
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import PlanError, ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.variables import Assignment, Kind, VariableSpec, format_variable_names
from layoutmap.engines.agreement import check_values
from layoutmap.engines.protocol import Engine

_MOST_ZEROS = 2**28  # the limit for zeros that a plan returns as a weight's value


class Session(KerasSession):
    """Build or shard the Keras models of one scope."""

    library = "keras"

    def __init__(self, context: ScopeContext, backend: Backend):
        self.context = context
        self.policy = context.policy
        self.backend = backend
        self.on_thread = ThreadState()
        self.gathering = 0
        self.load_watch = watch_loads()
        self.outer_models = weakref.WeakSet[object]()
        self.lock = threading.RLock()
        self.registry = Registry()
        self._materializer = Materializer(self)
        self._version_planned = 0
        self._specs = Table[VariableSpec](self.registry)
        self._path_lookup = PathLookup(self.registry)
        self._planned_ahead = Table[Assignment](self.registry)
        self._outputs = Table[tuple[str, Layout | None]](self.registry)
        self._kept: set[int] = set()  # the untracked objects at the last garbage collection
        self._is_materializing = False
        self._failed = False
        self._names_before = private.count_names()

    @property
    def engine(self) -> Engine:
        """Engine of the scope's arrays. A plan has no engine."""
        return self.context.engine

    # -- objects created in the scope

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Create variables without values in the block. The end of the outermost block materializes them."""
        inside = self._is_open
        if not inside:
            self.on_thread.opened_at = count_user_frames()
        with install_hooks(self.backend.silenced_methods), active_session(self):
            yield
        if not inside:
            if private.in_stateless_scope() and self.backend.is_tracing():
                private.call_after_stateless_scope(self._materialize_if_closed)
            else:
                self.materialize()

    def note_layer(self, layer: object, *, given: Iterable[str] | None = None) -> None:
        """Wrap a layer, and record the texts passed to its constructor, or None if it existed before the scope."""
        if given is not None:
            if is_noted(layer):  # another library wraps the hook, so the layer is already recorded
                return
            note_given(layer, given)
        self.registry.add_layer(layer)
        wrap_layer(layer, self)

    def made(self, model: object) -> bool:
        """Return whether a model was built in this scope."""
        return get_session(model) is self

    def find_existing_error(self) -> ScopeError | None:
        """Return the error for a variable of an object that existed before the scope, or None.

        A layer that is built by another one, which was made here, is part of that and laid out with it. A plan must
        leave it as it is.
        """
        plan_only, outermost = self.context.plan_only, None
        for maker in find_makers(self.on_thread.opened_at):
            is_layer = isinstance(maker, keras.layers.Layer)
            if is_layer and get_session(maker) is not None:
                return (
                    make_existing_error(outermost, plan_only) if outermost is not None and plan_only else None
                )
            if is_layer:
                outermost = maker
            elif plan_only and isinstance(maker, keras.Optimizer) and get_session(maker) is None:
                return make_existing_error(maker, plan_only)
        return None if outermost is None else make_existing_error(outermost, plan_only)

    @contextmanager
    def advance_or_restore_seed(self, generator: Any) -> Iterator[None]:
        """Allow draws from a seed generator in the block. In a plan, restore its state afterwards."""
        if private.in_stateless_scope():
            yield
        elif self.context.plan_only:
            before = generator.state.value * 1
            yield
            generator.state.assign(before)
        else:
            self.draw_earlier_seeds()
            yield

    def draw_earlier_seeds(self, variable: object = None) -> None:
        """Draw the seeds that unsharded Keras would have drawn before this variable, or all so far."""
        with self.lock, self._leave_tracing():
            self._materializer.draw_earlier_seeds(variable, self.make_now)

    def note_optimizer(self, optimizer: object) -> None:
        """Wrap an optimizer that is being constructed in this scope."""
        wrap_optimizer(optimizer, self)

    def release_optimizer(self, optimizer: object) -> None:
        """Stop wrapping an optimizer that no model uses any more."""
        if not any(getattr(layer, "optimizer", None) is optimizer for layer in self.registry.layers()):
            unwrap_optimizer(optimizer)

    def create_variable(
        self, variable: Any, plain_init: Callable[..., None], initializer: Any, args: Any, kwargs: Any
    ) -> None:
        """Construct a variable without its value, unless it gets a given array."""
        reference = kwargs.get("layout")
        if self.context.plan_only and isinstance(initializer, (int, float)) and kwargs.get("dtype"):
            # Keras would create an array from a number and start the backend, so wrap it.
            initializer, kwargs = keras.initializers.Constant(initializer), {**kwargs, "shape": ()}
        if callable(initializer) or isinstance(initializer, str):
            with private.deferred_values():
                plain_init(variable, initializer, *args, **kwargs)
            make_pending(variable, self)
            self._materializer.record_pending(variable)
            # A pending variable is its own tag (`Registry.find_tagged_weight`).
            variable._layout = weakref.ref(variable)
        else:
            plain_init(variable, initializer, *args, **kwargs)
        found = list(find_makers(self.on_thread.opened_at))
        if found:
            layer = next((maker for maker in found if isinstance(maker, keras.layers.Layer)), None)
            self.registry.add(variable, layer)
        else:  # user code created a standalone variable
            note_given(variable, [v for v in (*args, *kwargs.values()) if isinstance(v, str)])
            self.registry.add(variable, kind=Kind.WEIGHT if variable.trainable else Kind.STATE)
        parent = self.registry.find_tagged_weight(reference)
        if parent is not None:
            self.registry.set_parent(variable, parent)

    # -- describing

    def list_unbuilt_layers(self) -> list[str]:
        """Return the names of layers that create weights in their first call."""
        return [
            layer.name
            for layer in self.registry.layers()
            if not getattr(layer, "built", True) and not private.is_default(layer.build)
        ]

    # -- materializing

    def _leave_tracing(self) -> AbstractContextManager[object]:
        """Leave any tracing. A plan stays in it, because it must not start a backend."""
        return nullcontext() if self.context.plan_only else self.backend.leave_tracing()

    def materialize(self) -> None:
        """Give every variable of the scope its layout, and every pending one its value."""
        with self.lock, self._leave_tracing():
            waiting = self.registry.variables()
            # An early read may have created variables, so include them.
            news = self.registry.version != self._version_planned
            if not news and not any(is_pending(v) or self.registry.get_layout(v) is None for v in waiting):
                return
            del waiting
            self._collect_garbage()
            waiting = self.registry.variables()
            self._is_materializing = self._failed = True
            try:
                self._materialize(waiting)
                self._failed = False
            finally:
                self._is_materializing = False

    def _collect_garbage(self) -> None:
        """Run the garbage collector, so that a plan does not depend on when Python runs it.

        Of several processes, what one has forgotten all have: they describe the same variables.
        """
        if self.context.across or not find_loose_ids(self.registry) <= self._kept:
            gc.collect()
            self._kept = find_loose_ids(self.registry)

    def _materialize(self, waiting: list[object]) -> None:
        entries = describe_variables(self.registry)
        assignments = self._assign_layouts(entries, complete=not self.list_unbuilt_layers())
        if not self.context.plan_only:
            # Existing layers inside models of this scope are sharded, too.
            for layer in list(
                find_existing_layers(self.registry.layers(), lambda layer: get_session(layer) is not None)
            ):
                self._take_layer(layer)
        self._version_planned = self.registry.version
        if self.context.plan_only:
            return
        self._materializer.draw_in_turn(self.make_now)
        pairs = list(zip(entries, assignments, strict=True))
        self._materializer.initialize([(e, a) for e, a in pairs if is_pending(e.variable)])
        if self.context.across:
            named = zip(format_variable_names([e.spec for e in entries]), entries, strict=True)
            new = [(name, e.variable) for name, e in named if self.registry.get_layout(e.variable) is None]
            check_values(
                ((name, compute_checksum(self.engine.to_numpy(v._value))) for name, v in new),
                self.context.gather,
            )
        for entry, assignment in pairs:
            if self.registry.get_layout(entry.variable) != assignment.layout:
                self._materializer.place(entry.variable, assignment)
        for variable in waiting:
            if is_pending(variable) and private.is_global_seed(variable):
                self._materializer.initialize_unsharded(variable)
        self.backend.refresh_references(self.registry.optimizers(), self.registry.layers())

    def _take_layer(self, layer: object) -> None:
        self.note_layer(layer)
        if isinstance(layer, keras.Model):
            layer.train_function = layer.test_function = layer.predict_function = None

    def _assign_layouts(self, entries: list[Entry], *, complete: bool) -> Sequence[Assignment]:
        return self.context.assign(
            [self._rename_as_first(e.spec) for e in entries],
            {e.spec.key: why for e in entries if (why := self._find_global_reason(e))},
            find_unsupported(self.backend, self.registry.layers(), entries),
            complete,
            [path for path, _ in list_layer_paths(self.registry.layers())]
            if self.policy.activations
            else None,
            self.backend.chooses_layouts,
        )

    def _rename_as_first(self, spec: VariableSpec) -> VariableSpec:
        """Rename a variable as Keras would name it in a new process.

        The numbers that Keras adds to names count what was made before. A plan and what is then built have the same.
        """
        prefix, sign, path = spec.name.partition(":")
        name = f"{prefix}{sign}{private.renumber_path(path, self._names_before)}"
        return spec if name == spec.name else replace(spec, name=name)

    # -- activations

    def find_output_layout(self, layer: object) -> tuple[str, Layout | None]:
        """Return a layer's path, and the layout of its outputs or None to keep theirs."""
        if not self._outputs.is_current():
            found: dict[int, tuple[str, Layout | None]] = {}
            for path, each in list_layer_paths(self.registry.layers()):
                # A shared layer uses the rules for any of its paths.
                if found.get(id(each), ("", None))[1] is None:
                    found[id(each)] = path, self.policy.find_activation_layout(path)
            self._outputs.fill(found)
        return self._outputs.get(layer) or ("", None)

    def _find_global_reason(self, entry: Entry) -> str:
        if entry.spec.kind not in (Kind.WEIGHT, Kind.STATE) or not is_pending(entry.variable):
            return ""
        return find_global_reason(entry.variable._initializer, self.backend.global_init)

    def _materialize_if_closed(self) -> None:
        """Materialize the variables, unless the open scope will do so at its end.

        Keras calls this when it leaves its symbolic code, and may do so where it catches every exception, to try
        something else: a plan's errors would be lost there.
        """
        if not self._is_open:
            self.materialize()

    @property
    def _is_open(self) -> bool:
        return is_session_active(self)

    def make_now(self, variable: object) -> None:
        """Compute the value of a pending variable that is being read.

        Inside the scope that is an early read, and only this variable is made; in a plan it stays pending. After it,
        an exception or a plan that does not fit has left variables pending: that is done now, or raises again.
        """
        with self.lock, self._leave_tracing():
            if is_pending(variable) and private.is_global_seed(variable):
                self._materializer.initialize_unsharded(variable)
            elif not self._is_open and not self._is_materializing:
                self.materialize()
            if not is_pending(variable):
                return
            if self.context.plan_only:
                self._check_read(variable)
                return
            self.draw_earlier_seeds(variable)
            entry = self._find_entry(variable)
            self._materializer.initialize([(entry, self._find_assignment(entry))])

    def assign_now(self, variable: keras.Variable, value: Any) -> None:
        """Store an assigned value in a pending variable without running its initializer."""
        with self.lock, self._leave_tracing():
            if self._failed and not self._is_open and not self._is_materializing:
                self.materialize()
            if self.context.plan_only and self._is_open:
                if tuple(variable.shape) != tuple(value.shape):
                    check_shape(variable, self.find_path(variable), value)
                return
            entry = self._find_entry(variable)
            self.refuse_in_a_plan(entry.spec.path)
            self.draw_earlier_seeds(variable)
            self._materializer.assign(variable, self._find_assignment(entry), value)

    def plan_ahead(self) -> None:
        """Find the layouts of pending variables before their values are assigned one by one from a file."""
        with self.lock, self._leave_tracing():
            if self.registry.version != self._version_planned and not self._planned_ahead.is_current():
                entries = describe_variables(self.registry)
                found = self._assign_layouts(entries, complete=False)
                pairs = zip(entries, found, strict=True)
                self._planned_ahead.fill({id(e.variable): a for e, a in pairs})

    def find_path(self, variable: object) -> str:
        """Return the object path of a variable for messages."""
        with self.lock, self._leave_tracing():
            return self._find_entry(variable).spec.path

    def _find_assignment(self, entry: Entry) -> Assignment:
        """Return the layout of a variable that gets its value before all variables are planned."""
        return self._planned_ahead.get(entry.variable) or self.context.assign_one(
            self._rename_as_first(entry.spec)
        )

    def refuse_in_a_plan(self, name: str) -> None:
        """Raise if this is a dry run, in which nothing gets a value."""
        if self.context.plan_only:
            raise PlanError(
                f"{name}: this model is only a plan, so it has no values",
                facts={"read by": describe_reader()},
                why="plan() builds a model without allocating anything",
                fix="leave calls with arrays, fit, and predict out of the function that creates the "
                "model; to create its weights, call it with keras.Input(...), or pass inputs= to plan()"
                if self._is_open
                else "build it with values: with layout_map.scope(): model = make_model()",
            )

    def _check_read(self, variable: Any) -> None:
        """Raise if a plan cannot answer the read of a weight with zeros."""
        if not self._is_open or is_in_call():
            self.refuse_in_a_plan(self.find_path(variable))
        elif math.prod(variable.shape) > _MOST_ZEROS:
            raise PlanError(
                f"{self.find_path(variable)}: its value is read while the model is planned, and is too "
                "large to stand in for",
                facts={"shape": tuple(variable.shape), "read by": describe_reader()},
                why=f"plan() returns zeros for such a read, but at most {_MOST_ZEROS:,} elements",
                fix="compute from the weight after the model is made, or plan the model with a smaller weight there",
            )

    def _find_entry(self, variable: object) -> Entry:
        layer = self.registry.find_layer(variable)
        found = self._path_lookup.find_entry(variable, layer) if layer is not None else None
        if found is not None:
            return found
        # slots, metrics, and seeds are rarely read early, so list them only when needed
        if not self._specs.is_current():
            self._specs.fill({id(e.variable): e.spec for e in describe_variables(self.registry)})
        spec = self._specs.get(variable)
        return Entry(variable, spec) if spec else describe_alone(variable, self.registry.find_kind(variable))

    # -- entry points

    def build(self, make: Callable[[], object]) -> Any:
        """Return the model that a function makes, materialized."""
        with self.defer():
            return make()

    def take(self, model: keras.Model) -> object:
        """Shard an existing model as if it had been built here, and return it."""
        for layer in model._flatten_layers():
            self._take_layer(layer)
        for found in find_variables(model):
            self.registry.add(found.variable)
        if isinstance(model, keras.Model):
            if getattr(model, "optimizer", None) is not None:
                wrap_optimizer(model.optimizer, self)
            adopt_for_training(model, self)
        self.materialize()
        return model

    def complete(self, model: object, inputs: object) -> None:
        """Create, without computing, the variables that a first call and training step would create."""
        complete(model, inputs)
