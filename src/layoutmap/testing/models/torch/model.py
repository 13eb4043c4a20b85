"""Torch models as values: classes with modules and `forward`, and the program that creates the model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.torch.modules import SOURCES
from layoutmap.testing.models.values import (
    ModelValue,
    make_losses_code,
    make_whole_batch_code,
)

_INDENT = "    "
_IN_BFLOAT16 = """

def autocast(call):
    for device in ("cpu", *["cuda"] * torch.cuda.is_available()):
        call = torch.autocast(device, torch.bfloat16)(call)
    return call


def make_model(make=make_model):
    model = make()
    CHANGED
    return model


loss = autocast(loss)
"""
_IN_FLOAT64 = """

def double(value):
    if isinstance(value, tuple | list):
        return type(value)(map(double, value))
    return value.double() if value.is_floating_point() else value


def make_model(make=make_model):
    model = make()
    model.double().register_forward_pre_hook(lambda _, inputs: double(inputs))
    return model


loss = lambda outputs, targets, loss=loss: loss(double(outputs), double(targets))
"""
_HOOKS = """
def halve(weight):
    weight.grad.mul_(0.5)


def clip(weight):
    nn.utils.clip_grad_norm_(weight, 0.05)

"""
_HEAD = """
def train_with_head(model, *, loss=None, optimizer, **options):
    @cache
    def get_head():  # at its first use, the scope of the model is closed, so the head is unsharded
        weight = next(model.parameters())
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Linear({width}, 4).to(weight.device, weight.dtype)

    def add_loss_of_head(results, targets):
        value = get_head()({output}.to(get_head().weight.dtype))
        return {own_loss} + value.square().mean()

    def make_optimizer(weights):
        weights = [*weights, *get_head().parameters()]

        def clip_gradients(*_):
            nn.utils.clip_grad_norm_(weights, {max_norm}, foreach={foreach})

        made = optimizer(weights)
        made.register_step_pre_hook(clip_gradients)
        return made

    return train_with(model, loss=add_loss_of_head, optimizer=make_optimizer, **options)

"""
_CAST = "lambda _, inputs: tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)"
_MODULE_CALL = re.compile(r"checkpoint\(([{}\w]+), (\w+), use_reentrant=False\)|({l\d+}|\bblock)\((\w+)\)")
CHECKPOINT_SIDES = "caller", "wrapper", "module"
"""The callers of `checkpoint`: the caller of the module, torch's `checkpoint_wrapper`, or the module itself."""
_SGD = "partial(torch.optim.SGD, lr=0.05, momentum=0.9)"


@dataclass(frozen=True)
class Checkpoint:
    """An activation checkpoint of a part's modules."""

    side: str  # one of `CHECKPOINT_SIDES`
    is_reentrant: bool

    def make_module_code(self, module: str) -> str:
        """Return the expression of a module that computes its activations again, if the caller does not do that."""
        if self.side == "caller":
            return module
        if self.side == "module":
            return f"checkpoint_itself({module}, use_reentrant={self.is_reentrant})"
        implementation = ", CheckpointImpl.REENTRANT" if self.is_reentrant else ""
        return f"checkpoint_wrapper({module}{implementation})"

    def make_call_code(self, module: str, value: str) -> str:
        """Return the expression that calls a module."""
        # Without an input that requires a gradient, a reentrant checkpoint computes no gradients of weights.
        value += ".requires_grad_()" if self.is_reentrant else ""
        if self.side == "caller":
            return f"checkpoint({module}, {value}, use_reentrant={self.is_reentrant})"
        return f"{module}({value})"


@dataclass(frozen=True)
class Head:
    """An unsharded layer on the first output of a sharded model, with one optimizer for both."""

    max_norm: float  # norm to which the gradients of both are clipped together
    foreach: bool  # whether the norm and the step are computed by operators of lists, as by default on GPUs


@dataclass(frozen=True)
class Part:
    """Part of a class for one layer: its module, and its lines of `__init__` and of `forward`.

    In lines and expressions, `{l3}` stands for the attribute of the part `l3`.
    """

    name: str
    kinds: tuple[str, ...]  # kinds of the layer and its wrappers
    module: str  # expression that creates a module, parameter, or buffer; empty: none
    setup: tuple[str, ...]  # further lines of `__init__`
    lines: tuple[str, ...]  # lines of `forward`
    value: str  # name of the variable with the result
    shape: Shape  # shape of the result without the batch axis
    checkpoint: Checkpoint | None = None  # None: the checkpoint in `lines`, if there is one

    @property
    def source_module(self) -> str:
        """The expression that creates the module, with its checkpoint."""
        if self.checkpoint is None:
            return self.module
        if "Block()" in self.module:
            return self.module.replace("Block()", self.checkpoint.make_module_code("Block()"))
        return self.checkpoint.make_module_code(self.module)

    @property
    def source_lines(self) -> tuple[str, ...]:
        """The lines of `forward`, with the checkpoint."""
        if self.checkpoint is None:
            return self.lines
        make_call_code = self.checkpoint.make_call_code
        return tuple(
            _MODULE_CALL.sub(lambda match: make_call_code(match[1] or match[3], match[2] or match[4]), line)
            for line in self.lines
        )

    @property
    def can_be_checkpointed(self) -> bool:
        """Whether a checkpoint can compute the calls of the module again."""
        is_called = self.is_single_module_call or self.kinds[0] == "blocks" or "checkpoint" in self.kinds
        return is_called and self.has_module and "BatchNorm" not in self.module

    @property
    def has_module(self) -> bool:
        """Whether the part has a module, rather than a parameter, a buffer, or none of these."""
        return bool(self.module) and not self.module.startswith(("nn.Parameter(", "nn.Buffer("))

    @property
    def is_single_module_call(self) -> bool:
        """Whether the part does nothing but call its module with one value."""
        pattern = rf"\w+ = {{{self.name}}}\(\w+\)"
        return not self.setup and len(self.lines) == 1 and re.fullmatch(pattern, self.lines[0]) is not None


