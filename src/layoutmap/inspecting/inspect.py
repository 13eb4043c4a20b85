"""Read the plan of an existing model from its arrays, even if other code created them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from layoutmap.adapters import InspectionAdapter, get_model_adapter, require_capability
from layoutmap.core.errors import join_names
from layoutmap.core.garbage import pause_garbage_collection
from layoutmap.core.layout import Layout
from layoutmap.core.match import AS_FOUND, Match
from layoutmap.core.mesh import Mesh, check_dims_in_mesh
from layoutmap.core.specs import BatchDim, list_batch_dims
from layoutmap.core.variables import Assignment
from layoutmap.engines import Engine, get_engine
from layoutmap.engines.protocol import PlacementWithoutLayout
from layoutmap.inspecting.replicas import PlacedVariable, find_replica_problems
from layoutmap.plan.problems import Problem, sort_problems
from layoutmap.plan.table import PlanTable
from layoutmap.scope.context import Scope
from layoutmap.scope.plan import Plan

Placement = Layout | PlacementWithoutLayout


# A guessed layout would be misleading, so omit arrays without a known layout, and warn of them (decisions/0162).
def inspect(
    model: object, optimizer: object = None, *, batch_dim: BatchDim | None = None, across: bool = False
) -> Plan:
    """Return the plan of an existing model from the layouts of its arrays, even if other code sharded them.

    This starts, sends, gathers, and changes nothing, and guesses nothing: an array whose placement no layout can
    express is not in the plan, but among its problems, with a description of the placement. If several processes share
    a model, each can call this alone.

    Args:
        model: Model of Keras, torch, or flax.nnx, or a pytree of arrays, such as a train state of flax, a module of
            Equinox, or `jax.ShapeDtypeStruct`s with shardings.
        optimizer: Optimizer or its state, if the model does not hold it. The plan then includes its slots.
        batch_dim: Mesh dim over which batches are sharded. The plan notes every other dim that shards no weight.
        across: Whether to compare all devices and processes: the plan has an error for each variable whose shapes or
            layouts differ between processes, or whose replicas differ in any bit. It reads all values once, at about 1
            GB per second, and sends only checksums. All processes must call it, each with its part of the model.

    Returns:
        The plan. If a scope of this library sharded the model, it includes the rules, notes, and problems of that
        scope. If arrays are on several meshes, it covers the largest one, and the others are among its problems.

    Raises:
        ScopeError: `model` is not of a supported library, or the mesh does not have the dim `batch_dim`.

    Example:
        >>> import jax, layoutmap as lm
        >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
        >>> sharding = jax.NamedSharding(mesh, jax.P(None, "model"))
        >>> params = {"up": {"kernel": jax.device_put(jax.numpy.ones((64, 256)), sharding)}}
        >>> plan = lm.inspect(params, batch_dim="data")
        >>> plan["up.kernel"].layout.sharding_specs, plan["up.kernel"].shard_shape
        (('unsharded', 'model'), (64, 64))
        >>> print(plan.explain("up.kernel"))
        up.kernel
          what        weight, float32[64, 256], 64.0 KiB
          layout      (unsharded, model)
          per device  64 x 64, 16.0 KiB
          because     it keeps its layout: no layout map applies to it
          to say so   layout_map[r"up\\.kernel$"] = (None, 'model')
    """
    with pause_garbage_collection():
        return _inspect_model(model, optimizer, batch_dim, across)


def _inspect_model(model: object, optimizer: object, batch_dim: BatchDim | None, across: bool) -> Plan:
    adapter = require_capability(get_model_adapter(model), InspectionAdapter, "inspect")
    stored = adapter.describe_variables(model, optimizer)
    engine = get_engine(adapter.engine_name)
    placements = _find_placements([each.array for each in stored], engine)
    context = adapter.find_scope_context(model)
    scope = context if isinstance(context, Scope) else None
    mesh = _find_largest_mesh(placements)
    if scope is not None and _is_same_mesh(scope.plan.mesh, mesh, engine):
        mesh = scope.plan.mesh
    placements = [_replace_mesh_if_same(mesh, placement, engine) for placement in placements]
    check_dims_in_mesh("batch_dim", batch_dim, mesh, "the batch is sharded over it")
    placed = [
        PlacedVariable(
            each.variable,
            each.array,
            placement,
            _find_layout_on_mesh(mesh, placement, len(each.variable.shape), engine),
        )
        for each, placement in zip(stored, placements, strict=True)
    ]
    assignments = [
        Assignment(
            each.variable,
            each.layout,
            Match(each.variable.path, None, otherwise=AS_FOUND),
            is_padded=bool(each.layout.find_uneven_axes(each.variable.shape)),
        )
        for each in placed
        if each.layout is not None
    ]
    problems = [problem for each in placed for problem in _iterate_placement_problems(each, mesh)]
    if across:
        problems += find_replica_problems(placed, engine, mesh)
    gathered = tuple(dim for dim in adapter.list_gathered_dims(model) if dim in mesh)
    plan = Plan(mesh, tuple(assignments), sort_problems(problems), gathered_dims=gathered)
    plan = replace(plan, batches=list_batch_dims(batch_dim) if batch_dim else scope and scope.batches)
    if scope is not None:
        return _merge_with_scope_plan(plan, scope.plan)
    return plan.add_problems([*_iterate_unused_dim_problems(plan, batch_dim)])


def _find_placements(arrays: Sequence[Any], engine: Engine) -> list[Placement]:
    """Return the placement of each array. Arrays without named mesh dims are matched with other arrays' meshes."""
    placements: list[Placement] = [engine.find_placement(array) for array in arrays]
    meshes = list({placement.mesh: None for placement in placements if isinstance(placement, Layout)})
    return [
        engine.find_placement(array, meshes)
        if meshes and isinstance(placement, PlacementWithoutLayout) and not placement.devices
        else placement
        for array, placement in zip(arrays, placements, strict=True)
    ]


