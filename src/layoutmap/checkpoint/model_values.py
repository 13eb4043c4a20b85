"""Read the values of a model's variables from a checkpoint, after comparing shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

import numpy as np

from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.name_tables import NameTable
from layoutmap.checkpoint.renamed_source import RenamedSource
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray
from layoutmap.core.errors import CheckpointError
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.rules.near_misses import NearMissSearch

_MAX_FACTS = 20
_MAX_LINES = 3
_BONUS_OF_EQUAL_SHAPE = 0.2
Missing = Literal["error", "keep"]
Extra = Literal["error", "ignore"]


class SavedModelValues:
    """Read the values that a checkpoint has for the variables of a model.

    Args:
        source: The checkpoint.
        names: The table with the names of the variables in the checkpoint; `None`: they have the names of the model.
        missing: See `load`.
        extra: See `load`.
        cast: See `load`.

    Attributes:
        read_paths: The paths of the variables whose values have been read.
    """

    def __init__(
        self,
        source: Source,
        *,
        names: NameTable | None = None,
        missing: Missing = "error",
        extra: Extra = "error",
        cast: bool = False,
    ):
        self._renamed = None if names is None else RenamedSource(source, names)
        self.source = source if self._renamed is None else self._renamed
        self.missing = missing
        self._extra = extra
        self._cast = cast
        self.read_paths: set[str] = set()
        self._closed = False
        self._by_alias = {a: v.path for v in source.variables.values() for a in v.aliases}

    def find_saved_variable(self, variable: VariableSpec) -> SavedVariable | None:
        """Return the saved variable with the path or an alias of a model's variable, or `None` if there is none."""
        if self._renamed is not None and variable.kind in (Kind.WEIGHT, Kind.STATE):
            self._renamed.add_variable_from_table((variable.path, *variable.aliases), variable.shape)
        for path in (variable.path, *variable.aliases):
            if path in self.source.variables:
                return self.source.variables[path]
            if path in self._by_alias:
                return self.source.variables[self._by_alias[path]]
        return None

    def list_tensor_names(self, saved: SavedVariable) -> list[str]:
        """Return the names of the tensors in the checkpoint that make up a saved variable."""
        return [saved.path] if self._renamed is None else self._renamed.list_tensor_names(saved.path)

    def check_variables_match(
        self, variables: Sequence[VariableSpec], kinds: Collection[Kind] = (Kind.WEIGHT,)
    ) -> None:
        """Compare all variables of a model with the checkpoint, and raise one error with all differences.

        Args:
            variables: The variables of the model.
            kinds: The kinds of variables that must be in both the model and the checkpoint.

        Raises:
            CheckpointError: The variables differ.
        """
        found = [(variable, self.find_saved_variable(variable)) for variable in variables]
        if self._renamed is not None:
            self._renamed.check_parts_are_used_once(saved.path for _, saved in found if saved)
        wrong = [
            text
            for variable, saved in found
            if saved and (text := self._describe_difference(variable, saved))
        ]
        known = {saved.path for _, saved in found if saved}
        unknown = [
            v
            for v, saved in found
            if saved is None
            and v.kind in kinds
            and not (self._renamed and self._renamed.is_not_stored(v.path))
        ]
        rest = [path for path, v in self.source.variables.items() if path not in known and v.kind in kinds]
        missing = unknown if self.missing == "error" else []
        extra = rest if self._extra == "error" else []
        if not (wrong or missing or extra):
            return
        facts: dict[str, object] = {}
        renamed = self._find_similar_saved_paths(missing[:_MAX_FACTS], rest)
        for variable in missing:
            name = renamed.get(variable.path)
            facts[variable.path] = "not in the checkpoint" + (f"; it has {name}" if name else "")
        for line in self._renamed.list_unmatched_lines(v.path for v in variables) if self._renamed else ():
            facts[f"names {line!r}"] = (
                "matches no path of the model; a line is path of the model: name in the checkpoint"
            )
        facts |= dict(wrong)
        facts |= dict.fromkeys(extra, "in the checkpoint, but not in the model")
        shown = dict(list(facts.items())[:_MAX_FACTS])
        if len(facts) > len(shown):
            shown["and"] = f"{len(facts) - len(shown)} more"
        fixes = ["build the model that was saved"]
        if renamed and not self._renamed:
            lines = [f"{path!r}: {name!r}" for path, name in renamed.items()]
            table = ", ".join(lines[:_MAX_LINES] + [".."] * (len(lines) > _MAX_LINES))
            fixes.append(
                f"if layers were renamed, pass a name table from the model's paths: names={{{table}}}"
            )
        fixes += ['pass missing="keep" to keep what the checkpoint does not have'] * bool(missing)
        fixes += ['pass extra="ignore" to leave out what the model does not have'] * bool(extra)
        fixes += ["pass cast=True to convert element types"] * any("dtype" in text for _, text in wrong)
        raise CheckpointError(
            f"{self.source.where}: the checkpoint does not match this model",
            facts=shown,
            why=f"{len(facts)} variables differ; nothing was loaded",
            fix=", or ".join(fixes),
        )

    def _find_similar_saved_paths(
        self, variables: Iterable[VariableSpec], saved_paths: Iterable[str]
    ) -> dict[str, str]:
        """Return a dict from the path of each variable to the most similar saved path, preferably of its shape."""
        near = NearMissSearch(saved_paths, max_comparisons=10_000)
        found: dict[str, str] = {}
        for variable in variables:

            def get_score_bonus(path: str, shape: Sequence[int] = variable.shape) -> float:
                return (
                    _BONUS_OF_EQUAL_SHAPE if tuple(self.source.variables[path].shape) == tuple(shape) else 0
                )

            for name in near.find_nearest_candidates(variable.path, 1, get_score_bonus):
                found[variable.path] = name
        return found

    def make_block_reader(self, variable: VariableSpec) -> Callable[[Index], NumpyArray] | None:
        """Return a function that reads blocks of a variable's saved values, or `None` if no values are to be loaded."""
        saved = None if self._closed or _is_random_key(variable) else self.find_saved_variable(variable)
        # While a model is built, a path may change, and may now equal that of another variable, so compare the shapes.
        if saved is None or saved.shape != variable.shape:
            return None
        self.read_paths.add(variable.path)
        dtype = get_numpy_dtype(variable.dtype, variable.path)

        def read_converted_values(index: Index) -> NumpyArray:
            found = self.source.read(saved.path, index)
            values = found.astype(dtype, copy=False)
            if is_integer_state(variable, saved) and not np.array_equal(values, found):
                raise CheckpointError(
                    f"{variable.path}: the {'random state' if variable.kind is Kind.RNG else 'count'} does not fit",
                    facts={"saved": f"{found.tolist()}, {saved.dtype}", "dtype in the model": variable.dtype},
                    why="libraries use different integer types, and the model's type is too small for the value",
                    fix="load it with the library that saved it"
                    + ", or seed the generator with a number below 2**31" * (variable.kind is Kind.RNG),
                )
            return values

        return read_converted_values

    def read_into_shards(self, variable: VariableSpec, shards: Sequence[tuple[Index, NumpyArray]]) -> bool:
        """Read the values of a variable directly into the memory of its shards, if they need no conversion.

        Args:
            variable: The variable.
            shards: The position of each shard in the variable, and its memory.

        Returns:
            Whether the values were read.
        """
        saved = self.find_saved_variable(variable)
        if saved is None or saved.dtype != variable.dtype or not shards:
            return False
        for index, memory in shards:
            self.source.read_into(saved.path, index, memory)
        return True

    def stop_providing_values(self) -> None:
        """Stop providing values. Variables created later keep their initial values."""
        self._closed = True

    def _describe_difference(self, variable: VariableSpec, saved: SavedVariable) -> tuple[str, str] | None:
        if _is_random_key(variable):
            return None
        if saved.shape != variable.shape:
            return variable.path, f"shape {variable.shape}, in the checkpoint {saved.shape}"
        if saved.dtype != variable.dtype and not self._cast and not is_integer_state(variable, saved):
            return variable.path, f"dtype {variable.dtype}, in the checkpoint {saved.dtype}"
        return None


def is_integer_state(variable: VariableSpec, saved: SavedVariable) -> bool:
    """Return whether a variable is an RNG state or a count, which libraries store with different integer types."""
    if variable.kind is Kind.RNG:
        return True
    integers = all(each.dtype.lstrip("u").startswith("int") for each in (variable, saved))
    return integers and variable.kind not in (Kind.WEIGHT, Kind.STATE)


def _is_random_key(variable: VariableSpec) -> bool:
    """Return whether a variable consists of JAX's typed random keys. A checkpoint has their data as integers."""
    return variable.dtype.startswith("key<")
