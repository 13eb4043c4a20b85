"""Small torch models of every style, for the tests of the adapter."""

import gc
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as of_modules

from layoutmap.adapters.torch import train_with

torch.set_num_threads(1)


class Block(nn.Module):
    """What real models have: attention, normalization, dropout."""

    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(size)
        self.query = nn.Linear(size, size, bias=False)
        self.key = nn.Linear(size, size, bias=False)
        self.value = nn.Linear(size, size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        self.norm2 = nn.LayerNorm(size)
        self.up = nn.Linear(size, 4 * size)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * size, size)

    def forward(self, x):
        rows, length, size = x.shape
        y = self.norm1(x)
        q, k, v = (
            layer(y).view(rows, length, self.heads, size // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, size))
        return x + self.down(self.drop(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """A causal transformer whose head is its embedding, with buffers that are and are not saved."""

    def __init__(self, size=64, heads=8, vocabulary=256, depth=2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size)
        self.positions = nn.Parameter(torch.randn(128, size) * 0.02)
        self.blocks = nn.ModuleList(Block(size, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.full((size,), 1.0))
        self.register_buffer("mask", torch.ones(128, size), persistent=False)
        self.apply(self._init)

    @staticmethod
    def _init(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions[:length] * self.mask[:length]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale)


class Perceptron(nn.Module):
    """Layers in a Sequential and a dict, a state, and a weight that is not trained."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
        self.heads = nn.ModuleDict({"main": nn.Linear(64, 64)})
        self.frozen = nn.Parameter(torch.rand(64, 64), requires_grad=False)

    def forward(self, x):
        return self.heads["main"](self.body(x @ self.frozen))


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def transformer():
    return train_with(Transformer(depth=1), loss=token_loss, optimizer=partial(torch.optim.AdamW, lr=1e-3))


def perceptron():
    return train_with(Perceptron(), loss=F.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))


MODELS = {"transformer": transformer, "perceptron": perceptron}

RULES = {
    "transformer": {
        r"tokens\.weight": ("model", None),
        r"positions": (None, "batch"),
        r".*\.(query|key|value)\.weight": ("model", None),
        r".*\.out\.weight": (None, "model"),
        r".*\.up\.weight": ("model", "batch"),
        r".*\.up\.bias": ("model",),
        r".*\.down\.weight": ("batch", "model"),
        r"mask": ("model", None),
    },
    "perceptron": {
        r"body\.0\.weight": ("batch", "model"),
        r"body\.1\..*(weight|bias|mean|var)$": ("model",),
        r"body\.3\.weight": (None, "model"),
        r"frozen": ("model", None),
    },
}


def batch(name, rows=8):
    """Inputs and targets."""
    random = np.random.default_rng(0)
    if name == "transformer":
        return random.integers(0, 256, (rows, 16)), random.integers(0, 256, (rows, 16))
    return random.normal(size=(rows, 64)).astype("float32"), random.normal(size=(rows, 64)).astype("float32")


def hooked():
    """Everything of torch's modules and optimizers that a scope could replace, as it is now."""
    classes = {nn.Module, nn.Linear, nn.Parameter, torch.optim.Optimizer, torch.Tensor}
    names = {f"{c.__qualname__}.{n}": value for c in classes for n, value in vars(c).items()}
    hooks = {
        n: dict(value)
        for n, value in vars(of_modules).items()
        if n.startswith("_global") and hasattr(value, "items")
    }
    functions = {f"torch.{n}": value for n, value in vars(torch).items() if callable(value)}
    return names | functions | hooks | {"init": dict(vars(nn.init))}


def num_tensors():
    """How many tensors of floating point are alive: what a mesh knows of its ranks, which stays, is integers."""
    found = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    return sum(each.dtype.is_floating_point for each in found)


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not have: it steps by the sign of what lies between momentum and gradient."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(momentum.lerp(p.grad, 1 - first).sign(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - second)