def _replace_mesh_if_same(mesh: Mesh, placement: Placement, engine: Engine) -> Placement:
    """Return a layout with `mesh` as its mesh if the two meshes are the same. Return other placements unchanged."""
    own = placement.mesh if isinstance(placement, Layout) else None
    if not isinstance(placement, Layout) or own is mesh or not _is_same_mesh(placement.mesh, mesh, engine):
        return placement
    return Layout(placement.sharding_specs, mesh, memory=placement.memory)


def _is_same_mesh(one: Mesh, other: Mesh, engine: Engine) -> bool:
    """Return whether two meshes have equal dims and devices. A mesh that lists no devices is bound first."""
    if one == other or one.mesh_dims != other.mesh_dims or None not in (one.devices, other.devices):
        return one == other
    return engine.bind_mesh(one).devices == engine.bind_mesh(other).devices


def _find_largest_mesh(placements: Sequence[Placement]) -> Mesh:
    """Return the largest mesh of the placements. If there is none, return a mesh of the most used devices."""
    counts = Counter(placement.mesh for placement in placements if isinstance(placement, Layout))
    if counts:
        return max(counts, key=lambda mesh: (mesh.size, len(mesh.mesh_dims), counts[mesh]))
    without = (each for each in placements if isinstance(each, PlacementWithoutLayout))
    alone = Counter(each.devices for each in without if each.devices)
    devices = max(alone, key=alone.__getitem__, default=None)
    return Mesh(devices, {"device": len(devices or "1")})


def _find_layout_on_mesh(mesh: Mesh, placement: Placement, rank: int, engine: Engine) -> Layout | None:
    """Return an array's layout on the plan's mesh (replicated if all devices store it), or `None` if it has none."""
    if isinstance(placement, Layout):
        if placement.mesh == mesh:
            return placement
        return (
            Layout(placement.sharding_specs, mesh, memory=placement.memory)
            if _is_submesh(placement.mesh, mesh, engine)
            else None
        )
    # The mesh of a plan may list no devices. Binding it gives it devices, which can be compared.
    on_all = len(placement.devices) == mesh.size and placement.devices == engine.bind_mesh(mesh).devices
    return Layout.replicated(mesh, rank) if placement.is_copied or on_all else None


def _is_submesh(part: Mesh, mesh: Mesh, engine: Engine) -> bool:
    """Return whether `part` consists of the devices of `mesh` at fixed positions along the dims that `part` lacks."""
    sizes = mesh.dim_sizes
    if any(sizes.get(name) != number for name, number in part.dim_sizes.items()):
        return False
    if part.devices is None and mesh.devices is None:
        return True
    if part.devices is None or mesh.devices is None:  # bind an abstract mesh, because it lists no devices
        part, mesh = engine.bind_mesh(part), engine.bind_mesh(mesh)
    assert part.devices is not None
    assert mesh.devices is not None
    placements = {
        name: dict(zip(mesh.dim_names, mesh.coords(i), strict=True)) for i, name in enumerate(mesh.devices)
    }
    if not placements.keys() >= {*part.devices}:
        return False
    first = placements[part.devices[0]]
    return all(
        placements[name] == first | dict(zip(part.dim_names, part.coords(i), strict=True))
        for i, name in enumerate(part.devices)
    )


