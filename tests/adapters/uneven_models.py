"""Torch models with axes that do not divide, in uneven shards and on one device; simulated, and in processes."""

import functools
import re
import warnings

import numpy as np
import torch
from cases import EVERYTHING, some
from torch import nn
from torch.nn import functional as F

import layoutmap as lm
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines.torch.engine import engine
from layoutmap.engines.torch.placing import gather_if_sharded

ROWS, TOKENS, VOCABULARY = 8, 6, 57
STEPS = 3 if EVERYTHING else 2


class Perceptron(nn.Module):
    """Columns, rows, and a norm of 13 units."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 13), nn.LayerNorm(13), nn.Linear(13, 5)

    def forward(self, x, y):
        return F.mse_loss(self.down(self.norm(F.gelu(self.up(x)))), y[:, :5])


class Decoder(nn.Module):
    """Attention of heads that do not divide, between an embedding of 57 rows and its tied or own output."""

    def __init__(self, heads=5, tied=True, blocks=1):
        super().__init__()
        width = 4 * heads
        self.table = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Attention(heads) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x, y):
        tokens = x.abs().mul(40).long().clamp(max=VOCABULARY - 1)[:, :TOKENS]
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(
            self.head(hidden).flatten(0, 1), tokens.roll(1, 1).flatten(), label_smoothing=0.1
        )


class Attention(nn.Module):
    def __init__(self, heads):
        super().__init__()
        width = 4 * heads
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        rows, tokens, width = x.shape
        q, k, v = (
            project(self.norm(x)).view(rows, tokens, self.heads, 4).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))


class Experts(nn.Module):
    """Three experts, mixed by a gate."""

    def __init__(self, number=3):
        super().__init__()
        self.gate = nn.Linear(8, number)
        self.up, self.down = (nn.Parameter(torch.randn(number, *s) * 0.2) for s in ((8, 16), (16, 8)))

    def forward(self, x, y):
        hidden = torch.einsum("bd,edh->ebh", x, self.up).relu()
        return F.mse_loss(torch.einsum("ebd,be->bd", hidden @ self.down, self.gate(x).softmax(-1)), y)


class Images(nn.Module):
    """Convolutions to 6 and 10 channels, and a group norm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(2, 6, 3), nn.GroupNorm(3, 6), nn.Conv1d(6, 10, 1)

    def forward(self, x, y):
        made = self.last(self.norm(self.first(x.view(-1, 2, 4))).relu())
        left, right = made.chunk(2, 1)
        return (left * right.sigmoid()).square().mean()


_PROJECTIONS = {
    r".*[qkv]\.weight": ("model", None),
    r".*[qkv]\.bias": ("model",),
    r".*out\.weight": (None, "model"),
}
_PROJECTIONS_BY_BATCH = {r".*[qkv]\.weight": ("model", "batch"), r".*out\.weight": ("batch", "model")}
MODELS = {  # each with its rules
    "columns": (
        Perceptron,
        {"up.weight|norm": ("model",), "up.bias": ("model",), "down.weight": (None, "model")},
    ),
    "rows": (
        Perceptron,
        {"up.weight": (None, "model"), "down.weight": ("model", None), "down.bias": ("model",)},
    ),
    "by batch": (
        Perceptron,
        {"up.weight": ("batch", "model"), ".*bias|norm": ("batch",), "down": ("model", "batch")},
    ),
    "tied": (Decoder, {"table.*": ("model", None), **_PROJECTIONS}),
    "tied by batch": (Decoder, {"table.*": ("model", "batch"), **_PROJECTIONS_BY_BATCH}),
    "columns of the table": (Decoder, {"table.*": (None, "model"), **_PROJECTIONS}),
    "blocks": (
        functools.partial(Decoder, 5, False, 2),
        {"table.*|head": ("model", "batch"), **_PROJECTIONS_BY_BATCH},
    ),
    "experts": (Experts, {"up|down": ("model", None, "batch"), "gate.*": ("model",)}),
    "images": (Images, {"first.weight|last.weight": ("model",), ".*bias": ("model",), "norm.*": ("model",)}),
}
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda weights: torch.optim.AdamW(weights, 1e-2, eps=1e-3, foreach=False),
    "foreach": lambda weights: torch.optim.AdamW(weights, 1e-2, eps=1e-3, foreach=True),
    "fused": lambda weights: torch.optim.AdamW(weights, 1e-2, eps=1e-3, fused=True),
    "adafactor": lambda weights: torch.optim.Adafactor(weights, 1e-2),
    # Its products in bfloat16 turn a last bit of a gradient into 1e-2 of an update.
    "muon": lambda weights: torch.optim.Muon([each for each in weights if each.ndim == 2], 1e-5),
}


def make_map(name, mesh):
    """The map of a model: rules are filled up with unsharded axes, and dims that the mesh lacks are left out."""
    names = lm.Mesh(None, mesh).dim_names
    layout_map = lm.LayoutMap(mesh, uneven="pad", rest="replicated")
    torch.manual_seed(0)
    made = MODELS[name][0]()
    for pattern, specs in MODELS[name][1].items():
        for path, weight in made.named_parameters():
            if any(path == known for known in layout_map) or not re.match(pattern, path):
                continue
            some = [spec if spec in names else None for spec in specs][: weight.ndim]
            layout_map[path] = (*some, *[None] * (weight.ndim - len(some)))
    return layout_map


def make_batch():
    rng = np.random.default_rng(3)
    return tuple(torch.from_numpy(rng.standard_normal((ROWS, 8)).astype(np.float32)) for _ in range(2))


