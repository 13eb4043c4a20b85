"""Tools of Hugging Face with a laid out model: they train it as they train a plain one, and save all of it."""

import functools
import io
import json
import pickle
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import forked
import peft
import pytest
import safetensors.torch
import torch
import transformers
from engines import several_processes
from hugging_face_models import DATA, assert_alike, make_llama, make_map, on_mesh, tied, train
from torch.distributed.tensor import DTensor

import layoutmap as lm

WORKER = Path(__file__).with_name("hugging_face_process.py")
TRAINED = ("adamw", "loop")
TRAINED_LONG = {
    "Trainer": ("sgd", "bf16", "module"),
    "LoRA": ("lora", "lora sgd"),
    "accelerate": ("loop sgd", "loop lora", "loop lora sgd"),
    "Lightning": ("lightning", "lightning sgd", "lightning lora", "lightning lora sgd"),
    # Either mode after the other in one process.
    "own rows": ("own rows", "own rows loop", "own rows sgd", "loop sgd"),
}
SFT = {"all weights": ("sft", "sft sgd"), "LoRA": ("sft lora", "sft lora sgd")}
LAUNCHED = ("loop", "adamw", "sgd", "own rows loop")
# PEFT asks transformers for a name that it has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def with_lora(model, **options):
    """The model with factors of LoRA, of which those that begin as zeros do not."""
    torch.manual_seed(7)
    chosen = {"target_modules": ["q_proj", "down_proj"], "r": 4, "task_type": "CAUSAL_LM", **options}
    return peft.get_peft_model(model, peft.LoraConfig(**chosen, init_lora_weights=False))


def layouts_of(model, part):
    return {
        name.removeprefix("base_model.model.model."): str(lm.dtensor.fetch_layout(parameter))
        for name, parameter in model.named_parameters()
        if part in name
    }


def test_lora_in_a_scope_trains_as_on_one_device():
    """Rules for the model hold for it in PEFT's wrapping, factors follow their weight, and they alone are trained."""
    plain, model = with_lora(make_llama()), on_mesh(lambda: with_lora(make_llama()))

    assert {
        "layers.0.self_attn.q_proj.lora_A.default.weight": "(unsharded, unsharded)",
        "layers.0.self_attn.q_proj.lora_B.default.weight": "(model, unsharded)",
        "layers.0.mlp.down_proj.lora_A.default.weight": "(unsharded, model)",
        "layers.0.mlp.down_proj.lora_B.default.weight": "(unsharded, unsharded)",
    } == layouts_of(model, "lora")
    assert {
        "layers.0.self_attn.q_proj.base_layer.weight": "(model, unsharded)",
        "layers.0.mlp.down_proj.base_layer.weight": "(unsharded, model)",
    } == layouts_of(model, "base_layer")
    assert pytest.approx(train(plain), rel=1e-5) == train(model)
    assert_alike(model, plain)
    assert_alike(model.merge_and_unload(), plain.merge_and_unload())


def test_a_sampler_gets_merged_factors_or_factors_alone():
    """A sync after PEFT's `merge_adapter` gives an unwrapped model the merged weights; factors move alone, too."""
    trainer, sampler = on_mesh(lambda: with_lora(make_llama())), on_mesh()
    names = {"**.weight": "base_model.model.**.(base_layer.)?weight"}
    sync = lm.plan_sync(trainer, sampler, names=names, ignore=[r".*lora_"])
    trainer.merge_adapter()
    sync(verify=True)
    trainer.unmerge_adapter()

    assert_alike(sampler.requires_grad_(False), with_lora(make_llama()).merge_and_unload())
    other = on_mesh(lambda: with_lora(make_llama()))
    with torch.no_grad():
        for _, each in other.named_parameters():
            each.zero_()
    factors = lm.plan_sync(trainer, other, ignore=[r"(?!.*lora_)"])
    factors(verify=True)
    moved = {row.variable.path for row in factors.plan.rows}
    assert moved == {name for name, _ in other.named_parameters() if "lora_" in name}
    assert moved == {name for name, each in other.named_parameters() if lm.dtensor.unpack(each)[0].any()}


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{"target_modules": ["embed_tokens", "lm_head"]}, {"use_dora": True}, {"lora_dropout": 0.3}],
    ids=str,
)
def test_kinds_of_lora_train_as_on_one_device(options):
    """Factors of embeddings, magnitudes, and dropout in front of the factors."""
    plain, model = with_lora(make_llama(), **options), on_mesh(lambda: with_lora(make_llama(), **options))

    assert pytest.approx(train(plain), rel=1e-5) == train(model)
    assert_alike(model, plain)


