"""List and restore the tensors and optimizer state in a checkpoint of a torch module.

The paths are those of `named_parameters` and `named_buffers`; a slot is `optimizer.<parameter>.<name>`. Buffers that
torch keeps out of state dicts are kept out here. What an optimizer has beside tensors of its parameters, in its groups
and in its state, is among the settings, by the paths of parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.protocol import SavedOptimizer, StoredVariable
from layoutmap.adapters.torch.optimizer_hooks import derive_slot_layout
from layoutmap.adapters.torch.paths import ModelTensor, list_model_tensors, unwrap_compiled_module
from layoutmap.adapters.torch.tensor_classes import (
    find_local_tensor_class,
    find_stored_dtype,
    format_class_name,
    is_composed_of_tensors,
)
from layoutmap.core.blocks import NumpyArray
from layoutmap.core.errors import CheckpointError, LayoutMapWarning, join_names
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.tested import check_names_exist
from layoutmap.engines.torch.element_types import find_torch_dtype, format_dtype, to_numpy, to_torch
from layoutmap.engines.torch.trees import tree_leaves, tree_map

check_names_exist("torch", (torch.nn.Module, "_non_persistent_buffers_set"))

_LOCAL_SETTINGS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Entries of a parameter group that a load does not change: its tensors and how to compute with them."""
_REQUIRED_SLOTS = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
"""By optimizer setting, the slot that the first step then creates, and without which later steps fail."""


# torch creates slots only in the first step, so also list slots that exist only in the checkpoint (decisions/0082).
def list_stored_variables(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, saved: SavedOptimizer | None = None
) -> list[StoredVariable]:
    """Return a model's tensors, its optimizer's slots, and saved slots that a load has to create in the optimizer."""
    model_tensors = list(_iterate_persistent_tensors(model))
    for each in model_tensors:
        _check_tensor_is_dense(each.path, each.tensor)
    tensors = [StoredVariable(_make_tensor_spec(each), each.tensor) for each in model_tensors]
    if optimizer is None:
        return tensors
    parameters = _find_optimizer_parameters(_iterate_named_tensors(model_tensors), optimizer)
    settings = None if saved is None else saved.settings.get("optimizer")
    if settings:
        assert saved is not None
        _check_settings_form(settings, saved)
        settings = rename_paths_in_optimizer_settings(saved.settings)
        _check_settings_form(settings, saved)
        _check_settings_match_optimizer(optimizer, parameters, settings)
        _check_required_slots(settings, saved)
        _warn_of_replaced_settings(optimizer, parameters, settings, saved.settings.get("override", {}))
    # A load removes the slots of parameters without saved state, so do not list these slots.
    with_state = {p: each for p, each in parameters.items() if not settings or p in settings["state"]}
    slots = {each.variable.path: each for each in _iterate_optimizer_slots(with_state, optimizer)}
    for path, each in slots.items():
        _check_tensor_is_dense(path, each.array)
    for spec in () if saved is None else saved.slots:
        slot_key = _split_slot_path(parameters, spec.path)
        if spec.path not in slots and slot_key is not None:
            like = _make_slot_template(parameters[slot_key[0]], slot_key[1], spec)
            slots[spec.path] = StoredVariable(_make_slot_spec(*slot_key, spec.shape, spec.dtype), like)
    return tensors + list(slots.values())


def list_optimizer_slots(
    stored: Sequence[StoredVariable], optimizer: torch.optim.Optimizer | None
) -> list[StoredVariable]:
    """Return the slots that an optimizer has for the tensors of a model, or an empty list without an optimizer."""
    if optimizer is None:
        return []
    models = {each.variable.path: each.variable.model for each in stored}
    parameters = _find_optimizer_parameters(((each.variable.path, each.array) for each in stored), optimizer)
    return [
        StoredVariable(replace(slot.variable, model=models[slot.variable.parent or ""]), slot.array)
        for slot in _iterate_optimizer_slots(parameters, optimizer)
    ]


