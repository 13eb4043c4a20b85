"""Compare texts, values, and programs between the processes of one program.

What is gathered first has the same size whatever is compared, so processes that compare different things find out. All
must ask alike, each with its own part and a `gather` that gathers from all. Where they differ, it is said in all.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np

from layoutmap.core.blocks import NumpyArray
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import CheckpointError, ScopeError, join_names
from layoutmap.engines.checks import make_difference_error

# always compare the first calls, because a wrong input pipeline differs from the first batch
_FIRST_CALLS = 8
_MAX_SHOWN = 200  # longer texts of a process are cut in messages

Result = TypeVar("Result")

Gather = Callable[[NumpyArray], NumpyArray]
"""Gathers the values of each process, one row each. All processes must call it with values of one shape."""

Part = tuple[str, str]
"""One item that processes compare: its name for users, and a text."""


def gather_texts(text: str, gather: Gather) -> list[str]:
    """Gather a text from each process, in process order."""
    own = np.frombuffer(text.encode(), np.uint8)
    rows = _gather_padded(own, gather)
    return [row.tobytes().decode() for row in rows]


def _gather_padded(own: NumpyArray, gather: Gather) -> list[NumpyArray]:
    """Gather values that may differ in number between processes."""
    lengths = gather(np.array([own.size], np.int64))[:, 0]
    if not lengths.any():  # no process sent a text
        return [own] * len(lengths)
    rows = gather(np.pad(own, (0, int(lengths.max()) - own.size)))
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


# If one process raised alone, the others would wait for it, so exchange errors and raise in all (decisions/0079).
def run_together(function: Callable[[], Result], gather: Gather, verb: str = "load") -> Result:
    """Call a function in each process, and raise in all processes if it raises in one."""
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
            why="a step needs all processes of the mesh",
            fix=f"fix the error that {next(iter(failed))} reports, and {verb} again",
        )
    return result


def check_alike(text: str, gather: Gather, checksum: int = 0) -> tuple[Sequence[str], Sequence[int]]:
    """Gather a text and a number from each process, and compare the texts.

    Returns:
        The texts of all processes if they differ, else nothing; and the numbers of all.
    """
    rows = gather(np.array([zlib.crc32(text.encode()), checksum], np.uint32))
    return gather_texts(text, gather) if len(np.unique(rows[:, 0])) > 1 else [], rows[:, 1].tolist()


def label_processes(texts: Sequence[str]) -> dict[str, object]:
    """Return facts for an error message: the text of each process."""
    return {f"process {number}": each for number, each in enumerate(texts)}


def shorten(text: str) -> str:
    """Shorten a text for error messages, and add a checksum of the rest."""
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[:_MAX_SHOWN]}... checksum {zlib.crc32(text.encode()):08x}"


def check_program(call: str, parts: Iterable[Part], gather: Gather) -> None:
    """Raise a `ScopeError` for the first part of a call's program that differs between processes."""
    found = find_difference([("call", call), *parts], gather)
    if found is None:
        return
    name, texts = found
    raise ScopeError(
        describe_difference(name, texts),
        facts={"in": call} | (label_processes(texts) if len(texts) > 2 else {}),
        why="each process computes a part of one program, and parts of different programs give wrong numbers",
        fix="run the same code in all processes, with the same arguments and the same releases of the libraries",
    )


def describe_difference(name: str, texts: Sequence[str]) -> str:
    """Describe the texts of process 0 and of the first process that differs."""
    other = next(number for number, text in enumerate(texts) if text != texts[0])
    return f"{name}: {texts[0]} in process 0, {texts[other]} in process {other}"


def check_values(checksums: Iterable[tuple[str, int]], gather: Gather) -> None:
    """Raise a `ScopeError` if values that each process created for itself differ between processes.

    Args:
        checksums: A path, and the checksum of the value there, for each value in order.
        gather: Gathers from all processes.
    """
    check_equal(
        [(path, f"checksum {each:08x}") for path, each in checksums],
        gather,
        "its values differ between processes",
        why="each process created it separately, so its shards would come from different values",
        fix="set the same seed in all processes before it is created, or load the same file in all of them",
    )


def check_computed(checksums: Sequence[tuple[str, int]], gather: Gather) -> None:
    """Raise an `EngineError` if the processes computed different initial values."""
    everyone = gather(np.array([value for _, value in checksums], np.uint32))
    differ = [path for i, (path, _) in enumerate(checksums) if len(set(everyone[:, i])) > 1]
    if differ:
        raise make_difference_error(
            f"{differ[0]}: the processes have different values", {"variables": join_names(differ)}
        )


class CallSchedule:
    """Decide which calls of a model the processes compare: the first eight, then each power of two.

    The first call of an epoch is compared, too. A run of n calls compares log2(n) of them (decisions/0181).

    Attributes:
        calls: The number of calls so far.
        begins_epoch: Whether the next call is the first of an epoch.
        is_in_epochs: Whether the program runs a loop that tells when an epoch begins.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.begins_epoch = False
        self.is_in_epochs = False

    def count_call(self) -> bool:
        """Count a call, and return whether the processes compare it."""
        self.calls += 1
        begins, self.begins_epoch = self.begins_epoch, False
        return begins or self.calls <= _FIRST_CALLS or not self.calls & (self.calls - 1)


def check_batch(arrays: Sequence[Any], gather: Gather, call: int | None = None, hint: str = "") -> None:
    """Raise a `ScopeError` if processes pass different batches where each passes the global batch.

    Args:
        arrays: The batch of this process.
        gather: Gathers from all processes.
        call: The number of the call of the model, for the message; `None`: it is not known.
        hint: The start of the fix: what else the library can do.
    """
    described = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
    texts, _ = check_alike(f"{described}, checksum {compute_checksum(*arrays):08x}", gather)
    if texts:
        raise ScopeError(
            "the processes pass different batches",
            facts=label_processes(texts) | ({} if call is None else {"in call": call}),
            why="every process must pass the global batch, and computes its part of it",
            fix=f"{hint}read the same data in the same order in all processes: shuffle with the same "
            "seed, and use no sampler that gives each process its own rows",
        )


def check_equal(named_texts: Iterable[tuple[str, str]], gather: Gather, what: str, **parts: str) -> None:
    """Raise a `ScopeError` if named texts differ between the processes."""
    found = find_difference(named_texts, gather)
    if found is not None:
        path, texts = found
        raise ScopeError(f"{path}: {what}", facts=label_processes(texts), **parts)


def find_difference(named_texts: Iterable[tuple[str, str]], gather: Gather) -> tuple[str, list[str]] | None:
    """Return the first name with different texts, and each process's first different line.

    Where the processes have different names it is one that some do not have.
    """
    texts, _ = check_alike(json.dumps(list(named_texts)), gather)
    lists = [_parts_from_json(text) for text in texts]
    known = [{name for name, _ in each} for each in lists]
    nothing = ("", "nothing")
    for each in zip_longest(*lists, fillvalue=nothing):
        if len(set(each)) > 1:
            names = [name for name, _ in each if name]
            name = next((n for n in names if not all(n in each for each in known)), names[0])
            texts = [text if of == name else nothing[1] for of, text in each]
            lines = zip_longest(*(text.splitlines() for text in texts), fillvalue="nothing more")
            return name, [shorten(line) for line in next(line for line in lines if len(set(line)) > 1)]
    return None


def _parts_from_json(text: str) -> list[Part]:
    """Parse the parts from a process, or return the raw text if it is not such JSON."""
    try:
        return [(name, of) for name, of in json.loads(text)]
    except ValueError:
        return [("what it compares", text)]
