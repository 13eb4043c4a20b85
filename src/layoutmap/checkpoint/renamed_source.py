"""A source under other names: each block of a variable is read from the blocks of those it consists of there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from layoutmap.checkpoint.axes import Nth, Side, fill, shape_of, solve
from layoutmap.checkpoint.chunks import chunk_shape, chunks_of
from layoutmap.checkpoint.dtypes import numpy_dtype
from layoutmap.checkpoint.name_tables import Names, Piece
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray, compute_block_shape
from layoutmap.core.errors import CheckpointError
from layoutmap.core.variables import Kind
from layoutmap.rules.near_misses import Candidates

_CHECKED_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class From:
    """Where values of a variable are in a source.

    Args:
        name: The name there.
        here: The axes of the variable.
        there: Those of what has the name.
        sizes: The size of each axis.
    """

    name: str
    here: Side
    there: Side
    sizes: Mapping[str, int]


class Renamed(Source):
    """A source, with the names of a table.

    Args:
        source: The source.
        names: The table.

    Attributes:
        where: The source's path.
        variables: The variables by path: those that were asked for by `fit`, and what no table entry has used.
    """

    def __init__(self, source: Source, names: Names):
        super().__init__(source.where, source.variables)
        self._source = source
        self._names = names
        self._from: dict[str, list[From]] = {}

    @property
    def states(self) -> Mapping[str, Any]:
        """The states of the source."""
        return self._source.states

    def fit(self, paths: Sequence[str], shape: Sequence[int]) -> None:
        """Find what a variable of a model is in the source; does nothing where the source has nothing of that.

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
            names = [self._there(piece, stars) for piece in entry.pieces]
            if all(name in self._source.variables for name in names):
                self._take(path, tuple(shape), list(zip(names, entry.pieces, strict=True)))
                return

    def check_once(self, paths: Iterable[str]) -> None:
        """Raise if two of the variables of a model are one tensor, or one part of it.

        Raises:
            CheckpointError: They are.
        """
        users: dict[tuple[str, Side], str] = {}
        for path in paths:
            for each in self._from.get(path, ()):
                user = users.setdefault((each.name, _parts(each.there)), path)
                if user != path:
                    raise CheckpointError(
                        f"{user} and {path} are one tensor in the checkpoint",
                        facts={"tensor": each.name, "table": self._names.where},
                        why="the table gives both the same name",
                        fix="give each a line of its own, with more of its path",
                    )

    def _there(self, piece: Piece, stars: Sequence[str]) -> str:
        name = piece.theirs.write(stars)
        return name if name in self._source.variables else piece.theirs.write(stars, optional=False)

    def _take(self, path: str, shape: tuple[int, ...], pieces: Sequence[tuple[str, Piece]]) -> None:
        saved = [self._source.variables[name] for name, _ in pieces]
        if len(types := {each.dtype for each in saved}) > 1:
            raise CheckpointError(
                f"{path}: its parts have several element types",
                facts={each.path: each.dtype for each in saved},
                why=f"the table {self._names.where} joins them into one variable",
                fix=f"convert them to one of {', '.join(sorted(types))}",
            )
        own: list[From] = []
        for (name, piece), each in zip(pieces, saved, strict=True):
            here, there = _sides(piece, len(each.shape))
            sizes = solve([(there, each.shape), (here, shape)])
            if sizes is None:  # it is shown, compared with the model, and refused
                self.variables[path] = replace(saved[0], path=path, aliases=())
                self.variables.pop(name, None)
                return
            own.append(From(name, here, there, sizes))
        self.add(path, shape, own)
        for name, _ in pieces:
            if name != path:
                self.variables.pop(name, None)

    def add(self, path: str, shape: tuple[int, ...], own: Sequence[From]) -> None:
        """Add a variable that consists of these."""
        first = self._source.variables[own[0].name]
        self.variables[path] = SavedVariable(path, shape, first.dtype, first.kind)
        self._from[path] = list(own)

    def _read(self, variable: SavedVariable, wanted: Index) -> NumpyArray:
        if (name := self._is_all_of(variable.path)) is not None:
            return self._source.read(name, wanted)
        result = np.empty(compute_block_shape(wanted), numpy_dtype(variable.dtype, variable.path))
        self._fill(result, wanted, self._from[variable.path], self._source.read)
        return result

    def _read_into(self, variable: SavedVariable, wanted: Index, target: NumpyArray) -> None:
        if (name := self._is_all_of(variable.path)) is not None:
            self._source.read_into(name, wanted, target)
            return
        super()._read_into(variable, wanted, target)

    def _is_all_of(self, path: str) -> str | None:
        """The one variable of the source that a variable is, with the same axes; `None`: it is joined or moved."""
        own = self._from.get(path)
        if own is None:
            return path
        return own[0].name if len(own) == 1 and own[0].here == own[0].there else None

    def _check(self, variable: SavedVariable, wanted: Index) -> None:
        if (name := self._is_all_of(variable.path)) is not None:
            self._source.check(name, wanted)
            return
        own, dtype = self._from[variable.path], numpy_dtype(variable.dtype, variable.path)

        def checked(name: str, block: Index) -> NumpyArray:
            self._source.check(name, block)
            return np.empty(compute_block_shape(block), dtype)

        for step in chunks_of(
            wanted, chunk_shape(compute_block_shape(wanted), dtype.itemsize, _CHECKED_BYTES)
        ):
            self._fill(np.empty(compute_block_shape(step), dtype), step, own, checked)

    def _fill(
        self, result: NumpyArray, index: Index, own: Sequence[From], read: Callable[[str, Index], NumpyArray]
    ) -> None:
        for each in own:

            def block(place: Index, name: str = each.name) -> NumpyArray:
                return read(name, place)

            fill(result, index, each.here, each.there, each.sizes, block)

    def __repr__(self) -> str:
        return f"<{self._source!r}, under the names of {self._names.where}>"