@pytest.mark.long
def test_lora_of_a_model_in_layouts_trains_as_on_one_device():
    """Factors that are added later are plain until `apply`, of the layer's sizes, and train rightly in either way."""
    plain = with_lora(make_llama())
    told = train(plain)
    added, applied = with_lora(on_mesh()), make_map().apply(with_lora(on_mesh()), batch_dim="batch")

    assert not any(isinstance(each, DTensor) for name, each in added.named_parameters() if "lora" in name)
    assert "(model, unsharded)" in layouts_of(applied, "lora").values()
    for model in (added, applied):
        assert pytest.approx(told, rel=1e-5) == train(model)
        assert_alike(model, plain)


def test_a_rule_for_a_factor_wins():
    """A rule that is meant for the factor, and not for its weight, says its layout."""
    layout_map = make_map()
    layout_map[r".*lora_A.*"] = ("model", None)
    with layout_map.scope(library="torch"):
        model = with_lora(make_llama())

    assert {"(model, unsharded)"} == set(layouts_of(model, "lora_A").values())


def test_what_is_saved_is_all_of_the_model(tmp_path):
    """By save_pretrained, safetensors, pickle and torch.save: plain weights, and tied ones once."""
    model = on_mesh(lambda: transformers.LlamaForCausalLM(tied()))
    plain = transformers.LlamaForCausalLM(tied())
    plain.load_state_dict({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})
    model.save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "theirs")
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    one_of_each = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    safetensors.torch.save_file(one_of_each, tmp_path / "file.safetensors")
    other = on_mesh(lambda: transformers.LlamaForCausalLM(tied()))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)

    read = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "theirs")]
    assert read[0] == read[1]
    assert (set(), []) == safetensors.torch.load_model(other, tmp_path / "model.safetensors")
    assert_alike(other, plain, 0)
    for found in (safetensors.torch.load_file(tmp_path / "file.safetensors"), torch.load(file)):
        assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in found.items())
    assert_alike(pickle.loads(pickle.dumps(model)), plain, 0)


def test_adapters_are_saved_and_loaded_on_another_mesh(tmp_path):
    """PEFT saves the factors of a laid out model, and loads them into a plain one and one in layouts."""
    model = on_mesh(lambda: with_lora(make_llama()))
    model.save_pretrained(tmp_path)
    plain = peft.PeftModel.from_pretrained(make_llama(), tmp_path, is_trainable=True)

    assert {"lora_A", "lora_B"} == {
        name.split(".")[-2] for name in safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    }
    assert_alike(model, plain, 0)
    assert_alike(peft.PeftModel.from_pretrained(on_mesh(), tmp_path, is_trainable=True), plain, 0)
    assert_alike(
        on_mesh(lambda: peft.PeftModel.from_pretrained(make_llama(), tmp_path)), plain_frozen(plain), 0
    )


def plain_frozen(model):
    return model.requires_grad_(False)


