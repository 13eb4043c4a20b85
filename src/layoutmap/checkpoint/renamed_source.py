"""Read variables under different names, and permute, split, or merge their axes by a name table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from layoutmap.checkpoint.axes import (
    ArrayAxes,
    AxisPart,
    compute_array_shape,
    fill_block_from_source,
    solve_axis_sizes,
)
from layoutmap.checkpoint.chunks import choose_chunk_shape, split_shard_into_chunks
from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.name_tables import NameTable, TensorPattern
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray, compute_block_shape
from layoutmap.core.errors import CheckpointError
from layoutmap.core.variables import Kind
from layoutmap.rules.near_misses import NearMissSearch

_CHECKED_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class SourcePart:
    """The tensor of a source that contains a variable or a part of it.

    Args:
        name: The tensor's name.
        variable_axes: The axes of the variable.
        tensor_axes: The axes of the tensor.
        sizes: The size of each axis name.
    """

    name: str
    variable_axes: ArrayAxes
    tensor_axes: ArrayAxes
    sizes: Mapping[str, int]


class RenamedSource(Source):
    """Read the variables of a source under the names and with the axes that a name table gives them.

    Args:
        source: The source.
        names: The name table.

    Attributes:
        where: The path of the source.
        variables: The variables by path: those of `add_variable_from_table`, and the tensors that no table entry used.
    """

    def __init__(self, source: Source, names: NameTable):
        super().__init__(source.where, source.variables)
        self._source = source
        self._names = names
        self._from: dict[str, list[SourcePart]] = {}
        self._slot_path_ends = _map_to_slot_path_ends(source)

    @property
    def states(self) -> Mapping[str, Any]:
        """States of the source."""
        return self._source.states

    def add_variable_from_table(self, paths: Sequence[str], shape: Sequence[int]) -> None:
        """Add a variable of the model if the table has a line for it and the source has all its tensors.

        Args:
            paths: The variable's path and aliases.
            shape: The variable's global shape. It determines sizes of axes that the tensors' shapes leave open.

        Raises:
            CheckpointError: The variable is joined from tensors of several element types.
        """
        for path in paths:
            if path in self._from:
                return
            found = self._names.find_matching_line(path)
            if found is None:
                continue
            entry, stars = found
            names = [self._choose_tensor_name(pattern, stars) for pattern in entry.tensors]
            if names and all(name in self._source.variables for name in names):
                self._try_add_variable(path, tuple(shape), list(zip(names, entry.tensors, strict=True)))
                self._add_slots_of_variable(path)
                return

    def _add_slots_of_variable(self, path: str) -> None:
        """Add the optimizer's slots of a variable under its path. Slots of its shape have its axes."""
        parts = self._from.get(path, ())
        for end in self._slot_path_ends.get(parts[0].name, ()) if parts else ():
            names = [".".join(("optimizer", part.name, *end)) for part in parts]
            slots = [self._source.variables.get(name) for name in names]
            known = [slot for slot in slots if slot is not None]
            shapes = [self._source.variables[part.name].shape for part in parts]
            slot_path = ".".join(("optimizer", path, *end))
            if shapes == [slot and slot.shape for slot in slots] and len({slot.dtype for slot in known}) == 1:
                moved = [replace(part, name=name) for part, name in zip(parts, names, strict=True)]
                self.add_variable(slot_path, self.variables[path].shape, moved)
            elif len(parts) == 1 and (
                not known[0].shape or self._find_unchanged_tensor_name(path) is not None
            ):
                axes = _make_default_axes(len(known[0].shape))
                sizes = solve_axis_sizes([(axes, known[0].shape)]) or {}
                self.add_variable(slot_path, known[0].shape, [SourcePart(names[0], axes, axes, sizes)])
            else:  # the slot lacks some axes of its variable, so it is unknown how the table changes the slot's axes
                continue
            self._remove_used_tensors(names)

    def _remove_used_tensors(self, names: Iterable[str]) -> None:
        """Remove tensors that were used for variables, unless a variable has the same name."""
        for name in names:
            if name not in self._from:
                self.variables.pop(name, None)

    def list_paths_by_tensor_name(self) -> dict[str, list[str]]:
        """Return the paths of the added variables by the names of their tensors."""
        found: dict[str, list[str]] = {}
        for path, parts in self._from.items():
            for part in parts:
                found.setdefault(part.name, []).append(path)
        return found

    def list_unmatched_lines(self, paths: Iterable[str]) -> list[str]:
        """Return the path patterns of the lines of `names={..}` that match none of these paths of a model."""
        known = list(paths)
        # Shipped tables have lines for a whole family of models, so list only lines of a user's own mapping.
        lines = self._names.entries if self._names.where == "names" else ()
        return [
            line.path.text
            for line in lines
            if not any(line.path.match_name(path, allow_prefix=True) for path in known)
        ]

    def is_not_stored(self, path: str) -> bool:
        """Return whether the table marks a variable of the model as not stored."""
        entry = self._names.find_matching_line(path)
        return entry is not None and not entry[0].tensors

    def list_tensor_names(self, path: str) -> list[str]:
        """Return the names of the tensors in the source that make up a variable."""
        return [part.name for part in self._from[path]] if path in self._from else [path]

    def get_source_parts(self, path: str) -> Sequence[SourcePart]:
        """Return the tensors of a variable that was added, or an empty sequence if the variable was not added."""
        return self._from.get(path, ())

    def check_parts_are_used_once(self, paths: Iterable[str]) -> None:
        """Raise if two variables of a model are read from the same tensor, or from the same part of a tensor.

        Raises:
            CheckpointError: Two variables share a tensor.
        """
        users: dict[tuple[str, ArrayAxes], str] = {}
        for path in paths:
            for each in self._from.get(path, ()):
                user = users.setdefault((each.name, _select_axis_parts(each.tensor_axes)), path)
                if user != path:
                    raise CheckpointError(
                        f"{user} and {path} are read from the same tensor",
                        facts={"tensor": each.name, "table": self._names.where},
                        why="the name table gives both variables the same name",
                        fix="write a line for each of these variables, with a longer part of its path",
                    )

    def _choose_tensor_name(self, pattern: TensorPattern, stars: Sequence[str]) -> str:
        name = pattern.name.make_name_from_stars(stars)
        return (
            name
            if name in self._source.variables
            else pattern.name.make_name_from_stars(stars, with_optional=False)
        )

    def _try_add_variable(
        self, path: str, shape: tuple[int, ...], tensors: Sequence[tuple[str, TensorPattern]]
    ) -> None:
        saved = [self._source.variables[name] for name, _ in tensors]
        if len(types := {each.dtype for each in saved}) > 1:
            raise CheckpointError(
                f"{path}: the tensors that make up this variable have different dtypes",
                facts={each.path: each.dtype for each in saved},
                why=f"the table {self._names.where} joins them into one variable",
                fix=f"convert all of these tensors to one of {', '.join(sorted(types))}",
            )
        parts: list[SourcePart] = []
        for (name, pattern), each in zip(tensors, saved, strict=True):
            variable_axes, tensor_axes = _get_variable_and_tensor_axes(pattern, len(each.shape))
            sizes = solve_axis_sizes([(tensor_axes, each.shape), (variable_axes, shape)])
            if sizes is None:  # keep the tensor's shape, so that the check of shapes reports the difference
                self.variables[path] = replace(saved[0], path=path, aliases=())
                self.variables.pop(name, None)
                return
            parts.append(SourcePart(name, variable_axes, tensor_axes, sizes))
        self.add_variable(path, shape, parts)
        self._remove_used_tensors(name for name, _ in tensors)

    def add_variable(self, path: str, shape: tuple[int, ...], parts: Sequence[SourcePart]) -> None:
        """Add a variable that is joined from these parts."""
        first = self._source.variables[parts[0].name]
        self.variables[path] = SavedVariable(path, shape, first.dtype, first.kind)
        self._from[path] = list(parts)

    def _read_block(self, variable: SavedVariable, index: Index) -> NumpyArray:
        if (name := self._find_unchanged_tensor_name(variable.path)) is not None:
            return self._source.read(name, index)
        result = np.empty(compute_block_shape(index), get_numpy_dtype(variable.dtype, variable.path))
        self._fill_from_parts(result, index, self._from[variable.path], self._source.read)
        return result

    def _read_block_into(self, variable: SavedVariable, index: Index, target: NumpyArray) -> None:
        if (name := self._find_unchanged_tensor_name(variable.path)) is not None:
            self._source.read_into(name, index, target)
            return
        super()._read_block_into(variable, index, target)

    def _find_unchanged_tensor_name(self, path: str) -> str | None:
        """Return the name of the tensor that equals a variable, or `None` if the tensors must be joined or permuted."""
        parts = self._from.get(path)
        if parts is None:
            return path
        return parts[0].name if len(parts) == 1 and parts[0].variable_axes == parts[0].tensor_axes else None

    def _verify_block(self, variable: SavedVariable, index: Index) -> None:
        if (name := self._find_unchanged_tensor_name(variable.path)) is not None:
            self._source.verify_block(name, index)
            return
        parts, dtype = self._from[variable.path], get_numpy_dtype(variable.dtype, variable.path)

        def verify_block(name: str, block: Index) -> NumpyArray:
            self._source.verify_block(name, block)
            return np.empty(compute_block_shape(block), dtype)

        for step in split_shard_into_chunks(
            index, choose_chunk_shape(compute_block_shape(index), dtype.itemsize, _CHECKED_BYTES)
        ):
            self._fill_from_parts(np.empty(compute_block_shape(step), dtype), step, parts, verify_block)

    def _fill_from_parts(
        self,
        result: NumpyArray,
        index: Index,
        parts: Sequence[SourcePart],
        read_source: Callable[[str, Index], NumpyArray],
    ) -> None:
        for each in parts:

            def read_block(block: Index, name: str = each.name) -> NumpyArray:
                return read_source(name, block)

            fill_block_from_source(
                result, index, each.variable_axes, each.tensor_axes, each.sizes, read_block
            )

    def __repr__(self) -> str:
        return f"<{self._source!r}, under the names of {self._names.where}>"


