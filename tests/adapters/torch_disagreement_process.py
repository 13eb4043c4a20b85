"""One of two processes of torch that do not do the same; run by test_torch_disagreements.py."""

import contextlib
import functools
import importlib
import os
import sys
import time
import types
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from disagreements import held, run
from torch import nn

import layoutmap as lm

RULES = {"up.weight": ("model", None), "down.weight": (None, None), ".*bias|scale": (None,)}


class Model(nn.Module):
    """A large weight, which a scope defers, a small one, which it does not, and a buffer."""

    def __init__(self, width=64, change=None, dropout=0.0, more=()):
        super().__init__()
        self.up = nn.Linear(64, width)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(width, 4)
        self.register_buffer("scale", torch.ones(4))
        self.more = nn.Sequential(*more)
        if change is not None:
            with torch.no_grad():
                change(self)

    def forward(self, x):
        return self.down(self.more(self.drop(self.up(x)))) * self.scale


# -- programs

THEIRS = """
import torch

def doubled(x):
    return x * 2

class Theirs(torch.nn.Module):
    def forward(self, x):
        return doubled(x)
"""


class Scale(nn.Module):
    """Holds attributes and functions, some of which are other ones in each process."""

    def __init__(self, scale=2.0, number=0, act=torch.tanh):
        super().__init__()
        self.scale, self.act, self.made = scale, act, time.time()
        self.rank, self.device, self.folder = number, f"cuda:{number}", os.path.abspath(f"host {number * 7}")
        self.config = types.SimpleNamespace(dtype=(torch.float32, "float32")[number])

    @property
    def places(self):
        return self.rank, self.device, self.folder, self.config.dtype

    def forward(self, x):
        return self.act(x) * self.scale * len(self.places)


def doubling(number):
    """A class whose `forward` is written in two ways."""
    if number:

        class Doubling(nn.Module):
            def forward(self, x):
                return x * 2

    else:

        class Doubling(nn.Module):
            def forward(self, x):
                return x + x

    return Doubling()


def programs(number, folder, laid_out, stepped):
    """What this process does in each case: it trains, and its program differs somewhere or nowhere."""

    def step(*more, change=lambda model: None):
        model = laid_out("scope", lambda: Model(more=more))
        change(model)
        return stepped(model)

    def from_another_path():
        path = folder / f"host{number}"
        path.mkdir()
        (path / "theirs.py").write_text("\n" * number + THEIRS)
        sys.path.insert(0, str(path))
        return step(importlib.import_module("theirs").Theirs())

    def of_another_release():
        before, torch.__version__ = torch.__version__, f"3.{number}"
        try:
            return step()
        finally:
            torch.__version__ = before

    def called_without_gradients():
        with torch.no_grad() if number else contextlib.nullcontext():
            laid_out("scope")(torch.ones(4, 64))
        return {}

    def called_twice():
        model = laid_out("scope")
        stepped(model)
        model.eval()
        if number:
            model.more = nn.Sequential(nn.ReLU())
        return stepped(model)

    def optimized(make):
        model = laid_out("scope")
        optimizer = make(model.parameters())
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        return held("torch", dict(model.state_dict(keep_vars=True)))

    scaled = functools.partial(torch.mul, other=2.0)
    found = {
        "module": lambda: step((nn.GELU, nn.ReLU)[number]()),
        "setting": lambda: step(nn.GELU(approximate=("none", "tanh")[number])),
        "forward": lambda: step(doubling(number)),
        "training": lambda: step(change=lambda model: model.train(not number)),
        "frozen": lambda: step(change=lambda model: model.up.bias.requires_grad_(not number)),
        "release": of_another_release,
        "gradients": called_without_gradients,
        "another mode": called_twice,
        "learning rate": lambda: optimized(functools.partial(torch.optim.SGD, lr=(0.1, 0.2)[number])),
        "optimizer": lambda: optimized((torch.optim.SGD, torch.optim.AdamW)[number]),
        "optimizers alike": lambda: optimized(torch.optim.AdamW),
        "alike": lambda: step(Scale(number=number), Scale(act=lambda x: x * 2), Scale(act=scaled)),
        "paths": from_another_path,
    }
    return {f"program {name}": case for name, case in found.items()}


