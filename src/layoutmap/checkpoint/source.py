"""Define sources of values: a step of a checkpoint, or files of other libraries."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.gate import FIX, translate_parser_errors
from layoutmap.core.blocks import Index, NumpyArray, make_full_index, normalize_index
from layoutmap.core.errors import CheckpointError, join_names, shorten_repr
from layoutmap.core.variables import Kind, get_itemsize

_MAX_NAME_LENGTH = 4096
_MAX_AXES = 64  # limit of numpy

Specs = tuple[str | tuple[str, ...] | None, ...]
"""Sharding specs in JSON form: `None` for an unsharded axis."""


@dataclass(frozen=True, slots=True)
class SavedVariable:
    """A variable in a checkpoint, without its values.

    Args:
        path: The path of the variable.
        shape: The global shape.
        dtype: The name of the element type, as in `"bfloat16"`.
        kind: The purpose of the variable.
        aliases: Other paths of the variable.
        layout: The sharding specs when it was saved; `None`: it was on no mesh, or they are unknown.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = Kind.WEIGHT
    aliases: tuple[str, ...] = ()
    layout: Specs | None = None

    @property
    def global_bytes(self) -> int:
        """Size of the unsharded variable in bytes."""
        return math.prod(self.shape) * get_numpy_dtype(self.dtype, self.path).itemsize


def check_variable_limits(
    where: str, variables: Iterable[SavedVariable], max_bytes: int | None = None
) -> None:
    """Raise if a variable has a name, rank, or size that cannot be real, as in a damaged or malicious file.

    Args:
        where: The checkpoint, for messages.
        variables: The variables.
        max_bytes: The maximum size of a variable in bytes; `None`: any size that a 64-bit offset allows.

    Raises:
        CheckpointError: A variable exceeds a limit.
    """
    for each in variables:
        why = ""
        if len(each.path) > _MAX_NAME_LENGTH:
            why = f"its name has {len(each.path):,} characters, and at most {_MAX_NAME_LENGTH:,} are allowed"
        elif len(each.shape) > _MAX_AXES:
            why = f"it has {len(each.shape):,} axes, and at most {_MAX_AXES} are allowed"
        else:
            size = math.ceil(math.prod(each.shape) * get_itemsize(each.dtype))
            most = 2**63 - 1 if max_bytes is None else max_bytes
            if size > most or math.prod(max(n, 1) for n in each.shape) >= 2**63:
                why = f"its shape {each.shape} needs {size:,} bytes, and its files can have at most {most:,}"
        if why:
            raise CheckpointError(f"{where}: {shorten_repr(each.path)} is invalid", why=why, fix=FIX)


def import_format_package(subject: str, package: str, why: str) -> Any:
    """Import a package that reads a format. If it is missing, raise an error with `subject` and `why`.

    Raises:
        CheckpointError: The package is not installed.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{subject} are read with {package}, which is not installed",
            why=why,
            fix=f"pip install {package}",
        ) from error


class Source(ABC):
    """Base class of checkpoints from which variables are read block by block.

    Args:
        where: The name of the file or folder in messages.
        variables: The variables by path.
    """

    def __init__(self, where: str, variables: Mapping[str, SavedVariable]):
        self.where = where
        self.variables = dict(variables)

    @property
    def states(self) -> Mapping[str, Any]:
        """States saved besides the variables, by name. Empty if there are none."""
        return {}

    def read(self, path: str, index: Index | None = None) -> NumpyArray:
        """Return the block of a variable at `index`, or all its values if `index` is `None`, in new memory.

        Raises:
            CheckpointError: There is no such variable, or its values cannot be read or are damaged.
        """
        wanted = self._resolve_variable_and_index(path, index)
        with translate_parser_errors(f"{self.where}: {path}"):
            return self._read_block(*wanted)

    def read_into(self, path: str, index: Index, target: NumpyArray) -> None:
        """Read the block of a variable at `index` into `target`, which has its shape and the variable's dtype."""
        wanted = self._resolve_variable_and_index(path, index)
        with translate_parser_errors(f"{self.where}: {path}"):
            self._read_block_into(*wanted, target)

    def verify_block(self, path: str, index: Index | None = None) -> None:
        """Raise if `read` would raise for this block. Damaged values are found only in formats with checksums."""
        wanted = self._resolve_variable_and_index(path, index)
        with translate_parser_errors(f"{self.where}: {path}"):
            self._verify_block(*wanted)

    @abstractmethod
    def _read_block(self, variable: SavedVariable, index: Index) -> NumpyArray: ...

    def _read_block_into(self, variable: SavedVariable, index: Index, target: NumpyArray) -> None:
        target[...] = self._read_block(variable, index)

    def _verify_block(self, variable: SavedVariable, index: Index) -> None:
        self._read_block(variable, index)

    def _resolve_variable_and_index(self, path: str, index: Index | None) -> tuple[SavedVariable, Index]:
        variable = self[path]
        return variable, make_full_index(variable.shape) if index is None else normalize_index(
            index, variable.shape
        )

    def __getitem__(self, path: str) -> SavedVariable:
        """Return the variable with a path.

        Raises:
            CheckpointError: There is no such variable.
        """
        if path not in self.variables:
            from layoutmap.rules.near_misses import find_nearest_candidates

            raise CheckpointError(
                f"{path}: the checkpoint has no variable of this path",
                facts={
                    "checkpoint": self.where,
                    "near misses": join_names(find_nearest_candidates(path, self.variables)),
                },
                why=f"the checkpoint has {len(self.variables)} variables with other paths",
                fix="use one of the paths that layoutmap.describe(directory) shows",
            )
        return self.variables[path]
