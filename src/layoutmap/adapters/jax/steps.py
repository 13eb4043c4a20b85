"""Compiled training steps that keep the layouts of their arguments.

`JitStep` finds the shardings of a step's arguments and results, and `jax.jit` runs the step with them.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from layoutmap.adapters.fingerprints import hash_lowered, list_versions
from layoutmap.adapters.jax.contexts import find_context
from layoutmap.adapters.jax.later_arrays import (
    ArrayShape,
    check_mesh,
    find_rule_shardings,
    name_results,
    warn_without_rule,
)
from layoutmap.adapters.jax.microbatches import find_consecutive_splits
from layoutmap.adapters.jax.objects import (
    StepObjects,
    find_changed_arrays,
    is_nnx_optimizer,
    is_object,
    open_objects,
)
from layoutmap.adapters.jax.outputs import Input, Place, Tree, choose_shardings
from layoutmap.adapters.jax.pytrees import find_equinox_leaves, list_leaves
from layoutmap.adapters.jax.step_changes import ProgramKey, describe_change
from layoutmap.adapters.jax.tracing import is_key
from layoutmap.adapters.protocol import RuleLookup
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import LayoutError, LayoutMapWarning, MeshError, ScopeError, shorten_repr
from layoutmap.core.idle_dims import make_idle_dims_warning
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh, check_dim
from layoutmap.core.specs import BatchDim, count_batch_shards, format_batch_dim, list_batch_dims
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.engines import get_engine
from layoutmap.engines.agreement import check_program
from layoutmap.engines.jax.ambient import leave_ambient_mesh, use_mesh
from layoutmap.engines.jax.padded import PaddedArray, Shape, find_padded_shape, pad, unpad, unwrap

_SMALL = 1024  # elements: an array off the mesh that has more may be meant as a batch
_ARRAYS = (jax.Array, np.ndarray, np.generic)
_NUMBERS = (int, float, complex)

Key = int | str
"""An argument: its position, or its name if it is passed by name."""


@overload
def jit_step(
    function: Callable[..., object],
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    batch_dim: BatchDim | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    layout_map: RuleLookup | None = None,
    out_names: object = None,
) -> JitStep: ...


@overload
def jit_step(
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    batch_dim: BatchDim | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    layout_map: RuleLookup | None = None,
    out_names: object = None,
) -> Callable[[Callable[..., object]], JitStep]: ...


def jit_step(
    function: Callable[..., object] | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    batch_dim: BatchDim | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    layout_map: RuleLookup | None = None,
    out_names: object = None,
) -> Any:
    """Compile a training step that keeps the layouts of its arguments in its results.

    Under plain `jax.jit` the compiler chooses the layouts of results, and weights drift: a step later some are
    replicated. Here a result has an argument's layouts if it replaces it: the first result the first argument, the
    second result the second, if it has the same structure and shapes and is an update of it, and a donated argument
    wherever it is returned. All other results, as a loss, are where XLA leaves them. Modules and optimizers of flax.nnx
    among the arguments are changed in place, each Variable in the layout that it has; neither they nor static arguments
    are counted in that order.

    A step is compiled once for each structure, shapes and layouts of its arguments, and each value of those that are
    static. Functions and texts in a pytree, and all but the arrays of a module of Equinox, count as static, too.

    Args:
        function: The step: a function of arrays, pytrees of them, and objects of nnx. `None`: returns a decorator.
        donate_argnums: The positional arguments whose memory the results may take, as for `jax.jit`.
        static_argnums: The positional arguments that are constants of the compiled step, as for `jax.jit`.
        static_argnames: The same, by name.
        batch_dim: The mesh dim over which the first axis of batches is sharded, or a tuple of several, as in
            `("replica", "fsdp")`; `None`: they are replicated.
        batch_argnums: The positional arguments that are batches; `None`: every numpy array is one, and so are random
            keys of which there is one for each row. Of several processes each passes its own rows.
        layout_map: Rules for arrays that appear after the model was built, as a KV cache. An argument without a layout
            gets that of the rule for its parameter's name and its path, as in `cache.0.k`, and so does a result that
            replaces no argument. `None`: an array that a module of nnx got after `build` has the rules of its map.
        out_names: The names of results, as a tuple of them or a tree: `(None, "cache")`. `None`: keys of a dict are
            names, and other results have none.

    Returns:
        The compiled step, called as the function is. Its `lower` takes the same arguments and returns what `lower` of
        `jax.jit` does.

    Raises:
        LayoutError: An argument is no array, none has a layout, a batch cannot be split evenly, or a donated argument
            is returned with another shape, or passed again. From the call, as all that follow.
        MeshError: Arguments are on different meshes.
        ScopeError: There is no such dim or argument, an object of nnx is inside of another argument or is returned, the
            step changes more of it than arrays, or several processes would run different steps.

    Example:
        >>> import jax, optax
        >>> layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"))
        >>> kernel = lm.dtensor.relayout(np.ones((8, 16), np.float32), lm.Layout([None, "model"], layout_map.mesh))
        >>> tx = optax.adam(1e-3)
        >>> @lm.jit_step(donate_argnums=(0, 1), batch_dim="batch")
        ... def step(params, state, x):
        ...     loss, gradients = jax.value_and_grad(lambda p: ((x @ p["kernel"]) ** 2).mean())(params)
        ...     updates, state = tx.update(gradients, state, params)
        ...     return optax.apply_updates(params, updates), state, loss
        >>> params = {"kernel": kernel}
        >>> state = layout_map.build_optimizer(tx, params)
        >>> params, state, loss = step(params, state, np.ones((4, 8), np.float32))
        >>> print(lm.dtensor.fetch_layout(params["kernel"]), lm.dtensor.fetch_layout(state[0].mu["kernel"]))
        (unsharded, model) (unsharded, model)
    """
    options: Any = {
        "donate_argnums": donate_argnums,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "batch_dim": batch_dim,
        "batch_argnums": batch_argnums,
        "layout_map": layout_map,
        "out_names": out_names,
    }
    return functools.partial(JitStep, **options) if function is None else JitStep(function, **options)


Constants = tuple[tuple[int, type, object], ...]
"""Values that are compiled into a step: the number, type, and value of each."""


class _Variant(NamedTuple):
    """The part of a call that the traced function closes over: all but its leaves, which must not be kept alive."""

    keys: tuple[Key, ...]  # by position, then by name in sorted order
    static: Constants  # of each static argument the number, type, and value
    nodes: tuple[int, ...]  # the numbers of the arguments that are objects of nnx
    structure: int  # the number of the structure of these objects
    tree: Tree  # of all arguments: static ones are `None` in it, and objects of nnx are lists of arrays
    constants: Constants  # the leaves of the tree that are no arrays
    padded: tuple[
        tuple[int, Shape], ...
    ]  # of each padded array the number among the others, and its logical shape

    @property
    def num_positional(self) -> int:
        """The number of positional arguments."""
        return sum(isinstance(key, int) for key in self.keys)

    def fill_tree(self, leaves: Iterable[object], *, with_constants: bool = True) -> list[Any]:
        """Return the arguments with these leaves, and with the constants or None in place of them."""
        return _fill(self.tree, {n: x if with_constants else None for n, _, x in self.constants}, leaves)

    def format_path(self, path: tuple[Any, ...]) -> str:
        """Format the path of a leaf as one would write it: `args[0]['kernel']`."""
        key = self.keys[path[0].idx]
        return f"{'args' if isinstance(key, int) else 'kwargs'}[{key!r}]{jax.tree_util.keystr(path[1:])}"


@dataclass(slots=True, eq=False)
class _Call:
    """The arguments of one call: the leaves that are arrays, and all else."""

    variant: _Variant
    leaves: list[Any]
    objects: StepObjects | None
    signature: Hashable

    def list_names(self) -> tuple[list[str], list[int]]:
        """Return the name of each leaf, and the number of its argument."""
        names, owners = list[str](), list[int]()
        values = self.variant.fill_tree(self.leaves, with_constants=False)
        for path, _ in jax.tree_util.tree_flatten_with_path(values)[0]:
            owner = path[0].idx
            owners.append(owner)
            if self.objects is not None and owner in self.variant.nodes:
                names.append(self.objects.names[self.variant.nodes.index(owner)][path[1].idx])
            else:
                names.append(self.variant.format_path(path))
        return names, owners


@dataclass(slots=True, eq=False)
# `jax.jit` takes shardings and donation per leaf, so a step is compiled as a function of leaves (decisions/0186).
class _Program:
    """Step that is compiled for certain shapes and layouts, as a function of its arguments' leaves."""

    shardings: Sequence[NamedSharding]  # of the leaves
    donated: Sequence[bool]
    of_objects: Sequence[int]  # the leaves that are arrays of objects of nnx
    compiled: Any = None  # returns the leaves of the results, and the new arrays of objects
    result_shardings: tuple[Sequence[object], object] = ((), None)
    logical_results: tuple[dict[int, Shape], dict[int, Shape]] = field(default_factory=lambda: ({}, {}))
    tree: Tree = None  # of the results, set when the function is traced
    constants: dict[int, object] = field(default_factory=dict[int, object])  # the results that are no arrays