def under_their_names(source: Source, names: Names) -> Renamed:
    """A source of a model's paths under the names of elsewhere: weights and moving statistics, and nothing else.

    Args:
        source: The source.
        names: The table.

    Raises:
        CheckpointError: The table has no line for a variable, two variables get one name, or a part is missing.
    """
    found: dict[str, list[From]] = {}
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
            ours, theirs = _sides(piece, len(variable.shape))
            sizes = solve([(ours, variable.shape)])
            if sizes is None:
                raise CheckpointError(
                    f"{path}: its shape does not fit the table",
                    facts={"shape": variable.shape, "table": names.where, "line": entry.ours.text},
                    why="it has other axes than the table names",
                    fix="use the table of this model, or correct the axes of that line",
                )
            found.setdefault(piece.theirs.write(stars), []).append(From(path, theirs, ours, sizes))
    if unknown:
        near = Candidates([entry.ours.text for entry in names.entries])
        facts = {
            path: f"not in the table; near: {', '.join(near.find_nearest(path, 1))}" for path in unknown[:10]
        }
        raise CheckpointError(
            f"{source.where}: the table has no line for {len(unknown)} variables",
            facts={"table": names.where} | facts,
            why="all weights and moving statistics are written, or nothing is",
            fix="use the table of this model, or add the lines to one of your own",
        )
    renamed = Renamed(source, names)
    renamed.variables.clear()
    for name, own in found.items():
        _check_parts(name, own, source, names)
        renamed.add(name, shape_of(own[0].here, own[0].sizes), own)
    return renamed


def _parts(side: Side) -> Side:
    """The fixed places on each axis."""
    return tuple(tuple(atom for atom in axis if isinstance(atom, Nth)) for axis in side)


def _check_parts(name: str, own: Sequence[From], source: Source, names: Names) -> None:
    """Raise unless variables are all of a tensor, each part of it once."""
    parts = [next((a for axis in each.here for a in axis if isinstance(a, Nth)), Nth(0, 1)) for each in own]
    shapes = {shape_of(each.here, each.sizes) for each in own}
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


def _sides(piece: Piece, rank: int) -> tuple[Side, Side]:
    """The axes of a variable of the model, and of what it is elsewhere."""
    plain: Side = tuple((f"axis_{n}",) for n in range(rank))
    return piece.here or plain, piece.there or plain
