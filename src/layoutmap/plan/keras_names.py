"""The layouts of a plan by what Keras calls its variables; what Keras's own layout map cannot express is refused."""

from __future__ import annotations

from layoutmap.core.errors import PlanError, listed
from layoutmap.core.layout import Layout
from layoutmap.core.match import KERAS
from layoutmap.plan.table import PlanTable


def layouts_by_name(plan: PlanTable) -> dict[str, Layout]:
    """The layouts of all variables, by `variable.path` of Keras.

    Raises:
        PlanError: The plan has errors, or Keras's layout map cannot express some of it.
    """
    plan.check()
    if plan.activations:
        raise _refused(
            f"the layouts of {len(plan.activations)} outputs of layers",
            listed([match.path for match in plan.activations]),
            "Keras knows a layer by the names of the layers that call it, and a plan knows it by its object path",
            "plan with a map without activations, and add their layouts to Keras's map, as name/of/layer/output",
        )
    found: dict[str, Layout] = {}
    for path, assignment in plan.items():
        name, layout = assignment.variable.name.removeprefix(KERAS), assignment.layout
        if not name:
            raise _refused(
                "a variable that has no name in Keras",
                path,
                "the plan is not of a Keras model, or it was read from a file, which has no such names",
                "make the plan here: lm.plan(make_model, layout_map).to_keras()",
            )
        if any(isinstance(spec, tuple) for spec in layout.sharding_specs):
            raise _refused(
                f"the layout {layout}",
                path,
                "a keras.distribution.TensorLayout has one mesh dim for an axis, and this one is sharded over several",
                "shard it over one of them, or train with layout_map.scope(), which can",
            )
        if found.setdefault(name, layout) != layout:
            raise _refused(
                f"two layouts for the name {name}: {found[name]} and {layout}",
                path,
                "Keras looks layouts up by name, and several variables of this model have this one",
                "name the layers, so that their paths differ",
            )
    return found


def _refused(what: str, where: str, why: str, fix: str) -> PlanError:
    return PlanError(
        f"to_keras: {what} cannot be expressed in Keras's layout map",
        facts={"where": where},
        why=why,
        fix=fix,
    )