def make_renamed_source(source: Source, names: NameTable) -> RenamedSource:
    """Return a source with the weights and moving statistics of `source` under another library's names and axes.

    Args:
        source: The source with the names of the model.
        names: The name table.

    Raises:
        CheckpointError: The table has no line for a variable, two variables get one name, or a part is missing.
    """
    found: dict[str, list[SourcePart]] = {}
    unknown: list[str] = []
    for path, variable in source.variables.items():
        if variable.kind not in (Kind.WEIGHT, Kind.STATE):
            continue
        line = next(
            (f for p in (path, *variable.aliases) if (f := names.find_matching_line(p)) is not None), None
        )
        if line is None:
            unknown.append(path)
            continue
        entry, stars = line
        for pattern in entry.tensors:
            axes, exported_axes = _get_variable_and_tensor_axes(pattern, len(variable.shape))
            sizes = solve_axis_sizes([(axes, variable.shape)])
            if sizes is None:
                raise CheckpointError(
                    f"{path}: its shape contradicts the name table",
                    facts={"shape": variable.shape, "table": names.where, "line": entry.path.text},
                    why="the axes that the table lists do not fit the shape of the variable",
                    fix="use the table of this model, or correct the axes of this line",
                )
            part = SourcePart(path, exported_axes, axes, sizes)
            found.setdefault(pattern.name.make_name_from_stars(stars), []).append(part)
    if unknown:
        near = NearMissSearch([entry.path.text for entry in names.entries])
        facts = {
            path: f"not in the table; near: {', '.join(near.find_nearest_candidates(path, 1))}"
            for path in unknown[:10]
        }
        raise CheckpointError(
            f"{source.where}: the name table has no line for {len(unknown)} variables",
            facts={"table": names.where} | facts,
            why="an export writes all weights and moving statistics, or nothing",
            fix="use the table of this model, or add the lines to your own table",
        )
    renamed = RenamedSource(source, names)
    renamed.variables.clear()
    for name, parts in found.items():
        _check_parts_complete(name, parts, source, names)
        renamed.add_variable(name, compute_array_shape(parts[0].variable_axes, parts[0].sizes), parts)
    return renamed


