"""What a program does with a laid out model's weights outside of its calls gives the numbers of one device."""

import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch_pairs import BY_BATCH, CUT, Layers, X, Y, assert_close, assert_models_close, pair, whole

import layoutmap as lm

PROCESSES = ("torch",)
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
PLAIN = torch.linspace(-1, 1, 128 * 64).reshape(128, 64)


def weight(model):
    return model.body[0].weight


def assign(value):
    def change(model):
        weight(model).data = value(weight(model))

    return change


def fill_rows(model):
    with torch.no_grad():
        weight(model)[3] = 0
        weight(model).data[5] = torch.ones(64)
        weight(model)[7] += 1


def from_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


def copy_and_add(model):
    with torch.no_grad():
        weight(model).copy_(PLAIN).add_(PLAIN.sin()).mul_(PLAIN > 0)


def plain_gradient(model):
    F.mse_loss(model(X), Y).backward()
    weight(model).grad = PLAIN.clone()
    torch.optim.SGD(model.parameters(), 0.1).step()


CHANGES = {
    "data": assign(lambda held: held.detach() * 2),
    "data, plain": assign(lambda held: PLAIN.clone()),
    "rows": fill_rows,
    "a vector": from_vector,
    "plain values": copy_and_add,
    "a plain gradient": plain_gradient,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_weights(name):
    """Weights that are assigned or changed in place, also by plain tensors, are so in the layout that they have."""
    models = pair(Layers)
    layouts = [lm.dtensor.fetch_layout(each) for each in models[1].parameters()]
    for each in models:
        CHANGES[name](each)

    assert_models_close(*models)
    assert_close(*(each(X) for each in models))
    assert layouts == [lm.dtensor.fetch_layout(each) for each in models[1].parameters()]


def test_data_of_another_shape():
    """A weight keeps its shape, since its layout was made for it; the error says so."""
    _, model = pair(Layers)

    with pytest.raises(lm.EngineError) as caught:
        weight(model).data = torch.ones(4)
    assert str(caught.value).splitlines() == [
        "tensor.data = value: a tensor on a mesh would change its shape",
        "  from  (128, 64)",
        "  to    (4,)",
        "  why   its layout belongs to its present shape",
        "  fix   give the module another parameter: module.weight = torch.nn.Parameter(value)",
    ]


def penalties(model):
    return sum(each.square().sum() + each.abs().mean() for each in model.parameters())


def gradients_of_gradients(model):
    loss = F.mse_loss(model(X), Y)
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(each.square().sum() for each in found)


LOSSES = {
    "penalties": lambda model: F.mse_loss(model(X), Y) + 0.01 * penalties(model),
    "a plain target": lambda model: F.mse_loss(model(X), Y) + (weight(model) - PLAIN).square().mean(),
    "a tied head": lambda model: F.cross_entropy(model(X) @ weight(model).T, torch.arange(len(X))),
    "a function": lambda model: F.linear(model(X), weight(model)).square().mean(),
    "gradients of gradients": gradients_of_gradients,
}
BY_MODEL = {r".*\.0\.weight": ("model", None), r".*\.0\.bias": ("model",), r".*\.3\.weight": (None, "model")}


@pytest.mark.long  # they take seconds each
@pytest.mark.parametrize("rules", [BY_MODEL, BY_BATCH])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_reads_weights(name, rules):
    """A loss of the model's output and of its weights has the gradients of one device."""
    models = pair(Layers, rules)
    losses = [LOSSES[name](each) for each in models]
    for each in losses:
        each.backward()

    assert pytest.approx(losses[0].item(), rel=1e-5) == losses[1].item()
    for expected, actual in zip(*(each.parameters() for each in models), strict=True):
        assert_close(expected.grad, actual.grad)


class Embedded(nn.Module):
    """A table and a layer, with a gradient of a gradient that goes through both."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)

    def forward(self, x):
        return self.layer(self.table(x))


@pytest.mark.parametrize("mesh", ["batch=2,model=2", "model=4"])
def test_gradients_of_gradients_of_a_table(mesh):
    """They are those of one device where the rows of the table are sharded."""
    rules = {r"(table|layer)\.weight": ("model", None)}
    models = pair(Embedded, rules, mesh, "batch" if "batch" in mesh else None)
    tokens = torch.tensor([[1, 15, 3], [8, 2, 3], [1, 1, 9], [4, 15, 0]])
    found = []
    for each in models:
        weights = list(each.parameters())
        first = torch.autograd.grad(each(tokens).square().mean(), weights, create_graph=True)
        sum(g.square().sum() for g in first).backward()
        found.append([weight.grad for weight in weights])

    for expected, actual in zip(*found, strict=True):
        assert_close(expected, actual)


def test_weights_are_read_before_a_call():
    """Numbers that are read of weights of which no layer has computed yet are those of the global tensor."""
    plain, model = pair(Layers)
    found = [
        [w.norm().item(), w.mean().item(), float(w.abs().max()), int((w > 0).sum()), w.median().item()]
        for w in (weight(each).detach() for each in (plain, model))
    ]

    assert pytest.approx(found[0], rel=1e-5) == found[1]
    assert torch.count_nonzero(weight(plain)) == torch.count_nonzero(weight(model)).item()


@pytest.mark.parametrize("change", [torch.Tensor.add_, lambda to, by: torch._foreach_add_([to], [by])])
def test_a_plain_tensor_that_weights_change(change):
    """It may be a copy of them; any other change is refused, with the fix, which gives the right numbers."""
    plain, model = pair(Layers)
    with torch.no_grad():
        assert torch.equal(weight(plain), torch.zeros(128, 64).copy_(weight(model)))
        with pytest.raises(
            lm.EngineError, match="an unsharded tensor would be changed by tensors on a mesh"
        ) as caught:
            change(torch.zeros(128, 64), weight(model))
        changed = torch.zeros(128, 64)
        change(changed, whole(weight(model)))

    assert "pass the values of the tensors on the mesh: tensor.full_tensor()" == caught.value.fix
    assert torch.equal(weight(plain), changed)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, x):
        return x * 2


AFTERWARDS = {
    "a parametrization": lambda layer: nn.utils.parametrize.register_parametrization(
        layer, "weight", Doubled()
    ),
    "weight_norm": parametrizations.weight_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
}


@pytest.mark.long  # they take seconds each
@pytest.mark.parametrize("name", AFTERWARDS)
@pytest.mark.parametrize(
    "rules", [CUT, {r".*\.\d\.weight": ("batch",), r".*\.[03]\.weight": ("batch", None)}]
)
def test_a_layer_that_is_changed_after_the_scope(name, rules):
    """A weight that its layer now computes of another one trains as on one device, also one over the batch's dim."""
    models = pair(Layers, dict(reversed(rules.items())))
    for each in models:
        AFTERWARDS[name](each.body[0])
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            F.mse_loss(each(X), Y).backward()
            optimizer.step()

    assert_models_close(*models)


@pytest.mark.long
def test_a_step_that_is_learned_through():
    """A model that is called with weights after a step has gradients through that step (MAML)."""
    models = pair(Layers, BY_MODEL)
    for each in models:
        weights = dict(each.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(each, weights, (X,)), Y)
        found = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        stepped = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), found, strict=True)}
        F.mse_loss(torch.func.functional_call(each, stepped, (X,)), Y).backward()

    for expected, actual in zip(*(each.parameters() for each in models), strict=True):
        assert_close(expected.grad, actual.grad)


