"""A small Llama, plain and in layouts, and data for it."""

import torch
import transformers

import layoutmap as lm
from layoutmap.engines.torch.engine import engine

RULES = {
    r".*(q|k|v|gate|up)_proj\.weight": ("model", None),
    r".*(o|down)_proj\.weight": (None, "model"),
    r".*(embed_tokens|lm_head)\.weight": ("model", None),
}
ROWS = torch.randint(1, 64, (12, 8), generator=torch.Generator().manual_seed(3))
DATA = [{"input_ids": row, "labels": row} for row in ROWS]


def make_llama():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def tied():
    """The configuration of a model whose head is its table."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return transformers.LlamaConfig(**sizes, tie_word_embeddings=True)


def make_map(mesh="batch=2,model=2"):
    return lm.LayoutMap(mesh, RULES, rest="replicated")


def on_mesh(make=make_llama):
    return make_map().build(make, library="torch", batch_dim="batch")


def value_of(tensor):
    return torch.from_numpy(engine().to_numpy(tensor.detach().float()))


def assert_alike(model, plain, atol=1e-5):
    """Every parameter has the value that it has on one device, and is trained if it is there."""
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(theirs) == list(ours)
    for name, one in theirs.items():
        torch.testing.assert_close(value_of(ours[name]), value_of(one), rtol=0, atol=atol, msg=name)
        assert (name, one.requires_grad) == (name, ours[name].requires_grad)


def train(model, clip=1.0):
    """The losses and the norms of gradients in three steps."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    told = []
    for rows in ROWS.split(4):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        told += [loss.item(), norm.item()]
    return told