@dataclass(frozen=True)
class Class:
    """A subclass of `nn.Module`."""

    name: str
    style: str  # how it stores modules and parameters: as "attributes", or in a "list" or "dict" of each
    inputs: tuple[str, ...]  # names of the arguments of `forward`
    parts: tuple[Part, ...]
    outputs: tuple[str, ...]  # names of the variables that `forward` returns

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """Map from the name of each part to its attribute, such as `parts[3]`."""
        attributes, numbers = dict[str, str](), Counter[str]()
        for part in self.parts:
            container = "parts" if part.has_module else "weights"
            attributes[part.name] = part.name
            if part.module and self.style != "attributes" and not part.module.startswith("nn.Buffer("):
                key = repr(part.name) if self.style == "dict" else numbers[container]
                attributes[part.name] = f"{container}[{key}]"
                numbers[container] += 1
        return attributes

    def get_module_path(self, name: str) -> str:
        """Return the path of a part's module in a state dict."""
        return re.sub(r"\['?(\w+)'?\]", r".\1", self.attributes[name])

    @property
    def source(self) -> str:
        """The lines that define the class."""
        members = [
            f"self.{self.attributes[part.name]} = {part.source_module}" for part in self.parts if part.module
        ]
        if self.style != "attributes":
            members = self._make_container_lines()
        setup = [line for part in self.parts for line in part.setup]
        lines = [line for part in self.parts for line in part.source_lines]
        return "\n".join(
            [
                f"class {self.name}(nn.Module):",
                f"{_INDENT}def __init__(self):",
                *(
                    2 * _INDENT + self._replace_names_by_attributes(line)
                    for line in ["super().__init__()", *members, *setup]
                ),
                "",
                f"{_INDENT}def forward(self, {', '.join(self.inputs)}):",
                *(2 * _INDENT + self._replace_names_by_attributes(line) for line in lines),
                f"{2 * _INDENT}return {', '.join(self.outputs)}",
                "\n\n",
            ]
        )

    def _make_container_lines(self) -> list[str]:
        lines: list[str] = []
        for name, kind in (("parts", "Module"), ("weights", "Parameter")):
            items = [part for part in self.parts if self.attributes[part.name].startswith(f"{name}[")]
            is_list = self.style == "list"
            keys = ["" if is_list else f"{part.name!r}: " for part in items]
            inner = [f"{_INDENT}{key}{part.source_module}," for key, part in zip(keys, items, strict=True)]
            opening, closing = ("List([", "])") if is_list else ("Dict({", "})")
            lines += [f"self.{name} = nn.{kind}{opening}", *inner, closing] if items else []
        buffers = [part for part in self.parts if part.module.startswith("nn.Buffer(")]
        return [*lines, *(f"self.{part.name} = {part.module}" for part in buffers)]

    def _replace_names_by_attributes(self, line: str) -> str:
        """Return a line where each part's name in braces is replaced by its attribute of `self`."""
        return re.sub(r"\{(l\d+)\}", lambda match: f"self.{self.attributes[match[1]]}", line)


_WITH_LOSS = """
class WithLoss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, *given):
        outputs = self.net(*given[:{number}])
        return loss(outputs, {targets}), outputs


def with_targets(inputs, targets):
    return [*inputs, *targets], targets

"""


