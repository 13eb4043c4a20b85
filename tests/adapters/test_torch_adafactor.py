"""Adafactor of torch steps weights in any layout as on one device, with slots and updates in their layouts."""

import hypothesis.strategies as st
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from torch import nn
from torch.overrides import TorchFunctionMode
from torch_pairs import assert_close

import layoutmap as lm

SPECS = (None, "batch", "model", ("batch", "model"), ("model", "batch"))


class Weights(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.each = nn.ParameterList(torch.randn(shape) for shape in shapes)


@st.composite
def weights(draw):
    """Shapes of up to four axes, and for each a layout that fits."""
    found = {}
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(8 * size for size in draw(st.lists(st.integers(1, 2), max_size=4)))
        shape = tuple(draw(st.sampled_from((1, size))) if not draw(st.booleans()) else size for size in shape)
        free, specs = {"batch", "model"}, []
        for size in shape:
            spec = draw(st.sampled_from(SPECS))
            dims = {spec} if isinstance(spec, str) else set(spec or ())
            specs.append(spec if size > 1 and dims <= free else None)
            free -= dims
        found[f"each.{number}"] = shape, tuple(specs)
    return found


class Updates(TorchFunctionMode):
    """The layouts of what is made of the slots, at the operator that is computed on it whole."""

    def __init__(self):
        super().__init__()
        self.layouts = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("rsqrt_", "_foreach_rsqrt_"):
            many = args[0] if isinstance(args[0], list) else [args[0]]
            self.layouts += [lm.dtensor.fetch_layout(each) for each in many]
        return func(*args, **(kwargs or {}))


def specs_of(tensor):
    return lm.dtensor.fetch_layout(tensor).sharding_specs


@pytest.mark.parametrize("foreach", [False, True], ids=["each", "together"])
@settings(max_examples=examples(50), deadline=None)
@given(weights(), st.sampled_from([0.0, 0.1]), st.booleans())
def test_weights_of_any_shape_and_layout_step_as_on_one_device(foreach, found, decay, closure):
    """Three steps give the weights of one device; what is as large as a weight is never made whole."""
    models = []
    for layout_map in (
        None,
        lm.LayoutMap("batch=2,model=2", {path: specs for path, (_, specs) in found.items()}),
    ):
        torch.manual_seed(0)
        model = Weights([shape for shape, _ in found.values()])
        models.append(model if layout_map is None else layout_map.apply(model))
    optimizers = [
        torch.optim.Adafactor(model.parameters(), lr=0.5, weight_decay=decay, foreach=foreach)
        for model in models
    ]
    updates = Updates()
    for step in range(3):
        gradients = [torch.randn_like(each) * 10.0**step for each in models[0].parameters()]
        for model, optimizer in zip(models, optimizers, strict=True):

            def backward(model=model, gradients=gradients):
                model.zero_grad()
                for each, gradient in zip(model.parameters(), gradients, strict=True):
                    layout = lm.dtensor.fetch_layout(each) if model is models[1] else None
                    each.grad = gradient.clone() if layout is None else lm.dtensor.relayout(gradient, layout)

            backward()
            with updates if model is models[1] else torch.enable_grad():
                optimizer.step(backward if closure else None)

    for expected, actual in zip(*(model.parameters() for model in models), strict=True):
        assert_close(expected, actual)
    # DTensor gathers some views, and torch multiplies views of more than three axes.
    if all(len(specs) < 4 and ("model", "batch") not in specs for _, specs in found.values()):
        layouts = [lm.dtensor.fetch_layout(each) for each in models[1].parameters()]
        assert sorted(map(str, layouts * 3)) == sorted(map(str, updates.layouts))
    for parameter, slots in optimizers[1].state.items():
        if parameter.ndim > 1:
            *outer, rows, columns = specs_of(parameter)
            assert ((*outer, rows, "unsharded"), (*outer, "unsharded", columns)) == (
                specs_of(slots["row_var"]),
                specs_of(slots["col_var"]),
            )
