"""Draws layout maps for the variables of a model: layouts of all kinds, and rules that give them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.uneven import Uneven
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.describing import Shape

Specs = tuple[str | None | tuple[str, ...], ...]

_MESHES = {
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
"""Meshes of 8 devices, and how often each is drawn."""


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
        rules = "".join(f"    {_text(pattern)}: {specs!r},\n" for pattern, specs in self.rules)
        activations = ", ".join(f"{_text(pattern)}: {specs!r}" for pattern, specs in self.activations)
        options = [f"activations={{{activations}}}"] if activations else []
        options += [] if self.uneven == "error" else [f"uneven={self.uneven!r}"]
        options.append("rest='replicated'")
        return f"lm.LayoutMap({self.mesh!r}, {{\n{rules}}}, {', '.join(options)})"


def _text(pattern: str) -> str:
    return f"r{pattern!r}".replace("\\\\", "\\")


def draw_map(choices: Choices, variables: Mapping[str, Shape], outputs: Mapping[str, Shape]) -> Map:
    """A map of which each rule fits all that it matches.

    Args:
        choices: Decides.
        variables: The shapes of all variables that rules are drawn for, by path.
        outputs: The shapes of what layers put out, without the axis of rows, by the paths of layers.
    """
    text = choices.weighted(_MESHES)
    mesh = Mesh(None, text)
    uneven: Uneven = choices.one_of("error", "error", "replicate", "shrink")
    batch_dim = "batch" if "batch" in mesh and not choices.one_in(8) else None
    rules: dict[str, Specs] = {}
    for path, shape in variables.items():
        if any(re.match(pattern, path) for pattern in rules):
            continue
        specs = _draw_specs(choices, mesh, shape, uneven)
        if any(specs):
            pattern = choices.one_of(_exactly(path), *_like(path))
            matched = [variables[each] for each in variables if re.match(pattern, each)]
            rules[pattern if _fits(specs, mesh, matched, uneven) else _exactly(path)] = specs
    activations: dict[str, Specs] = {}
    for path in choices.taken(sorted(outputs), choices.weighted({0: 3, 1: 1, 2: 1})):
        rows = batch_dim if batch_dim and not choices.one_in(4) else None
        specs = _draw_specs(choices, mesh, outputs[path], "error", () if rows is None else (rows,))
        activations[_exactly(path)] = (rows, *specs)
    return Map(text, tuple(rules.items()), tuple(activations.items()), uneven, batch_dim)


def _exactly(path: str) -> str:
    return re.escape(path) + "$"


def _like(path: str) -> tuple[str, ...]:
    """Patterns that match a variable and others that are called alike."""
    last = path.rpartition(".")[2]
    return rf".*\.{last}$", re.sub(r"\d+", lambda _: r"\d+", re.escape(path)) + "$"


def _draw_specs(
    choices: Choices, mesh: Mesh, shape: Shape, uneven: Uneven, taken: Sequence[str] = ()
) -> Specs:
    """Specs for the axes of a tensor; of `taken` dims none is used."""
    number = choices.weighted({1: 6, 0: 4, 2: 4 * len(shape), 3: 2})
    same_axis, may_be_uneven = choices.one_in(4), uneven != "error" and choices.one_in(3)
    axes: list[tuple[str, ...]] = [()] * len(shape)
    used: list[int] = []
    for dim in choices.taken([d for d in mesh.dim_names if d not in taken], number):
        free = used if same_axis and used else [i for i in range(len(shape)) if i not in used]
        fits = [
            i
            for i in free
            if may_be_uneven or not shape[i] % (_num_shards(axes[i], mesh) * mesh.dim_size(dim))
        ]
        if fits:
            axis = choices.one_of(*fits)
            axes[axis] = (*axes[axis], dim)
            used.append(axis)
    return tuple(dims if len(dims) > 1 else dims[0] if dims else None for dims in axes)


def _num_shards(dims: Sequence[str], mesh: Mesh) -> int:
    product = 1
    for dim in dims:
        product *= mesh.dim_size(dim)
    return product


def _fits(specs: Specs, mesh: Mesh, shapes: Sequence[Shape], uneven: Uneven) -> bool:
    """Whether specs fit tensors of all these shapes."""
    layout = Layout(specs, mesh)
    return all(
        len(shape) == len(specs) and (uneven != "error" or not layout.uneven_axes(shape)) for shape in shapes
    )


def kind_of(specs: Specs, mesh: Mesh) -> str:
    """What kind of layout some specs are: of how many dims, on how many axes."""
    sharded = [Layout(specs, mesh).mesh_dims_of(axis) for axis in range(len(specs))]
    dims, axes = sum(map(len, sharded)), sum(map(bool, sharded))
    return f"{dims} on {axes}" if dims else "replicated"
