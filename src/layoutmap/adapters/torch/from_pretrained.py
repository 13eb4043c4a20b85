"""Support transformers' `from_pretrained` in a scope: each process reads only its shards from the files.

transformers builds a model without values, and then reads each tensor, on threads of its own, converts it and puts it
in its place. In a scope it is given deferred tensors to convert. They are recorded as all others are, so that of a
mapped file no more is read than what the shards of this process are made of, and that when the scope ends.

The names of transformers that are no part of its documentation, all in this file; tested on transformers 5.23:

transformers.core_model_loading     spawn_materialize(thread_pool, tensor, device, dtype, ...): gives a function that
                                    reads a tensor, called on the thread of `from_pretrained`
PreTrainedModel                     hf_quantizer: how a model is quantized
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from typing import Any

import torch

from layoutmap.adapters.current import get_current_session
from layoutmap.core.errors import ScopeError, shorten_repr
from layoutmap.engines.patches import AttributePatch, PatchGroup, SelfClosingContext
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.trees import is_sequence

TESTED = "5.23"

_REFUSED = ("device_map", "tp_plan", "tp_size", "distributed_config", "quantization_config", "gguf_file")
"""Arguments with which transformers itself would place or quantize weights."""


# transformers reads full tensors, so patch it to read only this process's shards (decisions/0096).
class FromPretrainedPatches(SelfClosingContext):
    """PatchGroup for `from_pretrained` while a scope is open, or no patches if transformers is not imported."""

    _active_patches: SelfClosingContext | None = None

    def open_context(self) -> None:
        """Apply the patches, and import transformers' model classes first so that all of them are patched."""
        if "transformers.models.auto.modeling_auto" in sys.modules:
            importlib.import_module("transformers.modeling_utils")
        self.install_if_imported()

    def install_if_imported(self) -> None:
        """Install the patches if the user's code has imported transformers and they are not installed yet."""
        if self._active_patches is None and "transformers.modeling_utils" in sys.modules:
            self._active_patches = _make_transformers_patches().activate()
            self._active_patches.__enter__()

    def close_context(self) -> None:
        """Remove the patches."""
        used, self._active_patches = self._active_patches, None
        if used is not None:
            used.close_context()


@functools.cache
def _make_transformers_patches() -> PatchGroup:
    from transformers import PreTrainedModel, core_model_loading

    loading = AttributePatch(PreTrainedModel, "from_pretrained", _wrap_from_pretrained)
    has_name = hasattr(core_model_loading, "spawn_materialize")
    return PatchGroup(
        [
            loading,
            *[AttributePatch(core_model_loading, "spawn_materialize", _wrap_spawn_materialize)] * has_name,
        ]
    )


def _find_torch_session() -> Any:
    """Return the open scope's session for torch modules, or None."""
    session = get_current_session()
    return session if session is not None and session.library == "torch" else None


def _wrap_from_pretrained(original: Any) -> object:
    @functools.wraps(original.__func__)
    def from_pretrained(cls: type, *args: object, **options: object) -> object:
        if _find_torch_session() is None:
            return original.__get__(None, cls)(*args, **options)
        for name in _REFUSED:
            if options.get(name) is not None:
                facts = {name: shorten_repr(options[name])}
                raise _make_from_pretrained_error(
                    f"{cls.__name__}.from_pretrained: {name}= cannot be used in a scope", facts
                )
        _check_transformers_version(cls)
        loaded = original.__get__(None, cls)(*args, **options)  # bind the classmethod to the calling class
        model = loaded[0] if is_sequence(loaded) else loaded
        if getattr(model, "hf_quantizer", None) is not None:
            raise _make_from_pretrained_error(
                f"{cls.__name__}.from_pretrained: the weights are quantized", {}
            )
        return loaded

    return classmethod(from_pretrained)  # pyright: ignore[reportUnknownVariableType]


def _check_transformers_version(cls: type) -> None:
    """Raise if this release of transformers reads tensors through another function than the patched one."""
    import transformers
    from transformers import core_model_loading

    parameters = inspect.signature(getattr(core_model_loading, "spawn_materialize", lambda: None)).parameters
    if list(parameters)[1:4] != ["tensor", "device", "dtype"]:
        raise ScopeError(
            f"{cls.__name__}.from_pretrained: transformers {transformers.__version__} is not supported",
            facts={"missing": "core_model_loading.spawn_materialize(thread_pool, tensor, device, dtype)"},
            why="layoutmap cannot patch how this release reads tensors, so each process would read whole weights",
            fix=f'pip install "transformers=={TESTED}.*", or load with layoutmap.load(make_model, directory)',
        )


def _make_from_pretrained_error(subject: str, facts: dict[str, str]) -> ScopeError:
    return ScopeError(
        subject,
        facts=facts,
        why="the layout map decides where each weight is stored, and a scope supports only dense tensors",
        fix="leave such arguments out, load dense weights, and shard them by rules, as from LayoutMap.from_tp_plan",
    )


def _wrap_spawn_materialize(original: Function) -> Function:
    @functools.wraps(original)
    def spawn_materialize(
        thread_pool: Any, tensor: Any, device: Any = None, dtype: Any = None, **options: Any
    ) -> Any:
        session = _find_torch_session()
        if session is None:
            return original(thread_pool, tensor, device, dtype, **options)

        def make_deferred_tensor() -> torch.Tensor:  # called on the thread of `from_pretrained`
            return session.defer_file_read(lambda: tensor[...]).to(dtype=dtype)

        return make_deferred_tensor

    return spawn_materialize
