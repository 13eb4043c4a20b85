"""Plan arrays that appear after a model is built, such as KV caches, and find their layouts in a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from layoutmap.adapters.jax.models import build_without_sharding_annotations, split_model
from layoutmap.adapters.jax.pytrees import flatten_with_paths
from layoutmap.adapters.jax.tracing import trace_build_function
from layoutmap.adapters.protocol import RuleLookup
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import LayoutMapWarning, MeshError, ScopeError
from layoutmap.core.mesh import Mesh
from layoutmap.core.paths import format_path_regex_as_python
from layoutmap.core.text_table import format_bytes
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.jax.ambient import make_abstract_mesh

ArrayShape = jax.Array | np.ndarray | jax.ShapeDtypeStruct
_LARGE_BYTES = 2**20  # smaller arrays without a rule are not reported


def describe_arrays_created_after_build(
    later: Mapping[str, Callable[[], object]], mesh: Mesh
) -> list[VariableSpec]:
    """Describe the arrays that functions would create. Their paths start with the functions' names."""
    found = list[VariableSpec]()
    for name, make in later.items():
        if not callable(make):
            raise ScopeError(
                f"later: {name!r} is not a function",
                why=f"it is {describe_type(make)}, but only a function can be traced without computing arrays",
                fix=f"pass a function without arguments that makes the arrays: later={{{name!r}: make_{name}}}",
            )
        parts: Any = None

        def create_and_split_arrays(make: Callable[[], object] = make) -> tuple[object, Sequence[object]]:
            nonlocal parts
            made = build_without_sharding_annotations(make, lambda made: made)
            parts = split_model(made)
            return made, [leaf.value for leaf in parts.leaves]

        trace_build_function(create_and_split_arrays, make_abstract_mesh(mesh))
        for spec in parts.specs:
            path, *aliases = (f"{name}.{each}".rstrip(".") for each in (spec.path, *spec.aliases))
            found.append(replace(spec, path=path, aliases=tuple(aliases), kind=Kind.LATER))
    return found


def list_result_paths(step_name: str, out_names: object, results: object) -> list[str]:
    """Return a list with the path of each leaf of a step's results, and an empty string for each leaf without a name.

    Args:
        step_name: The name of the step.
        out_names: A tree of names with the upper levels of the tree of results. `None`: keys of dicts are names.
        results: The results.
    """
    if out_names is None:
        keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(results)[0]]
        is_named = [bool(path) and not isinstance(path[0], jax.tree_util.SequenceKey) for path in keys]
        paths = [".".join(parts) for parts, _ in flatten_with_paths(results)]
        return [path if named else "" for path, named in zip(paths, is_named, strict=True)]

    def list_leaf_paths(name: str | None, part: object) -> list[str]:
        return [
            ".".join(filter(None, (name, *parts))) if name else "" for parts, _ in flatten_with_paths(part)
        ]

    try:
        named = jax.tree.map(list_leaf_paths, out_names, results, is_leaf=lambda name: name is None)
    except ValueError as error:
        raise ScopeError(
            f"{step_name}: out_names={out_names!r} and the results differ in structure",
            facts={"results": str(jax.tree.structure(results))},
            why=str(error).partition("\n")[0],
            fix="write one name per result, or None for a result without a name, as in out_names=(None, 'cache')",
        ) from error
    return jax.tree.leaves(named, is_leaf=lambda each: each is None)


def find_rule_shardings(
    layout_map: RuleLookup, arrays: Mapping[str, ArrayShape], native_mesh: jax.sharding.Mesh
) -> dict[str, NamedSharding]:
    """Return a dict from the path of each array that a rule matches to its sharding.

    Args:
        layout_map: The layout map.
        arrays: Arrays or their shapes, by path.
        native_mesh: The mesh of the step, which may have other axis types than the mesh of the layout map.

    Raises:
        PlanError: A rule does not fit an array.
    """
    specs = [
        VariableSpec(path, array.shape, str(array.dtype), Kind.LATER)
        for path, array in arrays.items()
        if array.shape and layout_map.matching_rules(path)
    ]
    if not specs:
        return {}
    # Import by name, because this package must not depend on the higher package `scope`.
    plan = import_module("layoutmap.scope.plan").make_plan(
        specs,
        layout_map,
        complete=False,
        explain_why_padding_is_impossible=lambda variable, layout: (
            "an array that first appears in a step cannot be padded"
        ),
    )
    plan.check()
    layouts = {path: each.layout for path, each in plan.items()}
    shardings = {
        path: get_engine("jax").make_native_layout(each, each.rank) for path, each in layouts.items()
    }
    return {path: each.update(mesh=native_mesh) for path, each in shardings.items()}


def check_mesh_of_layout_map(step_name: str, layout_map: RuleLookup, native_mesh: jax.sharding.Mesh) -> None:
    """Raise if the mesh of a layout map differs in dims or sizes from the mesh of a step's arguments."""
    mesh = layout_map.mesh
    if mesh is None or dict(zip(mesh.dim_names, mesh.shape, strict=True)) != dict(native_mesh.shape):
        raise MeshError(
            f"{step_name}: layout_map and the arguments have different meshes",
            facts={"layout_map": str(mesh), "arguments": str(native_mesh)},
            why="a step computes on one mesh",
            fix="pass the layout map with which the arguments were built",
        )


def warn_of_large_array_without_rule(step_name: str, path: str, array: ArrayShape, consequence: str) -> None:
    """Warn that no rule matches an array, if the array is large."""
    num_bytes = math.prod(array.shape) * array.dtype.itemsize
    if num_bytes <= _LARGE_BYTES:
        return
    specs = ", ".join(["None"] * len(array.shape))
    warning = LayoutMapWarning(
        f"{step_name}: {path} has no rule, and {consequence}",
        facts={"shape": array.shape, "size": format_bytes(num_bytes)},
        why="the array is not part of the model for which the layout map was written",
        fix="write its layout, with mesh dims in place of None: "
        f"layout_map[{format_path_regex_as_python([path])}] = ({specs})",
    )
    warnings.warn(warning, stacklevel=find_user_stacklevel())
