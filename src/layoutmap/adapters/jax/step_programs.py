"""Compile the programs of a step with `jax.jit`, and choose the shardings of arguments and results."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from layoutmap.adapters.fingerprints import hash_lowered_step, iterate_versions
from layoutmap.adapters.jax.contexts import find_scope_context
from layoutmap.adapters.jax.later_arrays import (
    ArrayShape,
    check_mesh_of_layout_map,
    find_rule_shardings,
    list_result_paths,
    warn_of_large_array_without_rule,
)
from layoutmap.adapters.jax.microbatches import find_microbatches_of_consecutive_rows
from layoutmap.adapters.jax.nnx_types import is_nnx_object, is_nnx_optimizer
from layoutmap.adapters.jax.objects import find_arrays_to_write_back, rebuild_nnx_objects
from layoutmap.adapters.jax.outputs import ArgumentLeaf, Subtree, Tree, choose_result_shardings
from layoutmap.adapters.jax.private import are_equal_types_and_shardings, has_private_sharding_attribute
from layoutmap.adapters.jax.pytrees import flatten_with_paths
from layoutmap.adapters.jax.step_arguments import (
    NUMBERS,
    ArgumentKey,
    FlatArguments,
    StaticCallPart,
    StepCall,
    StepOptions,
    find_constant_leaves,
    rebuild_tree,
)
from layoutmap.adapters.jax.tracing import is_random_key
from layoutmap.adapters.protocol import RuleLookup
from layoutmap.core.errors import LayoutError, LayoutMapWarning, MeshError, ScopeError
from layoutmap.core.idle_dims import make_idle_dims_warning
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh, check_dims_in_mesh
from layoutmap.core.specs import count_batch_shards, format_batch_dim, list_batch_dims
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.engines import get_engine
from layoutmap.engines.agreement import check_same_program
from layoutmap.engines.jax.ambient import suspend_ambient_mesh, use_mesh
from layoutmap.engines.jax.padded import (
    Shape,
    compute_padded_shape,
    pad_array,
    unpad_array,
    unwrap_padded_array,
)
from layoutmap.engines.jax.trees import move_to_memory

ARRAYS = (jax.Array, np.ndarray, np.generic)
Signature = tuple[StaticCallPart, tuple[jax.core.ShapedArray, ...], tuple[Any, ...], frozenset[int]]
"""The key of a program: the static part, the types and shardings of arrays, and which arrays JAX places."""

_MAX_NON_BATCH = 1024  # a larger array outside the mesh may be a batch, so warn if it is replicated
_MAY_TRACE = ContextVar("_MAY_TRACE", default=False)


class UnrecognizedCallError(Exception):
    """Raised instead of tracing a step again, if JAX does not recognize the arguments of a call."""


@contextmanager
def allow_tracing_temporarily() -> Iterator[None]:
    """Return a context in which JAX may trace programs, and in which the mesh of `jax.set_mesh` is not set."""
    token = _MAY_TRACE.set(True)
    try:
        with suspend_ambient_mesh():
            yield
    finally:
        _MAY_TRACE.reset(token)


@dataclass(slots=True, eq=False)
# `jax.jit` flattens trees faster than Python does, so a program takes the arguments themselves. It takes their leaves
# only if these include constants or padded arrays, because `jax.jit` refuses both (decisions/0285).
class StepProgram:
    """Store a step that is compiled for certain shapes and layouts. It takes the arguments, or only their leaves."""

    shardings: Sequence[NamedSharding]  # sharding of each leaf
    donated: Sequence[bool]
    object_leaves: Sequence[int]  # positions of leaves that are arrays of nnx objects
    values_tree: Tree  # tree of the arguments, or None if the program takes their leaves
    has_result_tree: bool = False
    # compiled function, which returns the results, or only their leaves, and new arrays of nnx objects
    compiled: Any = None
    result_shardings: tuple[Tree, object] = ((), None)
    # logical shapes, by position, of padded results and of padded new arrays of nnx objects
    logical_results: tuple[dict[int, Shape], dict[int, Shape]] = field(default_factory=lambda: ({}, {}))
    tree: Tree = None  # tree of the results, set by tracing
    constants: dict[int, object] = field(default_factory=dict[int, object])  # results that are not arrays

    def make_program_arguments(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the program's positional arguments, made of the leaves of a step's arguments."""
        return leaves if self.values_tree is None else self.values_tree.unflatten(leaves)

    def rebuild_results(self, out: Tree, constants: Mapping[int, object]) -> object:
        """Return the step's results: those of the program, or a tree of the program's results and the constants."""
        return out if self.has_result_tree else rebuild_tree(self.tree, constants, out)


