"""A program that compares torch with itself, beside a model in layouts and without; run by test_changes.py."""

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.distributed._local_tensor
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
import torch.optim._muon
import torch.testing._internal.distributed.fake_pg
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as of_modules
from torch.optim import optimizer as of_optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

import layoutmap as lm
import layoutmap.adapters.torch

# What torch counts and remembers itself, in a program without any of us, too.
BOOKS = {
    "torch._custom_class_base._FakeScriptObject_cls",
    "torch._opaque_base._FakeScriptObject_cls",
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_hits",
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_misses",
    "torch._subclasses.meta_utils.DESCRIBER_NEXT_ID",
    "torch.autograd.profiler._cupti_monitor_checked",
    "torch.autograd.profiler._cupti_monitor_module",
    "torch.distributed.distributed_c10d._backend",
    "torch.distributed.distributed_c10d._group_count",
    "torch.optim.sgd.SGD.step",
    "torch.utils._python_dispatch._is_in_any_mode_without_ignore_compile_internals",
    "torch.utils._python_dispatch._is_in_non_infra_torch_dispatch_mode",
    "torch.utils._python_dispatch._is_in_torch_dispatch_mode",
    "torch.utils.hooks.RemovableHandle.next_id",
}
HOOKS = {
    "torch.distributed.tensor.DTensor._op_dispatcher": lambda: {
        **vars(DTensor._op_dispatcher),
        **{str(op): handler for op, handler in DTensor._op_dispatcher._custom_op_handlers.items()},
    },
    "torch.distributed.tensor.experimental.register_sharding": lambda: {
        str(op): rule for op, rule in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs.items()
    },
    "torch.nn.modules.module._global_module_registration_hooks": (
        lambda: of_modules._global_module_registration_hooks
    ),
    "torch.nn.modules.module._global_parameter_registration_hooks": (
        lambda: of_modules._global_parameter_registration_hooks
    ),
    "torch.nn.modules.module._global_buffer_registration_hooks": (
        lambda: of_modules._global_buffer_registration_hooks
    ),
    "torch.optim.optimizer._global_optimizer_pre_hooks": lambda: of_optimizers._global_optimizer_pre_hooks,
    "torch.distributed.tensor.experimental.implicit_replication": (
        lambda: {"is on": torch._C._get_dtensor_allow_implicit_replication()}
    ),
    "torch.distributed.group.WORLD": lambda: {"is": dist.group.WORLD},
    "dispatch modes": lambda: {"number": len(dispatch_modes())},
    "gc.callbacks": lambda: dict(enumerate(gc.callbacks)),
    "sys.excepthook": lambda: {"is": sys.excepthook},
}
"""What is changed inside of objects, or is no attribute."""


def identity(value):
    return id(value), id(value.__code__) if type(value).__name__ == "function" else 0


def state():
    """Each attribute of torch's modules and classes, and `HOOKS`, by name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            found[f"{name}.{attribute}"] = identity(value)
            if isinstance(value, type) and value.__module__.partition(".")[0] == "torch":
                of_class = f"{value.__module__}.{value.__qualname__}"
                found |= {f"{of_class}.{each}": identity(of) for each, of in list(vars(value).items())}
    return found | {
        name: sorted((str(key), *identity(value)) for key, value in of().items())
        for name, of in HOOKS.items()
    }


LEAVES = {"DTensor", "DeviceMesh"}  # classes to which attributes are added; a module's come by imports


def changed(before):
    """The names of what is not as it was."""
    now = state()
    added = {name for name in now if name not in before and name.split(".")[-2] in LEAVES}
    differs = {name for name in before if now.get(name) != before[name]} | added
    parts = {each for each in differs for other in differs if each.startswith(f"{other}.")}
    return sorted(differs - parts - BOOKS)


class Net(torch.nn.Module):
    """Two layers, and what is changed while they are called."""

    before: ClassVar[dict] = {}
    told: ClassVar[list] = []

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        if self.before:
            Net.told = changed(self.before)
        return self.down(self.up(x).relu())


LAYOUTS = {r".*\.weight": ("model", None)}
X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def steps(model):
    """The outputs of two steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for _ in range(2):
        found.append(model(X).detach().clone())
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def plainly():
    """What a plain program beside it computes, writes and samples."""
    torch.manual_seed(0)
    model = Net()
    made = [each.tolist() for each in steps(model)]
    if dist.is_initialized():
        return {"steps": made}
    kept, other, folder = model.state_dict(), Net().state_dict(), tempfile.mkdtemp()
    dcp.save({"model": kept}, checkpoint_id=folder)
    dcp.load({"model": other}, checkpoint_id=folder)
    return {"steps": made, "restored": all(map(torch.equal, kept.values(), other.values()))}


def seconds():
    """How long a step of a plain model takes at best."""
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    x, found = torch.randn(16, 64), []
    for _ in range(60):
        begin = time.perf_counter()
        model(x).sum().backward()
        found.append(time.perf_counter() - begin)
    return min(found)


def built():
    layout_map = lm.LayoutMap("batch=2,model=2", LAYOUTS)
    torch.manual_seed(0)
    return layout_map.build(Net, library="torch", batch_dim="batch")


def main(tell):
    Net.before = {}
    told = {"plain": plainly()}
    lm.plan(Net, lm.LayoutMap("batch=2,model=2", LAYOUTS), library="torch")  # loads all that is ever loaded
    gc.collect()
    alone = seconds()
    before = state()
    told["after a plan"] = changed(before)
    with lm.LayoutMap("batch=2,model=2", LAYOUTS).scope(library="torch"):
        told["scope"] = changed(before)
        Net()
    gc.collect()
    told["after a scope"] = changed(before)
    model = built()
    Net.before = before
    made = steps(model)
    Net.before = {}
    told["call"], told["tensors"] = Net.told, changed(before)
    told["plain beside it"], told["slower"] = plainly(), seconds() / alone
    derived = model.up.weight * 2
    del model
    gc.collect()
    told["derived"], told["its sum"] = changed(before), float(derived.sum())
    del derived
    gc.collect()
    told["after"] = changed(before)
    torch.manual_seed(0)
    steps(plain := Net())
    told["expected"] = float((plain.up.weight * 2).sum())
    told["equal"] = [
        [each.tolist() for each in found] == [each.tolist() for each in made]
        for found in (steps(built()), steps(built()))  # each is gone when the next one begins
    ]
    gc.collect()
    told["after others"] = changed(before)
    tell(told)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        number, folder, port = sys.argv[1:]
        os.environ |= {"RANK": number, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        dist.init_process_group("gloo")
        main(lambda told: (Path(folder) / f"{number}.json").write_text(json.dumps(told)))
    else:
        main(lambda told: print(json.dumps(told)))
