"""One of four processes that train compiled models; run by test_torch_compile.py, which names the cases."""

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist
import torch_compiled_numbers as numbers
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_models import RULES, Perceptron, Transformer, batch, token_loss

import layoutmap as lm
from layoutmap.engines import get_engine

STEPS = 2
CAPTURED = torch.full((8,), 2.0)


def transformer(depth=3):
    return Transformer(size=32, heads=4, depth=depth)


def each_block(model, backend="aot_eager"):
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def layers(model):
    for each in next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList)):
        each.compile(backend="aot_eager", fullgraph=True)
    return model


def in_place(model):
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def by_function(model, fullgraph=True):
    return torch.compile(model, backend="aot_eager", fullgraph=fullgraph)


def by_function_in_parts(model):
    return by_function(model, fullgraph=False)


def blocks_by_function(model):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = by_function(block)
    return model


def numbered(model):
    for number, block in enumerate(model.blocks):
        block.layer_idx = number
    return each_block(model)


def in_a_function(model):
    return torch.compile(lambda tokens: model(tokens) * 2.0 / 2.0, backend="aot_eager")


def by_inductor(model):
    return each_block(model, "inductor")


# Which model, on which mesh, and what is compiled.
CASES = {
    "each block": ("transformer", "batch=2,model=2", each_block),
    "each block, model=4": ("transformer", "model=4", each_block),
    "each of twelve blocks": ("twelve blocks", "batch=2,model=2", each_block),
    "each block, which knows its number": ("transformer", "model=4", numbered),
    "the model": ("transformer", "model=4", in_place),
    "a model whose blocks gather": ("transformer", "batch=2,model=2", in_place),
    "a model with BatchNorm": ("perceptron", "batch=2,model=2", in_place),
    "a function that calls it": ("transformer", "batch=2,model=2", in_a_function),
    "torch.compile(model)": ("two blocks", "batch=2,model=2", by_function),
    "torch.compile(model), model=4": ("transformer", "model=4", by_function),
    "torch.compile(model) with BatchNorm": ("perceptron", "batch=2,model=2", by_function),
    "torch.compile(model) in parts": ("transformer", "batch=2,model=2", by_function_in_parts),
    "torch.compile(block)": ("transformer", "batch=2,model=2", blocks_by_function),
    "by inductor": ("transformer", "batch=2,model=2", by_inductor),
}
MODELS = {
    "transformer": transformer,
    "two blocks": lambda: transformer(2),
    "twelve blocks": lambda: transformer(12),
    "perceptron": Perceptron,
}


def rules_on(name, mesh):
    """The rules of a model, without a dim that the mesh has not."""
    return {
        rule: tuple(spec if spec and spec in mesh else None for spec in specs)
        for rule, specs in RULES[name].items()
    }


def differences(plain, model, call, losses_of):
    """How far a compiled model parts from a plain one in a few steps, and what was compiled."""
    counters.clear()
    losses, gathers = [], [0]
    original = dist.all_gather_single

    def counting(*args, **kwargs):
        gathers[0] += 1
        return original(*args, **kwargs)

    dist.all_gather_single = counting
    for each, called in ((plain, plain), (model, call)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3)
        for step in range(STEPS):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = losses_of(called)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    dist.all_gather_single = original
    values = [
        (get_engine("torch").to_numpy(a.detach()) - get_engine("torch").to_numpy(b))
        for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True)
    ]
    return {
        "losses": max(abs(a - b) for a, b in zip(losses[:STEPS], losses[STEPS:], strict=True)),
        "values": max(np.abs(each).max().item() for each in values),
        "graphs": counters["stats"].get("unique_graphs", 0),
        "gathers": gathers[0] / STEPS,
        "breaks": sum(counters["graph_break"].values()),
    }


def train(name, mesh, compiled):
    make, name = MODELS[name], "perceptron" if name == "perceptron" else "transformer"
    x, y = map(torch.from_numpy, batch(name))
    if compiled is by_inductor:  # which draws other numbers
        make = lambda: transformer().apply(lambda each: setattr(each, "p", 0.0))  # noqa: E731
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    layout_map = lm.LayoutMap(lm.create_mesh(mesh), rules_on(name, mesh))
    model = layout_map.build(make, batch_dim="batch" if "batch" in mesh else None)
    loss = token_loss if name == "transformer" else F.mse_loss
    return differences(plain, model, compiled(model), lambda called: loss(called(x), y))


def by_tiles(backend):
    """A model that draws by tiles, with compiled blocks, beside the same model as it is."""
    x, y = map(torch.from_numpy, batch("transformer"))
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=2"), RULES["transformer"])
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(layout_map.build(lambda: transformer(1), batch_dim="batch", draws="tiles"))
    each_block(models[1], backend)
    with inductor_config.patch(fallback_random=True):  # the numbers of torch
        return differences(*models, models[1], lambda called: token_loss(called(x), y))


def of_transformers(name, compiled=layers):
    """A published model, or its layers, compiled."""
    import transformers
    from test_torch_transformers import INPUTS, TOKENS, make_map
    from transformers_models import WITH_A_PLAN, WITHOUT

    kind, config, _ = {**WITH_A_PLAN, **WITHOUT}[name]
    config = config()
    config.num_hidden_layers, config.use_cache = 2, False
    inputs = INPUTS.get(name, {"input_ids": TOKENS, "labels": TOKENS})
    layout_map = make_map(name, lm.create_mesh("batch=2,model=2"), lambda: config)
    torch.manual_seed(0)
    plain = getattr(transformers, kind)(config)
    torch.manual_seed(0)
    model = layout_map.build(lambda: getattr(transformers, kind)(config), batch_dim="batch", library="torch")
    return differences(plain, model, compiled(model), lambda called: called(**inputs).loss)


