"""Draws torch models: part after part, each one that fits what the last one has returned."""

from __future__ import annotations

import math

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.torch.describing import Class, Model, Part
from layoutmap.testing.models.torch.functions import FUNCTIONS
from layoutmap.testing.models.torch.modules import CALL, MODULES, Drawing, attention_of
from layoutmap.testing.models.values import WIDTHS, Value

KINDS = {**MODULES, **FUNCTIONS}
WRAPPERS = ("weight_norm", "spectral_norm", "frozen", "init", "hook", "pre_hook", "checkpoint")
BESIDE = ("Embedding", "EmbeddingBag", "tied", "residual", "gate", "shared", "joined", "attended", "blocks")
"""Kinds of parts that are not drawn from `KINDS`."""

_INPUTS = {"vector": 3, "sequence": 5, "image": 4, "volume": 2, "tokens": 4, "bag": 2}
_STYLES = {"attributes": 5, "list": 1, "dict": 1}
_LOSSES = {
    "F.mse_loss(o, t)": 4,
    "classes": 4,
    "F.smooth_l1_loss(o, t)": 1,
    "F.binary_cross_entropy_with_logits(o, (t > 0).float())": 1,
    "F.l1_loss(o, t, reduction='sum') / t.numel()": 1,
    "((o - t) ** 2).mean()": 1,
    "F.huber_loss(o, t, delta=0.5)": 1,
    "F.gaussian_nll_loss(o, t, torch.ones(1))": 1,
    "(o - t).square().sum(-1).add(1).log().mean()": 1,
}
_OF_CLASSES = {
    "F.cross_entropy(o, t)": 3,
    "F.cross_entropy(o, t, label_smoothing=0.1)": 1,
    "F.cross_entropy(o, t, ignore_index=1)": 1,
    "F.nll_loss(o.log_softmax(-1), t)": 1,
    "F.cross_entropy(o, t, weight=torch.arange(o.shape[-1]) + 1.0)": 1,
}
_MOST_ELEMENTS = 1024