def _iterate_placement_problems(placed: PlacedVariable, mesh: Mesh) -> Iterator[Problem]:
    """Yield problems of a variable that has no layout, is on a different mesh than the plan, or is uneven."""
    variable, placement, layout = placed.variable, placed.placement, placed.layout
    path, facts = variable.path, (("shape", str(variable.shape)),)
    if isinstance(placement, PlacementWithoutLayout):
        if layout is None:
            yield Problem(
                "no layout",
                "warning",
                path,
                f"{path}: {placement.what}",
                facts,
                "a plan has only arrays that are stored in equal shards over named mesh dims",
                "shard it evenly over named mesh dims, or look at it with the framework's own tools",
            )
        elif mesh.size > 1 and variable.shape:  # scalars cannot be sharded, so they are not reported
            why = "the plan treats this array as replicated"
            yield Problem("plain", "note", path, f"{path}: {placement.what}", facts, why)
    elif layout is None:
        facts += (
            ("layout", str(placement)),
            ("its mesh", str(placement.mesh)),
            ("devices", join_names(placement.mesh.devices or ())),
        )
        why = f"a plan covers one mesh, here {mesh}, so this variable is not in the plan"
        fix = "inspect the part of the model that is on the other mesh"
        yield Problem("another mesh", "warning", path, f"{path}: it is on another mesh", facts, why, fix)
    elif placement.mesh != mesh:
        rest = ", ".join(name for name in mesh.dim_names if name not in placement.mesh)
        what = f"{path}: it is only on a part of the mesh, {placement.mesh}"
        why = f"the plan treats this array as replicated over {rest}"
        yield Problem("another mesh", "note", path, what, facts, why)
    if layout is not None:
        for axis in layout.find_uneven_axes(variable.shape):
            error = layout.make_uneven_error(variable.shape, axis, path)
            facts = tuple((name, str(value)) for name, value in error.facts.items())
            what = f"{path}: axis {axis} is sharded unevenly"
            why = f"{error.why}: some devices store more than others"
            severity = "note" if getattr(placed.array, "is_padded", False) else "warning"
            yield Problem("uneven", severity, path, what, facts, why, error.fix)


def _get_mesh_and_sharding_dims(layout: Layout) -> tuple[Mesh, list[list[str]]]:
    """Return a pair: the mesh of a layout, and for each axis the dims with more than one device that shard the axis."""
    sizes = layout.mesh.dim_sizes
    return layout.mesh, [
        [dim for dim in layout.list_mesh_dims(axis) if sizes[dim] > 1] for axis in range(layout.rank)
    ]


def _merge_with_scope_plan(inspected_plan: Plan, scope_plan: PlanTable) -> Plan:
    """Return the plan with the rules, notes, and problems of the scope that created the model."""
    known: dict[str, list[Assignment]] = {}
    for each in scope_plan.assignments:
        known.setdefault(each.variable.path, []).append(each)
    assignments: list[Assignment] = []
    moved_problems: list[Problem] = []
    for each in inspected_plan.assignments:
        path, shape = each.variable.path, each.variable.shape
        alike = [a for a in known.get(path, ()) if a.variable.shape == shape]
        same = [
            a
            for a in alike
            if _get_mesh_and_sharding_dims(a.layout) == _get_mesh_and_sharding_dims(each.layout)
        ]
        if alike and not same:
            facts = ("layout in the scope", str(alike[0].layout)), ("layout now", str(each.layout))
            why = "the program has replaced the array after its scope sharded it"
            fix = "give the new array the layout of the scope: lm.dtensor.relayout(array, layout); or change the rule"
            moved_problems.append(
                Problem("moved", "warning", path, f"{path}: its layout has changed", facts, why, fix)
            )
        assignments.append(
            replace(each, layout=same[0].layout, match=same[0].match, global_init=same[0].global_init)
            if same
            else each
        )
    order = {a.variable.path: number for number, a in reversed([*enumerate(scope_plan.assignments)])}
    assignments.sort(key=lambda a: order.get(a.variable.path, len(order)))
    models = {a.variable.model for a in assignments if a.variable.path in known}
    kept = [p for p in scope_plan.problems if not p.model or p.model in models]
    # The scope has reported padded variables already, so do not report them as uneven again.
    padded = {a.variable.path for a in assignments if a.is_padded}
    kept += [p for p in inspected_plan.problems if p.kind != "uneven" or p.subject not in padded]
    return replace(
        inspected_plan,
        assignments=tuple(assignments),
        problems=sort_problems([*kept, *moved_problems]),
        activations=scope_plan.activations,
        free_activations=scope_plan.free_activations,
        layers=scope_plan.layers,
    )


def _iterate_unused_dim_problems(plan: Plan, batch_dim: BatchDim | None) -> Iterator[Problem]:
    """Yield a note for each mesh dim that shards neither weights nor batches."""
    for dim in plan.unused_dims:
        if dim.name not in list_batch_dims(batch_dim):
            what = f"mesh dim {dim.name!r} shards no weight"
            why = f"groups of {dim.size} devices store the same weights, and repeat work unless their data differs"
            fix = f"pass batch_dim={dim.name!r} if batches are sharded over it"
            yield Problem("unused dim", "note", dim.name, what, (("mesh", str(plan.mesh)),), why, fix)
