"""Every family of keras-hub: planned, built and trained for three steps, as on one device."""

import frameworks
import hub_families
import jax
import pytest

import layoutmap as lm
from layoutmap.adapters.keras import KerasAdapter

PROCESSES = ("jax",)
pytestmark = [
    # Keras 3.15's own variables know only the older form of __array__.
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
    ),
    # Of the mesh's rules some match nothing a model has; and what keras-hub's own layers say of themselves.
    pytest.mark.filterwarnings("ignore::layoutmap.core.errors.LayoutMapWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
]
MESH = "batch=2,model=4"


@pytest.fixture
def quick_steps(monkeypatch):
    """XLA leaves out what makes a step fast, which takes most of the time; first values are made before that."""
    plain = KerasAdapter.forward

    def forward(self, model, batch):
        jax.config.update("jax_disable_most_optimizations", True)
        return plain(self, model, batch)

    monkeypatch.setattr(KerasAdapter, "forward", forward)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.long
@pytest.mark.timeout(1200)  # on a machine that does other things, too
@pytest.mark.parametrize("name", hub_families.FAMILIES)
@pytest.mark.usefixtures("quick_steps")
def test_a_family_is_planned_built_and_trained(name):
    """A scope does what the plan says, first weights are those of the plain model, three steps give its numbers."""

    def make():
        return hub_families.make(name)

    layout_map = hub_families.rules(lm.plan(make, lm.LayoutMap(lm.create_mesh(MESH))), name)
    plan = lm.plan(make, layout_map)
    with layout_map.scope() as scope:
        model = make()
    report = lm.check_parity(make, layout_map, hub_families.batch(model.backbone), batch_dim="batch")

    made = [(a.variable, a.layout) for a in scope.plan.assignments]
    assert made == [each for a in plan.assignments if (each := (a.variable, a.layout)) in made]
    assert len(layout_map) <= sum(not a.layout.is_fully_replicated() for a in plan.assignments)
    assert 0.0 == report.worst("weights")
    assert report.worst() < 1e-5


def test_every_family_is_tried_or_left_out():
    """No class of the keras-hub that is installed is in neither table, and none is in both."""
    tried, left_out = set(hub_families.FAMILIES), set(hub_families.LEFT_OUT)

    assert hub_families.families() == tried | left_out
    assert set() == tried & left_out


def test_the_page_has_the_table():
    """`docs/keras-hub.md` lists the families as the tests try them."""
    page = (frameworks.ROOT / "docs" / "keras-hub.md").read_text(encoding="utf-8")

    assert hub_families.table() in page