class Scaled(torch.nn.Module):
    """A layer whose output is scaled by what a program may set, and that keeps or takes more than tensors."""

    def __init__(self, kind):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.kind, self.scale, self.calls, self.kept = kind, 2.0, 0, []
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x, sizes=None):
        y = self.inner(x) * self.scale
        if self.kind == "has a checkpoint":
            y = checkpoint(self.inner, x, use_reentrant=False) * self.scale
        if self.kind == "counts its calls":
            self.calls += 1
            y = y * self.calls
        if self.kind == "assigns a buffer":
            self.mean = torch.lerp(self.mean, y.detach().mean(0), 0.5)
        if self.kind == "keeps a tensor":
            self.kept.append(y)
        if self.kind == "reads a tensor of its file":
            y = y * CAPTURED
        if self.kind == "reads a value" and y.sum() > 0:
            y = y * 3
        if self.kind == "takes an object":
            y = y * sizes.pop()
        return y


class Viewed(torch.nn.Module):
    """A layer between views of what another one returns: one axis of two that are sharded."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x)
        return self.second(y.flatten(0, 1)).unflatten(0, y.shape[:2])


class Experts(torch.nn.Module):
    """Weights beside a layer, all sharded over the batch's dim."""

    def __init__(self):
        super().__init__()
        self.up, self.router = torch.nn.Parameter(torch.randn(4, 8, 8) * 0.3), torch.nn.Linear(8, 4)

    def forward(self, x):
        return torch.einsum("...d,edf,...e->...f", x, self.up, self.router(x).softmax(-1))


PARTS = {
    "parts: one is given a view": (Viewed, {}, {"first": ("batch", "model", None)}),
    "parts: one gathers inside of another": (
        lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), Experts()),
        {r".*up$": (None, "model", "batch"), r".*weight$": ("batch", None)},
        {},
    ),
}


def in_parts(make, rules, activations):
    """A model whose parts are compiled, each by itself."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=2"), rules, activations=activations)
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = layout_map.build(make, batch_dim="batch")
    for part in model.children():
        part.compile(backend="aot_eager")
    x = torch.linspace(-1, 1, 8 * 4 * 8).reshape(8, 4, 8)
    return differences(plain, model, model, lambda called: called(x).square().mean())


def scaled(kind):
    """What a small compiled model gives in three calls beside a plain one, and whether it was warned of."""
    torch.manual_seed(0)
    plain = Scaled(kind)
    torch.manual_seed(0)
    model = lm.LayoutMap(lm.create_mesh("batch=2,model=2"), {"inner.weight": ("model", None)}).build(
        lambda: Scaled(kind), batch_dim="batch"
    )
    model.compile(backend="aot_eager")
    results = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in (plain, model):
            given = [{5}, {7}, {9}] if kind == "takes an object" else [None] * 3
            for number, sizes in enumerate(given):
                each.scale = 1.0 + number // 2
                results.append(each(torch.linspace(-1, 1, 64).reshape(8, 8), sizes))
            mean = torch.from_numpy(get_engine("torch").to_numpy(each.mean))
            results += [torch.tensor([float(each.calls), len(each.kept)]), mean]
    right = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(results[:5], results[5:], strict=True))
    said = [str(each.message) for each in caught if "cannot be compiled" in str(each.message)]
    return {"right": right, "said": said}


def one_graph():
    """What a small model gives by one graph for each of some shapes, and what is said where there can be none."""
    compiled, said = partial(torch.compile, backend="aot_eager", fullgraph=True), {}
    torch.manual_seed(0)
    plain = Scaled("")
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=2"), {"inner.weight": ("model", "batch")})

    def laid_out(kind=""):
        torch.manual_seed(0)
        return layout_map.build(lambda: Scaled(kind), batch_dim="batch")

    counters.clear()
    model = compiled(laid_out())
    batches = [torch.linspace(-1, 1, rows * 8).reshape(rows, 8) for rows in (8, 7, 8)]
    right = all(torch.allclose(plain(each), model(each), atol=1e-6) for each in batches)
    graphs = counters["stats"]["unique_graphs"]
    stepped = []
    for compiling in (lambda step: step, partial(torch.compile, backend="aot_eager")):
        each = laid_out()
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3)
        step = compiling(optimizer.step)
        for _ in range(2):
            optimizer.zero_grad()
            each(batches[0]).square().sum().backward()
            step()
        stepped.append([get_engine("torch").to_numpy(weight.detach()) for weight in each.parameters()])
    right = right and all(map(partial(np.allclose, atol=1e-6), *stepped))
    inner = laid_out()
    for name, refused in {
        "counts its calls": compiled(laid_out("counts its calls")),
        "dynamic shapes": compiled(laid_out(), dynamic=True),
        "a function": compiled(lambda x: inner(x) * 2),
    }.items():
        try:
            refused(batches[0])
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return {"right": right, "graphs": graphs, "said": said}


def find(case):
    if case in CASES:
        return train(*CASES[case])
    if case.startswith("by tiles, "):
        return by_tiles(case.removeprefix("by tiles, "))
    if case == "one graph":
        return one_graph()
    if case in PARTS:
        return in_parts(*PARTS[case])
    if case in numbers.CASES:
        return numbers.compared(numbers.CASES[case])
    if case in numbers.REFUSED:
        return numbers.refused(numbers.REFUSED[case])
    if case.startswith("all of "):
        return of_transformers(case.removeprefix("all of "), by_function)
    return (scaled if " " in case else of_transformers)(case)


def main():
    number, folder, port, *cases = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # inductor's own imports
    # Dynamo asks for that of any tensor, and hides it
    warnings.filterwarnings("ignore", "The .grad attribute")
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    told = {}
    for case in cases:
        told[case] = find(case)
    (folder / f"{number}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
