"""Laid out torch models train as plain ones do, with the program's own loop and optimizers."""

import copy
import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_models import RULES, Lion, Transformer, batch, token_loss
from torch_pairs import (
    BY_BATCH,
    CUT,
    Layers,
    X,
    Y,
    assert_close,
    assert_trains_as_plain,
    make_map,
    pair,
    seeded,
    whole,
)

import layoutmap as lm
from layoutmap.adapters.torch import train_with

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


# An epsilon that is large beside rounding: without it a step is the sign of a gradient that may be rounding alone.
SGD = partial(torch.optim.SGD, lr=0.05)
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
    "adafactor": partial(torch.optim.Adafactor, lr=0.1, weight_decay=0.01),
    "adafactor foreach": partial(torch.optim.Adafactor, lr=0.1, foreach=True),
}


class Changing(nn.Module):
    """A linear layer that changes its weight in each call, as spectral norms and fake quantization do."""

    def __init__(self, change):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))
        self.change = change

    def forward(self, x):
        with torch.no_grad():
            self.change(self.weight)
        return x @ self.weight


def replace_data(weight):
    weight.data = weight.data * 0.5


CHANGES = {
    "in place": lambda weight: weight.div_(weight.norm()),
    "by a copy": lambda weight: weight.copy_(weight * 0.5),
    "by its data": lambda weight: weight.data.mul_(0.5),
    "a row": lambda weight: weight[1].zero_(),
}
BY_HALVES = {"weight": ("batch", "model")}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_module_that_changes_its_weight_in_a_call_does_so_in_layouts(change):
    """The change is made to the weight itself, also where the call has it gathered."""

    def make_model():
        torch.manual_seed(0)
        return train_with(
            Changing(change), loss=lambda outputs, targets: F.mse_loss(outputs, targets), optimizer=SGD
        )

    batch = torch.randn(8, 8), torch.randn(8, 4)
    layout_map = lm.LayoutMap("batch=2,model=2", BY_HALVES)
    lm.check_parity(make_model, layout_map, batch, batch_dim="batch", library="torch")


def test_data_that_is_replaced_in_a_call_is_refused():
    """It would be lost with the gathered weight: the error says what to write."""
    with lm.LayoutMap("batch=2,model=2", BY_HALVES).scope(batch_dim="batch", library="torch"):
        model = Changing(replace_data)
    with pytest.raises(lm.EngineError, match=r"weight: its `\.data` was replaced in a call"):
        model(torch.randn(8, 8))


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

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_unsharded_head(self, name):
        """Layers without a layout train beside a sharded model, with one optimizer and one norm for both."""
        found = []
        for model in pair(Layers):
            torch.manual_seed(3)
            head = nn.Linear(64, 8)
            weights = [*head.parameters(), *model.parameters()]
            optimizer = OPTIMIZERS[name](weights)
            for _ in range(2):
                optimizer.zero_grad()
                head(model(X)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(weights, 0.01, foreach="foreach" in name or None)
                optimizer.step()
            found.append(weights)

        for expected, actual in zip(*found, strict=True):
            assert_close(expected, actual)

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

    @pytest.mark.parametrize("rows", [7, 8])
    def test_dropout_by_tiles_is_that_of_any_mesh(self, rows):
        """The same seed gives the same gradients on every mesh, also for a batch that does not divide."""
        tokens, targets = (torch.from_numpy(each)[:rows, :8] for each in batch("transformer"))
        models = []
        for mesh in ("batch=1,model=1", "batch=2,model=4"):
            models.append(
                make_map(RULES["transformer"], mesh).build(
                    lambda: seeded(partial(Transformer, depth=1)),
                    batch_dim="batch",
                    library="torch",
                    draws="tiles",
                )
            )
            token_loss(models[-1](tokens), targets).backward()

        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert_close(one.grad, other.grad)

    def test_a_model_that_exists_can_draw_by_tiles(self):
        """What is laid out with values of its own keeps them, and drops the same on every mesh."""
        found = []
        for mesh in ("batch=1", "batch=8"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
            kept = model[0].weight.detach().clone()
            make_map({}, mesh).apply(model, batch_dim="batch", draws="tiles")
            torch.manual_seed(1)
            found.append(model(X))
            torch.manual_seed(1)

            assert torch.equal(kept, whole(model[0].weight.detach()))
        plain = F.dropout(torch.ones_like(X), 0.5)

        assert_close(*found)
        assert not torch.equal(found[0] == 0, plain == 0)


def num_tensors_of(shapes):
    gc.collect()
    return sum(type(t) is torch.Tensor and tuple(t.shape) in shapes for t in gc.get_objects())


class TestWeightsCutByTheBatch:
    """Weights that are sharded over the dim that splits the batch."""

    def test_they_are_gathered_while_their_layer_computes(self):
        """A layer sees them gathered; before and after they are sharded."""
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

    @pytest.mark.parametrize("kept", [False, True])
    def test_they_are_let_go_between_the_passes(self, kept):
        """While a graph waits for its backward pass no weight is replicated, unless autograd is to keep it."""
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
            "  why    it is sharded over the batch's dim, and the backward pass would gather its new values",
            "  fix    call backward() first, and change weights (as optimizer.step() does) after it",
        ]

    def test_a_graph_is_walked_twice(self):
        """A graph that is kept gives its gradients again, and those of its gradients."""
        seconds = []
        for model in pair(Layers, rules=BY_BATCH):
            loss = F.mse_loss(model(X), Y)
            weight = model.body[0].weight
            first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
            again = torch.autograd.grad(loss, weight, create_graph=True)[0]
            again.square().sum().backward()
            assert torch.equal(whole(first), whole(again.detach()))
            seconds.append([each.grad for each in model.parameters() if each.grad is not None])

        for expected, actual in zip(*seconds, strict=True):
            assert_close(expected, actual)

    def test_what_is_outside_of_blocks_stays_while_the_model_runs(self):
        """Embeddings and heads are replicated from the model's call on; called by themselves they gather their own."""
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
        plain, model = pair(partial(Transformer, size=16, heads=4), rules)
        for each in (plain, model, copied := copy.deepcopy(model)):
            each.eval()
            token_loss(each(tokens), targets).backward()

        for other in (model, copied):
            for expected, parameter in zip(plain.parameters(), other.parameters(), strict=True):
                assert_close(expected.grad, parameter.grad)
