"""Models of transformers, loaded into models of keras-hub and flax.nnx in layouts, and exported again."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import jax.numpy as jnp
import keras_hub
import numpy as np
import pytest
from flax import nnx
from real_jax_models import tunix
from safetensors.numpy import load_file

import layoutmap as lm
from layoutmap.checkpoint.foreign import open_checkpoint_source
from layoutmap.checkpoint.name_tables import read_name_table

pytestmark = [
    # A rule for the other kind of Gemma's attention
    pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:tunix"),
    pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning"),
]
hub: Any = keras_hub.models
TOKENS = np.arange(8, dtype="int32")[None] * 7 % 64
DECODER: dict[str, Any] = {
    "vocabulary_size": 64,
    "num_layers": 2,
    "num_query_heads": 8,
    "num_key_value_heads": 4,
    "hidden_dim": 32,
    "intermediate_dim": 64,
    "layer_norm_epsilon": 1e-6,
}
LLAMA = DECODER | {"rope_max_wavelength": 1e6}
QWEN = DECODER | {"rope_max_wavelength": 1e4, "tie_word_embeddings": False}
GEMMA = DECODER | {"intermediate_dim": 128, "head_dim": 8}  # keras-hub counts gate and up as one
GEMMA2 = GEMMA | {
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "final_logit_soft_cap": 30.0,
    "attention_logit_soft_cap": 50.0,
    "sliding_window_size": 4,
    "use_sliding_window_attention": True,
}
KERAS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hub.Llama3CausalLM(hub.Llama3Backbone(**LLAMA)),
    "qwen": lambda: hub.QwenCausalLM(hub.QwenBackbone(**QWEN)),
    "gemma": lambda: hub.GemmaCausalLM(hub.GemmaBackbone(**GEMMA | {"num_key_value_heads": 8})),
    "gemma2": lambda: hub.GemmaCausalLM(hub.GemmaBackbone(**GEMMA2)),
}
NNX: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (
        "llama3",
        "Llama3",
        {"head_dim": 4, "vocab_size": 64, "rope_theta": 1_000_000, "norm_eps": 1e-6},
    ),
    "qwen": ("qwen2", "Qwen2", {"head_dim": 4, "vocab_size": 64, "rope_theta": 10_000, "norm_eps": 1e-6}),
    "gemma": (
        "gemma",
        "Gemma",
        {
            "head_dim": 8,
            "num_embed": 64,
            "num_kv_heads": 8,
            "final_logit_softcap": None,
            "use_post_attn_norm": False,
            "use_post_ffw_norm": False,
            "attention_types": ("GLOBAL", "GLOBAL"),
        },
    ),
    "gemma2": (
        "gemma",
        "Gemma",
        {
            "head_dim": 8,
            "num_embed": 64,
            "final_logit_softcap": 30.0,
            "use_post_attn_norm": True,
            "use_post_ffw_norm": True,
            "attention_types": ("LOCAL_SLIDING", "GLOBAL"),
            "attn_logits_soft_cap": 50.0,
            "sliding_window_size": 4,
        },
    ),
}


def make_nnx(family: str) -> Any:
    module, name, options = NNX[family]
    found = tunix(module)
    sizes = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64, "num_heads": 8, "num_kv_heads": 4} | options
    if kinds := sizes.get("attention_types"):
        sizes["attention_types"] = tuple(getattr(found.AttentionType, kind) for kind in kinds)
    return getattr(found, name)(found.ModelConfig(**sizes), rngs=nnx.Rngs(0))


@functools.cache
def loaded(family: str, library: str, folder: Path) -> tuple[str, Any, Any]:
    """The name of the table, the model in layouts on 2x4, and its logits."""
    mesh = lm.create_mesh("batch=2,model=4")
    preset = family.rstrip("2")
    if library == "keras":
        layout_map = lm.LayoutMap.preset(preset, mesh)
        model = lm.load(KERAS[family], folder / family, layout_map=layout_map, names=family)
        return family, model, model({"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)})
    layout_map = lm.LayoutMap.preset(f"{preset}_nnx", mesh)
    table = f"{family}_nnx"
    model = lm.load(
        lambda: make_nnx(family), folder / family, layout_map=layout_map, names=table, library="jax"
    )
    positions, mask = jnp.arange(8)[None], jnp.tri(8, dtype=bool)[None]
    return table, model, model(TOKENS, positions, None, mask)[0]


def tensors(folder: Path) -> dict[str, bytes]:
    """The bits of all tensors of a folder, as the library safetensors reads them."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: array.tobytes() for file in files for name, array in load_file(file).items()}


@pytest.fixture(scope="module")
def other_side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, forked.Running]]:
    folder = tmp_path_factory.mktemp("hugging_face")
    np.save(folder / "tokens.npy", TOKENS)
    running = forked.start(Path(__file__).parent / "hugging_face_process.py", [str(folder)])
    while not (folder / "written").exists() and running.process.is_alive():
        time.sleep(0.05)
    yield folder, running
    running.process.kill()


CASES = [(family, library) for library in ("keras", "nnx") for family in KERAS]


@pytest.mark.parametrize(("family", "library"), CASES)
def test_a_model_of_transformers_computes_the_same_elsewhere(
    other_side: tuple[Path, forked.Running], family: str, library: str
) -> None:
    """Loaded through a table into layouts, a model has transformers' logits; exported, all of its tensors' bits."""
    folder, _ = other_side
    table, model, logits = loaded(family, library, folder)
    expected = np.load(folder / f"{family}.npy")
    exported = lm.export(model, folder / f"exported-{family}-{library}", names=table, max_shard_bytes=20_000)

    assert tensors(folder / family) == tensors(Path(exported))
    np.testing.assert_allclose(np.asarray(logits), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_each_name_is_in_one_line(other_side: tuple[Path, forked.Running]) -> None:
    """Each tensor that transformers saves is in the table of its family, and each line of a table stands for some."""
    folder, _ = other_side
    for family in KERAS:
        saved = list(open_checkpoint_source(folder / family).variables)
        for table in (family, f"{family}_nnx"):
            templates = {piece.name for entry in read_name_table(table).entries for piece in entry.tensors}
            found = {name: [t for t in templates if t.match_name(name)] for name in saved}
            unused = {t.text for t in templates} - {t.text for each in found.values() for t in each}

            assert dict.fromkeys(saved, 1) == {name: len(each) for name, each in found.items()}
            assert set() == unused


def test_transformers_reads_what_was_exported(
    other_side: tuple[Path, forked.Running], tmp_path: Path
) -> None:
    """Saved from a mesh, exported from the step and loaded by transformers, a model has its logits, bit for bit."""
    folder, running = other_side
    _, model, _ = loaded("llama", "keras", folder)
    lm.save(model, tmp_path)
    exported = Path(
        lm.export(tmp_path, folder / "exported-llama-step", names="llama", max_shard_bytes=20_000)
    )
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    (folder / "exported").touch()
    (ended,) = forked.wait_for_all([running])

    assert (0, "") == (ended.returncode, ended.stderr[-2000:] * bool(ended.returncode))
    assert len({*index["weight_map"].values()}) > 1
    for each in sorted(folder.glob("exported-*")):
        expected = np.load(folder / f"{each.name.split('-')[1]}.npy")
        assert (each.name, expected.tobytes()) == (each.name, np.load(each / "logits.npy").tobytes())
