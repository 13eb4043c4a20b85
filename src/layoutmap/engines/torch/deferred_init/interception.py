"""Intercept events besides operations for a tape: value reads, deep copies, and module conversions.

Torch's dispatcher sees none of these events. The modes are those of one thread; `torch.nn.Module._apply` is
replaced while a tape records on some thread, and asks which tapes record on its own.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from layoutmap.core.errors import EngineError
from layoutmap.engines.patches import AttributePatch, PatchGroup, SelfClosingContext
from layoutmap.engines.tested import check_names_exist
from layoutmap.engines.torch.modes import TorchDispatchMode, list_dispatch_modes, list_function_modes
from layoutmap.engines.torch.modules import get_parameters_and_buffers
from layoutmap.engines.torch.operators import Args, Function
from layoutmap.engines.torch.storages import get_storage_key

check_names_exist("torch", (torch.nn.Module, "_apply"))


@contextmanager
def intercept_operations(tape: Any, fake_mode: Any) -> Generator[None]:
    """Send this thread's operations, value reads, deep copies, and module conversions to a tape, within a `with` block.

    Args:
        tape: The `Tape`. A type annotation would be a circular import.
        fake_mode: The tape's own fake tensor mode, which is left at the end if an interrupt left it active.
    """
    modes = _ValueReadInterceptionMode(tape), _OperationRecordingMode(tape)
    with _intercept_module_conversions(tape), _RecordingModes(*modes, inner=fake_mode):
        yield


class _RecordingModes(SelfClosingContext):
    """Enter several torch modes. Closing also leaves modes that an interrupt left on torch's stacks."""

    def __init__(self, *modes: Any, inner: Any) -> None:
        self._modes = modes
        self._inner = (
            inner  # `close_context` also ends this mode, because an interrupt may have left it active
        )
        self._thread = threading.get_ident()

    def open_context(self) -> None:
        # A recording may have ended on another thread, which could not remove its modes from this thread, so remove
        # them now.
        for mode in (*list_function_modes(), *list_dispatch_modes()):
            if (
                isinstance(mode, (_ValueReadInterceptionMode, _OperationRecordingMode))
                and not mode.tape.is_recording
            ):
                _leave_mode(mode)
        for mode in self._modes:
            mode.__enter__()

    def close_context(self) -> None:
        if threading.get_ident() == self._thread:
            for mode in (self._inner, *reversed(self._modes)):
                _leave_mode(mode)


def _leave_mode(mode: Any) -> None:
    """Leave one mode of this thread. Modes that were entered after it are also left, and then entered again."""
    for modes in (list_function_modes(), list_dispatch_modes()):
        places = [place for place, each in enumerate(modes) if each is mode]
        for each in reversed(modes[places[-1] :] if places else []):
            each.__exit__(None, None, None)  # pyright: ignore[reportUnknownMemberType]
        for each in modes[places[-1] + 1 :] if places else []:
            each.__enter__()


class _OperationRecordingMode(TorchDispatchMode):
    """Dispatch mode that passes each operation to a tape, which runs or records it."""

    def __init__(self, tape: Any) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.tape = tape

    def __torch_dispatch__(self, func: Function, types: object, args: Args = (), kwargs: Any = None) -> Any:
        return self.tape.run_or_record_operation(func, args, kwargs or {})


_SET_DATA = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
_COPIES = (torch.Tensor.__deepcopy__,)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_READS = {getattr(torch.Tensor, name) for name in ("numpy", "tolist", "__array__", "__reduce_ex__")}


class _ValueReadInterceptionMode(TorchFunctionMode):
    """Intercept tensor methods that read values or addresses without an operation of torch's dispatcher."""

    def __init__(self, tape: Any) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.tape = tape

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES and self.tape.is_deferred(args[0]):
            return _copy_deferred_tensor(*args)
        if func is torch.Tensor.data_ptr and self.tape.is_deferred(args[0]):
            # A deferred tensor has no address, so return a number that differs between storages and between offsets in
            # a storage.
            return get_storage_key(args[0]) + args[0].storage_offset() * args[0].itemsize
        if func == _SET_DATA:
            return func(args[0], self._convert_assigned_data(*args))
        if func in _READS and self.tape.is_deferred(args[0]):
            return func(self.tape.evaluate_deferred_tensors(args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _convert_assigned_data(self, tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """Return the data to assign in `tensor.data = data`: deferred if the tensor is deferred, else with values."""
        if self.tape.is_deferred(tensor) == self.tape.is_deferred(data):
            return data
        return (
            self.tape.defer_tensor(data)
            if self.tape.is_deferred(tensor)
            else self.tape.evaluate_deferred_tensors(data)
        )


def _copy_deferred_tensor(tensor: torch.Tensor, memo: dict[int, torch.Tensor]) -> torch.Tensor:
    """Replace `copy.deepcopy` of a deferred tensor: return a deferred copy."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
    with torch.no_grad():
        values = tensor.detach().clone(memory_format=torch.preserve_format)
    if isinstance(tensor, torch.nn.Parameter):
        copy: torch.Tensor = torch.nn.Parameter(values, tensor.requires_grad)
    else:
        copy = values.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = copy
    return copy


# -- modules that convert their tensors

_open = threading.local()  # weak references to the tapes that record on this thread


def _list_recording_tapes() -> list[Any]:
    # After an interrupt, the list may contain references to deleted tapes, so skip these.
    return [t for ref in getattr(_open, "tapes", ()) if (t := ref()) is not None and t.is_recording]


@contextmanager
def _intercept_module_conversions(tape: Any) -> Generator[None]:
    """Make `Module.to` and similar methods convert deferred parameters while the `with` block runs."""
    with _APPLY.activate():
        before = _list_recording_tapes()
        try:
            _open.tapes = tuple(map(weakref.ref, (*before, tape)))
            yield
        finally:
            _open.tapes = tuple(ref for ref in getattr(_open, "tapes", ()) if ref() not in (None, tape))


def _make_apply_for_deferred_parameters(original: Function) -> Function:
    @functools.wraps(original)
    def _apply(module: torch.nn.Module, fn: Function, recurse: bool = True) -> object:
        tapes = _list_recording_tapes()
        parameters, _ = get_parameters_and_buffers(module)
        every = dict(parameters)
        held = {
            key: each
            for key, each in every.items()
            if each is not None and any(t.is_deferred(each) for t in tapes)
        }
        if recurse and tapes:
            for child in module.children():
                child._apply(fn)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
        if not held:
            return original(module, fn, recurse and not tapes)
        for key, parameter in held.items():
            with torch.no_grad():
                converted = fn(parameter)
            if not any(tape.is_deferred(converted) for tape in tapes):
                raise EngineError(
                    f"{type(module).__name__}.{key} is moved to {converted.device} before it has values",
                    why="deferred tensors are created later, each shard on the device of its layout",
                    fix="leave out the move: the mesh determines the devices",
                )
            parameter.data = converted
        for key in held:
            del parameters[key]
        try:
            original(module, fn, False)
        finally:
            rest = dict(parameters)
            parameters.clear()
            parameters.update({key: rest.get(key, each) for key, each in every.items()})
        return module

    return _apply


_APPLY = PatchGroup([AttributePatch(torch.nn.Module, "_apply", _make_apply_for_deferred_parameters)])
