"""Explain a compiled step: the collectives and the work of each device, by line of the user's code."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax.extend.core import Jaxpr

import layoutmap
from layoutmap.core.escaping import escape_text
from layoutmap.core.mesh import Mesh
from layoutmap.core.text_table import format_bytes, format_html_pre, format_table
from layoutmap.cost.jax.counting import CauseFinder, iterate_ops_with_run_counts
from layoutmap.cost.jax.graph import Op
from layoutmap.cost.jax.memory import COLLECTIVE_NAMES
from layoutmap.cost.jax.partitioned import parse_partitioned_step
from layoutmap.cost.table import Collective
from layoutmap.engines.jax.programs import iterate_inner_jaxprs

_OWN_FOLDER = str(Path(layoutmap.__file__).parent)
_FAIR_RATIO = 1.1
"""Largest ratio of a device's work to its share that is no problem."""


@dataclass(frozen=True, slots=True)
class ExplainedCollective:
    """Equal collectives of a step that one line of the user's code causes.

    Args:
        kind: `"all_gather"`, `"all_reduce"`, `"reduce_scatter"`, `"all_to_all"`, or `"permute"`.
        dims: Mesh dims over which devices exchange.
        calls: Number of calls in a step.
        shape: Shape of the result of a call on one device.
        sent_bytes: Bytes that each device sends in a step for all calls.
        line: Line of the user's code, as `"train.py:31"`; empty if XLA does not tell it.
        cause: Argument that is gathered, or with which a reduced value is combined; empty if it is not known.
        is_full_gather: Whether each device receives an argument in full.
    """

    kind: str
    dims: tuple[str, ...]
    calls: int
    shape: tuple[int, ...]
    sent_bytes: int
    line: str
    cause: str
    is_full_gather: bool


@dataclass(frozen=True, slots=True)
class ExplainedProducts:
    """Matrix products that a line of the user's code causes, in the forward and the backward pass.

    Args:
        line: Line of the user's code, or several, separated by commas, if XLA mixes their products up; empty: all
            lines, because XLA does not name the line of each product.
        flops: Operations of each device.
        ideal_flops: Operations of all products of the line, divided by the number of devices.
    """

    line: str
    flops: int
    ideal_flops: float

    @property
    def ratio(self) -> float:
        """Work of a device divided by its share: 1.0 if all work is sharded, the number of devices if none is."""
        return self.flops / self.ideal_flops if self.ideal_flops else math.inf


@dataclass(frozen=True, slots=True)
class StepExplanation:
    """Work and collectives of each device in a step of `layoutmap.jit_step`, as XLA compiled the step.

    Args:
        name: Name of the step.
        mesh: Mesh of the step.
        collectives: Collectives, the largest first.
        products: Matrix products by line, the largest first.
        argument_bytes: Bytes of the arguments on a device.
        temporary_bytes: Bytes that the step needs besides its arguments and results.
        recompilations: Reason of each compilation after the first.
    """

    name: str
    mesh: Mesh
    collectives: tuple[ExplainedCollective, ...]
    products: tuple[ExplainedProducts, ...]
    argument_bytes: int
    temporary_bytes: int
    recompilations: tuple[str, ...]

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends in a step."""
        return sum(each.sent_bytes for each in self.collectives)

    def to_json(self) -> dict[str, Any]:
        """Return all numbers and texts as a dict for `json.dumps`."""
        return {
            "step": self.name,
            "mesh": dict(zip(self.mesh.dim_names, self.mesh.shape, strict=True)),
            "sent_bytes": self.sent_bytes,
            "argument_bytes": self.argument_bytes,
            "temporary_bytes": self.temporary_bytes,
            "collectives": [
                {name: getattr(each, name) for name in ExplainedCollective.__dataclass_fields__}
                for each in self.collectives
            ],
            "products": [
                {"line": each.line, "flops": each.flops, "ideal_flops": each.ideal_flops}
                for each in self.products
            ],
            "recompilations": list(self.recompilations),
        }

    def __str__(self) -> str:
        sizes = ", ".join(f"{dim}={self.mesh.dim_size(dim)}" for dim in self.mesh.dim_names)
        held = (
            f"{format_bytes(self.argument_bytes)} of arguments and {format_bytes(self.temporary_bytes)} more"
        )
        sent = format_bytes(self.sent_bytes)
        lines = [f"{escape_text(self.name)} on {sizes}: each device sends {sent}, and stores {held}"]
        if self.collectives:
            head = ("collective", "over", "calls", "result", "sent", "line", "because of")
            rows = [
                (
                    each.kind,
                    ", ".join(each.dims),
                    str(each.calls),
                    "x".join(map(str, each.shape)) or "number",
                    format_bytes(each.sent_bytes),
                    each.line or "?",
                    each.cause + " (gathered in full)" * each.is_full_gather,
                )
                for each in self.collectives
            ]
            lines += ["", *format_table(head, rows, ("calls", "sent"))]
        if self.products:
            rows = [
                (each.line or "all lines", f"{each.flops:,}", f"{each.ideal_flops:,.0f}", f"{each.ratio:.2f}")
                for each in self.products
            ]
            head = ("products at", "FLOPs of a device", "its share", "ratio")
            lines += ["", *format_table(head, rows, head[1:])]
        lines += ["", *self._list_problem_texts()]
        lines += [f"compiled again: {escape_text(reason)}" for reason in self.recompilations]
        return "\n".join(lines).rstrip()

    def _list_problem_texts(self) -> list[str]:
        """Return a text for each line of the user's code with products that several devices repeat."""
        why = "so devices repeat each other's work"
        return [
            f"{escape_text(each.line) or 'products'}: each device computes {each.ratio:.1f} times its share, {why}"
            for each in self.products
            if _FAIR_RATIO < each.ratio < math.inf
        ]

    def _repr_html_(self) -> str:
        return format_html_pre(str(self))


