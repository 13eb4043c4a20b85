"""Draw torch models part by part."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import replace

from layoutmap.testing.models.builder import ModelBuilder
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.torch.kinds import KINDS, DrawnLayer, draw_layer_of_kind
from layoutmap.testing.models.torch.layers import CALL, draw_attention
from layoutmap.testing.models.torch.model import CHECKPOINT_SIDES, Checkpoint, Class, Model, Part
from layoutmap.testing.models.values import WIDTHS, ModelValue

_INPUTS = {"vector": 3, "sequence": 7, "image": 6, "volume": 2, "tokens": 5, "bag": 2}
_STYLES = {"attributes": 5, "list": 1, "dict": 1}
_LOSSES = {  # how often each expression of the loss of an output `o` and targets `t` is drawn
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
_CLASS_LOSSES = {
    "F.cross_entropy(o, t)": 3,
    "F.cross_entropy(o, t, label_smoothing=0.1)": 1,
    "F.cross_entropy(o, t, ignore_index=1)": 1,
    "F.nll_loss(F.log_softmax(o, -1), t)": 1,
    "F.cross_entropy(o, t, reduction='none').mean()": 1,
}
_WRAPPERS = {  # variations of a module `{m}`: for each, the line that it adds to `__init__`, or an empty text
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
HOOKS = (  # lines that register hooks on the gradient of a `weight`
    "weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))",
    "weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))",
    "weight.register_hook(torch.tanh)",
    "weight.register_post_accumulate_grad_hook(halve)",
    "weight.register_post_accumulate_grad_hook(clip)",
    "torch.autograd.graph.register_multi_grad_hook([weight], lambda gradients: None)",
)
_CHECKPOINT = "checkpoint({m}, {x}, use_reentrant=False)"
_MAX_OUTPUT_ELEMENTS = 1024
_WRAPPERS_WITH_SETUP = [name for name, line in _WRAPPERS.items() if line]


def draw_model(choices: Choices) -> Model:
    """Draw a model of a few parts."""
    is_sequential = choices.draw_true_once_in(8)
    builder = _TorchBuilder(choices, choices.sample(KINDS, 5), is_chain=is_sequential)
    builder.build_model(max_parts=5)
    inputs, outputs = (tuple(value.name for value in values) for values in (builder.inputs, builder.outputs))
    net = Class("Net", choices.pick_weighted(_STYLES), inputs, tuple(builder.parts), outputs)
    classes, returns_loss = (*builder.blocks, net), choices.draw_true_once_in(2)
    model = Model(is_sequential, tuple(builder.inputs), classes, tuple(builder.outputs), returns_loss)
    # Hooks and checkpoints were added later. Each seed must still give the same layers, so both have choices of their
    # own, seeded by the model's text without later names and fields (decisions/0200).
    text = repr(model).replace(" module=", " made=").replace("ModelValue(", "Value(")
    text = text.replace(", checkpoint=None", "").replace(", head=None", "")
    model = _with_random_hooks(model, Choices.from_seed(zlib.crc32(text.encode())))
    # The seeds of faults in tests/testing/test_laws.py must give the same models as before. With this prefix, they draw
    # no checkpoints.
    return _with_random_checkpoints(model, Choices.from_seed(zlib.crc32(f"checkpoints{text}".encode())))


def _with_random_hooks(model: Model, choices: Choices) -> Model:
    """Return a model, a third of the time with hooks on gradients and several backward passes."""
    if not choices.draw_true_once_in(3):
        return model
    hooks = choices.sample(HOOKS, choices.pick(0, 1, 1, 2))
    hooked = choices.draw_below(2), choices.pick(1, 1, 2)
    return replace(model, hooks=tuple(hooks), hooked=hooked, num_passes=choices.pick(2, 1, 3))


def _with_random_checkpoints(model: Model, choices: Choices) -> Model:
    """Return a model, a third of the time with activation checkpoints of both kinds, called by either side."""
    if model.is_sequential or not choices.draw_true_once_in(3):
        return model

    def with_random_checkpoint(part: Part) -> Part:
        if not part.can_be_checkpointed or not choices.draw_true_once_in(2):
            return part
        # Tokens have no gradient, and without one a reentrant checkpoint computes no gradients of weights.
        is_reentrant = choices.pick(True, True, False) and "Embedding" not in part.module
        return replace(part, checkpoint=Checkpoint(choices.pick(*CHECKPOINT_SIDES), is_reentrant))

    classes = (replace(each, parts=tuple(map(with_random_checkpoint, each.parts))) for each in model.classes)
    return replace(model, classes=tuple(classes))


class _TorchBuilder(ModelBuilder):
    """Builder of a torch model, or of a class inside of one. In a chain, each layer is a module."""

    favorite_frequency = 30

    def __init__(
        self, choices: Choices, favorites: list[str], *, is_chain: bool = False, is_block: bool = False
    ):
        super().__init__(choices, favorites, is_chain=is_chain)
        self.is_block = is_block
        self.parts: list[Part] = []
        self.blocks: list[Class] = []
        # The name, vocabulary size, and width of an embedding that can share its weight with an output.
        self._embedding: tuple[str, int, int] | None = None

    def _append_part(self, kinds: str, drawn_layer: DrawnLayer, value: str, *setup: str) -> str:
        """Add a part, and return the variable of its result. `kinds` may have several kinds, separated by blanks."""
        module, use, shape = drawn_layer
        name, result = f"l{len(self.parts)}", self.create_program_variable(shape)

        def fill_names(line: str) -> str:
            return line.replace("{x}", value).replace("{y}", result).replace("{m}", f"{{{name}}}")

        lines = tuple(fill_names(f"{result} = {use}").split("\n"))
        part = Part(name, tuple(kinds.split()), module, tuple(map(fill_names, setup)), lines, result, shape)
        self.parts.append(part)
        return result

    def _append_expression(self, kind: str, value: str, shape: Shape, *expressions: str) -> str:
        """Add a part without a module that computes one of the expressions, and return the variable of its result."""
        return self._append_part(kind, ("", self.choices.pick(*expressions), shape), value)

    def _append_varied_part(self, kind: str, drawn_layer: DrawnLayer, value: str) -> str:
        """Add a part, and return the variable of its result. A quarter of modules get a hook or another variation."""
        module, use, shape = drawn_layer
        if not module or not self.choices.draw_true_once_in(4):
            return self._append_part(kind, drawn_layer, value)
        has_weight, is_called = module.startswith(("nn.Linear(", "nn.Conv")), use == CALL
        usable = {
            # An output may share the weight of an embedding, and must be trained, so do not freeze embeddings.
            "frozen": not module.startswith(("nn.Buffer(", "nn.Embedding(")),
            "hook": is_called,
            "pre_hook": is_called and "Embedding" not in module,
            "checkpoint": is_called and "BatchNorm" not in module and not self.is_chain,
        }
        wrappers = [
            name
            for name in _WRAPPERS
            if usable.get(name, has_weight) and not (self.is_chain and name in _WRAPPERS_WITH_SETUP)
        ]
        wrapper = self.choices.pick(*wrappers, "")
        if wrapper == "checkpoint":
            use = _CHECKPOINT
        elif wrapper.endswith("_norm"):
            module = f"parametrizations.{wrapper}({module})"
        setup = [_WRAPPERS[wrapper]] if wrapper in _WRAPPERS_WITH_SETUP else []
        return self._append_part(f"{kind} {wrapper}", (module, use, shape), value, *setup)

    def add_linear(self, value: str, width: int) -> str:
        *spatial, before = self.shapes[value]
        return self._append_part("Linear", (f"nn.Linear({before}, {width})", CALL, (*spatial, width)), value)

    # -- inputs and outputs

    def add_input(self) -> str:
        choices, kind = self.choices, self.choices.pick_weighted(_INPUTS)
        width, vocabulary = choices.pick_weighted(WIDTHS), choices.pick(32, 64, 30)
        sides = (4, 2) if kind == "volume" else (8, 4, 6) if kind == "image" else (8, 8, 4, 6, 12)
        num_axes = {"vector": 0, "image": 2, "volume": 3}.get(kind, 1)
        spatial = tuple(choices.pick(*sides) for _ in range(num_axes))
        shape = (min(width, 8), *spatial) if num_axes > 1 else (*spatial, width)
        if kind not in ("tokens", "bag"):
            self.inputs.append(ModelValue(self.create_program_variable(shape), shape))
            return self.inputs[-1].name
        value = self.create_program_variable(spatial)
        self.inputs.append(ModelValue(value, spatial, vocabulary))
        if kind == "bag":
            module = f"nn.EmbeddingBag({vocabulary}, {width}, mode='{choices.pick('mean', 'sum', 'max')}')"
            return self._append_varied_part("EmbeddingBag", (module, CALL, (width,)), value)
        options = choices.pick("", "", ", padding_idx=0", ", scale_grad_by_freq=True")
        module = f"nn.Embedding({vocabulary}, {width}{options})"
        result = self._append_varied_part("Embedding", (module, CALL, shape), value)
        self._embedding = self.parts[-1].name, vocabulary, width
        if self.is_chain or not choices.draw_true_once_in(3):
            return result
        positions = f"nn.Parameter(torch.randn({spatial[0] + 4}, {width}) * 0.1)"
        return self._append_part("positions", (positions, f"{{x}} + {{m}}[:{spatial[0]}]", shape), result)

    def add_output(self, value: str) -> None:
        choices, spatial = self.choices, self.shapes[value][:-1]
        if self._embedding and len(spatial) == 1 and not self.is_chain and not choices.draw_true_once_in(3):
            value, loss = self._add_tied_output(value, *self._embedding), "classes"
        else:
            if spatial and (len(spatial) > 2 or not choices.draw_true_once_in(3)):
                value = self._flatten_or_reduce_to_features(value)
            value = self.add_linear(value, choices.pick_weighted(WIDTHS))
            loss = choices.pick_weighted(_LOSSES)
        *spatial, width = shape = self.shapes[value]
        if loss != "classes":
            self.outputs.append(ModelValue(value, shape, loss=loss))
            return
        loss = choices.pick_weighted(_CLASS_LOSSES)
        if spatial:
            loss = loss.replace("(o,", "(o.flatten(0, -2),").replace(" t", " t.flatten()")
        self.outputs.append(ModelValue(value, tuple(spatial), width, loss))

    def _add_tied_output(self, value: str, embedding: str, vocabulary: int, width: int) -> str:
        """Add logits that use the weight of an embedding, and return their variable."""
        value = value if self.shapes[value][-1] == width else self.add_linear(value, width)
        shape = (*self.shapes[value][:-1], vocabulary)
        if self.choices.draw_true_once_in(2):
            return self._append_expression("tied", value, shape, f"{{x}} @ {{{embedding}}}.weight.T")
        module = f"nn.Linear({width}, {vocabulary}, bias=False)"
        return self._append_part(
            "tied", (module, CALL, shape), value, f"{{m}}.weight = {{{embedding}}}.weight"
        )

    def _flatten_or_reduce_to_features(self, value: str) -> str:
        """Flatten or reduce all axes of a value to one axis of features, and return the variable of the result."""
        shape = self.shapes[value]
        if not self.is_chain and (math.prod(shape) > 256 or self.choices.draw_true_once_in(2)):
            axes, left = tuple(range(1, len(shape))), shape[-1:]
            if self.choices.draw_true_once_in(2):
                axes, left = tuple(range(2, len(shape) + 1)), shape[:1]
            return self._append_expression(
                "reduction", value, left, f"{{x}}.mean({axes})", f"{{x}}.amax({axes})"
            )
        if math.prod(shape) > 256:
            pool = f"nn.AdaptiveAvgPool{len(shape) - 1}d(1)"
            shape = (shape[0], *(1 for _ in shape[1:]))
            value = self._append_part("AdaptivePooling", (pool, CALL, shape), value)
        return self._append_part("Flatten", ("nn.Flatten()", CALL, (math.prod(shape),)), value)

    # -- parts

    def get_part_frequencies(self) -> dict[Callable[[str], str], int]:
        weights = super().get_part_frequencies()
        joined, output = (
            weights.pop(add) for add in (self.add_input_and_combine_with_value, self.add_second_output)
        )
        weights[self._add_class_instances] = 2
        if not self.is_block:
            weights |= {self.add_input_and_combine_with_value: joined, self.add_second_output: output}
        return weights

    def add_layer(self, value: str) -> str:
        shape = self.shapes[value]
        if self.is_chain or not self.choices.draw_true_once_in(10):
            return self._append_varied_part(*self._draw_layer(shape, only_modules=self.is_chain), value)
        kinds, modules = "Sequential", list[str]()
        for _ in range(2):
            kind, (module, _, shape) = self._draw_layer(shape, only_modules=True)
            kinds, modules = f"{kinds} {kind}", [*modules, module]
        return self._append_part(kinds, (f"nn.Sequential({', '.join(modules)})", CALL, shape), value)

    def _draw_layer(self, shape: Shape, *, only_modules: bool) -> tuple[str, DrawnLayer]:
        """Draw a layer for an input shape. With `only_modules`, it is a module that fits into an `nn.Sequential`."""
        weights = {
            kind: weight
            for kind, (ranks, weight, _) in KINDS.items()
            if len(shape) in ranks and (kind[0].isupper() or not only_modules)
        }

        def draw_small_layer(kind: str) -> DrawnLayer | None:
            drawn_layer = draw_layer_of_kind(self.choices, kind, shape)
            if not drawn_layer or math.prod(drawn_layer[2]) > _MAX_OUTPUT_ELEMENTS:
                return None
            return None if only_modules and drawn_layer[1] != CALL else drawn_layer

        return self.draw_kind_and_layer(weights, draw_small_layer)

    def add_sum(self, value: str, other: str) -> str:
        expressions = f"{{x}} + {other}", f"torch.add({other}, {{x}}, alpha=0.5)"
        return self._append_expression("residual", value, self.shapes[value], *expressions)

    def add_gate(self, value: str) -> str:
        shape = self.shapes[value]
        gate = self.add_linear(value, shape[-1])
        expressions = (
            f"{{x}} * {gate}.sigmoid()",
            f"torch.lerp({{x}}, {gate}, {gate}.sigmoid())",
            f"{{x}} * F.hardsigmoid({gate})",
        )
        return self._append_expression("gate", value, shape, *expressions)

    def add_shared_layer(self, value: str) -> str:
        shape = self.shapes[value]
        value = self.add_linear(value, shape[-1])
        layer = f"{{{self.parts[-1].name}}}"
        value = self._append_expression(
            "norm", value, shape, f"F.layer_norm({{x}}, ({shape[-1]},), eps=1e-3)"
        )
        expressions = (
            f"{layer}({{x}})",
            f"F.linear({{x}}, {layer}.weight.T, {layer}.bias)",
            f"{{x}} @ {layer}.weight",
        )
        return self._append_expression("shared", value, shape, *expressions)

    def combine_with_other_input(self, value: str, other: str) -> str:
        choices, shape = self.choices, self.shapes[value]
        if len(shape) == len(self.shapes[other]) == 2 and choices.draw_true_once_in(2):
            return self._append_part(
                "attended", draw_attention(choices, shape, other, self.shapes[other]), value
            )
        other = self._flatten_or_reduce_to_features(other) if len(self.shapes[other]) > 1 else other
        (width,) = self.shapes[other]
        if len(shape) == 1 and choices.draw_true_once_in(2):
            joined = "", f"torch.cat([{{x}}, {other}], -1)", (shape[0] + width,)
            product = f"nn.Bilinear({shape[0]}, {width}, 8)", f"{{m}}({{x}}, {other}.sigmoid())", (8,)
            return self._append_part("joined", choices.pick(joined, product), value)
        other = self.add_linear(other, shape[-1])
        other = f"{other}[:, {', '.join('None' for _ in shape[1:])}]" if len(shape) > 1 else other
        return self._append_expression("joined", value, shape, f"{{x}} + {other}", f"{{x}} * {other}")

    def _add_class_instances(self, value: str) -> str:
        """Add one or two instances of a new class. A quarter of them recompute activations in the backward pass."""
        if self.is_block or self.blocks:
            return self.add_layer(value)
        block, shape = _TorchBuilder(self.choices, list(self.favorites), is_block=True), self.shapes[value]
        result = argument = block.create_program_variable(shape)
        for _ in range(1 + self.choices.draw_below(2)):
            result = block.add_random_part(result)
        keeps_shape = block.shapes[result] == shape
        if keeps_shape and self.choices.draw_true_once_in(2):
            result = block._append_expression("residual", argument, shape, f"{{x}} + {result}")
        style = self.choices.pick_weighted(_STYLES)
        self.blocks.append(Class("Block", style, (argument,), tuple(block.parts), (result,)))
        call = self.choices.pick(CALL, CALL, CALL, _CHECKPOINT)
        if not keeps_shape or self.choices.draw_true_once_in(2):
            return self._append_part("blocks", ("Block()", call, block.shapes[result]), value)
        line = call.replace("{m}", "block").replace("{x}", "{y}")
        module = "nn.ModuleList(Block() for _ in range(2))"
        return self._append_part(
            "blocks", (module, f"{{x}}\nfor block in {{m}}: {{y}} = {line}", shape), value
        )
