"""Define `Scope`: the state of a scope, which has the plan for the user, and layouts and values for the adapter."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from layoutmap.adapters import REFUSED_LIBRARIES, ModelAdapter
from layoutmap.adapters.options import ScopeOptions
from layoutmap.adapters.protocol import Session
from layoutmap.core.errors import EngineError, LayoutMapWarning, ScopeError, format_message, join_names
from layoutmap.core.idle_dims import make_idle_dims_warning
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.specs import list_batch_dims
from layoutmap.core.uneven import keep_largest_dim_per_axis
from layoutmap.core.unsupported import UnsupportedFeature
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.core.variables import Assignment, VariableSpec, has_several_models
from layoutmap.engines import Engine, get_engine
from layoutmap.plan.completeness import make_unbuilt_layers_problem
from layoutmap.plan.problems import Problem
from layoutmap.report.text import format_plan_warnings
from layoutmap.rules.rule_set import RuleSet
from layoutmap.scope.plan import Plan, make_plan
from layoutmap.scope.progress import Progress

if TYPE_CHECKING:
    # imported only for types, because it loads numpy
    from layoutmap.checkpoint.model_values import SavedModelValues


class Scope:
    """The state of an open or finished scope, with its plan. Adapters get layouts and values from it.

    Attributes:
        layout_map: A copy of the rules, as they were when the scope was opened.
        options: The options with which the scope was opened.
        spans_processes: Whether the mesh has devices of other processes.
        plan: The plan so far, which grows as models create weights.
        layers: The paths of all layers so far, if the adapter reports them.
        values: Checkpoint values that replace the initializers; `None`: no checkpoint.
    """

    def __init__(
        self,
        layout_map: RuleSet,
        adapter: ModelAdapter,
        engine: Engine | None = None,
        options: ScopeOptions | None = None,
        *,
        spans_processes: bool = False,
    ):
        # Copy the map, because models may create weights after the user has changed it.
        self.layout_map = copy.copy(layout_map)
        mesh, activations = get_layout_map_mesh(layout_map), self.layout_map.activations
        default_options = ScopeOptions()
        self.options = options or replace(
            default_options, own=adapter.read_library_options({}, default_options, spans_processes=False)
        )
        self.several_dims = get_engine(adapter.engine_name).several_dims
        lookup = self._find_output_layout if activations else None
        self.policy = LayoutPolicy(mesh, self.options.batch_dim, lookup)
        self.plan = Plan(mesh, ())
        self.plan_only = engine is None  # true in a dry run, which creates no values
        self.spans_processes = spans_processes  # whether the mesh has devices of other processes
        self._engine = engine
        self._warned: set[str] = set()
        self._has_stepped = False
        self.values: SavedModelValues | None = None
        self.layers: Sequence[str] | Mapping[str, int | None] | None = None
        self.free_activations = False
        self.adapter = adapter
        self._engine_name = adapter.engine_name
        self.session: Session = adapter.make_session(self)
        later = self.options.later
        self._later = adapter.describe_arrays_created_after_build(later, mesh) if later else ()

    @property
    def engine(self) -> Engine:
        """Engine that creates the arrays."""
        assert self._engine is not None, "a plan makes no arrays"
        return self._engine

    @property
    def mesh(self) -> Mesh:
        """Mesh of the layout map."""
        return self.policy.mesh

    def assign_layouts(
        self,
        variables: Sequence[VariableSpec],
        global_init: Mapping[tuple[str, str], str],
        unsupported: Sequence[UnsupportedFeature],
        is_complete: bool,
        layers: Sequence[str] | Mapping[str, int | None] | None = None,
        free_activations: bool = False,
    ) -> Sequence[Assignment]:
        """Return a layout for each variable, or raise one error with all problems before anything is created."""
        self.layers, self.free_activations = layers, free_activations
        plan = make_plan(
            [*variables, *(self._later if is_complete else ())],
            self.layout_map,
            global_init=global_init,
            unsupported=unsupported,
            complete=is_complete,
            layers=layers,
            free_activations=free_activations,
            batch_dim=self.policy.batch_dim,
            several_dims=self.several_dims,
            explain_why_padding_is_impossible=self.adapter.explain_why_padding_is_impossible,
        )
        unused = self._iterate_unused_dim_problems(plan) if is_complete and not self.plan_only else ()
        self.plan = replace(plan, batches=None if self.plan_only else self.batches)
        self.plan = self.plan.add_problems([*self._iterate_unsupported_problems(plan), *unused])
        if not self.plan_only:
            if self.spans_processes:
                # Imported here and below, because these modules load numpy, which is slow.
                from layoutmap.adapters.fingerprints import iterate_versions
                from layoutmap.scope.process_group import check_same_plans

                check_same_plans(
                    self.plan,
                    self.gather_from_processes,
                    strict=self.options.strict,
                    rules=str(self.layout_map),
                    versions=iterate_versions(*dict.fromkeys((self._engine_name, self.adapter.name))),
                )
            self.plan.check(strict=self.options.strict)
            unbuilt = self.session.list_unbuilt_layer_names()
            if unbuilt:
                self.plan = self.plan.add_problem(make_unbuilt_layers_problem("", unbuilt, called=False))
            if is_complete:
                if self.values is not None:
                    self.values.check_variables_match(variables)
                self._warn_of_plan_warnings_once()
        return self.plan.assignments[: len(variables)]

    def add_note(self, subject: str, message: str) -> None:
        """Add a note to the plan."""
        self.plan = self.plan.add_problem(Problem("gathering", "note", subject, message))

    def assign_single_layout(self, variable: VariableSpec) -> Assignment:
        """Return the layout of a variable before all variables are known: its rule's if that fits, else replicated."""
        plan = make_plan(
            [variable],
            self.layout_map,
            complete=False,
            several_dims=self.several_dims,
            explain_why_padding_is_impossible=self.adapter.explain_why_padding_is_impossible,
        )
        if plan.errors:
            return Assignment(variable, self.policy.make_replicated_layout(len(variable.shape)))
        return plan.assignments[0]

    def create_arrays(
        self, assignments: Mapping[str, Assignment], initializers: Mapping[str, Initializer]
    ) -> Mapping[str, Any]:
        """Return a dict from key to initial array, in its layout. All processes of the mesh must call this."""
        values = self.values
        readers = (
            {}
            if values is None
            else {key: values.make_block_reader(a.variable) for key, a in assignments.items()}
        )
        computed = {key: a for key, a in assignments.items() if readers.get(key) is None}
        if self.spans_processes:
            from layoutmap.scope.process_group import check_same_initializers

            recipes = {key: initializers[key].recipe for key in computed}
            recipes_by_path = [
                (assignments[key].variable.path, make() if make else "") for key, make in recipes.items()
            ]
            check_same_initializers(recipes_by_path, self.gather_from_processes)
        variables = {key: assignment.variable for key, assignment in assignments.items()}
        with Progress(variables, enabled=self.options.progress) as progress:

            def create_arrays_from_saved_values() -> dict[str, Any]:
                arrays: dict[str, Any] = {}
                for key, read in readers.items():
                    if read is not None:
                        arrays[key] = self.engine.create_from_shards(assignments[key], read, copy=False)
                        progress(key)
                return arrays

            if readers and self.spans_processes:
                from layoutmap.engines.agreement import call_and_share_errors

                arrays = call_and_share_errors(create_arrays_from_saved_values, self.gather_from_processes)
            else:
                arrays = create_arrays_from_saved_values()
            return arrays | self.engine.create_initial_values(computed, initializers, progress=progress)

    def gather_from_processes(self, values: Any) -> Any:
        """Gather numpy values, with one row for each process of the mesh. All processes must call this."""
        return self.engine.gather_from_processes(values, self.mesh)

    def _find_output_layout(self, path: str) -> Layout | None:
        layout = self.layout_map.activations[path]
        return layout if layout is None or self.several_dims else keep_largest_dim_per_axis(layout)

    def _iterate_unsupported_problems(self, plan: Plan) -> Iterator[Problem]:
        """Yield an error for each layout or dtype in the plan that the engine cannot store, without using devices."""
        engine = get_engine(self._engine_name)
        refusals: dict[Layout | str, EngineError | None] = {}
        for path in (match.path for match in plan.activations):
            layout = self._find_output_layout(path)
            if layout is not None and (error := _find_engine_error(engine.check_layout, layout)) is not None:
                yield Problem("unsupported layout", *_make_problem_fields(path, error))
        several = has_several_models([a.variable for a in plan.assignments])
        for assignment in plan.assignments:
            layout, variable = assignment.layout, assignment.variable
            if layout not in refusals:
                refusals[layout] = _find_engine_error(engine.check_layout, layout)
            if variable.dtype not in refusals:
                refusals[variable.dtype] = _find_engine_error(engine.check_dtype, variable.dtype, "")
            # A variable without its own rule has its parent's layout, so the parent's problem is enough.
            if assignment.match and (error := refusals[layout]) is not None:
                yield Problem(
                    "unsupported layout",
                    *_make_problem_fields(variable.path, error, variable.model if several else ""),
                )
            if (error := refusals[variable.dtype]) is not None:
                yield Problem(
                    "unsupported",
                    *_make_problem_fields(variable.path, error, variable.model if several else ""),
                )

    def _iterate_unused_dim_problems(self, plan: Plan) -> Iterator[Problem]:
        """Yield a note for each mesh dim that shards no weight, layer output, or batch."""
        for dim in plan.unused_dims:
            if dim.name not in list_batch_dims(self.policy.batch_dim):
                yield Problem(
                    "unused dim",
                    "note",
                    dim.name,
                    f"mesh dim {dim.name!r} is not used",
                    (("mesh", str(plan.mesh)), ("batch_dim", str(self.policy.batch_dim))),
                    f"no weight, layer output or batch is sharded over it: groups of {dim.size} devices "
                    "compute the same",
                    f"pass batch_dim={dim.name!r} to the scope, or add rules that shard weights over it",
                )

    @property
    def batches(self) -> tuple[str, ...] | None:
        """Mesh dims that shard batches, as observed in training steps, or `None` if the user's code shards batches."""
        dim, seen = self.policy.batch_dim, self.policy.batches
        if dim is not None:
            return () if seen and True not in seen else list_batch_dims(dim)
        return () if self.adapter.shards_batches else None

    def warn_of_idle_dims(self, step: str, sharded: Collection[str] = ()) -> None:
        """Warn once about mesh dims that shard nothing. See `ScopeContext`."""
        if self._has_stepped:
            return
        self._has_stepped = True
        used = (*list_batch_dims(self.policy.batch_dim), *sharded)
        idle = [each.name for each in self.plan.unused_dims if each.name not in used]
        if idle:
            warning = make_idle_dims_warning(step, self.mesh, idle, self.policy.batch_dim, "build or scope")
            warnings.warn(warning, stacklevel=find_user_stacklevel({self.adapter.name}))

    def warn_if_scope_is_empty(self) -> None:
        """Warn if no layer and no variable was created in the scope, with the likely reason."""
        if len(self.plan) or self.session.list_unbuilt_layer_names():
            return
        what = "the scope saw no layer and no variable"
        why = "a scope shards only models that its own thread and task build in its block"
        fix = "build the model in the block, or in another thread or task with layout_map.build(make_model)"
        unseen = next((name for name in REFUSED_LIBRARIES if name in sys.modules), None)
        if unseen is not None:
            what, (why, fix) = f"{what}; models of {unseen} are not laid out", REFUSED_LIBRARIES[unseen]
        text = format_message(what, {}, why, fix)
        warnings.warn(text, LayoutMapWarning, stacklevel=find_user_stacklevel({self.adapter.name}))

    def warn_of_unbuilt_layers(self) -> None:
        """Warn, if the option `strict` is set, that rules for layers without weights are not checked yet."""
        unbuilt = self.session.list_unbuilt_layer_names()
        if not self.options.strict or not unbuilt:
            return
        used = {a.match.rule for a in self.plan.assignments if a.match}
        waiting = [str(rule) for rule in self.layout_map.rules if rule not in used]
        text = format_message(
            "strict: some rules of the layout map are not checked yet, because layers have no weights",
            {"layers": join_names(unbuilt), "rules to check": join_names(waiting)},
            "a model creates weights in its first call, which then raises for errors and for rules without a match",
            "to check now, build the model with inputs=: an example batch, or keras.Input(...)",
        )
        warnings.warn(text, LayoutMapWarning, stacklevel=find_user_stacklevel({self.adapter.name}))

    def _warn_of_plan_warnings_once(self) -> None:
        """Warn with the plan's warnings, unless the same text was already reported."""
        text = format_plan_warnings(self.plan)
        if text and text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, LayoutMapWarning, stacklevel=find_user_stacklevel({self.adapter.name, "jax"}))

    def __repr__(self) -> str:
        return f"<Scope: {self.plan!r}>"


def get_layout_map_mesh(layout_map: RuleSet) -> Mesh:
    """Return the mesh of a layout map. Raise a `ScopeError` if it has none."""
    if layout_map.mesh is None:
        raise ScopeError(
            "the layout map has no mesh",
            why="it was created without a mesh and without rules",
            fix='create it with a mesh: LayoutMap(create_mesh("batch=2,model=4"))',
        )
    return layout_map.mesh


def _make_problem_fields(path: str, error: EngineError, model: str = "") -> tuple[Any, ...]:
    """Return the fields of a `Problem` after its kind, for an error of the engine about a variable or layer."""
    what = f"{path}: {error.what.removeprefix(': ')}"
    facts = tuple((name, str(value)) for name, value in error.facts.items())
    return "error", path, what, facts, error.why, error.fix, model


def _find_engine_error(check: Callable[..., None], *arguments: object) -> EngineError | None:
    """Call an engine's check, and return the error that it raises, or `None`."""
    try:
        check(*arguments)
    except EngineError as error:
        return error
    return None
