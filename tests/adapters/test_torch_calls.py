"""What goes into a laid out torch model and comes out of it is plain, and gradients are those of one device."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch_models import Perceptron
from torch_pairs import X, Y, assert_close, make_map, pair, seeded

import layoutmap as lm

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


class TestCalls:
    """What goes in and what comes out."""

    def test_plain_tensors_give_plain_tensors(self):
        """A loop that knows nothing of layouts works: outputs and losses are replicated plain tensors."""
        plain, model = pair()
        outputs = [each(X) for each in (plain, model)]

        assert torch.Tensor is type(outputs[1])
        assert_close(*outputs)
        for output in outputs:
            ((output - Y) ** 2).sum().backward()
        for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
            if parameter.requires_grad:
                assert_close(expected.grad, parameter.grad, 1e-4)
                assert lm.dtensor.fetch_layout(parameter) == lm.dtensor.fetch_layout(parameter.grad)

    def test_gradients_reach_plain_inputs(self):
        """An input that wants a gradient gets it."""
        plain, model = pair()
        inputs = [X.clone().requires_grad_() for _ in range(2)]
        for each, x in zip((plain, model), inputs, strict=True):
            each(x).square().sum().backward()

        assert_close(inputs[0].grad, inputs[1].grad)

    def test_dtensors_give_dtensors(self):
        """A tensor in a layout goes in as it is, and what comes out is in a layout, too."""
        plain, model = pair()
        layout = lm.Layout(["batch", None], lm.create_mesh("batch=2,model=4"))
        output = model(lm.dtensor.relayout(X, layout))

        assert isinstance(output, DTensor)
        assert_close(plain(X), output)

    def test_nested_outputs(self):
        """Tuples, mappings and dataclasses keep their form."""

        @dataclasses.dataclass
        class Output:
            logits: torch.Tensor
            more: tuple

        class Model(nn.Linear):
            def forward(self, x, *, names):
                y = super().forward(x)
                return Output(y, (dict.fromkeys(names, y * 2), "text", None))

        model = make_map({"weight": ("model", None)}).build(lambda: Model(64, 64), library="torch")
        output = model(X, names=["a", "b"])

        assert torch.Tensor is type(output.logits)
        assert ["a", "b"] == list(output.more[0])
        assert torch.equal(output.logits * 2, output.more[0]["b"])
        assert ("text", None) == output.more[1:]

    def test_a_layer_is_called_by_itself(self):
        """Any layer of a laid out model can be called as the model can."""
        plain, model = pair()

        assert_close(plain.body[0](X), model.body[0](X))

    def test_nothing_stays_open_after_an_exception(self):
        """A forward that raises leaves plain code plain, and the model usable."""
        plain, model = pair()
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 3))

        assert torch.Tensor is type(torch.ones(3) + 1)
        assert_close(plain(X), model(X))

    def test_without_gradients(self):
        """Inference modes work."""
        plain, model = pair()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_close(plain(X), model(X))
                assert not model(X).requires_grad


class TestActivations:
    """Layouts for layers' outputs."""

    def test_a_layer_outputs_what_its_rule_says(self):
        """The output of a layer is in the layout of its rule, and the numbers stay."""
        layout_map = make_map()
        layout_map.activations[r"body\.0"] = ("batch", None)
        layout_map.activations[r"heads\.main"] = (None, "model")
        plain, model = (
            seeded(Perceptron),
            layout_map.build(lambda: seeded(Perceptron), batch_dim="batch", library="torch"),
        )
        seen = {}
        model.body[0].register_forward_hook(lambda _, args, y: seen.update(body=lm.dtensor.fetch_layout(y)))
        model.heads["main"].register_forward_hook(
            lambda _, args, y: seen.update(main=lm.dtensor.fetch_layout(y))
        )
        outputs = [each(X) for each in (plain, model)]

        assert_close(*outputs)
        assert ("batch", "unsharded") == seen["body"].sharding_specs
        assert ("unsharded", "model") == seen["main"].sharding_specs

    def test_the_gradient_of_a_layers_output_has_its_layout_too(self):
        """Summed up where the rule says whole, even where the output itself lies right by chance."""
        layout_map = make_map({r"body\.3\.weight": ("model", None)})
        layout_map.activations[r"body\.0"] = ("batch", None)
        model = layout_map.build(lambda: seeded(Perceptron), batch_dim="batch", library="torch")
        seen = []

        class Spy(nn.Linear):
            def forward(self, x):
                y = super().forward(x)
                y.register_hook(lambda gradient: seen.append(lm.dtensor.fetch_layout(gradient)))
                return y

        model.body[0].__class__ = Spy
        F.mse_loss(model(X), Y).backward()

        assert [("batch", "unsharded")] == [layout and layout.sharding_specs for layout in seen]

    def test_of_several_outputs_those_of_the_layouts_rank_are_laid_out(self):
        """The others stay as they come."""

        class Pair(nn.Linear):
            def forward(self, x):
                y = super().forward(x)
                return y, y.sum(-1)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.pair = Pair(8, 8)

            def forward(self, x):
                y, total = self.pair(x)
                return y + total[:, None]

        layout_map = make_map({r".*weight": ("model", None), r".*bias": ("model",)})
        layout_map.activations["pair"] = ("batch", None)
        model = layout_map.build(lambda: seeded(Model), batch_dim="batch", library="torch")
        seen = []
        model.pair.register_forward_hook(lambda _, __, out: seen.append(lm.dtensor.fetch_layout(out[0])))

        assert_close(seeded(Model)(torch.ones(4, 8)), model(torch.ones(4, 8)))
        assert [("batch", "unsharded")] == [layout.sharding_specs for layout in seen]
