"""Place the results of a module's call: its output by activation rules, and replaced buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.adapters.torch.boundary import list_tensors, map_tensors
from layoutmap.core.layout import Layout
from layoutmap.engines.torch.modes import skip_function_modes


class ModuleResults:
    """Place one module's output and replaced buffers in their layouts.

    Args:
        module: The module.
        path: Its path in the model; empty for the model itself.
        context: The scope.
        layouts: The layouts of the model's tensors, by their ids.

    Attributes:
        output: The layout that a rule gives its output; `None`: no rule does.
    """

    def __init__(
        self, module: torch.nn.Module, path: str, context: ScopeContext, layouts: Mapping[int, Layout]
    ) -> None:
        self._context = context
        self._path = path
        self._buffers: dict[str, tuple[Layout, object]] = {}
        for name, each in module.named_buffers(recurse=False) if layouts else ():
            if layout := layouts.get(id(each)):
                self._buffers[name] = layout, context.engine.native(layout, layout.rank)[1]
        self.output = context.policy.find_activation_layout(path) if path else None

    def place(self, module: torch.nn.Module, result: object) -> object:
        """Place buffers that `forward` has assigned anew, and return the result in its layout.

        Raises:
            LayoutError: The rule does not fit the output.
        """
        if self._buffers:
            self._place_buffers(module)
        return result if self.output is None else self._place_output(result, self.output)

    @skip_function_modes
    def _place_buffers(self, module: torch.nn.Module) -> None:
        for name, (layout, placements) in self._buffers.items():
            buffer = getattr(module, name, None)
            if not isinstance(buffer, DTensor) or buffer.ndim != layout.rank:
                continue
            if buffer.placements != placements:
                setattr(module, name, self._context.engine.relayout(buffer, layout, pad=True))

    @skip_function_modes
    def _place_output(self, result: object, layout: Layout) -> object:
        found = [tensor for tensor in list_tensors(result) if isinstance(tensor, DTensor)]
        shapes = [tuple(tensor.shape) for tensor in found]
        layouts = self._context.policy.choose_output_layouts(layout, shapes, self._path)
        chosen = {id(t): each for t, each in zip(found, layouts, strict=True) if each is not None}
        # Place tensors that already have the layout, too, so that their gradients get it.
        return map_tensors(
            lambda t: self._context.engine.relayout(t, chosen[id(t)]) if id(t) in chosen else t, result
        )
