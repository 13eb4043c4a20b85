"""Warn that mesh dims shard nothing in a training step."""

from __future__ import annotations

from collections.abc import Sequence

from layoutmap.core.errors import LayoutMapWarning
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import BatchDim


def make_idle_dims_warning(
    step: str, mesh: Mesh, dims: Sequence[str], batch_dim: BatchDim | None, called: str
) -> LayoutMapWarning:
    """Return the warning that devices along these mesh dims repeat the same computation.

    Args:
        step: The name of the step.
        mesh: The mesh.
        dims: The mesh dims that shard no weight, no layer output and no batch; at least one.
        batch_dim: The mesh dim over which batches are sharded, or several; `None`: batches are replicated.
        called: The function that takes `batch_dim`, as the user calls it.
    """
    names = ", ".join(map(repr, dims))
    size = 1
    for dim in dims:
        size *= mesh.dim_size(dim)
    rules = f"add rules that shard weights over {names}, or use a mesh without it"
    return LayoutMapWarning(
        f"{step}: mesh dim {names} is idle",
        facts={"mesh": str(mesh), "batch_dim": batch_dim},
        why=f"no weight, layer output or batch is sharded over it: groups of {size} devices compute the same rows",
        fix=rules if batch_dim else f"pass batch_dim={dims[0]!r} to {called}, or {rules}",
    )
