"""Compare texts, values, and calls between the processes of a job.

Each comparison first gathers values of one size, so that processes that compare different things detect it. All
processes must call the same function, each with its own values and a `gather` function. Differences raise in all.
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
from layoutmap.engines.checks import make_unequal_initial_values_error

# If the input pipelines of processes differ by mistake, their first batches differ, so always compare the first calls.
_NUM_FIRST_CALLS = 8
_MAX_SHOWN_CHARACTERS = 200  # number of characters that a message shows of one process's text

Result = TypeVar("Result")

Gather = Callable[[NumpyArray], NumpyArray]
"""Gathers the values of each process, one row each. All processes must call it with values of one shape."""

NamedText = tuple[str, str]
"""A text that processes compare, after its name for error messages."""


def gather_texts(text: str, gather: Gather) -> list[str]:
    """Return the text of each process, in process order."""
    rows = _gather_values_of_any_length(np.frombuffer(text.encode(), np.uint8), gather)
    return [row.tobytes().decode() for row in rows]


def _gather_values_of_any_length(values: NumpyArray, gather: Gather) -> list[NumpyArray]:
    """Return the values of each process. The number of values may differ between processes."""
    lengths = gather(np.array([values.size], np.int64))[:, 0]
    if not lengths.any():  # no process has values, so do not gather any
        return [values] * len(lengths)
    rows = gather(np.pad(values, (0, int(lengths.max()) - values.size)))
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


# If only one process raised, the others would wait for it, so share errors, and raise in all (decisions/0079).
def call_and_share_errors(function: Callable[[], Result], gather: Gather, verb: str = "load") -> Result:
    """Call a function in each process, and return this process's result. If one process raises, all raise."""
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
            why=f"all processes of the mesh must {verb} together",
            fix=f"fix the error that {next(iter(failed))} reports, and {verb} again",
        )
    return result


def gather_unequal_texts_and_checksums(
    text: str, gather: Gather, checksum: int = 0
) -> tuple[Sequence[str], Sequence[int]]:
    """Return the texts of all processes if they differ, else an empty list, and the checksums of all processes."""
    rows = gather(np.array([zlib.crc32(text.encode()), checksum], np.uint32))
    return gather_texts(text, gather) if len(np.unique(rows[:, 0])) > 1 else [], rows[:, 1].tolist()


def map_process_names_to_texts(texts: Sequence[str]) -> dict[str, object]:
    """Return a dict from the name of each process, such as `process 0`, to its text."""
    return {f"process {number}": each for number, each in enumerate(texts)}


def shorten_text(text: str) -> str:
    """Shorten a text for error messages, and add a checksum of the whole text."""
    if len(text) <= _MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[:_MAX_SHOWN_CHARACTERS]}... checksum {zlib.crc32(text.encode()):08x}"


def check_same_program(call: str, named_texts: Iterable[NamedText], gather: Gather) -> None:
    """Raise a `ScopeError` if a call's name, or a text that describes its computation, differs between processes."""
    found = find_first_text_difference([("call", call), *named_texts], gather)
    if found is None:
        return
    name, texts = found
    raise ScopeError(
        format_text_difference(name, texts),
        facts={"in": call} | (map_process_names_to_texts(texts) if len(texts) > 2 else {}),
        why="each process computes a part of one program, and parts of different programs give wrong numbers",
        fix="run the same code in all processes, with the same arguments and the same releases of the libraries",
    )


def format_text_difference(name: str, texts: Sequence[str]) -> str:
    """Return a message with a name, its text in process 0, and its text in the first process that differs."""
    other = next(number for number, text in enumerate(texts) if text != texts[0])
    return f"{name}: {texts[0]} in process 0, {texts[other]} in process {other}"


def check_same_values(checksums: Iterable[tuple[str, int]], gather: Gather) -> None:
    """Raise a `ScopeError` if values that each process created separately differ between processes.

    Args:
        checksums: The path and the checksum of each value, in order.
        gather: Gathers from all processes.
    """
    check_same_texts(
        [(path, f"checksum {each:08x}") for path, each in checksums],
        gather,
        "its values differ between processes",
        why="each process created the variable separately, so its shards would come from different values",
        fix="set the same seed in all processes before you create the model, or load the same file in all of them",
    )


