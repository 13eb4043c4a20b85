"""A LightningModule that is built in a scope: Trainer.fit trains it as on one device, and saves all of it."""

import pytest
import torch
from hugging_face_models import DATA, assert_alike, make_llama, make_map

pytestmark = [
    pytest.mark.long,  # to import it takes longer than most tests
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*number of training batches.*logging interval:UserWarning"),
]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def make_module():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_llama()
            self.losses = []

        def training_step(self, batch, index):
            loss = self.net(**batch).loss
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2, eps=1e-3)

    return Module


def fit(module, folder, accumulation=1, **options):
    import lightning

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        gradient_clip_val=1.0,
        accumulate_grad_batches=accumulation,
        enable_checkpointing=False,
        **QUIET,
        max_epochs=options.pop("epochs", 1),
    )
    trainer.fit(module, torch.utils.data.DataLoader(DATA, batch_size=4), **options)
    return trainer


@pytest.mark.parametrize("accumulation", [1, 3])
def test_fit_trains_as_on_one_device(tmp_path, accumulation):
    """With clipping and accumulation of gradients; a checkpoint of its own goes on in layouts and on one device."""
    make = make_module()
    plain = make()
    with make_map().scope(batch_dim="batch", library="torch"):
        model, resumed = make(), make()
    fit(plain, tmp_path, accumulation)
    trainer = fit(model, tmp_path, accumulation)
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path, weights_only=False)

    assert pytest.approx(plain.losses, rel=1e-5) == model.losses
    assert_alike(model, plain)
    assert_alike(make.load_from_checkpoint(path, weights_only=False), model, 0)

    again = make()
    fit(again, tmp_path, epochs=2, ckpt_path=path, weights_only=False)
    fit(resumed, tmp_path, epochs=2, ckpt_path=path, weights_only=False)
    assert pytest.approx(again.losses, rel=1e-5) == resumed.losses
    assert_alike(resumed, again)