def draw_model(choices: Choices) -> Model:
    """A model of a few parts."""
    is_sequential = choices.one_in(8)
    growing = _Growing(choices, choices.taken(KINDS, 4), is_chain=is_sequential)
    value = growing.add_input()
    for _ in range(1 + choices.below(6)):
        value = growing.add_part(value)
    growing.add_output(value)
    style = choices.weighted(_STYLES)
    outputs = tuple(each.name for each in growing.outputs)
    net = Class("Net", style, tuple(each.name for each in growing.inputs), tuple(growing.parts), outputs)
    return Model(is_sequential, tuple(growing.inputs), (*growing.blocks, net), tuple(growing.outputs))


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
        self.wrapper = choices.one_of(*WRAPPERS)
        self.inputs: list[Value] = []
        self.parts: list[Part] = []
        self.outputs: list[Value] = []
        self.shapes: dict[str, Shape] = {}
        self.blocks: list[Class] = []
        self.tables: dict[str, tuple[int, int]] = {}  # shapes of embeddings of places

    # -- what others are made of

    def value(self, shape: Shape) -> str:
        """A new value of a shape."""
        self.shapes[name := f"x{len(self.shapes)}"] = shape
        return name

    def put(self, kinds: tuple[str, ...], drawing: Drawing, value: str, *setup: str) -> str:
        """Add a part; `{x}` is the value that is given, `{m}` what is made."""
        made, lines, shape = drawing
        name, result = f"l{len(self.parts)}", self.value(shape)

        def filled(line: str) -> str:
            return line.replace("{x}", value).replace("{y}", result).replace("{m}", f"{{{name}}}")

        first, *others = filled(lines).split("\n")
        # A line that gives names to two parts begins with their names.
        called = (first if first.startswith("a, b = ") else f"{result} = {first}", *others)
        self.parts.append(Part(name, kinds, made, tuple(map(filled, setup)), called, result, shape))
        return result

    def drawn(self, kind: str, drawing: Drawing, value: str) -> str:
        """Add a part of a kind, with a hook, a parametrization or the like around a few."""
        made, lines, shape = drawing
        weighted = made.startswith(("nn.Linear(", "nn.Conv", "nn.Embedding("))
        wrapper = self.choices.one_of(self.wrapper, *WRAPPERS) if made and self.choices.one_in(5) else ""
        kinds, setup = (kind,), ""
        if wrapper in ("weight_norm", "spectral_norm") and weighted:
            made = f"parametrizations.{wrapper}({made})"
        elif self.is_chain:
            wrapper = ""
        elif wrapper == "init" and weighted:
            how = self.choices.one_of("normal_({m}.weight, std=0.2)", "xavier_uniform_({m}.weight)", "zeros_({m}.weight)",
                                      "kaiming_uniform_({m}.weight)", "trunc_normal_({m}.weight, std=0.2)")  # fmt: skip
            setup = f"nn.init.{how}"
        elif wrapper == "frozen" and not made.startswith("nn.Buffer("):
            setup = "{m}.requires_grad_(False)"
        elif wrapper == "hook" and lines == CALL:
            setup = "{m}.register_forward_hook(lambda module, inputs, output: 1.5 * output)"
        elif wrapper == "pre_hook" and lines == CALL:
            setup = "{m}.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))"
        elif wrapper == "checkpoint" and lines == CALL and "BatchNorm" not in made:
            lines = "checkpoint({m}, {x}, use_reentrant=False)"
        else:
            wrapper = ""
        return self.put(
            (*kinds, *([wrapper] if wrapper else [])),
            (made, lines, shape),
            value,
            *([setup] if setup else []),
        )

    def linear(self, value: str, width: int, kind: str = "Linear") -> str:
        """A layer of features, of another width."""
        *places, before = self.shapes[value]
        return self.put((kind,), (f"nn.Linear({before}, {width})", CALL, (*places, width)), value)

    # -- inputs and outputs

    def add_input(self) -> str:
        """Add an input; tokens are embedded at once."""
        choices = self.choices
        kind = choices.weighted(_INPUTS)
        width, vocabulary = choices.weighted(WIDTHS), choices.one_of(32, 64, 30)
        num_axes = {"vector": 0, "sequence": 1, "image": 2, "volume": 3, "tokens": 1, "bag": 1}[kind]
        sides = (4, 2) if kind == "volume" else (8, 4, 6) if kind == "image" else (8, 8, 4, 6, 12)
        places = tuple(choices.one_of(*sides) for _ in range(num_axes))
        shape = (*places, width) if kind in ("vector", "sequence") else (min(width, 8), *places)
        if kind not in ("tokens", "bag"):
            value = self.value(shape)
            self.inputs.append(Value(value, shape))
            return value
        value = self.value(places)
        self.inputs.append(Value(value, places, vocabulary))
        if kind == "bag":
            mode = choices.one_of("mean", "sum", "max")
            made = f"nn.EmbeddingBag({vocabulary}, {width}, mode={mode!r})"
            return self.drawn("EmbeddingBag", (made, CALL, (width,)), value)
        options = choices.one_of("", "", ", padding_idx=0", ", scale_grad_by_freq=True")
        drawing = f"nn.Embedding({vocabulary}, {width}{options})", CALL, (*places, width)
        result = self.drawn("Embedding", drawing, value)
        self.tables[self.parts[-1].name] = vocabulary, width
        if not self.is_chain and choices.one_in(3):
            made = f"nn.Parameter(torch.randn({places[0] + 4}, {width}) * 0.1)"
            result = self.put(
                ("positions",), (made, f"{{x}} + {{m}}[:{places[0]}]", (*places, width)), result
            )
        return result

    def add_output(self, value: str) -> None:
        """Add an output: for each place or for all, or by a table of embeddings."""
        *places, width = shape = self.shapes[value]
        if self.tables and len(places) == 1 and not self.is_chain and not self.choices.one_in(3):
            table, (vocabulary, needed) = next(iter(self.tables.items()))
            value = value if width == needed else self.linear(value, needed)
            head = f"nn.Linear({needed}, {vocabulary}, bias=False)", CALL, (*places, vocabulary)
            if (
                self.choices.one_in(2) and len(self.parts[int(table[1:])].kinds) == 1
            ):  # its weight is a parameter
                value = self.put(("tied",), head, value, f"{{m}}.weight = {{{table}}}.weight")
            else:
                value = self.put(("tied",), ("", f"{{x}} @ {{{table}}}.weight.T", head[2]), value)
            self.outputs.append(self._of_classes(value))
            return
        if places and (len(places) > 2 or not self.choices.one_in(3)):
            value = self._vector(value)
        value = self.linear(value, self.choices.weighted(WIDTHS))
        loss, shape = self.choices.weighted(_LOSSES), self.shapes[value]
        self.outputs.append(self._of_classes(value) if loss == "classes" else Value(value, shape, loss=loss))

    def _of_classes(self, value: str) -> Value:
        *places, width = self.shapes[value]
        loss = self.choices.weighted(_OF_CLASSES)
        if places:
            loss = (
                loss.replace("(o,", "(o.flatten(0, -2),").replace("(o.", "(o.flatten(0, -2).")
                if "nll" in loss
                else loss.replace("(o,", "(o.flatten(0, -2),")
            )
            loss = loss.replace(" t", " t.flatten()")
        return Value(value, tuple(places), width, loss)

    def _vector(self, value: str) -> str:
        """One axis of features, of all places."""
        shape = self.shapes[value]
        if math.prod(shape) <= 256 and self.choices.one_in(2):
            return self.put(("Flatten",), ("nn.Flatten()", CALL, (math.prod(shape),)), value)
        if self.is_chain:
            kind = f"nn.AdaptiveAvgPool{len(shape) - 1}d(1)"
            pooled = self.put(("AdaptivePooling",), (kind, CALL, (shape[0], *(1 for _ in shape[1:]))), value)
            return self.put(("Flatten",), ("nn.Flatten()", CALL, shape[:1]), pooled)
        axes = tuple(range(1, len(shape))) if self.choices.one_in(2) else tuple(range(2, len(shape) + 1))
        left = shape[-1:] if axes[0] == 1 else shape[:1]
        return self.put(
            ("reduction",), ("", f"{{x}}.{self.choices.one_of('mean', 'amax')}({axes})", left), value
        )

    # -- parts

    def add_part(self, value: str) -> str:
        """Add a part, or several that belong together."""
        if self.is_chain:
            return self.add_layer(value)
        parts = {
            self.add_layer: 9,
            self._residual: 3,
            self._gate: 1,
            self._shared: 2,
            self._joined: 3,
            self._output_beside: 1,
            self._blocks: 2,
        }
        return self.choices.weighted(parts)(value)

    def add_layer(self, value: str) -> str:
        """Add a part that fits; a few are several modules in an `nn.Sequential`."""
        if not self.choices.one_in(10) or self.is_chain:
            return self.drawn(*self._fitting(self.shapes[value], modules=self.is_chain), value)
        shape, kinds, inner = self.shapes[value], [], []
        for _ in range(2):
            kind, (made, _, shape) = self._fitting(shape, modules=True)
            kinds.append(kind)
            inner.append(made)
        return self.put((*kinds, "Sequential"), (f"nn.Sequential({', '.join(inner)})", CALL, shape), value)

    def _fitting(self, shape: Shape, *, modules: bool) -> tuple[str, Drawing]:
        """A kind that fits a shape, and what is drawn of it; of modules, those that are called with one value alone."""
        fits = {
            kind: weight + 20 * (kind in self.favourites)
            for kind, (ranks, weight, _) in (MODULES if modules else KINDS).items()
            if len(shape) in ranks
        }
        while True:
            kind = self.choices.weighted(fits)
            drawing = KINDS[kind][2](self.choices, shape)
            if math.prod(drawing[2]) <= _MOST_ELEMENTS and not (modules and drawing[1] != CALL):
                return kind, drawing
            del fits[kind]

    def _residual(self, value: str) -> str:
        inner = self.add_layer(value)
        if self.choices.one_in(2):
            inner = self.add_layer(inner)
        *places, width = shape = self.shapes[value]
        if tuple(places) != self.shapes[inner][:-1]:
            return inner
        inner = inner if self.shapes[inner] == shape else self.linear(inner, width)
        return self.put(
            ("residual",),
            ("", self.choices.one_of(f"{{x}} + {inner}", f"torch.add({inner}, {{x}}, alpha=0.5)"), shape),
            value,
        )

    def _gate(self, value: str) -> str:
        shape = self.shapes[value]
        gate = self.linear(value, shape[-1])
        line = self.choices.one_of(
            f"{{x}} * {gate}.sigmoid()",
            f"torch.lerp({{x}}, {gate}, {gate}.sigmoid())",
            f"{{x}} * F.hardsigmoid({gate})",
        )
        return self.put(("gate",), ("", line, shape), value)

    def _shared(self, value: str) -> str:
        """A module that is called twice, with another part between."""
        shape = self.shapes[value]
        value = self.linear(value, shape[-1])
        name = self.parts[-1].name
        value = self.put(
            ("norm",),
            ("", "F.layer_norm({x}, ({n},), eps=1e-3)".replace("{n}", str(shape[-1])), shape),
            value,
        )
        line = self.choices.one_of(
            f"{{{name}}}({{x}})",
            f"F.linear({{x}}, {{{name}}}.weight.T, {{{name}}}.bias)",
            f"{{x}} @ {{{name}}}.weight",
        )
        return self.put(("shared",), ("", line, shape), value)

    def _joined(self, value: str) -> str:
        """Another input, which is attended to, added, multiplied or concatenated."""
        if len(self.inputs) > 2 or self.is_block:
            return self.add_layer(value)
        other, shape = self.add_input(), self.shapes[value]
        for _ in range(self.choices.below(3)):
            other = self.add_layer(other)
        if len(shape) == len(self.shapes[other]) == 2 and self.choices.one_in(2):
            (length, width), (keys, other_width) = shape, self.shapes[other]
            made, passed = attention_of(self.choices, width, other_width, length, keys)
            return self.put(("attended",), (made, f"{{m}}({{x}}, {other}, {other}{passed})[0]", shape), value)
        if len(self.shapes[other]) > 1:
            other = self._vector(other)
        if len(shape) == 1 and self.choices.one_in(2):
            if self.choices.one_in(2):
                made = f"nn.Bilinear({shape[0]}, {self.shapes[other][0]}, 8)"
                return self.put(("joined",), (made, f"{{m}}({{x}}, {other})", (8,)), value)
            width = shape[0] + self.shapes[other][0]
            return self.put(("joined",), ("", f"torch.cat([{{x}}, {other}], -1)", (width,)), value)
        other = self.linear(other, shape[-1])
        if len(shape) > 1:
            other = f"{other}[:, {', '.join('None' for _ in shape[1:])}]"
        return self.put(("joined",), ("", f"{{x}} {self.choices.one_of('+', '*')} {other}", shape), value)

    def _output_beside(self, value: str) -> str:
        if len(self.outputs) < 2 and not self.is_block:
            self.add_output(value)
        return self.add_layer(value)

    def _blocks(self, value: str) -> str:
        """A module of a class of its own, or several; a few with their activations computed again."""
        if self.is_block or self.blocks:
            return self.add_layer(value)
        block, shape = _Growing(self.choices, self.favourites, is_block=True), self.shapes[value]
        inner = first = block.value(shape)
        for _ in range(1 + self.choices.below(3)):
            inner = block.add_part(inner)
        again = block.shapes[inner] == shape
        if again and self.choices.one_in(2):
            inner = block.put(("residual",), ("", f"{{x}} + {inner}", shape), first)
        self.blocks.append(
            Class("Block", self.choices.weighted(_STYLES), (first,), tuple(block.parts), (inner,))
        )
        called = "checkpoint({m}, {x}, use_reentrant=False)" if self.choices.one_in(4) else CALL
        drawing = "Block()", called, block.shapes[inner]
        if again and self.choices.one_in(2):
            line = called.replace("{m}", "block").replace("{x}", "{y}")
            drawing = (
                "nn.ModuleList(Block() for _ in range(2))",
                f"{{x}}\nfor block in {{m}}:\n    {{y}} = {line}",
                shape,
            )
        return self.put(("blocks",), drawing, value)
