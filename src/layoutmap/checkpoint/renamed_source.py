"""Read variables under other names, and permute, split, or merge their axes by a name table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from layoutmap.checkpoint.axes import AxisPart, Side, compute_shape, fill_block, solve_sizes
from layoutmap.checkpoint.chunks import choose_chunk_shape, split_shard
from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.name_tables import NameTable, Piece
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray, compute_block_shape
from layoutmap.core.errors import CheckpointError
from layoutmap.core.variables import Kind
from layoutmap.rules.near_misses import Candidates

_CHECKED_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class SourcePart:
    """The tensor of a source that holds a variable or a part of it.

    Args:
        name: The tensor's name.
        here: The axes of the variable.
        there: The axes of the tensor.
        sizes: The size of each axis.
    """

    name: str
    here: Side
    there: Side
    sizes: Mapping[str, int]


class RenamedSource(Source):
    """Present a source under the variable names of a name table.

    Args:
        source: The source.
        names: The table.

    Attributes:
        where: The source's path.
        variables: The variables by path: those of `fit`, and the tensors that no table entry used.
    """

    def __init__(self, source: Source, names: NameTable):
        super().__init__(source.where, source.variables)
        self._source = source
        self._names = names
        self._from: dict[str, list[SourcePart]] = {}

    @property
    def states(self) -> Mapping[str, Any]:
        """States of the source."""
        return self._source.states

    def fit(self, paths: Sequence[str], shape: Sequence[int]) -> None:
        """Find the tensors of the source that make up a variable of the model, and add the variable.

        Args:
            paths: Its path, and its aliases.
            shape: Its global shape, from which sizes follow that the shapes of the source leave open.

        Raises:
            CheckpointError: It is joined from tensors of several element types.
        """
        for path in paths:
            if path in self._from:
                return
            found = self._names.find(path)
            if found is None:
                continue
            entry, stars = found
            names = [self._find_name(piece, stars) for piece in entry.pieces]
            if names and all(name in self._source.variables for name in names):
                self._add_checked(path, tuple(shape), list(zip(names, entry.pieces, strict=True)))
                return

    def is_left_out(self, path: str) -> bool:
        """Return whether the table marks a variable of the model as not stored."""
        line = self._names.find(path)
        return line is not None and not line[0].pieces

    def list_parts(self, path: str) -> list[str]:
        """Return the tensors of the source that make up a variable."""
        return [part.name for part in self._from[path]] if path in self._from else [path]

    def find_parts(self, path: str) -> Sequence[SourcePart]:
        """Return the tensors that make up a variable that was passed to `fit`, or an empty sequence."""
        return self._from.get(path, ())

    def check_unique_parts(self, paths: Iterable[str]) -> None:
        """Raise if two variables of a model read the same tensor or part.

        Raises:
            CheckpointError: They are.
        """
        users: dict[tuple[str, Side], str] = {}
        for path in paths:
            for each in self._from.get(path, ()):
                user = users.setdefault((each.name, _list_parts(each.there)), path)
                if user != path:
                    raise CheckpointError(
                        f"{user} and {path} are one tensor in the checkpoint",
                        facts={"tensor": each.name, "table": self._names.where},
                        why="the name table gives both the same name",
                        fix="write a line for each, with a longer part of its path",
                    )

    def _find_name(self, piece: Piece, stars: Sequence[str]) -> str:
        name = piece.theirs.write(stars)
        return name if name in self._source.variables else piece.theirs.write(stars, optional=False)

    def _add_checked(self, path: str, shape: tuple[int, ...], pieces: Sequence[tuple[str, Piece]]) -> None:
        saved = [self._source.variables[name] for name, _ in pieces]
        if len(types := {each.dtype for each in saved}) > 1:
            raise CheckpointError(
                f"{path}: its parts have different dtypes",
                facts={each.path: each.dtype for each in saved},
                why=f"the table {self._names.where} joins them into one variable",
                fix=f"convert them to one of {', '.join(sorted(types))}",
            )
        own: list[SourcePart] = []
        for (name, piece), each in zip(pieces, saved, strict=True):
            here, there = _get_sides(piece, len(each.shape))
            sizes = solve_sizes([(there, each.shape), (here, shape)])
            if sizes is None:  # keep the tensor, so that the comparison with the model reports it
                self.variables[path] = replace(saved[0], path=path, aliases=())
                self.variables.pop(name, None)
                return
            own.append(SourcePart(name, here, there, sizes))
        self.add(path, shape, own)
        for name, _ in pieces:
            if name != path:
                self.variables.pop(name, None)

    def add(self, path: str, shape: tuple[int, ...], own: Sequence[SourcePart]) -> None:
        """Add a variable made of these parts."""
        first = self._source.variables[own[0].name]
        self.variables[path] = SavedVariable(path, shape, first.dtype, first.kind)
        self._from[path] = list(own)

    def _read(self, variable: SavedVariable, wanted: Index) -> NumpyArray:
        if (name := self._find_unchanged(variable.path)) is not None:
            return self._source.read(name, wanted)
        result = np.empty(compute_block_shape(wanted), get_numpy_dtype(variable.dtype, variable.path))
        self._fill(result, wanted, self._from[variable.path], self._source.read)
        return result

    def _read_into(self, variable: SavedVariable, wanted: Index, target: NumpyArray) -> None:
        if (name := self._find_unchanged(variable.path)) is not None:
            self._source.read_into(name, wanted, target)
            return
        super()._read_into(variable, wanted, target)

    def _find_unchanged(self, path: str) -> str | None:
        """Return the source variable with the same axes, or `None` if axes are joined or permuted."""
        own = self._from.get(path)
        if own is None:
            return path
        return own[0].name if len(own) == 1 and own[0].here == own[0].there else None

    def _check(self, variable: SavedVariable, wanted: Index) -> None:
        if (name := self._find_unchanged(variable.path)) is not None:
            self._source.check(name, wanted)
            return
        own, dtype = self._from[variable.path], get_numpy_dtype(variable.dtype, variable.path)

        def check_block(name: str, block: Index) -> NumpyArray:
            self._source.check(name, block)
            return np.empty(compute_block_shape(block), dtype)

        for step in split_shard(
            wanted, choose_chunk_shape(compute_block_shape(wanted), dtype.itemsize, _CHECKED_BYTES)
        ):
            self._fill(np.empty(compute_block_shape(step), dtype), step, own, check_block)

    def _fill(
        self,
        result: NumpyArray,
        index: Index,
        own: Sequence[SourcePart],
        read: Callable[[str, Index], NumpyArray],
    ) -> None:
        for each in own:

            def read_block(place: Index, name: str = each.name) -> NumpyArray:
                return read(name, place)

            fill_block(result, index, each.here, each.there, each.sizes, read_block)

    def __repr__(self) -> str:
        return f"<{self._source!r}, under the names of {self._names.where}>"


def rename_source(source: Source, names: NameTable) -> RenamedSource:
    """Return the weights and moving statistics of a source under another library's names.

    Args:
        source: The source.
        names: The table.

    Raises:
        CheckpointError: The table has no line for a variable, two variables get one name, or a part is missing.
    """
    found: dict[str, list[SourcePart]] = {}
    unknown: list[str] = []
    for path, variable in source.variables.items():
        if variable.kind not in (Kind.WEIGHT, Kind.STATE):
            continue
        line = next((f for p in (path, *variable.aliases) if (f := names.find(p)) is not None), None)
        if line is None:
            unknown.append(path)
            continue
        entry, stars = line
        for piece in entry.pieces:
            ours, theirs = _get_sides(piece, len(variable.shape))
            sizes = solve_sizes([(ours, variable.shape)])
            if sizes is None:
                raise CheckpointError(
                    f"{path}: its shape contradicts the name table",
                    facts={"shape": variable.shape, "table": names.where, "line": entry.ours.text},
                    why="it has other axes than the table lists",
                    fix="use the table of this model, or correct the axes of that line",
                )
            found.setdefault(piece.theirs.write(stars), []).append(SourcePart(path, theirs, ours, sizes))
    if unknown:
        near = Candidates([entry.ours.text for entry in names.entries])
        facts = {
            path: f"not in the table; near: {', '.join(near.find_nearest(path, 1))}" for path in unknown[:10]
        }
        raise CheckpointError(
            f"{source.where}: the name table has no line for {len(unknown)} variables",
            facts={"table": names.where} | facts,
            why="an export writes all weights and moving statistics, or nothing",
            fix="use the table of this model, or add the lines to your own table",
        )
    renamed = RenamedSource(source, names)
    renamed.variables.clear()
    for name, own in found.items():
        _check_parts(name, own, source, names)
        renamed.add(name, compute_shape(own[0].here, own[0].sizes), own)
    return renamed


def _list_parts(side: Side) -> Side:
    """List the fixed parts, such as `1/3`, on each axis."""
    return tuple(tuple(atom for atom in axis if isinstance(atom, AxisPart)) for axis in side)


def _check_parts(name: str, own: Sequence[SourcePart], source: Source, names: NameTable) -> None:
    """Raise unless the variables cover all parts of a tensor, each once."""
    parts = [
        next((a for axis in each.here for a in axis if isinstance(a, AxisPart)), AxisPart(0, 1))
        for each in own
    ]
    shapes = {compute_shape(each.here, each.sizes) for each in own}
    dtypes = {source.variables[each.name].dtype for each in own}
    whys = {
        f"it has {parts[0].count} parts, and each is there once": sorted(part.number for part in parts)
        == list(range(parts[0].count)),
        "its parts have one shape": len(shapes) == 1,
        "its parts have one element type": len(dtypes) == 1,
    }
    for why, true in whys.items():
        if not true:
            raise CheckpointError(
                f"{name}: it cannot be joined from the variables of the model",
                facts={each.name: source.variables[each.name].shape for each in own} | {"table": names.where},
                why=f"in the table, {why}",
                fix="correct the table, or the model",
            )


def _get_sides(piece: Piece, rank: int) -> tuple[Side, Side]:
    """Return a variable's axes in the model and in the other library."""
    plain: Side = tuple((f"axis_{n}",) for n in range(rank))
    return piece.here or plain, piece.there or plain
