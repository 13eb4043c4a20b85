"""Hypothesis strategies for the values of layoutmap: meshes, layouts, shapes, paths, patterns and maps.

Example:
    >>> from hypothesis import given
    >>> from layoutmap.testing import strategies
    >>> @given(strategies.layouts())
    ... def test_text_round_trips(layout):
    ...     assert layout == type(layout).from_string(layout.to_string())
    >>> test_text_round_trips()
"""

from __future__ import annotations

import math
import re
import warnings

from hypothesis import strategies as st

from layoutmap.core.layout import MEMORY_KINDS, UNSHARDED, Layout
from layoutmap.core.match import Rest
from layoutmap.core.mesh import Mesh
from layoutmap.core.uneven import Uneven
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.rules.patterns import explain_why_pattern_is_slow
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.plan import Plan, make_plan

__all__ = ["layout_maps", "layouts", "meshes", "paths", "patterns", "plans", "shapes"]

_DIM_NAMES = ("batch", "model", "x", "y", "stage", "expert")
_PARTS = ("encoder", "decoder", "blocks", "attn", "mlp", "up", "query", "kernel", "bias", "embeddings")
_MAX_DEVICES = 64  # enough for every kind of layout, but few enough to iterate over quickly

_EVEN_POLICIES: tuple[Uneven, ...] = ("error", "replicate", "shrink")


@st.composite
def meshes(
    draw: st.DrawFn, *, min_dims: int = 1, max_dims: int = 4, max_size: int = 8, devices: str | None = "any"
) -> Mesh:
    """Strategy of meshes with at most 64 devices.

    Args:
        draw: Passed by Hypothesis.
        min_dims: The smallest number of mesh dims.
        max_dims: The largest number of mesh dims, at most 6.
        max_size: The largest size of a dim.
        devices: `"any"`: some meshes are bound to devices and some are abstract. `"tensorflow"`: all are bound to local
            devices with full names of TensorFlow. `None`: all are abstract.
    """
    names = draw(st.lists(st.sampled_from(_DIM_NAMES), min_size=min_dims, max_size=max_dims, unique=True))
    dims: list[tuple[str, int]] = []
    for name in names:
        limit = _MAX_DEVICES // math.prod(size for _, size in dims)
        dims.append((name, draw(st.integers(1, min(max_size, limit)))))
    mesh_name = draw(st.sampled_from(["", "m", "train_mesh"]))
    size = math.prod(size for _, size in dims)
    device_names: list[str] | None = None
    if devices == "tensorflow" or (devices == "any" and draw(st.booleans())):
        prefix = "/job:localhost/replica:0/task:0/device:"
        if devices == "any":
            prefix = draw(st.sampled_from(["", "/job:worker/replica:0/task:1/device:"]))
        kind = draw(st.sampled_from(["CPU", "GPU", "TPU"]))
        device_names = [f"{prefix}{kind}:{i}" for i in range(size)]
    return Mesh(device_names, dims, mesh_name)


@st.composite
def layouts(
    draw: st.DrawFn, mesh: Mesh | None = None, *, min_rank: int = 0, max_rank: int = 5, tuples: bool = True
) -> Layout:
    """Strategy of layouts.

    Args:
        draw: Passed by Hypothesis.
        mesh: The mesh. `None`: it is drawn, too.
        min_rank: The smallest number of axes.
        max_rank: The largest number of axes.
        tuples: Whether one axis may be sharded over several mesh dims, which TensorFlow does not support.
    """
    mesh = draw(meshes()) if mesh is None else mesh
    rank = draw(st.integers(min_rank, max_rank))
    dims_of_axis: list[list[str]] = [[] for _ in range(rank)]
    for dim in draw(st.permutations(mesh.dim_names)):
        free = [axis for axis in range(rank) if tuples or not dims_of_axis[axis]]
        axis = draw(st.sampled_from([None, *free]))
        if axis is not None:
            dims_of_axis[axis].append(dim)
    return Layout([tuple(dims) or UNSHARDED for dims in dims_of_axis], mesh)


@st.composite
def shapes(draw: st.DrawFn, layout: Layout, *, min_side: int = 1, max_side: int = 3) -> tuple[int, ...]:
    """Strategy of shapes that a layout shards evenly.

    Args:
        draw: Passed by Hypothesis.
        layout: The layout.
        min_side: The smallest size of a shard along an axis. 0: tensors may be empty.
        max_side: The largest size of a shard along an axis.
    """
    return tuple(count * draw(st.integers(min_side, max_side)) for count in layout.shard_counts)