class JitStep:
    """Compiled training step, as `jit_step` returns it."""

    def __init__(
        self,
        function: Callable[..., object],
        *,
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        batch_dim: BatchDim | None = None,
        batch_argnums: int | Sequence[int] | None = None,
        layout_map: RuleLookup | None = None,
        out_names: object = None,
    ):
        functools.update_wrapper(self, function)
        self._function = function
        self._name = getattr(function, "__name__", "step")
        self._parameters = _list_parameters(function)
        self._last_number = max(_as_tuple(donate_argnums) + _as_tuple(batch_argnums), default=-1)
        self._donate = self._find_keys(donate_argnums)
        self._static = self._find_keys(static_argnums, static_argnames)
        self._batch_dim = tuple(batch_dim) if isinstance(batch_dim, list) else batch_dim
        self._batches = None if batch_argnums is None else self._find_keys(batch_argnums)
        self._layout_map, self._out_names, self._warned = layout_map, out_names, set[str]()
        # For the signature of a call the program, and the leaves to place before it runs: whether each is a batch.
        self._entries: dict[Hashable, tuple[_Program, dict[int, bool]]] = {}
        self._last: tuple[Hashable, Any] = None, None
        self._programs: dict[Hashable, _Program] = {}
        self._structures: list[object] = []
        self._objects: StepObjects | None = None
        self._has_stepped = False

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the step, and compile it first for arguments with new shapes or layouts."""
        call = self._read_call(args, kwargs)
        # To compare signatures is faster than to hash one, since their parts are mostly the same objects.
        if call.signature != self._last[0]:
            try:
                entry = self._entries.get(call.signature)
            except TypeError:  # a static argument has no hash, which is refused below
                entry = None
            if entry is None:
                entry = self._entries[call.signature] = self._find_program(call, _ARRAYS)
            self._last = call.signature, entry
        return self._run(call, *self._last[1])

    @property
    def num_programs(self) -> int:
        """How many programs the step was compiled to."""
        return len(self._programs)

    def lower(self, *args: object, **kwargs: object) -> jax.stages.Lowered:
        """Return the step lowered for these arguments without running it, as `jax.jit(..).lower` does.

        Objects of nnx are lists of their arrays in what it returns, and leaves that are no arrays are `None`.

        Args:
            args: The arguments of the step; shapes may stand for arrays: `jax.ShapeDtypeStruct`.
            kwargs: Those by name.
        """
        call = self._read_call(args, kwargs)
        program, _ = self._find_program(call, (*_ARRAYS, jax.ShapeDtypeStruct))
        variant = call.variant

        def fill_results(leaves: Sequence[object], changed: object) -> object:
            out = _fill(program.tree, dict.fromkeys(program.constants), leaves)
            return (out, changed) if variant.nodes else out

        def run(*args: object, **kwargs: object) -> object:
            return fill_results(*program.compiled.__wrapped__(*jax.tree.leaves((args, kwargs))))

        run.__name__ = run.__qualname__ = self._name
        shapes = map(_describe_shape, call.leaves, program.shardings)
        values = zip(variant.keys, variant.fill_tree(shapes, with_constants=False), strict=True)
        given = [(key, value) for key, value in values if key not in self._static]
        positions = [key for key, _ in given if isinstance(key, int)]
        named = {key: value for key, value in given if isinstance(key, str)}
        compiled = jax.jit(
            run,
            out_shardings=fill_results(*program.result_shardings),
            donate_argnums=[n for n, key in enumerate(positions) if key in self._donate],
            donate_argnames=[key for key in named if key in self._donate],
        )
        with leave_ambient_mesh():
            return compiled.lower(*(value for _, value in given[: len(positions)]), **named)

    def explain(self, *args: object, **kwargs: object) -> Any:
        """Explain the work of each device in this step, without running it.

        Args:
            args: Arguments of the step, as for `lower`.
            kwargs: Those by name.

        Returns:
            The collectives with their bytes, lines of the program, and causes, the work of each device next to its
            share, and why the step was compiled again. `print` shows tables, `to_json` returns the figures.

        Example:
            >>> layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"))
            >>> kernel = lm.dtensor.relayout(np.ones((8, 16), np.float32), lm.Layout(["model", None], layout_map.mesh))
            >>> step = lm.jit_step(lambda kernel, x: (x @ kernel).sum(), batch_dim="batch")
            >>> explanation = step.explain(kernel, np.ones((4, 8), np.float32))
            >>> sorted({each.kind for each in explanation.collectives}), explanation.recompilations
            (['all_reduce'], ())
        """
        call = self._read_call(args, kwargs)
        program, _ = self._find_program(call, (*_ARRAYS, jax.ShapeDtypeStruct))
        names, _ = call.list_names()
        mesh, _ = self._find_mesh(names, call.leaves)
        with leave_ambient_mesh():
            traced = program.compiled.trace(*map(_describe_shape, call.leaves, program.shardings))
        names = list(map(self._name_argument, names))
        engine = get_engine("jax")
        batches = {
            name for name, leaf in zip(names, call.leaves, strict=True) if engine.get_layout(leaf) is None
        }
        keys = list(map(self._describe_program, self._programs))
        changes = [describe_change(before, after) for before, after in pairwise(keys)]
        # The cost of steps is a package above this one, which the rest of the library reaches through one module.
        return import_module("layoutmap.cost.entry").explain_step(
            self._name, traced, names, list(map(np.shape, call.leaves)), batches, mesh, changes
        )

    def _describe_program(self, signature: Any) -> ProgramKey:
        variant, avals, shardings, _ = signature
        names, _ = _Call(variant, [*range(len(avals))], None, None).list_names()
        static = [(f"argument {variant.keys[n]!r}", value) for n, _, value in variant.static]
        static += [(f"leaf {n}", value) for n, _, value in variant.constants]
        types = [(aval.shape, aval.dtype) for aval in avals]
        return ProgramKey(list(map(self._name_argument, names)), types, shardings, static)

    def _name_argument(self, name: str) -> str:
        """Return the name of a leaf with the function's name of its argument: `params['kernel']`."""
        for number, parameter in enumerate(self._parameters):
            for prefix in (f"args[{number}]", f"kwargs[{parameter!r}]"):
                if name.startswith(prefix):
                    return parameter + name.removeprefix(prefix)
        return name

    def _read_call(self, args: Sequence[object], kwargs: Mapping[str, object]) -> _Call:
        keys: tuple[Key, ...] = (*range(len(args)), *sorted(kwargs))
        values = [*args, *(kwargs[name] for name in sorted(kwargs))]
        static: Constants = ()
        if self._static:
            static = tuple(
                (n, type(values[n]), values[n]) for n, key in enumerate(keys) if key in self._static
            )
            for n, *_ in static:
                values[n] = None
        objects, nodes = None, ()
        if "flax.nnx" in sys.modules:
            nodes = tuple(n for n, value in enumerate(values) if is_object(value))
        if nodes:
            objects, arrays = self._read_objects([values[n] for n in nodes])
            for n, each in zip(nodes, arrays, strict=True):
                values[n] = each
        leaves, tree = jax.tree.flatten(values)
        is_padded = any(type(leaf) is PaddedArray for leaf in leaves)
        padded_leaves, leaves = (leaves, list(map(unwrap, leaves))) if is_padded else ([], leaves)
        avals = [getattr(leaf, "aval", None) for leaf in leaves]
        others = {n: leaves[n] for n, aval in enumerate(avals) if aval is None}
        found = find_constants(tree, others) if others else {}
        if found:
            leaves = [leaf for n, leaf in enumerate(leaves) if n not in found]
            padded_leaves = [leaf for n, leaf in enumerate(padded_leaves) if n not in found]
        padded = tuple((n, leaf.shape) for n, leaf in enumerate(padded_leaves) if type(leaf) is PaddedArray)
        constants = tuple((n, type(value), value) for n, value in found.items())
        types = [(type(x), getattr(x, "shape", None), getattr(x, "dtype", None)) for x in others.values()]
        shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
        variant = _Variant(keys, static, nodes, objects.token if objects else -1, tree, constants, padded)
        return _Call(variant, leaves, objects, (variant, tuple(avals), tuple(types), tuple(shardings)))

    def _read_objects(self, nodes: Sequence[object]) -> tuple[StepObjects, list[list[object]]]:
        """Return objects of nnx that were looked through, and their arrays."""
        objects = self._objects
        arrays = objects.read() if objects is not None and objects.is_unchanged(nodes) else None
        if objects is None or arrays is None:
            self._objects = objects = StepObjects(nodes)
            arrays = objects.read() or []
            if objects.structure not in self._structures:
                self._structures.append(objects.structure)
            objects.token = self._structures.index(objects.structure)
        return objects, arrays

    def _run(self, call: _Call, program: _Program, places: Mapping[int, bool]) -> object:
        """Run a program and return the results of the step."""
        leaves = call.leaves
        arrays = [leaf for leaf in leaves if hasattr(leaf, "is_deleted")]
        if True in [array.is_deleted() for array in arrays]:
            self._check_leaves(call, leaves)
        if places:
            leaves = [*leaves]
            for n, is_batch in places.items():
                leaves[n] = _place_leaf(leaves[n], program.shardings[n], is_batch)
            if call.objects is not None:  # their arrays are on the mesh from now on
                call.objects.write({at: leaves[n] for at, n in enumerate(program.of_objects) if n in places})
        if len({*map(id, arrays)}) < len(arrays):
            self._check_leaves(call, leaves, program.donated)
        with leave_ambient_mesh():
            out, changed = program.compiled(*leaves)
        for made, shapes in zip((out, changed), program.logical_results, strict=True):
            for n, shape in shapes.items():
                made[n] = PaddedArray(made[n], shape)
        if call.objects is not None:
            call.objects.write(changed)
        return _fill(program.tree, program.constants, out)

    def _find_program(self, call: _Call, kinds: tuple[type, ...]) -> tuple[_Program, dict[int, bool]]:
        """Return the program for a call, and the leaves to place before it runs: whether each is a batch."""
        self._check_arguments(call)
        self._check_leaves(call, call.leaves)
        names, owners = call.list_names()
        mesh, native = self._find_mesh(names, call.leaves)
        num_rows = {np.shape(leaf)[0] for leaf in call.leaves if isinstance(leaf, np.ndarray) and leaf.ndim}
        by_rule = self._find_rule_shardings(call, names, owners, native)
        off_mesh, places, shapes = dict[int, bool](), dict[int, bool](), list[jax.ShapeDtypeStruct]()
        shardings: list[Any] = [getattr(leaf, "sharding", None) for leaf in call.leaves]
        for n, (leaf, sharding) in enumerate(zip(call.leaves, shardings, strict=True)):
            if not isinstance(leaf, kinds + _NUMBERS):
                self._refuse(names[n], leaf)
            if n in by_rule:
                shardings[n], places[n] = by_rule[n], False
            elif sharding is None or 1 == len(sharding.device_set) < mesh.size:
                is_of_object, rank = owners[n] in call.variant.nodes, np.ndim(leaf)
                is_batch = not is_of_object and (
                    (
                        self._batches is None
                        and not native.is_multi_process
                        and _has_key_per_row(leaf, num_rows)
                    )
                    or self._is_batch(call.variant.keys[owners[n]], leaf, names[n])
                )
                if is_batch:
                    self._check_rows(mesh, native, np.shape(leaf), names[n])
                dims = [self._batch_dim if is_batch else None] * min(rank, 1) + [None] * (rank - 1)
                shardings[n], off_mesh[n] = NamedSharding(native, PartitionSpec(*dims)), is_batch
                if native.is_multi_process or isinstance(leaf, jax.Array) or is_of_object:
                    places[n] = is_batch
            # Leaves that jax.jit places are not on the mesh when it traces them.
            is_placed_by_jit = n in off_mesh and n not in places
            shapes.append(_describe_shape(leaf, None if is_placed_by_jit else shardings[n]))
        avals, by_jit = tuple(map(jax.typeof, shapes)), frozenset(off_mesh.keys() - places)
        signature = call.variant, avals, tuple(shardings), by_jit
        if signature not in self._programs:
            with_layouts = {owner for n, owner in enumerate(owners) if n not in off_mesh}
            inputs = list[Input]()
            logical = dict(call.variant.padded)
            for n, (name, owner, shape) in enumerate(zip(names, owners, shapes, strict=True)):
                is_donated = call.variant.keys[owner] in self._donate
                kept = shardings[n] if is_donated or owner in with_layouts else None
                inputs.append(Input(name, logical.get(n) or shape.shape, kept, is_donated))
            program = self._compile(call, inputs, owners, shardings, shapes, native)
            if any(
                s.shape and (off_mesh.get(n) or (n in off_mesh and s.size > _SMALL))
                for n, s in enumerate(shapes)
            ):
                self._warn_of_idle_dims(mesh, shardings, program.compiled, shapes)
            if native.is_multi_process:
                # On CPUs, the step before and what is gathered could block each other.
                jax.block_until_ready(call.leaves)
                gather = functools.partial(get_engine("jax").all_gather, mesh=mesh)
                with leave_ambient_mesh():
                    lowered = hash_lowered(self._name, program.compiled.lower(*shapes))
                check_program(self._name, [*list_versions("jax", "jaxlib"), lowered], gather)
            self._programs[signature] = program
        return self._programs[signature], places

    def _compile(
        self,
        call: _Call,
        inputs: Sequence[Input],
        owners: Sequence[int],
        shardings: Sequence[NamedSharding],
        shapes: Sequence[jax.ShapeDtypeStruct],
        native: jax.sharding.Mesh,
    ) -> _Program:
        """Trace the step for leaves of some shapes and shardings, and choose the shardings of its results."""
        variant, structure = call.variant, call.objects.structure if call.objects is not None else None
        of_objects = [n for n, owner in enumerate(owners) if owner in variant.nodes]
        program = _Program(shardings, [each.is_donated for each in inputs], of_objects)

        def run(*leaves: Any) -> tuple[list[Any], dict[int, object]]:
            values, before = variant.fill_tree(leaves), [leaves[n] for n in of_objects]
            opened = open_objects(structure, before) if variant.nodes else ()
            for n, value in (
                *zip(variant.nodes, opened, strict=True),
                *((n, x) for n, _, x in variant.static),
            ):
                values[n] = value
            count = variant.num_positional
            named = dict(zip(map(str, variant.keys[count:]), values[count:], strict=True))
            with use_mesh(native):
                out = self._function(*values[:count], **named)
            self._check_results(out)
            found, program.tree = jax.tree.flatten(out)
            program.constants = find_constants(program.tree, dict(enumerate(found)))
            arrays = [leaf for n, leaf in enumerate(found) if n not in program.constants]
            changed_from = [inputs[n] for n in of_objects]
            return arrays, find_changed_arrays(
                structure, opened, before, changed_from
            ) if variant.nodes else {}

        run.__name__ = run.__qualname__ = self._name
        donate = [n for n, each in enumerate(inputs) if each.is_donated]
        padded = dict(variant.padded)
        logical = [
            jax.ShapeDtypeStruct(padded[n], each.dtype) if n in padded else each
            for n, each in enumerate(shapes)
        ]
        # JAX traces a function once for both.
        with leave_ambient_mesh():
            traced = jax.jit(run, donate_argnums=donate).trace(*logical)
        self._warn_of_splits(traced.jaxpr.jaxpr, inputs, shardings)
        arrays, changed = traced.out_info
        results = _fill(program.tree, dict.fromkeys(program.constants), arrays)
        chosen = choose_shardings(results, traced.jaxpr.jaxpr, inputs, self._list_arguments(variant))
        if self._layout_map is not None:
            self._choose_by_rules(self._layout_map, results, chosen, native)
        kept = {n: shardings[of_objects[n]] for n in changed}
        program.result_shardings = chosen, kept
        of_results, of_changed = dict(enumerate(arrays)), dict(changed)
        padded_results = (
            _find_padded(of_results, dict(enumerate(chosen))),
            _find_padded(of_changed, kept),
        )
        program.logical_results = (
            {n: of_results[n].shape for n in padded_results[0]},
            {n: of_changed[n].shape for n in padded_results[1]},
        )

        # XLA partitions arrays of any shape, but JAX passes only even shards to a program and back (decisions/0230).
        def run_padded(*stored: Any) -> tuple[list[Any], dict[int, object]]:
            leaves = (unpad(each, padded[n]) if n in padded else each for n, each in enumerate(stored))
            results = run(*leaves)
            for made, shapes in zip(results, padded_results, strict=True):
                for n, shape in shapes.items():
                    made[n] = pad(made[n], shape)
            return results

        run_padded.__name__ = run_padded.__qualname__ = self._name
        program.compiled = jax.jit(
            run_padded if padded else run,
            in_shardings=tuple(shardings),
            out_shardings=program.result_shardings,
            donate_argnums=donate,
        )
        return program

    def _warn_of_splits(
        self, jaxpr: Jaxpr, inputs: Sequence[Input], shardings: Sequence[NamedSharding]
    ) -> None:
        """Warn of a scan over microbatches that each have rows of few devices."""
        sizes = shardings[0].mesh.shape if shardings else {}
        dims = {dim for dim in list_batch_dims(self._batch_dim) if sizes[dim] > 1}
        sharded = [n for n, each in enumerate(shardings) if dims & {*jax.tree.leaves(tuple(each.spec[:1]))}]
        for number, count in find_consecutive_splits(jaxpr, sharded):
            name, rows = inputs[number].name, inputs[number].shape[0]
            warning = LayoutMapWarning(
                f"{self._name}: a scan goes over {count} microbatches of {name}, and each device computes all rows",
                facts={"rows": f"{rows}, sharded over {', '.join(sorted(dims))}"},
                why=f"x.reshape({count}, ..) puts consecutive rows into a microbatch, which are on few devices",
                fix=f"split it by layoutmap.microbatches(x, {count}), which takes some rows of each device",
            )
            warnings.warn(warning, stacklevel=find_user_stacklevel())

    def _list_arguments(self, variant: _Variant) -> list[Place]:
        """List the arguments that results can replace, in the order of the function's own."""
        leaves = range(variant.tree.num_leaves - len(variant.constants))
        values = variant.fill_tree(leaves, with_constants=False)
        start, found = 0, list[tuple[int, Place]]()
        for number, (key, value) in enumerate(zip(variant.keys, values, strict=True)):
            tree = jax.tree.structure(value)
            if number not in variant.nodes and key not in self._static:
                known = [*self._parameters, key]
                found.append((key if isinstance(key, int) else known.index(key), (tree, start)))
            start += tree.num_leaves
        return [place for _, place in sorted(found, key=lambda each: each[0])]

    def _find_mesh(self, names: Sequence[str], leaves: Sequence[Any]) -> tuple[Mesh, jax.sharding.Mesh]:
        first: tuple[str, jax.sharding.Mesh, Mesh] | None = None
        for name, leaf in zip(names, leaves, strict=True):
            layout = get_engine("jax").get_layout(leaf)
            if layout is None:
                continue
            if first is None:
                first = name, leaf.sharding.mesh, layout.mesh
            elif leaf.sharding.mesh != first[1]:
                raise MeshError(
                    f"{self._name}: {first[0]} and {name} are on different meshes",
                    facts={first[0]: str(first[1]), name: str(leaf.sharding.mesh)},
                    why="a step computes on one mesh",
                    fix="lay them out on one",
                )
        if first is None and self._layout_map is not None and (mesh := self._layout_map.mesh) is not None:
            first = "layout_map", get_engine("jax").native(Layout.replicated(mesh, 0), 0).mesh, mesh
        if first is None:
            raise LayoutError(
                f"{self._name}: no argument has a layout",
                why="a step keeps the layouts of its arguments, and none of these is on a mesh",
                fix="build the parameters with layout_map.build(..), or lay them out: layout_map.apply(params)",
            )
        _, native, mesh = first
        check_dim(f"{self._name}: batch_dim", self._batch_dim, mesh, "batches are sharded over it")
        return mesh, native

    # A step sees them first where it is compiled, so that later calls take no time for it (decisions/0265).
    def _find_rule_shardings(
        self, call: _Call, names: Sequence[str], owners: Sequence[int], native: jax.sharding.Mesh
    ) -> dict[int, NamedSharding]:
        """Return by number the shardings of leaves without a layout, in arguments with a leaf that has a rule."""
        found, others = dict[int, NamedSharding](), dict[int, int]()
        if self._layout_map is not None:
            check_mesh(self._name, self._layout_map, native)
        variant, known = call.variant, dict(enumerate(self._parameters))
        values = variant.fill_tree(call.leaves, with_constants=False)
        paths = [parts for parts, _ in list_leaves(values)]
        for n, (leaf, owner) in enumerate(zip(call.leaves, owners, strict=True)):
            sharding, layout_map = getattr(leaf, "sharding", None), self._layout_map
            if sharding is not None and not 1 == len(sharding.device_set) < native.size:
                continue
            key = variant.keys[owner]
            if call.objects is not None and owner in variant.nodes:
                node, path = call.objects.get_node(variant.nodes.index(owner)), names[n]
                if layout_map is None and (context := find_context(node)) is not None:
                    layout_map = context.layout_map
                layout_map = None if is_nnx_optimizer(node) else layout_map
            else:
                path = ".".join((str(known.get(key, key) if isinstance(key, int) else key), *paths[n][1:]))
                layout_map = None if self._batches and key in self._batches else layout_map
            if layout_map is None:
                continue
            by_rule = find_rule_shardings(layout_map, {path: leaf}, native) if np.ndim(leaf) else {}
            if by_rule:
                found[n] = by_rule[path]
                continue
            others[n] = owner
            if isinstance(leaf, jax.Array) and layout_map is self._layout_map:
                self._warn_without_rule(path, leaf, "is replicated on the mesh")
        ruled = {owners[n] for n in found}
        replicated = {n: [None] * np.ndim(call.leaves[n]) for n, owner in others.items() if owner in ruled}
        return found | {n: NamedSharding(native, PartitionSpec(*specs)) for n, specs in replicated.items()}

    def _choose_by_rules(
        self, layout_map: RuleLookup, results: object, chosen: list[object], native: jax.sharding.Mesh
    ) -> None:
        """Choose the shardings of results that replace no argument, by the rules for their names."""
        paths = name_results(self._name, self._out_names, results)
        for n, (path, leaf) in enumerate(zip(paths, jax.tree.leaves(results), strict=True)):
            if path and chosen[n] is None:
                chosen[n] = find_rule_shardings(layout_map, {path: leaf}, native).get(path)
                if chosen[n] is None and self._out_names is not None:
                    self._warn_without_rule(path, leaf, "XLA chooses its layout")

    def _warn_without_rule(self, path: str, array: ArrayShape, consequence: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            warn_without_rule(self._name, path, array, consequence)

    def _is_batch(self, key: Key, leaf: Any, name: str) -> bool:
        """Return whether a leaf that is not on the mesh is a batch."""
        if self._batches is not None:
            return key in self._batches
        if isinstance(leaf, (np.ndarray, jax.ShapeDtypeStruct)):
            return True
        if self._batch_dim is not None and np.size(leaf) > _SMALL:
            warning = LayoutMapWarning(
                f"{self._name}: {name} is on one device, and is replicated on the mesh",
                facts={"shape": np.shape(leaf)},
                why="it is a JAX array, and only numpy arrays are taken as batches",
                fix="if it is a batch, pass batch_argnums=...; if not, lay it out first: lm.dtensor.relayout(..)",
            )
            warnings.warn(warning, stacklevel=find_user_stacklevel())
        return False

    def _check_rows(self, mesh: Mesh, native: jax.sharding.Mesh, shape: tuple[int, ...], name: str) -> None:
        """Refuse a batch with uneven shards. With several processes, JAX checks the rows of each."""
        if not shape or self._batch_dim is None or native.is_multi_process:
            return
        layout = Layout.batch_sharded(mesh, self._batch_dim, len(shape))
        size = count_batch_shards(self._batch_dim, mesh)
        if layout.find_uneven_axes(shape):
            error, rows = (
                layout.make_uneven_error(shape, 0, f"{self._name}: {name}"),
                shape[0] - shape[0] % size,
            )
            raise LayoutError(
                error.what,
                facts=error.facts,
                why=f"{error.why}, the devices of {format_batch_dim(self._batch_dim)}",
                fix=f"take a batch of {rows} rows, pad it to {rows + size}, or leave batch_dim out",
            )

    def _warn_of_idle_dims(
        self,
        mesh: Mesh,
        shardings: Sequence[NamedSharding],
        compiled: jax.stages.Wrapped,
        shapes: Sequence[jax.ShapeDtypeStruct],
    ) -> None:
        """Warn at the first step about mesh dims that shard no argument, and that the function itself does not use."""
        if self._has_stepped:
            return
        self._has_stepped = True
        used = {dim for each in shardings for dim in jax.tree.leaves(tuple(each.spec))}
        used.update(list_batch_dims(self._batch_dim))
        idle = [dim.name for dim in mesh.mesh_dims if dim.size > 1 and dim.name not in used]
        if idle:  # lowering takes time, so it is done for such meshes alone
            with leave_ambient_mesh():
                lines = compiled.lower(*shapes).as_text().splitlines()
            # Shardy names a dim wherever it is used. Another partitioner numbers devices, so nothing is known then.
            uses = [line for line in lines if "sdy." in line and "sdy.mesh @" not in line]
            idle = [dim for dim in idle if uses and not any(f'"{dim}"' in line for line in uses)]
        if idle:
            warning = make_idle_dims_warning(self._name, mesh, idle, self._batch_dim, "jit_step")
            warnings.warn(warning, stacklevel=find_user_stacklevel())

    def _check_arguments(self, call: _Call) -> None:
        variant = call.variant
        if self._last_number >= max(variant.num_positional, len(self._parameters)):
            raise ScopeError(
                f"{self._name}: there is no argument {self._last_number}",
                why=f"it is called with {variant.num_positional} positional arguments, and donate_argnums and "
                "batch_argnums count these from 0",
                fix="pass it by position, or leave its number out",
            )
        for number, _, value in variant.static:
            try:
                hash(value)
            except TypeError as error:
                raise ScopeError(
                    f"{self._name}: the static argument {variant.keys[number]} cannot be hashed",
                    facts={"value": shorten_repr(value)},
                    why=f"a step is compiled once for each value of it: {error}",
                    fix="pass a tuple in place of a list, or a frozen dataclass in place of a dict",
                ) from error
        values, constants = variant.fill_tree(call.leaves), [id(value) for *_, value in variant.constants]
        for path, leaf in jax.tree_util.tree_flatten_with_path(values, is_leaf=is_object)[0]:
            if is_object(leaf):
                raise ScopeError(
                    f"{self._name}: {variant.format_path(path)} is an object of nnx inside of another argument",
                    facts={"type": type(leaf).__name__},
                    why="only objects that are arguments themselves are changed in place",
                    fix="pass it as an argument of its own",
                )
            if isinstance(leaf, jax.core.Tracer):
                raise ScopeError(
                    f"{self._name}: it is called inside of another traced function",
                    why="a compiled step places its arguments on devices, and traced arguments are on none",
                    fix=f"call the function itself there: {self._name}.__wrapped__(...)",
                )
            if len(path) == 1 and id(leaf) in constants:
                self._refuse(variant.format_path(path), leaf)

    def _check_results(self, out: object) -> None:
        for path, leaf in jax.tree_util.tree_flatten_with_path(out, is_leaf=is_object)[0]:
            if is_object(leaf):
                raise ScopeError(
                    f"{self._name}: it returns a {type(leaf).__name__}",
                    facts={"where": jax.tree_util.keystr(path)},
                    why="objects of nnx are changed in place, and what is returned would be a copy",
                    fix="return the loss and metrics only",
                )

    def _check_leaves(self, call: _Call, leaves: Sequence[object], donated: Sequence[bool] = ()) -> None:
        """Refuse deleted arrays, and donated arrays that are passed twice, because XLA would end the process."""
        seen: dict[int, int] = {}
        for number, leaf in enumerate(leaves):
            first = seen.setdefault(id(leaf), number)
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise LayoutError(
                    f"{self._name}: {call.list_names()[0][number]} was donated, and has no values any more",
                    why="an earlier step, or another compiled function, has reused the memory of this array for its "
                    "results",
                    fix="pass on what the step returned: state = step(state, batch); or donate less: donate_argnums",
                )
            if first != number and donated and (donated[first] or donated[number]):
                names, _ = call.list_names()
                raise LayoutError(
                    f"{self._name}: {names[first]} and {names[number]} are the same array, which is donated",
                    why="the memory of a donated array is reused for results, so it can be passed only once",
                    fix="pass a copy of one of them: jax.tree.map(jnp.copy, ..); or donate less: donate_argnums",
                )

    def _refuse(self, name: str, leaf: object) -> NoReturn:
        raise LayoutError(
            f"{self._name}: {name} is not an array",
            why=f"it is {describe_type(leaf)}, and a compiled step takes arrays and numbers",
            fix="make it a constant of the step: static_argnums=.., or functools.partial; or pass its arrays only",
        )

    def _find_keys(self, numbers: int | Sequence[int], names: str | Sequence[str] = ()) -> frozenset[Key]:
        """Return arguments by position and by name, each by both where the function's signature has both."""
        known = self._parameters
        at = [n + len(known) if n < 0 else n for n in _as_tuple(numbers)]
        named = {names} if isinstance(names, str) else {*names}
        named |= {known[n] for n in at if n < len(known)}
        return frozenset((*at, *named, *(n for n, name in enumerate(known) if name in named)))


# A compiled program takes no functions or texts, so they are part of the program's key (decisions/0186).
def find_constants(tree: Tree, leaves: Mapping[int, object]) -> dict[int, object]:
    """Return the leaves of a tree that are no arrays: functions, texts, and numbers that are in a module of Equinox.

    A leaf with arrays of its own, as JAX or numpy would read them, is none, and neither is one that has no hash.
    """
    plain = {n: x for n, x in leaves.items() if not (hasattr(x, "shape") or hasattr(x, "__array__"))}
    in_modules = find_equinox_leaves(tree) if plain and "equinox" in sys.modules else ()
    return {
        n: leaf
        for n, leaf in plain.items()
        if (n in in_modules if isinstance(leaf, _NUMBERS) else isinstance(leaf, Hashable))
    }


def _fill(tree: Tree, constants: Mapping[int, object], others: Iterable[object]) -> Tree:
    """Return a tree of constants and its other leaves."""
    if not constants:
        return tree.unflatten(others)
    rest = iter(others)
    return tree.unflatten([constants[n] if n in constants else next(rest) for n in range(tree.num_leaves)])


def _find_padded(shapes: Mapping[int, Any], shardings: Mapping[int, Any]) -> dict[int, Shape]:
    """Return the padded shapes of results with axes that do not divide, by number."""
    found = {
        n: find_padded_shape(each.shape, shardings[n])
        for n, each in shapes.items()
        if isinstance(shardings[n], NamedSharding)
    }
    return {n: shape for n, shape in found.items() if shape != shapes[n].shape}


def _has_key_per_row(leaf: Any, num_rows: Set[int]) -> bool:
    """Return whether an array has a random key for each row of a batch."""
    return isinstance(leaf, jax.Array) and is_key(leaf) and leaf.ndim > 0 and leaf.shape[0] in num_rows


def _describe_shape(leaf: object, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def _list_parameters(function: Callable[..., object]) -> list[str]:
    """List the names of a function's arguments that can be passed by position, if its signature is known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _as_tuple(argnums: int | Sequence[int] | None) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums or ())


def _place_leaf(leaf: object, sharding: NamedSharding, is_batch: bool) -> jax.Array:
    """Place a leaf on the mesh. A number becomes an array of a weak type, as where JAX traces it."""
    array = leaf if isinstance(leaf, (jax.Array, np.ndarray)) else jnp.asarray(leaf)
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding, may_alias=False)
    if is_batch and isinstance(array, np.ndarray):
        return jax.make_array_from_process_local_data(sharding, array)
    return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)