def _iterate_optimizer_slots(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[StoredVariable]:
    for path, parameter in parameters.items():
        for name, slot in optimizer.state.get(parameter, {}).items():
            if isinstance(slot, torch.Tensor):
                yield StoredVariable(
                    _make_slot_spec(path, name, slot.shape, format_dtype(find_stored_dtype(slot))), slot
                )


def restore_tensors(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    arrays: Iterable[tuple[str, NumpyArray | torch.Tensor]],
) -> None:
    """Assign new values, in pairs of a path and an array, to tensors and slots. Create slots that are missing."""
    saved = list(_iterate_persistent_tensors(model))
    tensors = {each.path: each.tensor for each in saved}
    named = _iterate_named_tensors(saved)
    parameters = {} if optimizer is None else _find_optimizer_parameters(named, optimizer)
    with torch.no_grad():
        for path, array in arrays:
            value = array if isinstance(array, torch.Tensor) else to_torch(array)
            if path in tensors:
                tensors[path].copy_(value)
                continue
            slot_key = _split_slot_path(parameters, path)
            assert optimizer is not None
            assert slot_key is not None
            parameter, name = parameters[slot_key[0]], slot_key[1]
            if name in optimizer.state[parameter]:
                optimizer.state[parameter][name].copy_(value)
            else:  # some optimizers store `step` on the CPU, so do not move it
                is_on_cpu = name == "step" and not _has_step_count_on_device(optimizer, parameter)
                is_unchanged = is_on_cpu or isinstance(value, DTensor)
                optimizer.state[parameter][name] = value if is_unchanged else value.to(parameter.device)


def read_optimizer_settings(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, object] | None:
    """Return an optimizer's groups and state without parameters and tensor slots, or None without an optimizer."""
    if optimizer is None:
        return None
    parameters = _find_optimizer_parameters(
        _iterate_named_tensors(_iterate_persistent_tensors(model)), optimizer
    )
    paths = {id(parameter): path for path, parameter in parameters.items()}
    groups = [
        {
            name: _convert_setting_to_numpy(name, value)
            for name, value in group.items()
            if name not in _LOCAL_SETTINGS
        }
        | {"params": [paths[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state: dict[str, object] = {}
    other: dict[object, object] = {}
    for key, values in optimizer.state.items():
        if not isinstance(key, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            other[key] = _convert_setting_to_numpy(key, values)
        else:
            state[paths[id(key)]] = {  # use paths, because ids and order differ when the state is loaded
                name: _convert_setting_to_numpy(name, value)
                for name, value in values.items()
                if not isinstance(value, torch.Tensor)
            }
    return {"kind": type(optimizer).__name__, "groups": groups, "state": state, "other": other}


def rename_paths_in_optimizer_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the optimizer settings of a checkpoint, with saved paths of parameters replaced by those of the model."""
    new_paths, found = settings.get("renamed", {}), settings["optimizer"]
    groups = [
        {**group, "params": [new for path in group["params"] for new in new_paths.get(path, [path])]}
        for group in found["groups"]
    ]
    state = {new: each for path, each in found["state"].items() for new in new_paths.get(path, [path])}
    return {**found, "groups": groups, "state": state}


def restore_optimizer_settings(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    override: Mapping[str, object],
) -> None:
    """Restore the result of `read_optimizer_settings`. Values in `override` replace saved settings."""
    parameters = _find_optimizer_parameters(
        _iterate_named_tensors(_iterate_persistent_tensors(model)), optimizer
    )
    for group, group_index in zip(
        optimizer.param_groups, _match_saved_groups(optimizer, parameters, settings), strict=True
    ):
        saved: Mapping[str, Any] = {} if group_index is None else settings["groups"][group_index]
        for name, value in {**saved, **(override if saved else {})}.items():
            if name not in _LOCAL_SETTINGS:
                old = group.get(name)
                # A scheduler or a compiled step may reference the tensor, so copy in place.
                if isinstance(old, torch.Tensor):
                    old.copy_(torch.as_tensor(value))
                else:
                    group[name] = _convert_setting_to_torch(value)
    for path, parameter in parameters.items():
        if path in settings["state"]:
            optimizer.state[parameter].update(_convert_setting_to_torch(settings["state"][path]))
        else:
            optimizer.state.pop(parameter, None)
    optimizer.state.update(_convert_setting_to_torch(settings["other"]))


def _warn_of_replaced_settings(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    override: Mapping[str, object],
) -> None:
    """Warn if the load replaces settings that the optimizer was created with by different saved settings."""
    replaced: dict[str, object] = {}
    for group, group_index in zip(
        optimizer.param_groups, _match_saved_groups(optimizer, parameters, settings), strict=True
    ):
        saved: Mapping[str, Any] = {} if group_index is None else settings["groups"][group_index]
        for name in [n for n in saved if n in group and n not in (*_LOCAL_SETTINGS, *override)]:
            # A scheduler changes `lr`, so compare `initial_lr` if it exists.
            name_at_start = "initial_lr" if name == "lr" and "initial_lr" in saved else name
            current = _convert_setting_to_numpy(name, group.get(name_at_start, group[name]))
            value = saved[name_at_start]
            is_cycled = name in ("betas", "momentum") and "max_momentum" in saved
            if not is_cycled and not _are_equal_settings(current, value):
                replaced[name] = f"{current} in code, {value} saved"
    if replaced:
        warnings.warn(
            LayoutMapWarning(
                "the optimizer continues with the saved settings instead of the ones that it was "
                "created with",
                facts=replaced,
                why="a torch optimizer keeps its settings in its state, which a load restores",
                fix=f"create the optimizer with the saved settings, or pass "
                f"override={{{next(iter(replaced))!r}: ...}} to the load",
            ),
            stacklevel=find_user_stacklevel(),
        )


def _are_equal_settings(first: object, second: object) -> bool:
    """Return whether two settings are equal after floats are rounded to the smaller of their types."""
    leaves = tree_leaves(first), tree_leaves(second)
    return len(leaves[0]) == len(leaves[1]) and all(map(_are_equal_leaves, *leaves))


def _are_equal_leaves(first: object, second: object) -> bool:
    arrays = np.asarray(first), np.asarray(second)
    if all(array.dtype.kind == "f" for array in arrays):
        least = min((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
        arrays = arrays[0].astype(least), arrays[1].astype(least)
    return np.array_equal(*arrays)


def _check_settings_form(settings: Any, saved: SavedOptimizer) -> None:
    """Raise if the saved settings do not have the form that `read_optimizer_settings` returns."""
    try:
        parts = [settings["state"], settings["other"], *settings["state"].values(), *settings["groups"]]
        is_valid = all(isinstance(each, Mapping) for each in parts) and isinstance(settings["kind"], str)
        paths = [path for group in settings["groups"] for path in group["params"]]
        is_valid = is_valid and all(isinstance(path, str) for path in paths)
        named = {f"optimizer.{path}.{name}" for path, values in settings["state"].items() for name in values}
        # Tensors are restored as slots, so no setting may have the name of a slot.
        is_valid = is_valid and named.isdisjoint(each.path for each in saved.slots)
        _convert_setting_to_torch(parts)
    except (LookupError, TypeError, AttributeError, ValueError):
        is_valid = False
    if not is_valid:
        raise CheckpointError(
            "the checkpoint has no settings of an optimizer",
            why="its optimizer metadata is missing or has an unknown form",
            fix="load a different step, or leave optimizer out",
        )


def _check_required_slots(settings: Mapping[str, Any], saved: SavedOptimizer) -> None:
    """Raise if a setting, such as `momentum`, needs a slot that the checkpoint does not contain."""
    names = {each.path.rpartition(".")[2] for each in saved.slots}
    override = saved.settings.get("override", {})
    needs = {
        name: slot
        for name, slot in _REQUIRED_SLOTS.items()
        if settings["kind"] != "SGD" or name != "momentum"
    }
    for name, slot in needs.items() if names else ():
        if slot not in names and any({**group, **override}.get(name) for group in settings["groups"]):
            raise CheckpointError(
                f"the checkpoint has no slots {slot}, which {name} needs",
                facts={"slots": join_names(sorted(names))},
                why=f"with {name}, {settings['kind']} reads this slot in each step, and it was not saved",
                fix=f"leave {name} out of override; or leave optimizer out, and begin with new slots",
            )


def _iterate_persistent_tensors(model: torch.nn.Module) -> Iterator[ModelTensor]:
    """Yield the parameters and persistent buffers of a model."""
    for each in list_model_tensors(unwrap_compiled_module(model)):
        if not all(at.name in at.module._non_persistent_buffers_set for at in each.attributes):  # pyright: ignore[reportPrivateUsage]
            yield each


def _iterate_named_tensors(model_tensors: Iterable[ModelTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((each.path, each.tensor) for each in model_tensors)


def _check_tensor_is_dense(path: str, tensor: torch.Tensor) -> None:
    """Raise if a tensor is not a dense tensor with values."""
    kinds = {
        "quantized": tensor.is_quantized,
        "nested": tensor.is_nested,
        "on the meta device": tensor.is_meta,
        f"of {tensor.layout}": tensor.layout is not torch.strided,
        f"a {format_class_name(find_local_tensor_class(tensor))}": is_composed_of_tensors(tensor),
    }
    for kind in (name for name, is_so in kinds.items() if is_so):
        raise CheckpointError(
            f"{path}: a tensor that is {kind} can be neither saved nor loaded",
            why="a checkpoint stores dense blocks of numbers",
            fix="keep a dense tensor with values, and convert it in the forward pass; or keep this tensor out of state "
            "dicts: register_buffer(..., persistent=False)",
        )


def _find_optimizer_parameters(
    paths_and_tensors: Iterable[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return a dict from paths to an optimizer's parameters, in the model's order, or raise if the model lacks one."""
    optimizer_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {path: tensor for path, tensor in paths_and_tensors if id(tensor) in optimizer_ids}
    if len(parameters) < len(optimizer_ids):
        raise CheckpointError(
            f"{type(optimizer).__name__} is not the optimizer of this model",
            facts={"its parameters": len(optimizer_ids), "of these in the model": len(parameters)},
            why="optimizer state is stored by parameter paths, and its parameters are not all in this "
            "model: it belongs to another model, or was created before the model was sharded",
            fix="pass an optimizer that was created with the present model.parameters(), or a module that contains "
            "all of its parameters, such as torch.nn.ModuleList([model, head])",
        )
    return parameters


def _check_settings_match_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], settings: Mapping[str, object]
) -> None:
    """Raise if the saved settings belong to a different class of optimizer, or group the parameters differently."""
    kind = type(optimizer).__name__
    if settings["kind"] != kind:
        raise CheckpointError(
            f"the checkpoint has no state of {kind}",
            facts={"optimizer": kind, "saved": settings["kind"]},
            why="each kind of optimizer has its own slots",
            fix=f"create the saved kind: torch.optim.{settings['kind']}, or leave optimizer out",
        )
    _match_saved_groups(optimizer, parameters, settings)


def _match_saved_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> list[int | None]:
    """Return, for each parameter group, the index of its saved group, or None for a group with only new parameters."""
    saved = {path: number for number, group in enumerate(settings["groups"]) for path in group["params"]}
    paths = {id(parameter): path for path, parameter in parameters.items()}
    matches: list[int | None] = []
    for number, group in enumerate(optimizer.param_groups):
        names = [path for p in group["params"] if (path := paths[id(p)]) in saved]
        numbers = {saved[name]: name for name in names}
        if len(numbers) > 1:
            raise CheckpointError(
                f"group {number} of the optimizer has parameters of several saved groups",
                facts={f"saved in group {of}": name for of, name in numbers.items()},
                why="each saved group has its own learning rate and settings, of which only one can be restored",
                fix="create the optimizer with the saved groups, or leave optimizer out",
            )
        matches.append(next(iter(numbers), None))
    return matches


def _split_slot_path(parameters: Mapping[str, torch.Tensor], path: str) -> tuple[str, str] | None:
    """Split a slot's path into the parameter's path and the slot's name. Return None for an unknown parameter."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 1, -1):
        if (parent := ".".join(parts[1:length])) in parameters:
            return parent, ".".join(parts[length:])
    return None


def _make_slot_template(parameter: torch.Tensor, name: str, slot: VariableSpec) -> torch.Tensor:
    """Return a tensor that gives a slot its shape and layout. Its values are ignored."""
    layout = derive_slot_layout(name, slot.shape, parameter)
    if layout is None:
        return torch.empty(slot.shape, device="meta")
    if tuple(parameter.shape) == slot.shape:
        return parameter
    zeros = torch.zeros(slot.shape, dtype=find_torch_dtype(slot.dtype, slot.path))
    return get_engine("torch").relayout(zeros, layout, pad=True)


def _has_step_count_on_device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether the optimizer stores a parameter's step count on the parameter's device."""
    groups = (g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    return any(group.get("capturable") or group.get("fused") for group in groups)


def _convert_setting_to_numpy(name: object, value: object) -> object:
    """Return the setting `name` of an optimizer with each tensor in it replaced by a numpy array."""
    return tree_map(partial(_convert_leaf_to_numpy, name), value)


def _convert_leaf_to_numpy(name: object, value: object) -> object:
    """Return a tensor as a numpy array, and any other value unchanged. Raise for a sharded tensor."""
    if isinstance(value, DTensor):
        layout = get_engine("torch").get_layout(value)
        # LBFGS stores lists of gradients, which may be replicated DTensors: any shard is the whole tensor.
        if layout is not None and layout.is_fully_replicated():
            return next(get_engine("torch").iterate_shards(value))[1]
        raise CheckpointError(
            f"optimizer: {name!r} in its state or param_groups contains a sharded tensor",
            facts={"shape": tuple(value.shape)},
            why="sharded tensors are saved only if they are slots in the state of a parameter",
            fix="let the optimizer store it as optimizer.state[parameter][name], as AdamW does",
        )
    return to_numpy(value) if isinstance(value, torch.Tensor) else value


def _convert_setting_to_torch(value: object) -> Any:
    """Return a setting with each numpy array in it replaced by a tensor."""
    return tree_map(lambda each: to_torch(each) if hasattr(each, "__array__") else each, value)


def _make_slot_spec(parent: str, name: str, shape: Iterable[int], dtype: str) -> VariableSpec:
    return VariableSpec(f"optimizer.{parent}.{name}", tuple(shape), dtype, Kind.SLOT, parent=parent)


def _make_tensor_spec(model_tensor: ModelTensor) -> VariableSpec:
    kind = Kind.STATE if model_tensor.is_buffer else Kind.WEIGHT
    tensor = model_tensor.tensor
    return VariableSpec(
        model_tensor.path, tuple(tensor.shape), format_dtype(tensor.dtype), kind, tuple(model_tensor.aliases)
    )
