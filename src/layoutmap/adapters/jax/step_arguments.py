"""Split the arguments of a compiled step into arrays and the static rest."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import jax
import jax.core

from layoutmap.adapters.jax.nnx_types import is_nnx_object
from layoutmap.adapters.jax.objects import NnxArguments
from layoutmap.adapters.jax.outputs import Tree
from layoutmap.adapters.jax.pytrees import find_equinox_leaf_positions
from layoutmap.adapters.protocol import RuleLookup
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import LayoutError, ScopeError, shorten_repr
from layoutmap.core.specs import BatchDim
from layoutmap.engines.jax.padded import PaddedArray, Shape, unwrap_padded_array

NUMBERS = (int, float, complex)

ArgumentKey = int | str
"""An argument: its position, or its name if it is passed by name."""

Constants = tuple[tuple[int, type, object], ...]
"""Values that are compiled into a step: the position, type, and value of each."""


class StepOptions:
    """Store the function of a step and the options of `jit_step`.

    Attributes:
        name: Name of the function.
        parameters: Names of the function's arguments that can be passed by position, if its signature is known.
        donate: Arguments whose memory the results may take.
        static: Arguments that are constants.
        batches: Arguments that are batches; `None`: those that are numpy arrays.
        batch_dim: Mesh dim, or dims, over which batches are sharded.
        layout_map: Rules for arrays that appear after the model was built.
        out_names: Names of the results, see `jit_step`.
    """

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
        self.function = function
        self.name = getattr(function, "__name__", "step")
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            parameters = ()
        positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.parameters = [each.name for each in parameters if each.kind in positional]
        self._last_position = max(
            _convert_argnums_to_tuple(donate_argnums) + _convert_argnums_to_tuple(batch_argnums), default=-1
        )
        self.donate = self._find_argument_positions_and_names(donate_argnums)
        self.static = self._find_argument_positions_and_names(static_argnums, static_argnames)
        self.batches = (
            None if batch_argnums is None else self._find_argument_positions_and_names(batch_argnums)
        )
        self.batch_dim = tuple(batch_dim) if isinstance(batch_dim, list) else batch_dim
        self.layout_map, self.out_names = layout_map, out_names

    def _find_argument_positions_and_names(
        self, positions: int | Sequence[int], names: str | Sequence[str] = ()
    ) -> frozenset[ArgumentKey]:
        """Return both the position and the name of each argument in `positions` or `names`, by the signature."""
        known = self.parameters
        at = [n + len(known) if n < 0 else n for n in _convert_argnums_to_tuple(positions)]
        named = {names} if isinstance(names, str) else {*names}
        named |= {known[n] for n in at if n < len(known)}
        return frozenset((*at, *named, *(n for n, name in enumerate(known) if name in named)))

    def format_argument_name(self, name: str) -> str:
        """Replace `args[0]` or `kwargs['params']` at the start of a name by the parameter: `params['kernel']`."""
        for number, parameter in enumerate(self.parameters):
            for prefix in (f"args[{number}]", f"kwargs[{parameter!r}]"):
                if name.startswith(prefix):
                    return parameter + name.removeprefix(prefix)
        return name

    def check_arguments(self, call: StepCall) -> None:
        """Raise for unhashable static values, traced arrays, nnx objects inside other arguments, and non-arrays."""
        variant = call.variant
        if self._last_position >= max(variant.num_positional_arguments, len(self.parameters)):
            raise ScopeError(
                f"{self.name}: there is no positional argument {self._last_position}",
                why=f"it is called with {variant.num_positional_arguments} positional arguments, and donate_argnums "
                "and batch_argnums count these from 0",
                fix="pass the argument by position, or remove its number from donate_argnums or batch_argnums",
            )
        for number, _, value in variant.static:
            try:
                hash(value)
            except TypeError as error:
                raise ScopeError(
                    f"{self.name}: the static argument {variant.keys[number]} cannot be hashed",
                    facts={"value": shorten_repr(value)},
                    why=f"a step is compiled once for each value of a static argument, but {error}",
                    fix="pass a tuple in place of a list, or a frozen dataclass in place of a dict",
                ) from error
        values = variant.rebuild_arguments(call.leaves)
        constants = [id(value) for *_, value in variant.constants]
        for path, leaf in jax.tree_util.tree_flatten_with_path(values, is_leaf=is_nnx_object)[0]:
            if is_nnx_object(leaf):
                raise ScopeError(
                    f"{self.name}: {variant.format_leaf_path(path)} is an nnx object inside another argument",
                    facts={"type": type(leaf).__name__},
                    why="a step updates only those nnx objects that are arguments themselves",
                    fix="pass the object as a separate argument",
                )
            if isinstance(leaf, jax.core.Tracer):
                raise ScopeError(
                    f"{self.name}: the step is called inside another traced function",
                    why="a compiled step places its arguments on devices, but traced arrays are on no device",
                    fix=f"call the function itself there: {self.name}.__wrapped__(...)",
                )
            if len(path) == 1 and id(leaf) in constants:
                self.raise_non_array_leaf_error(variant.format_leaf_path(path), leaf)

    def check_donations(self, call: StepCall, leaves: Sequence[object], donated: Sequence[bool] = ()) -> None:
        """Raise for deleted arrays and for donated arrays passed twice, because XLA would abort the process."""
        seen: dict[int, int] = {}
        for number, leaf in enumerate(leaves):
            first = seen.setdefault(id(leaf), number)
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise LayoutError(
                    f"{self.name}: {call.list_leaf_names_and_owners()[0][number]} was donated, and has no values "
                    "any more",
                    why="an earlier step, or another compiled function, reused the memory of this array "
                    "for its results",
                    fix="pass the result of the step: state = step(state, batch); or donate fewer "
                    "arguments: donate_argnums",
                )
            if (
                first != number
                and isinstance(leaf, jax.Array)
                and donated
                and (donated[first] or donated[number])
            ):
                names, _ = call.list_leaf_names_and_owners()
                raise LayoutError(
                    f"{self.name}: {names[first]} and {names[number]} are the same array, which is donated",
                    why="the memory of a donated array is reused for results, so it can be passed only once",
                    fix="pass a copy of one of them: jax.tree.map(jnp.copy, ..); or donate fewer "
                    "arguments: donate_argnums",
                )

    def raise_non_array_leaf_error(self, name: str, leaf: object) -> NoReturn:
        """Raise for a leaf that is not an array."""
        raise LayoutError(
            f"{self.name}: {name} is not an array",
            why=f"it is {describe_type(leaf)}, and a compiled step takes arrays and numbers",
            fix="make it static with static_argnums=.. or functools.partial, or pass only its arrays",
        )


class StaticCallPart(NamedTuple):
    """Store the part of a call that is compiled into a step: its arguments without the arrays."""

    keys: tuple[ArgumentKey, ...]  # positional arguments, then names in sorted order
    static: Constants  # position, type, and value of each static argument
    nodes: tuple[int, ...]  # positions of arguments that are nnx objects
    structure: int  # index of the structure of these objects among the structures of all earlier calls
    tree: Tree  # tree of all arguments; static ones are None, and nnx objects are lists of arrays
    constants: Constants  # leaves that are not arrays
    padded: tuple[tuple[int, Shape], ...]  # position and logical shape of each padded array

    @property
    def num_positional_arguments(self) -> int:
        """The number of positional arguments."""
        return sum(isinstance(key, int) for key in self.keys)

    def rebuild_arguments(self, leaves: Iterable[object], *, with_constants: bool = True) -> list[Any]:
        """Return the arguments with these arrays and the constants. Without `with_constants`, constants are None."""
        constants = {n: x if with_constants else None for n, _, x in self.constants}
        return rebuild_tree(self.tree, constants, leaves)

    def format_leaf_path(self, path: tuple[Any, ...]) -> str:
        """Format the path of a leaf as Python: `args[0]['kernel']`."""
        key = self.keys[path[0].idx]
        return f"{'args' if isinstance(key, int) else 'kwargs'}[{key!r}]{jax.tree_util.keystr(path[1:])}"


Head = tuple[tuple[ArgumentKey, ...], Constants, tuple[int, ...], int]
"""The first four fields of a `StaticCallPart`, which are known before the arguments are flattened."""


class DynamicArguments(NamedTuple):
    """Store the arguments of a call, with None in place of static ones, and lists of arrays in place of nnx objects."""

    head: Head
    values: Sequence[Any]
    objects: NnxArguments | None

    def flatten_arguments(self) -> FlatArguments:
        """Return the same arguments as a tree structure and a list of leaves."""
        leaves, tree = jax.tree_util.tree_flatten([*self.values])
        _, static, nodes, _ = self.head
        types = None if static or nodes else [*map(type, self.values)]
        return FlatArguments(self.head, tree, leaves, self.objects, types)


class FlatArguments(NamedTuple):
    """Store the arguments of one call as a tree structure and a list of leaves."""

    head: Head
    tree: Tree
    leaves: list[Any]
    objects: NnxArguments | None
    types: list[type] | None  # types of the arguments, or None if some are static or nnx objects


@dataclass(slots=True, eq=False)
class StepCall:
    """Store the arguments of one call in two parts: its arrays, and the static part for which the step is compiled."""

    variant: StaticCallPart
    leaves: list[Any]
    objects: NnxArguments | None = None

    def list_leaf_names_and_owners(self) -> tuple[list[str], list[int]]:
        """Return the name of each leaf, and the index of the argument that contains it."""
        names, owners = list[str](), list[int]()
        values = self.variant.rebuild_arguments(self.leaves, with_constants=False)
        for path, _ in jax.tree_util.tree_flatten_with_path(values)[0]:
            owner = path[0].idx
            owners.append(owner)
            if self.objects is not None and owner in self.variant.nodes:
                names.append(self.objects.names[self.variant.nodes.index(owner)][path[1].idx])
            else:
                names.append(self.variant.format_leaf_path(path))
        return names, owners


class ArgumentReader:
    """Read the arguments of a step's calls, and inspect nnx objects again only if they have changed.

    Args:
        static: Arguments that are constants.
    """

    def __init__(self, static: frozenset[ArgumentKey]):
        self._static = static
        self._structures: list[object] = []
        self._objects: NnxArguments | None = None

    def read_flat_arguments(self, args: Sequence[object], kwargs: Mapping[str, object]) -> FlatArguments:
        """Return a call's arguments as a tree structure and a list of leaves."""
        return self.read_arguments(args, kwargs).flatten_arguments()

    def read_arguments(self, args: Sequence[object], kwargs: Mapping[str, object]) -> DynamicArguments:
        """Return a call's arguments, with None in place of static ones, and lists of arrays in place of nnx objects."""
        keys: tuple[ArgumentKey, ...] = (*range(len(args)), *sorted(kwargs))
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
            nodes = tuple(n for n, value in enumerate(values) if is_nnx_object(value))
        if nodes:
            objects, arrays = self._read_nnx_objects([values[n] for n in nodes])
            for n, each in zip(nodes, arrays, strict=True):
                values[n] = each
        head = keys, static, nodes, objects.structure_index if objects else -1
        return DynamicArguments(head, values, objects)

    def _read_nnx_objects(self, nodes: Sequence[object]) -> tuple[NnxArguments, list[list[object]]]:
        """Return the structure of nnx objects, and their arrays. The structure is read again only if it has changed."""
        objects = self._objects
        arrays = objects.read_arrays() if objects is not None and objects.has_same_objects(nodes) else None
        if objects is None or arrays is None:
            self._objects = objects = NnxArguments(nodes)
            arrays = objects.read_arrays() or []
            if objects.structure not in self._structures:
                self._structures.append(objects.structure)
            objects.structure_index = self._structures.index(objects.structure)
        return objects, arrays


