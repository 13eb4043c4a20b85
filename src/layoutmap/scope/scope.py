"""The main job: plan a model, or build it with every variable straight in its layout.

`plan`, `scope`, `build` and `apply` are one path: variables are deferred, described, matched and checked, and then
made. A plan stops before the last step.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from layoutmap.adapters import (
    REFUSED,
    Adapter,
    adapter_of_model,
    get_adapter,
    imported_adapter,
    others_refused,
)
from layoutmap.adapters.protocol import Session
from layoutmap.core.errors import EngineError, LayoutMapWarning, ScopeError, format_message
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.unsupported import Unsupported
from layoutmap.core.variables import Assignment, VariableSpec, has_several_models
from layoutmap.engines import Engine, get_engine
from layoutmap.plan.problems import Problem
from layoutmap.report.text import warning_text
from layoutmap.rules.rule_set import RuleSet
from layoutmap.scope.plan import Plan, make_plan
from layoutmap.scope.progress import Progress

__all__ = ["Scope", "apply", "build", "layout_map_scope", "plan", "scope"]


class Scope:
    """An open or finished scope: its plan, and what it offers its adapter.

    Attributes:
        layout_map: A copy of the rules, as they were when the scope was opened.
        plan: What has been planned so far; grows as models make their weights.
        layers: The paths of all layers so far, if the adapter tells them.
    """

    def __init__(
        self,
        layout_map: RuleSet,
        adapter: Adapter,
        engine: Engine | None,
        *,
        strict: bool = False,
        batch_dim: str | None = None,
        progress: bool | None = None,
        draws: str = "exact",
        check_batches: bool = True,
    ):
        self.layout_map = copy.copy(layout_map)  # models are laid out by it for as long as they make weights
        self.strict = strict
        self.batch_dim = batch_dim
        self.plan = Plan(layout_map.mesh or Mesh(None, ()), ())
        self.plan_only = engine is None  # a dry run: nothing may get a value
        self.across = False  # whether the mesh has devices of other processes
        self._engine = engine
        self.draws = draws
        self.check_batches = check_batches
        self._progress = progress
        self._warned: set[str] = set()
        self.layers: Sequence[str] | None = None
        self.free_activations = False
        self.adapter = adapter
        self._engine_name = adapter.engine_name
        self.session: Session = adapter.begin(self)

    @property
    def engine(self) -> Engine:
        """What holds the arrays."""
        assert self._engine is not None, "a plan makes no arrays"
        return self._engine

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layout map."""
        mesh = self.layout_map.mesh
        if mesh is None:
            raise ScopeError(
                "the layout map has no mesh",
                why="it was made without one and has no rule",
                fix='give it one: LayoutMap(create_mesh("batch=2,model=4"))',
            )
        return mesh

    def assign(
        self,
        variables: Sequence[VariableSpec],
        global_init: Mapping[tuple[str, str], str],
        limits: Sequence[Unsupported],
        complete: bool,
        layers: Sequence[str] | None = None,
        free_activations: bool = False,
    ) -> Sequence[Assignment]:
        """A layout for each variable, in order; raises with all problems, before anything is made."""
        self.layers, self.free_activations = layers, free_activations
        plan = make_plan(
            variables,
            self.layout_map,
            global_init=global_init,
            limits=limits,
            complete=complete,
            layers=layers,
            free_activations=free_activations,
        )
        self.plan = plan.with_problems(list(self._not_held(plan)))
        if not self.plan_only:
            if self.across:
                # Late, here and below: numpy takes as long to load as all the rest.
                from layoutmap.scope.processes import check_plans

                check_plans(self.plan, self.gather, strict=self.strict)
            self.plan.check(strict=self.strict)
            if complete:
                self._warn()
        return self.plan.assignments

    def assign_one(self, variable: VariableSpec) -> Assignment:
        """A layout for one variable that is needed before all are known: its rule's where that fits."""
        plan = make_plan([variable], self.layout_map, complete=False)
        if plan.errors:
            return Assignment(variable, self.replicated(len(variable.shape)))
        return plan.assignments[0]

    @property
    def lays_out_activations(self) -> bool:
        """Whether there are rules for what layers put out."""
        return bool(self.layout_map.activations)

    def activation_layout(self, path: str) -> Layout | None:
        """The layout of what the layer at a path puts out; `None`: as it comes."""
        return self.layout_map.activations[path]

    def output_layouts(
        self, layout: Layout, shapes: Sequence[tuple[int, ...]], path: str
    ) -> Sequence[Layout | None]:
        """The layout of each array that a layer puts out; a batch that does not divide is left whole."""
        if shapes and all(len(shape) != layout.rank for shape in shapes):
            raise layout.rank_error(shapes[0], f"the output of {path}")
        return [self._output_layout(layout, s, path) if len(s) == layout.rank else None for s in shapes]

    def _output_layout(self, layout: Layout, shape: tuple[int, ...], path: str) -> Layout:
        if not layout.uneven_axes(shape):
            return layout
        whole = self.computing_layout(layout)
        for axis in whole.uneven_axes(shape):
            raise whole.uneven_error(shape, axis, f"the output of {path}")
        return whole

    def create(
        self, assignments: Mapping[str, Assignment], draws: Mapping[str, Initializer]
    ) -> Mapping[str, Any]:
        """First values, each in its layout, by the keys given; with several processes, all must ask."""
        if self.across:
            from layoutmap.scope.processes import check_recipes

            recipes = {key: draws[key].recipe for key in assignments}
            told = [(assignments[key].variable.path, make() if make else "") for key, make in recipes.items()]
            check_recipes(told, self.gather)
        with Progress(assignments, enabled=self._progress) as progress:
            return self.engine.create(assignments, draws, progress=progress)

    def place(self, array: Any, layout: Layout) -> Any:
        """An array, of the framework or of numpy, in a layout."""
        return self.engine.relayout(array, layout)

    def variable(self, array: Any, *, name: str, trainable: bool) -> Any:
        """What a variable of the framework holds an array in."""
        return self.engine.variable(array, name=name, trainable=trainable)

    def whole(self, array: Any) -> Any:
        """All values of an array, as a numpy array."""
        return self.engine.whole(array)

    def gather(self, values: Any) -> Any:
        """The numpy values of each process of the mesh, one row each; they must all ask."""
        return self.engine.gather(values, self.mesh)

    def check_alike(self, text: str, checksum: int = 0) -> tuple[Sequence[str], Sequence[int]]:
        """What the processes of the mesh say if they do not all say the same, else nothing; and all their checksums.

        They must all ask.
        """
        from layoutmap.scope.processes import check_alike

        return check_alike(text, self.gather, checksum)

    def check_values(self, checksums: Iterable[tuple[str, int]]) -> None:
        """Raise if values that each process of the mesh has for itself are not the same in all of them."""
        from layoutmap.scope.processes import check_values

        check_values(checksums, self.gather)

    def check_batch(self, arrays: Sequence[Any]) -> None:
        """Raise if the processes of the mesh bring different batches, where each of them brings all of it."""
        from layoutmap.scope.processes import check_batch

        check_batch(arrays, self.gather)

    def run_on_mesh(self) -> AbstractContextManager[Any]:
        """While open, what is computed here and now is computed on the mesh."""
        return self.engine.run_on(self.mesh)

    def native(self, layout: Layout, rank: int) -> Any:
        """The framework's own form of a layout."""
        return self.engine.native(layout, rank)

    def replicated(self, rank: int) -> Layout:
        """The layout of a small thing that every device holds whole."""
        return Layout.replicated(self.mesh, rank)

    def computing_layout(self, layout: Layout) -> Layout:
        """The layout in which a weight takes part in a computation: not cut over the dim that cuts the batch."""
        dims = ([d for d in layout.mesh_dims_of(axis) if d != self.batch_dim] for axis in range(layout.rank))
        return Layout([tuple(each) for each in dims], layout.mesh)

    def batch_layout(self, shape: Sequence[int]) -> Layout:
        """The layout of a batch: cut along its first axis where it divides, else whole."""
        dim = self.batch_dim
        if dim is None or not shape or shape[0] % self.mesh.dim_size(dim):
            return self.replicated(len(shape))
        return Layout.batch_sharded(self.mesh, dim, len(shape))

    def _not_held(self, plan: Plan) -> Iterator[Problem]:
        """A problem for each variable whose layout the engine cannot hold; no device is asked for."""
        engine = get_engine(self._engine_name)
        refusals: dict[Layout, EngineError | None] = {}
        several = has_several_models(a.variable for a in plan.assignments)
        for assignment in plan.assignments:
            layout, path = assignment.layout, assignment.variable.path
            if assignment.match is None:
                continue  # it follows another variable, whose problem is told there
            if layout not in refusals:
                refusals[layout] = None
                try:
                    engine.check_layout(layout)
                except EngineError as error:
                    refusals[layout] = error
            error = refusals[layout]
            if error is not None:
                facts = tuple((name, str(value)) for name, value in error.facts.items())
                problem = Problem(
                    "unsupported layout", "error", path, f"{path}: {error.what}", facts, error.why, error.fix
                )
                yield problem.of_model(assignment.variable.model if several else "")

    def warn_of_nothing(self) -> None:
        """Warn if nothing was made here, and a library is imported whose models a scope cannot see."""
        unseen = [name for name in REFUSED if name in sys.modules]
        if unseen and not len(self.plan) and not self.session.unbuilt():
            why, fix = REFUSED[unseen[0]]
            text = format_message(
                f"the scope saw no layer and no variable; models of {unseen[0]} are not laid out",
                {},
                why,
                fix,
            )
            warnings.warn(text, LayoutMapWarning, stacklevel=_level_of_user({self.adapter.name}))

    def _warn(self) -> None:
        text = warning_text(self.plan)
        if text and text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, LayoutMapWarning, stacklevel=_level_of_user({self.adapter.name, "jax"}))

    def __repr__(self) -> str:
        return f"<Scope: {self.plan!r}>"


