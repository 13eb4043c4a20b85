"""Custom operators for tests: with a formula for gradients or without, in place, and with names of torch's."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

__all__ = [
    "CHUNKED",
    "DIFFERENTIABLE",
    "LABELS",
    "OPS",
    "TABLE",
    "X",
    "Y",
    "accumulate",
    "normalized",
    "parts",
    "ranks",
]

OPS = torch.ops.layoutmap_custom
CHUNKED = nn.LinearCrossEntropyOptions()


@torch.library.custom_op("layoutmap_custom::normalized", mutates_args=())
def normalized(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Reads memory in the order of one device, as a kernel does."""
    rows = x.detach().numpy()
    return torch.from_numpy(scale * rows / abs(rows).sum(0))


def _normalized_backward(ctx, upstream):
    (x,) = ctx.saved_tensors
    sizes, total = torch.empty(x.shape), torch.empty(x.shape[1:])  # written into, as a chunked kernel does
    torch.abs(x, out=sizes)
    torch.sum(sizes, 0, out=total)
    inner = (upstream * x).sum(0) / total.square()
    return ctx.scale * (upstream / total - torch.sign(x) * inner), None


def _normalized_context(ctx, inputs, output):
    x, ctx.scale = inputs
    ctx.save_for_backward(x)


normalized.register_autograd(_normalized_backward, setup_context=_normalized_context)


@torch.library.custom_op("layoutmap_custom::parts", mutates_args=())
def parts(
    x: torch.Tensor, others: list[torch.Tensor], number: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    rows = torch.from_numpy(x.detach().numpy() + sum(each.detach().numpy() for each in others))
    return [each.clone() for each in rows.chunk(number)], rows.sum(0)


parts.register_autograd(
    lambda ctx, pieces, total: ((both := torch.cat(pieces) + total), [both] * ctx.count, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "count", len(inputs[1])),
)


@torch.library.custom_op("layoutmap_custom::ranks", mutates_args=())
def ranks(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy().argsort(0).astype("float32"))


@torch.library.custom_op("layoutmap_custom::accumulate", mutates_args=("total", "count"))
def accumulate(x: torch.Tensor, total: torch.Tensor, count: torch.Tensor) -> None:
    total.add_(torch.from_numpy(x.detach().numpy().cumsum(0)))
    count += 1


torch.library.define("layoutmap_custom::twice", "(Tensor x) -> Tensor")
torch.library.define("layoutmap_custom::twice.into_", "(Tensor x, Tensor(a!) y) -> Tensor(a!)")
torch.library.impl("layoutmap_custom::twice", "CPU", lambda x: torch.from_numpy(2 * x.detach().numpy()))
torch.library.impl(
    "layoutmap_custom::twice.into_", "CPU", lambda x, y: y.copy_(torch.from_numpy(2 * x.detach().numpy()))
)

torch.library.define("layoutmap_custom::cumsum", "(Tensor x, int sign) -> Tensor")
torch.library.impl("layoutmap_custom::cumsum", "CPU", lambda x, sign: x * sign)
torch.library.define("layoutmap_custom::negated", "(Tensor x) -> Tensor")
torch.library.impl("layoutmap_custom::negated", "CPU", lambda x: torch.from_numpy(-x.numpy()))
torch.library.register_fake("layoutmap_custom::negated", torch.empty_like)


@register_sharding(OPS.negated.default)
def _rows_of_negated(x):
    return [([Shard(0)], [Shard(0)]), ([Replicate()], [Replicate()])]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, Y, TABLE = normal(8, 6), normal(8, 6, seed=1), normal(12, 6, seed=2)
LABELS = torch.tensor([1, 9, -100, 0, 3, 3, -100, 11])
DIFFERENTIABLE = {
    "normalized": (lambda x: normalized(x * 1, 3.0), [X]),
    "by its overload": (lambda x: OPS.normalized.default(x, scale=3.0), [X]),
    "by its name": (lambda x: OPS.normalized(x, 3.0), [X]),
    "parts": (
        lambda x, y: (lambda found: torch.cat([*found[0], found[1][None]]))(parts(x, [y, y], 4)),
        [X, Y],
    ),
    "linear_cross_entropy": (
        lambda x, table: F.linear_cross_entropy(x, table, LABELS, reduction="none", options=CHUNKED),
        [X, TABLE],
    ),
    "linear_cross_entropy, mean": (
        lambda x, table: F.linear_cross_entropy(x, table, LABELS, options=CHUNKED),
        [X, TABLE],
    ),
    "linear_cross_entropy, bias": (
        lambda x, table, bias: F.linear_cross_entropy(
            x, table, LABELS, linear_bias=bias, reduction="none", options=CHUNKED
        ),
        [X, TABLE, normal(12)],
    ),
}
