"""Draws torch models: part after part, each one that fits what the last one has returned."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.torch.describing import Class, Model, Part
from layoutmap.testing.models.torch.kinds import CALL, KINDS, Drawing, drawing_of
from layoutmap.testing.models.torch.sequences import attention
from layoutmap.testing.models.values import WIDTHS, Value

_INPUTS = {"vector": 3, "sequence": 7, "image": 6, "volume": 2, "tokens": 5, "bag": 2}
_STYLES = {"attributes": 5, "list": 1, "dict": 1}
_LOSSES = {  # of an output `o` and targets `t`
    "F.mse_loss(o, t)": 2,
    "F.cross_entropy(o, t.softmax(-1))": 2,
    "classes": 4,
    "F.smooth_l1_loss(o, t)": 1,
    "F.binary_cross_entropy_with_logits(o, (t > 0).float())": 1,
    "F.l1_loss(o, t, reduction='sum') / t.numel()": 1,
    "((o - t) ** 2).mean()": 1,
    "F.huber_loss(o, t, delta=0.5)": 1,
    "F.gaussian_nll_loss(o, t, torch.ones_like(o))": 1,
    "(o - t).square().sum(-1).add(1).log().mean()": 1,
}
_OF_CLASSES = {
    "F.cross_entropy(o, t)": 3,
    "F.cross_entropy(o, t, label_smoothing=0.1)": 1,
    "F.cross_entropy(o, t, ignore_index=1)": 1,
    "F.nll_loss(F.log_softmax(o, -1), t)": 1,
    "F.cross_entropy(o, t, reduction='none').mean()": 1,
}
_WRAPPERS = {  # of a module `{m}`, or of what it is made with: a line of `__init__`, and which kinds of lines it fits
    "frozen": "{m}.requires_grad_(False)",
    "hook": "{m}.register_forward_hook(lambda module, inputs, output: 1.5 * output)",
    "pre_hook": "{m}.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))",
    "normal": "nn.init.normal_({m}.weight, std=0.2)",
    "xavier": "nn.init.xavier_uniform_({m}.weight)",
    "kaiming": "nn.init.kaiming_uniform_({m}.weight)",
    "trunc_normal": "nn.init.trunc_normal_({m}.weight, std=0.2)",
    "weight_norm": "",
    "spectral_norm": "",
    "checkpoint": "",
}
HOOKS = (  # on the gradient of a `weight`
    "weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))",
    "weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))",
    "weight.register_hook(torch.tanh)",
    "weight.register_post_accumulate_grad_hook(halve)",
    "weight.register_post_accumulate_grad_hook(clip)",
    "torch.autograd.graph.register_multi_grad_hook([weight], lambda gradients: None)",
)
_CHECKPOINT = "checkpoint({m}, {x}, use_reentrant=False)"
_MOST_ELEMENTS = 1024


def draw_model(choices: Choices) -> Model:
    """A model of a few parts."""
    is_sequential = choices.one_in(8)
    growing = _Growing(choices, choices.taken(KINDS, 5), is_chain=is_sequential)
    value = growing.add_input()
    for _ in range(1 + choices.below(5)):
        value = growing.add_part(value)
    growing.add_output(value)
    names = (tuple(each.name for each in values) for values in (growing.inputs, growing.outputs))
    inputs, outputs = names
    net = Class("Net", choices.weighted(_STYLES), inputs, tuple(growing.parts), outputs)
    classes, returns_loss = (*growing.blocks, net), choices.one_in(2)
    model = Model(is_sequential, tuple(growing.inputs), classes, tuple(growing.outputs), returns_loss)
    # By the model, so that a seed's other choices stay what they were before there were hooks.
    own = Choices.of_seed(zlib.crc32(repr(model).encode()))
    if not own.one_in(3):
        return model
    hooks = own.taken(HOOKS, own.one_of(0, 1, 1, 2))
    hooked = own.below(2), own.one_of(1, 1, 2)
    return replace(model, hooks=tuple(hooks), hooked=hooked, num_passes=own.one_of(2, 1, 3))


class _Growing:
    """A class so far; its methods take the name of a value, and return that of what they make of it.

    Args:
        choices: Decides.
        favourites: Kinds that are drawn more often: each model has some of its own, else two rare kinds would hardly
            ever meet.
        is_chain: Whether each part is a module that takes what the last one has returned, and nothing else.
        is_block: Whether it is a class inside of a model.
    """

    def __init__(
        self, choices: Choices, favourites: list[str], *, is_chain: bool = False, is_block: bool = False
    ):
        self.choices, self.favourites, self.is_chain, self.is_block = choices, favourites, is_chain, is_block
        self.inputs: list[Value] = []
        self.parts: list[Part] = []
        self.outputs: list[Value] = []
        self.shapes: dict[str, Shape] = {}
        self.blocks: list[Class] = []
        self.table: tuple[str, int, int] | None = (
            None  # an embedding, how many tokens it has, and their width
        )

    def value(self, shape: Shape) -> str:
        """A new value of a shape."""
        self.shapes[name := f"x{len(self.shapes)}"] = shape
        return name

    def put(self, kind: str, drawing: Drawing, value: str, *setup: str) -> str:
        """Add a part, of the kind or of several with a space between, and return its value."""
        made, lines, shape = drawing
        name, result = f"l{len(self.parts)}", self.value(shape)
        named = {"{x}": value, "{y}": result, "{m}": f"{{{name}}}"}

        def filled(line: str) -> str:
            for each, instead in named.items():
                line = line.replace(each, instead)
            return line

        called = filled(f"{result} = {lines}").split("\n")
        kinds = tuple(kind.split())
        self.parts.append(Part(name, kinds, made, tuple(map(filled, setup)), tuple(called), result, shape))
        return result

    def compute(self, kind: str, value: str, shape: Shape, *lines: str) -> str:
        """Add a part that computes one of some lines, with nothing of its own."""
        return self.put(kind, ("", self.choices.one_of(*lines), shape), value)

    def wrap(self, kind: str, drawing: Drawing, value: str) -> str:
        """Add a part, a few with a hook, a parametrization or the like around what it holds."""
        made, lines, shape = drawing
        if not made or not self.choices.one_in(4):
            return self.put(kind, drawing, value)
        has_weight, is_called = made.startswith(("nn.Linear(", "nn.Conv")), lines == CALL
        fits = {
            "frozen": not made.startswith(
                ("nn.Buffer(", "nn.Embedding(")
            ),  # a head that is tied to it has to learn
            "hook": is_called,
            "pre_hook": is_called and "Embedding" not in made,
            "checkpoint": is_called and "BatchNorm" not in made and not self.is_chain,
        }
        is_setup = [name for name, line in _WRAPPERS.items() if line]
        wrapper = self.choices.one_of(
            *(
                name
                for name in _WRAPPERS
                if fits.get(name, has_weight) and not (self.is_chain and name in is_setup)
            ),
            "",
        )
        if wrapper == "checkpoint":
            lines = _CHECKPOINT
        elif wrapper.endswith("_norm"):
            made = f"parametrizations.{wrapper}({made})"
        setup = [_WRAPPERS[wrapper]] if wrapper in is_setup else []
        return self.put(f"{kind} {wrapper}", (made, lines, shape), value, *setup)

    def linear(self, value: str, width: int) -> str:
        """A layer of features, of another width."""
        *places, before = self.shapes[value]
        return self.put("Linear", (f"nn.Linear({before}, {width})", CALL, (*places, width)), value)

    # -- inputs and outputs

    def add_input(self) -> str:
        """Add an input; tokens are embedded at once."""
        choices, kind = self.choices, self.choices.weighted(_INPUTS)
        width, vocabulary = choices.weighted(WIDTHS), choices.one_of(32, 64, 30)
        sides = (4, 2) if kind == "volume" else (8, 4, 6) if kind == "image" else (8, 8, 4, 6, 12)
        num_axes = {"vector": 0, "image": 2, "volume": 3}.get(kind, 1)
        places = tuple(choices.one_of(*sides) for _ in range(num_axes))
        shape = (min(width, 8), *places) if num_axes > 1 else (*places, width)
        if kind not in ("tokens", "bag"):
            self.inputs.append(Value(self.value(shape), shape))
            return self.inputs[-1].name
        value = self.value(places)
        self.inputs.append(Value(value, places, vocabulary))
        if kind == "bag":
            made = f"nn.EmbeddingBag({vocabulary}, {width}, mode='{choices.one_of('mean', 'sum', 'max')}')"
            return self.wrap("EmbeddingBag", (made, CALL, (width,)), value)
        options = choices.one_of("", "", ", padding_idx=0", ", scale_grad_by_freq=True")
        made = f"nn.Embedding({vocabulary}, {width}{options})"
        result = self.wrap("Embedding", (made, CALL, shape), value)
        self.table = self.parts[-1].name, vocabulary, width
        if self.is_chain or not choices.one_in(3):
            return result
        positions = f"nn.Parameter(torch.randn({places[0] + 4}, {width}) * 0.1)"
        return self.put("positions", (positions, f"{{x}} + {{m}}[:{places[0]}]", shape), result)

    def add_output(self, value: str) -> None:
        """Add an output: for each place or for all, or by a table of embeddings."""
        choices, places = self.choices, self.shapes[value][:-1]
        if self.table and len(places) == 1 and not self.is_chain and not choices.one_in(3):
            table, vocabulary, width = self.table
            value = value if self.shapes[value][-1] == width else self.linear(value, width)
            shape = (*places, vocabulary)
            if choices.one_in(2):
                value = self.compute("tied", value, shape, f"{{x}} @ {{{table}}}.weight.T")
            else:
                made = f"nn.Linear({width}, {vocabulary}, bias=False)"
                value = self.put("tied", (made, CALL, shape), value, f"{{m}}.weight = {{{table}}}.weight")
            loss = "classes"
        else:
            if places and (len(places) > 2 or not choices.one_in(3)):
                value = self._vector(value)
            value, loss = self.linear(value, choices.weighted(WIDTHS)), choices.weighted(_LOSSES)
        *places, width = shape = self.shapes[value]
        if loss != "classes":
            self.outputs.append(Value(value, shape, loss=loss))
            return
        loss = choices.weighted(_OF_CLASSES)
        if places:
            loss = loss.replace("(o,", "(o.flatten(0, -2),").replace(" t", " t.flatten()")
        self.outputs.append(Value(value, tuple(places), width, loss))

    def _vector(self, value: str) -> str:
        """One axis of features, of all places."""
        shape = self.shapes[value]
        if not self.is_chain and (math.prod(shape) > 256 or self.choices.one_in(2)):
            axes, left = tuple(range(1, len(shape))), shape[-1:]
            if self.choices.one_in(2):
                axes, left = tuple(range(2, len(shape) + 1)), shape[:1]
            return self.compute("reduction", value, left, f"{{x}}.mean({axes})", f"{{x}}.amax({axes})")
        if math.prod(shape) > 256:
            pool = f"nn.AdaptiveAvgPool{len(shape) - 1}d(1)"
            shape = (shape[0], *(1 for _ in shape[1:]))
            value = self.put("AdaptivePooling", (pool, CALL, shape), value)
        return self.put("Flatten", ("nn.Flatten()", CALL, (math.prod(shape),)), value)

    # -- parts

    def add_part(self, value: str) -> str:
        """Add a part, or several that belong together."""
        if self.is_chain:
            return self.add_layer(value)
        parts = {self.add_layer: 9, self._residual: 3, self._gate: 1, self._shared: 2, self._blocks: 2}
        return self.choices.weighted(
            parts if self.is_block else {**parts, self._joined: 3, self._output_beside: 1}
        )(value)

    def add_layer(self, value: str) -> str:
        """Add a part that fits; a few are several modules in an `nn.Sequential`."""
        if self.is_chain or not self.choices.one_in(10):
            return self.wrap(*self._fitting(self.shapes[value], modules=self.is_chain), value)
        kinds, inner, shape = "Sequential", list[str](), self.shapes[value]
        for _ in range(2):
            kind, (made, _, shape) = self._fitting(shape, modules=True)
            kinds, inner = f"{kinds} {kind}", [*inner, made]
        return self.put(kinds, (f"nn.Sequential({', '.join(inner)})", CALL, shape), value)

    def _fitting(self, shape: Shape, *, modules: bool) -> tuple[str, Drawing]:
        """A kind that fits a shape, and what is drawn of it; of modules, those that are called with one value alone."""
        fits = {
            kind: weight + 30 * (kind in self.favourites)
            for kind, (ranks, weight, _) in KINDS.items()
            if len(shape) in ranks and (kind[0].isupper() or not modules)
        }
        while True:
            kind = self.choices.weighted(fits)
            drawing = drawing_of(self.choices, kind, shape)
            if drawing and math.prod(drawing[2]) <= _MOST_ELEMENTS and not (modules and drawing[1] != CALL):
                return kind, drawing
            del fits[kind]

    def _residual(self, value: str) -> str:
        inner, shape = self.add_layer(value), self.shapes[value]
        if self.choices.one_in(2):
            inner = self.add_layer(inner)
        if shape[:-1] != self.shapes[inner][:-1]:
            return inner
        inner = inner if self.shapes[inner] == shape else self.linear(inner, shape[-1])
        return self.compute(
            "residual", value, shape, f"{{x}} + {inner}", f"torch.add({inner}, {{x}}, alpha=0.5)"
        )

    def _gate(self, value: str) -> str:
        shape = self.shapes[value]
        gate = self.linear(value, shape[-1])
        lines = (
            f"{{x}} * {gate}.sigmoid()",
            f"torch.lerp({{x}}, {gate}, {gate}.sigmoid())",
            f"{{x}} * F.hardsigmoid({gate})",
        )
        return self.compute("gate", value, shape, *lines)

    def _shared(self, value: str) -> str:
        """A module that is called twice, with another part between."""
        shape = self.shapes[value]
        value = self.linear(value, shape[-1])
        layer = f"{{{self.parts[-1].name}}}"
        value = self.compute("norm", value, shape, f"F.layer_norm({{x}}, ({shape[-1]},), eps=1e-3)")
        lines = (
            f"{layer}({{x}})",
            f"F.linear({{x}}, {layer}.weight.T, {layer}.bias)",
            f"{{x}} @ {layer}.weight",
        )
        return self.compute("shared", value, shape, *lines)

    def _joined(self, value: str) -> str:
        """Another input, which is attended to, added, multiplied or concatenated."""
        choices, shape = self.choices, self.shapes[value]
        if len(self.inputs) > 2:
            return self.add_layer(value)
        other = self.add_input()
        for _ in range(choices.below(3)):
            other = self.add_layer(other)
        if len(shape) == len(self.shapes[other]) == 2 and choices.one_in(2):
            return self.put("attended", attention(choices, shape, other, self.shapes[other]), value)
        other = self._vector(other) if len(self.shapes[other]) > 1 else other
        (width,) = self.shapes[other]
        if len(shape) == 1 and choices.one_in(2):
            joined = "", f"torch.cat([{{x}}, {other}], -1)", (shape[0] + width,)
            product = f"nn.Bilinear({shape[0]}, {width}, 8)", f"{{m}}({{x}}, {other}.sigmoid())", (8,)
            return self.put("joined", choices.one_of(joined, product), value)
        other = self.linear(other, shape[-1])
        other = f"{other}[:, {', '.join('None' for _ in shape[1:])}]" if len(shape) > 1 else other
        return self.compute("joined", value, shape, f"{{x}} + {other}", f"{{x}} * {other}")

    def _output_beside(self, value: str) -> str:
        if len(self.outputs) < 2:
            self.add_output(value)
        return self.add_layer(value)

    def _blocks(self, value: str) -> str:
        """A module of a class of its own, or several; a few with their activations computed again."""
        if self.is_block or self.blocks:
            return self.add_layer(value)
        block, shape = _Growing(self.choices, self.favourites, is_block=True), self.shapes[value]
        inner = first = block.value(shape)
        for _ in range(1 + self.choices.below(2)):
            inner = block.add_part(inner)
        is_kept = block.shapes[inner] == shape
        if is_kept and self.choices.one_in(2):
            inner = block.compute("residual", first, shape, f"{{x}} + {inner}")
        self.blocks.append(
            Class("Block", self.choices.weighted(_STYLES), (first,), tuple(block.parts), (inner,))
        )
        called = self.choices.one_of(CALL, CALL, CALL, _CHECKPOINT)
        if not is_kept or self.choices.one_in(2):
            return self.put("blocks", ("Block()", called, block.shapes[inner]), value)
        line = called.replace("{m}", "block").replace("{x}", "{y}")
        made = "nn.ModuleList(Block() for _ in range(2))"
        return self.put("blocks", (made, f"{{x}}\nfor block in {{m}}: {{y}} = {line}", shape), value)
