"""Read the plan of an existing model from its arrays, even if other code created them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from layoutmap.adapters import Inspecting, get_model_adapter, require_capability
from layoutmap.core.errors import join_names
from layoutmap.core.garbage import pause_garbage_collection
from layoutmap.core.layout import Layout
from layoutmap.core.match import AS_FOUND, Match
from layoutmap.core.mesh import Mesh, check_dim
from layoutmap.core.specs import BatchDim, list_batch_dims
from layoutmap.core.variables import Assignment
from layoutmap.engines import Engine, get_engine
from layoutmap.engines.protocol import Unplaced
from layoutmap.inspecting.replicas import StoredVariable, find_differences
from layoutmap.plan.problems import Problem, sort_problems
from layoutmap.plan.table import PlanTable
from layoutmap.scope.context import Scope
from layoutmap.scope.plan import Plan

Placement = Layout | Unplaced


# A guessed layout would mislead, so arrays without a known layout are omitted with a warning (decisions/0162).
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
        ScopeError: It is not a model of a supported library, or the mesh does not have the dim.

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
        return _make_plan(model, optimizer, batch_dim, across)


def _make_plan(model: object, optimizer: object, batch_dim: BatchDim | None, across: bool) -> Plan:
    adapter = require_capability(get_model_adapter(model), Inspecting, "inspect")
    stored = adapter.describe_variables(model, optimizer)
    engine = get_engine(adapter.engine_name)
    places = _find_placements([each.array for each in stored], engine)
    context = adapter.find_context(model)
    scope = context if isinstance(context, Scope) else None
    mesh = _find_largest_mesh(places)
    if scope is not None and _is_same_mesh(scope.plan.mesh, mesh, engine):
        mesh = scope.plan.mesh
    places = [_unify_mesh(mesh, place, engine) for place in places]
    check_dim("batch_dim", batch_dim, mesh, "the batch is sharded over it")
    held = [
        StoredVariable(
            each.variable,
            each.array,
            place,
            _find_layout_on_mesh(mesh, place, len(each.variable.shape), engine),
        )
        for each, place in zip(stored, places, strict=True)
    ]
    assignments = [
        Assignment(
            each.variable,
            each.layout,
            Match(each.variable.path, None, otherwise=AS_FOUND),
            is_padded=bool(each.layout.find_uneven_axes(each.variable.shape)),
        )
        for each in held
        if each.layout is not None
    ]
    problems = [problem for each in held for problem in _find_problems(each, mesh)]
    if across:
        problems += find_differences(held, engine, mesh)
    gathered = tuple(dim for dim in adapter.gathered_dims(model) if dim in mesh)
    plan = Plan(mesh, tuple(assignments), sort_problems(problems), gathered_dims=gathered)
    plan = replace(plan, batches=list_batch_dims(batch_dim) if batch_dim else scope and scope.batches)
    if scope is not None:
        return _add_rules(plan, scope.plan)
    return plan.add_problems([*_find_unused_dims(plan, batch_dim)])


def _find_placements(arrays: Sequence[Any], engine: Engine) -> list[Placement]:
    """Return the layout of each array. Match layouts without dim names with the meshes of other arrays."""
    places: list[Placement] = [engine.describe_placement(array) for array in arrays]
    meshes = list({place.mesh: None for place in places if isinstance(place, Layout)})
    return [
        engine.describe_placement(array, meshes)
        if meshes and isinstance(place, Unplaced) and not place.devices
        else place
        for array, place in zip(arrays, places, strict=True)
    ]


def _unify_mesh(mesh: Mesh, place: Placement, engine: Engine) -> Placement:
    """Convert a placement to `mesh` if its mesh has the same devices."""
    if not isinstance(place, Layout) or place.mesh is mesh or not _is_same_mesh(place.mesh, mesh, engine):
        return place
    return Layout(place.sharding_specs, mesh, memory=place.memory)


def _is_same_mesh(one: Mesh, other: Mesh, engine: Engine) -> bool:
    """Return whether two meshes are equal, even if only one of them lists its devices."""
    if one == other or one.mesh_dims != other.mesh_dims or None not in (one.devices, other.devices):
        return one == other
    return engine.bind(one).devices == engine.bind(other).devices


def _find_largest_mesh(places: Sequence[Placement]) -> Mesh:
    """Return the largest mesh, of equals the most used one. Without meshes, make one of the arrays' devices."""
    counts = Counter(place.mesh for place in places if isinstance(place, Layout))
    if counts:
        return max(counts, key=lambda mesh: (mesh.size, len(mesh.mesh_dims), counts[mesh]))
    alone = Counter(place.devices for place in places if isinstance(place, Unplaced) and place.devices)
    devices = max(alone, key=alone.__getitem__, default=None)
    return Mesh(devices, {"device": len(devices or "1")})


def _find_layout_on_mesh(mesh: Mesh, place: Placement, rank: int, engine: Engine) -> Layout | None:
    """Return the layout of an array on the plan's mesh, or `None` if it has none there."""
    if isinstance(place, Layout):
        if place.mesh == mesh:
            return place
        return (
            Layout(place.sharding_specs, mesh, memory=place.memory)
            if _is_submesh(place.mesh, mesh, engine)
            else None
        )
    # A plan's mesh has no devices until it is bound.
    on_all = len(place.devices) == mesh.size and place.devices == engine.bind(mesh).devices
    return Layout.replicated(mesh, rank) if place.is_copied or on_all else None


