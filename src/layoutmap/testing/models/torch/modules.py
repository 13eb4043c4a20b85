"""Source of module classes and functions that a torch program may define."""

SOURCES = {
    "Attention": """\
class Attention(nn.Module):
    def __init__(self, width, heads, groups, size, causal):
        super().__init__()
        self.q, self.o = nn.Linear(width, heads * size, bias=False), nn.Linear(heads * size, width)
        self.kv, self.size, self.causal = nn.Linear(width, 2 * groups * size), size, causal

    def forward(self, x):
        split = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q(x), *self.kv(x).chunk(2, -1)))
        x = F.scaled_dot_product_attention(*split, is_causal=self.causal, enable_gqa=True)
        return self.o(x.transpose(1, 2).flatten(2))


""",
    "GatedUnit": """\
class GatedUnit(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


""",
    "Experts": """\
class Experts(nn.Module):
    def __init__(self, width, inner, num, method=None):
        super().__init__()
        self.method = method
        self.router = nn.Linear(width, num)
        self.up = nn.Parameter(torch.randn(num, width, inner) * 0.3)
        self.down = nn.Parameter(torch.randn(num, inner, width) * 0.3)

    def weight(self, weight):
        if self.method is None or not isinstance(weight, DTensor):
            return weight
        mesh, placements = weight.device_mesh, weight.placements
        if self.method == "full_tensor":
            return weight.full_tensor()
        if self.method == "redistribute":
            return weight.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
        is_uneven = any(size % mesh.size() for size in weight.shape)  # then torch needs the global shape
        sizes = {"shape": weight.shape, "stride": weight.stride()} if is_uneven else {}
        return DTensor.from_local(weight.to_local() * 1.0, mesh, placements, **sizes)

    def forward(self, x):
        inner = torch.relu(torch.einsum("...d,edf->...ef", x, self.weight(self.up)))
        return torch.einsum("...ef,efd,...e->...d", inner, self.weight(self.down), self.router(x).softmax(-1))


""",
    "checkpoint_itself": """\
def checkpoint_itself(module, use_reentrant):
    module.forward = partial(checkpoint, module.forward, use_reentrant=use_reentrant)
    return module


""",
    "checkpoint_wrapper": """\
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper


""",
}
"""Source of each class or function, by its name."""