def build(name, mesh, **options):
    def make():
        torch.manual_seed(0)
        return MODELS[name][0]()

    batch_dim = "batch" if "batch" in mesh else None
    return make(), lm.build(make, make_map(name, mesh), batch_dim=batch_dim, library="torch", **options)


def whole(value):
    return gather_if_sharded(value.detach())


def train(model, make_optimizer, steps=STEPS, call=None):
    """The losses and the gradients' norms of some steps."""
    optimizer, told = make_optimizer(model.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (call or model)(*make_batch())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        told += [float(whole(loss)), float(whole(norm))]
    return np.array(told), optimizer


def compare_training(name, mesh, optimizer="sgd", compiled=(), **options):
    """How far uneven shards are from one device: initial values, losses and norms, weights after some steps.

    The modules at the paths `compiled` are compiled.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lm.LayoutMapWarning)  # of what is gathered
        plain, model = build(name, mesh, **options)
        first = _compare_weights(plain, model)
        for path in compiled:
            model.get_submodule(path).compile(backend="aot_eager", fullgraph=True)
        expected, actual = (train(each, OPTIMIZERS[optimizer])[0] for each in (plain, model))
        return first, float(np.abs(expected - actual).max()), _compare_weights(plain, model)


def _compare_weights(plain, model):
    pairs = zip(plain.state_dict().values(), model.state_dict().values(), strict=True)
    return max(float((one - whole(other)).abs().max()) for one, other in pairs)


ARRAYS = (  # shapes, and specs of axes that do not divide; shards of 3 rows on 4 devices, and of 5, are empty
    ((13,), ("model",)),
    ((3, 4), ("model", None)),
    ((5, 3), ("model", "batch")),
    ((2, 7), (None, "model")),
    ((6, 5), ("batch", "model")),
    ((1,), ("model",)),
    ((0, 3), ("model", "batch")),
    ((7,), (("batch", "model"),)),
)


def find_array_faults(mesh_text):
    """What the engine does wrong with uneven shards."""
    mesh, faults = lm.Mesh(None, mesh_text), []
    for number, (shape, specs) in enumerate(ARRAYS):
        layout = Layout([tuple(d for d in _dims(spec) if d in mesh) for spec in specs], mesh)
        values = np.random.default_rng(number).standard_normal(shape).astype(np.float32)
        assignment = Assignment(VariableSpec("w", shape, "float32"), layout, is_padded=True)
        recipe = Initializer(lambda shape=shape: torch.from_numpy(draw(shape)))
        others = (Layout.replicated(mesh, len(shape)), Layout([None] * (len(shape) - 1) + ["model"], mesh))
        made = {
            "relayout": engine().relayout(values, layout, pad=True),
            "from_shards": engine().create_from_shards(
                assignment, lambda index, values=values: values[index]
            ),
        }
        for other in others:
            there = engine().relayout(engine().relayout(values, other, pad=True), layout, pad=True)
            made[f"to and from {other}"] = there
            made[f"at {other}"] = engine().relayout(there, other, pad=True)
        made["created"] = engine().create_initial_values({"w": assignment}, {"w": recipe})["w"]
        for order in (float("inf"), -1.0) if values.size else ():  # an empty array has none
            norms = [torch.linalg.vector_norm(made["relayout"], order)]
            norms += torch._foreach_norm([made["relayout"]], order)
            wanted = np.linalg.norm(values.ravel(), order)
            if not all(np.isclose(engine().to_numpy(each), wanted, rtol=1e-5) for each in norms):
                faults.append(f"{shape} {layout}: norm of order {order}")
        for name, array in made.items():
            wanted = draw(shape) if name == "created" else values
            wanted_layout = next((each for each in others if name == f"at {each}"), layout)
            indices = {
                device: wanted_layout.shard_slices(shape, device)
                for device in engine().bind_mesh(mesh).local_device_ids
            }
            held = list(engine().iterate_shards(array))
            faults += [
                f"{shape} {layout} {name}: {what}"
                for what, is_right in {
                    "layout": engine().get_layout(array) == wanted_layout,
                    "values": np.array_equal(engine().to_numpy(array), wanted),
                    "shards": all(np.array_equal(piece, wanted[index]) for index, piece in held),
                    "places": sorted(map(repr, {repr(i) for i, _ in held}))
                    == sorted(map(repr, {repr(i) for i in indices.values()})),
                }.items()
                if not is_right
            ]
    return faults


def _dims(spec):
    return () if spec is None else (spec,) if isinstance(spec, str) else spec


def draw(shape):
    return np.random.default_rng(11).standard_normal(shape).astype(np.float32)


def find_file_faults(folder, mesh, name="tied"):
    """What is not the same bits after a save on one mesh and loads on others, weights and optimizer."""
    faults = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lm.LayoutMapWarning)
        _, model = build(name, mesh)
        _, optimizer = train(model, OPTIMIZERS["adamw"], steps=2)
        lm.save(model, folder, optimizer=optimizer)
        size = lm.Mesh(None, mesh).size
        crossed = f"model={size // 2},batch=2"
        for other in some([mesh, f"batch={size}", f"model={size}", crossed], mesh, crossed):
            _, again = build(name, other)
            new = OPTIMIZERS["adamw"](again.parameters())
            lm.load(again, folder, optimizer=new)
            states = [
                {
                    f"{number} {key}": slot
                    for number, slots in each.state_dict()["state"].items()
                    for key, slot in slots.items()
                }
                for each in (optimizer, new)
            ]
            for before, after in ((model.state_dict(), again.state_dict()), states):
                faults += [
                    f"{other}: {key}"
                    for key, value in before.items()
                    if not torch.equal(whole(value), whole(after[key]))
                ]
    return faults
