"""Torch models as values: what their classes hold, what `forward` does with it, and the program that makes one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.torch.own import OWN
from layoutmap.testing.models.values import Value, batch_source

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
_CAST = "lambda _, inputs: tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)"
_SGD = "partial(torch.optim.SGD, lr=0.05, momentum=0.9)"


@dataclass(frozen=True)
class Part:
    """A few lines of a class that belong together: what they make in `__init__`, and compute in `forward`.

    In lines and expressions, `{l3}` stands for the attribute that holds what the part of that name has made.

    Args:
        name: Its name.
        kinds: Its kind, and those of what is around it.
        made: The expression of the module, parameter or buffer that it holds; empty: none.
        setup: Further lines of `__init__`.
        lines: The lines of `forward`.
        value: What `forward` calls the result.
        shape: The shape of the result, without rows.
    """

    name: str
    kinds: tuple[str, ...]
    made: str
    setup: tuple[str, ...]
    lines: tuple[str, ...]
    value: str
    shape: Shape

    @property
    def is_module(self) -> bool:
        """Whether it holds a module."""
        return bool(self.made) and not self.made.startswith(("nn.Parameter(", "nn.Buffer("))

    @property
    def is_call(self) -> bool:
        """Whether all it does is to call its module with one value."""
        pattern = rf"\w+ = {{{self.name}}}\(\w+\)"
        return not self.setup and len(self.lines) == 1 and re.fullmatch(pattern, self.lines[0]) is not None


@dataclass(frozen=True)
class Class:
    """A class of modules.

    Args:
        name: Its name.
        style: `"attributes"`: each part is an attribute; `"list"`, `"dict"`: modules and parameters are in containers.
        inputs: The arguments of `forward`.
        parts: Its parts, in order.
        outputs: What `forward` returns.
    """

    name: str
    style: str
    inputs: tuple[str, ...]
    parts: tuple[Part, ...]
    outputs: tuple[str, ...]

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """The attribute that holds what a part has made, by the part's name, as in `parts[3]`."""
        found, numbers = dict[str, str](), Counter[str]()
        for part in self.parts:
            container = "parts" if part.is_module else "weights"
            found[part.name] = part.name
            if part.made and self.style != "attributes" and not part.made.startswith("nn.Buffer("):
                key = repr(part.name) if self.style == "dict" else numbers[container]
                found[part.name] = f"{container}[{key}]"
                numbers[container] += 1
        return found

    def path(self, name: str) -> str:
        """The path of what a part has made."""
        return re.sub(r"\['?(\w+)'?\]", r".\1", self.attributes[name])

    @property
    def source(self) -> str:
        """The lines that define it."""
        made = [f"self.{self.attributes[each.name]} = {each.made}" for each in self.parts if each.made]
        if self.style != "attributes":
            made = self._containers()
        setup = [line for part in self.parts for line in part.setup]
        lines = [line for part in self.parts for line in part.lines]
        return "\n".join(
            [
                f"class {self.name}(nn.Module):",
                f"{_INDENT}def __init__(self):",
                *(2 * _INDENT + self._filled(line) for line in ["super().__init__()", *made, *setup]),
                "",
                f"{_INDENT}def forward(self, {', '.join(self.inputs)}):",
                *(2 * _INDENT + self._filled(line) for line in lines),
                f"{2 * _INDENT}return {', '.join(self.outputs)}",
                "\n\n",
            ]
        )

    def _containers(self) -> list[str]:
        lines: list[str] = []
        for name, kind in (("parts", "Module"), ("weights", "Parameter")):
            held = [each for each in self.parts if self.attributes[each.name].startswith(f"{name}[")]
            is_list = self.style == "list"
            keys = ["" if is_list else f"{each.name!r}: " for each in held]
            inner = [f"{_INDENT}{key}{each.made}," for key, each in zip(keys, held, strict=True)]
            opening, closing = ("List([", "])") if is_list else ("Dict({", "})")
            lines += [f"self.{name} = nn.{kind}{opening}", *inner, closing] if held else []
        buffers = [each for each in self.parts if each.made.startswith("nn.Buffer(")]
        return [*lines, *(f"self.{each.name} = {each.made}" for each in buffers)]

    def _filled(self, line: str) -> str:
        return re.sub(r"\{(l\d+)\}", lambda found: f"self.{self.attributes[found[1]]}", line)


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
    """A torch model.

    Args:
        is_sequential: Whether it is an `nn.Sequential` of its parts, and of no class of its own.
        inputs: Its inputs.
        classes: Its classes, each after those that it uses; the last one is the model's.
        outputs: Its outputs.
        returns_loss: Whether it is inside of a module that is passed the targets, too, and returns the loss and the
            outputs, as models of transformers do: a loss in layouts.
        hooks: Lines of `make_model` that give a `weight` hooks on its gradient.
        hooked: Which weights have them: each one from the first number on, by steps of the second.
        num_passes: How many backward passes add up their gradients before a step.
    """

    library: ClassVar[str] = "torch"
    imports: ClassVar[str] = """\
from functools import partial

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
    precisions: ClassVar[Mapping[str, str]] = {
        "bfloat16": _IN_BFLOAT16.replace("CHANGED", f"model.bfloat16().register_forward_pre_hook({_CAST})"),
        "mixed_bfloat16": _IN_BFLOAT16.replace("CHANGED", "model.forward = autocast(model.forward)"),
    }
    in_float64: ClassVar[str] = _IN_FLOAT64
    planned_with: ClassVar[str] = ""

    is_sequential: bool
    inputs: tuple[Value, ...]
    classes: tuple[Class, ...]
    outputs: tuple[Value, ...]
    returns_loss: bool = False
    hooks: tuple[str, ...] = ()
    hooked: tuple[int, int] = (0, 1)
    num_passes: int = 1

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all its parts, in order."""
        return tuple(kind for each in self.classes for part in each.parts for kind in part.kinds)

    @property
    def layer_outputs(self) -> Mapping[str, Shape]:
        """The shapes of outputs of modules that are called once, with one value, by their paths."""
        own = self.classes[-1]
        uses = Counter(re.findall(r"\{(l\d+)\}", str([part.lines for part in own.parts])))
        called = [part for part in own.parts if part.is_call and uses[part.name] == 1]
        paths = [str(own.parts.index(part)) if self.is_sequential else own.path(part.name) for part in called]
        around = "net." if self.returns_loss else ""
        return {f"{around}{path}": part.shape for path, part in zip(paths, called, strict=True)}

    def data(self, rows: int) -> str:
        """The expression of a batch, drawn from `rng`."""
        if not self.returns_loss:
            return batch_source(self.inputs, self.outputs, rows)
        inputs, targets = ([each.data(rows) for each in values] for values in (self.inputs, self.outputs))
        return f"with_targets([{', '.join(inputs)}], [{', '.join(targets)}])"

    def source(self, optimizer: str) -> str:
        """The program of `make_model`, a function that returns the model and says how it is trained.

        Args:
            optimizer: The expression that makes the optimizer.
        """
        text = " ".join(part.made for each in self.classes for part in each.parts)
        own = "".join(source for name, source in OWN.items() if f"{name}(" in text)
        *inner, last = self.classes
        classes = "".join(each.source for each in (inner if self.is_sequential else self.classes))
        model = [f"model = {last.name}()"]
        if self.is_sequential:
            model = ["model = nn.Sequential(", *(f"{_INDENT}{part.made}," for part in last.parts), ")"]
        options = f"optimizer={optimizer}" + f", num_passes={self.num_passes}" * (self.num_passes > 1)
        if self.hooks:
            first, step = self.hooked
            model += [
                "trained = [weight for weight in model.parameters() if weight.requires_grad]",
                f"for weight in trained[{first}::{step}]:",
                *(_INDENT + hook for hook in self.hooks),
            ]
        returned = f"return train_with(model, loss=loss, {options})"
        around = ""
        if self.returns_loss:
            returned = f"return train_with(WithLoss(model), {options})"
            targets = "given[-1]" if len(self.outputs) == 1 else f"given[{-len(self.outputs)}:]"
            around = _WITH_LOSS.format(number=len(self.inputs), targets=targets)
        return "\n".join(
            [
                f"{own}{classes}def loss(outputs, targets):",
                f"{_INDENT}return {_loss(self.outputs)}",
                f"\n{around}{_HOOKS * bool(self.hooks)}",
                "def make_model():",
                *(_INDENT + line for line in [*model, returned]),
                "",
            ]
        )


def _loss(outputs: Sequence[Value]) -> str:
    """The expression of the loss of all outputs; in that of one, `o` is the output and `t` its targets."""
    if len(outputs) == 1:
        return _named(outputs[0].loss, "outputs", "targets")
    return " + ".join(_named(each.loss, f"outputs[{n}]", f"targets[{n}]") for n, each in enumerate(outputs))


def _named(loss: str, output: str, target: str) -> str:
    return re.sub(r"\b[ot]\b", lambda found: output if found[0] == "o" else target, loss)