@contextmanager
def scope(
    layout_map: RuleSet,
    *,
    strict: bool = False,
    batch_dim: str | None = None,
    library: str | None = None,
    progress: bool | None = None,
    draws: Literal["exact", "tiles"] = "exact",
    check_batches: bool = True,
) -> Generator[Scope]:
    """Build models whose variables are created straight in their layouts.

    Inside the `with` block, and at the first call of what was built in it, every variable is born without a value,
    matched by its object path, and then made in its layout. All rules are checked before anything is made.

    The scope works with the rules as they are when it is opened. A change of the map inside the block or after it
    counts for scopes that are opened later; what these models make afterwards, in `compile` or `fit`, follows the
    rules as they were.

    The scope belongs to the code between its `with` and its end, in the thread and the task that opened it. A thread or
    a task of `asyncio` that is started inside builds plain models unless it opens a scope itself; a generator that is
    closed late ends its own scope and no other one.

    Args:
        layout_map: The rules. They are copied.
        strict: Whether what is only worth a warning (a variable without a rule, a rule without a variable) is an error.
        batch_dim: The mesh dim over which `fit`, `evaluate` and `predict` split the batch; `None`: they do not.
        library: The model library, as in `"keras"`; `None` means the one that is imported.
        progress: Whether to show on stderr how far the making is; `None`: if it takes long, on a terminal.
        draws: `"exact"`: first values are those of the plain model, bit for bit. `"tiles"`, for torch only: a device
            draws just what it holds, from a seed for each tile of 256 by 256: the same values on every mesh, and not
            those of the plain model. For models so large that to draw one stream of numbers takes too long.
        check_batches: Whether several processes compare the data that they bring, where it must be the same in all of
            them: each batch of a Keras model, and what the first calls of a torch module are given. It costs a
            checksum of the batch (a second for each GB) and a few bytes between the processes.

    Yields:
        The scope; `scope.plan` is what was planned.

    Raises:
        PlanError: Something does not fit; raised when the block ends, or by the call that makes the weights.
        ScopeError: A scope cannot be opened here.
        MeshError: The machine does not have the mesh's devices.

    Example:
        >>> import keras, layoutmap as lm
        >>> layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"))
        >>> layout_map[r".*\\.kernel"] = (None, "model")
        >>> with layout_map.scope(batch_dim="batch") as scope:
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")])
        >>> model.layers[0].kernel.layout.sharding_specs
        ('unsharded', 'model')
        >>> scope.plan["d1.kernel"].shard_shape
        (8, 4)

    References:
        `tf.keras.dtensor.experimental.LayoutMap.scope` of TensorFlow 2.9 to 2.15.
    """
    options: dict[str, Any] = {"strict": strict, "batch_dim": batch_dim, "progress": progress, "draws": draws}
    options["check_batches"] = check_batches
    opened = _open(layout_map, _adapter(library), **options)
    with opened.session.defer(), others_refused(opened.adapter):
        yield opened
    opened.warn_of_nothing()


