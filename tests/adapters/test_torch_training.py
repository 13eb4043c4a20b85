"""Laid out torch models train as plain ones do, with the program's own loop, optimizers and tools."""

import copy
import dataclasses
import gc
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_models import MODELS, RULES, Lion, Perceptron, Transformer, batch, token_loss

import layoutmap as lm
from layoutmap.adapters.torch import train_with
from layoutmap.testing.engine_contract import all_specs

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
torch.set_num_threads(1)

CUT = {
    r".*\.0\.weight": ("model", "batch"),
    r".*\.0\.bias": ("model",),
    r".*\.3\.weight": ("batch", "model"),
    r"frozen|heads.*weight": (None, "model"),
}
BY_BATCH = {r".*\.0\.weight": ("batch", None), r".*\.3\.weight": (None, "batch"), r".*bias": ("batch",)}
X = torch.from_numpy(batch("perceptron")[0])
Y = torch.from_numpy(batch("perceptron")[1])


def make_map(rules=CUT, mesh="batch=2,model=4"):
    return lm.LayoutMap(lm.create_mesh(mesh), rules)


def seeded(make_model):
    torch.manual_seed(7)
    return make_model()


def pair(make_model=Perceptron, rules=CUT, mesh="batch=2,model=4", batch_dim="batch"):
    """A plain model, and the same model laid out."""
    layout_map = make_map(rules, mesh)
    plain = seeded(make_model)
    return plain, layout_map.build(lambda: seeded(make_model), batch_dim=batch_dim, library="torch")


def whole(tensor):
    if not isinstance(tensor, DTensor):
        return tensor
    plain = lm.Layout.replicated(lm.dtensor.fetch_layout(tensor).mesh, tensor.ndim)
    return torch.as_tensor(lm.dtensor.unpack(lm.dtensor.relayout(tensor, plain).float())[0]).to(tensor.dtype)


def assert_close(expected, actual, tolerance=1e-5):
    expected, actual = whole(expected.detach()), whole(actual.detach())
    assert expected.dtype == actual.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_models_close(plain, model, tolerance=1e-5):
    for (path, expected), actual in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert_close(expected, actual, tolerance), path


