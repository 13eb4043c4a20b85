"""Plan a sync: match the variables of two models, and find the blocks that devices must send."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from layoutmap.adapters import CheckpointAdapter, get_model_adapter, require_capability
from layoutmap.adapters.protocol import StoredVariable
from layoutmap.checkpoint.axes import AxisConversion
from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.name_tables import NameTable
from layoutmap.checkpoint.renamed_source import RenamedSource
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray, make_full_index
from layoutmap.core.errors import LayoutError, PlanError, format_count
from layoutmap.core.escaping import escape_text
from layoutmap.core.layout import Layout
from layoutmap.core.paths import format_merged_paths, split_path_at_numbers
from layoutmap.core.pieces import ArrayMove, find_block_transfers
from layoutmap.core.text_table import format_bytes, format_html_pre, format_html_table, format_table
from layoutmap.core.variables import Kind, VariableSpec, get_itemsize
from layoutmap.engines import Engine, get_engine
from layoutmap.engines.protocol import Array, PlacementWithoutLayout
from layoutmap.plan.problems import Problem, merge_problems
from layoutmap.rules.near_misses import NearMissSearch

_COLUMNS = ("variable", "times", "shape", "dtype", "from", "to", "bytes")
_RIGHT_ALIGNED = {"times", "bytes"}
_DROPPABLE = ("times", "shape", "dtype")
_MAX_SHOWN = 3
DeviceBlocks = Mapping[str, Index]
"""The block of an array that each device stores, by the device's name."""

_PlacedVariable = tuple[str, tuple[int, ...], Layout | PlacementWithoutLayout]
"""The dtype, shape, and placement of a variable."""


