"""Scenarios of torch_fully_shard_process.py: what of fully_shard's options is passed on, and what a plan says."""

import copy

import torch
import torch.distributed as dist
from cases import some
from fully_shard_pairs import (
    NET,
    NET_BOTH,
    ROWS,
    SEVERAL,
    Net,
    Several,
    WithCheckpoints,
    apart,
    gradient,
    pair,
    peer,
    plain_of,
    refusal,
    rows_of,
    step_of,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import layoutmap as lm


class Shared(Several):
    """A weight that two blocks share, and one of another element type."""

    def __init__(self):
        super().__init__()
        self.blocks[0].up.weight = self.blocks[1].up.weight
        self.blocks[2].double()

    def forward(self, x, order=(0, 1, 2)):
        x = self.blocks[1](self.blocks[0](x))
        return self.last(self.blocks[2](x.double()).float())


def what_the_plan_says():
    rules = SEVERAL | {r"blocks\.2\.up.weight": (None, ("batch", "model"))}
    rules = dict(reversed(rules.items()))
    plain, model = pair(Shared, rules)
    for each in (plain, model):
        step_of(each, ROWS)
    notes = [
        line for line in str(model.plan).splitlines() if line.startswith("note: ") and "gathered" in line
    ]
    return {"notes": notes, "gradients": apart(plain, model, gradient)}


BF16 = torch.bfloat16
POLICIES = {
    "reduced in float32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "all": MixedPrecisionPolicy(param_dtype=BF16),
    "outputs": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, output_dtype=torch.float32),
}


def mixed_precision():
    """Steps in two element types, beside those of torch's own `fully_shard`."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("batch",))
    found = {}
    for name in some(POLICIES, "reduced in float32"):
        policy = POLICIES[name]
        own = peer(mesh, policy)
        _, model = pair(Net, NET, "batch=4", fully_shard={"mp_policy": policy})
        both = [torch.optim.SGD(each.parameters(), 0.1) for each in (own, model)]
        with torch.no_grad():
            dtypes = [each(x).dtype for each, x in ((own, rows_of(mesh)), (model, ROWS))]
        for number in range(3):
            step_of(own, rows_of(mesh))
            step_of(model, ROWS)
            found[f"{name}: {number}"] = apart_from_peer(own, model, gradient)
            for optimizer in both:
                optimizer.step()
        found[f"{name}: weights"] = apart_from_peer(own, model)
        found[f"{name}: types"] = float(
            dtypes[0] != dtypes[1] or any(p.dtype != torch.float32 for p in model.parameters())
        )
    return found


def apart_from_peer(own, model, of=lambda parameter: parameter):
    """How far parameters are apart; of those that nothing shards, as multiples of what bfloat16 tells apart."""
    found = 0.0
    for (name, a), b in zip(own.named_parameters(), model.parameters(), strict=True):
        expected = of(a).detach().full_tensor()
        each = (expected - plain_of(of(b).detach())).abs().max()
        if name.endswith("norm.weight"):  # which are summed up in float32
            each = max(0.0, each - 2**-7 * expected.abs().max())
        found = max(found, float(each))
    return found


class CheckpointedNet(WithCheckpoints, Net):
    pass


def mixed_precision_gathered_in_other_ways():
    """What the library gathers itself computes in the same types: copies, checkpoints, weights that are left to it."""
    policy = POLICIES["reduced in float32"]
    rules = {r".*norm\.weight": (None,), r"blocks\.1\.up.weight": (("batch", "model"), None), **NET_BOTH}
    found = {}
    for name, make in {"blocks": Net, "checkpoints": CheckpointedNet}.items():
        plain, (_, model) = Net(), pair(make, rules, fully_shard={"mp_policy": policy})
        plain.load_state_dict({name: plain_of(each) for name, each in model.state_dict().items()})
        names = dict(plain.named_parameters())
        as_cast = {name: each.to(BF16) for name, each in names.items()}
        torch.func.functional_call(plain, as_cast, ROWS.to(BF16)).float().square().mean().backward()
        copied = copy.deepcopy(model)
        model.blocks[0].register_forward_pre_hook(lambda _, args: assert_is(args[0].dtype, BF16))
        for way, each in {"fully_shard": model, "copy": copied}.items():
            step_of(each, ROWS)
            found[f"{name}: {way}"] = max(
                ((a.grad - plain_of(b.grad)).abs().max() / a.grad.abs().max()).item()
                for a, b in zip(plain.parameters(), each.parameters(), strict=True)
            )
        found[f"{name}: alone"] = float(copied.last(ROWS).dtype != BF16 or model.last(ROWS).dtype != BF16)
    return found


def assert_is(a, b):
    assert a is b, (a, b)


def off_loaded():
    """Weights in the CPU's memory, where they are anyway: nothing changes, and each parameter is the same object."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=4"), NET)
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    with layout_map.scope(batch_dim="batch", fully_shard=options):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    both = [torch.optim.AdamW(plain.parameters(), 1e-2, eps=1e-3), optimizer]
    for _ in range(3):
        for each in (plain, model):
            step_of(each, ROWS)
        for each in both:
            each.step()
    return apart(plain, model)


def refused_options():
    """What is said of options that cannot be passed on."""
    tries = [
        {"mesh": None},
        {"shard": True},
        {"reshard_after_forward": 2},
        {"mp_policy": torch.bfloat16},
        {"offload_policy": CPUOffloadPolicy()},
        ["mp_policy"],
    ]
    layout_map = lm.LayoutMap(lm.create_mesh("batch=4"), NET)
    said = []
    for each in tries:
        try:
            layout_map.build(Net, batch_dim="batch", fully_shard=each)
        except lm.ScopeError as error:
            said.append(str(error))
    torch.manual_seed(dist.get_rank())
    value = dist.get_rank() == 0
    said.append(
        refusal(
            lambda: layout_map.build(Net, batch_dim="batch", fully_shard={"reshard_after_forward": value})
        )
    )
    return said
