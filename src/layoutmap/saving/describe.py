"""Describe the content of a checkpoint without a model: `describe`.

`Checkpoint` is a thin interface to a `Source` of values: the source reads them, and `report.contents` formats them.
Neither depends on the other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from layoutmap.checkpoint.foreign import open_checkpoint_source
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import NumpyArray, split_numpy_index
from layoutmap.core.errors import CheckpointError
from layoutmap.plan.problems import Problem
from layoutmap.report.contents import (
    CheckpointContents,
    format_checkpoint_html,
    format_checkpoint_json,
    format_checkpoint_summary,
    format_checkpoint_text,
    read_checkpoint_contents,
)
from layoutmap.rules.near_misses import find_nearest_candidates
from layoutmap.scope.plan import Plan


class Checkpoint(Mapping[str, SavedVariable]):
    """Map the paths of a checkpoint to its variables. Values are read on request.

    Args:
        source: Source of the values.
        match: Include only variables whose paths contain a match of this regex; `None`: all.

    Attributes:
        source: See above.

    Raises:
        re.error: `match` is not a regex.
    """

    def __init__(self, source: Source, match: str | None = None):
        self.source = source
        wanted = re.compile(match or "")
        self._variables = {path: v for path, v in source.variables.items() if wanted.search(path)}

    @property
    def where(self) -> str:
        """The file or folder of the checkpoint."""
        return self.source.where

    @property
    def step(self) -> int | None:
        """Number of the step, or `None` for files of other libraries."""
        return getattr(self.source, "step", None)

    @property
    def steps(self) -> tuple[int, ...]:
        """All existing steps, in ascending order. Empty for files of other libraries."""
        return getattr(self.source, "steps", ())

    @property
    def metadata(self) -> Any:
        """Metadata saved with the step, or `None` if there is none."""
        return getattr(self.source, "metadata", None)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics by which a `CheckpointManager` compares steps. Empty if none were saved."""
        return getattr(self.source, "metrics", {})

    @property
    def has_checksums(self) -> bool:
        """Whether damaged values can be detected. Formats of other libraries have no checksums."""
        return isinstance(self.source, StepSource)

    @property
    def variables(self) -> Mapping[str, SavedVariable]:
        """Variables by path."""
        return self._variables

    @property
    def states(self) -> Mapping[str, Any]:
        """States of random generators and of the data iterator, by name."""
        return self.source.states

    @property
    def global_bytes(self) -> int:
        """Size in bytes of all variables."""
        return self._checkpoint_contents.table.global_bytes

    @property
    def plan(self) -> Plan:
        """The layouts of the saved variables, as a plan that you can `diff` with a different plan.

        In this plan, a variable that was saved without a layout is replicated.
        """
        return Plan.from_table(self._checkpoint_contents.table)

    def read(self, path: str, index: Any = ...) -> NumpyArray:
        """Read values of a variable, and verify their checksums if the format has checksums.

        Args:
            path: Path of the variable, or another path to it.
            index: Index in numpy's form, of integers, slices, and `...`, as `numpy.s_[0]` or `numpy.s_[::2, :4]`. Only
                chunks with requested values are read.

        Raises:
            KeyError: The variable does not exist. The message names similar ones.
            LayoutMapError: The index is invalid or exceeds the variable's shape.
            CheckpointError: Bytes are missing or damaged.
        """
        variable = self[path]
        block, inner = split_numpy_index(... if index is None else index, variable.shape)
        return self.source.read(variable.path, block)[inner]

    def verify(self, progress: Callable[[str], object] | None = None) -> tuple[CheckpointError, ...]:
        """Read all files, and return an error for each missing or damaged part.

        Args:
            progress: Called with the path of each variable when it has been read.
        """
        if isinstance(self.source, StepSource):
            return tuple(self.source.iterate_damage(progress))
        found: list[CheckpointError] = []
        for path in self._variables:
            try:
                self.source.verify_block(path)
            except CheckpointError as error:
                found.append(error)
            if progress is not None:
                progress(path)
        return tuple(found)

    @cached_property
    def _checkpoint_contents(self) -> CheckpointContents:
        return read_checkpoint_contents(self.source, self._variables.values())

    @cached_property
    def _paths_by_alias(self) -> dict[str, str]:
        return {alias: v.path for v in self._variables.values() for alias in v.aliases}

    def __getitem__(self, path: str) -> SavedVariable:
        found = self._variables.get(path) or self._variables.get(self._paths_by_alias.get(path, ""))
        if found is None:
            near = find_nearest_candidates(path, [*self._variables, *self._paths_by_alias])
            raise KeyError(
                f"the checkpoint has no variable {path!r}"
                + (f"; near misses: {', '.join(near)}" if near else "")
            )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    # -- text, JSON, and HTML

    def to_json(self) -> str:
        """Return the content, without values, as JSON with one variable per line."""
        head: dict[str, Any] = {"where": self.where, "step": self.step, "steps": self.steps}
        if isinstance(self.source, StepSource):
            manifest = self.source.manifest
            head |= manifest.facts
            head["files"] = [{"name": file.name, "bytes": file.num_bytes} for file in manifest.files]
            head["metadata"] = manifest.metadata
        return format_checkpoint_json(self._checkpoint_contents, head | {"bytes": self.global_bytes})

    def to_html(self, problems: Sequence[CheckpointError] | None = None) -> str:
        """Return the content as a self-contained HTML page: facts, variables, and shards.

        Args:
            problems: Result of `verify`, which the page shows; `None`: the page says that nothing was verified.
        """
        # Imported here, because few programs need the page.
        from layoutmap.report.page.page import make_checkpoint_page

        return make_checkpoint_page(
            self._checkpoint_contents,
            problems if problems is None else list(map(_convert_error_to_problem, problems)),
        )

    def to_text(self, width: int | None = None) -> str:
        """Return the text that `print` shows. For `width`, see `Plan.to_text`."""
        return format_checkpoint_text(self._checkpoint_contents, width)

    __str__ = to_text

    def __repr__(self) -> str:
        return f"<Checkpoint {format_checkpoint_summary(self._checkpoint_contents)}>"

    def _repr_html_(self) -> str:
        return format_checkpoint_html(self._checkpoint_contents)


def _convert_error_to_problem(error: CheckpointError) -> Problem:
    facts = tuple((name, str(value)) for name, value in error.facts.items())
    return Problem("damaged", "error", error.what.partition(": ")[0], error.what, facts, error.why, error.fix)


def describe(directory: str | os.PathLike[str], *, step: int | None = None) -> Checkpoint:
    """Open a checkpoint of layoutmap, or files of a different library, without reading values.

    Args:
        directory: Folder of a checkpoint, or files of other libraries: see `load`.
        step: Number of the step; `None`: the last one.

    Returns:
        The checkpoint, a mapping of its variables. `print` shows them as a table. It also has `read`, `steps`, and
        `metadata`.

    Raises:
        CheckpointError: The step does not exist, or its manifest is damaged.

    Example:
        >>> import keras, layoutmap as lm, tempfile
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")])
        >>> directory = tempfile.mkdtemp()
        >>> folder = lm.save(model, directory, step=100, metadata={"loss": 0.25})
        >>> found = lm.describe(directory)
        >>> list(found), found["d1.kernel"].shape, found.steps, found.metadata
        (['d1.kernel', 'd1.bias'], (8, 16), (100,), {'loss': 0.25})
        >>> float(found.read("d1.bias").sum())
        0.0
    """
    return Checkpoint(open_checkpoint_source(directory, step))
