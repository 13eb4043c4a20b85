"""Warn that mesh dims shard nothing in a training step."""

from __future__ import annotations

from collections.abc import Sequence

from layoutmap.core.errors import LayoutMapWarning
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import BatchDim


def make_idle_dims_warning(
    step_name: str, mesh: Mesh, dims: Sequence[str], batch_dim: BatchDim | None, caller: str
) -> LayoutMapWarning:
    """Return the warning that nothing is sharded over these mesh dims, so their devices repeat the same computation.

    Args:
        step_name: The name of the step.
        mesh: The mesh.
        dims: The mesh dims that shard no weight, no layer output and no batch; at least one.
        batch_dim: The mesh dim over which batches are sharded, or several; `None`: batches are replicated.
        caller: The name of the public function to which the user passes `batch_dim`.
    """
    names = ", ".join(map(repr, dims))
    size = 1
    for dim in dims:
        size *= mesh.dim_size(dim)
    rules = f"add rules that shard weights over {names}, or use a mesh without it"
    return LayoutMapWarning(
        f"{step_name}: mesh dim {names} is idle",
        facts={"mesh": str(mesh), "batch_dim": batch_dim},
        why=f"no weight, layer output or batch is sharded over it: groups of {size} devices compute the same rows",
        fix=rules if batch_dim else f"pass batch_dim={dims[0]!r} to {caller}, or {rules}",
    )
