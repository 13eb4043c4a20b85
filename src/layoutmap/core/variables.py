"""Describe variables by path, shape, dtype, and kind, without values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from typing import TypeVar

from layoutmap.core.arguments import validate_shape
from layoutmap.core.errors import LayoutError
from layoutmap.core.layout import Layout
from layoutmap.core.match import Match
from layoutmap.core.uneven import Axes

K = TypeVar("K")


class Kind(StrEnum):
    """The purpose of a variable, which determines how it gets its layout.

    Rules apply to a `WEIGHT` (trained or not), to `STATE` (moving statistics), to `RNG` states, and to arrays that a
    program creates `LATER` than its model, such as a KV cache. A `SLOT` of an optimizer has the layout of its variable.
    A `METRIC` is replicated.
    """

    WEIGHT = "weight"
    STATE = "state"
    RNG = "rng"
    SLOT = "slot"
    METRIC = "metric"
    LATER = "later"


@dataclass(frozen=True, slots=True)
class AxisRoles:
    """Describe the axes of a weight by their use in a layer, as summed axes or as axes of the output.

    Args:
        roles: The role of each axis. `"in.0"`, `"in.1"`, ...: the layer sums over it. `"out.0"`, ...: it becomes an
            axis of the output; an axis of a bias has the role of the kernel's axis to which it is added. `"rows"`: the
            rows of an embedding table. `""`: another role.
        head_size: The size of one attention head, if the layer stores all heads in one axis.
        reads: The number of the tensor that the layer reads, in the order of calls. Layers with equal numbers read the
            same tensor. `None`: unknown. Not compared, as the numbers of repeated blocks differ.
    """

    roles: tuple[str, ...]
    head_size: int | None = None
    reads: int | None = field(default=None, compare=False)


def number_inputs(inputs: Mapping[K, object]) -> dict[K, int]:
    """Return a dict from each layer to the number of its input in the order of calls, equal for the same object.

    `inputs` must hold the inputs themselves, because the id of a deleted object can become that of a new one.
    """
    numbers: dict[int, int] = {}
    return {layer: numbers.setdefault(id(each), len(numbers)) for layer, each in inputs.items()}


@dataclass(frozen=True, slots=True)
class VariableSpec:
    """Describe a variable without its value: path, shape, dtype, and all other facts that determine its layout.

    Args:
        path: Its object path, parts joined by dots, as in `blocks.0.attn.query.kernel`.
        shape: Its global shape.
        dtype: The name of its element type, as in `"float32"` or `"bfloat16"`.
        kind: Its purpose.
        aliases: Other paths to the same variable: a shared layer, a tied weight.
        parent: The path of the variable that it is derived from: the weight of an optimizer's slot, the kernel of a
            LoRA factor. Its own path if it replaces that variable in another form, such as a packed kernel. `None` for
            most variables.
        axes: For each axis, the parent axes that it joins; `None`: the same axes, if the shapes are equal.
        parent_shape: The shape of the parent, to which rules apply; `None`: that of the variable at the parent's path.
        model: The name of the model, to distinguish the variables of several models that one scope builds. The model
            and the path together are unique in a scope.
        use: The roles of its axes in the layer's call, if known.
        trainable: Whether a weight is trained; a frozen weight has no gradient. It is ignored for other kinds.
        name: Its name in its library, for rules that match such names: `keras:dense/kernel`; empty without such rules.
            Not compared: if a rule matches it, the plan has it as an alias.
        memory: The kind of host memory that stores it, such as `"pinned_host"`; empty: the memory of the devices. Not
            compared: a plan takes it from the layout.
        no_padding: Why its library cannot store it padded; empty if it can. Not compared.

    Example:
        >>> VariableSpec("d1.kernel", (512, 1024), "float32").global_bytes
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
    use: AxisRoles | None = None
    trainable: bool = True
    name: str = field(default="", compare=False, repr=False)
    memory: str = field(default="", compare=False)
    no_padding: str = field(default="", compare=False, repr=False)

    @property
    def is_trained(self) -> bool:
        """Whether training changes this weight, so that it has a gradient."""
        return self.kind is Kind.WEIGHT and self.trainable

    def __post_init__(self) -> None:
        for name in ("shape", "parent_shape"):
            shape = getattr(self, name)
            if shape is not None:
                object.__setattr__(self, name, validate_shape(shape))

    @property
    def key(self) -> tuple[str, str]:
        """The key of the variable in its scope: its model and its path."""
        return self.model, self.path

    @property
    def is_derived(self) -> bool:
        """Whether the parent is another variable. Without its own rule, its layout is derived from the parent's."""
        return self.parent is not None and not self.is_packed

    @property
    def is_packed(self) -> bool:
        """Whether its values are packed, such as two int4 in a byte. Rules apply to the unpacked `parent_shape`."""
        return self.parent == self.path

    @property
    def rule_shape(self) -> tuple[int, ...]:
        """The shape that a rule's layout must fit: `parent_shape`, or the variable's own shape if that is None."""
        return self.shape if self.parent_shape is None else self.parent_shape

    @property
    def global_bytes(self) -> int:
        """The size in bytes of the whole, unsharded variable."""
        return math.ceil(math.prod(self.shape) * get_itemsize(self.dtype))


