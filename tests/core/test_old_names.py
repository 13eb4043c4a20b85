"""Old spellings of public names warn, and give what the new ones give."""

import pytest

import layoutmap as lm
from layoutmap.plan.problems import Problem
from layoutmap.plan.table import PlanTable
from layoutmap.rules import presets
from layoutmap.rules.rules import Rules

OLD_NAMES = [
    (lm.Layout, "mesh_dims_of", "list_mesh_dims"),
    (lm.Layout, "shard_offset", "locate_shard"),
    (lm.Layout, "uneven_axes", "find_uneven_axes"),
    (lm.Layout, "rank_error", "make_rank_error"),
    (lm.Layout, "uneven_error", "make_uneven_error"),
    (PlanTable, "with_problem", "add_problem"),
    (PlanTable, "with_problems", "add_problems"),
    (PlanTable, "with_cost", "add_cost"),
    (PlanTable, "judged", "set_limits"),
    (Problem, "of_model", "add_model_name"),
    (lm.Plan, "of", "from_table"),
    (Rules, "name_of", "format_name"),
    (presets, "names", "list_presets"),
    (presets, "about", "describe_preset"),
    (presets, "read", "read_preset"),
]


@pytest.mark.parametrize(
    ("owner", "old", "new"), OLD_NAMES, ids=lambda value: getattr(value, "__name__", value)
)
def test_an_old_name_warns_and_gives_the_new_one(owner, old, new):
    with pytest.warns(DeprecationWarning, match=f"{old} has the new name {new}") as caught:
        assert getattr(owner, old) == getattr(owner, new)
    assert caught[0].filename == __file__


def test_an_old_method_is_called_on_its_object():
    layout = lm.Layout(["model", None], lm.Mesh(None, "batch=2,model=4"))
    with pytest.warns(DeprecationWarning, match=r"Layout\.mesh_dims_of has the new name list_mesh_dims"):
        assert layout.mesh_dims_of(0) == ("model",)


def test_a_name_that_no_preset_module_had_is_not_found():
    with pytest.raises(AttributeError, match="has no attribute 'nmaes'"):
        presets.nmaes  # noqa: B018
