"""The GPT of one_rules_file.py in PyTorch, without any knowledge of meshes."""

from __future__ import annotations

import numpy as np
import torch
from one_rules_file import BLOCKS, HEADS, LENGTH, VOCABULARY, WIDTH
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        x = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(x.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text):
        x = self.tokens(text) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT()


def train(model: GPT, batches: np.ndarray) -> list[float]:
    """Train on the batches, and return the loss of each."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses: list[float] = []
    for rows in torch.from_numpy(batches).long():
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
