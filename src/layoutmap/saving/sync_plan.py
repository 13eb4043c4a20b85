"""Plan a sync: match the variables of two models, and find the blocks that devices must send."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from layoutmap.adapters import Keeping, get_model_adapter, require_capability
from layoutmap.adapters.protocol import Stored
from layoutmap.checkpoint.axes import AxisConversion
from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.name_tables import NameTable
from layoutmap.checkpoint.renamed_source import RenamedSource
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray, make_full_index
from layoutmap.core.errors import LayoutError, PlanError, format_count
from layoutmap.core.escaping import escape_text
from layoutmap.core.layout import Layout
from layoutmap.core.paths import merge_paths, split_at_numbers
from layoutmap.core.pieces import Move, find_pieces
from layoutmap.core.text_table import format_bytes, format_html_table, format_pre, format_table
from layoutmap.core.variables import Kind, VariableSpec, get_itemsize
from layoutmap.engines import Engine, get_engine
from layoutmap.engines.protocol import Array
from layoutmap.plan.problems import Problem, group_problems
from layoutmap.rules.near_misses import Candidates

_COLUMNS = ("variable", "times", "shape", "dtype", "from", "to", "bytes")
_RIGHT_ALIGNED = {"times", "bytes"}
_DROPPABLE = ("times", "shape", "dtype")
_MAX_SHOWN = 3
DeviceBlocks = Mapping[str, Index]
"""The block of an array that each device stores, by the device's name."""


@dataclass(frozen=True)
class SyncRow:
    """A variable of the sampler with its sources in the trainer.

    Args:
        variable: The variable of the sampler.
        sources: Paths of the trainer's variables that provide its values.
        source_dtype: Their dtype.
        source_layout: The trainer's layout of the first of them, as text.
        target_layout: The sampler's layout of the variable, as text.
        sent_bytes: Bytes sent from one device to another, by the names of both.
        conversion: How its values are computed from the sources; `None`: they are copied from one variable.
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
        """The dtype, or both dtypes if values are cast."""
        own = self.variable.dtype
        return own if own == self.source_dtype else f"{self.source_dtype} -> {own}"


@dataclass(frozen=True)
class SyncPlan:
    """The bytes that a sync moves from a trainer to a sampler.

    A device receives the part of its new shard that it does not store yet, in the smaller of both dtypes.

    Args:
        rows: One for each variable of the sampler that is updated, in its order.
        left_out: Ignored variables: the end and the path of each.
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
        """Paths of variables that are cast to another dtype."""
        return tuple(row.variable.path for row in self.rows if row.source_dtype != row.variable.dtype)

    def to_text(self, width: int | None = None) -> str:
        """Return the text that `print` shows. For `width`, see `Plan.to_text`."""
        table = format_table(_COLUMNS, self._list_cells(), _RIGHT_ALIGNED, width=width, drop=_DROPPABLE)
        return "\n".join([f"Sync of {self.summary}", "", *table, "", *self._list_notes()])

    __str__ = to_text

    def _repr_html_(self) -> str:
        table = format_html_table(f"Sync of {self.summary}", _COLUMNS, self._list_cells())
        return table + format_pre("\n".join(self._list_notes()))

    @property
    def summary(self) -> str:
        """Return the number of variables and bytes as text."""
        return f"{format_count(len(self.rows), 'variable')}, {format_bytes(self.num_bytes)} sent"

    def _list_notes(self) -> Iterator[str]:
        if self.device_bytes:
            device, most = max(self.device_bytes.items(), key=lambda each: each[1])
            yield f"most sent by one device: {format_bytes(most)}, {escape_text(device)}"
        if self.casts:
            yield f"cast: {format_count(len(self.casts), 'variable')}"
        for end in ("trainer", "sampler"):
            groups: dict[object, list[str]] = {}
            for path in (path for each, path in self.left_out if each == end):
                groups.setdefault(split_at_numbers(path), []).append(path)
            if groups:
                paths = ", ".join(map(merge_paths, groups.values()))
                yield f"left out of the {end}: {escape_text(paths)}"

    def _list_cells(self) -> list[tuple[str, ...]]:
        """Return the cells of each row, with repeated blocks merged into one row."""
        groups: dict[tuple[object, ...], list[SyncRow]] = {}
        for row in self.rows:
            cells = str(row.variable.shape), row.dtypes, row.source_layout, row.target_layout, row.num_bytes
            groups.setdefault((split_at_numbers(row.variable.path), *cells), []).append(row)
        return [
            (
                merge_paths([row.variable.path for row in rows]),
                str(len(rows)),
                str(rows[0].variable.shape),
                rows[0].dtypes,
                rows[0].source_layout,
                rows[0].target_layout,
                format_bytes(sum(row.num_bytes for row in rows)),
            )
            for rows in groups.values()
        ]


