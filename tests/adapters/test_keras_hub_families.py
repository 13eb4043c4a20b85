"""The families of keras-hub: each one planned; some built and trained for three steps, as on one device."""

import frameworks
import hub_families
import keras
import numpy as np
import pytest
from quiet import OF_ARRAYS

import layoutmap as lm
from layoutmap.scope.plan import make_plan

PROCESSES = ("jax",)
pytestmark = [
    OF_ARRAYS,
    # Of the mesh's rules some match nothing a model has; and what keras-hub's own layers warn of.
    pytest.mark.filterwarnings("ignore::layoutmap.core.errors.LayoutMapWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
]
MESH = "batch=2,model=4"


def planned(name):
    """What makes a family, rules that shard it, and its plan under them: each rule shards at least one weight."""

    def make():
        return hub_families.make(name)

    first = lm.plan(make, lm.LayoutMap(lm.create_mesh(MESH)))
    layout_map = hub_families.rules(first, name)
    plans = [make_plan([a.variable for a in first.assignments], layout_map), lm.plan(make, layout_map)]

    assert plans[0].fingerprint == plans[1].fingerprint
    for plan in plans:
        assert 0 < len(layout_map) <= sum(not a.layout.is_fully_replicated() for a in plan.assignments)
    return make, layout_map, plans[1]


@pytest.mark.long
@pytest.mark.timeout(600)  # on a machine that does other things, too
@pytest.mark.parametrize("name", sorted(set(hub_families.FAMILIES) - set(hub_families.TRAINED)))
def test_a_family_is_planned(name):
    """Each rule, written for the path of one weight, shards at least that weight; two plans have one fingerprint."""
    planned(name)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", hub_families.TRAINED)
def test_a_family_is_built_and_trained(name):
    """Planned, too: a scope does what the plan says, first weights and three steps are those of the plain model."""
    make, layout_map, plan = planned(name)
    keras.utils.set_random_seed(0)
    plain = make()
    keras.utils.set_random_seed(0)
    with layout_map.scope(batch_dim="batch") as scope:
        sharded = make()

    made = [(a.variable, a.layout) for a in scope.plan.assignments]
    assert made == [each for a in plan.assignments if (each := (a.variable, a.layout)) in made]
    pairs = zip(hub_families.weights(plain), hub_families.weights(sharded), strict=True)
    assert all(np.array_equal(expected, actual) for expected, actual in pairs)
    differences, of_gradients = hub_families.train(plain, sharded)
    assert differences < 1e-5
    assert of_gradients < 1e-2


def test_every_family_is_tried_or_left_out():
    """No class of the keras-hub that is installed is in neither table, and none is in both."""
    tried, left_out = set(hub_families.FAMILIES), set(hub_families.LEFT_OUT)

    assert hub_families.families() == tried | left_out
    assert set() == tried & left_out
    assert set(hub_families.NOT_TRAINED) <= tried


def test_the_page_has_the_table():
    """`docs/keras-hub.md` lists the families as the tests try them."""
    page = (frameworks.ROOT / "docs" / "keras-hub.md").read_text(encoding="utf-8")

    assert hub_families.table() in page
