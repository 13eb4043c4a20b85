"""How one of several processes, or one alone, trains by Trainer or accelerate; run by hugging_face_process.py."""

import json
import os
import warnings

import accelerate
import numpy as np
import peft
import torch
import transformers
from hugging_face_models import make_llama, value_of
from torch.nn import functional as F

import layoutmap as lm

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
FIRST = os.environ.get("RANK", "0") == "0"
RULES = {
    r".*(q|k|v|gate|up)_proj\.weight|.*(embed_tokens|lm_head|first)\.weight": ("batch", None),
    r".*(o|down)_proj\.weight|.*last\.weight": (None, "batch"),
}


def draw_data(number, seed):
    """Rows of tokens, of which some are not predicted."""
    draws = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, 64, (number, 8), generator=draws)
    ignored = torch.arange(8) < torch.randint(0, 5, (number, 1), generator=draws)
    return [
        {"input_ids": row, "labels": labels}
        for row, labels in zip(rows, rows.masked_fill(ignored, -100), strict=True)
    ]


class Net(torch.nn.Module):
    """A model that is not one of transformers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)

    def forward(self, input_ids, labels=None):
        logits = self.last(F.dropout(self.first(input_ids), 0.1, self.training))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def make_model(make, rows="global"):
    torch.manual_seed(0)
    if PROCESSES == 1:
        return make()
    mesh = f"batch={PROCESSES}" if rows == "global" else f"batch=2,model={PROCESSES // 2}"
    layout_map = lm.LayoutMap(mesh, RULES, rest="replicated")
    return layout_map.build(make, library="torch", batch_dim="batch", rows=rows)


def count_rows(number, rows):
    """The rows of a batch in a process, of a number in all of them."""
    return number // 2 if rows == "own" and PROCESSES > 1 else number


def find_right(predictions):
    """The part of the labels that is predicted, and a sum that depends on the order of the rows."""
    logits, labels = predictions
    is_right = (logits.argmax(-1) == labels)[labels != -100]
    return {
        "right": is_right.mean(),
        "order": (labels * np.arange(1, 1 + labels.size).reshape(labels.shape)).sum(),
    }


def train_by_trainer(folder, make=make_llama, resume=None, lora=False, rows="global", **options):
    model = make_model(make, rows)
    if lora:
        model = add_lora(model)
    settings = {"gradient_accumulation_steps": 2, "num_train_epochs": 2}
    settings |= {"per_device_train_batch_size": count_rows(4, rows)}
    settings |= {"per_device_eval_batch_size": count_rows(8, rows)}
    settings |= {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    settings |= {"max_grad_norm": 0.5, "learning_rate": 1e-2, "adam_epsilon": 1e-3, "logging_steps": 1}
    arguments = transformers.TrainingArguments(
        folder, report_to=[], use_cpu=True, disable_tqdm=True, **settings | options
    )
    sizes = (
        (22, 7) if rows == "global" else (20, 16)
    )  # accelerate fills a last batch of own rows with its first ones
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=draw_data(sizes[0], 1),
        eval_dataset=draw_data(sizes[1], 2),
        compute_metrics=find_right,
    )
    trainer.train(resume or None)
    trainer.save_model(folder / "end")
    logged = [each.get("loss", each.get("eval_loss")) for each in trainer.state.log_history[:-1]]
    found = trainer.evaluate()
    return [*logged, *(found[f"eval_{name}"] for name in ("loss", "right", "order"))], model


def train_by_sft_trainer(folder, lora=False, **options):
    """Train on rows of unequal lengths, which trl pads to the longest one of a batch."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    words = {str(number): number for number in range(64)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="0", eos_token="1"
    )
    data = [
        Dataset.from_list(
            [{"input_ids": each["input_ids"][: 4 + number % 5].tolist()} for number, each in part]
        )
        for part in (enumerate(draw_data(16, 1)), enumerate(draw_data(8, 2)))
    ]
    settings = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "eval_strategy": "epoch"}
    settings |= {
        "per_device_train_batch_size": 4,
        "adam_epsilon": 1e-3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
    }
    settings |= {"dataset_kwargs": {"skip_prepare_dataset": True}}  # the rows are tokens
    model = make_model(make_llama)
    if lora:
        model = add_lora(model)
    settings |= {"bf16": False, "max_grad_norm": 0.5, **options}
    arguments = SFTConfig(folder, report_to=[], use_cpu=True, disable_tqdm=True, **settings)
    trainer = SFTTrainer(
        model, arguments, train_dataset=data[0], eval_dataset=data[1], processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model(folder / "end")
    names = ("loss", "eval_loss", "mean_token_accuracy", "eval_mean_token_accuracy", "num_tokens")
    return [each[name] for each in trainer.state.log_history for name in names if name in each], model


def activation_checkpoints(**options):
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}


def make_optimizer(weights, name):
    if name == "sgd":
        return torch.optim.SGD(weights, lr=0.1)
    return torch.optim.AdamW(weights, lr=1e-2, eps=1e-3)