def check_same_initial_values(checksums: Sequence[tuple[str, int]], gather: Gather) -> None:
    """Raise an `EngineError` if the processes computed different initial values."""
    everyone = gather(np.array([value for _, value in checksums], np.uint32))
    differ = [path for i, (path, _) in enumerate(checksums) if len(set(everyone[:, i])) > 1]
    if differ:
        raise make_unequal_initial_values_error(
            f"{differ[0]}: the processes have different values", {"variables": join_names(differ)}
        )


class CallComparisonSchedule:
    """Decide which calls of a model the processes compare: the first eight, then calls 16, 32, 64, and so on.

    The first call of an epoch is compared, too. A run of n calls compares log2(n) of them (decisions/0181).

    Attributes:
        calls: The number of calls so far.
        begins_epoch: Whether the next call is the first of an epoch. The training loop sets it.
        is_in_epochs: Whether the program runs a training loop that sets `begins_epoch`.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.begins_epoch = False
        self.is_in_epochs = False

    def count_call_and_check_due(self) -> bool:
        """Count the next call, and return whether the processes compare it."""
        self.calls += 1
        begins, self.begins_epoch = self.begins_epoch, False
        return begins or self.calls <= _NUM_FIRST_CALLS or not self.calls & (self.calls - 1)


def check_same_batch(arrays: Sequence[Any], gather: Gather, call: int | None = None, hint: str = "") -> None:
    """Raise a `ScopeError` if the processes pass different batches. Each must pass the same global batch.

    Args:
        arrays: The batch of this process.
        gather: Gathers from all processes.
        call: The number of the call of the model, for the message; `None`: it is not known.
        hint: The start of the fix, such as an option of the library with which processes pass parts of the batch.
    """
    described = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
    texts, _ = gather_unequal_texts_and_checksums(
        f"{described}, checksum {compute_checksum(*arrays):08x}", gather
    )
    if texts:
        raise ScopeError(
            "the processes pass different batches",
            facts=map_process_names_to_texts(texts) | ({} if call is None else {"in call": call}),
            why="every process must pass the same global batch, and computes its part of it",
            fix=f"{hint}read the same data in the same order in all processes: shuffle with the same "
            "seed, and use no sampler that gives each process its own rows",
        )


def check_same_texts(
    named_texts: Iterable[tuple[str, str]], gather: Gather, problem: str, **error_parts: str
) -> None:
    """Raise a `ScopeError` if named texts differ between the processes."""
    found = find_first_text_difference(named_texts, gather)
    if found is not None:
        path, texts = found
        raise ScopeError(f"{path}: {problem}", facts=map_process_names_to_texts(texts), **error_parts)


def find_first_text_difference(
    named_texts: Iterable[tuple[str, str]], gather: Gather
) -> tuple[str, list[str]] | None:
    """Return the first name with texts that differ, and the first differing line of each process, or None.

    If the processes have different names, return a name that some of them lack, with "nothing" as their line.
    """
    texts, _ = gather_unequal_texts_and_checksums(json.dumps(list(named_texts)), gather)
    lists = [_parse_named_texts_from_json(text) for text in texts]
    known = [{name for name, _ in each} for each in lists]
    nothing = ("", "nothing")
    for each in zip_longest(*lists, fillvalue=nothing):
        if len(set(each)) > 1:
            names = [name for name, _ in each if name]
            name = next((n for n in names if not all(n in each for each in known)), names[0])
            texts = [text if of == name else nothing[1] for of, text in each]
            lines = zip_longest(*(text.splitlines() for text in texts), fillvalue="nothing more")
            return name, [shorten_text(line) for line in next(line for line in lines if len(set(line)) > 1)]
    return None


def _parse_named_texts_from_json(text: str) -> list[NamedText]:
    """Return the (name, text) pairs in a JSON text. If it is not JSON, return one pair named `compared text`."""
    try:
        return [(name, named_text) for name, named_text in json.loads(text)]
    except ValueError:
        return [("compared text", text)]
