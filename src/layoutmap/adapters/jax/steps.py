"""Compiled training steps that leave everything where it was.

`JitStep` finds the shardings of arguments and results, and `jax.jit` with these runs the step. The file is longer than
others since it says of each argument that it refuses why.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from layoutmap.adapters.fingerprints import hash_lowered, versions
from layoutmap.adapters.jax.objects import StepObjects, closed_objects, is_object, open_objects
from layoutmap.adapters.jax.outputs import Argument, choose_shardings, format_path
from layoutmap.adapters.jax.signatures import (
    ARRAYS,
    NUMBERS,
    Arguments,
    Constants,
    Key,
    Variant,
    check_leaves,
    clear_arguments,
    find_constants,
    list_arguments,
    list_parameters,
    replace_arguments,
    select_arguments,
)
from layoutmap.core.arguments import kind_of
from layoutmap.core.errors import LayoutError, LayoutMapWarning, MeshError, ScopeError, brief
from layoutmap.core.idle_dims import idle_dims_warning
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh, check_dim
from layoutmap.core.users_line import level_of_user
from layoutmap.engines import get_engine
from layoutmap.engines.agreement import check_program

_SMALL = 1024  # elements: an array off the mesh that has more may be meant as a batch


_VALUES = (*ARRAYS, *NUMBERS)


@overload
def jit_step(
    function: Callable[..., object],
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    batch_dim: str | None = None,
    batch_argnums: int | Sequence[int] | None = None,
) -> JitStep: ...


@overload
def jit_step(
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    batch_dim: str | None = None,
    batch_argnums: int | Sequence[int] | None = None,
) -> Callable[[Callable[..., object]], JitStep]: ...


def jit_step(
    function: Callable[..., object] | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    batch_dim: str | None = None,
    batch_argnums: int | Sequence[int] | None = None,
) -> Any:
    """Compile a training step whose results stay in the layouts that its arguments have.

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
        batch_dim: The mesh dim over which the first axis of batches is sharded; `None`: they are replicated.
        batch_argnums: The positional arguments that are batches; `None`: every numpy array is one. Of several processes
            each passes its own rows.

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
    }
    return functools.partial(JitStep, **options) if function is None else JitStep(function, **options)


class _Retraced(Exception):
    """A compiled step was called with arguments that it is not compiled for."""


@dataclass(slots=True, eq=False)
class _Call:
    """The arguments of one call, with lists of arrays for objects of nnx.

    Args:
        given: The arguments.
        keys: The positions and names of the objects.
        objects: The objects.
        ready: The arguments as the last program takes them; `None`: they are not for it.
    """

    given: Arguments
    keys: tuple[Key, ...]
    objects: StepObjects | None
    ready: Arguments | None