def _is_submesh(part: Mesh, mesh: Mesh, engine: Engine) -> bool:
    """Return whether a mesh is a slice of another mesh, at fixed positions along the missing dims."""
    sizes = mesh.dim_sizes
    if any(sizes.get(name) != number for name, number in part.dim_sizes.items()):
        return False
    if part.devices is None and mesh.devices is None:
        return True
    if part.devices is None or mesh.devices is None:  # an abstract mesh has no devices to compare
        part, mesh = engine.bind(part), engine.bind(mesh)
    assert part.devices is not None
    assert mesh.devices is not None
    places = {
        name: dict(zip(mesh.dim_names, mesh.coords(i), strict=True)) for i, name in enumerate(mesh.devices)
    }
    if not places.keys() >= {*part.devices}:
        return False
    first = places[part.devices[0]]
    return all(
        places[name] == first | dict(zip(part.dim_names, part.coords(i), strict=True))
        for i, name in enumerate(part.devices)
    )


def _find_problems(held: StoredVariable, mesh: Mesh) -> Iterator[Problem]:
    variable, place, layout = held.variable, held.place, held.layout
    path, facts = variable.path, (("shape", str(variable.shape)),)
    if isinstance(place, Unplaced):
        if layout is None:
            yield Problem(
                "no layout",
                "warning",
                path,
                f"{path}: {place.what}",
                facts,
                "a layout says for each axis over which named mesh dims it is sharded, in equal shards: this is not in "
                "the plan",
                "lay it out by names, in equal shards, or look at it with the framework's own tools",
            )
        elif mesh.size > 1 and variable.shape:  # scalars cannot be sharded, so only arrays are reported
            why = "it counts as replicated"
            yield Problem("plain", "note", path, f"{path}: {place.what}", facts, why)
    elif layout is None:
        facts += (
            ("layout", str(place)),
            ("its mesh", str(place.mesh)),
            ("devices", join_names(place.mesh.devices or ())),
        )
        why = f"a plan is of one mesh, and most are on {mesh}: this is not in the plan"
        fix = "inspect the part of the model that is on the other mesh"
        yield Problem("another mesh", "warning", path, f"{path}: it is on another mesh", facts, why, fix)
    elif place.mesh != mesh:
        rest = ", ".join(name for name in mesh.dim_names if name not in place.mesh)
        what = f"{path}: it is on {place.mesh}, a part of the mesh"
        yield Problem("another mesh", "note", path, what, facts, f"it counts as replicated over {rest}")
    if layout is not None:
        for axis in layout.find_uneven_axes(variable.shape):
            error = layout.make_uneven_error(variable.shape, axis, path)
            facts = tuple((name, str(value)) for name, value in error.facts.items())
            what = f"{path}: axis {axis} is sharded unevenly"
            why = f"{error.why}: some devices hold more than others"
            severity = "note" if getattr(held.array, "is_padded", False) else "warning"
            yield Problem("uneven", severity, path, what, facts, why, error.fix)


def _get_sharding(layout: Layout) -> tuple[Mesh, list[list[str]]]:
    """Return the mesh, and for each axis the dims of more than one device."""
    sizes = layout.mesh.dim_sizes
    return layout.mesh, [
        [dim for dim in layout.list_mesh_dims(axis) if sizes[dim] > 1] for axis in range(layout.rank)
    ]


def _add_rules(found: Plan, planned: PlanTable) -> Plan:
    """Add the rules, notes, and problems of the scope that created the model to the plan."""
    known: dict[str, list[Assignment]] = {}
    for each in planned.assignments:
        known.setdefault(each.variable.path, []).append(each)
    assignments: list[Assignment] = []
    moved: list[Problem] = []
    for each in found.assignments:
        path, shape = each.variable.path, each.variable.shape
        alike = [a for a in known.get(path, ()) if a.variable.shape == shape]
        same = [a for a in alike if _get_sharding(a.layout) == _get_sharding(each.layout)]
        if alike and not same:
            facts = ("laid out in", str(alike[0].layout)), ("now in", str(each.layout))
            why = "the program has replaced the array since its scope laid it out"
            fix = "give the new one that layout: lm.dtensor.relayout(array, layout); or change the rule"
            moved.append(
                Problem("moved", "warning", path, f"{path}: it is in another layout now", facts, why, fix)
            )
        assignments.append(
            replace(each, layout=same[0].layout, match=same[0].match, global_init=same[0].global_init)
            if same
            else each
        )
    order = {a.variable.path: number for number, a in reversed([*enumerate(planned.assignments)])}
    assignments.sort(key=lambda a: order.get(a.variable.path, len(order)))
    models = {a.variable.model for a in assignments if a.variable.path in known}
    kept = [p for p in planned.problems if not p.model or p.model in models]
    # The scope already reported these variables as padded.
    padded = {a.variable.path for a in assignments if a.is_padded}
    kept += [p for p in found.problems if p.kind != "uneven" or p.subject not in padded]
    return replace(
        found,
        assignments=tuple(assignments),
        problems=sort_problems([*kept, *moved]),
        activations=planned.activations,
        free_activations=planned.free_activations,
    )


def _find_unused_dims(plan: Plan, batch_dim: BatchDim | None) -> Iterator[Problem]:
    for dim in plan.unused_dims:
        if dim.name not in list_batch_dims(batch_dim):
            what = f"mesh dim {dim.name!r} shards no weight"
            why = f"groups of {dim.size} devices hold the same weights, and compute the same unless their data differs"
            fix = f"pass batch_dim={dim.name!r} if batches are sharded over it"
            yield Problem("unused dim", "note", dim.name, what, (("mesh", str(plan.mesh)),), why, fix)
