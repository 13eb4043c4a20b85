"""Draw layout maps for the variables of a model, with layouts of all kinds and rules that assign them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.uneven import UnevenSetting
from layoutmap.testing.models.choices import Choices

Shape = tuple[int, ...]
Specs = tuple[str | tuple[str, ...] | None, ...]

_MESHES = {  # how often each mesh of 8 devices is drawn
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
    """The devices that a case runs on.

    Args:
        number: Number of devices.
        simulated: Whether the program of a case simulates them.
        mesh: The mesh of all cases. If it is empty, each case draws a mesh.
    """

    number: int = 8
    simulated: bool = True
    mesh: str = ""

    @cached_property
    def mesh_frequencies(self) -> Mapping[str, int]:
        """A dict from each mesh of these devices, as text, to how often it is drawn."""
        if self.mesh:
            return {self.mesh: 1}
        if self.number == 8:
            return _MESHES
        sizes = [size for size in range(1, self.number + 1) if not self.number % size]
        grids = (grid for grid in itertools.product(sizes, repeat=3) if math.prod(grid) == self.number)
        return {f"batch={batch},model={model},x={x}": 1 for batch, model, x in grids}


_PAD_OR_SHRINK: UnevenSetting = ("pad", "shrink")
EIGHT = Devices()  # the default: eight simulated devices


@dataclass(frozen=True)
class DrawnLayoutMap:
    """The arguments of a random layout map, and the mesh dim of the batch."""

    mesh: str
    rules: tuple[tuple[str, Specs], ...]  # sharding specs of variables, by pattern
    activations: tuple[tuple[str, Specs], ...]  # sharding specs of layer outputs, by pattern
    uneven: UnevenSetting
    batch_dim: str | None  # dim that shards the batch; None: no dim does
    explicit_dims: tuple[str, ...] = ()  # names of the dims with explicit axes

    @property
    def expression(self) -> str:
        """The Python expression of the layout map."""
        rules, activations = (
            "{" + ",".join(f"\n    r'{pattern}': {specs!r}" for pattern, specs in items) + "\n}"
            for items in (self.rules, self.activations)
        )
        options = f", activations={activations}" if self.activations else ""
        mesh = repr(self.mesh)
        if self.explicit_dims:
            mesh = f"lm.create_mesh({mesh}, axis_types={dict.fromkeys(self.explicit_dims, 'explicit')})"
        return f"lm.LayoutMap({mesh}, {rules}{options}, uneven={self.uneven!r}, rest='replicated')"


def draw_layout_map(
    choices: Choices, variables: Mapping[str, Shape], outputs: Mapping[str, Shape], devices: Devices = EIGHT
) -> DrawnLayoutMap:
    """Draw the arguments of a layout map in which each rule fits all variables that it matches.

    `variables` has shapes by path, and `outputs` shapes of layer outputs without rows by layer path.
    """
    text = choices.pick_weighted(devices.mesh_frequencies)
    mesh = Mesh(None, text)
    uneven: UnevenSetting = choices.pick(
        "error", "error", "replicate", "shrink", _PAD_OR_SHRINK, _PAD_OR_SHRINK
    )
    dim = next((dim for dim in _BATCH_DIMS if dim in mesh), None)
    batch_dim = dim if dim and not choices.draw_true_once_in(8) else None
    rules: dict[str, Specs] = {}
    for path, shape in variables.items():
        if not shape:
            continue
        specs = draw_sharding_specs(choices, mesh, shape, uneven)
        if any(specs) and not any(re.match(pattern, path) for pattern in rules):
            exact, name = re.escape(path) + "$", path.rpartition(".")[2]
            pattern = choices.pick(exact, rf".*\.{name}$", re.sub(r"\d+", lambda _: r"\d+", exact))
            shapes = [variables[other] for other in variables if re.match(pattern, other)]
            rules[pattern if _can_fit_shapes(Layout(specs, mesh), shapes, uneven) else exact] = specs
    activations: dict[str, Specs] = {}
    for path in choices.sample(sorted(outputs), choices.pick_weighted({0: 3, 1: 1, 2: 1})):
        row_dim = batch_dim if not choices.draw_true_once_in(4) else None
        specs = draw_sharding_specs(choices, mesh, outputs[path], "error", unusable=[row_dim])
        activations[re.escape(path) + "$"] = (row_dim, *specs)
    return DrawnLayoutMap(text, tuple(rules.items()), tuple(activations.items()), uneven, batch_dim)


def draw_sharding_specs(
    choices: Choices, mesh: Mesh, shape: Shape, uneven: UnevenSetting, unusable: Collection[str | None] = ()
) -> Specs:
    """Draw sharding specs for a tensor that use none of the `unusable` mesh dims."""
    num_dims = choices.pick_weighted({1: 6, 0: 4, 2: 4 * len(shape), 3: 2})
    same_axis = choices.draw_true_once_in(4)
    may_be_uneven = uneven == _PAD_OR_SHRINK or (uneven != "error" and choices.draw_true_once_in(3))
    if may_be_uneven:  # use several dims for one axis more often, because some may not divide it
        same_axis = same_axis or choices.draw_true_once_in(2)
    axes: list[tuple[str, ...]] = [()] * len(shape)
    for dim in choices.sample([dim for dim in mesh.dim_names if dim not in unusable], num_dims):
        used = [axis for axis, dims in enumerate(axes) if dims]
        free = used if same_axis and used else [axis for axis in range(len(shape)) if axis not in used]
        shards = [math.prod(map(mesh.dim_size, (*dims, dim))) for dims in axes]
        usable = [axis for axis in free if may_be_uneven or not shape[axis] % shards[axis]]
        if uneven == _PAD_OR_SHRINK and choices.draw_true_once_in(2):
            usable = [axis for axis in usable if shape[axis] % shards[axis]] or usable
        if usable:
            axes[choices.pick(*usable)] += (dim,)
    return tuple(dims if len(dims) > 1 else dims[0] if dims else None for dims in axes)


def _can_fit_shapes(layout: Layout, shapes: Collection[Shape], uneven: UnevenSetting) -> bool:
    """Return whether tensors of all these shapes can have a layout. They need even shards if `uneven` is "error"."""
    return all(
        len(shape) == layout.rank and (uneven != "error" or not layout.find_uneven_axes(shape))
        for shape in shapes
    )
