"""One scope's work in Keras: defer variables, then give each its value in its layout.

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

from layoutmap.adapters.current import entered, is_entered
from layoutmap.adapters.keras import private
from layoutmap.adapters.keras.call_stack import count_user_frames, describe_reader, find_makers, is_in_call
from layoutmap.adapters.keras.copies import watch_loads
from layoutmap.adapters.keras.describing import Entry, describe, describe_alone, layer_paths, unsupported_of
from layoutmap.adapters.keras.existing_layers import find_existing_layers, make_existing_error
from layoutmap.adapters.keras.hooks import installed
from layoutmap.adapters.keras.initializers import why_global
from layoutmap.adapters.keras.loading import check_shape
from layoutmap.adapters.keras.materialize import Materializer
from layoutmap.adapters.keras.names import is_noted, note_given
from layoutmap.adapters.keras.path_lookup import PathLookup
from layoutmap.adapters.keras.paths import find_variables
from layoutmap.adapters.keras.pending import is_pending, make_pending
from layoutmap.adapters.keras.protocol import Backend, KerasSession, OnThread
from layoutmap.adapters.keras.registry import Registry, Table
from layoutmap.adapters.keras.training import adopt_for_training, complete
from layoutmap.adapters.keras.untracked import find_loose_ids
from layoutmap.adapters.keras.wraps import session_of, unwrap_optimizer, wrap_layer, wrap_optimizer
from layoutmap.adapters.protocol import ScopeContext
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import PlanError, ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.variables import Assignment, Kind, VariableSpec, format_variable_names
from layoutmap.engines.agreement import check_values
from layoutmap.engines.protocol import Engine

_MOST_ZEROS = 2**28  # elements: of the zeros that a plan returns to whoever reads a weight


class Session(KerasSession):
    """One scope's work in Keras."""

    library = "keras"

    def __init__(self, context: ScopeContext, backend: Backend):
        self.context = context
        self.policy = context.policy
        self.backend = backend
        self.on_thread = OnThread()
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
        self._kept: set[int] = set()  # what was loose when garbage was last collected
        self._is_materializing = False
        self._failed = False
        self._names_before = private.counts_of_names()

    @property
    def engine(self) -> Engine:
        """The engine that holds the arrays; a plan has none."""
        return self.context.engine

    # -- what is made in the scope

    @contextmanager
    def defer(self) -> Iterator[None]:
        """While open, variables are made without values; the outermost one materializes them at its end."""
        inside = self._is_open
        if not inside:
            self.on_thread.opened_at = count_user_frames()
        with installed(self.backend.quiet), entered(self):
            yield
        if not inside:
            if private.in_stateless_scope() and self.backend.is_tracing():
                private.after_stateless_scope(self._materialize_if_closed)
            else:
                self.materialize()

    def layer_created(self, layer: object, *, given: Iterable[str] | None = None) -> None:
        """A layer was constructed, with these texts among its arguments; `None`: it was there before the scope."""
        if given is not None:
            if is_noted(layer):  # another library wraps the hook that has reported this once
                return
            note_given(layer, given)
        self.registry.add_layer(layer)
        wrap_layer(layer, self)

    def made(self, model: object) -> bool:
        """Return whether a model was made here."""
        return session_of(model) is self

    def why_not_here(self) -> ScopeError | None:
        """Return the error for a variable that is made now, if it is one of an object that existed before the scope.

        A layer that is built by another one, which was made here, is part of that and laid out with it. A plan must
        leave it as it is.
        """
        plan_only, outermost = self.context.plan_only, None
        for maker in find_makers(self.on_thread.opened_at):
            is_layer = isinstance(maker, keras.layers.Layer)
            if is_layer and session_of(maker) is not None:
                return (
                    make_existing_error(outermost, plan_only) if outermost is not None and plan_only else None
                )
            if is_layer:
                outermost = maker
            elif plan_only and isinstance(maker, keras.Optimizer) and session_of(maker) is None:
                return make_existing_error(maker, plan_only)
        return None if outermost is None else make_existing_error(outermost, plan_only)

    @contextmanager
    def drawing(self, generator: Any) -> Iterator[None]:
        """While open, a seed generator is drawn from; in a plan it keeps its state."""
        if private.in_stateless_scope():
            yield
        elif self.context.plan_only:
            before = generator.state.value * 1
            yield
            generator.state.assign(before)
        else:
            self.draw_before()
            yield

    def draw_before(self, variable: object = None) -> None:
        """Draw what plain Keras has drawn before it makes a variable, or up to now."""
        with self.lock, self._outside():
            self._materializer.draw_before(variable, self.make_now)

    def optimizer_created(self, optimizer: object) -> None:
        """An optimizer is being constructed: look after it, whoever it is for."""
        wrap_optimizer(optimizer, self)

    def optimizer_replaced(self, optimizer: object) -> None:
        """A model was given another optimizer than this one."""
        if not any(getattr(layer, "optimizer", None) is optimizer for layer in self.registry.layers()):
            unwrap_optimizer(optimizer)

    def variable_created(
        self, variable: Any, plain_init: Callable[..., None], initializer: Any, args: Any, kwargs: Any
    ) -> None:
        """A variable is being constructed: do so without a value, unless it is given one."""
        reference = kwargs.get("layout")
        if self.context.plan_only and isinstance(initializer, (int, float)) and kwargs.get("dtype"):
            # As optimizers make them. Keras would make an array of the number, and start a backend for it.
            initializer, kwargs = keras.initializers.Constant(initializer), {**kwargs, "shape": ()}
        if callable(initializer) or isinstance(initializer, str):
            with private.without_value():
                plain_init(variable, initializer, *args, **kwargs)
            make_pending(variable, self)
            self._materializer.made(variable)
            variable._layout = weakref.ref(variable)  # its tag until it has a value: see `Registry.weight_of`
        else:
            plain_init(variable, initializer, *args, **kwargs)
        found = list(find_makers(self.on_thread.opened_at))
        if found:
            layer = next((maker for maker in found if isinstance(maker, keras.layers.Layer)), None)
            self.registry.add(variable, layer)
        else:  # a variable of its own, such as a user's code makes
            note_given(variable, [v for v in (*args, *kwargs.values()) if isinstance(v, str)])
            self.registry.add(variable, kind=Kind.WEIGHT if variable.trainable else Kind.STATE)
        parent = self.registry.weight_of(reference)
        if parent is not None:
            self.registry.set_parent(variable, parent)

    # -- describing

    def unbuilt(self) -> list[str]:
        """Return the names of layers that will make weights when they are first called."""
        return [
            layer.name
            for layer in self.registry.layers()
            if not getattr(layer, "built", True) and not private.is_default(layer.build)
        ]

    # -- materializing

    def _outside(self) -> AbstractContextManager[object]:
        """Leave any tracing that goes on. A plan makes no arrays, and to leave some tracing starts a backend."""
        return nullcontext() if self.context.plan_only else self.backend.outside()

    def materialize(self) -> None:
        """Give every variable of the scope its layout, and every pending one its value."""
        with self.lock, self._outside():
            waiting = self.registry.variables()
            # Also of what an early read has made by itself.
            news = self.registry.version != self._version_planned
            if not news and not any(is_pending(v) or self.registry.layout_of(v) is None for v in waiting):
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
        """Have Python forget what nobody holds any more, so that a plan does not depend on when it does by itself.

        Of several processes, what one has forgotten all have: they describe the same variables.
        """
        if self.context.across or not find_loose_ids(self.registry) <= self._kept:
            gc.collect()
            self._kept = find_loose_ids(self.registry)

    def _materialize(self, waiting: list[object]) -> None:
        entries = describe(self.registry)
        assignments = self._assign(entries, complete=not self.unbuilt())
        if not self.context.plan_only:
            self._take_existing()
        self._version_planned = self.registry.version
        if self.context.plan_only:
            return
        self._materializer.draw_in_turn(self.make_now)
        pairs = list(zip(entries, assignments, strict=True))
        self._materializer.initialize([(e, a) for e, a in pairs if is_pending(e.variable)])
        if self.context.across:
            named = zip(format_variable_names([e.spec for e in entries]), entries, strict=True)
            new = [(name, e.variable) for name, e in named if self.registry.layout_of(e.variable) is None]
            check_values(
                ((name, compute_checksum(self.engine.to_numpy(v._value))) for name, v in new),
                self.context.gather,
            )
        for entry, assignment in pairs:
            if self.registry.layout_of(entry.variable) != assignment.layout:
                self._materializer.place(entry.variable, assignment)
        for variable in waiting:
            if is_pending(variable) and private.is_global_seed(variable):
                self._materializer.initialize_plainly(variable)
        self.backend.values_changed(self.registry.optimizers(), self.registry.layers())

    def _take_existing(self) -> None:
        """Look after layers that existed before, where they are part of what was made here, and so are laid out too."""
        layers = self.registry.layers()
        for layer in list(find_existing_layers(layers, lambda layer: session_of(layer) is not None)):
            self._take_layer(layer)

    def _take_layer(self, layer: object) -> None:
        self.layer_created(layer)
        if isinstance(layer, keras.Model):
            layer.train_function = layer.test_function = layer.predict_function = None

    def _assign(self, entries: list[Entry], *, complete: bool) -> Sequence[Assignment]:
        return self.context.assign(
            [self._named(e.spec) for e in entries],
            {e.spec.key: why for e in entries if (why := self._why_global(e))},
            unsupported_of(self.backend, self.registry.layers(), entries),
            complete,
            [path for path, _ in layer_paths(self.registry.layers())] if self.policy.activations else None,
            self.backend.chooses_layouts,
        )

    def _named(self, spec: VariableSpec) -> VariableSpec:
        """A variable with the name that Keras gives it where the scope is the first thing in a process.

        The numbers that Keras adds to names count what was made before. A plan and what is then built have the same.
        """
        prefix, sign, path = spec.name.partition(":")
        name = f"{prefix}{sign}{private.as_if_first(path, self._names_before)}"
        return spec if name == spec.name else replace(spec, name=name)

    # -- activations

    def output_layout(self, layer: object) -> tuple[str, Layout | None]:
        """Return a layer's path, and the layout of what it returns; `None`: it stays as it is."""
        if not self._outputs.is_current():
            found: dict[int, tuple[str, Layout | None]] = {}
            for path, each in layer_paths(self.registry.layers()):
                # A shared layer has the rule of any of its paths.
                if found.get(id(each), ("", None))[1] is None:
                    found[id(each)] = path, self.policy.find_activation_layout(path)
            self._outputs.fill(found)
        return self._outputs.get(layer) or ("", None)

    def _why_global(self, entry: Entry) -> str:
        if entry.spec.kind not in (Kind.WEIGHT, Kind.STATE) or not is_pending(entry.variable):
            return ""
        return why_global(entry.variable._initializer, self.backend.global_init)

    def _materialize_if_closed(self) -> None:
        """Materialize, unless whoever opened the scope is still to do so.

        Keras calls this when it leaves its symbolic code, and may do so where it catches every exception, to try
        something else: a plan's errors would be lost there.
        """
        if not self._is_open:
            self.materialize()

    @property
    def _is_open(self) -> bool:
        return is_entered(self)

    def make_now(self, variable: object) -> None:
        """Give a pending variable its value, since somebody reads it.

        Inside the scope that is an early read, and only this variable is made; in a plan it stays pending. After it,
        an exception or a plan that does not fit has left variables pending: that is done now, or raises again.
        """
        with self.lock, self._outside():
            if is_pending(variable) and private.is_global_seed(variable):
                self._materializer.initialize_plainly(variable)
            elif not self._is_open and not self._is_materializing:
                self.materialize()
            if not is_pending(variable):
                return
            if self.context.plan_only:
                self._check_read(variable)
                return
            self.draw_before(variable)
            entry = self._entry_of(variable)
            self._materializer.initialize([(entry, self._assignment_of(entry))])

    def assign_now(self, variable: keras.Variable, value: Any) -> None:
        """Give one pending variable an assigned value; its initializer never runs."""
        with self.lock, self._outside():
            if self._failed and not self._is_open and not self._is_materializing:
                self.materialize()
            if self.context.plan_only and self._is_open:
                if tuple(variable.shape) != tuple(value.shape):
                    check_shape(variable, self.path_of(variable), value)
                return
            entry = self._entry_of(variable)
            self.refuse_in_a_plan(entry.spec.path)
            self.draw_before(variable)
            self._materializer.assign(variable, self._assignment_of(entry), value)

    def plan_ahead(self) -> None:
        """Find the layouts of what is pending, before values come one by one, as from a file."""
        with self.lock, self._outside():
            if self.registry.version != self._version_planned and not self._planned_ahead.is_current():
                entries = describe(self.registry)
                found = self._assign(entries, complete=False)
                pairs = zip(entries, found, strict=True)
                self._planned_ahead.fill({id(e.variable): a for e, a in pairs})

    def path_of(self, variable: object) -> str:
        """Return the object path of a variable, for messages."""
        with self.lock, self._outside():
            return self._entry_of(variable).spec.path

    def _assignment_of(self, entry: Entry) -> Assignment:
        """Return the layout of a variable that gets its value before all are planned, or as planned ahead."""
        return self._planned_ahead.get(entry.variable) or self.context.assign_one(self._named(entry.spec))

    def refuse_in_a_plan(self, name: str) -> None:
        """Raise if this is a dry run, in which nothing gets a value."""
        if self.context.plan_only:
            raise PlanError(
                f"{name}: this model is only a plan, it has no values",
                facts={"read by": describe_reader()},
                why="plan() builds a model without allocating anything",
                fix="leave calls with arrays, fit and predict out of the function that makes the model; to have its "
                "weights made, call it with keras.Input(...), or pass inputs= to plan()"
                if self._is_open
                else "build it for real: with layout_map.scope(): model = make_model()",
            )

    def _check_read(self, variable: Any) -> None:
        """Raise if a plan does not answer the read of a weight with zeros of its shape."""
        if not self._is_open or is_in_call():
            self.refuse_in_a_plan(self.path_of(variable))
        elif math.prod(variable.shape) > _MOST_ZEROS:
            raise PlanError(
                f"{self.path_of(variable)}: its value is read while the model is planned, and it is too large for that",
                facts={"shape": tuple(variable.shape), "read by": describe_reader()},
                why="plan() answers such a read with zeros, but makes no arrays of more than "
                f"{_MOST_ZEROS:,} elements",
                fix="compute from the weight after the model is made, or plan the model with a smaller weight there",
            )

    def _entry_of(self, variable: object) -> Entry:
        layer = self.registry.layer_of(variable)
        found = self._path_lookup.find_entry(variable, layer) if layer is not None else None
        if found is not None:
            return found
        if not self._specs.is_current():  # slots, metrics, seeds: few are read before all is known
            self._specs.fill({id(e.variable): e.spec for e in describe(self.registry)})
        spec = self._specs.get(variable)
        return Entry(variable, spec) if spec else describe_alone(variable, self.registry.kind_of(variable))

    # -- models that exist, and models to be

    def build(self, make: Callable[[], object]) -> Any:
        """Return the model that a function makes, materialized."""
        with self.defer():
            return make()

    def take(self, model: keras.Model) -> object:
        """Lay out a model that exists, and look after it as if it had been built here; returns it."""
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
        """Have a model make what it would make at its first call and training step; computes nothing."""
        complete(model, inputs)