def test_values_come_out():
    """Values of a weight come out by `full_tensor`, `numpy` and `tolist`; a slice's in `run_on`."""
    plain, model = pair(Layers)
    with lm.dtensor.run_on(lm.create_mesh("batch=2,model=4"), engine="torch"):
        rows = weight(model)[:2].tolist()

    assert weight(plain)[:2].tolist() == rows
    assert torch.equal(weight(plain), whole(weight(model).full_tensor()))
    assert weight(plain).tolist() == weight(model).tolist() == np.asarray(weight(model).detach()).tolist()
    with pytest.raises(RuntimeError, match="requires grad"):
        weight(model).numpy()


def test_gathered_values_are_plain_tensors():
    """They are saved, formatted and changed as tensors of one device are, and the model does not change with them."""
    plain, model = pair(Layers)
    gathered = {name: each.full_tensor() for name, each in model.state_dict().items()}
    file = io.BytesIO()
    torch.save(gathered, file)
    file.seek(0)

    assert {torch.Tensor} == {type(each) for each in gathered.values()}
    assert all(torch.equal(each, gathered[name]) for name, each in plain.state_dict().items())
    assert all(torch.equal(each, gathered[name]) for name, each in torch.load(file).items())
    assert f"{weight(plain).sum():.3f}" == f"{weight(model).full_tensor().sum():.3f}"
    for each in gathered.values():
        each.zero_()
    assert_models_close(plain, model)


def test_gathered_values_have_gradients():
    """A loss of gathered weights has the gradients of one of plain weights."""
    plain, model = pair(Layers)
    weight(plain).square().sum().backward()
    weight(model).full_tensor().square().sum().backward()

    assert_close(weight(plain).grad, weight(model).grad)


def test_numbers_are_formatted():
    """A number of a model in layouts is written into a text as one of a plain model is."""
    texts = []
    for model in pair(Layers):
        F.mse_loss(model(X), Y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        texts.append(f"{norm:.3f} {norm:8.1e} {weight(model).detach().abs().sum():.2f}")

    assert texts[0] == texts[1]
