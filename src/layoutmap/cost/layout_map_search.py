"""Search the fastest layout map of a model for a machine.

The file is longer than others for the docstrings of `search` and of what it returns, which are their reference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Literal

from layoutmap.core.arguments import as_int, describe_type
from layoutmap.core.errors import MeshError, PlanError, RuleError, ScopeError, shorten_repr
from layoutmap.core.mesh import Mesh, check_dims_in_mesh
from layoutmap.core.paths import format_merged_paths, replace_numbers_with_stars
from layoutmap.core.specs import BatchDim
from layoutmap.core.text_table import format_bytes, format_html_pre, format_html_table, format_table
from layoutmap.cost.cost import Cost, format_duration
from layoutmap.cost.lower_step import LoweredStep, lower_step
from layoutmap.cost.machine import Machine
from layoutmap.cost.machines import resolve_machine
from layoutmap.cost.plan_cost import choose_target_for_counting, choose_target_to_verify
from layoutmap.cost.search.built_in_maps import BuiltInMap, iterate_built_in_maps, make_built_in_map
from layoutmap.cost.search.finalists import (
    choose_best_compiled_map,
    choose_first_map_that_fits,
    search_around_best_compiled_map,
)
from layoutmap.cost.search.loop import Candidate, EvaluateFn, MapCost, SearchOutcome, search_maps
from layoutmap.cost.search.options import MeshRoles, assign_dim_roles, list_search_meshes
from layoutmap.cost.search.result_table import (
    RESULT_HEAD,
    RIGHT_ALIGNED,
    compare_with_best_built_in_map,
    explain_recomputation,
    make_result_rows,
)
from layoutmap.cost.search.search_cache import SearchCache
from layoutmap.cost.search.space import SearchedModel, find_block_stacks
from layoutmap.cost.table import StepCost
from layoutmap.cost.verified import Verified
from layoutmap.rules.near_misses import find_nearest_candidates
from layoutmap.rules.presets import find_matching_preset
from layoutmap.rules.rule_set import RuleSet, parse_or_convert_mesh
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.plan import Plan
from layoutmap.scope.progress import ProgressLine, ProgressMode

_NAMES_OF_BATCH = ("data", "batch", "dp", "fsdp")


class SearchResult:
    """Result of `search`. When printed, it shows the rules, and a table that compares the map with built-in maps.

    Attributes:
        layout_map: The rules. `to_yaml` writes them to a file.
        batch_dim: Mesh dim over which batches are sharded, for `scope(batch_dim=..)`; `None`: they are not sharded.
        plan: Plan of the map, with `plan.cost`.
        verdict: Sentence that compares the result with the best built-in map that fits.
        rows: The result and the built-in maps: name, mesh, time of a step, memory, and why the map cannot be used.
        num_tried: Number of different maps that were tried. A map that was also recomputed or compiled counts once.
        is_complete: Whether the search finished; `False`: it was interrupted.
        recompute: Layers whose activations must be recomputed in the backward pass so that the map fits or is as fast,
            why, and how the model's library does that. Empty: the model's code suffices.
        compiled: Step with the map as XLA compiles it, with `peak_bytes` and `sent_bytes`; `None` without `verify`, or
            after an earlier interrupt.
    """

    def __init__(
        self,
        outcome: SearchOutcome,
        plan: Plan,
        batch_dim: BatchDim | None,
        target: str | None = None,
        recompute: str = "",
    ):
        best = outcome.best.layout_map
        self.layout_map = LayoutMap(best.mesh, uneven=best.uneven, rest=best.rest)
        self.layout_map.update(best)
        self.batch_dim = batch_dim
        self.plan = plan
        self.verdict = compare_with_best_built_in_map(outcome)
        self.rows = make_result_rows(outcome)
        self.num_tried = outcome.num_tried
        self.is_complete = outcome.is_complete
        self.compiled = self.cost.verified
        self._target = target
        self.recompute = recompute

    @property
    def cost(self) -> Cost:
        """Cost of a step with the map."""
        assert isinstance(self.plan.cost, Cost)
        return self.plan.cost

    @property
    def _summary_line(self) -> str:
        seconds, peak = self.cost.step_seconds, format_bytes(self.cost.step.peak_bytes)
        ended = "" if self.is_complete else ", interrupted"
        if self._target:
            compiled = (
                f", {format_bytes(self.compiled.peak_bytes)} compiled" if self.compiled else ", not verified"
            )
            peak += f" counted{compiled} by XLA for {self._target}"
        return f"{format_duration(seconds)} a step on {self.cost.machine}, {peak}; {self.num_tried} maps tried{ended}"

    def to_text(self, width: int | None = None) -> str:
        """Return the text that `print` shows. See `Plan.to_text` for `width`."""
        return "\n".join(
            [
                self.to_yaml(),
                *format_table(RESULT_HEAD, self.rows, RIGHT_ALIGNED, width=width),
                "",
                f"Best: {self.verdict}",
                *filter(None, [self.recompute]),
                self._summary_line,
            ]
        )

    __str__ = to_text

    def to_yaml(self) -> str:
        """Return a rules file as text for `LayoutMap.from_yaml`, with requirements in a comment."""
        return "".join(f"# {line}\n" for line in self.recompute.splitlines()) + self.layout_map.to_yaml()

    def __repr__(self) -> str:
        return f"<SearchResult: {self._summary_line}; {self.verdict}>"

    def _repr_html_(self) -> str:
        table = format_html_table(f"Best: {self.verdict}; {self._summary_line}", RESULT_HEAD, self.rows)
        return f"{format_html_pre(self.to_yaml())}{table}"


def search(
    make_model: Callable[[], Any],
    inputs: object,
    on: str | Machine,
    *,
    optimizer: object = None,
    loss: Callable[..., Any] | None = None,
    memory: int | None = None,
    mesh: Mesh | str | None = None,
    batch_dim: BatchDim | None = None,
    start: RuleSet | None = None,
    keep: Iterable[str] = (),
    tries: int = 32,
    seed: int = 0,
    cache: str | os.PathLike[str] | None = None,
    verify: bool | str | None = None,
    remat: str | Literal[False] | None = None,
    fuse_attention: bool = False,
    progress: bool | None = None,
    library: str | None = None,
) -> SearchResult:
    """Find the layout map with the fastest training step of a model on a machine, among maps that fit its memory.

    The cost of each map is computed as in `lower_step(..).count`. No array is allocated and no device is needed. The
    search starts with built-in maps: data parallel, fully sharded, Megatron's tensor parallelism, both, and the preset
    of the model's family. An interrupt (Ctrl-C) ends the search with the best map so far.

    Args:
        make_model: Function that creates and returns the model.
        inputs: Example input of the model in a step: arrays, or objects with `shape` and `dtype`. The first axis is the
            global batch.
        on: Machine, as in `"h100:64"`; see `layoutmap.cost.machines`.
        optimizer: See `lower_step`.
        loss: See `lower_step`.
        memory: Memory of a device in bytes; `None`: that of the machine. A map fits if its step needs at most this.
        mesh: The mesh; `None`: that of `start`, or else the search also chooses a shape, with the dims data and model.
        batch_dim: Mesh dim over which batches are sharded; `None`: a dim named data, batch, dp, or fsdp.
        start: Rules to start from, which are also compared with the result.
        keep: Patterns of rules of `start`, for variables or activations, that every map must contain.
        tries: Largest number of maps to try, and as many again with recomputed activations.
        seed: Seed for the order in which layouts are tried. The same arguments give the same map.
        cache: File that stores the costs with a fingerprint of the step, so that a repeated search is quick.
        verify: Whether XLA compiles the whole step with the result for the machine, which need not exist. If the step
            does not fit the memory, the next best map is compiled. This takes seconds to minutes and needs JAX's plugin
            for the devices. A name, as for `plan`, is another device to compile for. An interrupt keeps the estimated
            result. `None`: if the compiler for the GPUs of `on` is installed, XLA compiles the best and the built-in
            maps with two and three of equal blocks, to compare them. `False`: nothing is compiled.
        remat: Layers whose activations are recomputed in the backward pass, see `lower_step`. `None`: those that the
            model's code recomputes, and also repeated layers if nothing else fits or if that is faster. The result then
            says so. `False`: only those that the model's code recomputes.
        fuse_attention: Whether to count attention as one fused kernel, see `lower_step`.
        progress: Whether to show the best map so far and XLA's compile time on stderr. `None`: only if it takes long,
            as one line on a terminal, and as a line every five seconds elsewhere.
        library: See `plan`.

    Raises:
        PlanError: No map that was tried fits the memory. The message names the nearest one and the missing memory.
        LayoutMapError: The machine is unknown, or its number of devices differs from the mesh's.
        RuleError: `start` does not have a rule in `keep`.
        ScopeError: The model cannot be traced, or its library does not run on JAX.
        EngineError: With `verify`, the plugin for the machine's devices is not installed.

    Example:
        >>> import keras, layoutmap as lm
        >>> def make():
        ...     layers = [keras.layers.Dense(8192, name="up"), keras.layers.Dense(1024, name="down")]
        ...     return keras.Sequential([keras.Input((1024,)), *layers])
        >>> found = lm.search(make, keras.Input(batch_shape=(64, 1024)), "h100:8", optimizer="adamw", tries=4)
        >>> found.num_tried <= 4, found.layout_map.mesh.size
        (True, 8)
    """
    if (as_int(tries) or 0) < 1:
        raise ScopeError(
            f"search: tries={shorten_repr(tries)} is not a positive integer",
            why="the search computes the cost of at most `tries` layout maps",
            fix="pass an integer of 1 or more, as in tries=32",
        )
    if inputs is None:
        raise ScopeError(
            "search: there are no inputs",
            why="the cost of a step depends on the shape of the batch, which is not given",
            fix='pass inputs: objects with shape and dtype; on the command line --inputs "int32[64,4096]"',
        )
    shown_as = "log" if progress is None else progress
    given = _choose_mesh(mesh, start)
    if given is None and batch_dim not in (None, "data"):
        raise ScopeError(
            f"search: batch_dim={batch_dim!r} has no effect without mesh=",
            why="without mesh=, the search tries meshes with the dims data and model, and shards the "
            "batch over data",
            fix="leave batch_dim out, or pass a mesh that has it",
        )
    machine = resolve_machine(on, given, "search: ")
    kept_rules = _select_kept_rules(start, keep, given)
    target = choose_target_to_verify(verify, machine)
    limit = machine.device.memory_bytes if memory is None else memory
    search_cache = None if cache is None else SearchCache(cache)
    lowered = lower_step(
        make_model,
        LayoutMap(Mesh(None, {"data": machine.num_devices})),
        inputs=inputs,
        optimizer=optimizer,
        loss=loss,
        remat=remat or None,
        fuse_attention=fuse_attention,
        library=library,
    )
    batch = lowered.step.batch[0].shape[0] if lowered.step.batch and lowered.step.batch[0].shape else None
    max_model_size = min(machine.device.node_size, _WIDEST)
    meshes = (
        (_choose_dim_roles(given, batch_dim, start),)
        if given
        else list_search_meshes(machine.num_devices, batch, max_model_size)
    )
    if not meshes:
        raise _make_uneven_batch_error(machine, batch, max_model_size)
    evaluate = _MapEvaluator(lowered, machine, {roles.mesh: roles.batch_dim for roles in meshes})
    evaluate(RuleSet(meshes[0].mesh, rest="replicated"))  # trace once, to find the outputs of layers
    model = SearchedModel(
        tuple(lowered.step.variables),
        find_block_stacks(lowered.output_shapes, lowered.step.variables),
        kept_rules,
    )
    again = (
        lowered.with_remat("blocks")
        if remat is None and model.blocks and lowered.step.how_to_recompute
        else None
    )
    recomputing = again and _MapEvaluator(again, machine, evaluate.batch_dims)
    # Costs depend on batch dims, which the maps do not contain, so add the batch dims to the key of the cache.
    over = sorted({str(roles.batch_dim) for roles in meshes})
    fingerprint = f"{lowered.fingerprint} {machine!r} {over}"

    def wrap_with_cache(evaluator: EvaluateFn, suffix: str = "") -> EvaluateFn:
        return search_cache.wrap_with_cache(evaluator, fingerprint + suffix) if search_cache else evaluator

    with _SearchProgress(shown_as) as shown:
        try:
            outcome = search_maps(
                model,
                _list_built_in_maps(model, meshes, start, kept_rules),
                wrap_with_cache(evaluate),
                max_bytes=limit,
                max_maps=tries,
                evaluate_remat=recomputing and wrap_with_cache(recomputing, " remat"),
                seed=seed,
                on_tried=shown,
            )
        finally:
            if search_cache is not None:
                search_cache.write_file()

    def get_evaluator(candidate: Candidate) -> _MapEvaluator:
        return recomputing if recomputing and candidate.recomputes else evaluate

    compiled, for_gpu = None, choose_target_for_counting(verify, machine)
    if for_gpu and outcome.is_complete:

        def make_compiled_evaluator(candidate: Candidate) -> EvaluateFn:
            evaluator = get_evaluator(candidate)
            suffix = f"{' remat' * candidate.recomputes} {for_gpu} {version('jaxlib')}"
            return wrap_with_cache(
                lambda rules: evaluator.make_map_cost(evaluator.compute_step_cost(rules, for_gpu, shown_as)),
                suffix,
            )

        try:
            found = choose_best_compiled_map(
                outcome, lambda tried: make_compiled_evaluator(tried)(tried.layout_map)
            )

            def search_around(first: Candidate) -> SearchOutcome:
                roles = next(roles for roles in meshes if roles.mesh == first.layout_map.mesh)
                start = make_built_in_map("start", model, roles, first.layout_map)
                max_maps = min(_COMPILED, tries)
                evaluate = make_compiled_evaluator(first)
                return search_maps(model, [start], evaluate, max_bytes=limit, max_maps=max_maps, seed=seed)

            outcome = search_around_best_compiled_map(outcome, found, search_around)
        finally:
            if search_cache is not None:
                search_cache.write_file()
    if target and outcome.is_complete:
        outcome, compiled = choose_first_map_that_fits(
            outcome, lambda tried: get_evaluator(tried).verify_candidate(tried, target, shown_as), limit
        )
    best = outcome.best
    layers = " and ".join(format_merged_paths(blocks.paths) for blocks in model.blocks)
    recompute = explain_recomputation(outcome, layers, lowered.step.how_to_recompute)
    counted_for = for_gpu if best.compiled_bytes is not None else None
    try:
        plan = get_evaluator(best).make_plan(best.layout_map, compiled, counted_for, shown_as)
    except KeyboardInterrupt:  # return the best map so far, so plan it again; a second Ctrl-C ends the search
        outcome = replace(outcome, is_complete=False)
        plan = get_evaluator(best).make_plan(best.layout_map, compiled, counted_for, shown_as)
    return SearchResult(outcome, plan, evaluate.find_batch_dim(best.layout_map), target, recompute)


_COMPILED = 8  # number of maps like the best one to compile, as estimates may rank them too low
_WIDEST = 32
"""Largest model dim that is tried, even if more devices share the machine's fast network."""


