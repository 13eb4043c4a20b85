"""What programs put around torch models, and models of transformers."""

from functools import partial

import forked
import pytest
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch_pairs import X, Y, assert_close, make_map, pair, seeded

import layoutmap as lm

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


class Checkpointed(nn.Module):
    """A model that computes its activations again in the backward pass."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 64)) for _ in range(2)
        )

    def forward(self, x):
        for block in self.body:
            x = (
                block(x)
                if self.use_reentrant is None
                else checkpoint(block, x, use_reentrant=self.use_reentrant)
            )
        return x


class CheckpointedMethod(nn.Module):
    """A model that computes a method of its own again, with a mask and plain tensors in it."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)

    def inner(self, x):
        return self.down(F.dropout(F.gelu(self.up(x)) * torch.ones(128), 0.2) + torch.arange(128.0) / 128)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class CheckpointedBlock(nn.Sequential):
    """A block that computes itself again, with a weight of the model."""

    def __init__(self, use_reentrant):
        super().__init__(nn.Linear(64, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 64))
        self.use_reentrant = use_reentrant

    def forward(self, x, scale):
        inner = super().forward
        return checkpoint(lambda x: inner(x * scale()), x, use_reentrant=self.use_reentrant)


class CheckpointedBlocks(nn.Module):
    """A model whose blocks gather their weights outside of the checkpoint."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(64))
        self.body = nn.ModuleList(CheckpointedBlock(use_reentrant) for _ in range(2))

    def forward(self, x):
        for block in self.body:
            x = block(x, lambda: self.scale)
        return x


class WrappedBlocks(nn.Module):
    """A model whose blocks torch has wrapped in checkpoints."""

    def __init__(self, use_reentrant):
        super().__init__()
        kind = CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT
        blocks = [
            nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 64)) for _ in range(2)
        ]
        self.body = nn.ModuleList(checkpoint_wrapper(block, checkpoint_impl=kind) for block in blocks)

    def forward(self, x):
        for block in self.body:
            x = block(x)
        return x


class TestTools:
    """What programs put around a model."""

    @pytest.mark.parametrize("kind", [Checkpointed, CheckpointedMethod, CheckpointedBlocks, WrappedBlocks])
    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("rows", [8, 3])
    def test_activation_checkpointing(self, kind, use_reentrant, rows):
        """Activations that are computed again are the same, dropout included."""
        rules = {
            r"(body\.\d\.(\w+\.)?0|up)\.weight": ("model", "batch"),
            r"(body\.\d\.(\w+\.)?3|down)\.weight": ("batch", "model"),
            "scale": ("batch",),
        }
        plain, model = pair(partial(kind, use_reentrant), rules)
        x = X[:rows].clone().requires_grad_()  # reentrant checkpoints want an input with a gradient
        for each in (plain, model):
            torch.manual_seed(5)
            F.mse_loss(each(x), Y[:rows]).backward()

        for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
            assert_close(expected.grad, parameter.grad)

    @pytest.mark.parametrize(
        "wrap", [fully_shard, nn.parallel.DistributedDataParallel, FullyShardedDataParallel]
    )
    def test_wrappers_for_several_processes(self, wrap):
        """Each is refused by one error, and the model stays as it is."""
        plain, model = pair()
        for module in (model, model.body):
            with pytest.raises(lm.ScopeError, match="is sharded already"):
                wrap(module)

        assert_close(plain(X), model(X))

    def test_resized_embeddings(self):
        """A vocabulary that grows is refused with a fix for the caller, and one of the same size is left alone."""
        sizes = {
            "n_embd": 8,
            "n_layer": 1,
            "n_head": 2,
            "n_positions": 8,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        config = transformers.GPT2Config(vocab_size=16, **sizes)
        _, model = pair(lambda: transformers.GPT2LMHeadModel(config), {r".*wte\.weight": ("batch", None)})
        model.resize_token_embeddings(16)
        with pytest.raises(lm.ScopeError, match="resize the model before"):
            model.resize_token_embeddings(20)

        assert (16, 8) == model.get_input_embeddings().weight.shape

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_activation_checkpointing_where_draws_are_by_tiles(self, use_reentrant):
        """Activations that are computed again have dropped what was dropped before."""
        layout_map = make_map({r"body\.\d\.0\.weight": ("model", "batch")})
        gradients = []
        for how in (None, use_reentrant):
            model = layout_map.build(
                lambda how=how: seeded(partial(Checkpointed, how)),
                batch_dim="batch",
                library="torch",
                draws="tiles",
            )
            torch.manual_seed(5)
            F.mse_loss(model(X.clone().requires_grad_()), Y).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])

        for one, other in zip(*gradients, strict=True):
            assert_close(one, other)

    def test_autocast(self):
        """Under autocast the loss is that of one device under autocast, to the precision of bfloat16."""
        plain, model = pair()
        losses = []
        for each in (plain, model):
            with torch.autocast("cpu", torch.bfloat16):
                output = each(X)
            losses.append(F.mse_loss(output.float(), Y))
            losses[-1].backward()
            assert torch.bfloat16 == output.dtype

        assert_close(*losses, 2e-2)
        assert_close(plain.body[0].weight.grad, model.body[0].weight.grad, 2e-2)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "pad_token_id": 0,
    "use_cache": False,
}
TP = {
    r".*(q|k|v)_proj\.weight": ("model", None),
    r".*(gate|up)_proj\.weight": ("model", None),
    r".*(o|down)_proj\.weight": (None, "model"),
    r".*embed_tokens\.weight": (None, "model"),
    r"lm_head\.weight": ("model", None),
}


def test_models_of_transformers_generate():
    """Greedy generation with a cache gives the tokens of the plain model."""
    plain, model = pair(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), TP)
    ids = torch.arange(1, 9).view(2, 4) * 31
    expected, actual = (
        each.eval().generate(ids, max_new_tokens=4, do_sample=False, use_cache=True)
        for each in (plain, model)
    )

    assert torch.equal(expected, actual)


@pytest.mark.parametrize(
    ("rules", "parts"),
    [({}, 2), ({r"0\.weight": ("model", None), r"2\.weight": (None, "model")}, 4)],
    ids=["the batch sharded", "and weights"],
)
def test_operations_of_one_device_are_counted(rules, parts):
    """`FlopCounterMode` counts what one of the devices computes, at the first step as at the next, and says so."""

    def make():
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def counted(model):
        with FlopCounterMode(display=False) as mode:
            model(torch.ones(16, 16)).sum().backward()
        return mode.get_total_flops()

    model = lm.LayoutMap("batch=2,model=2", rules, rest="replicated").build(
        make, library="torch", batch_dim="batch"
    )
    with pytest.warns(lm.LayoutMapWarning, match="counts the operations of one device"):
        first = counted(model)

    assert [counted(make()) / parts] * 2 == [first, counted(model)]


LATE = """
import sys, torch, layoutmap as lm
assert "safetensors" not in sys.modules
layout_map = lm.LayoutMap("batch=2,model=2", {}, rest="replicated")
model = layout_map.build(lambda: torch.nn.Linear(4, 4), library="torch", batch_dim="batch")
import safetensors.torch
file = safetensors.torch.save(model.state_dict())
assert sorted(safetensors.torch.load(file)) == ["bias", "weight"]
"""


@pytest.mark.every_case
def test_libraries_are_imported_after_a_model_is_sharded():
    """A package lacks the name of a module of its own while that is imported, and transformers imports safetensors."""
    ended = forked.run(LATE)

    assert 0 == ended.returncode, ended.stderr