@dataclass(frozen=True)
# Plans work without an engine, so assignments import no framework (decisions/0001).
class Assignment:
    """A variable with its planned layout.

    Args:
        variable: The variable.
        layout: Its layout.
        match: The rules that match its path; `None` for variables without rules, such as slots and metrics.
        global_init: Why one device must compute its whole first value before it is sharded; empty if it need not.
        is_padded: Whether axes that cannot be split evenly are padded.
    """

    variable: VariableSpec
    layout: Layout
    match: Match | None = None
    global_init: str = ""
    is_padded: bool = False

    @cached_property
    def fits(self) -> bool:
        """Whether the layout has the rank of the variable, and every axis is padded or can be split evenly."""
        shape = self.variable.shape
        return self.layout.rank == len(shape) and (self.is_padded or not self.layout.find_uneven_axes(shape))

    def check_fits(self) -> None:
        """Raise a `LayoutError` if the variable cannot have this layout."""
        variable = self.variable
        check = self.layout.check_rank if self.is_padded else self.layout.check_fits
        check(variable.shape, variable.path)

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of one device's shard, with padding."""
        return self.layout.shard_shape(self.variable.shape)

    @cached_property
    def shard_bytes(self) -> int:
        """The size in bytes of one device's shard, with padding."""
        return math.ceil(math.prod(self.shard_shape) * get_itemsize(self.variable.dtype))

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The global shape with its padding."""
        return self.layout.pad_shape(self.variable.shape)

    @property
    def padding_bytes(self) -> int:
        """The number of bytes that padding adds to the shard on each device."""
        return self.shard_bytes - self.variable.global_bytes // self.layout.num_distinct_shards

    @property
    def device_bytes(self) -> int:
        """Size of the shard in device memory in bytes, or 0 for a variable in host memory."""
        return 0 if self.layout.host_memory else self.shard_bytes


def make_unique_names(names: Sequence[str]) -> list[str]:
    """Return the names, made unique: each repetition of a name gets the first free number at its end.

    Example:
        >>> make_unique_names(["mlp", "mlp", "mlp_1", "mlp"])
        ['mlp', 'mlp_2', 'mlp_1', 'mlp_3']
    """
    taken, counts, found = set(names), dict.fromkeys(names, -1), list[str]()
    for name in names:
        counts[name] += 1
        new = name
        while counts[name] and (new := f"{name}_{counts[name]}") in taken:
            counts[name] += 1
        taken.add(new)
        found.append(new)
    return found


def has_several_models(variables: Iterable[VariableSpec]) -> bool:
    """Return whether the variables belong to more than one model."""
    return len({v.model for v in variables} - {""}) > 1


# Variables of two models may have the same path, so the name of the model precedes the path (decisions/0005).
def format_variable_names(variables: Sequence[VariableSpec]) -> list[str]:
    """Return the paths of variables, with the model's name in front if there are several models.

    Example:
        >>> models = ("teacher", "student")
        >>> format_variable_names([VariableSpec("d1.kernel", (8, 8), "float32", model=name) for name in models])
        ['teacher: d1.kernel', 'student: d1.kernel']
    """
    several = has_several_models(variables)
    return [f"{v.model}: {v.path}" if several and v.model else v.path for v in variables]


# A dtype name contains its number of bits (bfloat16, int4). A suffix such as `x2` is the number of packed values.
_BITS = re.compile(r"(?:q?u?int|b?float|complex|bits)(1|2|4|6|8|16|32|64|128)(?:_[a-z0-9]*?)?(?:_?x(\d+))?")
# The last three entries are dtypes of JAX's PRNG keys, which numpy does not know.
_ITEMSIZES = {"bool": 1, "string": 8, "key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}


@cache
def get_itemsize(dtype: str) -> float:
    """Return the number of bytes per element of a named dtype, which is 0.5 for `int4`.

    Example:
        >>> get_itemsize("float32"), get_itemsize("int4"), get_itemsize("float4_e2m1fn_x2")
        (4, 0.5, 1)

    Raises:
        LayoutError: The dtype is unknown.
    """
    if dtype in _ITEMSIZES:
        return _ITEMSIZES[dtype]
    named = _BITS.fullmatch(dtype)
    if named:
        bits = int(named[1]) * int(named[2] or 1)
        return bits / 8 if bits % 8 else bits // 8
    import numpy as np  # imported here, because numpy loads more slowly than the rest of the package

    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        raise LayoutError(
            f"element type {dtype!r} is not known",
            why="the size of a variable depends on the size of its elements",
            fix='use a numpy name of a dtype, such as "float32" or "bfloat16"',
        ) from None