@contextmanager
def layout_map_scope(layout_map: RuleSet) -> Generator[Scope]:
    """The older spelling of `layout_map.scope()`; deprecated."""
    warnings.warn(
        "layout_map_scope(layout_map) is deprecated: write layout_map.scope()",
        DeprecationWarning,
        stacklevel=3,
    )
    with scope(layout_map) as opened:
        yield opened


def build(
    make_model: Callable[[], Any],
    layout_map: RuleSet,
    *,
    inputs: Any = None,
    strict: bool = False,
    batch_dim: str | None = None,
    library: str | None = None,
    progress: bool | None = None,
    draws: Literal["exact", "tiles"] = "exact",
    check_batches: bool = True,
) -> Any:
    """Build one model in a scope.

    Args:
        make_model: Makes the model and returns it.
        layout_map: The rules.
        inputs: An example of what the model is called with (arrays, or anything with `shape` and `dtype`), for models
            that make their weights at their first call. Nothing is computed with it. `None`: they wait for that call.
            A compiled model that has its weights gets its optimizer's slots here, too.
        strict: See `scope`.
        batch_dim: See `scope`.
        library: See `scope`.
        progress: See `scope`.
        draws: See `scope`.
        check_batches: See `scope`.

    Returns:
        The model, its variables in their layouts.

    Raises:
        PlanError: Something does not fit. Nothing has been made then.
        ScopeError: The function returned no model, the layout map has no mesh, or a scope cannot be opened here.

    Example:
        >>> import keras, layoutmap as lm
        >>> layout_map = lm.LayoutMap(lm.create_mesh("model=4"), {r".*\\.kernel": (None, "model")})
        >>> model = layout_map.build(lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d")]))
        >>> model.layers[0].bias.layout.is_fully_replicated()
        True
    """
    options: dict[str, Any] = {"strict": strict, "batch_dim": batch_dim, "progress": progress, "draws": draws}
    options["check_batches"] = check_batches
    opened = _open(layout_map, _adapter(library), **options)
    return _make(opened, make_model, inputs)


