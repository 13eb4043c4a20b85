"""A torch decoder for benchmarks, with its sharding plans for this library and for torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

# Vocabulary, width, blocks, heads, rows and tokens of a batch.
SIZES = {
    "micro": (256, 64, 2, 4, 8, 32),
    "small": (1024, 128, 2, 4, 8, 64),
    "deep": (1024, 128, 12, 4, 8, 64),
    "medium": (4096, 512, 4, 8, 8, 128),
    # For creation only: 0.4 and 1.5 GiB.
    "half": (16_000, 1024, 6, 16, 8, 128),
    "full": (32_000, 1024, 27, 16, 8, 128),
}


def parse_size(size: str) -> tuple[int, ...]:
    """Return the numbers of a name in `SIZES`, or of a list such as `"1024,128,2,4,8,64"`, which may end in `,rms`."""
    return SIZES.get(size) or tuple(map(int, size.split(",")[:6]))


class RMSNorm(nn.Module):
    """Root mean square normalization by single operators, as Hugging Face's Llama computes it."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": RMSNorm}


class Attention(nn.Module):
    """Causal attention that infers the number of heads from its input, so that a process can have only some."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.size = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).view(x.shape[0], x.shape[1], -1, self.size).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


class Block(nn.Module):
    """Attention, then two linear layers, each with a normalization before and a residual connection."""

    def __init__(self, width: int, heads: int, norm: str):
        super().__init__()
        self.norm1, self.norm2 = NORMS[norm](width), NORMS[norm](width)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A decoder over tokens."""

    def __init__(self, vocabulary: int, width: int, blocks: int, heads: int, norm: str = "layer"):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, norm) for _ in range(blocks))
        self.norm = NORMS[norm](width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


TP_PLAN = {
    "tokens": "embedding_rowwise",
    **{f"blocks.*.attention.{name}": "colwise" for name in "qkv"},
    "blocks.*.attention.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


def make_model(size: str) -> Decoder:
    """Return the decoder of a size with the values of seed 0."""
    vocabulary, width, blocks, heads, _, _ = parse_size(size)
    torch.manual_seed(0)
    return Decoder(vocabulary, width, blocks, heads, "rms" if size.endswith(",rms") else "layer")


def make_batches(size: str, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of tokens and of the next tokens, equal in all processes."""
    vocabulary, _, _, _, rows, length = parse_size(size)
    random = torch.Generator().manual_seed(1)
    text = torch.randint(0, vocabulary, (number, rows, length + 1), generator=random)
    return [(rows[:, :-1], rows[:, 1:]) for rows in text]


def parallelize(model: Decoder, mesh: Any) -> Decoder:
    """Shard the model by the same plan with torch's own `parallelize_module`, on a mesh of one dim."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(len(model.blocks)):
        plan |= {f"blocks.{i}.attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"blocks.{i}.attention.o": RowwiseParallel(), f"blocks.{i}.up": ColwiseParallel()}
        plan[f"blocks.{i}.down"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)  # pyright: ignore[reportReturnType]
