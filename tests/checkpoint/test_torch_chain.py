"""Processes of torch save a model, others load it and train on."""

from pathlib import Path

import pytest
import torch
from checkpoint import chain_laws
from checkpoint.chains import BATCH
from checkpoint.torch_chain_process import Net

PROCESSES = ("torch",)


class TestTorch(chain_laws.Laws):
    worker = Path(__file__).with_name("torch_chain_process.py")
    optimizer = torch.optim.AdamW
    stages = ((2, "batch=1,model=2"), (1, "batch=1,model=1"), (4, "batch=2,model=2"))

    @classmethod
    def environment(cls, num_processes):
        return {"OPTIMIZER": cls.optimizer.__name__}

    def plain_losses(self, count):
        torch.manual_seed(0)
        model, losses = Net(), []
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for step in range(count):
            optimizer.zero_grad()
            loss = (model(torch.from_numpy(BATCH(step))) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


@pytest.mark.long  # test_torch_optimizers.py loads its rows and columns on another mesh
class TestAdafactor(TestTorch):
    """Its rows and columns are saved and loaded as shards, too."""

    optimizer = torch.optim.Adafactor
