"""Raise if torch.export, torch.jit, or torch.func traces a sharded module."""

from __future__ import annotations

import torch

from layoutmap.core.errors import EngineError, ScopeError
from layoutmap.engines.tested import ImportErrorConverter

with ImportErrorConverter("torch"):
    from torch._C._functorch import peek_interpreter_stack as transform_of_functions
    from torch.jit._trace import is_tracing as is_traced_by_jit

EXPORT_ATTRIBUTES = {"__code__": "torch.export", "__globals__": "torch.jit.script"}
"""The attributes of a function that exporters read, and the exporter that reads each."""


class UntraceableModuleError(ScopeError, AttributeError):
    """Raised if torch.export or torch.jit traces a sharded module. As an AttributeError, it makes `hasattr` False."""


def make_untraceable_module_error(module: torch.nn.Module, exporter: str) -> UntraceableModuleError:
    """Return the error to raise if an exporter, such as torch.export, traces a sharded module."""
    return UntraceableModuleError(
        f"{type(module).__name__}: {exporter} cannot trace a sharded module",
        why="its collectives belong to this mesh, and such a graph is for one device",
        fix="build the model again without a scope, load the values of this model, and trace the new one: "
        "plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})",
    )


def check_not_transformed_or_traced(module: torch.nn.Module) -> None:
    """Raise if a sharded module is called inside torch.func or torch.jit.trace.

    Raises:
        EngineError: A transform of torch.func is applied to it.
        UntraceableModuleError: torch.jit.trace traces it.
    """
    transform = transform_of_functions()
    if transform is not None:  # pyright: ignore[reportUnnecessaryComparison]
        raise EngineError(
            f"{type(module).__name__}: torch.func is applied to a sharded module",
            facts={"transform": transform.key().name.lower()},
            why="its collectives have custom gradients, which torch.func cannot transform",
            fix="use torch.autograd.grad or torch.autograd.functional for gradients, and pass the whole batch "
            "instead of vmap",
        )
    if is_traced_by_jit():
        raise make_untraceable_module_error(module, "torch.jit.trace")