def explain_step(
    name: str,
    traced: Any,
    names: Sequence[str],
    paths: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    batches: Set[str],
    mesh: Mesh,
    recompilations: Sequence[str],
) -> StepExplanation:
    """Compile a step, and return the work and the collectives of each device by line of the user's code.

    Args:
        name: Name of the step.
        traced: Step as `jax.jit(..).trace` returns it.
        names: Name of each argument.
        paths: Path of each argument in those of the traced function, as `[0]['kernel']`.
        shapes: Global shape of each argument.
        batches: Names of the arguments without a layout of their own. They count as no cause of reductions.
        mesh: Mesh of the arguments.
        recompilations: Reason of each compilation after the first.
    """
    compiled = traced.lower().compile()
    text: str = compiled.as_text()
    block, find_line = parse_partitioned_step(text, mesh), _UserLineFinder(text)
    kept = _list_positions_of_kept_arguments(text, paths)
    found = [names[n] if n is not None else "" for n in kept]
    full = {names[n]: shapes[n] for n in kept if n is not None}
    causes = CauseFinder(block, found, batches=batches, is_marked=False)
    collectives, flops = Counter[ExplainedCollective](), Counter[str]()
    for op, times in iterate_ops_with_run_counts(block):
        if op.flops:
            flops[find_line(op)] += op.flops * times
        if op.name in COLLECTIVE_NAMES and op.dims:
            collectives[_explain_collective(op, find_line(op), causes.find_cause(op), full, mesh)] += times
    ideal = Counter[str]()
    _add_product_flops_by_line(traced.jaxpr.jaxpr, 1, ideal)
    memory = compiled.memory_analysis()
    # XLA gives some operations no source line. Then compare only the sums over all lines.
    if flops.keys() - ideal.keys():
        flops, ideal = Counter({"": flops.total()}), Counter({"": ideal.total()})
    products = _merge_misattributed_products(
        [ExplainedProducts(line, flops[line], ideal[line] / mesh.size) for line in ideal]
    )
    return StepExplanation(
        name,
        mesh,
        tuple(
            sorted(
                (_with_multiplied_calls(c, n) for c, n in collectives.items()), key=lambda c: -c.sent_bytes
            )
        ),
        tuple(sorted(products, key=lambda each: -each.flops)),
        getattr(memory, "argument_size_in_bytes", 0),
        getattr(memory, "temp_size_in_bytes", 0),
        tuple(recompilations),
    )


# XLA gives some products the source line of another product. Then one line seems to have less work than its share.
def _merge_misattributed_products(products: Sequence[ExplainedProducts]) -> list[ExplainedProducts]:
    """Merge the lines with less work than their share and those with more, if both exist, and drop unused lines."""
    less = [each for each in products if each.ratio < 1 / _FAIR_RATIO]
    more = [each for each in products if each.ratio > _FAIR_RATIO]
    if less and more:
        products = [each for each in products if each not in less and each not in more]
        merged = sorted(less + more, key=lambda each: each.line)
        lines = ", ".join(each.line for each in merged)
        flops, ideal = sum(each.flops for each in merged), sum(each.ideal_flops for each in merged)
        products.append(ExplainedProducts(lines, flops, ideal))
    return [each for each in products if each.flops]