def _choose_mesh(mesh: Mesh | str | None, start: RuleSet | None) -> Mesh | None:
    if start is not None and not isinstance(start, RuleSet):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScopeError(
            f"search: start={shorten_repr(start)} is not a layout map",
            why=f"it is {describe_type(start)}",
            fix="pass a LayoutMap",
        )
    found = parse_or_convert_mesh(mesh)
    if found is not None and start is not None and start.mesh not in (None, found):
        raise MeshError(
            "search: mesh differs from the mesh of start",
            facts={"mesh": str(found), "start": str(start.mesh)},
            why="the rules of start name dims of the mesh of start",
            fix="leave mesh out, or read the rules for this mesh: LayoutMap.from_yaml(text, mesh)",
        )
    return found if found is not None else start.mesh if start is not None else None


def _choose_dim_roles(mesh: Mesh, batch_dim: BatchDim | None, start: RuleSet | None) -> MeshRoles:
    """Return a mesh with its dims' roles. Without `batch_dim`, infer it from activation rules or a usual name."""
    check_dims_in_mesh("search: batch_dim", batch_dim, mesh, "the batch is sharded over it", MeshError)
    outputs = list(start.activations.values()) if start is not None else []
    sharded = [dim for layout in outputs if layout.rank for dim in layout.list_mesh_dims(0)]
    named = [dim for dim in _NAMES_OF_BATCH if dim in mesh]
    return assign_dim_roles(mesh, batch_dim or next(iter([*sharded, *named]), None))


