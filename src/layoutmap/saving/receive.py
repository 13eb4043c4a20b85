"""Receive weights that another process streams, and put them into a model all at once: `receive`."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from layoutmap.adapters import (
    CheckpointAdapter,
    find_model_adapter,
    get_adapter,
    get_model_adapter,
    require_capability,
)
from layoutmap.checkpoint.export import MAX_FILE_BYTES
from layoutmap.checkpoint.foreign.safetensors import SafetensorsSource
from layoutmap.checkpoint.foreign.safetensors_export import write_variables
from layoutmap.checkpoint.links import StreamLink, open_stream_link
from layoutmap.checkpoint.model_values import SavedModelValues
from layoutmap.checkpoint.name_tables import NameTable
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.checkpoint.stream_records import BeginRecord, make_stream_error
from layoutmap.core.blocks import Index, NumpyArray
from layoutmap.core.errors import CheckpointError, LayoutMapWarning
from layoutmap.core.interrupts import delay_interrupts
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.saving.load import ModelLoader, find_model_mesh, mention_partial_load_in_errors
from layoutmap.saving.model_source import (
    ModelSource,
    Names,
    read_model_name_table,
    rename_source_and_list_weights,
)
from layoutmap.saving.stream import compute_digest, release_other_processes_at_end
from layoutmap.scope.process_group import MeshProcesses

_KINDS = Kind.WEIGHT, Kind.STATE


def receive(
    model: Any,
    source: object,
    *,
    names: Names = None,
    cast: bool = False,
    library: str | None = None,
    spool: str | None = None,
    timeout_seconds: float = 600.0,
) -> Any:
    """Receive the weights that `stream(...).write` sends, and put all of them into a model at once.

    Before the model changes, all parts have arrived, and their checksums, names, shapes, and dtypes are right. An
    interrupt waits until all weights are in place. Then the sender gets an answer. If several processes share the
    model, all of them call this. The first one reads, and the others may pass any source.

    Args:
        model: Model of any supported library, in any layouts. Or a function such as an engine's `load_weights`, which
            gets an iterable of names and arrays after all of them have arrived.
        source: Other end of the sender's sink: a connected socket, a pair of pipes `(reader, writer)`, or the folder.
        names: Names of the model's variables in the stream; see `load`. `"checkpoint"`: those in the Hugging Face
            checkpoint of a model of transformers or peft.
        cast: Whether to convert values to the dtypes of the model.
        library: For a function: the library of the arrays, such as `"torch"`. `None`: numpy.
        spool: Folder for weights that arrive over a pipe or socket, which need as much space as in the stream. All
            processes of the model must see it. `None`: the system's folder for temporary files.
        timeout_seconds: Longest time without a sign of the sender.

    Returns:
        The model, or a copy with the new weights if it cannot be changed, as a pytree. For a function, its result.

    Raises:
        CheckpointError: A part is missing or damaged, names, shapes, or dtypes differ from those of the model, or the
            sender ended. The model is unchanged, and the sender gets the message.

    Example:
        >>> import concurrent.futures, keras, layoutmap as lm, socket
        >>> def make_model():
        ...     return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")])
        >>> trainer, sampler = make_model(), make_model()
        >>> here, there = socket.socketpair()
        >>> with here, there, concurrent.futures.ThreadPoolExecutor() as threads:
        ...     sent = threads.submit(lm.stream(trainer).write, here)
        ...     lm.receive(sampler, there) is sampler
        True
    """
    if find_model_adapter(model) is None and callable(model):
        return _receive_into_function(model, open_stream_link(source, timeout_seconds), library, spool)
    adapter = require_capability(get_model_adapter(model), CheckpointAdapter, "receive")
    processes = MeshProcesses(get_engine(adapter.engine_name), find_model_mesh(adapter, model))
    table = read_model_name_table(names, model, adapter)
    variables = [each.variable for each in adapter.list_stored_variables(model)]
    with ExitStack() as after_answer, ExitStack() as stack:

        def receive_in_first_process() -> list[str]:
            if processes.process_index:
                return []
            link = open_stream_link(source, timeout_seconds)
            stack.enter_context(_answer_sender_at_end(link))
            scratch = stack.enter_context(_open_temporary_folder(spool))

            def check_model_matches(begin: BeginRecord) -> None:
                try:
                    SavedModelValues(_ReceivedWeights(begin), names=table, cast=cast).check_variables_match(
                        variables, _KINDS
                    )
                except CheckpointError as error:
                    raise CheckpointError(
                        "receive: the weights do not match this model",
                        facts=error.facts,
                        why="names, shapes, or dtypes differ; the model was not changed",
                        fix="stream a matching model, pass a name table as names=, or pass cast=True",
                    ) from error

            return [str(scratch), str(_receive_files(link, scratch, check_model_matches))]

        own = json.dumps(processes.run_in_all_processes(receive_in_first_process, "receive"))
        scratch, folder = map(Path, json.loads(processes.gather_text(own)[0]))
        received = processes.run_in_all_processes(
            lambda: _ReceivedWeights(_read_begin_record(scratch), folder), "receive"
        )
        values = SavedModelValues(received, names=table, cast=cast)
        only = None
        if received.unchanged:
            values.check_variables_match(variables, _KINDS)
            only, kept = _find_changed_variables(values, variables, received.unchanged)
            _store_needed_unchanged_weights(model, table, received.unchanged, kept, scratch / "kept")
            processes.run_in_all_processes(lambda: received.add_files_in_folder(scratch / "kept"), "receive")

        # All values are verified, so only an interrupt could mix old and new values: delay interrupts (decisions/0246).
        @contextmanager
        def delay_interrupts_until_answer() -> Generator[None]:
            after_answer.enter_context(delay_interrupts())
            with mention_partial_load_in_errors():
                yield

        loading = ModelLoader(adapter, values, processes, None, None)
        context = delay_interrupts_until_answer()
        return loading.load_values(model, None, verify_first=True, after_checks=context, only_paths=only)[0]


class _ReceivedWeights(Source):
    """Read the weights of a stream after its files have arrived.

    Args:
        begin: The first record of the stream.
        folder: The folder of the stream's files; `None`: they have not arrived yet.

    Attributes:
        unchanged: Checksums of the weights that are not in the files.
    """

    def __init__(self, begin: BeginRecord, folder: Path | None = None):
        super().__init__("the received weights", {each.path: each for each in begin.list_variables()})
        self.unchanged = begin.unchanged
        self._files: dict[str, SafetensorsSource] = {}
        if folder is not None:
            self.add_files_in_folder(folder)
            sent = {v for v in begin.list_variables() if v.path not in begin.unchanged}
            found = {v for file in self._files.values() for v in file.variables.values()}
            if wrong := {replace(v, aliases=()) for v in sent} ^ found:
                path = min(v.path for v in wrong)
                raise make_stream_error(
                    self.where, f"{path:.200} is missing, or differs from the announced variable"
                )

    def add_files_in_folder(self, folder: Path) -> None:
        """Add the variables in the files of a folder."""
        file = SafetensorsSource(folder)
        self._files |= dict.fromkeys(file.variables, file)

    def iterate_arrays(self) -> Iterator[tuple[str, NumpyArray]]:
        """Yield the name and the array of each weight."""
        for name, file in self._files.items():
            yield name, file.read(name)

    def _read_block(self, variable: SavedVariable, index: Index) -> NumpyArray:
        return self._files[variable.path].read(variable.path, index)

    def _verify_block(self, variable: SavedVariable, index: Index) -> None:
        """Do nothing, because the checksums of the files were verified on arrival."""


def _receive_into_function(
    function: Callable[..., Any], link: StreamLink, library: str | None, spool: str | None
) -> Any:
    """Receive weights, pass them to a function, and return its result."""
    adapter = require_capability(get_adapter(library), CheckpointAdapter, "receive") if library else None
    with _answer_sender_at_end(link), _open_temporary_folder(spool) as scratch:
        folder = _receive_files(link, scratch, lambda begin: None)
        weights = _ReceivedWeights(_read_begin_record(scratch), folder).iterate_arrays()
        return function(weights if adapter is None else ((n, adapter.make_host_array(v)) for n, v in weights))


def _receive_files(link: StreamLink, scratch: Path, check_begin: Callable[[BeginRecord], None]) -> Path:
    """Receive the files of a stream, and return their folder. Store the first record in `scratch`.

    Args:
        link: The connection.
        scratch: An empty folder.
        check_begin: Raises if the stream cannot be used. It is called before the files are read.
    """
    begin = link.receive_begin_record()
    check_begin(begin)
    (scratch / "begin").write_bytes(msgspec.json.encode(begin))
    (scratch / "files").mkdir()
    folder = link.receive_files(begin, scratch / "files")
    _ReceivedWeights(begin, folder)
    return folder


def _read_begin_record(scratch: Path) -> BeginRecord:
    return msgspec.json.decode((scratch / "begin").read_bytes(), type=BeginRecord)


def _find_changed_variables(
    values: SavedModelValues, variables: Iterable[VariableSpec], unchanged: Collection[str]
) -> tuple[set[str], list[str]]:
    """Return a pair: the paths of changed variables, and the names of unchanged tensors that are parts of these."""
    changed: set[str] = set()
    kept: dict[str, None] = {}
    for variable in variables:
        saved = values.find_saved_variable(variable)
        parts = [] if saved is None else values.list_tensor_names(saved)
        if saved is not None and not all(part in unchanged for part in parts):
            changed.add(saved.path)
            kept |= dict.fromkeys(part for part in parts if part in unchanged)
    return changed, list(kept)


def _store_needed_unchanged_weights(
    model: object, table: NameTable | None, unchanged: Mapping[str, str], needed: Sequence[str], folder: Path
) -> None:
    """Compare a model's values with the checksums of unchanged weights, and write the weights in `needed` to files.

    Raises:
        CheckpointError: A value differs, since the model has missed an earlier stream.
    """
    source = ModelSource(model, "receive")
    if not source.is_first_process:
        source.gather_until_released()
        return
    named, _ = rename_source_and_list_weights(source, table)
    with release_other_processes_at_end(source):
        for name, checksum in unchanged.items():
            if compute_digest(named.read(name)) != checksum:
                raise CheckpointError(
                    f"{name}: the sender did not send this unchanged weight, but the model has a different value",
                    why="the model missed an earlier stream, has changed since, or uses a different dtype",
                    fix="send all weights: pass since={} to stream",
                )
        folder.mkdir()
        variables = [named[name] for name in needed]
        write_variables(LocalStorage(folder), "", named, variables, MAX_FILE_BYTES, str)


@contextmanager
def _open_temporary_folder(spool: str | None) -> Generator[Path]:
    """Create a temporary folder for the stream, yield its path, and delete it when the block ends."""
    try:
        scratch = tempfile.TemporaryDirectory(prefix="layoutmap-", dir=spool)
    except OSError as error:
        raise CheckpointError(
            f"spool={spool!r}: no temporary folder can be created there",
            why=f"the system says: {error.strerror or error}",
            fix="pass a folder that exists and is writable",
        ) from error
    with scratch:
        yield Path(scratch.name)


@contextmanager
def _answer_sender_at_end(link: StreamLink) -> Generator[None]:
    """Answer the sender when the block ends: with success, or with the error that the block raised."""
    try:
        yield
    except BaseException as error:
        with suppress(CheckpointError):
            link.send_answer(str(error) or repr(error))
        raise
    try:
        link.send_answer()
    except CheckpointError as error:
        warning = LayoutMapWarning(
            "receive: the sender could not be told that the weights arrived",
            facts={"answer": error.what},
            why="the model has the new weights, but the connection to the sender failed",
            fix="look for an error in the output of the sender",
        )
        warnings.warn(warning, stacklevel=find_user_stacklevel())
