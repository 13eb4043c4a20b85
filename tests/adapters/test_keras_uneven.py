"""With `uneven=` a model with an axis that does not divide is made, and the plan says what was taken.

That it trains is tried on drawn models: `layoutmap.testing.laws`.
"""

import keras
import pytest

import layoutmap as lm

PROCESSES = ("jax", "tensorflow", "torch")
pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

L = keras.layers


class OneKeyHead(keras.Model):
    """Attention as in Gemma 2B: eight heads of queries, and one of keys and values."""

    def __init__(self):
        super().__init__()
        self.attention = L.GroupQueryAttention(4, num_query_heads=8, num_key_value_heads=1, use_bias=False)
        self.up = L.Dense(24, use_bias=False)
        self.head = L.Dense(4, use_bias=False)

    def call(self, x):
        return self.head(self.up(x + self.attention(x, x)))


def make_model():
    model = OneKeyHead()
    model(keras.Input((3, 8)))
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    return model


RULES = {
    r".*\.(query|key|value)_dense\.kernel": (None, "model", None),
    r".*\.output_dense\.kernel": ("model", None, None),
    r"up\.kernel": (None, "model"),
    r"head\.kernel": ("model", None),
}


@pytest.mark.parametrize("mesh", ["model=2", "model=4", "model=8"])
def test_one_head_of_keys_on_many_devices(mesh):
    """Without it nothing is made; with it the keys are replicated, and the plan reports it."""
    strict = lm.LayoutMap(lm.create_mesh(mesh), RULES)
    layout_map = lm.LayoutMap(lm.create_mesh(mesh), RULES, uneven="shrink")
    plan = lm.plan(make_model, layout_map, strict=True)

    with pytest.raises(lm.PlanError, match=r"attention\.key_dense\.kernel: axis 1 cannot be split evenly"):
        strict.build(make_model)
    assert {("attention.key_dense.kernel", "note"), ("attention.value_dense.kernel", "note")} == {
        (p.subject, p.severity) for p in plan.problems if p.kind == "uneven"
    }
    assert plan["attention.key_dense.kernel"].layout.is_fully_replicated()
    assert not plan["attention.query_dense.kernel"].layout.is_fully_replicated()
    layout_map.build(make_model, strict=True)


if keras.backend.backend() != "tensorflow":  # DTensor shards an axis over one dim only

    def test_an_axis_over_two_dims_is_sharded_over_the_one_that_divides():
        """24 is sharded over 2 x 4, and 4 over the 4 only."""
        layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES, uneven="shrink")
        del layout_map[r"head\.kernel"], layout_map[r"up\.kernel"]
        layout_map.add(r"(up|head)\.kernel", (None, ("batch", "model")), uneven="shrink")
        model = layout_map.build(make_model)

        assert ("unsharded", ("batch", "model")) == model.up.kernel.layout.sharding_specs
        assert ("unsharded", "model") == model.head.kernel.layout.sharding_specs
