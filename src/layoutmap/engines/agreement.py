"""Comparisons between the processes of one program: texts, values, and the program itself.

What is gathered first has the same size whatever is compared, so processes that compare different things find out. All
must ask alike, each with its own part and a `gather` that gathers from all. Where they differ, it is said in all.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import numpy as np

from layoutmap.core.blocks import NumpyArray
from layoutmap.core.checksums import checksum
from layoutmap.core.errors import CheckpointError, ScopeError, listed
from layoutmap.engines.checks import processes_differ

_MAX_SHOWN = 200  # characters of a process's text in a message

Result = TypeVar("Result")

Gather = Callable[[NumpyArray], NumpyArray]
"""Returns the values of each process, one row each; all must call it, with values of one shape."""


def gather_texts(text: str, gather: Gather) -> list[str]:
    """Return the text of each process, in order of the processes."""
    own = np.frombuffer(text.encode(), np.uint8)
    rows = _gather_padded(own, gather)
    return [row.tobytes().decode() for row in rows]


def _gather_padded(own: NumpyArray, gather: Gather) -> list[NumpyArray]:
    """The values of each process, of which each may have another number."""
    lengths = gather(np.array([own.size], np.int64))[:, 0]
    if not lengths.any():  # as where nothing has failed
        return [own] * len(lengths)
    rows = gather(np.pad(own, (0, int(lengths.max()) - own.size)))
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


# why: decisions/0083
def agreed(function: Callable[[], Result], gather: Gather, verb: str = "load") -> Result:
    """Return what a function returns that each process calls by itself; where it raises in one, raise in all.

    Args:
        function: Exchanges nothing with other processes.
        gather: Gathers from all processes.
        verb: What it is part of, for messages: `"load"` or `"save"`.

    Raises:
        CheckpointError: It raised in another process.
    """
    result: Any = None
    error: BaseException | None = None
    try:
        result = function()
    except BaseException as raised:
        error = raised
    texts = gather_texts("" if error is None else str(error) or repr(error), gather)
    if error is not None:
        raise error
    failed = {f"process {number}": text for number, text in enumerate(texts) if text}
    if failed:
        raise CheckpointError(
            f"{', '.join(failed)} cannot {verb}",
            facts=failed,
            why=f"all processes of a mesh {verb} a step, or none does",
            fix=f"fix what {next(iter(failed))} says, and {verb} again",
        )
    return result


def check_alike(text: str, gather: Gather, checksum: int = 0) -> tuple[Sequence[str], Sequence[int]]:
    """Compare a text of each process.

    Args:
        text: The text of this process.
        gather: Gathers from all processes.
        checksum: A number that is gathered along, and not compared.

    Returns:
        The texts of all processes if they differ, else nothing; and the numbers of all.
    """
    rows = gather(np.array([zlib.crc32(text.encode()), checksum], np.uint32))
    return gather_texts(text, gather) if len(np.unique(rows[:, 0])) > 1 else [], rows[:, 1].tolist()


def of_processes(texts: Sequence[str]) -> dict[str, object]:
    """Facts for a message: what each process says."""
    return {f"process {number}": each for number, each in enumerate(texts)}


def short(text: str) -> str:
    """A text as messages show it: the begin of a long one."""
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[:_MAX_SHOWN]}... checksum {zlib.crc32(text.encode()):08x}"


class Trait(NamedTuple):
    """A part of what makes a program.

    Attributes:
        name: What it is, in the words of who wrote the program.
        text: What is compared.
        shown: What messages show of it; empty: the text.
        may_be_number: Whether it is a value of the user's code, which may be the number of the process.
    """

    name: str
    text: str
    shown: str = ""
    may_be_number: bool = False


def check_program(
    call: str, parts: Iterable[Trait], gather: Gather, terms: Callable[[], Iterable[Trait]] = tuple
) -> None:
    """Raise a `ScopeError` if the processes would run different programs; it names the first difference.

    Args:
        call: What runs it, as in `"fit"`.
        parts: What makes the program.
        gather: Gathers from all processes.
        terms: Parts that say a difference in better words. Where only they differ, the programs are the same.
    """
    own = list(parts)
    name = f"the program of {call}"
    sums = _checksums(own)
    texts, _ = check_alike(f"{name}, checksum {zlib.crc32(sums.tobytes()):08x}", gather)
    if any(not text.startswith(f"{name}, ") for text in texts):
        raise ScopeError(
            f"{call}: the processes do different things",
            facts=of_processes(texts),
            why="all processes of a mesh must make the same calls",
            fix="make the same calls in all processes, in the same order",
        )
    if texts and (found := _first_difference(own, gather)) is not None:
        raise _different(call, _first_difference(list(terms()), gather) or found)


def _checksums(parts: Sequence[Trait]) -> NumpyArray:
    return np.array([zlib.crc32(f"{part.name}\0{part.text}".encode()) for part in parts], np.uint32)


def _first_difference(parts: Sequence[Trait], gather: Gather) -> list[Trait] | None:
    """The first part that differs, as each process has it."""
    sums = _gather_padded(_checksums(parts), gather)
    most = max(map(len, sums))
    rows = np.array([np.pad(row, (0, most - len(row))) for row in sums])
    for place in np.flatnonzero((rows != rows[0]).any(axis=0)).tolist():
        own = parts[place] if place < len(parts) else Trait("", "nothing more")
        shown = own._replace(text=short(own.text), shown=short(own.shown))
        each = [Trait(*json.loads(text)) for text in gather_texts(json.dumps(shown), gather)]
        if not _are_numbers(each):
            return each
    return None


def _are_numbers(parts: Sequence[Trait]) -> bool:
    """Whether a part is the same in all processes but for their numbers, those of all or those on one host."""
    if len({part.name for part in parts}) > 1 or not all(part.may_be_number for part in parts):
        return False
    largest = max(int(digits) for part in parts for digits in re.findall(r"\d+", f"{part.text} 0"))
    return any(len(_without_numbers(parts, size)) == 1 for size in (len(parts), largest + 1))


def _without_numbers(parts: Sequence[Trait], size: int) -> set[str]:
    """The texts of processes without the number of each, which is counted up to a size, and anew from there."""
    return {
        re.sub(rf"(?<![\d.]){number % size}(?![\d.])", "#", part.text) for number, part in enumerate(parts)
    }


def _different(call: str, parts: Sequence[Trait]) -> ScopeError:
    names = {part.name for part in parts}
    told = [part.shown or part.text for part in parts]
    if len(set(told)) == 1:  # as where two lines of source read other names
        told = [part.text for part in parts]
    if len(names) > 1:
        told = [f"{part.name}: {each}" if part.name else each for part, each in zip(parts, told, strict=True)]
    other = next(number for number, part in enumerate(parts) if part[:2] != parts[0][:2])
    start = f"{parts[0].name}: " if len(names) == 1 else ""
    return ScopeError(
        f"{start}{told[0]} in process 0, {told[other]} in process {other}",
        facts={"in": call} | (of_processes(told) if len(told) > 2 else {}),
        why="each process computes its part of one program, and parts of different programs give wrong numbers",
        fix="run the same code in all processes, with the same arguments and the same releases of the libraries",
    )


def check_values(checksums: Iterable[tuple[str, int]], gather: Gather) -> None:
    """Raise a `ScopeError` if values that each process has for itself are not the same in all of them.

    Args:
        checksums: A path, and the checksum of the value there, for each value in order.
        gather: Gathers from all processes.
    """
    check_equal(
        [(path, f"checksum {each:08x}") for path, each in checksums],
        gather,
        "the processes have different values of it",
        why="it was made in each process for itself, and the shards of one variable would be of different values",
        fix="give all processes the same seed before it is made, or load the same file in all of them",
    )


def check_computed(checksums: Sequence[tuple[str, int]], gather: Gather) -> None:
    """Raise an `EngineError` if first values that each process has computed, by path, differ between them."""
    everyone = gather(np.array([value for _, value in checksums], np.uint32))
    differ = [path for i, (path, _) in enumerate(checksums) if len(set(everyone[:, i])) > 1]
    if differ:
        raise processes_differ(
            f"{differ[0]}: the processes have different values", {"variables": listed(differ)}
        )


def check_batch(arrays: Sequence[Any], gather: Gather) -> None:  # why: decisions/0030
    """Raise a `ScopeError` if the processes pass different batches, where each of them brings all of it."""
    described = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
    texts, _ = check_alike(f"{described}, checksum {checksum(*arrays):08x}", gather)
    if texts:
        raise ScopeError(
            "the processes pass different batches",
            facts=of_processes(texts),
            why="every process passes the global batch here, and computes its part of it",
            fix="read the same data in all processes, in the same order: the same seed for what shuffles it, and no "
            "sampler that gives each process its own rows",
        )


def check_equal(named_texts: Iterable[tuple[str, str]], gather: Gather, what: str, **parts: str) -> None:
    """Raise a `ScopeError` if named texts differ between the processes; `what` is said of the first name."""
    found = differing_name(named_texts, gather)
    if found is not None:
        path, texts = found
        raise ScopeError(f"{path}: {what}", facts=of_processes(texts), **parts)


def differing_name(named_texts: Iterable[tuple[str, str]], gather: Gather) -> tuple[str, list[str]] | None:
    """Return the first name whose texts differ between processes, and the first line of each that differs.

    Where the processes have different names it is one that some do not have.
    """
    texts, _ = check_alike(json.dumps(list(named_texts)), gather)
    lists: list[list[tuple[str, str]]] = [[(name, of) for name, of in json.loads(text)] for text in texts]
    known = [{name for name, _ in each} for each in lists]
    nothing = ("", "nothing")
    for each in zip_longest(*lists, fillvalue=nothing):
        if len(set(each)) > 1:
            names = [name for name, _ in each if name]
            name = next((n for n in names if not all(n in each for each in known)), names[0])
            texts = [text if of == name else nothing[1] for of, text in each]
            lines = zip_longest(*(text.splitlines() for text in texts), fillvalue="nothing more")
            return name, [short(line) for line in next(line for line in lines if len(set(line)) > 1)]
    return None