@pytest.mark.long
@pytest.mark.parametrize("accumulation", [1, 3])
def test_trainer_of_transformers_trains_as_on_one_device(tmp_path, accumulation):
    """With its clipping, accumulation of gradients, and evaluation; it goes on from a checkpoint of its own."""
    plain, model = (run(make(), tmp_path, accumulation) for make in (make_llama, on_mesh))
    told = [
        [(e.get("loss"), e.get("grad_norm")) for e in t.state.log_history if "loss" in e]
        for t in (plain, model)
    ]

    assert 3 // accumulation == len(told[0])
    for one, other in zip(*told, strict=True):
        assert pytest.approx(one, rel=1e-5) == other
    assert_alike(model.model, plain.model)
    assert pytest.approx(plain.evaluate(DATA)["eval_loss"], rel=1e-5) == model.evaluate(DATA)["eval_loss"]

    last = str(tmp_path / f"checkpoint-{3 // accumulation}")
    resumed = trainer(on_mesh(), tmp_path, accumulation, num_train_epochs=2)
    resumed.train(resume_from_checkpoint=last)
    straight = trainer(make_llama(), tmp_path, accumulation, num_train_epochs=2)
    straight.train(resume_from_checkpoint=last)
    assert_alike(resumed.model, straight.model)


def trainer(model, folder, accumulation, **options):
    arguments = {"num_train_epochs": 1, "save_strategy": "epoch", **options}
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=accumulation,
            learning_rate=1e-2,
            adam_epsilon=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **arguments,
        ),
        train_dataset=DATA,
    )


def run(model, folder, accumulation):
    made = trainer(model, folder, accumulation)
    made.train()
    return made


@pytest.mark.long
@pytest.mark.parametrize("accumulation", [1, 3])
def test_accelerate_trains_as_on_one_device(tmp_path, accumulation):
    """Prepared model, optimizer, data and schedule; clipped gradients; its states are saved and loaded."""
    import accelerate

    told, models = [], []
    for make in (make_llama, on_mesh):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        batches = torch.utils.data.DataLoader(DATA, batch_size=4)
        model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
        found = []
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                found.append(loss.item())
        told.append(found)
        models.append(accelerator.unwrap_model(model))

    assert pytest.approx(told[0], rel=1e-5) == told[1]
    assert_alike(models[1], models[0])
    accelerator.save_state(tmp_path)
    accelerator.save_model(model, tmp_path / "model")
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path)
    assert_alike(models[1], models[0])
    [file] = (tmp_path / "model").glob("*.safetensors")
    assert models[0].state_dict().keys() == safetensors.torch.load_file(file).keys()


def in_processes(size, *work):
    """What came of several processes, with the environment that torchrun sets, or of one."""
    (port,) = several_processes.free_ports(1)
    all_of_them = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return forked.wait_for_all(
        [
            forked.start(WORKER, [json.dumps(work, default=str)], all_of_them | {"RANK": str(number)})
            for number in range(size)
        ]
    )


