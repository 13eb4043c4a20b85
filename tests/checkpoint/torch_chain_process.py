"""One of several processes of torch that save, load and train a model; run by test_torch_chain.py."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint.chains import BATCH, Worker
from torch import nn

torch.set_num_threads(1)
OPTIMIZER = getattr(torch.optim, os.environ.get("OPTIMIZER", "AdamW"))


class Net(nn.Module):
    """Weights of several MB, a frozen one, and a count that is no weight."""

    def __init__(self, width=1024):
        super().__init__()
        self.up = nn.Linear(8, width)
        self.middle = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, 8)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count += 1
        return self.down(torch.tanh(self.middle(torch.tanh(self.up(x))))) + self.frozen


class TorchWorker(Worker):
    """What this does in torch."""

    def make_model(self):
        torch.manual_seed(self.seed)
        return Net()

    def make_optimizer(self, model):
        return OPTIMIZER([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def train(self, model, optimizer, steps):
        losses = []
        for step in steps:
            x = torch.from_numpy(BATCH(step))
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def arrays(self, model, optimizer):
        found = dict(model.named_parameters())
        for name, parameter in model.named_parameters():
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.distributed.tensor.DTensor):
                    found[f"{name}.{slot}"] = value
        return found


def main():
    number, folder, port, size = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    # What torchrun would set; the engine joins the group by itself.
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    TorchWorker("torch", number, size, folder, *sys.argv[5:]).work()
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
