"""A mesh dim that shards nothing is named at the first training call of a torch module."""

import warnings

import pytest
import torch

import layoutmap as lm


@pytest.mark.parametrize(
    ("specs", "options", "idle"),
    [
        (("model", None), {}, "'batch'"),
        (("model", None), {"batch_dim": "batch"}, ""),
        (("batch", "model"), {}, ""),
        (("batch", None), {"batch_dim": "batch"}, "'model'"),
    ],
)
def test_the_first_call_names_an_idle_dim_once(specs, options, idle):
    """At the user's line. A call without gradients, or in evaluation, is no step; lint says how batches are sharded."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {"0.weight": specs}, rest="replicated")
    model = layout_map.build(lambda: torch.nn.Sequential(torch.nn.Linear(8, 16)), library="torch", **options)
    x = torch.ones(4, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad():
            model(x)
        model.eval()(x)
        assert [] == [each for each in caught if each.category is lm.LayoutMapWarning]
        model.train()
        for _ in range(2):
            model(x).sum().backward()
    ours = [each for each in caught if each.category is lm.LayoutMapWarning]
    said = "batches are sharded over batch" if options else "batches are replicated"

    assert [f"Sequential: mesh dim {idle} is idle"] * bool(idle) == [
        str(w.message).splitlines()[0] for w in ours
    ]
    assert all(w.filename == __file__ for w in ours)
    assert said in repr(lm.inspect(model).lint())


def test_a_batch_that_the_program_sharded_is_used():
    """A DTensor that is sharded over the dim is passed, so the dim is not idle."""
    mesh = lm.create_mesh("batch=2,model=4")
    layout_map = lm.LayoutMap(mesh, {"0.weight": ("model", None)}, rest="replicated")
    model = layout_map.build(lambda: torch.nn.Sequential(torch.nn.Linear(8, 16)), library="torch")
    x = lm.dtensor.relayout(torch.ones(4, 8), lm.Layout(["batch", None], mesh))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x)
    assert [] == [str(each.message) for each in caught if each.category is lm.LayoutMapWarning]
