"""The program of a torch module as texts: the modules in it, their settings, and the code of their `forward`s."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layoutmap.adapters.programs import Program, is_users, versions
from layoutmap.adapters.torch.structure import OF_TORCH
from layoutmap.engines.agreement import Trait
from layoutmap.engines.torch.modules import modules_of

_OURS = ("compile", "forward")


def program_of(module: torch.nn.Module, forwards: Iterator[object]) -> list[Trait]:
    """The program of a module's call, in parts that processes compare.

    Args:
        module: The module.
        forwards: The functions that were set on it and on those below it, in the place of their classes' `forward`.
    """
    program = Program()
    modules = modules_of(module)
    for forward in forwards:
        program.function(forward)
    for kind in dict.fromkeys(type(each) for _, each in modules):
        program.methods(kind, ["forward"])
    for path, each in modules:
        _add_module(program, path, each)
    return [
        *versions("torch"),
        Trait("gradients", str(torch.is_grad_enabled())),
        *program.settings,
        *program.lines,
    ]


def _add_module(program: Program, path: str, module: torch.nn.Module) -> None:
    kind = type(module)
    name = f'{kind.__name__} "{path}"' if path else kind.__name__
    program.value(path or "model", kind)
    program.value(f"{name}: training", module.training)
    trainable = [name for name, each in module.named_parameters(recurse=False) if each.requires_grad]
    program.value(f"{name}: trainable", trainable)
    own = is_users(kind)
    for key, value in vars(module).items():
        is_read = key in program.read if own else not key.startswith("_")
        if is_read and key not in OF_TORCH and key not in _OURS:
            program.value(f"{name}: {key}", value, may_be_number=own)
