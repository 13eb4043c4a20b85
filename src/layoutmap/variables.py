"""What the core knows of a variable: its path, shape, dtype and kind; never its value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from layoutmap.fitting import Axes
from layoutmap.layout import Layout
from layoutmap.rules import Match

__all__ = ["Assignment", "Kind", "Use", "VariableSpec", "itemsize"]


class Kind(StrEnum):
    """What a variable is for, which decides how it gets its layout.

    `WEIGHT` (trained or not) and `STATE` (moving statistics) are matched by the rules; a `SLOT` of an optimizer follows
    its variable; `RNG` states, `METRIC`s and other small things that no rule matches are replicated.
    """

    WEIGHT = "weight"
    STATE = "state"
    RNG = "rng"
    SLOT = "slot"
    METRIC = "metric"


@dataclass(frozen=True, slots=True)
class Use:
    """What a layer does with the axes of a weight when it is called.

    Args:
        roles: For each axis `"in.0"`, `"in.1"`, ...: it is summed over; `"out.0"`, ...: it is put out, and a bias has
            the roles of the axes to which it is added; `"rows"`: the rows of a table of embeddings; `""`: another.
        head_size: The size of one head of attention, where the layer has its heads side by side in one axis.
    """

    roles: tuple[str, ...]
    head_size: int | None = None


@dataclass(frozen=True, slots=True)
class VariableSpec:
    """A variable before it has a value.

    Args:
        path: Its object path, parts joined by dots, as in `blocks.0.attn.query.kernel`.
        shape: Its whole shape.
        dtype: The name of its element type, as in `"float32"` or `"bfloat16"`.
        kind: What it is for.
        aliases: Other paths to the same variable: a shared layer, a tied weight.
        parent: The path of the variable that it is derived from: the weight of an optimizer's slot, the kernel of a
            LoRA factor. Its own path, if it has taken that variable's place in another form (a packed kernel). `None`
            for most.
        axes: What its axes are made of in the parent; `None`: they are the parent's, if the shapes are equal.
        parent_shape: The parent's shape, as the rules know it; `None`: that of the variable with that path.
        model: The name of the model, to tell apart the variables of several models that one scope builds.
        use: What its layer does with its axes, where that is known.
        trainable: Whether a weight is trained; a frozen one has no gradient. Of the other kinds none is trained.

    Example:
        >>> VariableSpec("d1.kernel", (512, 1024), "float32").nbytes
        2097152
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = Kind.WEIGHT
    aliases: tuple[str, ...] = ()
    parent: str | None = None
    axes: Axes | None = None
    parent_shape: tuple[int, ...] | None = None
    model: str = ""
    use: Use | None = None
    trainable: bool = True

    @property
    def is_trained(self) -> bool:
        """Whether it is a weight that training changes, so that it has a gradient."""
        return self.kind is Kind.WEIGHT and self.trainable

    @property
    def follows(self) -> bool:
        """Whether it is derived from another variable, which is there beside it."""
        return self.parent is not None and not self.is_packed

    @property
    def is_packed(self) -> bool:
        """Whether it has taken the place of a variable of its path, whose shape the rules are for."""
        return self.parent == self.path

    @property
    def rule_shape(self) -> tuple[int, ...]:
        """The shape that a rule's layout is for: its own, or that of the variable from which it is derived."""
        return self.shape if self.parent_shape is None else self.parent_shape

    @property
    def nbytes(self) -> int:
        """Size in bytes of the whole variable."""
        return math.ceil(math.prod(self.shape) * itemsize(self.dtype))


@dataclass(frozen=True, slots=True)
class Assignment:
    """A variable and the layout it was given.

    Args:
        variable: The variable.
        layout: Its layout.
        match: What the layout map said of its path; `None` where it was not asked (slots, metrics).
        drawn_whole: Why its first value must be drawn whole on one device before it is cut; empty if it need not.
    """

    variable: VariableSpec
    layout: Layout
    match: Match | None = None
    drawn_whole: str = ""

    @property
    def fits(self) -> bool:
        """Whether the variable can have this layout: its rank is right, and every axis is cut evenly."""
        shape = self.variable.shape
        return self.layout.rank == len(shape) and not self.layout.uneven_axes(shape)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of the piece that one device holds."""
        return self.layout.shard_shape(self.variable.shape)

    @property
    def shard_nbytes(self) -> int:
        """Size in bytes of the piece that one device holds."""
        return math.ceil(math.prod(self.shard_shape) * itemsize(self.variable.dtype))


# Element types that numpy does not know by name: bytes per element.
_ITEMSIZES = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int4": 0.5,
    "uint4": 0.5,
    "string": 8,
}


def itemsize(dtype: str) -> float:
    """Bytes per element of an element type, by name.

    Example:
        >>> itemsize("float32"), itemsize("bfloat16")
        (4, 2)
    """
    if dtype in _ITEMSIZES:
        return _ITEMSIZES[dtype]
    import numpy as np  # late: loading it takes longer than all the rest of this package

    return np.dtype(dtype).itemsize
