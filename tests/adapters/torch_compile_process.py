"""One of several processes that train one compiled model; run by test_torch_compile.py."""

import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch_models import RULES, Transformer, batch, token_loss

import layoutmap as lm
from layoutmap.engines import get_engine

MESHES = ("model=4", "batch=2,model=2")
STEPS = 2


def blocks(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def in_a_function(model):
    return torch.compile(lambda tokens: model(tokens) * 2.0 / 2.0, backend="aot_eager")


WAYS = {
    "each block": blocks,
    "the model": lambda model: torch.compile(model, backend="aot_eager"),
    "a function that calls it": in_a_function,
}


def rules_on(mesh):
    """The rules of the transformer, without a dim that the mesh has not."""
    return {
        rule: tuple(spec if spec and spec in mesh else None for spec in specs)
        for rule, specs in RULES["transformer"].items()
    }


def train(mesh, compiled):
    """How far a model that is compiled parts from a plain one, in its losses and in its weights."""
    tokens, targets = map(torch.from_numpy, batch("transformer"))
    torch.manual_seed(0)
    plain = Transformer()
    torch.manual_seed(0)
    with lm.LayoutMap(lm.create_mesh(mesh), rules_on(mesh)).scope(
        batch_dim="batch" if "batch" in mesh else None
    ):
        model = Transformer()
    losses = []
    for each, call in ((plain, plain), (model, compiled(model))):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3)
        for step in range(STEPS):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = token_loss(call(tokens), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    weights = [
        np.abs(a.detach().numpy() - get_engine("torch").to_numpy(b)).max().item()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    ]
    differences = (abs(a - b) for a, b in zip(losses[:STEPS], losses[STEPS:], strict=True))
    return {"losses": max(differences), "weights": max(weights)}


def main():
    number, folder, port = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    warnings.filterwarnings(
        "ignore", "The .grad attribute"
    )  # Dynamo asks for that of any tensor, and hides it
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    told = {f"{way}, {mesh}": train(mesh, WAYS[way]) for way in WAYS for mesh in MESHES}
    (folder / f"{number}.json").write_text(json.dumps(told))
    np.savez(folder / f"{number}.npz")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