def _select_kept_rules(start: RuleSet | None, keep: Iterable[str], mesh: Mesh | None) -> RuleSet | None:
    """Return the rules of `start` with a pattern in `keep`, to be kept by the search, or None if `keep` is empty."""
    patterns = [keep] if isinstance(keep, str) else list(keep)
    if not patterns:
        return None
    there = [*start, *start.activations] if start is not None else []
    for pattern in patterns:
        if pattern not in there:
            near = find_nearest_candidates(pattern, there)
            raise RuleError(
                f"search: keep={pattern!r} is not a rule of start",
                facts={"rules": ", ".join(there)},
                why="keep= takes patterns of start's rules",
                fix=f"did you mean {near[0]!r}?" if near else "use a rule of start, or pass start=",
            )
    assert start is not None
    made = RuleSet(mesh)
    for rule in start.rules:
        if rule.pattern in patterns:
            made.add(rule.pattern, rule.layout, uneven=rule.uneven)
    made.activations.update({p: layout for p, layout in start.activations.items() if p in patterns})
    return made


def _list_built_in_maps(
    model: SearchedModel, meshes: Iterable[MeshRoles], start: RuleSet | None, kept_rules: RuleSet | None
) -> list[BuiltInMap]:
    found: list[BuiltInMap] = []
    for roles in meshes:
        can_use_preset = kept_rules is None and roles.model_dim is not None
        preset = find_matching_preset([group.paths[0] for group in model.groups]) if can_use_preset else None
        found += iterate_built_in_maps(model, roles, preset)
        if start is not None:
            found.append(make_built_in_map("start", model, roles, start))
    return found


