"""One of several processes that pass their own rows; run by test_torch_own_rows.py.

Arguments: its number, the folder for what it says, the port, the number of processes, and a mesh.
"""

import itertools
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import layoutmap as lm

NUMBER, FOLDER, (PORT, SIZE, MESH) = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
RULES = {
    "replicated": {},
    "sharded": {"embed.weight": ("batch", None), "up.weight": (None, "batch")},
}
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.5, momentum=0.9),
    "adamw": lambda weights: torch.optim.AdamW(weights, 0.01, eps=1e-3),
}


class Net(nn.Module):
    """A model that computes its loss and its metric."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction
        self.embed, self.drop = nn.Embedding(16, 8), nn.Dropout(0.2)
        self.up, self.head = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, tokens, labels=None, num_tokens=None):
        positions = torch.arange(tokens.shape[1]) / 10  # neither rows nor an argument
        hidden = self.drop(self.embed(tokens)) + positions[None, :, None]
        logits = self.head(torch.relu(self.up(hidden)))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction)
        if num_tokens is not None:
            loss = loss / num_tokens
        is_right = (logits.argmax(-1) == labels) & (labels != -100)
        return {"loss": loss, "logits": logits, "accuracy": is_right.sum() / (labels != -100).sum()}


def draw(seed, rows=8, length=6):
    """A global batch in which the processes have unequal numbers of tokens."""
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 16, (rows, length), generator=draws)
    ignored = torch.arange(length) < torch.arange(rows)[:, None] % 5
    return tokens, tokens.roll(1, 1).masked_fill(ignored, -100)


def build(rules="sharded", reduction="mean", **options):
    torch.manual_seed(0)
    layout_map = lm.LayoutMap(MESH, RULES[rules], rest="replicated")
    return layout_map.build(
        lambda: Net(reduction), library="torch", **{"batch_dim": "batch", "rows": "own"} | options
    )


def take_own(tensor, model):
    mesh = model.head.weight.device_mesh
    return tensor.chunk(mesh["batch"].size())[mesh.get_local_rank("batch")]


def compare(rules, optimizer, reduction):
    """The largest difference between training with own rows and one device that has all, for three steps."""
    model = build(rules, reduction)
    torch.manual_seed(0)
    plain = Net(reduction)
    optimizers = [OPTIMIZERS[optimizer](each.parameters()) for each in (model, plain)]
    differences = []
    for step in range(3):
        batches = [draw(2 * step + i) for i in range(2)]
        num_tokens = sum((labels != -100).sum() for _, labels in batches) if reduction == "sum" else None
        for batch in batches:  # accumulated
            state = torch.get_rng_state()
            theirs = plain(*batch, num_tokens)
            torch.set_rng_state(state)
            ours = model(*(take_own(each, model) for each in batch), num_tokens)
            assert ours["logits"].shape[0] * model.head.weight.device_mesh["batch"].size() == 8
            ours |= {"logits": ours["logits"].detach()}
            theirs |= {"logits": take_own(theirs["logits"], model).detach()}
            differences += [(ours[name] - theirs[name]).abs().max().item() for name in theirs]
            for loss in (ours["loss"], theirs["loss"]):
                (loss if reduction == "sum" else loss / 2).backward()
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (model, plain)]
        differences.append(abs(norms[0].item() - norms[1].item()))
        for each in optimizers:
            each.step()
            each.zero_grad()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        differences.append((mine.full_tensor() - other).abs().max().item())
    return max(differences)


def call(*batch, model=None, **options):
    (build(**options) if model is None else model)(*batch)


def backpropagate_rows():
    model = build()
    tokens, labels = (take_own(each, model) for each in draw(0))
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()


def own(count=1, seed=0, length=6):
    return draw(NUMBER + seed, rows=count, length=length)


REFUSED = {
    "no batch_dim": lambda: build(batch_dim=None),
    "a choice": lambda: build(rows="mine"),
    "the global batch": lambda: call(*draw(0)),
    "own rows in the other mode": lambda: call(*own(), rows="global"),
    "unequal rows": lambda: call(*own(1 + NUMBER // (int(SIZE) // 2))),
    "unequal lengths": lambda: call(*own(length=6 + NUMBER // (int(SIZE) // 2))),
    "own numbers of tokens": lambda: call(*own(), torch.tensor(1.0 + NUMBER)),
    "own numbers in Python": lambda: call(*own(), 1.0 + NUMBER),
    "a loss of rows": backpropagate_rows,
}


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    os.environ |= {"RANK": str(NUMBER), "WORLD_SIZE": SIZE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    told = {}
    cases = itertools.product(RULES, OPTIMIZERS, ("mean", "sum"))
    tries = {" ".join(case): lambda case=case: compare(*case) for case in cases}
    for name, function in (tries | REFUSED).items():
        try:
            told[name] = function()
        except lm.LayoutMapError as error:
            told[name] = error.what
        except Exception:
            told[name] = traceback.format_exc()
    (FOLDER / f"{NUMBER}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
