"""Derive the layouts of batches, of weights during computation, and of layers' outputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from layoutmap.core.errors import LayoutError, LayoutMapWarning
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import BatchDim, count_batch_shards, format_batch_dim, list_batch_dims
from layoutmap.core.users_line import find_user_stacklevel


@dataclass(frozen=True, slots=True)
class LayoutPolicy:
    """Derive layouts of batches, layer outputs, and gathered weights from a scope's mesh, batch dim, and rules.

    Args:
        mesh: The mesh.
        batch_dim: The mesh dim over which batches are sharded, or several; `None`: they are replicated.
        activations: Returns the layout of the output of the layer at a path; `None`: there are no such rules.
    """

    mesh: Mesh
    batch_dim: BatchDim | None = None
    activations: Callable[[str], Layout | None] | None = None
    batches: dict[bool, int] = field(default_factory=dict[bool, int], compare=False, repr=False)
    """The number of rows of the last batch that was split evenly (`True`), and of the last that was not (`False`)."""

    def make_replicated_layout(self, rank: int) -> Layout:
        """Return the layout on this mesh of an array of this rank that every device stores completely."""
        return Layout.replicated(self.mesh, rank)

    def derive_compute_layout(self, layout: Layout) -> Layout:
        """Return the layout of a weight while its layer computes: without the batch dims, over which it is gathered."""
        batch_dims = list_batch_dims(self.batch_dim)
        dims = (
            [d for d in layout.list_mesh_dims(axis) if d not in batch_dims] for axis in range(layout.rank)
        )
        return Layout.from_valid_specs(map(tuple, dims), layout.mesh)

    def derive_batch_layout(self, shape: Sequence[int]) -> Layout:
        """Return the layout of a batch: sharded along its first axis if this can be split evenly, else replicated."""
        dim = self.batch_dim
        if dim is None or not shape:
            return self.make_replicated_layout(len(shape))
        divides = shape[0] % count_batch_shards(dim, self.mesh) == 0
        self.batches[divides] = shape[0]
        if not divides:
            return self.make_replicated_layout(len(shape))
        return Layout.batch_sharded(self.mesh, dim, len(shape))

    def warn_of_uneven_batch(self, caller: str, library: str) -> None:
        """Warn that no batch was sharded, because its number of rows was not a multiple of the number of shards.

        Args:
            caller: The name of the function or model that was given the batches.
            library: The name of the library that calls it, whose lines are not the user's.
        """
        dim = self.batch_dim
        assert dim is not None, "without a batch dim, no batch is sharded"
        rows, size = self.batches[False], count_batch_shards(dim, self.mesh)
        warning = LayoutMapWarning(
            f"{caller}: no batch was sharded over mesh dim {format_batch_dim(dim)!r}",
            facts={"rows": rows, "mesh": str(self.mesh)},
            why=f"{rows} is not a multiple of {size}, so every device computed with all rows",
            fix=f"use a batch_size that is a multiple of {size}",
        )
        warnings.warn(warning, stacklevel=find_user_stacklevel({library}))

    def find_activation_layout(self, path: str) -> Layout | None:
        """Return the layout that activation rules give the output of the layer at a path, or None if none matches."""
        return self.activations(path) if self.activations else None

    def choose_output_layouts(
        self, layout: Layout, shapes: Sequence[tuple[int, ...]], path: str
    ) -> Sequence[Layout | None]:
        """Return the layout for each array in a layer's output, or None for an array that keeps its layout.

        Args:
            layout: The layout of the layer's rule.
            shapes: The arrays' shapes. Arrays without the layout's rank keep their layout.
            path: The layer's path.

        Raises:
            LayoutError: No array has the layout's rank, or an axis other than the batch cannot be split evenly.
        """
        if shapes and all(len(shape) != layout.rank for shape in shapes):
            error = layout.make_rank_error(shapes[0], f"the output of {path}")
            fix = f"{error.fix}: a pattern also matches the layers below, unless it ends in $"
            raise LayoutError(error.what, facts=error.facts, why=error.why, fix=fix)
        return [
            self._choose_output_layout(layout, s, path) if len(s) == layout.rank else None for s in shapes
        ]

    def _choose_output_layout(self, layout: Layout, shape: tuple[int, ...], path: str) -> Layout:
        """Return a rule's layout for an output, without the batch dims if the batch cannot be split evenly."""
        if not layout.find_uneven_axes(shape):
            return layout
        # The last batch may not split evenly, so replicate it instead of raising an error.
        without_batch = self.derive_compute_layout(layout)
        for axis in without_batch.find_uneven_axes(shape):
            raise without_batch.make_uneven_error(shape, axis, f"the output of {path}")
        return without_batch
