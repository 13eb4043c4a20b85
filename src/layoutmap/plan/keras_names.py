"""Convert a plan to Keras's layout map, and refuse a plan that Keras cannot express."""

from __future__ import annotations

from layoutmap.core.errors import PlanError, join_names
from layoutmap.core.layout import Layout
from layoutmap.core.match import KERAS
from layoutmap.core.variables import Kind
from layoutmap.plan.table import PlanTable


def collect_keras_layouts(plan: PlanTable) -> dict[str, Layout]:
    """Return the layouts of all variables except slots, by Keras's `variable.path`.

    Raises:
        PlanError: The plan has errors, or Keras's layout map cannot express some of it.
    """
    plan.check()
    if plan.activations:
        raise _make_unsupported_error(
            f"the layouts of {len(plan.activations)} outputs of layers",
            join_names([match.path for match in plan.activations]),
            "Keras knows a layer by the names of the layers that call it, and a plan knows it by its object path",
            "plan with a map without activations, and add their layouts to Keras's map, as name/of/layer/output",
        )
    found: dict[str, Layout] = {}
    for path, assignment in plan.items():
        name, layout = assignment.variable.name.removeprefix(KERAS), assignment.layout
        if assignment.variable.kind is Kind.SLOT:
            if assignment.variable.axes is None or layout.is_fully_replicated():
                continue  # Keras replicates it by default
            raise _make_unsupported_error(
                f"the layout {layout} of an optimizer's slot",
                path,
                "Keras gives a slot the layout of its weight if it has its shape, and replicates others",
                "plan the model without its optimizer",
            )
        if not name:
            raise _make_unsupported_error(
                "a variable that has no name in Keras",
                path,
                "the plan is not of a Keras model, or it was read from a file, which has no such names",
                "make the plan here: lm.plan(make_model, layout_map).to_keras()",
            )
        if layout.host_memory:
            raise _make_unsupported_error(
                f"the layout {layout}",
                path,
                "a keras.distribution.TensorLayout names no memory",
                "train with layout_map.scope(), which can, or leave memory out",
            )
        if any(isinstance(spec, tuple) for spec in layout.sharding_specs):
            raise _make_unsupported_error(
                f"the layout {layout}",
                path,
                "a keras.distribution.TensorLayout has one mesh dim for an axis, and this one is sharded over several",
                "shard it over one of them, or train with layout_map.scope(), which can",
            )
        if found.setdefault(name, layout) != layout:
            raise _make_unsupported_error(
                f"two layouts for the name {name}: {found[name]} and {layout}",
                path,
                "Keras looks layouts up by name, and several variables of this model have this one",
                "name the layers, so that their paths differ",
            )
    return found


def _make_unsupported_error(what: str, where: str, why: str, fix: str) -> PlanError:
    """Return the error that Keras's layout map cannot express a part of the plan."""
    return PlanError(
        f"to_keras: {what} cannot be expressed in Keras's layout map",
        facts={"where": where},
        why=why,
        fix=fix,
    )
