"""Stream the weights of a model to an inference engine or to another process: `stream`."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from layoutmap.checkpoint.foreign.safetensors_export import write_variables
from layoutmap.checkpoint.links import open_stream_link
from layoutmap.checkpoint.stream_records import BeginRecord, StreamedVariable
from layoutmap.core.blocks import NumpyArray
from layoutmap.core.errors import CheckpointError
from layoutmap.saving.model_source import (
    ModelSource,
    Names,
    read_model_name_table,
    rename_source_and_list_weights,
)

_MIN_FILE_BYTES = 1 << 30
_MAX_FILES = 256  # the receiver keeps all files open, and the system limits the number of open files


def stream(
    model: object,
    *,
    names: Names = None,
    processes: Literal["all", "first"] = "all",
    since: Mapping[str, str] | None = None,
) -> Stream:
    """Return an iterable of the weights of a model, for an inference engine or a different process.

    Each weight is gathered when the iteration reaches it, so a process holds one unsharded variable at a time, besides
    those that the caller keeps. Moving statistics are included. Random states and optimizer slots are not. A tied
    weight comes once. If several processes share the model, all of them iterate, or all of them call `write`.

    Args:
        model: Model of any supported library.
        names: Names of the variables. `None`: their paths. `"checkpoint"`: those in the Hugging Face checkpoint of a
            model of transformers or peft, with separate experts, and for peft only the adapters. Or a table, such as
            `"llama"`; see `load`.
        processes: Processes to which an iteration yields: `"all"`, or only the `"first"`.
        since: `checksums` of an earlier stream: only weights that differ from them are yielded or sent. `{}`: all
            weights, and their checksums are computed. `None`: all weights, without checksums.

    Returns:
        An iterable of names and arrays: `torch.Tensor` on the host for a torch model, else `numpy.ndarray`. It can be
        iterated again after the model was updated.

    Raises:
        CheckpointError: The table has no line for a variable, or the model has no checkpoint format.
        RuleError: The table cannot be read.

    Example:
        >>> import keras, layoutmap as lm
        >>> layout_map = lm.LayoutMap(lm.create_mesh("model=4"), {r".*\\.kernel": (None, "model")})
        >>> model = layout_map.build(lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")]))
        >>> for name, array in lm.stream(model):
        ...     print(name, array.shape)
        d1.kernel (8, 16)
        d1.bias (16,)
        >>> weights = lm.stream(model, since={})
        >>> len(dict(weights)), len(dict(lm.stream(model, since=weights.checksums)))
        (2, 0)
    """
    if processes not in ("all", "first"):
        raise CheckpointError(
            f"processes={processes!r}: this value is not allowed",
            why="processes must be 'all' or 'first'",
            fix='leave processes out, or pass processes="first"',
        )
    return Stream(model, names, processes, since)


class Stream:
    """Iterate over the weights of a model by name, or send all weights to another process. See `stream`.

    Attributes:
        checksums: The checksum of each weight, after an iteration or `write` with `since`.
    """

    def __init__(self, model: object, names: Names, processes: str, since: Mapping[str, str] | None):
        self._model = model
        self._in_all = processes == "all"
        self._since = since
        self.checksums: dict[str, str] = {}
        source = ModelSource(model, "stream")
        self._adapter = source.adapter
        self._table = read_model_name_table(names, model, source.adapter)
        # Try the names, so that an error is raised here, before the first iteration.
        rename_source_and_list_weights(source, self._table)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Gather and yield each weight. All processes of the model must iterate to the end."""
        source = ModelSource(self._model, "stream")
        if self._in_all:
            source.enable_reads_in_all_processes()
        elif not source.is_first_process:
            source.gather_until_released()
            return
        named, variables = rename_source_and_list_weights(source, self._table)
        self.checksums = {}
        with release_other_processes_at_end(source):
            for variable in variables:
                # The caller may keep and modify the values, so copy them.
                values = np.array(named.read(variable.path))
                if self._since is not None:
                    self.checksums[variable.path] = checksum = compute_digest(values)
                    if self._since.get(variable.path) == checksum:
                        continue
                yield variable.path, self._adapter.make_host_array(values)

    def write(self, sink: object, *, timeout_seconds: float = 600.0) -> None:
        """Send all weights to `receive` in another process, and wait until its model has them.

        With several processes, the first one sends, and the others may pass any sink.

        Args:
            sink: A connected socket, a pair of pipes `(reader, writer)`, or a folder that both processes see. The
                library opens no port. It uses the file descriptor of a socket or pipe and leaves it open.
            timeout_seconds: Longest time without a sign of the receiver. It must cover the time that the receiver needs
                to put the weights into its model.

        Raises:
            CheckpointError: The receiver refused the weights, ended, or does not answer in time. Or a value cannot be
                read. With several processes, all of them raise it.
        """
        source = ModelSource(self._model, "stream")
        if not source.is_first_process:
            source.gather_until_released()
            return
        named, variables = rename_source_and_list_weights(source, self._table)
        with release_other_processes_at_end(source):
            link = open_stream_link(sink, timeout_seconds)
            since = self._since or {}
            digests = (
                ()
                if self._since is None
                else ((v.path, compute_digest(named.read(v.path))) for v in variables)
            )
            checksums = dict(digests)
            unchanged = {path: each for path, each in checksums.items() if since.get(path) == each}
            begin = BeginRecord(
                {v.path: StreamedVariable(v.dtype, v.shape, v.aliases) for v in variables}, unchanged
            )
            most = max(_MIN_FILE_BYTES, begin.sent_bytes // _MAX_FILES)
            sent = [v for v in variables if v.path not in unchanged]
            with link.open_stream(begin) as (storage, folder):
                write_variables(storage, folder, named, sent, most, str)
            self.checksums = checksums


# A checksum collision would leave a stale weight unnoticed, so 32 bits are too few (decisions/0246).
def compute_digest(values: NumpyArray) -> str:
    """Return a checksum of a variable's values, to detect changes."""
    return blake2b(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, digest_size=16).hexdigest()


@contextmanager
def release_other_processes_at_end(source: ModelSource) -> Generator[None]:
    """After the block, release the other processes, which gather each variable that this process reads in the block."""
    is_complete = False
    try:
        yield
        is_complete = True
    except GeneratorExit:  # the caller stopped iterating early
        is_complete = True
        raise
    finally:
        source.release_other_processes(is_complete=is_complete)
