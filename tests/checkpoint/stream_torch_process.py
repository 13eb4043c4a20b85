"""The other side, with torch: receives the weights of a Llama into a plain model of transformers, and sends others."""

import sys
from pathlib import Path

import torch
import transformers
from hugging_face_process import SIZES

import layoutmap as lm


def main(folder: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config)
    lm.receive(model, folder / "there", names="checkpoint", timeout_seconds=120)
    model.save_pretrained(folder / "received")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    lm.stream(model, names="checkpoint").write(folder / "back", timeout_seconds=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
