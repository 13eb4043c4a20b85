"""Convert a plan to Keras's layout map, and raise for a plan that Keras cannot express."""

from __future__ import annotations

from layoutmap.core.errors import PlanError, join_names
from layoutmap.core.layout import Layout
from layoutmap.core.match import KERAS
from layoutmap.core.variables import Kind
from layoutmap.plan.table import PlanTable


def collect_layouts_by_keras_name(plan: PlanTable) -> dict[str, Layout]:
    """Return a dict from Keras's name (`variable.path`) of each variable that is not a slot to its layout.

    Raises:
        PlanError: The plan has errors, or Keras's layout map cannot express some of it.
    """
    plan.check()
    if plan.activations:
        raise _make_inexpressible_error(
            f"the layouts of {len(plan.activations)} outputs of layers",
            join_names([match.path for match in plan.activations]),
            "Keras identifies a layer by the names of its callers, but a plan by its object path",
            "plan without activation rules, and add their layouts to Keras's map, as name/of/layer/output",
        )
    found: dict[str, Layout] = {}
    for path, assignment in plan.items():
        name, layout = assignment.variable.name.removeprefix(KERAS), assignment.layout
        if assignment.variable.kind is Kind.SLOT:
            if assignment.variable.axes is None or layout.is_fully_replicated():
                continue  # Keras gives these slots their weight's layout or replicates them, so they need no entry
            raise _make_inexpressible_error(
                f"the layout {layout} of an optimizer's slot",
                path,
                "Keras gives a slot its weight's layout if the shapes are equal, and replicates other slots",
                "plan the model without its optimizer",
            )
        if not name:
            raise _make_inexpressible_error(
                "a variable that has no name in Keras",
                path,
                "the plan is not for a Keras model, or was read from a file, which stores no Keras names",
                "make the plan in this program: lm.plan(make_model, layout_map).to_keras()",
            )
        if layout.host_memory:
            raise _make_inexpressible_error(
                f"the layout {layout}",
                path,
                "a keras.distribution.TensorLayout has no memory setting",
                "train with layout_map.scope(), which supports memory, or leave memory out",
            )
        if any(isinstance(spec, tuple) for spec in layout.sharding_specs):
            raise _make_inexpressible_error(
                f"the layout {layout}",
                path,
                "a keras.distribution.TensorLayout has one mesh dim per axis, but this axis is sharded over several",
                "shard the axis over one mesh dim, or train with layout_map.scope(), which supports several",
            )
        if found.setdefault(name, layout) != layout:
            raise _make_inexpressible_error(
                f"two layouts for the name {name}: {found[name]} and {layout}",
                path,
                "Keras looks up layouts by name, and several variables of this model share this name",
                "name the layers, so that their paths differ",
            )
    return found


def _make_inexpressible_error(what: str, where: str, why: str, fix: str) -> PlanError:
    """Return, but do not raise, the error for a part of a plan that Keras's layout map cannot express."""
    return PlanError(
        f"to_keras: {what} cannot be expressed in Keras's layout map",
        facts={"where": where},
        why=why,
        fix=fix,
    )