def main():
    number, folder, port = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def laid_out(how, make=Model, seed=0, rules=RULES, dim="model", **options):
        torch.manual_seed(seed)
        layout_map = lm.LayoutMap(lm.create_mesh({dim: 2}), rules)
        if how == "apply":
            return layout_map.apply(make(), **options)
        with layout_map.scope(**options):
            return make()

    def of(model):
        return held("torch", dict(model.state_dict(keep_vars=True)))

    def stepped(model, seed=0, rows=0, calls=1, same=0):
        torch.manual_seed(seed)
        for call in range(calls):
            model(torch.arange(256.0).reshape(4, 64) + rows * (call >= same)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        return of(model)

    def changed(change):
        return lambda: Model(change=change)

    made_before = nn.Parameter(torch.ones(64, 64))
    cases = {}
    for how in ("scope", "apply"):

        def add(name, case, how=how, **options):
            cases[f"{how} {name}"] = lambda: case(how, **options)

        def built(how, **options):
            return of(laid_out(how, **options))

        add("same", built)
        add("seed", built, seed=7 + number)
        add("seed of small ones", built, make=lambda: Model(8), seed=7 + number)
        add("argument", built, make=changed(lambda m: nn.init.normal_(m.up.weight, std=1.0 + 2 * number)))
        add("argument of a small one", built, make=changed(lambda m: m.down.weight.normal_(std=1.0 + number)))
        add("constant", built, make=changed(lambda m: nn.init.constant_(m.up.weight, float(number))))
        add("constant in one place", built, make=changed(lambda m: m.up.weight[-1].fill_(float(number))))
        add(
            "existing",
            built,
            make=changed(lambda m: m.up.weight.copy_(torch.full((64, 64), 1.0 + number))),
        )
        add("existing buffer", built, make=changed(lambda m: m.scale.fill_(number)))
        add("deferred or not", built, make=changed(lambda m: number and setattr(m.up, "weight", made_before)))
        add("strict", built, strict=bool(number), rules={"up.weight": ("model", None), "none": (None,)})
        add("batch_dim", built, batch_dim="model" if number else None)
        add("wrong batch_dim", built, batch_dim="none" if number else "model")
        add("unused rule", built, strict=True, rules=RULES | ({"none": (None,)} if number else {}))
        if how == "scope":
            add("draws", built, draws="tiles" if number else "exact")
            add("tiles", built, draws="tiles")
            add("seed of tiles", built, draws="tiles", seed=number)
        for dim in (None, "model"):
            add(f"rows {dim}", lambda how, **o: stepped(laid_out(how, **o), rows=number), batch_dim=dim)
        add("same rows", lambda how, **o: stepped(laid_out(how, **o)), batch_dim="model")
        for calls in (15, 16, 32):
            last = functools.partial(stepped, rows=number, calls=calls, same=calls - 1)
            add(f"rows of call {calls}", lambda how, last=last, **o: last(laid_out(how, **o)))
        add(
            "seed of constants",
            built,
            make=changed(lambda m: [p.fill_(0.5) for p in m.parameters()]),
            seed=number,
        )
        add("rules", built, rules=RULES if number else {"up.w.*": ("model", None)} | RULES)
        add(
            "rows that are not compared",
            lambda how, **o: stepped(laid_out(how, **o), rows=number) and {"none": {"compared": 0}},
            batch_dim="model",
            check_batches=False,
        )
        add("masks", lambda how, **o: stepped(laid_out(how, **o), number), make=lambda: Model(dropout=0.5))
        add("no masks", lambda how, **o: stepped(laid_out(how, **o), number))

        def gradients(how):
            torch.manual_seed(0)
            model = Model()
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + number)
            return of(lm.LayoutMap(lm.create_mesh("model=2"), RULES).apply(model))

    def slots():
        torch.manual_seed(0)
        with lm.LayoutMap(lm.create_mesh("model=2"), RULES).scope():
            model = Model()
            made = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5 + number)
        return of(model) if made.state else {}

    add("gradients", gradients)
    cases["scope slots"] = slots
    run(cases | programs(number, folder, laid_out, stepped), number, folder, *sys.argv[4:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