def _explain_collective(
    op: Op, line: str, cause: str, shapes: Mapping[str, tuple[int, ...]], mesh: Mesh
) -> ExplainedCollective:
    size = max(sum(value.num_bytes for value in values) for values in (op.operands, op.results))
    kind: Any = op.name
    sent = Collective(kind, op.dims, 1, size, group=op.group).count_sent_bytes(mesh)
    shape = op.results[0].shape
    is_full = kind == "all_gather" and math.prod(shapes.get(cause, (0,))) == math.prod(shape)
    return ExplainedCollective(kind, op.dims, 1, shape, sent, line, cause, is_full)


def _with_multiplied_calls(collective: ExplainedCollective, calls: int) -> ExplainedCollective:
    return replace(collective, calls=calls, sent_bytes=collective.sent_bytes * calls)


def _list_positions_of_kept_arguments(module_text: str, paths: Sequence[str]) -> list[int | None]:
    """Return each parameter's position among the step's arguments, or None if unknown. JAX drops unused arguments."""
    entry, numbers = module_text[module_text.index("\nENTRY ") :], {path: n for n, path in enumerate(paths)}
    found: dict[int, int | None] = {}
    for line in entry.splitlines():
        if parameter := re.search(r" parameter\((\d+)\)", line):
            name = re.search(r'op_name="\w+(\[(?:[^"\\]|\\.)*)"', line)
            # In names, XLA escapes quotes and the bytes of non-ASCII letters by backslashes, so decode the names.
            path = name and name[1].encode().decode("unicode_escape").encode("latin-1").decode()
            found[int(parameter[1])] = numbers.get(path or "")
    return [found[number] for number in sorted(found)]


class _UserLineFinder:
    """Function that finds an operation's line of the user's code in the stack frames of a module's text."""

    def __init__(self, text: str) -> None:
        self._tables: dict[str, dict[int, str]] = {}
        for name in ("FileNames", "FileLocations", "StackFrames"):
            table = re.search(rf"^{name}\n((?:\d+ .*\n)+)", text, re.MULTILINE)
            rows = re.findall(r"^(\d+) (.*)$", table[1], re.MULTILINE) if table else []
            self._tables[name] = {int(number): row for number, row in rows}
        # If XLA adds one to the numbers of parent frames, the first frame seems to be its own parent: subtract one.
        first = _parse_number_fields(self._tables["StackFrames"].get(1, ""))
        self._parent_offset = int(first.get("parent_frame_id") == 1)

    def __call__(self, op: Op) -> str:
        """Return the innermost line of the user's code that caused an operation, as "train.py:31", or ""."""
        file, line = (re.search(rf'{key}="?([^"\s]+)', op.metadata) for key in ("source_file", "source_line"))
        if file and line:
            return _format_file_and_line(file[1], int(line[1]))
        frame = re.search(r"stack_frame_id=(\d+)", op.metadata)
        number, seen = int(frame[1]) if frame else 0, set[int]()
        while number > 0 and number not in seen:
            seen.add(number)
            row = _parse_number_fields(self._tables["StackFrames"].get(number, ""))
            location = _parse_number_fields(
                self._tables["FileLocations"].get(row.get("file_location_id", 0), "")
            )
            file_name = self._tables["FileNames"].get(location.get("file_name_id", 0), "").strip('"')
            if file_name and _is_user_file(file_name):
                return _format_file_and_line(file_name, location.get("line", 0))
            number = row.get("parent_frame_id", 0) - self._parent_offset
        return ""


def _parse_number_fields(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}


def _is_user_file(name: str) -> bool:
    return "site-packages" not in name and not name.startswith(_OWN_FOLDER)


def _format_file_and_line(file: str, line: int) -> str:
    return f"{Path(file).name}:{line}"


def _add_product_flops_by_line(jaxpr: Jaxpr, times: int, flops: Counter[str]) -> None:
    """Add the FLOPs of products in a jaxpr, run `times` times, to `flops`. Its keys are lines of the user's code."""
    for eqn in jaxpr.eqns:
        params: Any = eqn.params
        if eqn.primitive.name == "dot_general":
            (contracting, _), _ = params["dimension_numbers"]
            left, out = eqn.invars[0].aval, eqn.outvars[0].aval
            size = math.prod(left.shape[axis] for axis in contracting)  # type: ignore[attr-defined]
            flops[_find_user_line(eqn)] += 2 * math.prod(out.shape) * size * times  # type: ignore[attr-defined]
        trips = params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for inner in iterate_inner_jaxprs(params.values()):
            _add_product_flops_by_line(inner, times * trips, flops)


def _find_user_line(eqn: Any) -> str:
    """Return the innermost line of the user's code that caused an equation, as "train.py:31", or ""."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if _is_user_file(frame.file_name):
            return _format_file_and_line(frame.file_name, frame.line_num)
    return ""
