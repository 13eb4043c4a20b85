"""Models with operators between their layers that are not torch's own, of all kinds that torch lets programs write."""

from __future__ import annotations

import ctypes

import torch
from torch import nn

__all__ = ["KINDS", "Head", "Pointer", "trained"]


def running_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums along memory, read and written by its address as a Triton kernel does; no function of torch is called."""
    x = x.contiguous()
    made = torch.empty_like(x)
    given, written = ((ctypes.c_double * x.numel()).from_address(each.data_ptr()) for each in (x, made))
    total = 0.0
    for place in range(x.numel()):
        total += given[place]
        written[place] = total
    return made


def sums_from_the_end(x: torch.Tensor) -> torch.Tensor:
    """The gradient of running sums."""
    return running_sums(x.flip(0, 1)).flip(0, 1)


@torch.library.custom_op("layoutmap_kinds::by_address", mutates_args=())
def by_address(x: torch.Tensor) -> torch.Tensor:
    return running_sums(x)


by_address.register_fake(torch.empty_like)
by_address.register_autograd(lambda ctx, upstream: by_address(upstream.flip(0, 1)).flip(0, 1))


@torch.library.triton_op("layoutmap_kinds::of_triton", mutates_args={})
def of_triton(x: torch.Tensor, *, scale: float) -> torch.Tensor:
    made = torch.empty_like(x)
    torch.mul(x, scale * x.sum(0), out=made)
    return made


def _of_triton_backward(ctx, upstream):
    (x,) = ctx.saved_tensors
    return ctx.scale * (upstream * x.sum(0) + (upstream * x).sum(0))


def _of_triton_context(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.scale = keyword_only_inputs["scale"]


of_triton.register_autograd(_of_triton_backward, setup_context=_of_triton_context)


@torch.library.custom_op("layoutmap_kinds::with_gradient", mutates_args=())
def with_gradient(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and a buffer with the gradient, which only the backward pass takes: a chunked loss does that."""
    rows = x.detach().numpy()
    return torch.from_numpy(rows.cumsum(0) ** 2), torch.from_numpy(2 * rows.cumsum(0))


with_gradient.register_autograd(
    lambda ctx, upstream, _: (ctx.buffer.mul_(upstream).flip(0).cumsum(0).flip(0),),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "buffer", output[1]),
)


@torch.library.custom_op("layoutmap_kinds::add_up", mutates_args=("total",))
def add_up(x: torch.Tensor, total: torch.Tensor) -> None:
    total.add_(torch.from_numpy(x.detach().numpy().cumsum(0)))


@torch.library.custom_op("layoutmap_kinds::ordered", mutates_args=())
def ordered(x: torch.Tensor, bias: torch.Tensor | None) -> list[torch.Tensor]:
    """Two results, of which one has no gradient."""
    numbers = x.detach().numpy().argsort(0)
    values = torch.from_numpy(x.detach().numpy()).gather(0, torch.from_numpy(numbers))
    return [values if bias is None else values + bias, torch.from_numpy(numbers)]


def _ordered_backward(ctx, upstream):
    made = torch.empty(upstream[0].shape, dtype=torch.float64)
    made.scatter_(0, ctx.saved_tensors[0], upstream[0])  # into memory of its own
    return made, (upstream[0].sum(0) if ctx.has_bias else None)


def _ordered_context(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.has_bias = inputs[1] is not None


ordered.register_autograd(_ordered_backward, setup_context=_ordered_context)


@torch.library.custom_op("layoutmap_kinds::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape, dtype=torch.float64)


LIBRARY = torch.library.Library("layoutmap_kinds", "FRAGMENT")
LIBRARY.define("composed(Tensor x) -> Tensor")
LIBRARY.impl("composed", lambda x: (x - x.mean(0)) / x.std(0), "CompositeImplicitAutograd")
LIBRARY.define("of_library(Tensor x) -> Tensor")
LIBRARY.impl("of_library", lambda x: Pointer.apply(x), "Autograd")
LIBRARY.impl("of_library", running_sums, "CPU")


class Pointer(torch.autograd.Function):
    """A kernel that is no operator."""

    @staticmethod
    def forward(ctx, x):
        return running_sums(x)

    @staticmethod
    def backward(ctx, upstream):
        return sums_from_the_end(upstream)


class OfNumpy(torch.autograd.Function):
    """A function whose result and gradient are plain tensors."""

    @staticmethod
    def forward(ctx, x):
        numbers = x.detach().numpy().argsort(0)
        ctx.numbers = torch.from_numpy(numbers)
        return torch.from_numpy(x.detach().numpy()).gather(0, ctx.numbers)

    @staticmethod
    def backward(ctx, upstream):
        return torch.zeros(ctx.numbers.shape, dtype=torch.float64).scatter(0, ctx.numbers, upstream)


class Several(torch.autograd.Function):
    """Several results, of which one has no gradient."""

    @staticmethod
    def forward(x):
        values, numbers = x.sort(0)
        return values, numbers, x.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, upstream, _, of_sum):
        (numbers,) = ctx.saved_tensors
        return torch.zeros_like(upstream).scatter(0, numbers, upstream) + of_sum


class InPlace(torch.autograd.Function):
    """A function that changes its argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, upstream):
        return 2 * upstream


class Again(torch.autograd.Function):
    """A function that computes another one once more in the backward pass."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, upstream):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            made = ctx.function(x)
        torch.autograd.backward(made, upstream)
        return None, x.grad


def _with_total(model, x):
    total = x.detach() * 0
    add_up(x.detach(), total)
    return model.down(x + total)


OPS = torch.ops.layoutmap_kinds
KINDS = {
    "by its address": lambda model, x: model.down(by_address(x)),
    "of a weight": lambda model, x: x @ by_address(model.down.weight).t(),
    "of Triton": lambda model, x: model.down(of_triton(x, scale=0.1)),
    "buffers that are kept": lambda model, x: model.down(with_gradient(x)[0]),
    "in place": _with_total,
    "several results": lambda model, x: model.down(sum(ordered(x, None))),
    "what may be left out": lambda model, x: model.down(ordered(x, model.up.bias)[0]),
    "random": lambda model, x: model.down(x * noise(x.detach())),
    "composed": lambda model, x: model.down(OPS.composed(x)),
    "of a library": lambda model, x: model.down(OPS.of_library(x)),
    "gradient of a gradient": lambda model, x: model.down(
        torch.autograd.grad(by_address(x).cos().sum(), x, create_graph=True)[0]
    ),
    "function of NumPy": lambda model, x: model.down(OfNumpy.apply(x)),
    "function of several": lambda model, x: (lambda a, b, c: model.down(a + b) + c)(*Several.apply(x)),
    "function in place": lambda model, x: model.down(InPlace.apply(x * 1)),
    "function that is computed again": lambda model, x: model.down(Again.apply(by_address, x)),
}
"""What a model computes of its two layers, by the kind of operator."""


class Head(nn.Module):
    """Two layers, and an operator between them."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute
        self.up = nn.Linear(6, 4, dtype=torch.float64)
        self.down = nn.Linear(4, 8, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.compute(self, self.up(x))


def trained(model, x):
    """The outputs of two steps, and the weights after them."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for _ in range(2):
        found.append(model(x))
        found[-1].sin().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in (*found, *model.parameters())]