# Checking arguments takes longer than a small step, so first compare a call with earlier ones (decisions/0270).
class EarlierCall:
    """Store an earlier call with checked arguments: its program, and the properties that an equal call has.

    Args:
        arguments: The arguments of the call.
        call: The same arguments, split into arrays and the static part.
        program: The program.
        to_place: Positions of leaves to place before the program runs, each with whether it is a batch.
    """

    def __init__(
        self, arguments: FlatArguments, call: StepCall, program: StepProgram, to_place: Mapping[int, bool]
    ):
        self.head, self.types, self._tree = arguments.head, arguments.types, arguments.tree
        self._constants = {n for n, *_ in call.variant.constants}
        self._others = [
            (n, _make_leaf_comparison_key(leaf, n in self._constants))
            for n, leaf in enumerate(arguments.leaves)
            if n in self._constants or not has_private_sharding_attribute(leaf)
        ][::-1]
        arrays = [leaf for leaf in arguments.leaves if has_private_sharding_attribute(leaf)]
        self._avals, self._shardings = [each.aval for each in arrays], [each.sharding for each in arrays]
        self.variant, self.program, self.to_place = call.variant, program, to_place
        self.kind: type[jax.Array] = type(arrays[0]) if arrays else jax.Array
        # `jax.jit` notices a different call itself. But under a mesh of `jax.set_mesh`, it would trace even an equal
        # call again, so `match_arguments` then compares the calls.
        has_mesh = not jax.sharding.get_abstract_mesh().empty
        self.is_jit_checked = program.values_tree is not None and bool(arrays) and not (to_place or has_mesh)

    def match_arguments(self, arguments: FlatArguments) -> tuple[list[Any], bool] | None:
        """Return the arrays of an equal call, and whether an array is passed twice, or None if the call differs."""
        if arguments.head != self.head or arguments.tree != self._tree:
            return None
        leaves = arrays = arguments.leaves
        others = []
        if self._others:
            arrays = [*leaves]
            for n, description in self._others:
                if _make_leaf_comparison_key(leaves[n], n in self._constants) != description:
                    return None
                del arrays[n]
                if hasattr(leaf := unwrap_padded_array(leaves[n]), "is_deleted"):
                    others.append(leaf)
            if self._constants or self.variant.padded:
                leaves = [
                    unwrap_padded_array(leaf) for n, leaf in enumerate(leaves) if n not in self._constants
                ]
        if not are_equal_types_and_shardings(arrays, self._avals, self._shardings):
            return None
        if others:
            if any(each.is_deleted() for each in others):
                return None
            arrays = [*arrays, *others]
        return leaves, len({*map(id, arrays)}) < len(arrays)


def _make_leaf_comparison_key(leaf: Any, is_constant: bool) -> object:
    """Return a value that is equal for equal constants, and for arrays of equal types and shardings."""
    if is_constant:
        return type(leaf), leaf
    names = "shape", "dtype", "aval", "sharding"
    value = unwrap_padded_array(leaf)
    return type(leaf), getattr(leaf, "shape", None), *(getattr(value, name, None) for name in names)


def _can_rebuild_with_any_leaves(tree: Tree) -> bool:
    """Return whether a tree can be rebuilt with shardings as leaves. Classes that check their fields prevent it."""
    try:
        tree.unflatten([object()] * tree.num_leaves)
    except Exception:  # the class checks its fields and may raise anything
        return False
    return True