@dataclass(frozen=True)
class Model:
    """A torch model."""

    library: ClassVar[str] = "torch"
    imports: ClassVar[str] = """\
from functools import cache, partial

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from layoutmap.adapters.torch import train_with
"""
    optimizers: ClassVar[Mapping[str, int]] = {
        _SGD: 6,
        "partial(torch.optim.SGD, lr=0.05)": 1,
        "partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)": 1,
        "partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, foreach=False)": 1,
        "partial(torch.optim.Adam, lr=0.001)": 2,
        "partial(torch.optim.Adam, lr=0.001, weight_decay=0.01, amsgrad=True)": 1,
        "partial(torch.optim.AdamW, lr=0.001)": 1,
        "partial(torch.optim.AdamW, lr=0.001, fused=True)": 1,
        "partial(torch.optim.RMSprop, lr=0.001, momentum=0.9, centered=True)": 1,
        "partial(torch.optim.Adagrad, lr=0.01)": 1,
        "partial(torch.optim.NAdam, lr=0.001, decoupled_weight_decay=True, weight_decay=0.01)": 1,
    }
    precision_lines: ClassVar[Mapping[str, str]] = {
        "bfloat16": _IN_BFLOAT16.replace("CHANGED", f"model.bfloat16().register_forward_pre_hook({_CAST})"),
        "mixed_bfloat16": _IN_BFLOAT16.replace("CHANGED", "model.forward = autocast(model.forward)"),
    }
    float64_lines: ClassVar[str] = _IN_FLOAT64
    plan_inputs: ClassVar[str] = ""

    is_sequential: bool  # whether the model is an `nn.Sequential` of its parts, without a class of its own
    inputs: tuple[ModelValue, ...]
    classes: tuple[Class, ...]  # classes, each after the classes that it uses; the last one is the model
    outputs: tuple[ModelValue, ...]
    # whether a wrapper of the model takes targets and returns loss and outputs, as Hugging Face models do
    returns_loss: bool = False
    hooks: tuple[str, ...] = ()  # lines of `make_model` that register hooks on the gradient of a `weight`
    hooked: tuple[int, int] = (0, 1)  # index of the first hooked weight, and the distance to the next
    num_passes: int = 1  # number of backward passes that accumulate gradients before a step
    head: Head | None = None  # an unsharded layer on the first output; None: there is none

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kinds of all layers and wrappers of the model, in order."""
        return tuple(
            kind for module_class in self.classes for part in module_class.parts for kind in part.kinds
        )

    @property
    def layer_output_shapes(self) -> Mapping[str, Shape]:
        """Output shapes of modules that are called once and with one value, by path."""
        net = self.classes[-1]
        num_uses = Counter(re.findall(r"\{(l\d+)\}", str([part.lines for part in net.parts])))
        parts = [part for part in net.parts if part.is_single_module_call and num_uses[part.name] == 1]
        prefix = "net." if self.returns_loss else ""
        if self.is_sequential:
            return {f"{prefix}{net.parts.index(part)}": part.shape for part in parts}
        return {f"{prefix}{net.get_module_path(part.name)}": part.shape for part in parts}

    def make_batch_code(self, rows: int) -> str:
        """Return the expression that draws a batch from `rng`."""
        if not self.returns_loss:
            return make_whole_batch_code(self.inputs, self.outputs, rows)
        inputs, targets = (
            ", ".join(value.make_batch_code(rows) for value in values)
            for values in (self.inputs, self.outputs)
        )
        return f"with_targets([{inputs}], [{targets}])"

    def make_code(self, optimizer: str) -> str:
        """Return the program of `make_model`, which returns the model with its loss and optimizer."""
        text = " ".join(part.source_module for module_class in self.classes for part in module_class.parts)
        custom = "".join(source for name, source in SOURCES.items() if f"{name}(" in text)
        *inner, net = self.classes
        classes = "".join(each.source for each in (inner if self.is_sequential else self.classes))
        model = [f"model = {net.name}()"]
        if self.is_sequential:
            model = ["model = nn.Sequential(", *(f"{_INDENT}{part.module}," for part in net.parts), ")"]
        if self.head and self.head.foreach and "foreach" not in optimizer and "fused" not in optimizer:
            optimizer = f"{optimizer.removesuffix(')')}, foreach=True)"
        options = f"optimizer={optimizer}" + f", num_passes={self.num_passes}" * (self.num_passes > 1)
        if self.hooks:
            first, step = self.hooked
            model += [
                "trained = [weight for weight in model.parameters() if weight.requires_grad]",
                f"for weight in trained[{first}::{step}]:",
                *(_INDENT + hook for hook in self.hooks),
            ]
        train_with = "train_with_head" if self.head else "train_with"
        result, with_loss = f"return {train_with}(model, loss=loss, {options})", ""
        if self.returns_loss:
            result = f"return {train_with}(WithLoss(model), {options})"
            targets = "given[-1]" if len(self.outputs) == 1 else f"given[{-len(self.outputs)}:]"
            with_loss = _WITH_LOSS.format(number=len(self.inputs), targets=targets)
        return "\n".join(
            [
                f"{custom}{classes}def loss(outputs, targets):",
                f"{_INDENT}return {make_losses_code(self.outputs, 'o')}",
                f"\n{with_loss}{_HOOKS * bool(self.hooks)}{self._make_head_code()}",
                "def make_model():",
                *(_INDENT + line for line in [*model, result]),
                "",
            ]
        )

    def _make_head_code(self) -> str:
        """Return the source of `train_with_head`, or an empty text if there is no head."""
        if self.head is None:
            return ""
        output, first = self.outputs[0], "" if len(self.outputs) == 1 else "[0]"
        return _HEAD.format(
            width=output.classes or output.shape[-1],
            own_loss="results[0]" if self.returns_loss else "loss(results, targets)",
            output=f"results[1]{first}" if self.returns_loss else f"results{first}",
            max_norm=self.head.max_norm,
            foreach=self.head.foreach or None,
        )