@dataclass(slots=True, eq=False)
class _Program:  # why: decisions/0186
    """A step, compiled for arguments of certain shapes and layouts.

    Args:
        name: The name of the step.
        variant: The part of its arguments that it closes over.
        static: The keys of static arguments.
        names: The path of each leaf, without static arguments.
        keys: The argument of each leaf.
        donated: Whether each leaf is donated.
        tree: The tree of the leaves.
        shardings: The sharding of each leaf.
        places: The leaves that are not on the mesh when they are passed, and whether each is a batch.
        unplaced: Those of them that `jax.jit` places, which are no arrays of JAX. It can place positional arguments, in
            a single process.
        compiled: The compiled function, which raises `_Retraced` where JAX would trace it again.
        results: The constants of its results; set when it is traced.
        is_traced: Whether it has run.
    """

    name: str
    variant: Variant
    static: frozenset[Key]
    names: list[str]
    keys: list[Key]
    donated: list[bool]
    tree: Any
    shardings: list[NamedSharding]
    places: dict[int, bool]
    unplaced: set[int]
    compiled: Any = None
    results: Constants = field(default_factory=lambda: Constants(None, {}))
    is_traced: bool = False

    def __call__(self, given: Arguments) -> tuple[Any, dict[int, jax.Array]]:
        """Run it; returns the results, and the new arrays of objects by the numbers of their leaves.

        Raises:
            LayoutError: An array has no values, or is donated and passed twice.
            _Retraced: It is not compiled for these arguments.
        """
        leaves, tree = jax.tree.flatten(clear_arguments(given, self.static))
        if tree != self.tree:
            raise _Retraced
        moved = self._place(leaves)
        arrays = [leaf for leaf in leaves if hasattr(leaf, "is_deleted")]
        if any(map(_is_deleted, arrays)) or len({*map(id, arrays)}) < len(arrays):
            check_leaves(self.name, self.names, leaves, self.donated)
        if moved:
            given = replace_arguments(tree.unflatten(leaves), select_arguments(given, self.static))
        args, kwargs = given
        out = self.compiled(*args, **kwargs)
        self.is_traced = True
        out, changed = out if self.variant.objects else (out, {})
        return self.results.fill(jax.tree.leaves(out)) if self.results.values else out, changed

    def list_leaves(self, key: Key) -> list[int]:
        """List the leaves of an argument."""
        return [number for number, each in enumerate(self.keys) if each == key]

    def _place(self, leaves: list[Any]) -> bool:
        """Place leaves that are off the mesh, in the list, unless `jax.jit` does; returns whether it did.

        Raises:
            _Retraced: A leaf is no array, or in another layout.
        """
        moved = False
        for number, (leaf, sharding) in enumerate(zip(leaves, self.shardings, strict=True)):
            own = getattr(leaf, "sharding", None)
            if own is sharding or own == sharding:
                if number in self.unplaced:  # JAX would trace it again for an array that is on a mesh
                    raise _Retraced
                continue
            if number not in self.places or isinstance(own, NamedSharding) or not isinstance(leaf, _VALUES):
                raise _Retraced
            if isinstance(leaf, jax.core.Tracer):
                raise _Retraced
            if own is not None or number not in self.unplaced:
                leaves[number], moved = _place_leaf(leaf, sharding, self.places[number]), True
        return moved


