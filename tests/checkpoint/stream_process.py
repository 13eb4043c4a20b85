"""One of several processes that share models and stream or receive their weights; run by test_stream_processes.py."""

import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
import torch.distributed as dist
from cases import some
from checkpoint_models import assert_equal, make, make_on_mesh, read_files

import layoutmap as lm
from layoutmap.core.errors import CheckpointError
from layoutmap.engines.torch.engine import engine

NAMES = ("Mixtral", "Qwen3Moe", "DeepseekV3", "Llama", "LoRA")
TRIED = some(NAMES, "Mixtral", "Llama", "LoRA")  # stacked experts, tied weights, and adapters
SENT = some(NAMES, "Mixtral", "Llama")  # over a folder and over a socket
SECONDS = 240  # that no test waits for


def gather(model):
    """All tensors of a state, each unsharded."""
    return {
        name: torch.from_numpy(engine().to_numpy(tensor.detach()))
        for name, tensor in model.state_dict().items()
    }


def iterate(folder, dims):
    """Every process, or the first one, gets what a plain model has saved, and all end if the first one does."""
    first = dist.get_rank() == 0
    for name in TRIED:
        plain = make(name, dtype=torch.bfloat16)
        if first:
            plain.save_pretrained(folder / name)
        dist.barrier()
        model = make_on_mesh(name, dims, dtype=torch.bfloat16)
        expected = read_files(folder / name)
        assert_equal(expected, dict(lm.stream(model, names="checkpoint")))
        assert_equal(expected if first else {}, dict(lm.stream(model, names="checkpoint", processes="first")))
        seen = lm.stream(model, names="checkpoint", since={}, processes="first")
        dict(seen)
        assert (len(expected) if first else 0) == len(seen.checksums)

        lm.export(model, folder / f"{name}-exported", names="checkpoint")
        dist.barrier()
        assert_equal(expected, read_files(folder / f"{name}-exported"))
        other = make_on_mesh(name, dims, seed=1, dtype=torch.bfloat16)
        lm.load(other, folder / name, names="checkpoint")
        if name != "LoRA":
            assert_equal(plain.state_dict(), {n: t.full_tensor() for n, t in other.state_dict().items()})

    for _ in lm.stream(model, processes="first"):  # the first process wants no more, and the others are free
        break
    weights = lm.stream(model, processes="first")

    with pytest.raises(CheckpointError, match="cannot be sent" if first else "the first process could not"):
        weights.write(object())
    dist.barrier()


def exchange(folder, dims, verb, port):
    """One program sends, and another one in another layout receives: over a folder, a socket, and only changes."""
    first, sends = dist.get_rank() == 0, verb == "send"
    connection = None
    if first and sends:
        with socket.create_server(("127.0.0.1", int(port))) as server:
            (folder / "listens").touch()
            connection, _ = server.accept()
    elif first:
        while not (folder / "listens").exists():
            time.sleep(0.02)  # the core is for the others
        connection = socket.create_connection(("127.0.0.1", int(port)))
    for name in SENT:
        model = make_on_mesh(name, dims, seed=0 if sends else 1)
        end = None
        if first:
            end = folder / "exchange" if name in ("Mixtral", "DeepseekV3") else connection
        plain, old = make(name), make(name, seed=1).state_dict()
        if sends:
            weights = lm.stream(model, names="checkpoint", since={})
            weights.write(end, timeout_seconds=SECONDS)
        else:
            lm.receive(model, end, names="checkpoint", timeout_seconds=SECONDS)
            expected = {
                n: t if name != "LoRA" or "lora_" in n else old[n] for n, t in plain.state_dict().items()
            }
            assert_equal(expected, gather(model))
        if name == "Mixtral":
            with torch.no_grad():
                plain.model.layers[0].mlp.experts.down_proj[3] += 1
            if sends:
                lm.load(model, save(plain, folder), names="checkpoint")
                changed = lm.stream(model, names="checkpoint", since=weights.checksums)
                changed.write(end, timeout_seconds=SECONDS)
                if first:
                    assert 1 == sum(weights.checksums[n] != c for n, c in changed.checksums.items())
            else:
                lm.receive(model, end, names="checkpoint", timeout_seconds=SECONDS)
                assert_equal(plain.state_dict(), gather(model))

    # A model of other shapes: an error in all processes of both programs, and the weights are as they were.
    model = make_on_mesh("Llama" if sends else "Mixtral", dims, seed=2)
    before = gather(model)
    weights, options = lm.stream(model, names="checkpoint"), {"timeout_seconds": SECONDS}
    with pytest.raises(CheckpointError, match=r"refuses|could not|do not match this model|cannot receive"):
        weights.write(folder / "exchange", **options) if sends else lm.receive(
            model, folder / "exchange", names="checkpoint", **options
        )
    assert_equal(before, gather(model))
    if connection is not None:
        connection.close()
    dist.barrier()


def save(model, folder):
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "changed")
    dist.barrier()
    return folder / "changed"


def main(function, folder, dims, *arguments):
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"iterate": iterate, "exchange": exchange}[function](Path(folder), dims, *arguments)
    print("all is well", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
