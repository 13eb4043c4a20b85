"""One of several processes that train one model; run by test_torch_training_processes.py."""

import io
import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch_models import RULES, Transformer, batch, token_loss

import layoutmap as lm
from layoutmap.engines import get_engine

FSDP = {
    r"(?!.*norm|.*bias|scale|mask).*": ("batch", None),
    r".*bias|scale|.*norm.*": ("batch",),
    "mask": (None, None),
}
STEPS = 2
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def whole(tensor):
    return torch.from_numpy(get_engine("torch").to_numpy(tensor))


def train(rules, mesh, tokens, targets, make_optimizer=SGD):
    """How far a laid out model parts from a plain one, and what it holds."""
    torch.manual_seed(0)
    plain = Transformer()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    layout_map = lm.LayoutMap(lm.create_mesh(mesh), rules)
    with layout_map.scope(batch_dim="batch") as scope:
        model = Transformer()
    first = all(
        torch.equal(a, whole(b))
        for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True)
    )
    same_state = torch.equal(state, torch.get_rng_state())
    held = sum(p.to_local().numel() for p in model.parameters())
    losses, norms = [], ([], [])
    optimizers = [make_optimizer(each.parameters()) for each in (plain, model)]
    for step in range(STEPS):
        for each, optimizer, found in zip((plain, model), optimizers, norms, strict=True):

            def backward(each=each, optimizer=optimizer, step=step, found=found):
                torch.manual_seed(step)
                optimizer.zero_grad()
                loss = token_loss(each(tokens), targets)
                loss.backward()
                found.append(float(torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)))
                return loss

            losses.append(optimizer.step(backward).item())
    parts = [
        (a - whole(b)).abs().max().item() for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    ]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    torch.manual_seed(1)
    other = layout_map.build(Transformer)
    other.load_state_dict(saved)
    laid_out = [lm.dtensor.fetch_layout(p) == lm.dtensor.fetch_layout(p.grad) for p in model.parameters()]
    loaded = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return {
        "first values": first,
        "random state": same_state,
        "held": held,
        "planned": sum(
            np.prod(a.shard_shape, dtype=int).item()
            for a in scope.plan.assignments
            if a.variable.kind == "weight"
        ),
        "losses": max(abs(a - b) for a, b in zip(losses[::2], losses[1::2], strict=True)),
        "norms": max(abs(a - b) for a, b in zip(*norms, strict=True)),
        "weights": max(parts),
        "gradients": all(laid_out),
        "saved": all(torch.equal(whole(a), whole(b)) for a, b in loaded),
    }


def main():
    number, folder, port, size = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    # What torchrun would set; the engine joins the group by itself.
    os.environ |= {"RANK": str(number), "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    tokens, targets = map(torch.from_numpy, batch("transformer"))
    told = {
        "mixed": train(RULES["transformer"], f"batch={int(size) // 2},model=2", tokens, targets),
        "by the batch": train(FSDP, f"batch={size}", tokens, targets),
        "adafactor": train(FSDP, f"batch={size}", tokens, targets, torch.optim.Adafactor),
        "lbfgs": train(
            FSDP, f"batch={size}", tokens, targets, partial(torch.optim.LBFGS, lr=0.1, max_iter=2)
        ),
    }
    (folder / f"{number}.json").write_text(json.dumps(told))
    np.savez(folder / f"{number}.npz")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
