"""`from_pretrained` of transformers in a scope: the values of one device, each weight read into its shards."""

from __future__ import annotations

import pytest
import torch
import transformers
from cases import few
from torch.utils._python_dispatch import TorchDispatchMode
from transformers_models import SIZES, WITH_A_PLAN, WITHOUT

import layoutmap as lm
from layoutmap.core.errors import ScopeError
from layoutmap.engines.torch.engine import engine

BIG = {**SIZES, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 256}
LLAMA = {r".*(q|k|v|gate|up)_proj\.weight": ("model", None), r".*(o|down)_proj\.weight": (None, "model")}
ANY = {
    **LLAMA,
    r".*experts\.gate_up_proj": (None, "model", None),
    r".*experts\.down_proj": (None, None, "model"),
    r".*(c_attn|c_fc|query|key|value|intermediate\.dense|wi)\.weight": ("model", None),
    r".*(c_proj|output\.dense|wo|embeddings?)\.weight": (None, "model"),
}
MODELS = {
    **{name: entry[:2] for name, entry in {**WITH_A_PLAN, **WITHOUT}.items()},
    "gpt2": (
        "GPT2LMHeadModel",
        lambda: transformers.GPT2Config(vocab_size=64, n_embd=128, n_layer=1, n_head=4, n_positions=64),
    ),
    "qwen3": ("Qwen3ForCausalLM", lambda: transformers.Qwen3Config(**BIG, tie_word_embeddings=True)),
    "big mixtral": ("MixtralForCausalLM", lambda: transformers.MixtralConfig(**BIG, num_local_experts=4)),
    "bf16 llama": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**BIG)),
}


def make_map(rules=LLAMA, mesh="batch=2,model=2"):
    return lm.LayoutMap(mesh, rules, rest="replicated")


def saved(folder, name, **options):
    """A checkpoint of a small model, as transformers writes it."""
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config())
    model.save_pretrained(folder, **options)
    return getattr(transformers, kind)


def values_of(model):
    return {
        name: torch.from_numpy(engine().to_numpy(tensor.detach().float()))
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def assert_alike(model, plain):
    """Same names, types, modes and bits."""
    of_model, of_plain = values_of(model), values_of(plain)
    assert list(of_plain) == list(of_model)
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (name, one.dtype, one.requires_grad) == (name, other.dtype, other.requires_grad)
        assert torch.equal(of_plain[name], of_model[name]), name
    assert plain.training == model.training


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operation made, in bytes: those of a mapped file are no operation's."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        fresh = not any(alias.alias_info for alias in func._schema.returns)
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if fresh and type(tensor) is torch.Tensor and not tensor.is_meta:
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return made


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")  # a rule for what a model does not have
@pytest.mark.parametrize("name", few(MODELS, "bf16 llama"))
@pytest.mark.parametrize("shards", few(["1GB", "20KB"], "20KB"))
def test_weights_are_those_of_one_device(tmp_path, name, shards):
    """From one file or several, in the type that is asked for, with ties; and what is told of the keys is the same."""
    kind = saved(tmp_path, name, max_shard_size=shards)
    options = {"dtype": torch.bfloat16} if name.startswith("bf16") else {}
    plain, of_plain = kind.from_pretrained(tmp_path, **options, output_loading_info=True)
    with make_map(ANY).scope(batch_dim="batch", library="torch") as scope:
        model, of_model = kind.from_pretrained(tmp_path, **options, output_loading_info=True)

    assert of_plain == of_model
    assert_alike(model, plain)
    assert [] == [a.variable.path for a in scope.plan.assignments if a.global_init]


def test_a_tensor_is_not_made_before_its_shards_are(tmp_path):
    """While a model is loaded and converted, no tensor is made that is larger than a shard or the piece in progress."""
    sizes = {**SIZES, "hidden_size": 1024, "intermediate_size": 4096}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path)
    layout_map = make_map({r".*_proj\.weight": ("model", None)}, "model=8")
    with Largest() as largest:
        model = layout_map.build(
            lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16),
            library="torch",
        )

    assert 2 * 4096 * 1024 == max(p.numel() * p.element_size() for p in model.parameters())
    assert largest.num_bytes <= 4096 * 1024 * 2 / 8 + (1 << 20)


def test_other_ways_to_place_weights_are_refused(tmp_path):
    """What transformers would place or store in its own way is refused in a scope by name, before weights are read."""
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    for loader in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        for name, value in {"device_map": "auto", "tp_plan": "auto", "quantization_config": {}}.items():
            refused = pytest.raises(ScopeError, match=f"from_pretrained: {name}= cannot be used in a scope")
            with refused as raised, make_map().scope(library="torch"):
                loader.from_pretrained(tmp_path, **{name: value})
            assert "LayoutMap.from_tp_plan" in raised.value.fix


def test_a_transformers_without_the_hook_is_refused(tmp_path, monkeypatch):
    """A version that reads tensors in another way is refused by its name; outside of scopes nothing is replaced."""
    loading = transformers.core_model_loading
    plain = loading.spawn_materialize
    with make_map({}).scope(library="torch"):
        kept = torch.nn.Linear(8, 8)
        assert plain is not loading.spawn_materialize, kept
    assert plain is loading.spawn_materialize
    monkeypatch.setattr(loading, "spawn_materialize", lambda pool, what: None)
    refused = pytest.raises(ScopeError, match=f"transformers {transformers.__version__} is not supported")
    with refused, make_map().scope(library="torch"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)


def test_keys_that_do_not_fit_are_told_of_as_without_a_scope(tmp_path):
    """Missing weights are initialized as on one device, unexpected ones are left out; transformers reports both."""
    torch.manual_seed(0)
    base = transformers.LlamaModel(transformers.LlamaConfig(**BIG))
    base.save_pretrained(tmp_path, state_dict={**base.state_dict(), "extra": torch.zeros(8)})
    torch.manual_seed(1)
    plain, of_plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    after = torch.rand(())
    torch.manual_seed(1)
    with make_map().scope(library="torch"):
        model, of_model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)

    assert {"lm_head.weight"} == set(of_model["missing_keys"])
    assert {"extra"} == set(of_model["unexpected_keys"])
    assert of_plain == of_model
    assert after == torch.rand(())
    assert_alike(model, plain)


def test_a_plan_reads_nothing(tmp_path):
    """A dry run knows each weight, and its type, from the checkpoint's configuration; no value is made of a file."""
    kind = saved(tmp_path, "bf16 llama")
    with Largest() as largest:
        plan = lm.plan(
            lambda: kind.from_pretrained(tmp_path, dtype=torch.bfloat16), make_map(), library="torch"
        )

    weights = {a.variable.path: a.variable.dtype for a in plan.assignments if a.variable.kind == "weight"}
    assert dict.fromkeys(dict(kind.from_pretrained(tmp_path).named_parameters()), "bfloat16") == weights
    assert largest.num_bytes < 256 * 128 * 2


def test_a_missing_embedding_is_tied_to_the_one_that_is_there(tmp_path):
    """One tensor under two names stays one in a layout, with one path and an alias."""
    saved(tmp_path, "qwen3")
    model = make_map().build(
        lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path), library="torch"
    )

    assert model.lm_head.weight is model.model.embed_tokens.weight
