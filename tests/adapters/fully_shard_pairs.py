"""Models, plain and laid out, for the scenarios of torch_fully_shard_process.py, and how far they are apart."""

import dataclasses
import warnings

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_models import Transformer, batch, token_loss

import layoutmap as lm
from layoutmap.engines import get_engine

MESH = "batch=2,model=2"
RULES = {
    r"tokens\.weight": ("model", "batch"),
    r"positions": (None, "batch"),
    r".*\.(query|key|value)\.weight": (("model", "batch"), None),
    r".*\.out\.weight": ("batch", "model"),
    r".*\.up\.weight": ("model", "batch"),
    r".*\.up\.bias": (("model", "batch"),),
    r".*\.down\.weight": ("batch", "model"),
    r".*norm\d?\.(weight|bias)|.*\.down\.bias": ("batch",),
    "scale": (None,),
    "mask": (None, None),
}
BY_BATCH = {
    "mask": (None, None),
    "scale": (None,),
    r".*norm\d?\.\w+|.*bias": ("batch",),
    ".*": ("batch", None),
}
TOKENS, TARGETS = map(torch.from_numpy, batch("transformer"))


def plain_of(tensor):
    return torch.from_numpy(get_engine("torch").to_numpy(tensor))


def pair(make=Transformer, rules=RULES, mesh=MESH, batch_dim="batch", **options):
    """A plain model, and the same model laid out."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    layout_map = lm.LayoutMap(lm.create_mesh(mesh), rules)
    with layout_map.scope(batch_dim=batch_dim, **options) as scope:
        model = make()
    model.plan = scope.plan
    return plain, model


def optimizers_of(*models):
    return [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in models]


def apart(plain, model, of=lambda parameter: parameter):
    """How far the parameters of two models are apart, or what is made of them."""
    found = 0.0
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        if (of(a) is None) != (of(b) is None):
            return f"{name}: {of(a) is None}, {of(b) is None}"
        if of(a) is not None:
            found = max(found, (of(a) - plain_of(of(b))).abs().max().item())
    return found


def gradient(parameter):
    return parameter.grad


def clear(*models):
    for each in models:
        each.zero_grad()


def passes(*models, rows=8, seed=0):
    """The losses of a forward and a backward pass of each model."""
    losses = []
    for each in models:
        torch.manual_seed(seed)
        loss = token_loss(each(TOKENS[:rows]), TARGETS[:rows])
        loss.backward()
        losses.append(loss.item())
    return losses


def refusal(function):
    """The first line of what an error says."""
    try:
        function()
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def all_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x):
        x = x * 1.5
        y = torch.nn.functional.gelu(self.up(x.add_(1)))
        self.seen = y.square().mean()
        return (x + self.down(y)).view(x.shape)


class Several(torch.nn.Module):
    """A loss that does not come by the way of what blocks return, weights of a block outside of it, blocks left out."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Odd() for _ in range(3))
        self.last = torch.nn.Linear(16, 16)

    def forward(self, x, order=(0, 1, 2)):
        for number in order:
            x = self.blocks[number](x)
        return self.last(x)


SEVERAL = {r".*weight": ("batch", "model"), r".*bias": (("model", "batch"),)}


class Net(torch.nn.Module):
    """Blocks as those of a decoder, and what is outside of them."""

    def __init__(self, blocks=3):
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.blocks = torch.nn.ModuleList(NetBlock() for _ in range(blocks))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class NetBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


CHAIN_RULES = {r".*weight": ("batch", None), r".*bias": ("batch",)}
NET = {r".*norm\.weight": (None,), **CHAIN_RULES}
NET_BOTH = {
    r".*norm\.weight": ("batch",),
    r".*up\.weight": ("model", "batch"),
    r".*up\.bias": (("model", "batch"),),
    r".*down\.weight": ("batch", "model"),
    **CHAIN_RULES,
}
ROWS = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class WithCheckpoints:
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.last(x)


def peer(mesh, policy, blocks=3):
    """`Net` by torch's own `parallelize_module`, where the mesh has a dim for it, and `fully_shard`."""
    torch.manual_seed(0)
    model = Net(blocks)
    if "model" in mesh.mesh_dim_names:
        plan = {f"blocks.{i}.up": ColwiseParallel() for i in range(blocks)}
        plan |= {f"blocks.{i}.down": RowwiseParallel() for i in range(blocks)}
        parallelize_module(model, mesh["model"], plan)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["batch"], mp_policy=dataclasses.replace(policy, output_dtype=None))
    return fully_shard(model, mesh=mesh["batch"], mp_policy=policy)


def rows_of(mesh):
    return ROWS.chunk(mesh["batch"].size())[mesh["batch"].get_local_rank()]


def step_of(model, x):
    model.zero_grad()
    model(x).float().square().mean().backward()
