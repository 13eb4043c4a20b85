"""Train a small Llama of Hugging Face transformers on this repository's docs, sharded by its own tp_plan.

In one process, on 8 simulated devices:

    python examples/train_torch_llama.py                                      on two meshes
    python examples/train_torch_llama.py --mesh batch=8,model=1 --steps 100   on another mesh
    python examples/train_torch_llama.py --mesh batch=64,model=4 --plan-only  only the plan, which needs no devices

In 4 processes on this machine, with one device each:

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_torch_llama.py

The model and the training loop are ordinary torch, without any knowledge of meshes. The losses are equal on every mesh
and in any number of processes. Without transformers, the example trains the GPT in this file.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import time

import torch
from torch import nn
from torch.nn import functional as F

import layoutmap as lm

try:
    import transformers
except ModuleNotFoundError:
    transformers = None

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 128, 64, 64, 4, 2
BATCH = 16
ROOT = pathlib.Path(__file__).resolve().parents[1]
IS_FIRST = os.environ.get("RANK", "0") == "0"


class Block(nn.Module):
    """Attention, then two linear layers, each with a normalization before and a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder over characters."""

    tp_plan = {  # noqa: RUF012 - as in transformers
        "tokens": "embedding_rowwise",
        **{f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")},
        "blocks.*.o": "rowwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text):
        x = self.tokens(text) + self.places(torch.arange(text.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def make_model() -> nn.Module:
    """Return the model. It is ordinary torch, without any knowledge of meshes."""
    if transformers is None:
        return GPT()
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=BLOCKS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=LENGTH,
            pad_token_id=0,
            use_cache=False,
        )
    )


def make_map(mesh: lm.Mesh) -> lm.LayoutMap:
    """Return a layout map from the model's tensor parallel plan, with rules for its other weights."""
    layout_map = lm.LayoutMap.from_tp_plan(make_model, mesh, batch_dim="batch")
    layout_map[r".*norm\d?\.(weight|bias)$"] = (None,)
    if transformers is None:
        layout_map[r"places\.weight$"] = (None, None)
    else:
        layout_map[r".*inv_freq$"] = (None,)
    return layout_map


def read_documentation(num_batches: int) -> torch.Tensor:
    """Return the text of this repository's documentation, shape (num_batches, BATCH, LENGTH + 1)."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = [byte for page in pages for byte in page.read_bytes() if byte < VOCABULARY]
    wanted = num_batches * BATCH * (LENGTH + 1)
    text *= math.ceil(wanted / len(text))
    rows = torch.tensor(text[:wanted]).view(-1, LENGTH + 1)
    shuffled = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return shuffled.view(num_batches, BATCH, LENGTH + 1)


def train(mesh: lm.Mesh, steps: int) -> list[float]:
    """Plan, create, and train the model on one mesh, and return the loss of every step."""
    layout_map = make_map(mesh)
    print_first(f"\n== mesh {mesh}: the plan, nothing allocated\n\n{lm.plan(make_model, layout_map)}\n")

    torch.manual_seed(0)
    start = time.perf_counter()
    with layout_map.scope(batch_dim="batch", strict=True):
        model = make_model()
    print_first(f"== created in {time.perf_counter() - start:.1f} s")

    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses: list[float] = []
    start = time.perf_counter()
    for rows in read_documentation(steps):
        logits = model(rows[:, :-1])
        logits = logits if transformers is None else logits.logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print_first(f"== trained {steps} steps in {time.perf_counter() - start:.1f} s\n")
    for step in sorted({0, *range(9, steps, 10), steps - 1}):
        print_first(f"   step {step + 1:>4}   loss {losses[step]:.4f}")
    return losses


def print_first(text: str) -> None:
    """Print a text in the first of several processes."""
    if IS_FIRST:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mesh",
        action="append",
        help='as in "batch=2,model=4"; may be given several times',
    )
    parser.add_argument("--steps", type=int, default=30, help="training steps on each mesh (default: 30)")
    parser.add_argument("--plan-only", action="store_true", help="print the plan and stop")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if transformers is not None:
        transformers.logging.set_verbosity_error()
    devices = int(os.environ.get("WORLD_SIZE", "8"))
    meshes = (
        args.mesh
        or [f"batch=2,model={devices // 2}", f"batch={devices // 2},model=2"][: 1 if devices < 8 else 2]
    )
    if args.plan_only:
        for mesh in map(lm.create_mesh, meshes):
            print_first(str(lm.plan(make_model, make_map(mesh))))
        return
    runs = {mesh: train(lm.create_mesh(mesh), args.steps) for mesh in meshes}
    if len(runs) > 1:
        print_first("\n== the same model, the same seed, the same text\n")
        for mesh, losses in runs.items():
            print_first(f"   mesh {mesh:<16} first loss {losses[0]:.4f}   last loss {losses[-1]:.4f}")
        difference = max(max(each) - min(each) for each in zip(*runs.values(), strict=True))
        print_first(f"\n   largest difference between two losses of one step: {difference:.1e}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
