"""State dicts of laid out torch models and their optimizers, in any layout."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch_pairs import Layers, X, Y, assert_close, assert_models_close, assert_trains_as_plain, pair, step

import layoutmap as lm
from layoutmap.adapters import get_adapter

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)


class TestStateDicts:
    """Saving and loading."""

    def test_plain_values_are_loaded(self):
        """A plain model's state dict goes into a laid out one, which keeps its layouts."""
        plain, model = pair()
        layouts = {path: lm.dtensor.fetch_layout(t) for path, t in model.state_dict().items()}
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(2)
        said = model.load_state_dict(plain.state_dict())

        assert ([], []) == (said.missing_keys, said.unexpected_keys)
        assert_models_close(plain, model, 0)
        assert layouts == {path: lm.dtensor.fetch_layout(t) for path, t in model.state_dict().items()}
        assert_close(plain(X), model(X))

    def test_values_in_other_layouts_are_loaded(self):
        """A state dict of one map goes into a model of another on the same mesh."""
        plain, model = pair()
        _, other = pair(rules={r".*(0|3|main)\.weight": (None, "model")})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(other.state_dict())

        assert_models_close(plain, model, 0)

    def test_an_optimizers_state(self):
        """An optimizer's state dict goes into another optimizer, and training goes on the same."""
        model, optimizer = assert_trains_as_plain(adamw, steps=1)
        other = copy.deepcopy(model)
        second = adamw(other.parameters())
        second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each, its in ((model, optimizer), (other, second)):
            step(each, its)

        assert_models_close(model, other, 0)

    @pytest.mark.parametrize("make", [adamw, torch.optim.Adafactor], ids=["adamw", "adafactor"])
    def test_the_state_of_a_plain_models_optimizer(self, make):
        """A plain model's optimizer state goes on with the laid out model: its slots get the weights' layouts."""
        plain, model = pair(Layers)
        optimizers = [make(each.parameters()) for each in (plain, model)]
        step(plain, optimizers[0])
        model.load_state_dict(plain.state_dict())
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for each, its in zip((plain, model), optimizers, strict=True):
            step(each, its)

        assert_models_close(plain, model)
        layout = lm.dtensor.fetch_layout(model.body[0].weight)
        slots = optimizers[1].state[model.body[0].weight]
        found = {name: lm.dtensor.fetch_layout(slot) for name, slot in slots.items() if name != "step"}
        if make is adamw:
            assert {"exp_avg": layout, "exp_avg_sq": layout} == found
        else:
            rows, columns = layout.sharding_specs
            specs = {"row_var": (rows, None), "col_var": (None, columns)}
            assert {name: lm.Layout(each, layout.mesh) for name, each in specs.items()} == found

    def test_what_is_read_of_bfloat16_is_written(self):
        """A variable of bfloat16, laid out or plain, takes a value as numpy has it, and as torch does."""
        adapter = get_adapter("torch")
        for model in (each.bfloat16() for each in pair()):
            variable = adapter.variables(model)["body.0.weight"]
            value = adapter.read(variable)
            adapter.write(variable, 2 * value)
            assert np.array_equal(2 * value, adapter.read(variable))
            adapter.write(variable, torch.ones(value.shape, dtype=torch.bfloat16))
            assert np.array_equal(np.ones_like(value), adapter.read(variable))

    def test_a_conversion(self):
        """`model.to(dtype)` converts what is laid out, in its layout."""
        plain, model = pair()
        F.mse_loss(model(X), Y).backward()
        model.zero_grad()
        F.mse_loss(plain(X), Y).backward()  # the statistics of its batch norm
        plain.to(torch.bfloat16)
        model.to(torch.bfloat16)

        assert_models_close(plain, model, 0)
        assert ("model", "batch") == lm.dtensor.fetch_layout(model.body[0].weight).sharding_specs
        assert_close(plain(X.bfloat16()), model(X.bfloat16()), 2e-2)
