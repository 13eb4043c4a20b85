"""One scope's work in Keras: watch variables and layers being born, then give each variable its value in its layout.

    born      the constructor hooks report each layer and variable that is made while the scope is open
    describe  walk the models that the layers form, and name every variable by its object path: see `describing`
    settle    ask the scope for all layouts at once, then make what has no value and place what has one

A scope is often left before the weights exist: Keras makes them at a model's first call, or in `fit`. So each layer
born in a scope carries the scope with it: its `build` and its like open it again for as long as they run.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import keras

from layoutmap.adapters.keras import hooks
from layoutmap.adapters.keras.backends import Backend
from layoutmap.adapters.keras.describing import Entry, describe, describe_alone, layer_paths, unsupported_of
from layoutmap.adapters.keras.initializers import initializer_of, initializer_of_seed, why_global
from layoutmap.adapters.keras.loading import check_shape, cut_on_the_host, from_host, is_on_host
from layoutmap.adapters.keras.names import is_noted, note_given
from layoutmap.adapters.keras.paths import find_variables
from layoutmap.adapters.keras.pending import is_pending, make_pending, settle
from layoutmap.adapters.keras.reading import is_in_a_call, read_by
from layoutmap.adapters.keras.training import adopt_for_training, complete
from layoutmap.adapters.keras.wraps import wrap_layer, wrap_optimizer
from layoutmap.adapters.protocol import ScopeContext
from layoutmap.core.checksums import checksum
from layoutmap.core.current import entered, is_entered
from layoutmap.core.errors import PlanError
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.variables import Assignment, Kind, VariableSpec, full_names
from layoutmap.engines.protocol import Engine

__all__ = ["KerasSession"]

_MOST_ZEROS = 2**28  # elements: what a plan gives to whoever reads a weight


@dataclass(slots=True)
class _Record:
    """What a session knows of one variable; forgotten when the variable dies."""

    variable: weakref.ref[Any]
    parent: weakref.ref[Any] | None = None
    tag: Any = None
    layout: Layout | None = None


class KerasSession:
    """One scope's work in Keras.

    Args:
        context: The scope, which knows rules, meshes and arrays.
        backend: The Keras backend.
    """

    library = "keras"

    def __init__(self, context: ScopeContext, backend: Backend):
        self.context = context
        self.policy = context.policy
        self.backend = backend
        self._layers: list[weakref.ref[Any]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._records: dict[int, _Record] = {}  # by id, in the order of birth
        self._tagged: dict[int, _Record] = {}  # by the id of the tag
        self._num_created = self._num_planned = 0
        self._described: tuple[int, dict[int, VariableSpec]] = (0, {})
        self._ahead: tuple[int, dict[int, Assignment]] = (0, {})
        self._outputs: tuple[int, dict[int, tuple[str, Layout | None]]] = (-1, {})
        self.inside = threading.local()  # for ports: how deep in calls of layers a thread is
        self._settling = False
        self._failed = False
        self.lock = threading.RLock()

    @property
    def engine(self) -> Engine:
        """What holds the arrays; a plan has none."""
        return self.context.engine

    # -- births

    @contextmanager
    def defer(self) -> Iterator[None]:
        """While open, variables are born without values; leaving the outermost one settles what is pending."""
        inside = self._is_open
        with hooks.installed(self.backend.quiet), entered(self):
            yield
        if not inside:
            if hooks.in_stateless_scope() and self.backend.is_tracing():
                hooks.settle_after_stateless_scope(self._settle_if_closed)
            else:
                self.settle()

    def layer_created(self, layer: Any, *, given: Iterable[str] | None = None) -> None:
        """A layer was constructed, with these texts among its arguments; `None`: it was there before the scope."""
        if given is not None:
            if is_noted(layer):  # another library wraps the hook that has told this once
                return
            note_given(layer, given)
        self._num_created += 1
        self._layers.append(weakref.ref(layer))
        wrap_layer(layer, self)

    def let_go(self, thing: Any) -> None:
        """A layer or an optimizer belongs to another scope from now on, with its variables."""
        self._layers = [ref for ref in self._layers if ref() is not thing]
        self._optimizers = [ref for ref in self._optimizers if ref() is not thing]
        for variable in getattr(thing, "variables", ()):
            self._forget(id(variable))

    def optimizer_created(self, optimizer: Any) -> None:
        """An optimizer is being constructed: look after it, whoever it is for."""
        wrap_optimizer(optimizer, self)

    def optimizer_attached(self, optimizer: Any) -> None:
        """A model was given an optimizer."""
        if not any(ref() is optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def variable_created(
        self, variable: Any, plain_init: Callable[..., None], initializer: Any, args: Any, kwargs: Any
    ) -> None:
        """A variable is being constructed: do so without a value, where the value is still to be drawn."""
        reference = kwargs.get("layout")
        if callable(initializer) or isinstance(initializer, str):
            with hooks.without_value():
                plain_init(variable, initializer, *args, **kwargs)
            make_pending(variable, self)
            variable._layout = variable  # while it waits, it is its own tag: see `_parent_of`
        else:
            plain_init(variable, initializer, *args, **kwargs)
        record = self._know(variable)
        parent = self._weight_of(reference)
        if parent is not None:
            record.parent = weakref.ref(parent)

    def adopt(self, variables: Iterable[Any]) -> None:
        """Lay out variables that were not born here, too."""
        for variable in variables:
            self._know(variable)

    def _know(self, variable: Any) -> _Record:
        key = id(variable)
        if key not in self._records:
            self._num_created += 1
            self._records[key] = _Record(weakref.ref(variable, lambda _: self._forget(key)))
        return self._records[key]

    def _forget(self, key: int) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._tagged.pop(id(record.tag), None)

    def _weight_of(self, reference: Any) -> Any:
        """The variable whose `_layout` this is: Keras hands it on from a weight to the slots of an optimizer."""
        if isinstance(reference, keras.Variable):
            return reference
        record = self._tagged.get(id(reference))
        return record.variable() if record is not None and record.tag is reference else None

    def knows(self, variable: Any) -> bool:
        """Whether a variable was born here, or adopted."""
        return id(variable) in self._records

    def set_parent(self, variable: Any, parent: Any) -> None:
        """Say whose slot a variable is, where it was not seen being made."""
        self._know(variable).parent = weakref.ref(parent)

    def _known(self) -> list[Any]:
        """The variables that are alive, in the order of birth."""
        return [v for record in list(self._records.values()) if (v := record.variable()) is not None]

    # -- describing

    def _alive(self) -> list[Any]:
        self._layers = [ref for ref in self._layers if ref() is not None]
        layers = [layer for ref in self._layers if (layer := ref()) is not None]
        # Keras makes a hollow object, without __init__, when a Functional model is subclassed.
        return [layer for layer in layers if hasattr(layer, "built")]

    def unbuilt(self) -> list[str]:
        """The names of layers that will make weights when they are first called."""
        return [
            layer.name
            for layer in self._alive()
            if not getattr(layer, "built", True) and not hooks.is_default(layer.build)
        ]

    def _describe(self) -> list[Entry]:
        """All variables of the scope: those of the models first, in the order of the models, then the rest."""
        return describe(self._alive(), self._living_optimizers(), self._known(), self._parent_of)

    def _living_optimizers(self) -> list[Any]:
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def _parent_of(self, variable: Any) -> Any:
        record = self._records.get(id(variable))
        return record.parent() if record is not None and record.parent is not None else None

    # -- settling

    def _outside(self) -> AbstractContextManager[Any]:
        """Leave any tracing that goes on. A plan makes no arrays, and to leave some tracing starts a backend."""
        return nullcontext() if self.context.plan_only else self.backend.outside()

    def settle(self) -> None:
        """Give every variable of the scope its layout, and every pending one its value.

        Raises:
            PlanError: Something does not fit. Nothing has been made or moved then.
        """
        with self.lock, self._outside():
            waiting = self._known()
            news = self._num_created != self._num_planned  # also of what an early read has made by itself
            if not news and not any(is_pending(v) or self._layout_of(v) is None for v in waiting):
                return
            if self.context.across:
                del waiting
                gc.collect()  # what one process has forgotten, all have: they describe the same variables
                waiting = self._known()
            self._settling = self._failed = True
            try:
                self._settle(waiting)
                self._failed = False
            finally:
                self._settling = False

    def _settle(self, waiting: list[Any]) -> None:
        entries = self._describe()
        assignments = self._assign(entries, complete=not self.unbuilt())
        self._num_planned = self._num_created
        if self.context.plan_only:
            return
        pairs = list(zip(entries, assignments, strict=True))
        self._make([(e, a) for e, a in pairs if is_pending(e.variable)])
        if self.context.across:
            named = zip(full_names([e.spec for e in entries]), entries, strict=True)
            new = [(name, e.variable) for name, e in named if self._layout_of(e.variable) is None]
            self.context.check_values((name, checksum(self.engine.whole(v._value))) for name, v in new)
        for entry, assignment in pairs:
            if self._layout_of(entry.variable) != assignment.layout:
                self._place(entry.variable, assignment, entry.variable._value)
        for variable in waiting:
            if is_pending(variable) and hooks.is_global_seed(variable):
                self._make_plain(variable)
        self.backend.settled(self._living_optimizers(), self._alive())

    def _assign(self, entries: list[Entry], *, complete: bool) -> Sequence[Assignment]:
        return self.context.assign(
            [e.spec for e in entries],
            {e.spec.key: why for e in entries if (why := self._why_global(e))},
            unsupported_of(self.backend, self._alive(), entries),
            complete,
            [path for path, _ in layer_paths(self._alive())] if self.policy.activations else None,
            self.backend.chooses_layouts,
        )

    # -- what layers put out

    def output_layout(self, layer: Any) -> tuple[str, Layout | None]:
        """A layer's path, and the layout of what it puts out; `None`: as it comes."""
        if self._outputs[0] != self._num_created:
            found: dict[int, tuple[str, Layout | None]] = {}
            for path, each in layer_paths(self._alive()):
                # A shared layer has the rule of any of its paths.
                if found.get(id(each), ("", None))[1] is None:
                    found[id(each)] = path, self.policy.activation_layout(path)
            self._outputs = self._num_created, found
        return self._outputs[1].get(id(layer), ("", None))

    def _why_global(self, entry: Entry) -> str:
        if entry.spec.kind not in (Kind.WEIGHT, Kind.STATE) or not is_pending(entry.variable):
            return ""
        return why_global(entry.variable._initializer, self.backend.global_init)

    def _settle_if_closed(self) -> None:
        """Settle, unless whoever opened the scope is still to do so.

        Keras calls this when it leaves its symbolic code, and may do so where it catches every exception, to try
        something else: a plan's errors would be lost there.
        """
        if not self._is_open:
            self.settle()

    @property
    def _is_open(self) -> bool:
        return is_entered(self)

    def make_now(self, variable: Any) -> None:
        """Give a pending variable its value, since somebody reads it.

        Inside the scope that is an early read, and only this variable is made; in a plan it stays pending. After it,
        an exception or a plan that does not fit has left the scope unsettled: that is done now, or raises again.
        """
        with self.lock, self._outside():
            if is_pending(variable) and hooks.is_global_seed(variable):
                self._make_plain(variable)
            elif not self._is_open and not self._settling:
                self.settle()
            if not is_pending(variable):
                return
            if self.context.plan_only:
                self._check_read(variable)
                return
            entry = self._entry_of(variable)
            self._make([(entry, self._assignment_of(entry))])

    def assign_now(self, variable: Any, value: Any) -> None:
        """Give one pending variable an assigned value; its initializer never runs."""
        with self.lock, self._outside():
            if self._failed and not self._is_open and not self._settling:
                self.settle()
            if self.context.plan_only and self._is_open:
                if tuple(variable.shape) != tuple(value.shape):
                    check_shape(variable, self.path_of(variable), value)
                return
            entry = self._entry_of(variable)
            self.refuse_in_a_plan(entry.spec.path)
            assignment = self._assignment_of(entry)
            if is_on_host(value):
                check_shape(variable, entry.spec.path, value)
                array = from_host(assignment, value)
            else:
                array = self.engine.relayout(value, assignment.layout)
            self._store(variable, assignment, array)
            settle(variable)  # after that: an interrupt before leaves it pending
            variable._initializer = None

    def plan_ahead(self) -> None:
        """Find the layouts of what is pending, before values come one by one, as from a file.

        Raises:
            PlanError: Something does not fit. Nothing has been made then.
        """
        with self.lock, self._outside():
            if self._num_created not in (self._num_planned, self._ahead[0]):
                entries = self._describe()
                found = self._assign(entries, complete=False)
                pairs = zip(entries, found, strict=True)
                self._ahead = (self._num_created, {id(e.variable): a for e, a in pairs})

    def path_of(self, variable: Any) -> str:
        """The object path of a variable, for messages."""
        with self.lock, self._outside():
            return self._entry_of(variable).spec.path

    def _assignment_of(self, entry: Entry) -> Assignment:
        """The layout of a variable that gets its value before all are planned, or as planned ahead."""
        known = self._ahead[1].get(id(entry.variable)) if self._ahead[0] == self._num_created else None
        return known or self.context.assign_one(entry.spec)

    def refuse_in_a_plan(self, name: str) -> None:
        """Raise if this is a dry run, in which nothing gets a value.

        Raises:
            PlanError: It is; names the variable or model whose value was wanted.
        """
        if self.context.plan_only:
            raise PlanError(
                f"{name}: this model is only a plan, it has no values",
                facts={"read by": read_by()},
                why="plan() builds a model without allocating anything",
                fix="leave calls with arrays, fit and predict out of the function that makes the model; to have its "
                "weights made, call it with keras.Input(...), or pass inputs= to plan()"
                if self._is_open
                else "build it for real: with layout_map.scope(): model = make_model()",
            )

    def _check_read(self, variable: Any) -> None:
        """Raise if a plan does not answer the read of a weight with zeros of its shape."""
        if not self._is_open or is_in_a_call():
            self.refuse_in_a_plan(self.path_of(variable))
        elif math.prod(variable.shape) > _MOST_ZEROS:
            raise PlanError(
                f"{self.path_of(variable)}: its value is read while the model is planned, and it is too large for that",
                facts={"shape": tuple(variable.shape), "read by": read_by()},
                why="plan() answers such a read with zeros, but makes no arrays of more than "
                f"{_MOST_ZEROS:,} elements",
                fix="compute from the weight after the model is made, or plan the model with a smaller weight there",
            )

    def _entry_of(self, variable: Any) -> Entry:
        # Early reads ask for each variable, so they make do with what was found when as many things had been born.
        if self._described[0] != self._num_created:
            self._described = (self._num_created, {id(e.variable): e.spec for e in self._describe()})
        spec = self._described[1].get(id(variable))
        return Entry(variable, spec) if spec else describe_alone(variable)

    def _make(self, todo: list[tuple[Entry, Assignment]]) -> None:
        """Make values, in the order in which the variables were born: seed generators advance in that order."""
        birth = {id(v): number for number, v in enumerate(self._known())}
        todo = sorted(todo, key=lambda pair: birth.get(id(pair[0].variable), 0))
        keyed = {f"{number}:{a.variable.path}": (e.variable, a) for number, (e, a) in enumerate(todo)}
        draws = {key: self._draw_of(v) for key, (v, _) in keyed.items()}
        arrays = self.context.create({key: a for key, (_, a) in keyed.items()}, draws)
        for key, (variable, assignment) in keyed.items():
            self._store(variable, assignment, arrays[key])
            settle(variable)  # after that: an interrupt before leaves it pending
            variable._initializer = None

    def _draw_of(self, variable: Any) -> Initializer:
        shape, dtype = tuple(variable.shape), keras.backend.standardize_dtype(variable._dtype)
        if self.context.across and hooks.is_seed_state(variable):
            return initializer_of_seed(variable._initializer, shape, dtype)
        return initializer_of(variable._initializer, shape, dtype, self._off_mesh)

    def _off_mesh(self, seed: Any) -> Any:
        return keras.ops.convert_to_tensor(self.engine.whole(seed))

    def _make_plain(self, variable: Any) -> None:
        settle(variable)
        variable._layout = None
        with self.backend.outside():
            variable._deferred_initialize()
        self._forget(id(variable))

    def _place(self, variable: Any, assignment: Assignment, value: Any) -> None:
        self._store(variable, assignment, self.engine.relayout(value, assignment.layout))

    def _store(self, variable: Any, assignment: Assignment, array: Any) -> None:
        record = self._know(variable)
        self._tagged.pop(id(record.tag), None)
        held = self.engine.variable(array, name=variable.name, trainable=variable.trainable)
        record.tag = self.backend.store(variable, held, assignment, self)
        cut_on_the_host(variable, assignment)
        record.layout = variable.layout = assignment.layout
        self._tagged[id(record.tag)] = record

    def _layout_of(self, variable: Any) -> Layout | None:
        record = self._records.get(id(variable))
        return record.layout if record is not None else None

    # -- models that exist, and models to be

    def take(self, model: Any) -> None:
        """Lay out a model that exists, and look after it as if it had been built here."""
        for layer in model._flatten_layers():
            self.layer_created(layer)
        self.adopt(found.variable for found in find_variables(model))
        if isinstance(model, keras.Model):
            if getattr(model, "optimizer", None) is not None:
                wrap_optimizer(model.optimizer, self)
            adopt_for_training(model, self)
            model.train_function = model.test_function = model.predict_function = None
        self.settle()

    def complete(self, model: Any, inputs: Any) -> None:
        """Have a model make what it would make at its first call and training step; computes nothing."""
        complete(model, inputs)