def make_step_call(arguments: FlatArguments) -> StepCall:
    """Return a call's arguments, split into arrays and the part for which the step is compiled."""
    others = {
        n: leaf for n, leaf in enumerate(arguments.leaves) if not hasattr(unwrap_padded_array(leaf), "aval")
    }
    found = find_constant_leaves(arguments.tree, others)
    leaves = [leaf for n, leaf in enumerate(arguments.leaves) if n not in found]
    constants = tuple((n, type(value), value) for n, value in found.items())
    padded = tuple((n, leaf.shape) for n, leaf in enumerate(leaves) if type(leaf) is PaddedArray)
    variant = StaticCallPart(*arguments.head, arguments.tree, constants, padded)
    return StepCall(variant, list(map(unwrap_padded_array, leaves)), arguments.objects)


# A compiled program takes only arrays, so functions and text are part of its key instead (decisions/0186).
def find_constant_leaves(tree: Tree, leaves: Mapping[int, object]) -> dict[int, object]:
    """Return a dict from positions to leaves that are not arrays: functions, text, and numbers in Equinox modules.

    Leaves that JAX or numpy can convert to arrays, and leaves without a hash, are not returned.
    """
    candidates = {n: x for n, x in leaves.items() if not (hasattr(x, "shape") or hasattr(x, "__array__"))}
    in_modules = find_equinox_leaf_positions(tree) if candidates and "equinox" in sys.modules else ()
    return {
        n: leaf
        for n, leaf in candidates.items()
        if (n in in_modules if isinstance(leaf, NUMBERS) else isinstance(leaf, Hashable))
    }


def rebuild_tree(tree: Tree, constants: Mapping[int, object], others: Iterable[object]) -> Tree:
    """Rebuild a tree from its constant leaves, in a dict from positions, and its other leaves, in order."""
    if not constants:
        return tree.unflatten(others)
    rest = iter(others)
    return tree.unflatten([constants[n] if n in constants else next(rest) for n in range(tree.num_leaves)])


def _convert_argnums_to_tuple(argnums: int | Sequence[int] | None) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums or ())
