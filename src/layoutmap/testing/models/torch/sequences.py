"""Torch modules for sequences: recurrent modules and attention.

Each function returns the expression of the module, the expression of its call, and the output shape without rows.
"""

from __future__ import annotations

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.torch.windows import write_options


def draw_recurrent(choices: Choices, shape: Shape) -> tuple[str, str, Shape]:
    """Draw a recurrent module with a call that uses all outputs, the last output, or the final state."""
    kind, width, both = choices.pick("GRU", "LSTM", "RNN"), choices.pick(8, 4, 16, 12), choices.is_one_in(3)
    is_projected = kind == "LSTM" and width > 4 and choices.is_one_in(4)
    options = write_options(
        batch_first=True,
        bidirectional=both or None,
        num_layers=2 if choices.is_one_in(4) else None,
        bias=False if choices.is_one_in(6) else None,
        proj_size=4 if is_projected else None,
    )
    size = 4 if is_projected else width
    state = "{m}({x})[1][0][-1]" if kind == "LSTM" else "{m}({x})[1][-1]"
    calls = {
        "{m}({x})[0]": (shape[0], size * (1 + both)),
        "{m}({x})[0][:, -1]": (size * (1 + both),),
        state: (size,),
    }
    return f"nn.{kind}({shape[-1]}, {width}{options})", *choices.pick(*calls.items())


def draw_attention(
    choices: Choices, shape: Shape, key_value: str = "{x}", key_shape: Shape | None = None
) -> tuple[str, str, Shape]:
    """Draw attention of a sequence to itself, or to another sequence of an expression and a shape."""
    (length, width), (num_keys, size) = shape, key_shape or shape
    options = write_options(
        kdim=size if size != width else None,
        vdim=size if size != width else None,
        dropout=0.25 if choices.is_one_in(5) else None,
        bias=False if choices.is_one_in(5) else None,
        batch_first=True,
    )
    heads = choices.pick(*(n for n in (2, 4, 1, 8, 3, 7) if width % n == 0))
    mask = f", attn_mask=torch.ones({length}, {num_keys}, dtype=torch.bool, device={{x}}.device).triu(1)"
    call = f"{{m}}({{x}}, {key_value}, {key_value}{choices.pick('', ', need_weights=False', mask)})[0]"
    return f"nn.MultiheadAttention({width}, {heads}{options})", call, shape
