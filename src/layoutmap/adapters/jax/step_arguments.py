"""Split the arguments of a compiled step into arrays and the static rest."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import jax
import jax.core

from layoutmap.adapters.jax.objects import StepObjects, is_object
from layoutmap.adapters.jax.outputs import Tree
from layoutmap.adapters.jax.pytrees import find_equinox_leaves
from layoutmap.adapters.protocol import RuleLookup
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import LayoutError, ScopeError, shorten_repr
from layoutmap.core.specs import BatchDim
from layoutmap.engines.jax.padded import PaddedArray, Shape, unwrap

NUMBERS = (int, float, complex)

Key = int | str
"""An argument: its position, or its name if it is passed by name."""

Constants = tuple[tuple[int, type, object], ...]
"""Values that are compiled into a step: the number, type, and value of each."""


class StepOptions:
    """The function of a step, and the options of `jit_step`.

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
        self._last_number = max(_as_tuple(donate_argnums) + _as_tuple(batch_argnums), default=-1)
        self.donate = self._find_keys(donate_argnums)
        self.static = self._find_keys(static_argnums, static_argnames)
        self.batches = None if batch_argnums is None else self._find_keys(batch_argnums)
        self.batch_dim = tuple(batch_dim) if isinstance(batch_dim, list) else batch_dim
        self.layout_map, self.out_names = layout_map, out_names

    def _find_keys(self, numbers: int | Sequence[int], names: str | Sequence[str] = ()) -> frozenset[Key]:
        """Return arguments by position and by name, each by both where the function's signature has both."""
        known = self.parameters
        at = [n + len(known) if n < 0 else n for n in _as_tuple(numbers)]
        named = {names} if isinstance(names, str) else {*names}
        named |= {known[n] for n in at if n < len(known)}
        return frozenset((*at, *named, *(n for n, name in enumerate(known) if name in named)))

    def format_argument(self, name: str) -> str:
        """Name a leaf by its parameter and its path inside it: `params['kernel']`."""
        for number, parameter in enumerate(self.parameters):
            for prefix in (f"args[{number}]", f"kwargs[{parameter!r}]"):
                if name.startswith(prefix):
                    return parameter + name.removeprefix(prefix)
        return name

    def check_arguments(self, call: Call) -> None:
        """Raise for arguments that a compiled step cannot take."""
        variant = call.variant
        if self._last_number >= max(variant.num_positional, len(self.parameters)):
            raise ScopeError(
                f"{self.name}: there is no argument {self._last_number}",
                why=f"it is called with {variant.num_positional} positional arguments, and donate_argnums and "
                "batch_argnums count these from 0",
                fix="pass it by position, or leave its number out",
            )
        for number, _, value in variant.static:
            try:
                hash(value)
            except TypeError as error:
                raise ScopeError(
                    f"{self.name}: the static argument {variant.keys[number]} cannot be hashed",
                    facts={"value": shorten_repr(value)},
                    why=f"a step is compiled once for each value of it: {error}",
                    fix="pass a tuple in place of a list, or a frozen dataclass in place of a dict",
                ) from error
        values, constants = variant.fill_tree(call.leaves), [id(value) for *_, value in variant.constants]
        for path, leaf in jax.tree_util.tree_flatten_with_path(values, is_leaf=is_object)[0]:
            if is_object(leaf):
                raise ScopeError(
                    f"{self.name}: {variant.format_path(path)} is an object of nnx inside of another argument",
                    facts={"type": type(leaf).__name__},
                    why="only objects passed as arguments are changed in place",
                    fix="pass it as a separate argument",
                )
            if isinstance(leaf, jax.core.Tracer):
                raise ScopeError(
                    f"{self.name}: it is called inside another traced function",
                    why="a compiled step places its arguments on devices, but traced arguments have no devices",
                    fix=f"call the function itself there: {self.name}.__wrapped__(...)",
                )
            if len(path) == 1 and id(leaf) in constants:
                self.refuse_leaf(variant.format_path(path), leaf)

    def check_leaves(self, call: Call, leaves: Sequence[object], donated: Sequence[bool] = ()) -> None:
        """Raise for deleted arrays and for donated arrays passed twice, because XLA would abort the process."""
        seen: dict[int, int] = {}
        for number, leaf in enumerate(leaves):
            first = seen.setdefault(id(leaf), number)
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise LayoutError(
                    f"{self.name}: {call.list_names()[0][number]} was donated, and has no values any more",
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
                names, _ = call.list_names()
                raise LayoutError(
                    f"{self.name}: {names[first]} and {names[number]} are the same array, which is donated",
                    why="the memory of a donated array is reused for results, so it can be passed only once",
                    fix="pass a copy of one of them: jax.tree.map(jnp.copy, ..); or donate fewer "
                    "arguments: donate_argnums",
                )

    def refuse_leaf(self, name: str, leaf: object) -> NoReturn:
        """Raise for a leaf that is not an array."""
        raise LayoutError(
            f"{self.name}: {name} is not an array",
            why=f"it is {describe_type(leaf)}, and a compiled step takes arrays and numbers",
            fix="make it static with static_argnums=.. or functools.partial, or pass only its arrays",
        )


class Variant(NamedTuple):
    """The static part of a call, over which the traced function closes. It must not keep the leaves alive."""

    keys: tuple[Key, ...]  # positional arguments, then names in sorted order
    static: Constants  # number, type, and value of each static argument
    nodes: tuple[int, ...]  # numbers of arguments that are nnx objects
    structure: int  # number of the structure of these objects
    tree: Tree  # tree of all arguments; static ones are None, and nnx objects are lists of arrays
    constants: Constants  # leaves that are not arrays
    padded: tuple[tuple[int, Shape], ...]  # number and logical shape of each padded array

    @property
    def num_positional(self) -> int:
        """The number of positional arguments."""
        return sum(isinstance(key, int) for key in self.keys)

    def fill_tree(self, leaves: Iterable[object], *, with_constants: bool = True) -> list[Any]:
        """Return the arguments with these leaves, and with the constants or None for the others."""
        return fill(self.tree, {n: x if with_constants else None for n, _, x in self.constants}, leaves)

    def format_path(self, path: tuple[Any, ...]) -> str:
        """Format the path of a leaf as Python: `args[0]['kernel']`."""
        key = self.keys[path[0].idx]
        return f"{'args' if isinstance(key, int) else 'kwargs'}[{key!r}]{jax.tree_util.keystr(path[1:])}"


Head = tuple[tuple[Key, ...], Constants, tuple[int, ...], int]
"""The first fields of a `Variant`."""


class ReadArguments(NamedTuple):
    """Arguments of one call as they are read before each step: static ones are None, nnx objects lists of arrays."""

    head: Head
    values: Sequence[Any]
    objects: StepObjects | None

    def flatten(self) -> GivenArguments:
        """Return the same with the leaves of the arguments."""
        leaves, tree = jax.tree_util.tree_flatten([*self.values])
        _, static, nodes, _ = self.head
        types = None if static or nodes else [*map(type, self.values)]
        return GivenArguments(self.head, tree, leaves, self.objects, types)


class GivenArguments(NamedTuple):
    """Arguments of one call and their leaves."""

    head: Head
    tree: Tree
    leaves: list[Any]
    objects: StepObjects | None
    types: list[type] | None  # of the arguments, if they are neither static nor nnx objects


@dataclass(slots=True, eq=False)
class Call:
    """The arguments of one call: its arrays, and its static part."""

    variant: Variant
    leaves: list[Any]
    objects: StepObjects | None = None

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


class ArgumentReader:
    """Read the arguments of a step's calls.

    Args:
        static: Arguments that are constants.
    """

    def __init__(self, static: frozenset[Key]):
        self._static = static
        self._structures: list[object] = []
        self._objects: StepObjects | None = None

    def read(self, args: Sequence[object], kwargs: Mapping[str, object]) -> GivenArguments:
        """Return the leaves of a call's arguments, and the structure of all arguments."""
        return self.read_values(args, kwargs).flatten()

    def read_values(self, args: Sequence[object], kwargs: Mapping[str, object]) -> ReadArguments:
        """Return a call's arguments."""
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
        return ReadArguments((keys, static, nodes, objects.token if objects else -1), values, objects)

    def _read_objects(self, nodes: Sequence[object]) -> tuple[StepObjects, list[list[object]]]:
        """Inspect nnx objects, and return them with their arrays."""
        objects = self._objects
        arrays = objects.read() if objects is not None and objects.is_unchanged(nodes) else None
        if objects is None or arrays is None:
            self._objects = objects = StepObjects(nodes)
            arrays = objects.read() or []
            if objects.structure not in self._structures:
                self._structures.append(objects.structure)
            objects.token = self._structures.index(objects.structure)
        return objects, arrays


def find_variant(given: GivenArguments) -> Call:
    """Separate a call's arrays from its static values."""
    others = {n: leaf for n, leaf in enumerate(given.leaves) if not hasattr(unwrap(leaf), "aval")}
    found = find_constants(given.tree, others)
    leaves = [leaf for n, leaf in enumerate(given.leaves) if n not in found]
    constants = tuple((n, type(value), value) for n, value in found.items())
    padded = tuple((n, leaf.shape) for n, leaf in enumerate(leaves) if type(leaf) is PaddedArray)
    return Call(Variant(*given.head, given.tree, constants, padded), list(map(unwrap, leaves)), given.objects)


# A compiled program takes no functions or text, so these are part of its key (decisions/0186).
def find_constants(tree: Tree, leaves: Mapping[int, object]) -> dict[int, object]:
    """Return the leaves of a tree that are not arrays: functions, text, and numbers in Equinox modules.

    A leaf with arrays of its own, as JAX or numpy would read them, is none, and neither is one that has no hash.
    """
    plain = {n: x for n, x in leaves.items() if not (hasattr(x, "shape") or hasattr(x, "__array__"))}
    in_modules = find_equinox_leaves(tree) if plain and "equinox" in sys.modules else ()
    return {
        n: leaf
        for n, leaf in plain.items()
        if (n in in_modules if isinstance(leaf, NUMBERS) else isinstance(leaf, Hashable))
    }


def fill(tree: Tree, constants: Mapping[int, object], others: Iterable[object]) -> Tree:
    """Rebuild a tree from constants and other leaves."""
    if not constants:
        return tree.unflatten(others)
    rest = iter(others)
    return tree.unflatten([constants[n] if n in constants else next(rest) for n in range(tree.num_leaves)])


def _as_tuple(argnums: int | Sequence[int] | None) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums or ())