def step(model, optimizer, x=X, y=Y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


class Layers(nn.Module):
    """A perceptron in which every gradient is more than rounding."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x):
        return self.body(x)


def assert_trains_as_plain(make_optimizer, steps=3, tolerance=1e-5, **options):
    plain, model = pair(Layers, **options)
    optimizers = [make_optimizer(each.parameters()) for each in (plain, model)]
    for _ in range(steps):
        losses = [step(each, optimizer) for each, optimizer in zip((plain, model), optimizers, strict=True)]
        assert_close(*losses, tolerance)
    assert_models_close(plain, model, tolerance)
    return model, optimizers[1]


class TestCalls:
    """What goes in and what comes out."""

    def test_plain_tensors_give_plain_tensors(self):
        """A loop that knows nothing of layouts works: outputs and losses are whole plain tensors."""
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

    @pytest.mark.parametrize("rows", [1, 3, 8])
    def test_a_batch_that_does_not_divide(self, rows):
        """The outputs are those of one device, whether the batch can be cut or not."""
        plain, model = pair()
        for each in (plain, model):
            each.eval()

        assert_close(plain(X[:rows]), model(X[:rows]))

    @pytest.mark.parametrize("rows", [1, 3])
    @pytest.mark.parametrize("activations", [{}, {r"blocks\.\d+\.(out|down)$": ("batch", None, None)}])
    def test_training_with_a_batch_that_does_not_divide(self, rows, activations):
        """Nor is the last batch of an epoch any other: its gradients are those of one device, for any weight."""
        layout_map = make_map(RULES["transformer"])
        for pattern, specs in activations.items():
            layout_map.activations[pattern] = specs
        tokens, targets = map(torch.from_numpy, batch("transformer", rows))
        plain = seeded(Transformer)
        model = layout_map.build(lambda: seeded(Transformer), batch_dim="batch", library="torch")
        for each in (plain, model):
            torch.manual_seed(5)
            token_loss(each(tokens), targets).backward()

        for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
            assert_close(expected.grad, parameter.grad)

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


SPECS = all_specs(lm.Mesh(None, "batch=2,model=4"), 2)


@settings(max_examples=8, deadline=None)
@given(
    first=st.sampled_from(SPECS),
    second=st.sampled_from(SPECS),
    activation=st.none() | st.sampled_from(SPECS),
    batch_dim=st.sampled_from(["batch", "model", None]),
)
def test_gradients_in_any_layout(first, second, activation, batch_dim):
    """Whatever the layouts of weights, of what a layer puts out and of the batch, gradients are those of one device."""
    layout_map = make_map({r"body\.0\.weight": first, r"body\.3\.weight": second})
    if activation is not None:
        layout_map.activations[r"body\.2"] = activation
    plain = seeded(Layers)
    model = layout_map.build(lambda: seeded(Layers), batch_dim=batch_dim, library="torch")
    for each in (plain, model):
        F.mse_loss(each(X), Y).backward()

    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        assert_close(expected.grad, parameter.grad)
        assert lm.dtensor.fetch_layout(parameter) == lm.dtensor.fetch_layout(parameter.grad)


# An epsilon that is large beside rounding: without it a step is the sign of a gradient that may be rounding alone.
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adam": partial(torch.optim.Adam, lr=1e-2, eps=1e-3, foreach=False),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
    "adamw foreach": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, eps=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, eps=1e-3),
    "nadam": partial(torch.optim.NAdam, lr=1e-2, eps=1e-3),
    "lion": Lion,
}


class TestSteps:
    """Optimizers, and what programs do between backward and step."""

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_an_optimizer_steps_as_on_one_device(self, name):
        """Weights after three steps are those of the plain model; slots lie in the layouts of their weights."""
        _, optimizer = assert_trains_as_plain(OPTIMIZERS[name])
        for parameter, slots in optimizer.state.items():
            for slot in slots.values():
                if isinstance(slot, torch.Tensor) and slot.shape == parameter.shape:
                    assert lm.dtensor.fetch_layout(parameter) == lm.dtensor.fetch_layout(slot)

    @pytest.mark.parametrize("mesh", ["batch=8,model=1", "batch=4,model=2", "batch=1,model=8"])
    def test_on_other_meshes(self, mesh):
        """The mesh changes no number."""
        assert_trains_as_plain(OPTIMIZERS["sgd"], mesh=mesh)

    def test_gradients_are_clipped(self):
        """`clip_grad_norm_` finds the norm of the whole, a number, and clips as on one device."""
        norms = []
        models = pair()
        for each in models:
            F.mse_loss(each(X), Y).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01))

        assert abs(float(norms[0]) - float(norms[1])) < 1e-6
        for expected, parameter in zip(*(each.parameters() for each in models), strict=True):
            if parameter.requires_grad:
                assert_close(expected.grad, parameter.grad)

    def test_gradients_add_up(self):
        """Two batches before a step give the sum of their gradients."""
        models = pair()
        for each in models:
            for x, y in ((X[:4], Y[:4]), (X[4:], Y[4:])):
                F.mse_loss(each(x), y).backward()

        for expected, parameter in zip(*(each.parameters() for each in models), strict=True):
            if parameter.requires_grad:
                assert_close(expected.grad, parameter.grad)

    def test_parameters_that_change(self):
        """A copy, a parameter that is trained only later, and one that a state dict brought have right gradients."""
        plain, model = pair(Layers)
        model.body[0].weight.requires_grad_(False)
        F.mse_loss(model(X), Y).backward()
        model.zero_grad()
        model.body[0].weight.requires_grad_(True)
        copied = copy.deepcopy(model)
        model.load_state_dict(
            {path: t.detach().clone() for path, t in model.state_dict().items()}, assign=True
        )
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        for each in (plain, model, copied):
            F.mse_loss(each(X), Y).backward()

        for other in (model, copied):
            for expected, parameter in zip(plain.parameters(), other.parameters(), strict=True):
                assert_close(expected.grad, parameter.grad)
                assert lm.dtensor.fetch_layout(parameter) == lm.dtensor.fetch_layout(parameter.grad)

    @pytest.mark.parametrize("rules", [CUT, BY_BATCH])
    def test_a_gradient_penalty(self, rules):
        """A loss of the gradient of an input has the gradients of one device."""
        models = pair(Layers, rules)
        for each in models:
            x = X.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
            (gradient.norm(dim=1) - 1).square().mean().backward()

        for expected, parameter in zip(*(each.parameters() for each in models), strict=True):
            if expected.grad is not None:
                assert_close(expected.grad, parameter.grad)

    def test_dropout_is_that_of_one_device(self):
        """The same seed gives the same loss, whatever the mesh."""

        class Model(nn.Sequential):
            def __init__(self):
                super().__init__(nn.Linear(64, 128), nn.Dropout(0.5), nn.Linear(128, 64))

        plain, model = pair(Model, {"0.weight": ("model", None), "2.weight": (None, "model")})
        losses = []
        for each in (plain, model):
            torch.manual_seed(1)
            losses.append(F.mse_loss(each(X), Y))
        after = torch.rand(1)
        torch.manual_seed(1)
        plain(X)

        assert_close(*losses)
        assert torch.equal(torch.rand(1), after)


def num_tensors_of(shapes):
    gc.collect()
    return sum(type(t) is torch.Tensor and tuple(t.shape) in shapes for t in gc.get_objects())


class TestWeightsCutByTheBatch:
    """Weights that are cut over the dim that splits the batch."""

    def test_they_are_whole_while_their_layer_computes(self):
        """A layer sees them put together; before and after they are cut."""
        _, model = pair(rules=BY_BATCH)
        seen = []
        layer = model.body[0]
        layer.register_forward_hook(lambda *_: None)
        plain_forward = nn.Linear.forward

        class Spy(nn.Linear):
            def forward(self, x):
                seen.append(list(lm.dtensor.fetch_layout(self.weight).sharding_specs))
                return plain_forward(self, x)

        layer.__class__ = Spy
        F.mse_loss(model(X), Y).backward()

        assert [["unsharded", "unsharded"]] == seen
        assert ("batch", "unsharded") == lm.dtensor.fetch_layout(layer.weight).sharding_specs
        assert ("batch", "unsharded") == lm.dtensor.fetch_layout(layer.weight.grad).sharding_specs
        assert isinstance(layer.weight, nn.Parameter)

    def test_they_train_as_on_one_device(self):
        """Steps are those of the plain model."""
        assert_trains_as_plain(OPTIMIZERS["adamw"], rules=BY_BATCH)

    @pytest.mark.parametrize("kept", [False, True])
    def test_they_are_let_go_between_the_passes(self, kept):
        """While a graph waits for its backward pass no weight is whole, unless the program asks autograd to keep it."""
        plain, model = pair(Layers, rules=BY_BATCH)
        keep = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if kept else nullcontext()
        before = num_tensors_of({(128, 64), (64, 128)})
        with keep:
            loss = F.mse_loss(model(X), Y)
        whole_weights = num_tensors_of({(128, 64), (64, 128)}) - before
        loss.backward()
        F.mse_loss(plain(X), Y).backward()

        assert kept == bool(whole_weights)
        for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
            assert_close(expected.grad, parameter.grad)

    def test_a_weight_that_is_changed_too_early(self):
        """The backward pass would put other values together; it says which weight, why, and what to do."""
        _, model = pair(Layers, rules=BY_BATCH)
        loss = F.mse_loss(model(X), Y)
        with torch.no_grad():
            model.body[0].weight.mul_(2)
            model.body[3].weight.mul_(2)

        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        assert str(caught.value).splitlines() == [
            "Linear.weight was changed in place before the backward pass",
            "  shape  (64, 128)",
            "  why    the batch's dim cuts it, and the backward pass would put it together from its new values",
            "  mend   call backward() first, and change weights (as optimizer.step() does) after it",
        ]

    def test_a_graph_is_walked_twice(self):
        """A graph that is kept gives its gradients again; a second derivative is refused, and not wrong."""
        _, model = pair(Layers, rules=BY_BATCH)
        loss = F.mse_loss(model(X), Y)
        weight = model.body[0].weight
        first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
        again = torch.autograd.grad(loss, weight, create_graph=True)[0]

        assert torch.equal(whole(first), whole(again.detach()))
        with pytest.raises(RuntimeError, match="once_differentiable"):
            again.square().sum().backward()

    def test_what_lies_outside_of_blocks_stays_while_the_model_runs(self):
        """Embeddings and heads are whole from the model's call on; called by themselves they gather their own."""
        plain, model = pair(Transformer, {r"norm\.weight": ("batch",), r"tokens\.weight": ("batch", None)})
        tokens = torch.from_numpy(batch("transformer")[0])
        seen = []
        model.blocks[0].register_forward_hook(
            lambda *_: seen.append(lm.dtensor.fetch_layout(model.tokens.weight))
        )
        for each in (plain, model):
            each.eval()

        assert_close(plain(tokens), model(tokens))
        assert [("unsharded", "unsharded")] == [layout.sharding_specs for layout in seen]
        assert_close(plain.tokens(tokens), model.tokens(tokens))
        assert ("batch", "unsharded") == lm.dtensor.fetch_layout(model.tokens.weight).sharding_specs

    def test_the_layers_of_a_block_are_gathered_together(self):
        """Blocks of a list gather all their weights by one collective; gradients are right, and copies too."""
        rules = {
            r"blocks\..*weight": ("batch",),
            r"blocks.*\.(query|key|value|out|up|down)\.weight": ("batch", None),
        }
        rules = dict(reversed(rules.items()))
        tokens, targets = map(torch.from_numpy, batch("transformer"))
        plain, model = pair(Transformer, rules)
        for each in (plain, model, copied := copy.deepcopy(model)):
            each.eval()
            token_loss(each(tokens), targets).backward()

        for other in (model, copied):
            for expected, parameter in zip(plain.parameters(), other.parameters(), strict=True):
                assert_close(expected.grad, parameter.grad)


class TestActivations:
    """Layouts for what layers put out."""

    def test_a_layer_puts_out_what_its_rule_says(self):
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

    def test_the_gradient_of_what_a_layer_puts_out_lies_so_too(self):
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

    def test_they_train_as_on_one_device(self):
        """Gradients pass through them."""
        layout_map = make_map()
        layout_map.activations[r"body\..*"] = ("batch", None)
        report = lm.check_parity(
            MODELS["perceptron"], layout_map, batch("perceptron"), batch_dim="batch", library="torch"
        )

        assert report.agrees


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

    def test_a_laid_out_model_goes_into_a_plain_one(self):
        """Whole values of a state dict are what a plain model takes."""
        plain, model = pair()
        fresh = Perceptron()
        fresh.load_state_dict({path: whole(t) for path, t in model.state_dict().items()})

        assert_models_close(plain, fresh, 0)

    def test_an_optimizers_state(self):
        """An optimizer's state dict goes into another optimizer, and training goes on the same."""
        model, optimizer = assert_trains_as_plain(OPTIMIZERS["adamw"], steps=1)
        other = copy.deepcopy(model)
        second = OPTIMIZERS["adamw"](other.parameters())
        second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each, its in ((model, optimizer), (other, second)):
            step(each, its)

        assert_models_close(model, other, 0)

    def test_the_state_of_a_plain_models_optimizer(self):
        """A plain model's optimizer state goes on with the laid out model: its slots get the weights' layouts."""
        plain, model = pair(Layers)
        optimizers = [OPTIMIZERS["adamw"](each.parameters()) for each in (plain, model)]
        step(plain, optimizers[0])
        model.load_state_dict(plain.state_dict())
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for each, its in zip((plain, model), optimizers, strict=True):
            step(each, its)

        assert_models_close(plain, model)
        slot = optimizers[1].state[model.body[0].weight]["exp_avg"]
        assert lm.dtensor.fetch_layout(model.body[0].weight) == lm.dtensor.fetch_layout(slot)

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


class Checkpointed(nn.Module):
    """A model that computes its activations again in the backward pass."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 64)) for _ in range(2)
        )

    def forward(self, x):
        for block in self.body:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class CheckpointedMethod(nn.Module):
    """A model that computes a method of its own again, with a mask and plain tensors in it."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)

    def inner(self, x):
        return self.down(F.dropout(F.gelu(self.up(x)) * torch.ones(128), 0.2) + torch.arange(128.0) / 128)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class TestTools:
    """What programs put around a model."""

    @pytest.mark.parametrize("kind", [Checkpointed, CheckpointedMethod])
    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("rows", [8, 3])
    def test_activation_checkpointing(self, kind, use_reentrant, rows):
        """Activations that are computed again are the same, dropout included."""
        rules = {
            r"(body\.\d\.0|up)\.weight": ("model", "batch"),
            r"(body\.\d\.3|down)\.weight": ("batch", "model"),
        }
        plain, model = pair(partial(kind, use_reentrant), rules)
        x = X[:rows].clone().requires_grad_()  # reentrant checkpoints want an input with a gradient
        for each in (plain, model):
            torch.manual_seed(5)
            F.mse_loss(each(x), Y[:rows]).backward()

        for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
            assert_close(expected.grad, parameter.grad)

    def test_autocast(self):
        """Under autocast the loss is that of one device under autocast, to the precision of bfloat16."""
        plain, model = pair()
        losses = []
        for each in (plain, model):
            with torch.autocast("cpu", torch.bfloat16):
                output = each(X)
            losses.append(F.mse_loss(output.float(), Y))
            losses[-1].backward()
            assert torch.bfloat16 == output.dtype

        assert_close(*losses, 2e-2)
        assert_close(plain.body[0].weight.grad, model.body[0].weight.grad, 2e-2)

    @pytest.mark.filterwarnings("ignore")
    def test_compiled(self):
        """`torch.compile` takes a laid out model, and changes no number."""
        plain, model = pair()
        compiled = torch.compile(model, backend="aot_eager")
        outputs = plain(X), compiled(X)

        assert_close(*outputs)
        F.mse_loss(outputs[1], Y).backward()
        F.mse_loss(outputs[0], Y).backward()
        assert_close(plain.body[0].weight.grad, model.body[0].weight.grad)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "pad_token_id": 0,
    "use_cache": False,
}
TP = {
    r".*(q|k|v)_proj\.weight": ("model", None),
    r".*(gate|up)_proj\.weight": ("model", None),
    r".*(o|down)_proj\.weight": (None, "model"),
    r".*embed_tokens\.weight": (None, "model"),
    r"lm_head\.weight": ("model", None),
}


def llama():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    return train_with(model, optimizer=partial(torch.optim.AdamW, lr=1e-3))


def tokens():
    random = np.random.default_rng(0)
    ids = random.integers(1, 256, (4, 16))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}


class TestModelsOfTransformers:
    """Models that nobody wrote for this library."""

    def test_they_train_as_on_one_device(self):
        """`check_parity` holds: the loss that the model computes itself, gradients, and a step of AdamW."""
        report = lm.check_parity(
            llama, make_map(TP), tokens(), steps=1, batch_dim="batch", library="torch", tolerance=2e-5
        )

        assert report.agrees

    def test_they_generate(self):
        """Greedy generation with a cache gives the tokens of the plain model."""
        plain, model = pair(llama, TP)
        ids = torch.from_numpy(tokens()["input_ids"][:2, :4])
        expected, actual = (
            each.eval().generate(ids, max_new_tokens=4, do_sample=False, use_cache=True)
            for each in (plain, model)
        )

        assert torch.equal(expected, actual)