class End:
    """A model at one end of a sync: the trainer or the sampler.

    Args:
        name: `"trainer"` or `"sampler"`.
        model: The model.

    Attributes:
        stored: Its weights and trained buffers, with their arrays.
    """

    def __init__(self, name: str, model: object):
        self.name = name
        self.model = model
        self.adapter = require_capability(get_model_adapter(model), Keeping, "plan_sync")
        self.engine: Engine = get_engine(self.adapter.engine_name)
        self.stored = self._list_stored()
        self._planned = {each.variable.path: self.describe(each) for each in self.stored}

    def _list_stored(self) -> list[Stored]:
        kinds = (Kind.WEIGHT, Kind.STATE)
        return [
            each for each in self.adapter.list_stored_variables(self.model) if each.variable.kind in kinds
        ]

    def read(self, model: object) -> dict[str, Array]:
        """Return the arrays of the model, or of its successor, by path.

        Raises:
            PlanError: Its variables are others than those of the plan.
        """
        planned = self._planned
        if model is not None:
            self.model = model
        self.stored = self._list_stored()
        found = {each.variable.path: self.describe(each) for each in self.stored}
        if found != planned:
            changed = [path for path in {**planned, **found} if planned.get(path) != found.get(path)]
            raise PlanError(
                f"the {self.name} has changed since the plan",
                facts={path: f"{planned.get(path)}, now {found.get(path)}" for path in changed[:_MAX_SHOWN]},
                why=f"{format_count(len(changed), 'variable')} differ in shape, dtype, or layout",
                fix="plan again: sync = layoutmap.plan_sync(trainer, sampler)",
            )
        return {each.variable.path: each.array for each in self.stored}

    def describe(self, each: Stored) -> str:
        """Describe the dtype, shape, and placement of a variable."""
        return f"{each.variable.dtype}{list(each.variable.shape)} {self.format_layout(each.array)}"

    def format_layout(self, array: Array) -> str:
        """Format the layout of an array with its mesh, or describe its placement."""
        place = self.engine.describe_placement(array)
        return f"{place} on {place.mesh}" if isinstance(place, Layout) else place.what

    def index_devices(self, each: Stored) -> DeviceBlocks:
        """Return the block of a variable that each device stores, or an empty mapping without a layout.

        Raises:
            LayoutError: It is sharded unevenly.
        """
        place = self.engine.describe_placement(each.array)
        if not isinstance(place, Layout):
            return dict.fromkeys(place.devices, make_full_index(each.variable.shape))
        return _index_layout(self.engine.bind(place.mesh).devices or (), place, each.variable.shape)


@functools.lru_cache(1024)
def _index_layout(devices: Sequence[str], layout: Layout, shape: tuple[int, ...]) -> DeviceBlocks:
    return {device: layout.shard_slices(shape, number) for number, device in enumerate(devices)}


class _TrainerNames(Source):
    """Present the trainer's variables as a source without values, so that a name table can rename them."""

    def _read(self, variable: SavedVariable, wanted: Index) -> NumpyArray:
        raise NotImplementedError