def plan(
    make_model: Callable[[], Any],
    layout_map: RuleSet,
    *,
    inputs: Any = None,
    strict: bool = False,
    library: str | None = None,
) -> Plan:
    """Say where every variable of a model would go: the dry run of `build`, stopped before anything is made.

    No array is allocated and no device is needed: the mesh may be any size. The model that the function makes has
    shapes and no values, and is thrown away. Random states are put back, so that planning a model changes no number
    of the model that is built next.

    Args:
        make_model: Makes the model and returns it.
        layout_map: The rules.
        inputs: See `build`. Without it, what a model would make at its first call is not known, and the plan says so.
        strict: Whether to raise for what would be an error of a strict scope.
        library: See `scope`.

    Returns:
        The plan, with its problems. Without `strict` problems do not raise: they are what one reads a plan for.

    Raises:
        PlanError: `strict`, and there are problems.
        ScopeError: The layout map has no mesh, or the function returned no model.

    Example:
        >>> import keras, layoutmap as lm
        >>> layout_map = lm.LayoutMap(lm.create_mesh("batch=512,model=8"), {r".*\\.kernel": (None, "model")})
        >>> lm.plan(lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")]), layout_map)
        <Plan: 2 variables on batch=512, model=8, 576 B, 128 B per device; 1 warning>
    """
    adapter = _adapter(library)
    dry = Scope(layout_map, adapter, None)
    _ = dry.mesh
    with adapter.undisturbed():
        model = _make(dry, make_model, inputs)
    unbuilt = dry.session.unbuilt()
    found = dry.plan
    final = make_plan(
        [a.variable for a in found.assignments],
        dry.layout_map,
        global_init={a.variable.key: a.global_init for a in found.assignments},
        layers=dry.layers,
        free_activations=dry.free_activations,
    ).with_problems(
        [problem for problem in found.problems if problem.kind in ("unsupported layout", "unsupported")]
    )
    if unbuilt:
        shown = ", ".join(unbuilt[:5]) + (f" and {len(unbuilt) - 5} more" if len(unbuilt) > 5 else "")
        final = final.with_problem(
            Problem(
                "not built",
                "warning",
                type(model).__name__,
                f"{type(model).__name__}: {len(unbuilt)} layers have no weights yet: {shown}",
                why="they make them at their first call, which has not come",
                fix="pass inputs=: an example batch, or keras.Input(...) of its shape",
            )
        )
    return final.check(strict=True) if strict else final


