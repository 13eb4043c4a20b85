"""Read the values of a model's variables from a checkpoint, after comparing shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

import numpy as np

from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.name_tables import NameTable
from layoutmap.checkpoint.renamed_source import RenamedSource
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray
from layoutmap.core.errors import CheckpointError
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.rules.near_misses import Candidates

Missing = Literal["error", "keep"]
Extra = Literal["error", "ignore"]


class ModelValues:
    """Provide the checkpoint values of a model's variables.

    Args:
        source: The checkpoint.
        names: The names of the variables in the checkpoint; `None`: the same as in the model.
        missing: See `load`.
        extra: See `load`.
        cast: See `load`.

    Attributes:
        taken: The paths of variables whose values have been read.
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
        self.taken: set[str] = set()
        self._closed = False
        self._by_alias = {a: v.path for v in source.variables.values() for a in v.aliases}

    def find(self, variable: VariableSpec) -> SavedVariable | None:
        """Find the saved variable under any path of a model's variable, or return `None`."""
        if self._renamed is not None and variable.kind in (Kind.WEIGHT, Kind.STATE):
            self._renamed.fit((variable.path, *variable.aliases), variable.shape)
        for path in (variable.path, *variable.aliases):
            if path in self.source.variables:
                return self.source.variables[path]
            if path in self._by_alias:
                return self.source.variables[self._by_alias[path]]
        return None

    def list_parts(self, saved: SavedVariable) -> list[str]:
        """Return the names of the tensors in the checkpoint that make up a variable."""
        return [saved.path] if self._renamed is None else self._renamed.list_parts(saved.path)

    def check(self, variables: Sequence[VariableSpec], kinds: Collection[Kind] = (Kind.WEIGHT,)) -> None:
        """Compare all variables of a model with the checkpoint, and raise one error with all differences.

        Args:
            variables: The variables.
            kinds: Of which kinds none may be missing, and none too many.

        Raises:
            CheckpointError: They differ.
        """
        found = [(variable, self.find(variable)) for variable in variables]
        if self._renamed is not None:
            self._renamed.check_unique_parts(saved.path for _, saved in found if saved)
        wrong = [
            text
            for variable, saved in found
            if saved and (text := self._describe_difference(variable, saved))
        ]
        known = {saved.path for _, saved in found if saved}
        unknown = [
            v
            for v, saved in found
            if saved is None and v.kind in kinds and not (self._renamed and self._renamed.is_left_out(v.path))
        ]
        rest = [path for path, v in self.source.variables.items() if path not in known and v.kind in kinds]
        missing = unknown if self.missing == "error" else []
        extra = rest if self._extra == "error" else []
        if not (wrong or missing or extra):
            return
        near = Candidates(rest, most=10_000)
        facts: dict[str, object] = {}
        for variable in missing:
            names = near.find_nearest(variable.path, 1)
            facts[variable.path] = "not in the checkpoint" + (f"; it has {names[0]}" if names else "")
        facts |= dict(wrong)
        facts |= dict.fromkeys(extra, "in the checkpoint, but not in the model")
        shown = dict(list(facts.items())[:20])
        if len(facts) > len(shown):
            shown["and"] = f"{len(facts) - len(shown)} more"
        fixes = ["build the model that was saved"]
        fixes += ["pass names=, a table, if they have other names there"] * bool(
            missing and extra and not self._renamed
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

    def make_reader(self, variable: VariableSpec) -> Callable[[Index], NumpyArray] | None:
        """Return a function that reads blocks of a variable, or `None` if the checkpoint lacks it."""
        saved = None if self._closed or _is_random_key(variable) else self.find(variable)
        # Paths are provisional until all variables exist, so compare shapes to detect a mix-up.
        if saved is None or saved.shape != variable.shape:
            return None
        self.taken.add(variable.path)
        dtype = get_numpy_dtype(variable.dtype, variable.path)

        def read(index: Index) -> NumpyArray:
            found = self.source.read(saved.path, index)
            values = found.astype(dtype, copy=False)
            if is_integer_state(variable, saved) and not np.array_equal(values, found):
                raise CheckpointError(
                    f"{variable.path}: {'a random state' if variable.kind is Kind.RNG else 'a count'} does not fit",
                    facts={"saved": f"{found.tolist()}, {saved.dtype}", "dtype in the model": variable.dtype},
                    why="libraries store it with different integer types, and this value exceeds the range of this one",
                    fix="load it where it was saved"
                    + ", or seed the generator with a number below 2**31" * (variable.kind is Kind.RNG),
                )
            return values

        return read

    def fill(self, variable: VariableSpec, shards: Sequence[tuple[Index, NumpyArray]]) -> bool:
        """Write the values of a variable into the memory of its shards.

        Args:
            variable: The variable.
            shards: Where these are in it, and their memory.

        Returns:
            Whether they were written: not if they are to be converted.
        """
        saved = self.find(variable)
        if saved is None or saved.dtype != variable.dtype or not shards:
            return False
        for index, memory in shards:
            self.source.read_into(saved.path, index, memory)
        return True

    def close(self) -> None:
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
    """Return whether a variable holds typed JAX random keys, of which only the key data is saved."""
    return variable.dtype.startswith("key<")
