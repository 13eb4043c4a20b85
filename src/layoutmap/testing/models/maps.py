"""Draws layout maps for the variables of a model: layouts of all kinds, and rules that give them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.uneven import Uneven
from layoutmap.testing.models.choices import Choices

Shape = tuple[int, ...]
Specs = tuple[str | tuple[str, ...] | None, ...]

_MESHES = {  # of 8 devices, and how often each is drawn
    "batch=2,model=4": 4,
    "batch=4,model=2": 4,
    "batch=2,model=2,x=2": 4,
    "model=4,batch=2": 1,
    "x=2,batch=4": 1,
    "batch=8": 2,
    "model=8": 1,
    "batch=1,model=8": 1,
    "x=2,model=2,batch=2": 2,
}
_BATCH_DIMS = ("batch", "data")


@dataclass(frozen=True)
class Devices:
    """The devices that a case is for.

    Args:
        number: How many they are.
        simulated: Whether a program of the case simulates them.
        mesh: The mesh of all cases; empty: each has one of its own.
    """

    number: int = 8
    simulated: bool = True
    mesh: str = ""

    @cached_property
    def meshes(self) -> Mapping[str, int]:
        """The meshes of these devices that are drawn, as text, and how often each is."""
        if self.mesh:
            return {self.mesh: 1}
        if self.number == 8:
            return _MESHES
        sizes = [size for size in range(1, self.number + 1) if not self.number % size]
        grids = (grid for grid in itertools.product(sizes, repeat=3) if math.prod(grid) == self.number)
        return {f"batch={batch},model={model},x={x}": 1 for batch, model, x in grids}


EIGHT = Devices()
"""Eight simulated devices."""


@dataclass(frozen=True)
class Map:
    """A layout map.

    Args:
        mesh: The mesh, as text.
        rules: Sharding specs for variables, by pattern.
        activations: Those for the outputs of layers.
        uneven: What happens to an axis that does not divide.
        batch_dim: The mesh dim that shards the batch; `None`: none.
    """

    mesh: str
    rules: tuple[tuple[str, Specs], ...]
    activations: tuple[tuple[str, Specs], ...]
    uneven: Uneven
    batch_dim: str | None

    @property
    def source(self) -> str:
        """The expression that makes it."""
        rules, activations = (
            "{" + ",".join(f"\n    r'{pattern}': {specs!r}" for pattern, specs in each) + "\n}"
            for each in (self.rules, self.activations)
        )
        options = f", activations={activations}" if self.activations else ""
        return f"lm.LayoutMap({self.mesh!r}, {rules}{options}, uneven={self.uneven!r}, rest='replicated')"


def draw_map(
    choices: Choices, variables: Mapping[str, Shape], outputs: Mapping[str, Shape], devices: Devices = EIGHT
) -> Map:
    """A map of which each rule fits all that it matches.

    Args:
        choices: Decides.
        variables: The shapes of all variables that rules are asked for, by path; those without an axis get none.
        outputs: The shapes of what layers put out, without the axis of rows, by the paths of layers.
        devices: Those that it is for.
    """
    text = choices.weighted(devices.meshes)
    mesh = Mesh(None, text)
    uneven: Uneven = choices.one_of("error", "error", "replicate", "shrink")
    dim = next((dim for dim in _BATCH_DIMS if dim in mesh), None)
    batch_dim = dim if dim and not choices.one_in(8) else None
    rules: dict[str, Specs] = {}
    for path, shape in variables.items():
        if not shape:  # no rule is for it, and some may match it
            continue
        specs = draw_specs(choices, mesh, shape, uneven)
        if any(specs) and not any(re.match(pattern, path) for pattern in rules):
            exactly, last = re.escape(path) + "$", path.rpartition(".")[2]
            pattern = choices.one_of(exactly, rf".*\.{last}$", re.sub(r"\d+", lambda _: r"\d+", exactly))
            matched = [variables[each] for each in variables if re.match(pattern, each)]
            rules[pattern if _fits(Layout(specs, mesh), matched, uneven) else exactly] = specs
    activations: dict[str, Specs] = {}
    for path in choices.taken(sorted(outputs), choices.weighted({0: 3, 1: 1, 2: 1})):
        rows = batch_dim if not choices.one_in(4) else None
        activations[re.escape(path) + "$"] = (
            rows,
            *draw_specs(choices, mesh, outputs[path], "error", [rows]),
        )
    return Map(text, tuple(rules.items()), tuple(activations.items()), uneven, batch_dim)


def draw_specs(
    choices: Choices, mesh: Mesh, shape: Shape, uneven: Uneven, taken: Collection[str | None] = ()
) -> Specs:
    """Specs for the axes of a tensor; of `taken` dims none is used."""
    number = choices.weighted({1: 6, 0: 4, 2: 4 * len(shape), 3: 2})
    same_axis, may_be_uneven = choices.one_in(4), uneven != "error" and choices.one_in(3)
    if may_be_uneven:  # of several dims along one axis some may divide it and others not
        same_axis = same_axis or choices.one_in(2)
    axes: list[tuple[str, ...]] = [()] * len(shape)
    for dim in choices.taken([dim for dim in mesh.dim_names if dim not in taken], number):
        used = [axis for axis, dims in enumerate(axes) if dims]
        free = used if same_axis and used else [axis for axis in range(len(shape)) if axis not in used]
        shards = [math.prod(map(mesh.dim_size, (*dims, dim))) for dims in axes]
        fits = [axis for axis in free if may_be_uneven or not shape[axis] % shards[axis]]
        if fits:
            axes[choices.one_of(*fits)] += (dim,)
    return tuple(dims if len(dims) > 1 else dims[0] if dims else None for dims in axes)


def _fits(layout: Layout, shapes: Collection[Shape], uneven: Uneven) -> bool:
    """Whether a layout fits tensors of all these shapes."""
    return all(
        len(shape) == layout.rank and (uneven != "error" or not layout.uneven_axes(shape)) for shape in shapes
    )
