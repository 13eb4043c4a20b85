"""Scenarios of torch_fully_shard_process.py: how many collectives there are, and when."""

import collections
import contextlib
import copy
import warnings

import torch
import torch.distributed as dist
from cases import some
from fully_shard_pairs import (
    CHAIN_RULES,
    MESH,
    NET,
    NET_BOTH,
    ROWS,
    SEVERAL,
    Net,
    Several,
    WithCheckpoints,
    apart,
    gradient,
    optimizers_of,
    pair,
    peer,
    refusal,
    rows_of,
    step_of,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode

import layoutmap as lm


def collectives(step):
    """How many collectives a step makes, by kind."""
    with warnings.catch_warnings(), CommDebugMode() as counter:
        warnings.simplefilter("ignore", UserWarning)  # its hooks are called where no input has a gradient
        step()
    counts = collections.Counter()
    for operation, number in counter.get_comm_counts().items():
        name = (
            str(operation)
            .rpartition(".")[2]
            .replace("allgather", "all_gather")
            .replace("allreduce", "all_reduce")
        )
        counts[next((k for k in ("all_gather", "all_reduce", "reduce_scatter") if k in name), name)] += number
    return dict(counts)


def as_many_collectives():
    """A step of this library's, forward, backward and optimizer, beside torch's own ways; of many blocks and of one."""
    return [collectives_of(blocks) for blocks in some([3, 1], 3)]


def collectives_of(blocks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("batch", "model"))
    layout_map = lm.LayoutMap(lm.create_mesh(MESH), NET_BOTH)
    layout_map.activations[r".*(norm|down)"] = ("batch", None)
    torch.manual_seed(0)
    model = layout_map.build(lambda: Net(blocks), batch_dim="batch", check_batches=False)
    rows = lm.dtensor.relayout(ROWS, lm.Layout(["batch", None], layout_map.mesh))
    found = []
    for each, x in ((model, rows), (peer(mesh, MixedPrecisionPolicy(), blocks), rows_of(mesh))):
        optimizer = torch.optim.AdamW(each.parameters())

        def step(each=each, x=x, optimizer=optimizer):
            optimizer.zero_grad()
            with lm.dtensor.run_on(layout_map.mesh) if each is model else contextlib.nullcontext():
                loss = each(x).square().mean()
            loss.backward()
            if each is not model:  # a loss of all rows, as that of the other
                dist.all_reduce(loss.detach().clone(), group=mesh["batch"].get_group())
            optimizer.step()

        step()
        found.append(collectives(step))
    return found


def freed_or_kept():
    """The collectives and the gradients of a step with each value of reshard_after_forward, and with both ways."""
    found = {}
    for value in (None, True, False):
        options = {} if value is None else {"fully_shard": {"reshard_after_forward": value}}
        plain, model = pair(Net, NET, "batch=4", check_batches=False, **options)
        for each in (plain, model):
            step_of(each, ROWS)
        found[f"{value}: gathers"] = collectives(lambda model=model: step_of(model, ROWS))["all_gather"]
        found[f"{value}: gradients"] = apart(plain, model, gradient)
        model.zero_grad()
        copied = copy.deepcopy(model)
        step_of(copied, ROWS)
        found[f"{value}: copy"] = apart(plain, copied, gradient)
        with torch.no_grad():
            for each in (plain, model):
                for parameter in each.parameters():
                    parameter.mul_(1.5)
            found[f"{value}: after a change"] = (plain(ROWS) - model(ROWS)).abs().max().item()
    return found


class Late(dist._Work):
    """A collective on a slow link: it is done 40 ms after it was asked for, by the clock of `Link`."""

    def __init__(self, work, link):
        super().__init__()
        self._work, self._link = work, link
        self._name, self._ready = f"gather {link.num_gathers}", link.now + 40

    def wait(self, timeout=None):
        self._link.events.append(f"wait for {self._name}")
        self._link.waited += max(0, self._ready - self._link.now)
        self._link.now = max(self._link.now, self._ready)
        return self._work.wait()


class Link:
    """A clock in milliseconds that goes on while layers compute, and for who waits; and what happened."""

    def begin(self):
        self.now = self.waited = self.num_gathers = 0
        self.events = []

    def install(self):
        """Have the gathers of all process groups be late, from now on."""
        gather = dist.ProcessGroup.all_gather_single
        self.install = lambda: None

        def late(group, *args):
            self.num_gathers += 1
            self.events.append(f"gather {self.num_gathers}")
            return Late(gather(group, *args), self)

        dist.ProcessGroup.all_gather_single = late

    def compute(self, what):
        self.events.append(f"compute {what}")
        self.now += 50


LINK = Link()


class Noted(torch.nn.Linear):
    name = ""

    def forward(self, x):
        LINK.compute(self.name)
        if x.requires_grad:
            x.register_hook(lambda _: LINK.compute(f"{self.name} backward"))
        return super().forward(x)


class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Noted(16, 16), Noted(16, 16)
        self.blocks = torch.nn.ModuleList(Noted(16, 16) for _ in range(4))
        for number, block in enumerate(self.blocks):
            block.name = number
        self.first.name, self.last.name = "first", "last"

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def ahead():
    return {gather: gathered_late(Chain, gather) for gather in ("fully_shard", "own")}


def gathered_late(make, gather):
    """What happens in a step on a slow link."""
    plain, model = pair(make, CHAIN_RULES, gather=gather)
    LINK.begin()
    plain(ROWS).square().mean().backward()
    LINK.install()
    for _ in range(2):  # the order is learned in the first
        LINK.begin()
        model.zero_grad()
        model(ROWS).square().mean().backward()
    return {
        "events": list(LINK.events),  # not those of reading gradients
        "hidden": 1 - LINK.waited / (40 * LINK.num_gathers),
        "gradients": apart(plain, model, gradient),
    }


class CheckpointedChain(WithCheckpoints, Chain):
    pass


def own_in_other_ways():
    """The library's own gathering: checkpoints, other orders of blocks, changes in between, failures."""
    found = {"checkpointed": gathered_late(CheckpointedChain, "own")["gradients"]}
    plain, model = pair(Several, SEVERAL, gather="own")
    both = optimizers_of(plain, model)
    for number, order in enumerate([(0, 1, 2), (2, 0, 1), (0, 1, 0, 1), (1,), (0, 1, 2)]):
        for each in (plain, model):
            each.zero_grad()
            each.blocks[1].requires_grad_(number != 1)
            each(ROWS, order).square().mean().backward()
        found[f"order {order}"] = apart(plain, model, gradient)
        for optimizer in both:
            optimizer.step()
    handle = model.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    found["said"] = refusal(lambda: model(ROWS)) != "division by zero"
    handle.remove()
    with torch.no_grad():
        for each in (plain, model):
            for parameter in each.parameters():
                parameter.data.mul_(1.1)  # of which autograd counts nothing
    found["changed"] = (plain(ROWS) - model(ROWS)).abs().max().item()
    for each in (plain, model):
        each.zero_grad()
        (each(ROWS).square().mean() + each(ROWS * 2, (2, 1)).square().mean()).backward()
    found["two graphs"] = apart(plain, model, gradient)
    return found