class JitStep:
    """A compiled step; `jit_step` makes it."""

    def __init__(
        self,
        function: Callable[..., object],
        *,
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        batch_dim: str | None = None,
        batch_argnums: int | Sequence[int] | None = None,
    ):
        functools.update_wrapper(self, function)
        self._function = function
        self._name = getattr(function, "__name__", "step")
        self._parameters = list_parameters(function)
        self._last_number = max(_as_tuple(donate_argnums) + _as_tuple(batch_argnums), default=-1)
        self._donate = self._keys(donate_argnums)
        self._static = self._keys(static_argnums, static_argnames)
        self._batch_dim = batch_dim
        self._batches = None if batch_argnums is None else self._keys(batch_argnums)
        self._variants: list[Variant] = []
        self._programs: dict[Hashable, _Program] = {}
        self._last: _Program | None = None
        self._objects: StepObjects | None = None
        self._has_stepped = False

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the step; the first time for arguments of this kind, compile it."""
        call, last = self._read((args, kwargs)), self._last
        out = None
        if last is not None and call.ready is not None:
            with suppress(_Retraced):
                out = last(call.ready)
        if out is None:
            program, given = self._prepare(call, ARRAYS)
            try:
                out = program(given)
            except _Retraced:  # a setting of JAX that its traces depend on has changed
                self._programs.clear()
                program, given = self._prepare(call, ARRAYS)
                out = program(given)
            self._last = program
        results, changed = out
        if call.objects is not None:
            call.objects.write(changed)
        return results

    def lower(self, *args: object, **kwargs: object) -> jax.stages.Lowered:
        """Return the step lowered for arguments, as `jax.jit(..).lower` does; nothing is run.

        Objects of nnx are lists of their arrays in what it returns, and leaves that are no arrays are `None`.

        Args:
            args: The arguments of the step; shapes may stand for arrays: `jax.ShapeDtypeStruct`.
            kwargs: Those by name.
        """
        program, given = self._prepare(self._read((args, kwargs)), (*ARRAYS, jax.ShapeDtypeStruct))
        return program.compiled.lower(*given[0], **given[1])

    def _read(self, given: Any) -> _Call:
        """Read the arrays of objects of nnx, and see whether the last program is for arguments like these."""
        keys: tuple[Key, ...] = ()
        objects, variant = None, None if self._last is None else self._last.variant
        if "flax.nnx" in sys.modules:
            found = [(key, each) for key, each in list_arguments(given) if is_object(each)]
            if found:
                keys = tuple(key for key, _ in found)
                objects, arrays = self._read_objects([each for _, each in found])
                given = replace_arguments(given, zip(keys, arrays, strict=True))
        ready = given
        if variant is None or variant.objects != keys or (objects and objects.variant is not variant):
            ready = None
        elif variant.constants.values:
            leaves, tree = jax.tree.flatten(clear_arguments(given, self._static))
            is_same = variant.constants.match(leaves, tree)
            ready = self._empty(variant.constants, leaves, given) if is_same else None
        return _Call(given, keys, objects, ready)

    def _read_objects(self, nodes: Sequence[object]) -> tuple[StepObjects, list[list[object]]]:
        objects = self._objects
        arrays = objects.read() if objects is not None and objects.are(nodes) else None
        if objects is None or arrays is None:
            self._objects = objects = StepObjects(nodes)
            arrays = objects.read() or []
        return objects, arrays

    def _empty(self, constants: Constants, leaves: Sequence[object], given: Arguments) -> Arguments:
        return replace_arguments(constants.empty(leaves), select_arguments(given, self._static))

    def _variant(self, call: _Call) -> tuple[Variant, Arguments]:
        """Return the variant for a call, and its arguments with `None` for each constant."""
        others = clear_arguments(call.given, self._static)
        constants, leaves = find_constants(others), jax.tree.leaves(others)
        structure = call.objects.structure if call.objects is not None else None
        self._check_arguments(call.given, others, constants)
        for known in self._variants:
            same = known.objects == call.keys and known.structure == structure
            # Without constants one variant is for every tree.
            same = same and known.constants.values.keys() == constants.values.keys()
            if same and (not constants.values or known.constants.match(leaves, constants.tree)):
                break
        else:
            known = Variant(call.keys, structure, constants)
            self._variants.append(known)
        return known, self._empty(constants, leaves, call.given) if constants.values else call.given

    def _check_arguments(self, given: Arguments, others: Arguments, constants: Constants) -> None:
        if self._last_number >= max(len(given[0]), len(self._parameters)):
            raise ScopeError(
                f"{self._name}: there is no argument {self._last_number}",
                why=f"it is called with {len(given[0])} positional arguments, and donate_argnums and batch_argnums "
                "count these from 0",
                fix="pass it by position, or leave its number out",
            )
        for key, value in select_arguments(given, self._static):
            try:
                hash(value)
            except TypeError as error:
                raise ScopeError(
                    f"{self._name}: the static argument {key} cannot be hashed",
                    facts={"value": brief(value)},
                    why=f"a step is compiled once for each value of it: {error}",
                    fix="pass a tuple in place of a list, or a frozen dataclass in place of a dict",
                ) from error
        found = jax.tree_util.tree_flatten_with_path((tuple(others[0]), others[1]), is_leaf=is_object)[0]
        for path, leaf in found:
            if is_object(leaf):
                raise ScopeError(
                    f"{self._name}: {format_path(path)} is an object of nnx inside of another argument",
                    facts={"type": type(leaf).__name__},
                    why="only objects that are arguments themselves are changed in place",
                    fix="pass it as an argument of its own",
                )
        for number in constants.values:
            if len(path := found[number][0]) == 2:
                self._refuse(format_path(path), constants.values[number])

    def _refuse(self, name: str, leaf: object) -> NoReturn:
        raise LayoutError(
            f"{self._name}: {name} is not an array",
            why=f"it is {kind_of(leaf)}, and a compiled step takes arrays and numbers",
            fix="make it a constant of the step: static_argnums=.., or functools.partial; or pass its arrays only",
        )

    def _keys(self, numbers: int | Sequence[int], names: str | Sequence[str] = ()) -> frozenset[Key]:
        """Return arguments by position and by name, each by both where the function's signature has both."""
        known = self._parameters
        at = [n + len(known) if n < 0 else n for n in _as_tuple(numbers)]
        named = {names} if isinstance(names, str) else {*names}
        named |= {known[n] for n in at if n < len(known)}
        return frozenset((*at, *named, *(n for n, name in enumerate(known) if name in named)))

    def _prepare(self, call: _Call, kinds: tuple[type, ...]) -> tuple[_Program, Arguments]:
        """Return the program for a call, and its arguments with those off the mesh placed on it."""
        variant, given = self._variant(call)
        found, tree = jax.tree_util.tree_flatten_with_path(clear_arguments(given, self._static))
        paths, leaves = [path for path, _ in found], [leaf for _, leaf in found]
        keys: list[Key] = [path[1].idx if path[0].idx == 0 else path[1].key for path in paths]
        names = [
            call.objects.names[variant.objects.index(key)][path[2].idx]
            if call.objects is not None and key in variant.objects
            else format_path(path)
            for key, path in zip(keys, paths, strict=True)
        ]
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise ScopeError(
                f"{self._name}: it is called inside of another traced function",
                why="a compiled step places its arguments on devices, and traced arguments are on none",
                fix=f"call the function itself there: {self._name}.__wrapped__(...)",
            )
        check_leaves(self._name, names, leaves, [])
        mesh, native = self._find_mesh(names, leaves)
        places: dict[int, bool] = {}
        can_place, unplaced = not given[1] and not native.is_multi_process, set[int]()
        shardings: list[Any] = [getattr(leaf, "sharding", None) for leaf in leaves]
        for number, (key, leaf) in enumerate(zip(keys, leaves, strict=True)):
            sharding = shardings[number]
            if not isinstance(leaf, kinds + NUMBERS):
                self._refuse(names[number], leaf)
            if sharding is None or 1 == len(sharding.device_set) < mesh.size:
                is_batch = key not in variant.objects and self._is_batch(key, leaf, names[number])
                if is_batch:
                    self._check_rows(mesh, native, np.shape(leaf), names[number])
                specs = [self._batch_dim] if is_batch and np.ndim(leaf) else []
                target = NamedSharding(native, PartitionSpec(*specs, *[None] * (np.ndim(leaf) - len(specs))))
                places[number], shardings[number] = is_batch, target
                if can_place and not isinstance(leaf, jax.Array) and key not in variant.objects:
                    unplaced.add(number)
                else:
                    leaves[number] = _place_leaf(leaf, target, is_batch)
        given = replace_arguments(tree.unflatten(leaves), select_arguments(given, self._static))
        static = tuple((k, type(value), value) for k, value in select_arguments(given, self._static))
        avals = tuple(map(jax.typeof, leaves))
        signature = variant, static, tree, tuple(shardings), avals, frozenset(unplaced)
        if signature not in self._programs:
            donated = [key in self._donate for key in keys]
            program = _Program(
                self._name, variant, self._static, names, keys, donated, tree, shardings, places, unplaced
            )
            self._compile(program, given)
            if any(_may_be_batch(np.shape(leaves[n]), is_batch) for n, is_batch in places.items()):
                self._warn_of_idle_dims(mesh, shardings, program.compiled, given)
            if native.is_multi_process:
                self._compare(mesh, program.compiled, given)
            self._programs[signature] = program
        program = self._programs[signature]
        program.places.update(places)
        if call.objects is not None:
            call.objects.variant = variant
            # Those that were off the mesh are on it from now on.
            of_objects = [n for key in variant.objects for n in program.list_leaves(key)]
            call.objects.write({at: leaves[n] for at, n in enumerate(of_objects) if n in places})
        return program, given

    def _warn_of_idle_dims(
        self, mesh: Mesh, shardings: Sequence[NamedSharding], compiled: jax.stages.Wrapped, arguments: Any
    ) -> None:
        """Warn at the first step about mesh dims that shard no argument, and that the function itself does not use."""
        if self._has_stepped:
            return
        self._has_stepped = True
        used = {dim for each in shardings for dim in jax.tree.leaves(tuple(each.spec))} | {self._batch_dim}
        idle = [dim.name for dim in mesh.mesh_dims if dim.size > 1 and dim.name not in used]
        if idle:  # lowering takes time, so it is done for such meshes alone
            args, kwargs = arguments
            lines = compiled.lower(*args, **kwargs).as_text().splitlines()
            # Shardy names a dim wherever it is used. Another partitioner numbers devices, so nothing is known then.
            uses = [line for line in lines if "sdy." in line and "sdy.mesh @" not in line]
            idle = [dim for dim in idle if uses and not any(f'"{dim}"' in line for line in uses)]
        if idle:
            warning = idle_dims_warning(self._name, mesh, idle, self._batch_dim, "jit_step")
            warnings.warn(warning, stacklevel=level_of_user())

    def _find_mesh(self, names: Sequence[str], leaves: Sequence[Any]) -> tuple[Mesh, jax.sharding.Mesh]:
        first: tuple[str, jax.sharding.Mesh, Mesh] | None = None
        for name, leaf in zip(names, leaves, strict=True):
            layout = get_engine("jax").layout_of(leaf)
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
        if first is None:
            raise LayoutError(
                f"{self._name}: no argument has a layout",
                why="a step keeps the layouts of its arguments, and none of these is on a mesh",
                fix="build the parameters with layout_map.build(..), or lay them out: layout_map.apply(params)",
            )
        _, native, mesh = first
        check_dim(f"{self._name}: batch_dim", self._batch_dim, mesh, "batches are sharded over it")
        return mesh, native

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
            warnings.warn(warning, stacklevel=level_of_user())
        return False

    def _check_rows(self, mesh: Mesh, native: jax.sharding.Mesh, shape: tuple[int, ...], name: str) -> None:
        """Check that a batch can be split evenly; of several processes each has rows of its own, which JAX checks."""
        if not shape or self._batch_dim is None or native.is_multi_process:
            return
        layout, size = Layout.batch_sharded(mesh, self._batch_dim, len(shape)), mesh.dim_size(self._batch_dim)
        if layout.uneven_axes(shape):
            error, rows = layout.uneven_error(shape, 0, f"{self._name}: {name}"), shape[0] - shape[0] % size
            raise LayoutError(
                error.what,
                facts=error.facts,
                why=f"{error.why}, the devices of {self._batch_dim}",
                fix=f"take a batch of {rows} rows, pad it to {rows + size}, or leave batch_dim out",
            )

    def _compile(self, program: _Program, given: Arguments) -> None:
        """Compile the step for arguments that are on the mesh, with the shardings of arguments and results."""
        (args, kwargs), objects = given, program.variant.objects
        names = [program.names[n] for key in objects for n in program.list_leaves(key)]
        options = _options("donate", self._donate & {*range(len(args)), *kwargs})
        options |= _options("static", (key for key, _ in select_arguments(given, self._static)))

        def run(*args: Any, **kwargs: Any) -> object:
            if program.is_traced and not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
                raise _Retraced
            traced = list(args), kwargs
            before = [leaf for _, arrays in select_arguments(traced, objects) for leaf in arrays]
            nodes = open_objects(program.variant.structure, before) if objects else ()
            out = self._call(program.variant, traced, nodes)
            program.results.tree, program.results.values = (found := find_constants(out)).tree, found.values
            out = found.empty(jax.tree.leaves(out))
            if not objects:
                return out
            kept = [key in self._donate for key, arrays in select_arguments(traced, objects) for _ in arrays]
            return out, closed_objects(program.variant.structure, nodes, before, kept, names)

        run.__name__ = run.__qualname__ = self._name
        # JAX traces a function once for both.
        traced = jax.jit(run, **options).trace(*args, **kwargs)
        out, changed = traced.out_info if objects else (traced.out_info, {})
        shardings = choose_shardings(out, traced.jaxpr.jaxpr, self._arguments(program, given))
        if objects:
            of_objects = [program.shardings[n] for key in objects for n in program.list_leaves(key)]
            shardings = shardings, {n: of_objects[n] for n in changed}
        if not kwargs:  # of which jax.jit takes no shardings
            placed = program.tree.unflatten(program.shardings)[0]
            options["in_shardings"] = tuple(
                each for key, each in enumerate(placed) if key not in self._static
            )
        program.compiled = jax.jit(run, out_shardings=shardings, **options)

    def _call(self, variant: Variant, given: Arguments, nodes: Sequence[object]) -> object:
        """Call the function itself, with constants and objects for the arguments of the compiled one."""
        static = select_arguments(given, self._static)
        if variant.constants.values:
            given = variant.constants.fill(jax.tree.leaves(clear_arguments(given, self._static)))
        args, kwargs = replace_arguments(given, [*static, *zip(variant.objects, nodes, strict=True)])
        out = self._function(*args, **kwargs)
        for path, leaf in jax.tree_util.tree_flatten_with_path(out, is_leaf=is_object)[0]:
            if is_object(leaf):
                raise ScopeError(
                    f"{self._name}: it returns a {type(leaf).__name__}",
                    facts={"where": jax.tree_util.keystr(path)},
                    why="objects of nnx are changed in place, and what is returned would be a copy",
                    fix="return the loss and metrics only",
                )
        return out

    def _arguments(self, program: _Program, given: Arguments) -> list[Argument]:
        """List the arguments that results can replace, in the order of the function's own."""
        found: list[tuple[int, Argument]] = []
        start = 0
        for key, each in list_arguments(clear_arguments(given, self._static)):
            leaves, tree = jax.tree.flatten(each)
            numbers = range(start, start + len(leaves))
            start = numbers.stop
            if key in self._static or key in program.variant.objects:
                continue
            is_donated = key in self._donate
            has_layouts = is_donated or any(n not in program.places for n in numbers)
            of = slice(numbers.start, numbers.stop)
            shardings = program.shardings[of] if has_layouts else []
            names, shapes = program.names[of], [np.shape(leaf) for leaf in leaves]
            argument = Argument(tree, numbers.start, names, shapes, shardings, is_donated)
            place = len(self._parameters) if key not in self._parameters else self._parameters.index(str(key))
            found.append((key if isinstance(key, int) else place, argument))
        return [argument for _, argument in sorted(found, key=lambda each: each[0])]

    def _compare(self, mesh: Mesh, compiled: jax.stages.Wrapped, given: Arguments) -> None:
        """Refuse a step that is another one in another process of a mesh."""
        args, kwargs = given
        # On CPUs, the step before and what is gathered could block each other.
        jax.block_until_ready(clear_arguments(given, self._static))
        gather = functools.partial(get_engine("jax").all_gather, mesh=mesh)
        lowered = hash_lowered(self._name, compiled.lower(*args, **kwargs))
        check_program(self._name, [*versions("jax", "jaxlib"), lowered], gather)


def _may_be_batch(shape: tuple[int, ...], is_batch: bool) -> bool:
    """Whether an argument off the mesh has rows: what was taken as a batch, or is too large for a number or a key."""
    return bool(shape) and (is_batch or math.prod(shape) > _SMALL)


def _is_deleted(array: jax.Array) -> bool:
    return array.is_deleted()


def _as_tuple(argnums: int | Sequence[int] | None) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums or ())


def _options(what: str, keys: Iterable[Key]) -> dict[str, Any]:
    """Return the options of `jax.jit` that name arguments, by position and by name."""
    every = [*keys]
    return {
        f"{what}_argnums": [key for key in every if isinstance(key, int)],
        f"{what}_argnames": [key for key in every if isinstance(key, str)],
    }


def _place_leaf(leaf: object, sharding: NamedSharding, is_batch: bool) -> jax.Array | jax.ShapeDtypeStruct:
    """Place a leaf on the mesh. A number becomes an array of a weak type, as where JAX traces it."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    array = leaf if isinstance(leaf, (jax.Array, np.ndarray)) else jnp.asarray(leaf)
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding, may_alias=False)
    if is_batch and isinstance(array, np.ndarray):
        return jax.make_array_from_process_local_data(sharding, array)
    return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)
