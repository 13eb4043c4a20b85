"""What drops elements, and what it gives on a mesh with `draws="tiles"`."""

import torch
import torch.nn.functional as F

import layoutmap as lm
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.torch.engine import engine


def _multi_head(x, need_weights):
    w = torch.linspace(-1, 1, 3 * 4 * 4, dtype=x.dtype).view(12, 4)
    found, weights = F.multi_head_attention_forward(
        *(x, x, x, 4, 2, w, None, None, None, False, 0.3, w[:4], None), need_weights=need_weights
    )
    return found if weights is None else found.sum() + weights


def _heads(x):
    return x.view(8, 8, 2, 2)


CASES = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout, in place": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "dropout, transposed": lambda x: F.dropout(x.mT, 0.4),
    "dropout of a sum": lambda x: F.dropout(x @ torch.ones(4, 4, dtype=x.dtype), 0.4),
    "dropout of a number": lambda x: F.dropout(x.sum(), 0.4),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "dropout2d": lambda x: F.dropout2d(_heads(x), 0.4),
    "dropout3d, in place": lambda x: F.dropout3d(_heads(x).unsqueeze(2) * 1, 0.4, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "alpha_dropout, in place": lambda x: F.alpha_dropout(x * 1, 0.4, True, inplace=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, True),
    "attention": lambda x: F.scaled_dot_product_attention(*[_heads(x)] * 3, dropout_p=0.4),
    "attention, grouped": lambda x: F.scaled_dot_product_attention(
        _heads(x), *[_heads(x)[:, :4]] * 2, dropout_p=0.4, enable_gqa=True
    ),
    "multi-head attention": lambda x: _multi_head(x, need_weights=False),
    "multi-head attention, with weights": lambda x: _multi_head(x, need_weights=True),
}


def drawn_on(mesh, specs, name):
    """The values of a case, the gradient of its input, and the next random number."""
    mesh = Mesh(None, mesh)
    torch.manual_seed(3)
    x = torch.linspace(1, 2, 256, dtype=torch.float64).view(8, 8, 4)
    x = engine().relayout(x, Layout([*specs, *[None] * (3 - len(specs))], mesh)).requires_grad_()
    with lm.dtensor.run_on(mesh, draws="tiles"):
        y = CASES[name](x)
        y.square().sum().backward()
    return *(torch.from_numpy(engine().to_numpy(each)) for each in (y, x.grad)), torch.rand(1)
