"""Compiled training steps that leave everything where it was.

The file is longer than others since what is refused, and why, stands where it is found.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NoReturn, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from layoutmap.adapters.jax.objects import StepObjects, closed_objects, is_object, open_objects
from layoutmap.adapters.jax.outputs import Arguments, path_text
from layoutmap.adapters.jax.signatures import (
    ARRAYS,
    NUMBERS,
    Constants,
    Key,
    Signature,
    Static,
    check_given,
    constants_in,
    parameters_of,
    without,
)
from layoutmap.adapters.programs import Program, lowered_lines, versions
from layoutmap.core.arguments import kind_of
from layoutmap.core.errors import LayoutError, LayoutMapWarning, MeshError, ScopeError, brief
from layoutmap.core.idle_dims import idle_dims_warning
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh, check_dim
from layoutmap.core.users_line import level_of_user
from layoutmap.engines import get_engine
from layoutmap.engines.agreement import Trait, check_program, gather_texts
from layoutmap.engines.peers import Peers

_SMALL = 1024  # elements: an array off the mesh that has more may be meant as a batch


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
    replicated. Here each result that corresponds to an argument, a subtree with the same structure and shapes, has that
    argument's layouts. Modules and optimizers of flax.nnx among the arguments are changed in place, each Variable in
    the layout that it has. Of other results those with as many rows as the batch are sharded as it is, and all else, a
    loss and metrics, is replicated.

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
        EngineError: Another process, which is to run the step too, has ended.

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


@dataclass(slots=True, eq=False)
class _Program:
    """A step, compiled for one signature, with the shapes and layouts of its leaves.

    Args:
        name: What the step is called.
        signature: The signature.
        compiled: The compiled function of `signature.arguments`.
        constants: Those of its results; set when it is traced.
        shardings: The sharding of each leaf.
        avals: The shape and element type of each leaf.
        places: The leaves that are not on the mesh when they are passed: where they are placed, whether they are a
            batch, and the shape in which they are passed.
        peers: The other processes that run it; `None`: this one runs it alone.
    """

    name: str
    signature: Signature
    compiled: jax.stages.Wrapped
    constants: Constants
    shardings: list[NamedSharding]
    avals: list[jax.core.AbstractValue]
    places: dict[int, tuple[NamedSharding, bool, tuple[int, ...]]]
    peers: Peers | None

    def placed(self, leaves: Sequence[Any]) -> list[jax.Array] | None:
        """The leaves, those off the mesh placed; `None`: the program is not for them."""
        leaves = list(leaves)
        for number, (sharding, is_batch, shape) in self.places.items():
            leaf = leaves[number]
            if not isinstance(getattr(leaf, "sharding", None), NamedSharding):
                if np.shape(leaf) != shape:
                    return None
                leaves[number] = _placed(leaf, sharding, is_batch)
        try:
            same = [x.sharding for x in leaves] == self.shardings and [x.aval for x in leaves] == self.avals
        except AttributeError:  # a leaf that is no array of JAX, where there was one before
            return None
        return leaves if same else None

    def __call__(self, leaves: list[jax.Array]) -> tuple[Any, dict[int, jax.Array]]:
        signature = self.signature
        if any(x.is_deleted() for x in leaves) or len({*map(id, leaves)}) < len(leaves):
            check_given(self.name, signature.names, leaves, signature.donated)
        if self.peers is not None:
            self.peers.begin()
        args, kwargs = signature.arguments(leaves)
        out = self.compiled(*args, **kwargs)
        out, changed = out if signature.where else (out, {})
        return self.constants.filled(jax.tree.leaves(out)) if self.constants.values else out, changed


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
        self._parameters = parameters_of(function)
        self._numbers = _numbers(donate_argnums) + _numbers(() if batch_argnums is None else batch_argnums)
        self._donate = self._keys(donate_argnums)
        self._static = self._keys(static_argnums, static_argnames)
        self._batch_dim = batch_dim
        self._batches = None if batch_argnums is None else self._keys(batch_argnums)
        self._signatures: list[Signature] = []
        self._programs: dict[Hashable, _Program] = {}
        self._last: _Program | None = None
        self._peers: dict[Mesh, Peers] = {}
        self._objects: StepObjects | None = None
        self._has_stepped = False

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the step; the first time for arguments of this kind, compile it."""
        program, leaves, objects = self._prepared(args, kwargs, ARRAYS)
        out, changed = program(leaves)
        if objects is not None:
            objects.write(changed)
        return out

    def lower(self, *args: object, **kwargs: object) -> jax.stages.Lowered:
        """Return the step lowered for arguments, as `jax.jit(..).lower` does; nothing is run.

        Objects of nnx are lists of their arrays in what it returns, and leaves that are no arrays are `None`.

        Args:
            args: The arguments of the step; shapes may stand for arrays: `jax.ShapeDtypeStruct`.
            kwargs: Those by name.
        """
        program, leaves, _ = self._prepared(args, kwargs, (*ARRAYS, jax.ShapeDtypeStruct))
        given, named = program.signature.arguments(leaves)
        return program.compiled.lower(*given, **named)

    def _prepared(
        self, args: tuple[object, ...], kwargs: dict[str, object], kinds: tuple[type, ...]
    ) -> tuple[_Program, list[Any], StepObjects | None]:
        """The program for these arguments, their leaves on its mesh, and the objects of nnx among them."""
        given = (*enumerate(args), *kwargs.items())
        static = tuple((k, type(arg), arg) for k, arg in given if k in self._static) if self._static else ()
        where: tuple[Key, ...] = ()
        nodes: list[object] = []
        if "flax.nnx" in sys.modules:
            found = [(key, arg) for key, arg in given if is_object(arg)]
            where, nodes = tuple(key for key, _ in found), [arg for _, arg in found]
        if where or static:
            args, kwargs = without((args, kwargs), {*where, *(key for key, _, _ in static)})
        leaves, tree = jax.tree.flatten((args, kwargs))
        signature = self._last.signature if self._last is not None else None
        objects, inner = None, []
        if nodes:
            objects = self._objects
            inner = objects.read() if objects is not None and objects.are(nodes) else None
            if objects is None or inner is None:
                self._objects = objects = StepObjects(nodes)
                inner = objects.read() or []
            signature = objects.signature
        program, placed = self._last, None
        if program is not None and program.signature is signature:
            is_same = program.signature.takes(tree, leaves, where, static)
            placed = program.placed(program.signature.constants.others(leaves) + inner) if is_same else None
        if program is None or placed is None:
            signature = self._signature(args, kwargs, leaves, where, static, objects)
            placed = signature.constants.others(leaves) + inner
            self._last = program = self._program(signature, placed, kinds)
            if objects is not None:
                objects.signature = signature
                # Those that were off the mesh are on it from now on.
                start = signature.num_plain
                objects.write({n - start: placed[n] for n in program.places if n >= start})
        return program, placed, objects

    def _signature(
        self,
        args: Sequence[object],
        kwargs: object,
        leaves: Sequence[object],
        where: tuple[Key, ...],
        static: Static,
        objects: StepObjects | None,
    ) -> Signature:
        constants = constants_in((args, kwargs))
        structure = objects.structure if objects is not None else None
        for known in self._signatures:
            same = known.structure == structure and known.constants.values.keys() == constants.values.keys()
            if same and known.takes(constants.tree, leaves, where, static):
                return known
        self._check_arguments(args, kwargs, constants, static)
        arrays = constants.emptied(leaves)
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(arrays)[0]]
        owners = [] if objects is None else objects.owners
        of = [path[1].idx if path[0].idx == 0 else path[1].key for path in paths]
        batches = None
        if self._batches is not None:
            batches = [key in self._batches for key in of] + [False] * len(owners)
        signature = Signature(
            constants,
            where,
            static,
            structure,
            arrays=jax.tree.structure(arrays),
            paths=paths,
            names=[path_text(path) for path in paths] + ([] if objects is None else objects.names),
            owners=owners,
            donated=[key in self._donate for key in (*of, *(where[owner] for owner in owners))],
            batches=batches,
        )
        self._signatures.append(signature)
        return signature

    def _check_arguments(self, args: Any, kwargs: object, constants: Constants, static: Static) -> None:
        last = max(self._numbers, default=-1)
        if last >= max(len(args), len(self._parameters)):
            raise ScopeError(
                f"{self._name}: there is no argument {last}",
                why=f"it is called with {len(args)} positional arguments, and donate_argnums and batch_argnums count "
                "these from 0",
                fix="pass it by position, or leave its number out",
            )
        for key, _, value in static:
            try:
                hash(value)
            except TypeError as error:
                raise ScopeError(
                    f"{self._name}: the static argument {key} cannot be hashed",
                    facts={"value": brief(value)},
                    why=f"a step is compiled once for each value of it: {error}",
                    fix="pass a tuple in place of a list, or a frozen dataclass in place of a dict",
                ) from error
        found = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_object)[0]
        for path, leaf in found:
            if is_object(leaf):
                raise ScopeError(
                    f"{self._name}: {path_text(path)} is an object of nnx inside of another argument",
                    facts={"type": type(leaf).__name__},
                    why="only objects that are arguments themselves are changed in place",
                    fix="pass it as an argument of its own",
                )
        for number in constants.values:
            if len(path := found[number][0]) == 2:
                self._refuse(path_text(path), constants.values[number])

    def _refuse(self, name: str, leaf: object) -> NoReturn:
        raise LayoutError(
            f"{self._name}: {name} is not an array",
            why=f"it is {kind_of(leaf)}, and a compiled step takes arrays and numbers",
            fix="make it a constant of the step: static_argnums=.., or functools.partial; or pass its arrays only",
        )

    def _keys(self, numbers: int | Sequence[int], names: str | Sequence[str] = ()) -> frozenset[Key]:
        """Arguments by position and by name, each by both where the function says so."""
        known = self._parameters
        at = [n + len(known) if n < 0 else n for n in _numbers(numbers)]
        named = {names} if isinstance(names, str) else {*names}
        named |= {known[n] for n in at if n < len(known)}
        return frozenset((*at, *named, *(n for n, name in enumerate(known) if name in named)))

    def _program(self, signature: Signature, leaves: list[Any], kinds: tuple[type, ...]) -> _Program:
        """The program for these leaves; those off the mesh are placed, in the list."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise ScopeError(
                f"{self._name}: it is called inside of another traced function",
                why="a compiled step places its arguments on devices, and traced arguments are on none",
                fix=f"call the function itself there: {self._name}.__wrapped__(...)",
            )
        check_given(self._name, signature.names, leaves, [])
        mesh, native = self._mesh(signature, leaves)
        places = {}
        for number, leaf in enumerate(leaves):
            sharding = getattr(leaf, "sharding", None)
            if not isinstance(leaf, kinds + NUMBERS):
                self._refuse(signature.names[number], leaf)
            if sharding is None or 1 == len(sharding.device_set) < mesh.size:
                is_batch = self._is_batch(signature, number, leaf)
                if is_batch:
                    self._check_rows(mesh, native, np.shape(leaf), signature.names[number])
                target = _sharding(native, len(np.shape(leaf)), self._batch_dim if is_batch else None)
                places[number] = target, is_batch, np.shape(leaf)
                leaves[number] = _placed(leaf, target, is_batch)
        shardings, avals = [x.sharding for x in leaves], [_aval(x) for x in leaves]
        batches = [n for n, (_, is_batch, _) in places.items() if is_batch]
        batches += [n for n, is_batch in enumerate(signature.batches or ()) if is_batch]
        rows = frozenset(leaves[n].shape[0] for n in batches if leaves[n].shape and self._batch_dim)
        key = (signature, tuple(shardings), tuple(avals), rows)
        if key not in self._programs:
            arguments = signature.arguments(leaves)
            compiled, constants = self._compiled(signature, leaves, arguments, native, rows)
            if any(_may_be_batch(np.shape(leaves[n]), places[n][1]) for n in places):
                self._warn_of_idle_dims(mesh, shardings, compiled, arguments)
            peers = self._compared(mesh, compiled, arguments) if native.is_multi_process else None
            self._programs[key] = _Program(
                self._name, signature, compiled, constants, shardings, avals, places, peers
            )
        program = self._programs[key]
        program.places.update(places)
        return program

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

    def _mesh(self, signature: Signature, leaves: Sequence[Any]) -> tuple[Mesh, jax.sharding.Mesh]:
        first: tuple[str, jax.sharding.Mesh, Mesh] | None = None
        for name, leaf in zip(signature.names, leaves, strict=True):
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

    def _is_batch(self, signature: Signature, number: int, leaf: Any) -> bool:
        """Whether a leaf that is not on the mesh is a batch."""
        if number >= signature.num_plain:
            return False
        if signature.batches is not None:
            return signature.batches[number]
        if isinstance(leaf, (np.ndarray, jax.ShapeDtypeStruct)):
            return True
        if self._batch_dim is not None and np.size(leaf) > _SMALL:
            warning = LayoutMapWarning(
                f"{self._name}: {signature.names[number]} is on one device, and is replicated on the mesh",
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

    def _compiled(
        self, signature: Signature, leaves: list[Any], arguments: Any, native: Any, rows: Set[int]
    ) -> tuple[jax.stages.Wrapped, Constants]:
        """The step, compiled with the shardings of its results; and those of its results that are no arrays."""
        num_plain, donated, where = signature.num_plain, signature.donated, signature.where
        constants = Constants(None, {})

        def run(*args: Any, **kwargs: Any) -> object:
            of_objects = [args[key] if isinstance(key, int) else kwargs[key] for key in where]
            before = [leaf for each in of_objects for leaf in each]
            nodes = open_objects(signature.structure, before) if where else ()
            opened, named = signature.opened(args, kwargs, nodes)
            out = self._function(*opened, **named)
            self._check_no_object(out)
            found = constants_in(out)
            constants.tree, constants.values = found.tree, found.values
            out = found.emptied(jax.tree.leaves(out))
            if not where:
                return out
            names = signature.names[num_plain:]
            return out, closed_objects(signature.structure, nodes, before, donated[num_plain:], names)

        run.__name__ = run.__qualname__ = self._name
        args, kwargs = arguments
        options = _options("donate", self._donate & {*range(len(args)), *kwargs})
        options |= _options("static", (key for key, _, _ in signature.static))
        # JAX traces a function once for both.
        results = jax.jit(run, **options).eval_shape(*args, **kwargs)
        out, changed = results if where else (results, {})
        taken = Arguments(
            signature.arrays,
            signature.paths,
            [x.shape for x in leaves[:num_plain]],
            [x.sharding for x in leaves[:num_plain]],
            donated[:num_plain],
        )

        def otherwise(shape: tuple[int, ...]) -> NamedSharding:
            return _sharding(native, len(shape), self._batch_dim if shape and shape[0] in rows else None)

        shardings = taken.shardings_of(out, otherwise)
        if where:
            shardings = shardings, {n: leaves[num_plain + n].sharding for n in changed}
        return jax.jit(run, out_shardings=shardings, **options), constants

    def _compared(self, mesh: Mesh, compiled: jax.stages.Wrapped, arguments: Any) -> Peers:
        """Return the other processes of a mesh, after all have compared what they are about to run."""
        args, kwargs = arguments
        # On CPUs, the step before and what is gathered could block each other.
        jax.block_until_ready(arguments)
        gather = functools.partial(get_engine("jax").all_gather, mesh=mesh)
        releases = list(versions("jax", "jaxlib"))

        def terms() -> list[Trait]:
            program = Program()
            program.function(self._function)
            return [*releases, *program.settings, *program.lines]

        lowered = lowered_lines(self._name, compiled.lower(*args, **kwargs))
        check_program(self._name, [*releases, *lowered], gather, terms)
        if mesh not in self._peers:
            self._peers[mesh] = Peers(lambda text: gather_texts(text, gather))
        return self._peers[mesh]

    def _check_no_object(self, out: object) -> None:
        for path, leaf in jax.tree_util.tree_flatten_with_path(out, is_leaf=is_object)[0]:
            if is_object(leaf):
                raise ScopeError(
                    f"{self._name}: it returns a {type(leaf).__name__}",
                    facts={"where": jax.tree_util.keystr(path)},
                    why="objects of nnx are changed in place, and what is returned would be a copy",
                    fix="return the loss and metrics only",
                )


def _may_be_batch(shape: tuple[int, ...], is_batch: bool) -> bool:
    """Whether an argument off the mesh has rows: what was taken as a batch, or is too large for a number or a key."""
    return bool(shape) and (is_batch or math.prod(shape) > _SMALL)


def _numbers(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _options(what: str, keys: Iterable[Key]) -> dict[str, Any]:
    """The options of `jax.jit` that name arguments, by position and by name."""
    every = [*keys]
    return {
        f"{what}_argnums": [key for key in every if isinstance(key, int)],
        f"{what}_argnames": [key for key in every if isinstance(key, str)],
    }


def _aval(leaf: object) -> jax.core.AbstractValue:
    return leaf.aval if isinstance(leaf, jax.Array) else jax.typeof(leaf)


def _sharding(native: jax.sharding.Mesh, rank: int, dim: str | None = None) -> NamedSharding:
    """The sharding of an array that is replicated, or whose first axis is sharded over a dim."""
    return NamedSharding(native, PartitionSpec(*[dim, *[None] * (rank - 1)] if rank else ()))


def _placed(leaf: object, sharding: NamedSharding, is_batch: bool) -> jax.Array | jax.ShapeDtypeStruct:
    """A leaf on the mesh. What is no array becomes one, of a weak type as where JAX traces it."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    array = leaf if isinstance(leaf, (jax.Array, np.ndarray)) else jnp.asarray(leaf)
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding, may_alias=False)
    if is_batch and isinstance(array, np.ndarray):
        return jax.make_array_from_process_local_data(sharding, array)
    return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)
