"""Every private name of torch that this package touches; no other file imports one. Tested on torch 2.13.

torch.distributed._local_tensor         LocalTensor, LocalTensorMode, LocalIntNode: devices simulated in one process
torch.distributed.DeviceMesh            _rank_map: all ranks of the mesh that a mesh was cut from
torch.distributed.tensor._dtensor_spec  DTensorSpec: _convert_shard_order_to_StridedShard and its inverse
ShardOrderEntry: one axis that is cut over several mesh dims, in any order
torch.distributed.tensor.DTensor        _local_tensor: the piece of this process, without a step of autograd
torch.testing._internal                 FakeStore: a process group whose other processes do not exist
torch.utils._python_dispatch            _get_current_dispatch_mode_stack
torch.utils._pytree                     tree_leaves, tree_map
"""

from __future__ import annotations

from typing import Any

import torch

from layoutmap.errors import EngineError

__all__ = [
    "DTensorSpec",
    "FakeStore",
    "LocalIntNode",
    "LocalTensor",
    "LocalTensorMode",
    "ShardOrderEntry",
    "dispatch_modes",
    "tree_leaves",
    "tree_map",
]

TESTED = "2.13"


def _moved(what: str) -> EngineError:
    return EngineError(
        f"torch {torch.__version__} is not supported",
        facts={"missing": what},
        why=f"layouts on torch rely on names of torch {TESTED} that this one does not have",
        mend=f'pip install "torch=={TESTED}.*"',
    )


# -- layouts and simulated devices

try:
    from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils._pytree import tree_leaves, tree_map
except ImportError as error:
    raise _moved(str(error)) from error

_WANTED: list[tuple[Any, tuple[str, ...]]] = [
    (DTensorSpec, ("_convert_shard_order_to_StridedShard", "_maybe_convert_StridedShard_to_shard_order")),
    (DTensor, ("_local_tensor", "from_local", "redistribute", "full_tensor")),
    (
        LocalTensorMode,
        ("_patch_device_mesh", "_patch_random_functions", "_unpatch_random_functions", "__torch_dispatch__"),
    ),
]
_missing = [
    f"{owner.__name__}.{name}" for owner, names in _WANTED for name in names if not hasattr(owner, name)
]
if _missing:
    raise _moved(", ".join(_missing))


def dispatch_modes() -> list[Any]:
    """The dispatch modes that are active on this thread."""
    return _get_current_dispatch_mode_stack()
