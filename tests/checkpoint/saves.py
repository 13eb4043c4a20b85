"""Saves of numpy arrays, by one process or several, for tests of what goes wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from layoutmap.checkpoint.manifest import Manifest
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.remote import open_storage
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.checkpoint.step_writer import StepWriter, check_space_and_create_step_folder
from layoutmap.checkpoint.storage import make_random_token
from layoutmap.checkpoint.writer import WriteTask
from layoutmap.core.blocks import Index, NumpyArray

Values = Mapping[str, NumpyArray]


def values_of(seed: int, shape: tuple[int, ...] = (64, 32)) -> dict[str, NumpyArray]:
    """A model of two variables; another for each seed."""
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=shape).astype(np.float32) for path in ("d1.kernel", "d2.kernel")}


def nothing(path: str) -> None:
    """What a test does before a variable is written, if it does nothing."""


def writers(
    directory: str | os.PathLike[str],
    step: int,
    values: Values,
    count: int = 1,
    *,
    patience_seconds: float = 60,
    before: Callable[[int, str], object] = lambda number, path: None,
) -> list[StepWriter]:
    """What each process does for a step: it writes its rows of each array.

    Args:
        directory: Where to.
        step: The step.
        values: The arrays, by path.
        count: How many processes there are.
        patience_seconds: How long they wait for one another.
        before: Called with the number of a process and a path before a variable is read.
    """
    token = make_random_token()
    variables = [SavedVariable(path, array.shape, array.dtype.name) for path, array in values.items()]
    total_bytes = sum(array.nbytes for array in values.values())
    first = open_storage(directory)
    folder = check_space_and_create_step_folder(first, step, token, total_bytes)

    def read(number: int, path: str, index: Index) -> Iterator[tuple[Index, NumpyArray]]:
        before(number, path)
        yield index, values[path][index]

    def todo_of(number: int) -> Iterator[WriteTask]:
        for variable in variables:
            rows, rest = variable.shape[0] // count, [slice(0, n) for n in variable.shape[1:]]
            index = (slice(number * rows, (number + 1) * rows), *rest)
            yield WriteTask(variable, [index], lambda v=variable, i=index: read(number, v.path, i))

    try:
        return [
            StepWriter(
                open_storage(directory) if number else first,
                folder,
                Manifest(step, {"id": token}, None, {}, (), variables, {}),
                list(todo_of(number)),
                total_bytes=total_bytes,
                process_index=number,
                num_processes=count,
                patience_seconds=patience_seconds,
            )
            for number in range(count)
        ]
    except BaseException:
        first.discard_step(step, token)
        raise


def save(directory: str | os.PathLike[str], step: int, values: Values) -> None:
    """Save arrays as one process does."""
    (writer,) = writers(directory, step, values)
    with writer:
        writer.write_step()


def is_good(directory: str | os.PathLike[str], step: int, values: Values) -> bool:
    """Whether a step has these values, all checked."""
    found = StepSource(open_storage(directory), step)
    found.check_file_sizes()
    assert [] == list(found.iterate_damage())
    return all(np.array_equal(found.read(path), array) for path, array in values.items())


def names_in(directory: Path) -> list[str]:
    """What is in a directory, hidden files too."""
    return sorted(os.listdir(directory))
