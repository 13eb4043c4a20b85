"""One of four processes that compute with DTensors; run by test_wrong_numbers.py."""

import json
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import some
from engines.torch import test_slices
from engines.torch.beside_plain import outcome
from engines.torch.custom_operators import DIFFERENTIABLE
from engines.torch.dtensors import alone, place, run_on, whole
from engines.torch.masked import drawn_on
from engines.torch.test_wrong_numbers import normal

import layoutmap as lm

ATTEND = F.scaled_dot_product_attention


def statistics(x, mean, variance):
    F.batch_norm(x, mean, variance, training=True)
    return mean, variance


def assigned(x, y):
    x = x * 1
    x[2:4] = y[:2]
    return x


X, Y, LABELS = normal(8, 6), normal(8, 6, seed=1), torch.tensor([-100, -100, 3, -100, 2, 0, -100, 5])
HEADS = [normal(8, 4, 6, 2, seed=seed) for seed in range(3)]
ROWS = ("batch", None)
# What is computed, and with which arguments in which layouts.
CASES = {
    "mse_loss": (F.mse_loss, [(X, ROWS), (Y, ROWS)]),
    "huber_loss": (F.huber_loss, [(X, ("batch", "model")), (Y, ("batch", "model"))]),
    "cross_entropy": (F.cross_entropy, [(X, ROWS), (LABELS, ("batch",))]),
    "batch_norm": (statistics, [(X, ROWS), (torch.zeros(6), (None,)), (torch.ones(6), (None,))]),
    "assignment": (assigned, [(X, ROWS), (Y, ROWS)]),
    "dropout": (lambda x: F.dropout(x, 0.4), [(X, ("batch", "model"))]),
    "normal_": (lambda x: torch.empty_like(x).normal_(), [(X, ("batch", "model"))]),
}
# What DTensor alone cannot do.
MORE = {
    "attention": (
        lambda *qkv: ATTEND(*qkv, is_causal=True),
        [(x, ("batch", "model", None, None)) for x in HEADS],
    ),
    "attention with dropout": (
        lambda *qkv: ATTEND(*qkv, dropout_p=0.3),
        [(x, ("batch", "model", None, None)) for x in HEADS],
    ),
    "conv1d": (
        F.conv1d,
        [
            (normal(8, 4, 6), ("batch", None, None)),
            (normal(6, 4, 3), ("model", None, None)),
            (normal(6), ("model",)),
        ],
    ),
    "group_norm": (lambda x: F.group_norm(x, 2), [(normal(8, 4, 6), ("batch", "model", None))]),
    "cross_entropy, classes sharded": (
        lambda x, labels: F.cross_entropy(x, labels, label_smoothing=0.1),
        [(X, ("batch", "model")), (LABELS, ("batch",))],
    ),
    "cdist": (torch.cdist, [(X, ROWS), (Y, ROWS)]),
} | {
    f"custom operator, {name}": (function, [(each, ("model", "batch")[: each.ndim]) for each in arguments])
    for name, (function, arguments) in DIFFERENTIABLE.items()
    if name in some(DIFFERENTIABLE, "parts", "linear_cross_entropy, bias")
}
BY_TILES = ("dropout", "dropout2d", "attention")


def agree(one, other):
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(one, other, strict=True))


def compared(case, with_alone):
    """Whether a case is right here, and whether it is right in DTensor alone."""
    function, arguments = case
    expected = outcome(function, [tensor.clone() for tensor, _ in arguments])

    def laid_out():
        return outcome(function, [place(tensor, *specs) for tensor, specs in arguments])

    with run_on(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.ops.*computed on gathered tensors")
        right = agree(expected, laid_out())
    if not with_alone:
        return right, False
    with alone():
        return right, agree(expected, laid_out())


def of_slices():
    """Which changes of slices outside of calls are not those of one device."""
    wrong = []
    for name, change in test_slices.OUTSIDE.items():
        expected, laid_out = normal(8, 6), test_slices.outside()
        change(expected)
        change(laid_out)
        wrong += [] if torch.allclose(expected, whole(laid_out)) else [name]
    return wrong


def kept_by_one_process():
    """The sum of a tensor that was changed while one process, and no other, keeps a slice."""
    laid_out = place(torch.ones(8, 6), "batch", "model")
    part = laid_out[0]
    kept = [part] if dist.get_rank() == 0 else []
    del part
    laid_out.mul_(2)
    assert all(repr(each).endswith("(outdated: take it again)") for each in kept)
    return laid_out.sum().item()


def main():
    number, folder, port = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    found = {name: compared(case, True) for name, case in CASES.items()}
    found |= {name: compared(case, False) for name, case in MORE.items()}
    total = place(torch.arange(8.0), "batch").sum()
    with run_on():
        read = [
            float(total),
            total.item(),
            total.tolist(),
            float(f"{total:.1f}"),
            float(total.detach().numpy()),
        ]
        made_inside = place(torch.arange(8.0), "batch").sum()
    told = {"read": read, "read later": made_inside.item()}
    with alone():
        told["read alone"] = total.item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lm.LayoutMapWarning)  # what is written back is gathered
        told["slices"] = of_slices()
        told["kept by one"] = kept_by_one_process()
    told["drawn by tiles"] = {
        name: [each.tolist() for each in drawn_on("batch=2,model=2", ("batch", "model"), name)]
        for name in BY_TILES
    }
    (folder / f"{number}.json").write_text(json.dumps({"compared": found, **told}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
