"""Free gathered weights after the forward pass, and gather them again for the backward pass.

Autograd saves the operands of an operation, so gathered weights would stay in memory as long as its graph. Here
autograd saves a reference instead: the index of the weight, and the view of it. The gathered weight itself is not
changed, so other code that has a reference to it can still use it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.backward import get_saved_tensor_hooks
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.specs import DTensorSpec, get_local, get_spec, make_dtensor
from layoutmap.engines.torch.storages import get_storage_key


@contextmanager
# If autograd saved the gathered weights, they would stay in memory, so it saves references to them (decisions/0017).
def save_tensors_as_references(
    tensors: Sequence[DTensor], regather: Callable[[], Sequence[DTensor]]
) -> Generator[bool]:
    """Make autograd save references to gathered tensors and their views, while the `with` block runs.

    If other saved-tensor hooks are active, such as those of an activation checkpoint, nothing is done.

    Args:
        tensors: The gathered DTensors, with their autograd nodes.
        regather: Returns the same tensors, gathered again.

    Yields:
        Whether references are saved.
    """
    weights = _make_gathered_weights(tensors, regather)
    if weights is None:
        yield False
        return
    with torch.autograd.graph.saved_tensors_hooks(weights.pack, weights.unpack):
        yield True
    weights.forget_storages()


@skip_function_modes
def _make_gathered_weights(
    tensors: Sequence[torch.Tensor], regather: Callable[[], Sequence[DTensor]]
) -> _GatheredWeights | None:
    """Return a `_GatheredWeights` of tensors, or None if autograd saves none or other saved-tensor hooks are active."""
    nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    # If other saved-tensor hooks are active, they get the tensors, so do nothing.
    if not nodes or not torch.is_grad_enabled() or get_saved_tensor_hooks() is not None:
        return None
    weights = _GatheredWeights(tensors, regather)
    for node in nodes:
        node.register_hook(weights.drop_regathered_weights)
    return weights


@dataclass(frozen=True, slots=True)
class _WeightView:
    """A view of the gathered weight at `index`. Without a spec, it is a view of the local tensor."""

    index: int
    spec: DTensorSpec | None
    tensors_by_rank: Mapping[int, tuple[torch.Size, tuple[int, ...], int]]


class _GatheredWeights:
    """Weights that autograd saves as references, and that are gathered again when a reference is unpacked."""

    def __init__(self, tensors: Sequence[torch.Tensor], regather: Callable[[], Sequence[DTensor]]) -> None:
        self._numbers = {
            get_storage_key(_get_first_local_tensor(tensor)): index for index, tensor in enumerate(tensors)
        }
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._again = regather
        self._made: Sequence[DTensor] | None = None

    def forget_storages(self) -> None:
        """Forget the storages of the weights, because later tensors may reuse their memory."""
        self._numbers.clear()

    def drop_regathered_weights(self, *_: object) -> None:
        """Release the weights that were gathered again, unless a second derivative needs them."""
        if not torch.is_grad_enabled():
            self._made = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _WeightView:
        if not self._numbers or not (isinstance(tensor, DTensor) or can_be_shard_of_weight(tensor)):
            return copy_without_autograd_node(tensor)
        piece = _get_first_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        index = self._numbers.get(get_storage_key(piece))
        if index is None or tensor.dtype != self._dtypes[index] or piece.is_conj() or piece.is_neg():
            return copy_without_autograd_node(tensor)
        pieces = simulation.get_tensors_by_rank(get_local(tensor) if isinstance(tensor, DTensor) else tensor)
        geometry = {
            rank: (each.shape, each.stride(), int(each.storage_offset())) for rank, each in pieces.items()
        }
        return _WeightView(index, get_spec(tensor) if isinstance(tensor, DTensor) else None, geometry)

    def unpack(self, packed: torch.Tensor | _WeightView) -> torch.Tensor:
        return skip_function_modes(self._rebuild_view)(packed) if isinstance(packed, _WeightView) else packed

    def _rebuild_view(self, view: _WeightView) -> torch.Tensor:
        with torch.no_grad():
            if self._made is None:
                self._made = self._again()
            base = self._made[view.index]
            pieces = simulation.get_tensors_by_rank(get_local(base))
            viewed = {rank: piece.as_strided(*view.tensors_by_rank[rank]) for rank, piece in pieces.items()}
            if view.spec is None:
                return simulation.make_local_tensor(viewed, base.dtype)
            with simulation.simulate_ranks_of_mesh(base.device_mesh):
                return make_dtensor(simulation.make_local_tensor(viewed, base.dtype), view.spec)


@skip_function_modes
def copy_without_autograd_node(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its autograd node, which would keep itself alive if it saved its own result.

    Autograd attaches the node again when it unpacks the tensor.
    """
    if tensor.grad_fn is None:
        return tensor
    if type(tensor) is DTensor and not (tensor.is_conj() or tensor.is_neg()):
        # Do not call `detach`, because DTensor's dispatcher is slow.
        return make_dtensor(get_local(tensor), get_spec(tensor))
    return tensor.detach()


def can_be_shard_of_weight(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor may be the local tensor of a weight, as compiled graphs save it."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not simulation.is_simulated()


def _get_first_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return simulation.get_first_local_tensor(get_local(tensor))