@pytest.mark.long
def test_a_killed_save_leaves_nothing_to_the_next(tmp_path):
    """Its hidden folder is there until the next save to the same place, which finds nobody who writes it."""
    assert all(each.returncode for each in in_processes(2, ("killed", tmp_path)))
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(r"\.several\.[0-9a-f]{16}", left.name)
    assert_well(in_processes(2, ("saved", tmp_path)), "saved")

    assert not left.exists()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder, and what came of two processes that did all their work in it."""
    folder = tmp_path_factory.mktemp("two")
    for name in ("tools", "saved", "2"):
        (folder / name).mkdir()
    work = *((name, folder / name) for name in ("tools", "saved")), ("trained", folder / "2", "", *TRAINED)
    return folder, in_processes(2, *work)


@pytest.mark.every_case
@pytest.mark.parametrize("work", ["tools", "saved"])
def test_two_processes(two, work):
    """Two read what each needs of a checkpoint, write what each has of one, and refuse to train or save a part."""
    assert_well(two[1], work)


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory):
    """Train cases in one process, once for all tests, and return a folder with what came of it in the folder `1`."""

    @functools.cache
    def train_alone(cases):
        folder = tmp_path_factory.mktemp("trained")
        (folder / "1").mkdir()
        assert_well(in_processes(1, ("trained", folder / "1", "", *cases)), "trained")
        return folder

    return train_alone


def assert_trained_as_one_process(folder, other, cases):
    """Trainer and accelerate in several processes give the losses and weights, and their files, of one."""
    for case in cases:
        atol = 2e-2 if case == "bf16" else 1e-5
        found = [json.loads((each / f"{case}.json").read_text()) for each in (folder / "1", other)]
        assert pytest.approx(found[0], abs=atol) == found[1], case
        weights = [torch.load(each / f"{case}.pt") for each in (folder / "1", other)]
        for name, weight in weights[0].items():
            torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=atol, msg=f"{case}: {name}")
        files = [
            {file.name for file in (each / case).rglob("*") if file.is_file()}
            for each in (folder / "1", other)
        ]
        assert files[0] == {each for each in files[1] if not re.match(r"random_states_[1-9]", each)}


def test_trainer_and_accelerate_in_two_processes(two, trained_alone):
    """They train a sharded model as one process trains the unsharded one."""
    folder, ended = two
    assert_well(ended, "trained")
    assert_trained_as_one_process(trained_alone(TRAINED), folder / "2", TRAINED)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cases", TRAINED_LONG.values(), ids=TRAINED_LONG)
def test_any_trainer_in_several_processes(tmp_path, trained_alone, size, cases):
    """Also with mixed precision, LoRA, and modules of a program."""
    assert_well(in_processes(size, ("trained", tmp_path, "", *cases)), "trained")
    assert_trained_as_one_process(trained_alone(cases), tmp_path, cases)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
def test_another_number_of_processes_continues(tmp_path, trained_alone, before, after):
    """From a checkpoint in the middle, Trainer ends with the losses and weights of one process that never stopped."""
    saved, continued = (tmp_path / each for each in ("saved", "continued"))
    for folder, size, checkpoint in (
        (saved, before, ""),
        (continued, after, saved / "resumed" / "checkpoint-3"),
    ):
        folder.mkdir()
        assert_well(in_processes(size, ("trained", folder, checkpoint, "resumed")), "trained")
        assert_trained_as_one_process(trained_alone(("resumed",)), folder, ["resumed"])
    assert not (continued / "resumed" / "checkpoint-3").exists()


@pytest.mark.long
def test_four_processes_export_what_transformers_reads(tmp_path):
    """As two do, see `save_pretrained_process.py`."""
    assert_well(in_processes(4, ("exported", tmp_path)), "exported")


# `make test-all` installs trl, and `make test` does not, since it takes 280 MB with pyarrow and pandas.
@pytest.mark.long
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed, see: pip install trl")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cases", SFT.values(), ids=SFT)
def test_sft_trainer_in_several_processes(tmp_path, trained_alone, size, cases):
    """SFTTrainer computes its loss outside of the model, from rows of unequal lengths."""
    assert_well(in_processes(size, ("trained", tmp_path, "", *cases)), "trained")
    assert_trained_as_one_process(trained_alone(cases), tmp_path, cases)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_accelerate_launch(tmp_path, trained_alone, size):
    """Processes that accelerate starts train as one process does, like those of torchrun."""
    (port,) = several_processes.free_ports(1)
    options = ["--multi_gpu", f"--num_processes={size}", "--num_machines=1"]
    options += ["--mixed_precision=no", "--dynamo_backend=no"]
    options += [f"--main_process_port={port}", str(WORKER)]
    work = json.dumps([("trained", str(tmp_path), "", *LAUNCHED)])
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, work]
    assert_well([subprocess.run(command, capture_output=True, text=True, timeout=500)], "trained")
    assert_trained_as_one_process(trained_alone(LAUNCHED), tmp_path, LAUNCHED)


def assert_well(ended, work):
    for each in ended:
        assert (0, True) == (each.returncode, f"{work}: all is well" in each.stdout), each.stderr[-4000:]