@dataclass(frozen=True)
class SyncRow:
    """Describe a variable of the sampler and its sources in the trainer.

    Args:
        variable: The variable of the sampler.
        sources: Paths of the trainer's variables that provide its values.
        source_dtype: Dtype of the sources.
        source_layout: The trainer's layout of the first source, as text.
        target_layout: The sampler's layout of the variable, as text.
        sent_bytes: Bytes sent from one device to another, by the names of both.
        conversion: How the values are computed from the sources; `None`: they are copied from one source.
    """

    variable: VariableSpec
    sources: tuple[str, ...]
    source_dtype: str
    source_layout: str
    target_layout: str
    sent_bytes: Mapping[tuple[str, str], int] = field(hash=False)
    conversion: AxisConversion | None = field(default=None, repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes that devices send each other."""
        return sum(self.sent_bytes.values())

    @property
    def dtypes(self) -> str:
        """The dtype of the variable, or both dtypes as `source -> target` if values are cast."""
        own = self.variable.dtype
        return own if own == self.source_dtype else f"{self.source_dtype} -> {own}"


@dataclass(frozen=True)
class SyncPlan:
    """Describe the bytes that a sync moves from a trainer to a sampler.

    A device receives the part of its new shard that it does not store yet, in the smaller of both dtypes.

    Args:
        rows: One for each variable of the sampler that is updated, in its order.
        left_out: Ignored variables: for each `"trainer"` or `"sampler"`, and its path.
    """

    rows: tuple[SyncRow, ...]
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that devices send each other."""
        return sum(row.num_bytes for row in self.rows)

    @functools.cached_property
    def device_bytes(self) -> Mapping[str, int]:
        """Bytes that each device sends, by its name."""
        found: Counter[str] = Counter()
        for row in self.rows:
            for (sender, _), num_bytes in row.sent_bytes.items():
                found[sender] += num_bytes
        return dict(found)

    @property
    def casts(self) -> tuple[str, ...]:
        """Paths of variables that are cast to a different dtype."""
        return tuple(row.variable.path for row in self.rows if row.source_dtype != row.variable.dtype)

    def to_text(self, width: int | None = None) -> str:
        """Return the text that `print` shows. For `width`, see `Plan.to_text`."""
        table = format_table(_COLUMNS, self._list_table_rows(), _RIGHT_ALIGNED, width=width, drop=_DROPPABLE)
        return "\n".join([f"Sync of {self.summary}", "", *table, "", *self._iterate_notes()])

    __str__ = to_text

    def _repr_html_(self) -> str:
        table = format_html_table(f"Sync of {self.summary}", _COLUMNS, self._list_table_rows())
        return table + format_html_pre("\n".join(self._iterate_notes()))

    @property
    def summary(self) -> str:
        """The number of variables and of bytes, as text."""
        return f"{format_count(len(self.rows), 'variable')}, {format_bytes(self.num_bytes)} sent"

    def _iterate_notes(self) -> Iterator[str]:
        if self.device_bytes:
            device, most = max(self.device_bytes.items(), key=lambda each: each[1])
            yield f"most sent by one device: {format_bytes(most)}, {escape_text(device)}"
        if self.casts:
            yield f"cast: {format_count(len(self.casts), 'variable')}"
        for end in ("trainer", "sampler"):
            groups: dict[object, list[str]] = {}
            for path in (path for each, path in self.left_out if each == end):
                groups.setdefault(split_path_at_numbers(path), []).append(path)
            if groups:
                paths = ", ".join(map(format_merged_paths, groups.values()))
                yield f"left out of the {end}: {escape_text(paths)}"

    def _list_table_rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table. Rows with paths that differ only in numbers are merged into one row."""
        groups: dict[tuple[object, ...], list[SyncRow]] = {}
        for row in self.rows:
            cells = str(row.variable.shape), row.dtypes, row.source_layout, row.target_layout, row.num_bytes
            groups.setdefault((split_path_at_numbers(row.variable.path), *cells), []).append(row)
        return [
            (
                format_merged_paths([row.variable.path for row in rows]),
                str(len(rows)),
                str(rows[0].variable.shape),
                rows[0].dtypes,
                rows[0].source_layout,
                rows[0].target_layout,
                format_bytes(sum(row.num_bytes for row in rows)),
            )
            for rows in groups.values()
        ]


class SyncEndpoint:
    """Read and describe the variables of one end of a sync: the trainer or the sampler.

    Args:
        name: `"trainer"` or `"sampler"`.
        model: The model.

    Attributes:
        stored: Its weights and trained buffers, with their arrays.
    """

    def __init__(self, name: str, model: object):
        self.name = name
        self.model = model
        self.adapter = require_capability(get_model_adapter(model), CheckpointAdapter, "plan_sync")
        self.engine: Engine = get_engine(self.adapter.engine_name)
        self.stored = self._list_stored_weights()
        self._planned = self._find_placements()

    def _list_stored_weights(self) -> list[StoredVariable]:
        kinds = (Kind.WEIGHT, Kind.STATE)
        return [
            each for each in self.adapter.list_stored_variables(self.model) if each.variable.kind in kinds
        ]

    def read_arrays(self, model: object) -> dict[str, Array]:
        """Return the arrays of the model by path. If `model` is passed, it becomes the model of this endpoint.

        Raises:
            PlanError: A variable was added or removed, or its dtype, shape, or layout differs from the plan.
        """
        if model is not None:
            self.model = model
        self.stored = self._list_stored_weights()
        found = self._find_placements()
        changed = dict[str, str]()
        if found != self._planned:  # formatting takes longer than a small sync, so do it only here
            for path in self._planned | found:
                planned, now = (_format_variable(each.get(path)) for each in (self._planned, found))
                if planned != now:  # equal devices in meshes of other names are no change
                    changed[path] = f"{planned}, now {now}"
        if changed:
            raise PlanError(
                f"the {self.name} has changed since the plan",
                facts=dict(itertools.islice(changed.items(), _MAX_SHOWN)),
                why=f"{format_count(len(changed), 'variable')} differ in shape, dtype, or layout",
                fix="plan again: sync = layoutmap.plan_sync(trainer, sampler)",
            )
        return {each.variable.path: each.array for each in self.stored}

    def _find_placements(self) -> dict[str, _PlacedVariable]:
        """Return the dtype, shape, and placement of each variable, by path."""
        return {
            each.variable.path: (
                each.variable.dtype,
                each.variable.shape,
                self.engine.find_placement(each.array),
            )
            for each in self.stored
        }

    def format_layout(self, array: Array) -> str:
        """Return an array's layout and mesh as text, or where it is stored if it has no layout."""
        return _format_placement(self.engine.find_placement(array))

    def find_device_blocks(self, stored: StoredVariable) -> DeviceBlocks:
        """Return a dict from device name to the stored block of a variable. It is empty if no devices are known.

        Raises:
            LayoutError: The variable is sharded unevenly.
        """
        placement = self.engine.find_placement(stored.array)
        if not isinstance(placement, Layout):
            return dict.fromkeys(placement.devices, make_full_index(stored.variable.shape))
        return _find_blocks_by_device(
            self.engine.bind_mesh(placement.mesh).devices or (), placement, stored.variable.shape
        )


def _format_variable(variable: _PlacedVariable | None) -> str | None:
    if variable is None:
        return None
    dtype, shape, placement = variable
    return f"{dtype}{list(shape)} {_format_placement(placement)}"


def _format_placement(placement: Layout | PlacementWithoutLayout) -> str:
    return f"{placement} on {placement.mesh}" if isinstance(placement, Layout) else placement.what


@functools.lru_cache(1024)
def _find_blocks_by_device(devices: Sequence[str], layout: Layout, shape: tuple[int, ...]) -> DeviceBlocks:
    """Return a dict from device name to the block that the device stores of an array with a layout."""
    return {device: layout.shard_slices(shape, number) for number, device in enumerate(devices)}


class _TrainerVariableSource(Source):
    """List the trainer's variables as a source without values, so that a name table can rename them."""

    def _read_block(self, variable: SavedVariable, index: Index) -> NumpyArray:
        raise NotImplementedError


class SyncMatcher:
    """Find the sources in the trainer of each variable of the sampler, and the bytes to send.

    Args:
        trainer: The end that provides the values.
        sampler: The end that is updated.
        names: Names of the sampler's variables in the trainer; `None`: the same.
        ignore: Regexes for paths of variables that are not synced.

    Attributes:
        rows: The variables that are updated.
        left_out: See `SyncPlan`.
        moves: For each row, the indices of its sources in the trainer, and how to convert their values.
        problems: Variables that cannot be synced.
    """

    def __init__(
        self, trainer: SyncEndpoint, sampler: SyncEndpoint, names: NameTable | None, ignore: Sequence[str]
    ):
        self._trainer, self._sampler = trainer, sampler
        self._ignored = [re.compile(each) for each in ignore]
        self.rows: list[SyncRow] = []
        self.left_out: list[tuple[str, str]] = []
        self.moves: list[ArrayMove] = []
        self.problems: list[Problem] = []
        self._sources = {each.variable.path: n for n, each in enumerate(trainer.stored)}
        self._aliases = {a: n for n, each in enumerate(trainer.stored) for a in each.variable.aliases}
        variables = {
            path: SavedVariable(path, v.shape, v.dtype, v.kind)
            for each in trainer.stored
            for v in (each.variable,)
            for path in (v.path, *v.aliases)
        }
        self._renamed = (
            None if names is None else RenamedSource(_TrainerVariableSource("the trainer", variables), names)
        )
        self._used: set[int] = set()
        for each in sampler.stored:
            self._match_variable(each)
        self._record_unused_sources()

    @property
    def plan(self) -> SyncPlan:
        """The plan for all matched variables."""
        return SyncPlan(tuple(self.rows), tuple(self.left_out))

    def raise_problems(self) -> None:
        """Raise one error with all problems, or do nothing if there are none.

        Raises:
            PlanError: There are problems.
        """
        if not self.problems:
            return
        grouped = merge_problems(self.problems)
        if len(grouped) == 1:
            (only,) = grouped
            raise PlanError(
                only.what, problems=tuple(self.problems), facts=dict(only.facts), why=only.why, fix=only.fix
            )
        raise PlanError(
            f"the sync plan has {len(self.problems)} problems\n" + "\n\n".join(map(str, grouped)),
            problems=tuple(self.problems),
        )

    def _match_variable(self, target: StoredVariable) -> None:
        """Record a sampler's variable as a row, as left out if it is ignored, or as a problem if it cannot sync."""
        variable = target.variable
        numbers, conversion = self._find_source_indices(variable)
        if self._is_ignored(variable.path):
            self._used.update(numbers)
        if not numbers or self._is_ignored(variable.path):
            self._record_unmatched_variable("sampler", variable)
            return
        self._used.update(numbers)
        sources = [self._trainer.stored[number] for number in numbers]
        if (problem := self._find_copy_problem(target, sources, conversion)) is not None:
            self.problems.append(problem)
            return
        try:
            sent = self._count_sent_bytes(target, sources, conversion)
        except LayoutError as error:
            facts = tuple((name, str(value)) for name, value in error.facts.items())
            self.problems.append(
                Problem(
                    "uneven",
                    "error",
                    variable.path,
                    f"{variable.path}: {error.what}",
                    facts,
                    error.why,
                    error.fix,
                )
            )
            return
        self.rows.append(
            SyncRow(
                variable,
                tuple(each.variable.path for each in sources),
                sources[0].variable.dtype,
                self._trainer.format_layout(sources[0].array),
                self._sampler.format_layout(target.array),
                sent,
                conversion,
            )
        )
        self.moves.append(ArrayMove(tuple(numbers), conversion, variable.path))

    def _find_source_indices(self, variable: VariableSpec) -> tuple[list[int], AxisConversion | None]:
        """Return a pair: the indices of a variable's sources in the trainer, and the conversion (None: a copy)."""
        paths = (variable.path, *variable.aliases)
        if self._renamed is not None:
            self._renamed.add_variable_from_table(paths, variable.shape)
            for path in paths:
                if parts := self._renamed.get_source_parts(path):
                    numbers = [self._get_source_index(part.name) for part in parts]
                    is_same = len(parts) == 1 and parts[0].variable_axes == parts[0].tensor_axes
                    sides = tuple((part.variable_axes, part.tensor_axes, part.sizes) for part in parts)
                    return numbers, None if is_same else AxisConversion(variable.shape, sides)
        found = next((n for path in paths if (n := self._get_source_index(path)) >= 0), -1)
        return [found] * (found >= 0), None

    def _get_source_index(self, path: str) -> int:
        """Return the index of the trainer's variable with a path or alias, or -1 if there is none."""
        return self._sources.get(path, self._aliases.get(path, -1))

    def _find_copy_problem(
        self, target: StoredVariable, sources: Sequence[StoredVariable], conversion: AxisConversion | None
    ) -> Problem | None:
        """Return a problem that says why values cannot be copied from the sources, or None if they can be copied."""
        variable, source = target.variable, sources[0].variable
        path = variable.path
        if conversion is None and source.shape != variable.shape:
            facts = ("sampler", str(variable.shape)), ("trainer", f"{source.shape}, {source.path}")
            why = "a sync copies values, and neither pads nor slices arrays"
            fix = "build both models with equal sizes, or write the variable's sources and axes in names="
            return Problem("shape", "error", path, f"{path}: the models' shapes differ", facts, why, fix)
        if _find_number_kind(source.dtype) != _find_number_kind(variable.dtype):
            facts = ("sampler", variable.dtype), ("trainer", source.dtype)
            why = "a cast between these kinds of numbers changes more than their rounding"
            fix = "sync models with dtypes of the same kind, and quantize the sampler with its library afterwards"
            return Problem(
                "dtype", "error", path, f"{path}: the models' dtypes differ in kind", facts, why, fix
            )
        for end, each in ((self._sampler, target), *((self._trainer, source) for source in sources)):
            if not end.find_device_blocks(each):
                what = f"{each.variable.path}: its placement on the {end.name}'s devices is unknown"
                facts = (("placement", end.format_layout(each.array)),)
                why = "the layouts at both ends determine which bytes devices send"
                fix = "shard the model with a layout map, or move its arrays to devices"
                return Problem("no layout", "error", path, what, facts, why, fix)
        return None

    def _count_sent_bytes(
        self, target: StoredVariable, sources: Sequence[StoredVariable], conversion: AxisConversion | None
    ) -> dict[tuple[str, str], int]:
        """Return a dict from pairs of device names, the sender's and the receiver's, to the bytes that are sent."""
        target_blocks = self._sampler.find_device_blocks(target)
        # Devices of two engines may have equal names but do not share memory, so add the engine's name.
        label = "" if self._trainer.engine is self._sampler.engine else f"{self._trainer.engine.name} "
        found: Counter[tuple[str, str]] = Counter()
        for number, source in enumerate(sources):
            source_blocks = {
                f"{label}{device}": index
                for device, index in self._trainer.find_device_blocks(source).items()
            }
            blocks = {
                device: [index] if conversion is None else conversion.list_source_blocks(index)[number]
                for device, index in target_blocks.items()
            }
            itemsize = min(get_itemsize(target.variable.dtype), get_itemsize(source.variable.dtype))
            for each in find_block_transfers(source_blocks, blocks):
                if each.sender != each.receiver:
                    found[each.sender, each.receiver] += int(each.num_elements * itemsize)
        return {pair: count for pair, count in found.items() if count}

    def _record_unused_sources(self) -> None:
        for number, each in enumerate(self._trainer.stored):
            if number not in self._used:
                self._record_unmatched_variable("trainer", each.variable)

    def _is_ignored(self, path: str) -> bool:
        return any(pattern.match(path) for pattern in self._ignored)

    def _record_unmatched_variable(self, end: str, variable: VariableSpec) -> None:
        """Record a variable as left out if it is ignored, or else as a problem, because only one end has it."""
        path = variable.path
        if self._is_ignored(path):
            self.left_out.append((end, path))
            return
        other = self._trainer if end == "sampler" else self._sampler
        near = NearMissSearch(
            [each.variable.path for each in other.stored], max_comparisons=10_000
        ).find_nearest_candidates(path, 1)
        facts = (("shape", str(variable.shape)), *(("near", name) for name in near))
        self.problems.append(
            Problem(
                "unmatched",
                "error",
                path,
                f"{path}: only the {end} has this variable",
                facts,
                "a variable that is not synced keeps its old values without a warning",
                f"name its counterpart in names=, or pass ignore=[{path!r}]",
            )
        )


def _find_number_kind(dtype: str) -> str:
    """Return the kind of numbers of a dtype, such as `"f"` for floating point. A sync casts only within a kind."""
    if dtype == "bool":
        return "bool"
    kind = get_numpy_dtype(dtype).kind
    return {"V": "f", "u": "i"}.get(kind, kind)
