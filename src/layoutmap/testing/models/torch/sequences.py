"""Modules of torch that take sequences: recurrent ones, and attention."""

from __future__ import annotations

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.torch.windows import options_of


def recurrent(choices: Choices, shape: Shape) -> tuple[str, str, Shape]:
    """A recurrent module, of which all outputs are used, the last one, or the state."""
    kind, width, both = choices.one_of("GRU", "LSTM", "RNN"), choices.one_of(8, 4, 16, 12), choices.one_in(3)
    projected = kind == "LSTM" and width > 4 and choices.one_in(4)
    options = options_of(
        batch_first=True,
        bidirectional=both or None,
        num_layers=2 if choices.one_in(4) else None,
        bias=False if choices.one_in(6) else None,
        proj_size=4 if projected else None,
    )
    size = 4 if projected else width
    state = "{m}({x})[1][0][-1]" if kind == "LSTM" else "{m}({x})[1][-1]"
    uses = {
        "{m}({x})[0]": (shape[0], size * (1 + both)),
        "{m}({x})[0][:, -1]": (size * (1 + both),),
        state: (size,),
    }
    return f"nn.{kind}({shape[-1]}, {width}{options})", *choices.one_of(*uses.items())


def attention(
    choices: Choices, shape: Shape, other: str = "{x}", of: Shape | None = None
) -> tuple[str, str, Shape]:
    """Attention of a sequence to itself, or to another one.

    Args:
        choices: Decides.
        shape: The shape of what asks.
        other: What is asked.
        of: The shape of that.
    """
    (length, width), (keys, size) = shape, of or shape
    options = options_of(
        kdim=size if size != width else None,
        vdim=size if size != width else None,
        dropout=0.25 if choices.one_in(5) else None,
        bias=False if choices.one_in(5) else None,
        batch_first=True,
    )
    heads = choices.one_of(*(n for n in (2, 4, 1, 8, 3, 7) if width % n == 0))
    mask = f", attn_mask=torch.ones({length}, {keys}, dtype=torch.bool, device={{x}}.device).triu(1)"
    called = f"{{m}}({{x}}, {other}, {other}{choices.one_of('', ', need_weights=False', mask)})[0]"
    return f"nn.MultiheadAttention({width}, {heads}{options})", called, shape
