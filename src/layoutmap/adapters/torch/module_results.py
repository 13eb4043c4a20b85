"""Relayout the results of a module's call: its output by activation rules, and the buffers that it replaces."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.adapters.torch.boundary import list_tensors, map_tensors
from layoutmap.core.layout import Layout
from layoutmap.engines.torch.modes import skip_function_modes


class ModuleResultRelayout:
    """Relayout one module's output, and buffers that its `forward` replaces.

    Args:
        module: The module.
        path: Its path in the model; empty for the model itself.
        context: The scope.
        layouts: The layouts of the model's tensors, by their ids.

    Attributes:
        output_layout: The layout that a rule gives its output; `None`: no rule does.
    """

    def __init__(
        self, module: torch.nn.Module, path: str, context: ScopeContext, layouts: Mapping[int, Layout]
    ) -> None:
        self._context = context
        self._path = path
        self._buffers: dict[str, tuple[Layout, object]] = {}
        for name, each in module.named_buffers(recurse=False) if layouts else ():
            if layout := layouts.get(id(each)):
                self._buffers[name] = layout, context.engine.make_native_layout(layout, layout.rank)[1]
        self.output_layout = context.policy.find_activation_layout(path) if path else None

    def relayout_results(self, module: torch.nn.Module, result: object) -> object:
        """Relayout buffers that `forward` has assigned anew, and return the result in the layout of its rule.

        Raises:
            LayoutError: The rule does not fit the output.
        """
        if self._buffers:
            self._relayout_buffers(module)
        return result if self.output_layout is None else self._relayout_output(result, self.output_layout)

    @skip_function_modes
    def _relayout_buffers(self, module: torch.nn.Module) -> None:
        for name, (layout, placements) in self._buffers.items():
            buffer = getattr(module, name, None)
            if not isinstance(buffer, DTensor) or buffer.ndim != layout.rank:
                continue
            if buffer.placements != placements:
                setattr(module, name, self._context.engine.relayout(buffer, layout, pad=True))

    @skip_function_modes
    def _relayout_output(self, result: object, layout: Layout) -> object:
        dtensors = [tensor for tensor in list_tensors(result) if isinstance(tensor, DTensor)]
        shapes = [tuple(tensor.shape) for tensor in dtensors]
        layouts = self._context.policy.choose_output_layouts(layout, shapes, self._path)
        chosen = {id(t): each for t, each in zip(dtensors, layouts, strict=True) if each is not None}
        # Relayout also tensors that already have the layout, so that their gradients get it.
        return map_tensors(
            lambda t: self._context.engine.relayout(t, chosen[id(t)]) if id(t) in chosen else t, result
        )