def apply(
    model: Any,
    layout_map: RuleSet,
    *,
    strict: bool = False,
    batch_dim: str | None = None,
    progress: bool | None = None,
    check_batches: bool = True,
) -> Any:
    """Lay out a model that exists: the same plan, with the values that it has.

    Args:
        model: The model. It is changed in place.
        layout_map: The rules.
        strict: See `scope`.
        batch_dim: See `scope`.
        progress: See `scope`.
        check_batches: See `scope`.

    Returns:
        The model.

    Raises:
        PlanError: Something does not fit. Nothing has been moved then.

    Example:
        >>> import keras, layoutmap as lm
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")])
        >>> layout_map = lm.LayoutMap(lm.create_mesh("model=4"), {"d1.kernel": (None, "model")})
        >>> layout_map.apply(model).layers[0].kernel.layout.sharding_specs
        ('unsharded', 'model')
    """
    adapter = adapter_of_model(model)
    options: dict[str, Any] = {"strict": strict, "batch_dim": batch_dim, "progress": progress}
    opened = _open(layout_map, adapter, check_batches=check_batches, **options)
    opened.session.take(model)
    return model


def _level_of_user(inner: Set[str]) -> int:
    """The `stacklevel` at which a warning names the user's line, past this library and those that it works inside."""
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in {
        "layoutmap",
        "contextlib",
        *inner,
    }:
        frame, level = frame.f_back, level + 1
    return level


def _adapter(library: str | None) -> Adapter:
    return get_adapter(library) if library else imported_adapter()


def _open(layout_map: RuleSet, adapter: Adapter, **options: Any) -> Scope:
    adapter.check()
    opened = Scope(layout_map, adapter, get_engine(adapter.engine_name), **options)
    bound = opened.engine.bind(opened.mesh)
    opened.across = len(bound.local_device_ids) < bound.size
    if not bound.local_device_ids:
        raise ScopeError(
            "the mesh has no device of this process",
            facts={"mesh": str(bound), "devices": _shortened(bound.devices or ())},
            why="a process takes part with its own devices, and here it has none",
            fix="leave the scope to the processes of these devices, or make a mesh of all: lm.create_mesh(..)",
        )
    if opened.across:
        from layoutmap.scope.processes import check_options

        # Before they are looked at: what is wrong in one process only must be an error in all.
        compared = {name: value for name, value in options.items() if name != "progress"}
        check_options({"library": adapter.name} | compared, opened.gather)
    if opened.draws not in ("exact", *adapter.other_inits):
        raise ScopeError(
            f"draws={opened.draws!r}: {adapter.name} models cannot be drawn so",
            facts={"ways": ", ".join(map(repr, ("exact", *adapter.other_inits)))},
            why="exact draws are those of the plain model; a library may offer others, for models that are very large",
            fix='leave draws out, or draws="exact"',
        )
    if opened.batch_dim is not None and opened.batch_dim not in opened.mesh:
        raise ScopeError(
            f"batch_dim {opened.batch_dim!r} is no dim of the mesh",
            facts={"mesh": str(opened.mesh)},
            why="the batch is split over one of the mesh's dims",
            fix=f"use one of {', '.join(map(repr, opened.mesh.dim_names))}, or leave it out",
        )
    replicated = opened.replicated(0)
    try:
        opened.engine.check_layout(replicated)
    except EngineError:
        return opened  # the plan says so, with all its other problems
    # Arrays are to come, so what simulates devices begins, which no question does; and before the session does, inside
    # of which some of it cannot begin.
    opened.native(replicated, 0)
    return opened


def _shortened(devices: Sequence[str]) -> str:
    return ", ".join(devices[:8]) + (", ..." if len(devices) > 8 else "")


def _make(opened: Scope, make_model: Callable[[], Any], inputs: Any) -> Any:
    with opened.session.defer(), others_refused(opened.adapter):
        model = make_model()
        if model is None:
            raise ScopeError(
                "the function returned no model",
                why="it may have made one, and build and plan have only what it returns",
                fix="end it with: return model",
            )
        owner = adapter_of_model(model).name
        if owner != opened.adapter.name:
            raise ScopeError(
                f"{type(model).__name__}: a {owner} model is built in a scope for {opened.adapter.name} models",
                why="a scope works inside one library",
                fix=f"pass library={owner!r}",
            )
        opened.session.complete(model, inputs)
    return model
