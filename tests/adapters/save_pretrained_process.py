"""How two processes save a model of transformers in layouts; run by hugging_face_process.py."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
import transformers
from hugging_face_models import make_llama, make_map, tied

import layoutmap as lm
from layoutmap.core.errors import CheckpointError


def assert_saved(folder, make=make_llama):
    """What plain transformers reads is what it reads of a plain model that it has saved itself, bit for bit."""
    plain = make()
    found = type(plain).from_pretrained(folder)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name]), name
    # The other process may already write the next folder, which is hidden until it is complete.
    assert not list(folder.parent.glob(f".{folder.name}.*")), "something hidden was left"


def make_tied():
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(tied()).to(torch.bfloat16)


def mixture():
    torch.manual_seed(2)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))


def listed(folder):
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def main(folder):
    first = dist.get_rank() == 0
    model = make_map("model=2").build(make_llama, library="torch")
    model.save_pretrained(folder / "several", max_shard_size="20KB")
    if first:
        make_llama().save_pretrained(folder / "theirs", max_shard_size="20KB")
        assert listed(folder / "theirs") == listed(folder / "several")
        for name in ("config.json", "model.safetensors.index.json"):
            texts = {(folder / each / name).read_text() for each in ("theirs", "several")}
            assert len(texts) == 1, texts
    assert_saved(folder / "several")

    # One file into the same folder: the index and the files of before go.
    model.save_pretrained(folder / "several")
    names = {path.name for path in (folder / "several").iterdir()}
    assert {"model.safetensors"} == {name for name in names if "safetensors" in name}
    assert_saved(folder / "several")

    small = make_map("model=2").build(make_tied, library="torch")
    small.save_pretrained(folder / "tied")
    assert_saved(folder / "tied", make_tied)

    # transformers stores each expert, which the model has in one tensor: gathered, as in one process.
    experts = make_map("model=2").build(mixture, library="torch")
    experts.save_pretrained(folder / "experts")
    dist.barrier()
    assert_saved(folder / "experts", mixture)

    export(folder)

    # A process that cannot write: it is an error in both, and what was there is as it was.
    before, write = listed(folder / "several"), os.pwrite
    if not first:
        os.pwrite = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    for target in ("several", "new"):
        with pytest.raises(CheckpointError, match=r"cannot be written|cannot save"):
            model.save_pretrained(folder / target, max_shard_size="20KB")
        dist.barrier()
    if not first:
        os.pwrite = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(CheckpointError if first else KeyboardInterrupt):
        model.save_pretrained(folder / "several", max_shard_size="20KB")
    os.pwrite = write
    dist.barrier()
    assert before == listed(folder / "several")
    assert not (folder / "new").exists()
    assert_saved(folder / "several")
    with pytest.raises(CheckpointError, match=r"is a file|cannot save"):
        model.save_pretrained(folder / "several" / "config.json")
    assert isinstance(lm.dtensor.fetch_layout(model.lm_head.weight), lm.Layout)


def export(folder):
    """Export models of which each process has a part."""
    first = dist.get_rank() == 0
    for name, make in (("exported", make_llama), ("exported tied", make_tied)):
        model = make_map(f"model={dist.get_world_size()}").build(make, library="torch")
        lm.export(model, folder / name)
        if first:
            model.config.save_pretrained(folder / name)
        dist.barrier()
        assert_saved(folder / name, make)
    with pytest.raises(
        CheckpointError, match="the folder exists already" if first else "the first process could not"
    ):
        lm.export(model, folder / name)


def die_in_a_save(folder):
    """Die as the first shard is to be written."""
    model = make_map("model=2").build(make_llama, library="torch")
    os.pwrite = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    model.save_pretrained(folder / "several")