def _make_uneven_batch_error(machine: Machine, batch: int | None, max_model_size: int) -> PlanError:
    multiple = machine.num_devices // max_model_size or 1
    return PlanError(
        f"search: a batch of {batch} cannot be sharded evenly on {machine}",
        facts={"devices": machine.num_devices, "largest model dim": max_model_size},
        why="each mesh in the search shards the batch over all devices that do not shard layers",
        fix=f"use a batch size that is a multiple of {multiple}, or pass mesh='data=..,model=..'",
    )


class _MapEvaluator:
    """Function that returns the cost of a step with a layout map on one machine."""

    def __init__(self, lowered: LoweredStep, machine: Machine, batch_dims: dict[Mesh, BatchDim | None]):
        self._lowered, self._machine, self.batch_dims = lowered, machine, batch_dims
        paths = (path for v in lowered.step.variables for path in (v.path, *v.aliases))
        # `Cost` compares paths with stars for numbers, so replace the numbers here, too.
        self._weights = frozenset(map(replace_numbers_with_stars, paths))

    def find_batch_dim(self, layout_map: RuleSet) -> BatchDim | None:
        """Return the dim that shards batches on the mesh of a layout map, or None if batches are replicated."""
        assert layout_map.mesh is not None
        return self.batch_dims[layout_map.mesh]

    def verify_candidate(self, candidate: Candidate, target: str, progress: ProgressMode) -> Verified:
        """Compile the step with a candidate's map for `target`, and return XLA's sizes and the estimated cost."""
        found, batch_dim = candidate.layout_map, self.find_batch_dim(candidate.layout_map)
        return self._lowered.verify(found, batch_dim=batch_dim, target=target, progress=progress)

    def make_plan(
        self, layout_map: RuleSet, verified: Verified | None, target: str | None, progress: ProgressMode
    ) -> Plan:
        """Return the plan of a layout map with the cost of a step, estimated or from the compiler for `target`."""
        plan, batch_dim = self._lowered.plan(layout_map), self.find_batch_dim(layout_map)
        counted = self.compute_step_cost(layout_map, target, progress)
        return plan.add_cost(Cost(counted, self._machine, batch_dim=batch_dim, verified=verified))

    def compute_step_cost(
        self, layout_map: RuleSet, target: str | None = None, progress: ProgressMode = None
    ) -> StepCost:
        """Return the cost of a step with a layout map, estimated or from the compiler for `target`."""
        batch_dim = self.find_batch_dim(layout_map)
        return self._lowered.count(layout_map, batch_dim=batch_dim, target=target, progress=progress)

    def __call__(self, layout_map: RuleSet) -> MapCost:
        return self.make_map_cost(self.compute_step_cost(layout_map))

    def make_map_cost(self, step_cost: StepCost) -> MapCost:
        """Return the time and memory of a step on the machine, by which a search compares maps."""
        cost = Cost(step_cost, self._machine, self._weights)
        return MapCost(cost.step_seconds, cost.step.peak_bytes, cost.serial_seconds)


class _SearchProgress(ProgressLine):
    """Progress line with the number of tried maps and the cost of the best one."""

    def __call__(self, num_tried: int, best: Candidate) -> None:
        if not self._is_update_due():
            return
        cost = best.cost
        said = f"{format_duration(cost.seconds)}, {format_bytes(cost.peak_bytes)}" if cost else "none"
        lacks = f", lacks {format_bytes(best.missing_bytes)}" if cost and best.missing_bytes else ""
        self._show_line(
            f"layoutmap: {num_tried} maps tried so far, best {said} on {best.layout_map.mesh}{lacks}"
        )
