"""Rules that a search writes, for all published models of the zoo."""

import itertools
import random

import keras
import pytest

import layoutmap as lm
from layoutmap.cost.search.built_in_maps import iterate_built_in_maps
from layoutmap.cost.search.options import list_search_meshes, list_specs_with_none
from layoutmap.cost.search.space import LayoutSpace, SearchedModel
from layoutmap.plan.planner import make_plan_table
from layoutmap.rules import presets, zoo


@pytest.mark.long
# T5 of keras-hub 0.32 passes masks to its attention, which takes none.
@pytest.mark.filterwarnings("ignore:Layer '.*' looks like it has unbuilt state:UserWarning")
@pytest.mark.filterwarnings("ignore:Layer '.*_attention' .* was passed an input with a mask:UserWarning")
@pytest.mark.parametrize("name", zoo.list_models())
def test_written_rules_give_the_layouts_that_were_chosen(name):
    """Planning with the rules of any choice gives each kind of weight just its layout, and its preset is found."""
    assert keras.backend.backend() == "jax"
    known = zoo.find_model(name)
    plan = lm.plan(lambda: known.make(dtype="bfloat16"), lm.LayoutMap("data=64"), library="keras")
    model, chance = SearchedModel(tuple(a.variable for a in plan.assignments)), random.Random(0)
    for grid in list_search_meshes(64, 64, 8):
        preset = presets.find_matching_preset([group.paths[0] for group in model.groups])
        assert known.preset == preset
        extra_layouts = [
            (expert.layouts, expert.output_specs) for expert in iterate_built_in_maps(model, grid, preset)
        ]
        for tie_similar in (True, False):
            space = LayoutSpace(model, grid, tie_similar=tie_similar, extra_layouts=extra_layouts)
            for _ in itertools.repeat(None, 3):
                point = tuple(map(chance.randrange, space.sizes))
                layouts, _ = space.get_layouts_of_point(point)
                made = space.make_layout_map(point)
                table = make_plan_table(model.variables, made)
                got = {
                    group: {list_specs_with_none(table[path].layout) for path in group.paths}
                    for group in layouts
                }
                assert {group: {specs} for group, specs in layouts.items()} == got
                assert [] == [p for p in table.problems if p.severity != "note"]
                if tie_similar:
                    assert len(made) <= 20
