"""A sharded torch model that a program changes and lays out again trains as on one device. A diff shows the change."""

import peft
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim import swa_utils

import layoutmap as lm

PROCESSES = ("torch",)
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
RULES = {
    r".*embed\.weight": ("model", None),
    r".*head\.weight": ("model", None),
    r".*up\.weight": ("model", None),
    r".*down\.weight": (None, "model"),
    r".*scale": ("model", None),
}
TOKENS = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A table that is also the head, and a block."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.down(torch.relu(self.up(self.embed(tokens)))))


class Int8Linear(nn.Module):
    """A layer with whole numbers in place of its weight, and a scale for each row."""

    def __init__(self, layer):
        super().__init__()
        weight = unshard(layer.weight)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale, self.bias = nn.Parameter(scale, requires_grad=False), layer.bias

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def unshard(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_model():
    torch.manual_seed(0)
    return Net()


def make_optimizer(model):
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 0.01)


def grow(tensor):
    tensor = unshard(tensor)
    return torch.cat([tensor, torch.ones_like(tensor)])


def grow_vocabulary(model, optimizer, average):
    """Tied weights stay one, and slots and the average grow with them."""
    slots = optimizer.state.pop(model.embed.weight)
    for each in (model, average.module):
        each.embed.weight = each.head.weight = nn.Parameter(
            grow(each.embed.weight), requires_grad=each.embed.weight.requires_grad
        )
        each.embed.num_embeddings = each.head.out_features = 32
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.state[model.embed.weight] = {
        name: grow(slot) if slot.ndim else slot for name, slot in slots.items()
    }
    return model


def replace_head(model, *_):
    torch.manual_seed(3)
    model.head = nn.Linear(8, 16, bias=False)
    return model


def add_adapter(model, *_):
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["up", "down"], init_lora_weights=False))


def merge_adapter(model, *_):
    return add_adapter(model).merge_and_unload().requires_grad_(True)


def prune_weights(model, *_):
    prune.l1_unstructured(model.up, "weight", 0.5)
    prune.remove(model.up, "weight")
    return model


def prune_rows(model, *_):
    up, bias, down = map(unshard, (model.up.weight, model.up.bias, model.down.weight))
    kept = up.norm(dim=1).topk(8).indices.sort().values
    model.up.weight, model.up.bias = nn.Parameter(up[kept]), nn.Parameter(bias[kept])
    model.down.weight = nn.Parameter(down[:, kept])
    model.up.out_features = model.down.in_features = 8
    return model


def quantize(model, *_):
    model.up, model.down = Int8Linear(model.up), Int8Linear(model.down)
    return model


CHANGES = {
    grow_vocabulary: "embed.weight  shape  (16, 8) -> (32, 8)\n\n1 change; per device 864 B -> 1.1 KiB",
    replace_head: "head.weight  added  float32[16, 8] (model, unsharded)\n",
    add_adapter: "base_model.model.up.lora_B.default.weight    added    float32[16, 8] (model, unsharded)\n",
    merge_adapter: "no change",
    prune_weights: "no change",
    prune_rows: "down.weight  shape  (8, 16) -> (8, 8)\n",
    quantize: "up.weight    dtype  float32 -> int8\n",
}


def train(change, layout_map=None):
    """The losses before and after a change, also of the average, and how the plan differs."""
    torch.manual_seed(0)
    model = layout_map.build(make_model, batch_dim="batch", library="torch") if layout_map else make_model()
    optimizer = make_optimizer(model)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    losses = [step(model, optimizer) for _ in range(2)]
    average.update_parameters(model)
    before = layout_map and lm.inspect(model)
    model = change(model, optimizer, average)
    if layout_map:
        model = layout_map.apply(model, batch_dim="batch")
        layout_map.apply(average.module, batch_dim="batch")
    former, optimizer = optimizer, make_optimizer(model)
    if change is grow_vocabulary:
        optimizer.load_state_dict(former.state_dict())
        losses.append(step(model, optimizer, TOKENS + 16))
        average.update_parameters(model)
        losses.append(find_loss(average, TOKENS + 16).item())
    losses += [step(model, optimizer) for _ in range(2)]
    if layout_map:
        slots = [each for slots in optimizer.state.values() for each in slots.values() if each.ndim]
        assert all(isinstance(each, DTensor) for each in slots)
    return losses, layout_map and str(before.diff(lm.inspect(model)))


def find_loss(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def step(model, optimizer, tokens=TOKENS):
    loss = find_loss(model, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_trains_as_on_one_device(change):
    """`apply` lays out what is new, and the optimizer is made after it, with the state of the former one."""
    plain, _ = train(change)
    losses, diff = train(change, lm.LayoutMap("batch=2,model=2", RULES, rest="replicated"))

    assert pytest.approx(plain, rel=1e-5) == losses
    assert CHANGES[change] in diff
