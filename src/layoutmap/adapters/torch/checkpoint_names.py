"""Find the names, shapes, and axes of a transformers or peft model in its Hugging Face checkpoint.

transformers stacks experts and fuses weights after it reads a checkpoint, and reverts that to save. The reverted
tensors are views of the model's tensors, except for copies that make a view contiguous. So strides tell which part of
which tensor each of them is.

The names of transformers that are no part of its documentation, all in this file; tested on transformers 5.24:

transformers.core_model_loading     revert_weight_conversion(model, state_dict)
transformers.modeling_utils         remove_tied_weights_from_state_dict(state_dict, model)
PreTrainedModel                     _keys_to_ignore_on_save
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from layoutmap.adapters.protocol import StoredVariable
from layoutmap.core.errors import CheckpointError
from layoutmap.engines.torch.element_types import find_torch_dtype
from layoutmap.engines.torch.modes import TorchDispatchMode
from layoutmap.engines.torch.storages import get_storage_key

TESTED = "5.24"


def list_checkpoint_names(
    model: Any, stored: Sequence[StoredVariable]
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return, for each variable, the names and axes of the saved tensors that contain parts of it.

    Args:
        model: A model of transformers or peft.
        stored: Its variables.

    Returns:
        Pairs of a path and of (name, axes), such as `("experts.0.w1.weight", "a b -> 0/8 (0/2 a) b")`. A variable that
        the checkpoint does not contain has none.

    Raises:
        CheckpointError: The model is of another library, or a tensor of its checkpoint is not a part of one variable.
    """
    meta_tensors: dict[str, torch.Tensor] = {}
    paths: dict[int, tuple[str, torch.Tensor]] = {}
    for each in stored:
        variable = each.variable
        dtype = find_torch_dtype(variable.dtype, variable.path)
        tensor = torch.empty(variable.shape, dtype=dtype, device="meta")
        paths[get_storage_key(tensor)] = variable.path, tensor
        meta_tensors |= dict.fromkeys((variable.path, *variable.aliases), tensor)
    with _ContiguousViewMode():
        saved_tensors = _list_tensors_to_save(model, dict(meta_tensors))
    names: dict[str, list[tuple[str, str]]] = {each.variable.path: [] for each in stored}
    for name, tensor in saved_tensors.items():
        path, variable_tensor = paths.get(get_storage_key(tensor), ("", tensor))
        axes = _format_axes_of_view(tensor, variable_tensor) if path else None
        if axes is None:
            raise CheckpointError(
                f"{name}: this tensor of the checkpoint is not a part of one variable",
                facts={"shape": (*tensor.shape,), "model": type(model).__name__},
                why="transformers joins it from several variables, or computes it",
                fix="export with model.save_pretrained, or pass names= with your own table",
            )
        names[path].append((name, axes))
    num_elements = dict.fromkeys(names, 0)
    for tensor in saved_tensors.values():
        num_elements[paths[get_storage_key(tensor)][0]] += tensor.numel()
    for path, tensor in paths.values():
        if num_elements[path] not in (0, tensor.numel()):
            raise CheckpointError(
                f"{path}: transformers saves only a part of this variable",
                facts={"shape": (*tensor.shape,), "names": ", ".join(name for name, _ in names[path][:3])},
                why="transformers computes the rest after a load, by padding or repeating",
                fix="export with model.save_pretrained, or pass names= with your own table",
            )
    return [*names.items()]


def _list_tensors_to_save(model: Any, state: dict[str, Any]) -> Mapping[str, torch.Tensor]:
    """Return a dict from names to the tensors that transformers or peft would save for the state of a model."""
    peft, transformers = sys.modules.get("peft"), sys.modules.get("transformers")
    if peft is not None and isinstance(model, peft.PeftModel):
        return peft.get_peft_model_state_dict(model, state_dict=state)
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        raise CheckpointError(
            f'names="checkpoint": {type(model).__name__} has no checkpoint format',
            why="only models of transformers and peft provide the names in their checkpoints",
            fix='pass a table, such as names="llama", or leave names out',
        )
    try:
        revert = import_module("transformers.core_model_loading").revert_weight_conversion
        remove_tied = import_module("transformers.modeling_utils").remove_tied_weights_from_state_dict
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f'names="checkpoint": transformers {transformers.__version__} is not supported',
            why=str(error),
            fix=f'pip install "transformers=={TESTED}.*", or pass names= with your own table',
        ) from error
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    return revert(model, remove_tied(state, model))


class _ContiguousViewMode(TorchDispatchMode):
    """Make `contiguous` return the view itself, because its strides tell which part of the model's tensor it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **kwargs or {})


# A view only moves values, so its strides tell exactly which part of a tensor it is. A name table made from strides
# serves loads and saves, also of single blocks (decisions/0245).
def _format_axes_of_view(part: torch.Tensor, whole: torch.Tensor) -> str | None:
    """Return how the axes of a view relate to those of a contiguous tensor, as text, or `None` if they do not.

    Example:
        >>> whole = torch.empty(8, 6, 4, device="meta")
        >>> _format_axes_of_view(whole[1, 3:].T, whole)
        'a0 a1 -> 1/8 (1/2 a1) a0'
    """
    offset = int(part.storage_offset())
    matched_axes: set[int] = set()
    axis_texts: list[str] = []
    for size, stride in zip(whole.shape, whole.stride(), strict=True):
        start, offset = divmod(offset, stride)
        candidates = [n for n in range(part.ndim) if n not in matched_axes and part.stride(n) == stride]
        match = next((n for n in candidates if part.shape[n] == size), next(iter(candidates), None))
        length = 1 if match is None else part.shape[match]
        if not length or size % length or start % length or part.dtype != whole.dtype:
            return None
        name_texts = [] if match is None else [f"a{match}"]
        block_text = [f"{start // length}/{size // length}"] if length < size or not name_texts else []
        text = " ".join([*block_text, *name_texts])
        axis_texts.append(f"({text})" if block_text and name_texts else text)
        matched_axes |= set() if match is None else {match}
    if len(matched_axes) < part.ndim:
        return None
    return f"{' '.join(f'a{n}' for n in range(part.ndim))} -> {' '.join(axis_texts)}"
