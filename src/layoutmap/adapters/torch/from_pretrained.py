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
from layoutmap.engines.patches import Attribute, Closing, Patches
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.trees import is_sequence

TESTED = "5.23"

_REFUSED = ("device_map", "tp_plan", "tp_size", "distributed_config", "quantization_config", "gguf_file")
"""Arguments with which transformers itself would place or quantize weights."""


# transformers reads full tensors, so patch it to read only this process's shards (decisions/0096).
class FromPretrainedPatches(Closing):
    """Patches for `from_pretrained` while a scope is open, or none if transformers is not imported."""

    _used: Closing | None = None

    def open(self) -> None:
        """Apply the patches, and import transformers' model classes first so that all of them are patched."""
        if "transformers.models.auto.modeling_auto" in sys.modules:
            importlib.import_module("transformers.modeling_utils")
        self.update()

    def update(self) -> None:
        """Install the patches if transformers has been imported meanwhile."""
        if self._used is None and "transformers.modeling_utils" in sys.modules:
            self._used = _make_patches().activate()
            self._used.__enter__()

    def close(self) -> None:
        """Remove the patches."""
        used, self._used = self._used, None
        if used is not None:
            used.close()


@functools.cache
def _make_patches() -> Patches:
    from transformers import PreTrainedModel, core_model_loading

    loading = Attribute(PreTrainedModel, "from_pretrained", _wrap_from_pretrained)
    has_name = hasattr(core_model_loading, "spawn_materialize")
    return Patches(
        [loading, *[Attribute(core_model_loading, "spawn_materialize", _wrap_spawn_materialize)] * has_name]
    )


def _find_session() -> Any:
    """Return the open scope's session for torch modules, or None."""
    session = get_current_session()
    return session if session is not None and session.library == "torch" else None


def _wrap_from_pretrained(plain: Any) -> object:
    @functools.wraps(plain.__func__)
    def from_pretrained(cls: type, *args: object, **options: object) -> object:
        if _find_session() is None:
            return plain.__get__(None, cls)(*args, **options)
        for name in _REFUSED:
            if options.get(name) is not None:
                given = {name: shorten_repr(options[name])}
                raise _make_scope_error(
                    f"{cls.__name__}.from_pretrained: {name}= is passed in a scope", given
                )
        _probe(cls)
        loaded = plain.__get__(None, cls)(*args, **options)  # bind the classmethod to the calling class
        model = loaded[0] if is_sequence(loaded) else loaded
        if getattr(model, "hf_quantizer", None) is not None:
            raise _make_scope_error(f"{cls.__name__}.from_pretrained: the weights are quantized", {})
        return loaded

    return classmethod(from_pretrained)  # pyright: ignore[reportUnknownVariableType]


def _probe(cls: type) -> None:
    import transformers
    from transformers import core_model_loading

    known = inspect.signature(getattr(core_model_loading, "spawn_materialize", lambda: None)).parameters
    if list(known)[1:4] != ["tensor", "device", "dtype"]:
        raise ScopeError(
            f"{cls.__name__}.from_pretrained: transformers {transformers.__version__} is not supported",
            facts={"missing": "core_model_loading.spawn_materialize(thread_pool, tensor, device, dtype)"},
            why="each process would read all of each weight",
            fix=f'pip install "transformers=={TESTED}.*", or load with layoutmap.load(make_model, directory)',
        )


def _make_scope_error(what: str, facts: dict[str, str]) -> ScopeError:
    return ScopeError(
        what,
        facts=facts,
        why="the layout map places each weight, and a scope supports only dense tensors",
        fix="leave it out, and use rules: LayoutMap.from_tp_plan converts the model's own plan",
    )


def _wrap_spawn_materialize(plain: Function) -> Function:
    @functools.wraps(plain)
    def spawn_materialize(
        thread_pool: Any, tensor: Any, device: Any = None, dtype: Any = None, **options: Any
    ) -> Any:
        session = _find_session()
        if session is None:
            return plain(thread_pool, tensor, device, dtype, **options)

        def read() -> torch.Tensor:  # transformers calls this on the current thread
            return session.read_later(lambda: tensor[...]).to(dtype=dtype)

        return read

    return spawn_materialize
