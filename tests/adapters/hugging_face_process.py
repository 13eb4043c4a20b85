"""One of several processes with tools of Hugging Face; run by test_torch_hugging_face.py."""

import json
import os
import sys
from pathlib import Path

import hugging_face_training_process
import peft
import pytest
import safetensors.torch
import save_pretrained_process
import torch
import torch.distributed as dist
import transformers
from hugging_face_models import assert_alike, make_llama, train

import layoutmap as lm
from layoutmap.core.errors import LayoutMapError, ScopeError

WIDE = {"vocab_size": 64, "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 1}


def num_bytes(what):
    """Of this process: the memory that it has, or had at most; the pages of mapped files that it has count, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{what}:"))


def peak_anew():
    """The memory that this process has, from which on the most it has is measured anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return num_bytes("VmRSS")


def load(folder):
    """A checkpoint as bfloat16, sharded by rows, and how much more memory that took at most."""
    layout_map = lm.LayoutMap(
        "model=2", {r".*(proj|embed_tokens|lm_head)\.weight": ("model", None)}, rest="replicated"
    )
    dist.barrier()
    before = peak_anew()
    model = layout_map.build(
        lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        library="torch",
    )
    return model, num_bytes("VmHWM") - before


def use_tools(folder):
    if dist.get_rank() == 0:
        config = transformers.LlamaConfig(**WIDE, num_attention_heads=8, num_key_value_heads=8)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / "wide")
        make_llama().save_pretrained(folder / "small")
    torch.manual_seed(dist.get_rank())  # all values are in the files, so nothing needs a seed
    load(folder / "small")  # imports, and what is kept after a first time
    model, grown = load(folder / "wide")
    torch.manual_seed(0)
    of_file = sum(path.stat().st_size for path in (folder / "wide").glob("*.safetensors"))
    print(f"a file of {of_file >> 20} MiB: {grown >> 20} MiB", flush=True)
    assert grown < of_file * (0.5 + 0.25) + (40 << 20)  # half of its pages, and that in half the bytes
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "wide", dtype=torch.bfloat16)
    assert_alike(model, plain, 0)
    dist.barrier()
    before = peak_anew()
    model.save_pretrained(folder / "saved")
    grown = num_bytes("VmHWM") - before
    print(f"saved: {grown >> 20} MiB", flush=True)
    # The file has four bytes an element, what is saved two: no weight is gathered
    assert grown < of_file // 8
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "saved", dtype=torch.bfloat16)
    assert_alike(saved, plain, 0)

    with pytest.raises(ScopeError, match="is sharded over several processes"):
        safetensors.torch.save_file(model.state_dict(), folder / f"{dist.get_rank()}.safetensors")
    with pytest.raises(ScopeError, match="DistributedDataParallel: LlamaForCausalLM is sharded already"):
        torch.nn.parallel.DistributedDataParallel(model)
    assert 6 == len(train(model))
    small, _ = load(folder / "small")
    train(small)  # adapters may come late
    torch.manual_seed(dist.get_rank())
    adapted = peft.get_peft_model(small, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(LayoutMapError, match=r"lora_A\.default\.weight: its values differ between processes"):
        train(adapted)


WORK = {
    "tools": use_tools,
    "exported": save_pretrained_process.export,
    "saved": save_pretrained_process.main,
    "killed": save_pretrained_process.die_in_a_save,
    "trained": hugging_face_training_process.main,
}


def main(work):
    """Do one piece of work after the other: each is its name, its folder and other arguments."""
    is_alone = os.environ["WORLD_SIZE"] == "1"
    if not is_alone:
        dist.init_process_group("gloo")
    for name, folder, *arguments in work:
        WORK[name](Path(folder), *arguments)
        if not is_alone:
            dist.barrier()
        print(f"{name}: all is well", flush=True)
    if not is_alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
