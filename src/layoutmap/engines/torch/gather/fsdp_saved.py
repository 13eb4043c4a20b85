"""Free gathered weights after the forward pass, and gather them again for the backward pass.

Autograd keeps what an operation needs backwards, so weights that were gathered would stay for as long as its graph.
Here it keeps a note instead: which weight, and which view of it. Nothing is emptied under anybody's hands: who else
holds a gathered weight has it still.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.backward import get_saving_hooks
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.specs import DTensorSpec, get_local, get_spec, make_dtensor
from layoutmap.engines.torch.storages import get_storage_key


@contextmanager
# Saved tensors would keep gathered weights in memory, so autograd saves references (decisions/0017).
def save_references(tensors: Sequence[DTensor], again: Callable[[], Sequence[DTensor]]) -> Generator[bool]:
    """Make autograd save references to gathered tensors and their views, not the tensors, while open.

    Where something else decides already what autograd keeps, as activation checkpoints do, that is left alone.

    Args:
        tensors: DTensors, as they come out of autograd.
        again: Makes them again, with the same values, when they are needed.

    Yields:
        Whether it does.
    """
    weights = _watch_tensors(tensors, again)
    if weights is None:
        yield False
        return
    with torch.autograd.graph.saved_tensors_hooks(weights.pack, weights.unpack):
        yield True
    weights.close()


@skip_function_modes
def _watch_tensors(
    tensors: Sequence[torch.Tensor], again: Callable[[], Sequence[DTensor]]
) -> _Weights | None:
    """Return the record of gathered tensors, or None if autograd saves nothing or other hooks decide."""
    nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    # Other saved-tensor hooks take precedence.
    if not nodes or not torch.is_grad_enabled() or get_saving_hooks() is not None:
        return None
    weights = _Weights(tensors, again)
    for node in nodes:
        node.register_hook(weights.drop_regathered)
    return weights


@dataclass(frozen=True, slots=True)
class _WeightView:
    """View of a gathered weight: shape, strides, and offset on each rank. No spec: a view of the local tensor."""

    number: int
    spec: DTensorSpec | None
    pieces: Mapping[int, tuple[torch.Size, tuple[int, ...], int]]


class _Weights:
    def __init__(self, tensors: Sequence[torch.Tensor], again: Callable[[], Sequence[DTensor]]) -> None:
        self._numbers = {
            get_storage_key(_get_first_piece(tensor)): number for number, tensor in enumerate(tensors)
        }
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._again = again
        self._made: Sequence[DTensor] | None = None

    def close(self) -> None:
        """Forget the storages of the weights, because other tensors may reuse them from now on."""
        self._numbers.clear()

    def drop_regathered(self, *_: object) -> None:
        """Drop the regathered weights after their use, unless the backward pass itself is differentiated."""
        if not torch.is_grad_enabled():
            self._made = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _WeightView:
        if not self._numbers or not (isinstance(tensor, DTensor) or can_be_local_weight(tensor)):
            return cut_from_graph(tensor)
        piece = _get_first_piece(tensor) if isinstance(tensor, DTensor) else tensor
        number = self._numbers.get(get_storage_key(piece))
        if number is None or tensor.dtype != self._dtypes[number] or piece.is_conj() or piece.is_neg():
            return cut_from_graph(tensor)
        pieces = simulation.get_pieces(get_local(tensor) if isinstance(tensor, DTensor) else tensor)
        geometry = {
            rank: (each.shape, each.stride(), int(each.storage_offset())) for rank, each in pieces.items()
        }
        return _WeightView(number, get_spec(tensor) if isinstance(tensor, DTensor) else None, geometry)

    def unpack(self, packed: torch.Tensor | _WeightView) -> torch.Tensor:
        return skip_function_modes(self._make_view)(packed) if isinstance(packed, _WeightView) else packed

    def _make_view(self, view: _WeightView) -> torch.Tensor:
        with torch.no_grad():
            if self._made is None:
                self._made = self._again()
            base = self._made[view.number]
            pieces = simulation.get_pieces(get_local(base))
            viewed = {rank: piece.as_strided(*view.pieces[rank]) for rank, piece in pieces.items()}
            if view.spec is None:
                return simulation.join_pieces(viewed, base.dtype)
            with simulation.simulate_mesh(base.device_mesh):
                return make_dtensor(simulation.join_pieces(viewed, base.dtype), view.spec)


@skip_function_modes
def cut_from_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its autograd node, which would keep itself alive through its own result.

    Autograd attaches the node again when it unpacks the tensor.
    """
    if tensor.grad_fn is None:
        return tensor
    if type(tensor) is DTensor and not (tensor.is_conj() or tensor.is_neg()):
        # `detach` would use DTensor's slow dispatcher.
        return make_dtensor(get_local(tensor), get_spec(tensor))
    return tensor.detach()


def can_be_local_weight(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be the local tensor of a weight, as compiled graphs save it."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not simulation.is_simulated()


def _get_first_piece(tensor: torch.Tensor) -> torch.Tensor:
    return simulation.get_first_piece(get_local(tensor))