def train_by_accelerate(folder, rows="global", optimizer="adamw", make=Net):
    model = make_model(make, rows)
    data = torch.stack([each["input_ids"] for each in draw_data(22 if rows == "global" else 20, 1)])
    order = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(data, count_rows(4, rows), shuffle=True, generator=order)
    optimizer = make_optimizer(model.parameters(), optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader, model, optimizer, schedule = accelerator.prepare(loader, model, optimizer, schedule)
    losses = []
    torch.manual_seed(3)
    for epoch in range(3):
        for rows in loader:
            with accelerator.accumulate(model):
                output = model(input_ids=rows, labels=rows)
                loss = output["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
            number = accelerator.reduce(torch.tensor(len(rows)))
            found = accelerator.gather_for_metrics((output["logits"].argmax(-1), {"rows": rows}))
            texts = accelerator.gather_for_metrics([str(row.tolist()) for row in rows])
            assert texts == [str(row.tolist()) for row in found[1]["rows"]]
            losses += [number.item(), (found[0] == found[1]["rows"]).float().mean().item()]
        if epoch == 0:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()
        if epoch == 1:
            accelerator.load_state(folder)
    return losses, model


def add_lora(model):
    """Add large factors that do not begin as zeros, since SGD hardly trains others."""
    torch.manual_seed(1)
    chosen = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", "lora_alpha": 256}
    return peft.get_peft_model(model, peft.LoraConfig(**chosen, init_lora_weights=False))


def make_lora():
    return add_lora(make_llama())


def train_by_lightning(folder, make=make_llama, optimizer="adamw"):
    import lightning

    losses = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make()

        def training_step(self, batch, index):
            loss = self.net(**batch).loss
            losses.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            self.log("loss", self.net(**batch).loss, batch_size=len(batch["labels"]))

        def configure_optimizers(self):
            return make_optimizer(self.parameters(), optimizer)

    options = {"accelerator": "cpu", "devices": 1, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    data = [torch.utils.data.DataLoader(draw_data(*each), batch_size=4) for each in ((22, 1), (7, 2))]
    path = None
    for num_epochs in (1, 3):  # the second continues from the files of the first
        model = make_model(Module)
        kept = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_last=True, monitor="loss")
        trainer = lightning.Trainer(
            max_epochs=num_epochs, callbacks=[kept], default_root_dir=folder, **options
        )
        trainer.fit(model, *data, ckpt_path=path, weights_only=False)
        losses.append(trainer.callback_metrics["loss"].item())
        path = kept.last_model_path
    return losses, model


CASES = {
    "lightning": lambda folder, _: train_by_lightning(folder),
    "lightning lora": lambda folder, _: train_by_lightning(folder, make_lora),
    "lightning lora sgd": lambda folder, _: train_by_lightning(folder, make_lora, "sgd"),
    "lightning sgd": lambda folder, _: train_by_lightning(folder, optimizer="sgd"),
    "adamw": lambda folder, _: train_by_trainer(folder, **activation_checkpoints(use_reentrant=False)),
    "sgd": lambda folder, _: train_by_trainer(
        folder, optim="sgd", **activation_checkpoints(use_reentrant=True)
    ),
    "bf16": lambda folder, _: train_by_trainer(folder, bf16=True),
    "lora": lambda folder, _: train_by_trainer(folder, lora=True),
    "lora sgd": lambda folder, _: train_by_trainer(folder, lora=True, optim="sgd", learning_rate=0.1),
    "module": lambda folder, _: train_by_trainer(folder, Net),
    "resumed": lambda folder, resume: train_by_trainer(folder, resume=resume),
    "loop": lambda folder, _: train_by_accelerate(folder),
    "loop sgd": lambda folder, _: train_by_accelerate(folder, optimizer="sgd"),
    "loop lora": lambda folder, _: train_by_accelerate(folder, make=make_lora),
    "loop lora sgd": lambda folder, _: train_by_accelerate(folder, optimizer="sgd", make=make_lora),
    "sft": lambda folder, _: train_by_sft_trainer(folder),
    "sft sgd": lambda folder, _: train_by_sft_trainer(folder, optim="sgd"),
    "sft lora": lambda folder, _: train_by_sft_trainer(folder, lora=True),
    "sft lora sgd": lambda folder, _: train_by_sft_trainer(folder, lora=True, optim="sgd", learning_rate=0.1),
    "own rows": lambda folder, _: train_by_trainer(folder, rows="own"),
    "own rows sgd": lambda folder, _: train_by_trainer(folder, Net, optim="sgd", rows="own"),
    "own rows loop": lambda folder, _: train_by_accelerate(folder, rows="own"),
}


def main(folder, resume, *cases):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for case in cases:
        losses, model = CASES[case](folder / case, resume)
        weights = {name: value_of(weight) for name, weight in model.named_parameters()}
        if FIRST:
            torch.save(weights, folder / f"{case}.pt")
            (folder / f"{case}.json").write_text(json.dumps(losses))