def _is_mesh_sharding(sharding: Any, native_mesh: jax.sharding.Mesh) -> bool:
    """Return whether a sharding is on a mesh: on several devices, or named if the mesh has a single device."""
    if sharding is None:
        return False
    return len(sharding.device_set) > 1 or (native_mesh.size == 1 and isinstance(sharding, NamedSharding))


class StepPrograms:
    """Store the programs of a step, one for each set of shapes and layouts of its arguments. Compile missing ones.

    Args:
        options: The step and its options.
    """

    def __init__(self, options: StepOptions):
        self._options = options
        self._has_stepped = False
        self._warned = set[str]()
        self.by_signature: dict[Signature, StepProgram] = {}

    def get_or_compile_program(
        self, call: StepCall, types: tuple[type, ...]
    ) -> tuple[StepProgram, dict[int, bool]]:
        """Return a call's program, and a dict from each leaf to place before it runs to whether the leaf is a batch."""
        self._options.check_arguments(call)
        self._options.check_donations(call, call.leaves)
        names, owners = call.list_leaf_names_and_owners()
        mesh, native_mesh = self.find_call_mesh_and_native_mesh(names, call.leaves)
        num_rows = {np.shape(leaf)[0] for leaf in call.leaves if isinstance(leaf, np.ndarray) and leaf.ndim}
        batch_dims = {*list_batch_dims(self._options.batch_dim)}
        has_batch = bool(num_rows) or any(
            batch_dims & _list_first_axis_dims(getattr(leaf, "sharding", None)) for leaf in call.leaves
        )
        by_rule = self._find_shardings_by_rule(call, names, owners, native_mesh)
        off_mesh, to_place, shapes = dict[int, bool](), dict[int, bool](), list[jax.ShapeDtypeStruct]()
        short = dict[int, Shape]()  # logical shapes of batches with uneven shards
        shardings: list[Any] = [getattr(leaf, "sharding", None) for leaf in call.leaves]
        for n, (leaf, sharding) in enumerate(zip(call.leaves, shardings, strict=True)):
            if not isinstance(leaf, types + NUMBERS):
                self._options.raise_non_array_leaf_error(names[n], leaf)
            if n in by_rule:
                shardings[n], to_place[n] = by_rule[n], False
            elif not _is_mesh_sharding(sharding, native_mesh):
                is_of_object, rank = owners[n] in call.variant.nodes, np.ndim(leaf)
                is_batch = not is_of_object and (
                    (
                        self._options.batches is None
                        and not native_mesh.is_multi_process
                        and _has_random_key_per_row(leaf, num_rows)
                    )
                    or self._is_batch(call.variant.keys[owners[n]], leaf, names[n], mesh, has_batch)
                )
                if is_batch and self._needs_batch_padding(mesh, native_mesh, np.shape(leaf), names[n]):
                    short[n] = np.shape(leaf)
                dims = [self._options.batch_dim if is_batch else None] * min(rank, 1) + [None] * (rank - 1)
                shardings[n], off_mesh[n] = NamedSharding(native_mesh, PartitionSpec(*dims)), is_batch
                if native_mesh.is_multi_process or isinstance(leaf, jax.Array) or is_of_object or n in short:
                    to_place[n] = is_batch
            # `jax.jit` places these leaves itself, so they are traced without a sharding.
            is_placed_by_jit = n in off_mesh and n not in to_place
            shapes.append(make_padded_shape_struct(leaf, None if is_placed_by_jit else shardings[n]))
        if short:
            padded = (*call.variant.padded, *short.items())
            call = StepCall(call.variant._replace(padded=padded), call.leaves, call.objects)
        avals, by_jit = tuple(map(jax.typeof, shapes)), frozenset(off_mesh.keys() - to_place)
        signature = call.variant, avals, tuple(shardings), by_jit
        if signature not in self.by_signature:
            with_layouts = {owner for n, owner in enumerate(owners) if n not in off_mesh}
            inputs = list[ArgumentLeaf]()
            logical = dict(call.variant.padded)
            for n, (name, owner, shape) in enumerate(zip(names, owners, shapes, strict=True)):
                is_donated = call.variant.keys[owner] in self._options.donate
                kept = shardings[n] if is_donated or owner in with_layouts else None
                inputs.append(ArgumentLeaf(name, logical.get(n) or shape.shape, kept, is_donated))
            program = self._compile_program(call, inputs, owners, shardings, shapes, native_mesh)
            if any(
                s.shape and (off_mesh.get(n) or (n in off_mesh and s.size > _MAX_NON_BATCH))
                for n, s in enumerate(shapes)
            ):
                self._warn_of_idle_dims(mesh, shardings, program, shapes)
            if native_mesh.is_multi_process:
                # On CPUs, a step that still runs and the gather below could deadlock, so wait for the step.
                jax.block_until_ready(call.leaves)
                gather = functools.partial(get_engine("jax").gather_from_processes, mesh=mesh)
                with allow_tracing_temporarily():
                    lowered = hash_lowered_step(
                        self._options.name, program.compiled.lower(*program.make_program_arguments(shapes))
                    )
                check_same_program(self._options.name, [*iterate_versions("jax", "jaxlib"), lowered], gather)
            self.by_signature[signature] = program
        return self.by_signature[signature], to_place

    def _compile_program(
        self,
        call: StepCall,
        inputs: Sequence[ArgumentLeaf],
        owners: Sequence[int],
        shardings: Sequence[NamedSharding],
        shapes: Sequence[jax.ShapeDtypeStruct],
        native_mesh: jax.sharding.Mesh,
    ) -> StepProgram:
        """Trace the step for these shapes and shardings, and choose the shardings of its results."""
        options, variant = self._options, call.variant
        structure = call.objects.structure if call.objects is not None else None
        object_leaves = [n for n, owner in enumerate(owners) if owner in variant.nodes]
        has_tree = not (
            variant.constants or variant.padded or options.layout_map
        ) and _can_rebuild_with_any_leaves(variant.tree)
        values_tree = variant.tree if has_tree else None
        program = StepProgram(shardings, [each.is_donated for each in inputs], object_leaves, values_tree)

        def call_with_leaves(*stored: Any) -> tuple[Tree, dict[int, object]]:
            if not _MAY_TRACE.get():
                raise UnrecognizedCallError
            # JAX refuses operands in different memories, so move all to the device (decisions/0264).
            leaves = [move_to_memory(each, "device") for each in jax.tree.leaves(stored)]
            values, old_arrays = variant.rebuild_arguments(leaves), [leaves[n] for n in object_leaves]
            opened = rebuild_nnx_objects(structure, old_arrays) if variant.nodes else ()
            for n, value in (
                *zip(variant.nodes, opened, strict=True),
                *((n, x) for n, _, x in variant.static),
            ):
                values[n] = value
            count = variant.num_positional_arguments
            named = dict(zip(map(str, variant.keys[count:]), values[count:], strict=True))
            with use_mesh(native_mesh):
                out = options.function(*values[:count], **named)
            _check_results_have_no_nnx_objects(options.name, out)
            found, program.tree = jax.tree.flatten(out)
            program.constants = find_constant_leaves(program.tree, dict(enumerate(found)))
            program.has_result_tree = (
                has_tree and not program.constants and _can_rebuild_with_any_leaves(program.tree)
            )
            arrays = [leaf for n, leaf in enumerate(found) if n not in program.constants]
            changed_from = [inputs[n] for n in object_leaves]
            return out if program.has_result_tree else arrays, find_arrays_to_write_back(
                structure, opened, old_arrays, changed_from
            ) if variant.nodes else {}

        call_with_leaves.__name__ = call_with_leaves.__qualname__ = self._options.name
        donate = [n for n, key in enumerate(variant.keys) if key in options.donate]
        if not has_tree:
            donate = [n for n, each in enumerate(inputs) if each.is_donated]
        padded = dict(variant.padded)
        logical = [
            jax.ShapeDtypeStruct(padded[n], each.dtype) if n in padded else each
            for n, each in enumerate(shapes)
        ]
        # JAX caches this trace, so compiling does not trace the step again.
        with allow_tracing_temporarily():
            traced = jax.jit(call_with_leaves, donate_argnums=donate).trace(
                *program.make_program_arguments(logical)
            )
        self._warn_of_microbatches_of_consecutive_rows(traced.jaxpr.jaxpr, inputs, shardings)
        out, changed = traced.out_info
        arrays = jax.tree.leaves(out)
        results = rebuild_tree(program.tree, dict.fromkeys(program.constants), arrays)
        arguments = self._list_replaceable_arguments(variant)
        chosen = choose_result_shardings(results, traced.jaxpr.jaxpr, inputs, arguments)
        if options.layout_map is not None:
            self._add_result_shardings_by_rule(options.layout_map, results, chosen, native_mesh)
        kept = {n: shardings[object_leaves[n]] for n in changed}
        program.result_shardings = program.tree.unflatten(chosen) if program.has_result_tree else chosen, kept
        of_results, of_changed = dict(enumerate(arrays)), dict(changed)
        padded_results = (
            _find_padded_shapes(of_results, dict(enumerate(chosen))),
            _find_padded_shapes(of_changed, kept),
        )
        program.logical_results = (
            {n: of_results[n].shape for n in padded_results[0]},
            {n: of_changed[n].shape for n in padded_results[1]},
        )

        # JAX passes only even shards to a program and back, so slice the padding off inside (decisions/0230).
        def call_with_padded_leaves(*stored: Any) -> tuple[Tree, dict[int, object]]:
            leaves = (unpad_array(each, padded[n]) if n in padded else each for n, each in enumerate(stored))
            results = call_with_leaves(*leaves)
            for made, shapes in zip(results, padded_results, strict=True):
                for n, shape in shapes.items():
                    made[n] = pad_array(made[n], shape)
            return results

        call_with_padded_leaves.__name__ = call_with_padded_leaves.__qualname__ = self._options.name
        program.compiled = jax.jit(
            call_with_padded_leaves if padded else call_with_leaves,
            in_shardings=tuple(program.make_program_arguments(shardings)),
            out_shardings=program.result_shardings,
            donate_argnums=donate,
        )
        return program

    def _warn_of_microbatches_of_consecutive_rows(
        self, jaxpr: Jaxpr, inputs: Sequence[ArgumentLeaf], shardings: Sequence[NamedSharding]
    ) -> None:
        """Warn if a scan iterates over microbatches of consecutive rows, which few devices store."""
        sizes = shardings[0].mesh.shape if shardings else {}
        dims = {dim for dim in list_batch_dims(self._options.batch_dim) if sizes[dim] > 1}
        sharded = [n for n, each in enumerate(shardings) if dims & _list_first_axis_dims(each)]
        for number, count in find_microbatches_of_consecutive_rows(jaxpr, sharded):
            name, rows = inputs[number].name, inputs[number].shape[0]
            warning = LayoutMapWarning(
                f"{self._options.name}: a scan goes over {count} microbatches of {name}, and each "
                "device computes all of their rows",
                facts={"rows": f"{rows}, sharded over {', '.join(sorted(dims))}"},
                why=f"x.reshape({count}, ..) puts consecutive rows into a microbatch, and only few devices "
                "store these rows",
                fix=f"split it by layoutmap.microbatches(x, {count}), which takes rows from every device",
            )
            warnings.warn(warning, stacklevel=find_user_stacklevel())

    def _list_replaceable_arguments(self, variant: StaticCallPart) -> list[Subtree]:
        """Return the arguments that results can replace: all but static ones and nnx objects, in order."""
        leaves = range(variant.tree.num_leaves - len(variant.constants))
        values = variant.rebuild_arguments(leaves, with_constants=False)
        start, found = 0, list[tuple[int, Subtree]]()
        for number, (key, value) in enumerate(zip(variant.keys, values, strict=True)):
            tree = jax.tree.structure(value)
            if number not in variant.nodes and key not in self._options.static:
                known = [*self._options.parameters, key]
                found.append((key if isinstance(key, int) else known.index(key), (tree, start)))
            start += tree.num_leaves
        return [place for _, place in sorted(found, key=lambda each: each[0])]

    def find_call_mesh_and_native_mesh(
        self, names: Sequence[str], leaves: Sequence[Any]
    ) -> tuple[Mesh, jax.sharding.Mesh]:
        """Return the mesh of a call's arrays, as a `Mesh` of layoutmap and as a mesh of JAX."""
        first: tuple[str, jax.sharding.Mesh, Mesh] | None = None
        for name, leaf in zip(names, leaves, strict=True):
            layout = get_engine("jax").get_layout(leaf)
            if layout is None:
                continue
            if first is None:
                first = name, leaf.sharding.mesh, layout.mesh
            elif leaf.sharding.mesh != first[1]:
                raise MeshError(
                    f"{self._options.name}: {first[0]} and {name} are on different meshes",
                    facts={first[0]: str(first[1]), name: str(leaf.sharding.mesh)},
                    why="a step computes on one mesh",
                    fix="move both to the same mesh: lm.dtensor.copy_to_mesh(..)",
                )
        layout_map = self._options.layout_map
        if first is None and layout_map is not None and (mesh := layout_map.mesh) is not None:
            native_mesh = get_engine("jax").make_native_layout(Layout.replicated(mesh, 0), 0).mesh
            first = "layout_map", native_mesh, mesh
        if first is None:
            raise LayoutError(
                f"{self._options.name}: no argument has a layout",
                why="a step runs on the mesh of its arguments, but none of them is on a mesh",
                fix="build the parameters with layout_map.build(..), or shard them: layout_map.apply(params)",
            )
        _, native_mesh, mesh = first
        check_dims_in_mesh(
            f"{self._options.name}: batch_dim", self._options.batch_dim, mesh, "batches are sharded over it"
        )
        return mesh, native_mesh

    # Rules are looked up only when a step is compiled, so that later calls take no time for it (decisions/0265).
    def _find_shardings_by_rule(
        self, call: StepCall, names: Sequence[str], owners: Sequence[int], native_mesh: jax.sharding.Mesh
    ) -> dict[int, NamedSharding]:
        """Return a dict from positions to shardings, for leaves without a layout in arguments to which rules apply.

        A leaf that a rule matches gets the rule's sharding, and the other leaves of its argument are replicated.
        """
        options, found, others = self._options, dict[int, NamedSharding](), dict[int, int]()
        if options.layout_map is not None:
            check_mesh_of_layout_map(options.name, options.layout_map, native_mesh)
        variant, known = call.variant, dict(enumerate(options.parameters))
        values = variant.rebuild_arguments(call.leaves, with_constants=False)
        paths = [parts for parts, _ in flatten_with_paths(values)]
        for n, (leaf, owner) in enumerate(zip(call.leaves, owners, strict=True)):
            if _is_mesh_sharding(getattr(leaf, "sharding", None), native_mesh):
                continue
            key, layout_map = variant.keys[owner], options.layout_map
            if call.objects is not None and owner in variant.nodes:
                node, path = call.objects.get_object_if_alive(variant.nodes.index(owner)), names[n]
                if layout_map is None and (context := find_scope_context(node)) is not None:
                    layout_map = context.layout_map
                layout_map = None if is_nnx_optimizer(node) else layout_map
            else:
                path = ".".join((str(known.get(key, key) if isinstance(key, int) else key), *paths[n][1:]))
                layout_map = None if options.batches and key in options.batches else layout_map
            if layout_map is None:
                continue
            by_rule = find_rule_shardings(layout_map, {path: leaf}, native_mesh) if np.ndim(leaf) else {}
            if by_rule:
                found[n] = by_rule[path]
                continue
            others[n] = owner
            if isinstance(leaf, jax.Array) and layout_map is options.layout_map:
                self._warn_once_of_array_without_rule(path, leaf, "is replicated on the mesh")
        ruled = {owners[n] for n in found}
        replicated = {n: [None] * np.ndim(call.leaves[n]) for n, owner in others.items() if owner in ruled}
        return found | {
            n: NamedSharding(native_mesh, PartitionSpec(*specs)) for n, specs in replicated.items()
        }

    def _add_result_shardings_by_rule(
        self, layout_map: RuleLookup, results: object, chosen: list[object], native_mesh: jax.sharding.Mesh
    ) -> None:
        """Store in `chosen` the shardings that rules give to named results without a sharding."""
        out_names = self._options.out_names
        paths = list_result_paths(self._options.name, out_names, results)
        for n, (path, leaf) in enumerate(zip(paths, jax.tree.leaves(results), strict=True)):
            if path and chosen[n] is None:
                chosen[n] = find_rule_shardings(layout_map, {path: leaf}, native_mesh).get(path)
                if chosen[n] is None and out_names is not None:
                    self._warn_once_of_array_without_rule(path, leaf, "XLA chooses its layout")

    def _warn_once_of_array_without_rule(self, path: str, array: ArrayShape, consequence: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            warn_of_large_array_without_rule(self._options.name, path, array, consequence)

    def _is_batch(self, key: ArgumentKey, leaf: Any, name: str, mesh: Mesh, has_batch: bool) -> bool:
        """Return whether a leaf without a layout is a batch, and warn if it is not but looks like one.

        A large array does, and any array if `has_batch` is false, so if no other array is sharded over the batch dim.
        """
        if self._options.batches is not None:
            return key in self._options.batches
        if isinstance(leaf, (np.ndarray, jax.ShapeDtypeStruct)):
            return True
        looks_like_batch = np.size(leaf) > _MAX_NON_BATCH or (np.ndim(leaf) > 1 and not has_batch)
        if self._options.batch_dim is not None and looks_like_batch and mesh.size > 1:
            warning = LayoutMapWarning(
                f"{self._options.name}: {name} is on one device, and is replicated on the mesh",
                facts={"shape": np.shape(leaf)},
                why="without batch_argnums, only numpy arrays count as batches, and this is a JAX array",
                fix="if it is a batch, pass batch_argnums=...; if not, shard it first: "
                "lm.dtensor.relayout(..)",
            )
            warnings.warn(warning, stacklevel=find_user_stacklevel())
        return False

    # A program slices padding off, which JAX refuses along explicit axes, so raise an error for these (decisions/0295).
    def _needs_batch_padding(
        self, mesh: Mesh, native_mesh: jax.sharding.Mesh, shape: tuple[int, ...], name: str
    ) -> bool:
        """Return whether a batch needs padding. With several processes it does not, because JAX checks their rows.

        Raises:
            LayoutError: The shards are uneven, and the mesh has explicit axes.
        """
        if not shape or self._options.batch_dim is None or native_mesh.is_multi_process:
            return False
        layout = Layout.batch_sharded(mesh, self._options.batch_dim, len(shape))
        size = count_batch_shards(self._options.batch_dim, mesh)
        if not layout.find_uneven_axes(shape):
            return False
        if not mesh.explicit_dims and shape[0]:
            return True
        error = layout.make_uneven_error(shape, 0, f"{self._options.name}: {name}")
        rows = shape[0] - shape[0] % size
        raise LayoutError(
            error.what,
            facts=error.facts,
            why=f"{error.why}, the devices of {format_batch_dim(self._options.batch_dim)}",
            fix=f"use a batch of {rows} rows, pad it to {rows + size}, or leave batch_dim out",
        )

    def _warn_of_idle_dims(
        self,
        mesh: Mesh,
        shardings: Sequence[NamedSharding],
        program: StepProgram,
        shapes: Sequence[jax.ShapeDtypeStruct],
    ) -> None:
        """Warn, at the first step, of mesh dims that shard no argument and that the function does not use."""
        if self._has_stepped:
            return
        self._has_stepped = True
        used = {dim for each in shardings for dim in jax.tree.leaves(tuple(each.spec))}
        used.update(list_batch_dims(self._options.batch_dim))
        idle = [dim.name for dim in mesh.mesh_dims if dim.size > 1 and dim.name not in used]
        if idle:  # lowering takes time, so do it only if a dim may be idle
            with allow_tracing_temporarily():
                lines = program.compiled.lower(*program.make_program_arguments(shapes)).as_text().splitlines()
            # With Shardy, the lowered program contains the names of the dims that it uses. With GSPMD, it has only
            # device numbers, so it is unknown whether a dim is idle: do not warn.
            uses = [line for line in lines if "sdy." in line and "sdy.mesh @" not in line]
            idle = [dim for dim in idle if uses and not any(f'"{dim}"' in line for line in uses)]
        if idle:
            warning = make_idle_dims_warning(
                self._options.name, mesh, idle, self._options.batch_dim, "jit_step"
            )
            warnings.warn(warning, stacklevel=find_user_stacklevel())


def _list_first_axis_dims(sharding: object) -> set[str]:
    """Return the mesh dims over which a sharding shards the first axis. Other objects shard it over none."""
    return {*jax.tree.leaves(tuple(getattr(sharding, "spec", ())[:1]))}


def _check_results_have_no_nnx_objects(name: str, out: object) -> None:

    for path, leaf in jax.tree_util.tree_flatten_with_path(out, is_leaf=is_nnx_object)[0]:
        if is_nnx_object(leaf):
            raise ScopeError(
                f"{name}: the step returns a {type(leaf).__name__}",
                facts={"where": jax.tree_util.keystr(path)},
                why="the step changes nnx objects in place, and a returned object would be a copy",
                fix="return the loss and metrics only",
            )


def _find_padded_shapes(shapes: Mapping[int, Any], shardings: Mapping[int, Any]) -> dict[int, Shape]:
    """Return a dict from the positions of results with uneven shards to their padded shapes."""
    found = {
        n: compute_padded_shape(each.shape, shardings[n])
        for n, each in shapes.items()
        if isinstance(shardings[n], NamedSharding)
    }
    return {n: shape for n, shape in found.items() if shape != shapes[n].shape}


def _has_random_key_per_row(leaf: Any, num_rows: Set[int]) -> bool:
    """Return whether an array has a random key for each row of a batch."""
    return isinstance(leaf, jax.Array) and is_random_key(leaf) and leaf.ndim > 0 and leaf.shape[0] in num_rows


def make_padded_shape_struct(leaf: object, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    """Return a leaf's padded shape, dtype, and sharding as a `ShapeDtypeStruct`, which has no values."""
    aval = jax.typeof(leaf)
    shape = aval.shape if sharding is None else compute_padded_shape(aval.shape, sharding)
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def place_leaf_on_mesh(leaf: object, sharding: NamedSharding, is_batch: bool) -> jax.Array:
    """Put a leaf on the mesh, and pad uneven batches. A number becomes a weakly typed array, as in JAX."""
    array = leaf if isinstance(leaf, (jax.Array, np.ndarray)) else jnp.asarray(leaf)
    shape = (
        compute_padded_shape(array.shape, sharding)
        if is_batch and sharding.is_fully_addressable
        else array.shape
    )
    if shape != array.shape:
        numpy = jnp if isinstance(array, jax.Array) else np
        array = numpy.concatenate([array, numpy.zeros((shape[0] - len(array), *shape[1:]), array.dtype)])
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding, may_alias=False)
    if is_batch and isinstance(array, np.ndarray):
        return jax.make_array_from_process_local_data(sharding, array)
    return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)
