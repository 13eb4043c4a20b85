"""`names="checkpoint"`: the names, shapes, and values that transformers and peft have in their own files."""

import pytest
import torch
from checkpoint_models import assert_equal, make, read_files

import layoutmap as lm
from layoutmap.adapters.torch.checkpoint_names import _format_axes_of_view
from layoutmap.core.errors import CheckpointError, RuleError

PROCESSES = ("torch",)

NAMES = ("Mixtral", "Qwen3Moe", "DeepseekV3", "Llama", "LoRA")


@pytest.mark.parametrize("name", NAMES)
def test_export_writes_the_tensors_of_save_pretrained(name, tmp_path):
    """Separate experts, one name for tied weights, and adapters alone, bit for bit."""
    model = make(name, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    lm.export(model, tmp_path / "ours", names="checkpoint")
    assert_equal(read_files(tmp_path / "theirs"), read_files(tmp_path / "ours"))


@pytest.mark.parametrize("name", NAMES)
def test_load_reads_what_save_pretrained_has_written(name, tmp_path):
    """What a checkpoint does not have by design, as the base of an adapter, is kept, and is no error."""
    model, other = make(name), make(name, seed=1)
    before = {key: tensor.clone() for key, tensor in other.state_dict().items()}
    model.save_pretrained(tmp_path)
    lm.load(other, tmp_path, names="checkpoint")
    expected = {
        key: tensor if name != "LoRA" or "lora_" in key else before[key]
        for key, tensor in model.state_dict().items()
    }
    assert_equal(expected, other.state_dict())


def test_views_are_described_by_their_strides():
    """Parts of equal size and permuted axes have a description, other parts have none."""
    whole = torch.empty(8, 6, 4, device="meta")
    views = whole, whole[1, 3:].T, whole[2:4, :, 1], whole[1:3], whole.flatten(), whole[None]
    expected = (
        "a0 a1 a2 -> a0 a1 a2",
        "a0 a1 -> 1/8 (1/2 a1) a0",
        "a0 a1 -> (1/4 a0) a1 1/4",
        None,
        None,
        None,
    )
    assert expected == tuple(_format_axes_of_view(view, whole) for view in views)
    assert _format_axes_of_view(torch.empty((), device="meta"), torch.empty((), device="meta")) == " -> "


def test_a_model_without_a_checkpoint_format_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="Linear has no checkpoint format"):
        lm.export(torch.nn.Linear(2, 2), tmp_path / "new", names="checkpoint")


def test_a_tensor_that_is_joined_from_variables_is_refused(monkeypatch, tmp_path):
    """What no view of one variable gives cannot be moved by shards, so an error names it."""
    import transformers.core_model_loading as loading

    def join(model, state):
        return {"joined": torch.cat([*state.values()][:1] * 2)}

    monkeypatch.setattr(loading, "revert_weight_conversion", join)
    with pytest.raises(
        CheckpointError, match="joined: this tensor of the checkpoint is not a part of one variable"
    ):
        lm.export(make("Llama"), tmp_path / "new", names="checkpoint")


def test_a_function_needs_to_make_its_model_first(tmp_path):
    """The names are read from the model. The fix of the error loads it."""
    model, layout_map = make("Llama"), lm.LayoutMap(lm.create_mesh("model=2"), rest="replicated")
    model.save_pretrained(tmp_path)
    with pytest.raises(RuleError, match="names='checkpoint' needs an existing model"):
        lm.load(
            lambda: make("Llama", seed=1),
            tmp_path,
            layout_map=layout_map,
            library="torch",
            names="checkpoint",
        )
    other = layout_map.build(lambda: make("Llama", seed=1), library="torch")
    lm.load(other, tmp_path, names="checkpoint")
    assert_equal(
        model.state_dict(), {name: value.full_tensor() for name, value in other.state_dict().items()}
    )
