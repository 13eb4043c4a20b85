"""The values of a checkpoint for the variables of one model: compared with it, then read block by block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

import numpy as np

from layoutmap.checkpoint.dtypes import numpy_dtype
from layoutmap.checkpoint.name_tables import Names
from layoutmap.checkpoint.renamed_source import Renamed
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray
from layoutmap.core.errors import CheckpointError
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.rules.near_misses import Candidates

Missing = Literal["error", "keep"]
Extra = Literal["error", "ignore"]


class Values:
    """The values of a checkpoint for the variables of one model.

    Args:
        source: What they are read from.
        names: What the variables are called in it; `None`: what they are called in the model.
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
        names: Names | None = None,
        missing: Missing = "error",
        extra: Extra = "error",
        cast: bool = False,
    ):
        self._renamed = None if names is None else Renamed(source, names)
        self.source = source if self._renamed is None else self._renamed
        self.missing = missing
        self._extra = extra
        self._cast = cast
        self.taken: set[str] = set()
        self._closed = False
        self._by_alias = {a: v.path for v in source.variables.values() for a in v.aliases}

    def find(self, variable: VariableSpec) -> SavedVariable | None:
        """Return what the checkpoint has for a variable, under any of its paths; `None`: nothing."""
        if self._renamed is not None and variable.kind in (Kind.WEIGHT, Kind.STATE):
            self._renamed.fit((variable.path, *variable.aliases), variable.shape)
        for path in (variable.path, *variable.aliases):
            if path in self.source.variables:
                return self.source.variables[path]
            if path in self._by_alias:
                return self.source.variables[self._by_alias[path]]
        return None

    def check(self, variables: Sequence[VariableSpec], kinds: Collection[Kind] = (Kind.WEIGHT,)) -> None:
        """Compare all variables of a model with the checkpoint; raises once, with all differences.

        Args:
            variables: The variables.
            kinds: Of which kinds none may be missing, and none too many.

        Raises:
            CheckpointError: They differ.
        """
        found = [(variable, self.find(variable)) for variable in variables]
        if self._renamed is not None:
            self._renamed.check_once(saved.path for _, saved in found if saved)
        wrong = [text for variable, saved in found if saved and (text := self._difference(variable, saved))]
        known = {saved.path for _, saved in found if saved}
        unknown = [v for v, saved in found if saved is None and v.kind in kinds]
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
            f"{self.source.where}: the checkpoint is not of this model",
            facts=shown,
            why=f"{len(facts)} variables differ; nothing has been loaded",
            fix=", or ".join(fixes),
        )

    def reader(self, variable: VariableSpec) -> Callable[[Index], NumpyArray] | None:
        """Return what reads the shards of a variable; `None` if the checkpoint does not have it."""
        saved = None if self._closed or _is_key(variable) else self.find(variable)
        # One that is read before all are known may have the path of another, and so its shape.
        if saved is None or saved.shape != variable.shape:
            return None
        self.taken.add(variable.path)
        dtype = numpy_dtype(variable.dtype, variable.path)

        def read(index: Index) -> NumpyArray:
            found = self.source.read(saved.path, index)
            values = found.astype(dtype, copy=False)
            if is_count(variable, saved) and not np.array_equal(values, found):
                raise CheckpointError(
                    f"{variable.path}: {'a random state' if variable.kind is Kind.RNG else 'a count'} does not fit",
                    facts={"saved": f"{found.tolist()}, {saved.dtype}", "element type here": variable.dtype},
                    why="libraries hold it as integers of different types, and this number does not fit the one here",
                    fix="load it where it was saved"
                    + ", or seed the generator with a number below 2**31" * (variable.kind is Kind.RNG),
                )
            return values

        return read

    def fill(self, variable: VariableSpec, shards: Sequence[tuple[Index, NumpyArray]]) -> bool:
        """Write the values of a variable to where its shards are.

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
        """Have no more values: what a model makes later begins as it does by itself."""
        self._closed = True

    def _difference(self, variable: VariableSpec, saved: SavedVariable) -> tuple[str, str] | None:
        if _is_key(variable):
            return None
        if saved.shape != variable.shape:
            return variable.path, f"shape {variable.shape}, in the checkpoint {saved.shape}"
        if saved.dtype != variable.dtype and not self._cast and not is_count(variable, saved):
            return variable.path, f"dtype {variable.dtype}, in the checkpoint {saved.dtype}"
        return None


def is_count(variable: VariableSpec, saved: SavedVariable) -> bool:
    """Whether it is a random state or a count, which libraries hold as integers of different types."""
    if variable.kind is Kind.RNG:
        return True
    integers = all(each.dtype.lstrip("u").startswith("int") for each in (variable, saved))
    return integers and variable.kind not in (Kind.WEIGHT, Kind.STATE)


def _is_key(variable: VariableSpec) -> bool:
    """Whether it holds typed random keys of JAX; what is saved, and read into it afterwards, is their data."""
    return variable.dtype.startswith("key<")