class Matching:
    """Match the variables of two models.

    Args:
        trainer: The end that provides the values.
        sampler: The end that is updated.
        names: Names of the sampler's variables in the trainer; `None`: the same.
        ignore: Regexes for paths of variables that are not synced.

    Attributes:
        rows: The variables that are updated.
        left_out: See `SyncPlan`.
        moves: For each row, the numbers of its sources in the trainer.
        problems: Variables that cannot be synced.
    """

    def __init__(self, trainer: End, sampler: End, names: NameTable | None, ignore: Sequence[str]):
        self._trainer, self._sampler = trainer, sampler
        self._ignored = [re.compile(each) for each in ignore]
        self.rows: list[SyncRow] = []
        self.left_out: list[tuple[str, str]] = []
        self.moves: list[Move] = []
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
            None if names is None else RenamedSource(_TrainerNames("the trainer", variables), names)
        )
        self._used: set[int] = set()
        for each in sampler.stored:
            self._match(each)
        self._check_rest()

    @property
    def plan(self) -> SyncPlan:
        """The plan for all matched variables."""
        return SyncPlan(tuple(self.rows), tuple(self.left_out))

    def check(self) -> None:
        """Raise one error with all problems.

        Raises:
            PlanError: There are some.
        """
        if not self.problems:
            return
        grouped = group_problems(self.problems)
        if len(grouped) == 1:
            (only,) = grouped
            raise PlanError(
                only.what, problems=tuple(self.problems), facts=dict(only.facts), why=only.why, fix=only.fix
            )
        raise PlanError(
            f"{len(self.problems)} problems\n" + "\n\n".join(map(str, grouped)), problems=tuple(self.problems)
        )

    def _match(self, target: Stored) -> None:
        variable = target.variable
        numbers, conversion = self._find_sources(variable)
        if self._is_ignored(variable.path):
            self._used.update(numbers)
        if not numbers or self._is_ignored(variable.path):
            self._note_unmatched("sampler", variable)
            return
        self._used.update(numbers)
        sources = [self._trainer.stored[number] for number in numbers]
        if (problem := self._find_problem(target, sources, conversion)) is not None:
            self.problems.append(problem)
            return
        try:
            sent = self._count_bytes(target, sources, conversion)
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
        self.moves.append(Move(tuple(numbers), conversion, variable.path))

    def _find_sources(self, variable: VariableSpec) -> tuple[list[int], AxisConversion | None]:
        """Return the numbers of the trainer's variables that provide a variable's values, and the conversion."""
        paths = (variable.path, *variable.aliases)
        if self._renamed is not None:
            self._renamed.fit(paths, variable.shape)
            for path in paths:
                if parts := self._renamed.find_parts(path):
                    numbers = [self._get_number(part.name) for part in parts]
                    is_same = len(parts) == 1 and parts[0].here == parts[0].there
                    sides = tuple((part.here, part.there, part.sizes) for part in parts)
                    return numbers, None if is_same else AxisConversion(variable.shape, sides)
        found = next((n for path in paths if (n := self._get_number(path)) >= 0), -1)
        return [found] * (found >= 0), None

    def _get_number(self, path: str) -> int:
        return self._sources.get(path, self._aliases.get(path, -1))

    def _find_problem(
        self, target: Stored, sources: Sequence[Stored], conversion: AxisConversion | None
    ) -> Problem | None:
        variable, source = target.variable, sources[0].variable
        path = variable.path
        if conversion is None and source.shape != variable.shape:
            facts = ("sampler", str(variable.shape)), ("trainer", f"{source.shape}, {source.path}")
            why = "a sync moves values, and neither pads nor cuts them"
            fix = "make both models of one size, or name the variable's parts and axes in names="
            return Problem("shape", "error", path, f"{path}: its shapes differ", facts, why, fix)
        if _find_number_kind(source.dtype) != _find_number_kind(variable.dtype):
            facts = ("sampler", variable.dtype), ("trainer", source.dtype)
            why = "a cast between these kinds of numbers changes more than their rounding"
            fix = "quantize with the tool of the library, and sync models of floating-point numbers"
            return Problem(
                "dtype", "error", path, f"{path}: its element types differ in kind", facts, why, fix
            )
        for end, each in ((self._sampler, target), *((self._trainer, source) for source in sources)):
            if not end.index_devices(each):
                what = f"{each.variable.path}: no layout says how the {end.name} holds it"
                facts = (("held", end.format_layout(each.array)),)
                why = "the bytes that move follow from the layouts at both ends"
                fix = "shard the model with a layout map, or move its arrays to devices"
                return Problem("no layout", "error", path, what, facts, why, fix)
        return None

    def _count_bytes(
        self, target: Stored, sources: Sequence[Stored], conversion: AxisConversion | None
    ) -> dict[tuple[str, str], int]:
        wanted = self._sampler.index_devices(target)
        # Devices of two engines may have the same name without sharing memory, so add the engine's name.
        label = "" if self._trainer.engine is self._sampler.engine else f"{self._trainer.engine.name} "
        found: Counter[tuple[str, str]] = Counter()
        for number, source in enumerate(sources):
            held = {
                f"{label}{device}": index for device, index in self._trainer.index_devices(source).items()
            }
            blocks = {
                device: [index] if conversion is None else conversion.list_blocks(index)[number]
                for device, index in wanted.items()
            }
            itemsize = min(get_itemsize(target.variable.dtype), get_itemsize(source.variable.dtype))
            for piece in find_pieces(held, blocks):
                if piece.sender != piece.receiver:
                    found[piece.sender, piece.receiver] += int(piece.num_elements * itemsize)
        return {pair: count for pair, count in found.items() if count}

    def _check_rest(self) -> None:
        for number, each in enumerate(self._trainer.stored):
            if number not in self._used:
                self._note_unmatched("trainer", each.variable)

    def _is_ignored(self, path: str) -> bool:
        return any(pattern.match(path) for pattern in self._ignored)

    def _note_unmatched(self, end: str, variable: VariableSpec) -> None:
        path = variable.path
        if self._is_ignored(path):
            self.left_out.append((end, path))
            return
        other = self._trainer if end == "sampler" else self._sampler
        near = Candidates([each.variable.path for each in other.stored], most=10_000).find_nearest(path, 1)
        facts = (("shape", str(variable.shape)), *(("near", name) for name in near))
        self.problems.append(
            Problem(
                "unmatched",
                "error",
                path,
                f"{path}: only the {end} has it",
                facts,
                "what is not synced keeps its old values, and nothing says so later",
                f"name its counterpart in names=, or pass ignore=[{path!r}]",
            )
        )


def _find_number_kind(dtype: str) -> str:
    if dtype == "bool":
        return "bool"
    kind = get_numpy_dtype(dtype).kind
    return {"V": "f", "u": "i"}.get(kind, kind)