def _select_axis_parts(axes: ArrayAxes) -> ArrayAxes:
    """Return the axes with only their parts, such as `1/3`, and without their names."""
    return tuple(tuple(atom for atom in axis if isinstance(atom, AxisPart)) for axis in axes)


def _check_parts_complete(name: str, joined: Sequence[SourcePart], source: Source, names: NameTable) -> None:
    """Raise unless the variables make up all parts of a tensor, each once, with one shape and one element type."""
    parts = [
        next((a for axis in each.variable_axes for a in axis if isinstance(a, AxisPart)), AxisPart(0, 1))
        for each in joined
    ]
    shapes = {compute_array_shape(each.variable_axes, each.sizes) for each in joined}
    dtypes = {source.variables[each.name].dtype for each in joined}
    whys = {
        f"each of its {parts[0].count} parts must occur exactly once": sorted(part.index for part in parts)
        == list(range(parts[0].count)),
        "all parts of the tensor must have the same shape": len(shapes) == 1,
        "all parts of the tensor must have the same element type": len(dtypes) == 1,
    }
    for why, is_true in whys.items():
        if not is_true:
            raise CheckpointError(
                f"{name}: it cannot be joined from the variables of the model",
                facts={each.name: source.variables[each.name].shape for each in joined}
                | {"table": names.where},
                why=why,
                fix="correct the lines of the table that have this name",
            )


def _get_variable_and_tensor_axes(pattern: TensorPattern, rank: int) -> tuple[ArrayAxes, ArrayAxes]:
    """Return a pair: a variable's axes in the model and its tensor's axes, with default names if the table has none."""
    default_axes = _make_default_axes(rank)
    return pattern.variable_axes or default_axes, pattern.tensor_axes or default_axes


def _make_default_axes(rank: int) -> ArrayAxes:
    return tuple((f"axis_{n}",) for n in range(rank))


def _map_to_slot_path_ends(source: Source) -> dict[str, list[list[str]]]:
    """Map each variable with slots to the ends of the slots' paths, after `optimizer.` and the variable's path."""
    found: dict[str, list[list[str]]] = {}
    for path, variable in source.variables.items():
        if variable.kind is Kind.SLOT:
            parts = path.split(".")
            owners = ((".".join(parts[1:stop]), parts[stop:]) for stop in range(len(parts), 1, -1))
            if owner := next((each for each in owners if each[0] in source.variables), None):
                found.setdefault(owner[0], []).append(owner[1])
    return found