def paths() -> st.SearchStrategy[str]:
    """Return a strategy of variable paths, such as `blocks.0.attn.query.kernel`, with few words so that rules match."""
    part = st.sampled_from(_PARTS) | st.integers(0, 12).map(str)
    return st.lists(part, min_size=1, max_size=5).map(".".join)


def patterns() -> st.SearchStrategy[str]:
    r"""Return a strategy of regexes with all syntax of Python's `re` and the words of `paths`.

    They contain exact paths, `.*\.kernel`, classes, groups, alternatives, all quantifiers, escapes, anchors,
    look-arounds, back references, comments, and flags. All compile, and a layout map accepts them.
    """
    return st.one_of(paths(), paths().map(re.escape), _draw_typical_pattern(), _draw_random_regex()).filter(
        _can_be_rule_pattern
    )


@st.composite
def layout_maps(draw: st.DrawFn, mesh: Mesh | None = None, *, max_rules: int = 8) -> LayoutMap:
    """Strategy of layout maps with rules for variables and activations.

    Args:
        draw: Passed by Hypothesis.
        mesh: The mesh. `None`: it is drawn, too.
        max_rules: The largest number of rules for variables.
    """
    mesh = draw(meshes()) if mesh is None else mesh
    uneven: st.SearchStrategy[Uneven] = st.sampled_from(_EVEN_POLICIES)
    activations = draw(st.dictionaries(patterns(), layouts(mesh), max_size=2))
    rest: Rest | None = draw(st.sampled_from([None, "replicated"]))
    layout_map = LayoutMap(mesh, activations=activations, uneven=draw(uneven), rest=rest)
    for pattern, layout in draw(st.dictionaries(patterns(), layouts(mesh), max_size=max_rules)).items():
        memory = draw(st.sampled_from([None, *MEMORY_KINDS]))
        layout_map.add(pattern, layout, uneven=draw(st.none() | uneven), memory=memory)
    return layout_map


@st.composite
def plans(draw: st.DrawFn, *, layers: bool = False) -> tuple[list[VariableSpec], LayoutMap, Plan]:
    """Strategy of variables, a layout map, and their plan.

    Some variables are derived from others, and some rules match only derived variables.

    Args:
        draw: Passed by Hypothesis.
        layers: Whether some plans have layers, for rules for activations.
    """
    mesh = draw(meshes())
    layout_map = draw(layout_maps(mesh))
    layout_map.setdefault("never", Layout([], mesh))
    kinds = st.sampled_from([Kind.WEIGHT, Kind.STATE, Kind.RNG, Kind.METRIC])
    sides = st.lists(st.integers(0, 12), max_size=3).map(tuple)
    dtypes = st.sampled_from(["float32", "bfloat16", "int8"])
    min_size = draw(st.integers(0, 3))  # lists that may be empty are often empty, so draw a minimum size
    names = draw(st.lists(paths(), min_size=min_size, max_size=8, unique=True))
    variables = [
        VariableSpec(n, draw(sides), draw(dtypes), draw(kinds), trainable=draw(st.booleans())) for n in names
    ]
    if variables:
        parents = st.lists(st.sampled_from(variables), min_size=draw(st.integers(0, 2)), max_size=3)
        variables += draw(parents.flatmap(_make_derived_variables))
        for variable in draw(st.lists(st.sampled_from(variables), max_size=4, unique=True)):
            pattern = draw(_make_matching_pattern_strategy(variable))
            if pattern not in layout_map:
                rank = draw(st.just(len(variable.shape)) | st.integers(0, 3))
                layout = draw(layouts(mesh, min_rank=rank, max_rank=rank))
                layout_map.add(pattern, layout, uneven=draw(st.none() | st.sampled_from(_EVEN_POLICIES)))
    layer_names = draw(st.none() | st.just(names[:4])) if layers else None
    for layer in draw(st.lists(st.sampled_from(layer_names), max_size=2)) if layer_names else ():
        layout_map.activations.setdefault(layer, draw(layouts(mesh)))
    return variables, layout_map, make_plan(variables, layout_map, layers=layer_names)


@st.composite
def _make_derived_variables(draw: st.DrawFn, parents: list[VariableSpec]) -> list[VariableSpec]:
    """Strategy of lists with one variable derived from each parent, with the parent's shape or some of its axes."""
    variables: list[VariableSpec] = []
    for number, parent in enumerate(parents):
        kept = draw(st.permutations(range(len(parent.shape))).map(lambda p: p[: len(p) // 2 + 1]))
        axes = draw(st.none() | st.just(tuple((axis,) for axis in kept)))
        shape = parent.shape if axes is None else tuple(draw(st.integers(0, 12)) for _ in axes)
        kind = draw(st.sampled_from([Kind.WEIGHT, Kind.SLOT]))
        path = f"{parent.path}.derived_{number}"
        shapes = {"axes": axes, "parent_shape": None if axes is None else parent.shape}
        variables.append(VariableSpec(path, shape, parent.dtype, kind, parent=parent.path, **shapes))
    return variables


def _make_matching_pattern_strategy(variable: VariableSpec) -> st.SearchStrategy[str]:
    """Return a strategy of patterns that match a variable but not its parent."""
    matching = [variable.path, f"{re.escape(variable.path)}$"]
    if variable.parent:
        matching.append(rf".*\.{variable.path.rpartition('.')[2]}$")
    return st.sampled_from(matching)


@st.composite
def _draw_typical_pattern(draw: st.DrawFn) -> str:
    """Strategy of patterns that users typically write."""
    wild = st.sampled_from([r"\d+", ".*", "[^.]+", "(query|key|value)", "(up|gate)", r"[a-z]+\d?", "."])
    parts = draw(
        st.lists(st.sampled_from(_PARTS) | wild | st.integers(0, 12).map(str), min_size=1, max_size=4)
    )
    dot = draw(st.sampled_from([r"\.", ".", "[.]"]))
    return (
        draw(st.sampled_from(["", ".*", r".*\.", "^"]))
        + dot.join(parts)
        + draw(st.sampled_from(["", "$", r"\Z"]))
    )


_TEXTS = st.sampled_from(_PARTS) | st.text("kern.el0 #", min_size=1, max_size=4)
# Parts of regexes, separated by blanks, because lists of quoted strings are harder to read.
_SIGNS = r". ^ $ | ] } { \. \d \w \W \s \b \B \A \Z \n \\ \( \[ \| \- \é \x6b \u006b \153 \0 \1 \2".split()  # noqa: SIM905
_CLASSES = r"[kern] [^.] []k] [^]k] [\]k(] [a-z] [\d.] [)(] [k*|?] []-a]".split()  # noqa: SIM905
_GROUPS = r"(?#note) (?#() (?#[) (?#\)) (?P=name) (?(1)k|e) (?i) (?x) (?a) (?s)".split()  # noqa: SIM905
_OPENINGS = [*"( (?: (?= (?! (?<= (?<! (?> (?P<name> (?i: (?x: (?-i: (?s-m:".split(), "(?x:# )\n"]  # noqa: SIM905
_QUANTIFIERS = "* + ? {2} {0} {1,2} {,2} {1,} {,} {} {a}".split()  # noqa: SIM905


@st.composite
def _draw_random_regex(draw: st.DrawFn, depth: int = 3) -> str:
    """Strategy of regexes with parts that are nested up to `depth` times. Some do not compile."""
    forms = ["text", "sign", "row", "row", "many", "group", "or"] if depth else ["text", "sign"]
    form = draw(st.sampled_from(forms))
    inner = _draw_random_regex(depth - 1)
    if form == "text":
        return draw(_TEXTS)
    if form == "sign":
        return draw(st.sampled_from(_SIGNS) | st.sampled_from(_CLASSES) | st.sampled_from(_GROUPS))
    if form == "row":
        return "".join(draw(st.lists(inner, min_size=2, max_size=4)))
    if form == "many":
        return draw(inner) + draw(st.sampled_from(_QUANTIFIERS)) + draw(st.sampled_from(["", "", "?", "+"]))
    if form == "group":
        return draw(st.sampled_from(_OPENINGS)) + draw(inner) + ")"
    return f"{draw(inner)}|{draw(inner)}"


def _can_be_rule_pattern(pattern: str) -> bool:
    with warnings.catch_warnings():
        # A later Python may parse patterns with warnings differently, such as a "possible nested set", so refuse these.
        warnings.simplefilter("error")
        try:
            # A rules file refuses slow patterns, so refuse these, too.
            return bool(re.compile(pattern)) and not explain_why_pattern_is_slow(pattern)
        except (re.error, OverflowError, RecursionError, Warning):
            return False
