"""Compare, by shapes, the state of an optimizer for a sharded weight with that for the unsharded weight.

Some optimizers choose a slot by the tensor that they see: AdamW8bit of torchao keeps float32 below 4,096 elements. Of a
`DTensor` they see one shard, choose another slot than one device, and step differently without an error. So a copy of
the optimizer steps meta tensors before the first step: once as on one device, and once as `DTensor`s.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters import random_states
from layoutmap.adapters.torch.swap import list_user_attributes
from layoutmap.adapters.torch.tensor_classes import PLAIN_CLASSES, find_local_tensor_class, format_class_name
from layoutmap.core.errors import ScopeError
from layoutmap.core.layout import Layout
from layoutmap.engines import get_engine
from layoutmap.engines.torch.element_types import format_dtype
from layoutmap.engines.torch.modes import TorchDispatchMode, suspend_function_modes
from layoutmap.engines.torch.operators import list_written_arguments
from layoutmap.engines.torch.specs import get_local, get_spec, make_dtensor
from layoutmap.engines.torch.storages import get_storage_key
from layoutmap.engines.torch.trees import tree_leaves, tree_map


@dataclass(frozen=True, slots=True)
class SlotForm:
    """The class, dtype, and global shape of a tensor that is a slot of an optimizer."""

    class_name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.class_name} of {self.dtype}, {self.shape}"


Slots = Mapping[str, Any]
"""From the name of each slot to a `SlotForm`, nested like the slot."""

_TENSOR = "Tensor"
# In the dry run of a step, tensors of at most so many elements keep their values, since the step may read them, such
# as a learning rate. Larger ones become meta tensors.
_MAX_COPIED = 4096
_NOT_COPIED = ("state", "param_groups")


# A wrong step would change the weights, so let a copy of the optimizer step meta tensors first (decisions/0044).
def check_slots_match_unsharded(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer would choose different slots for a sharded weight than for the unsharded weight.

    Nothing is changed: the steps are those of a copy, on tensors without values.

    Raises:
        ScopeError: The slots differ, or a slot is of a special tensor class.
    """
    engine = get_engine("torch")
    done: set[object] = set()
    for group in optimizer.param_groups:
        settings = str({name: value for name, value in group.items() if name != "params"})
        for parameter in group["params"]:
            if not isinstance(parameter, DTensor) or not parameter.requires_grad:
                continue
            layout = engine.get_layout(parameter)
            key = (settings, tuple(parameter.shape), parameter.dtype, layout)
            if layout is None or key in done:
                continue
            done.add(key)
            full, unsharded_failed = _run_step_on_copy(optimizer, group, _make_unsharded_meta_copy(parameter))
            sharded, sharded_failed = _run_step_on_copy(optimizer, group, _make_sharded_meta_copy(parameter))
            # A step that needs values or a closure fails, maybe before it creates all slots, so compare common slots.
            if unsharded_failed or sharded_failed:
                full, sharded = (
                    {name: each[name] for name in full.keys() & sharded} for each in (full, sharded)
                )
            _check_equal_slots(optimizer, parameter, layout, full, sharded)


def _make_unsharded_meta_copy(parameter: DTensor) -> torch.nn.Parameter:
    meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return _make_meta_parameter(meta, parameter)


def _make_sharded_meta_copy(parameter: DTensor) -> torch.nn.Parameter:
    meta = torch.empty_like(get_local(parameter).detach(), device="meta")
    return _make_meta_parameter(make_dtensor(meta, get_spec(parameter)), parameter)


def _make_meta_parameter(meta: torch.Tensor, parameter: torch.Tensor) -> torch.nn.Parameter:
    """Return a meta tensor as a parameter with a gradient and with the user's attributes of `parameter`."""
    new = torch.nn.Parameter(meta)
    new.grad = torch.empty_like(meta)
    # Optimizers may read attributes that the user's code set on parameters, so copy them.
    for name, value in list_user_attributes(parameter).items():
        if name not in vars(new):
            setattr(new, name, value)
    return new


def _run_step_on_copy(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.nn.Parameter
) -> tuple[Slots, bool]:
    """Run a step of a copied optimizer on a meta tensor. Return the forms of the slots, and whether the step failed."""
    failed = False
    torch_state = torch.get_rng_state()
    try:
        with (
            _ExistingTensorWriteCheck() as write_check,
            random_states.preserve_python_and_numpy_states(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            copied = _copy_optimizer(optimizer, group, parameter, write_check)
            try:
                _run_step_without_hooks(copied)
            except Exception:  # a step that needs values or a closure fails; the real step reports its errors
                failed = True
            slots = copied.state[parameter]
            slot_kinds = {name: tree_map(_find_slot_form, slot) for name, slot in slots.items()}
    finally:
        torch.set_rng_state(torch_state)
    return slot_kinds, failed


def _run_step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run one optimizer step without hooks, function modes, and compilation."""
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    with torch.compiler.set_stance("force_eager"), suspend_function_modes():
        step(optimizer)


def _copy_optimizer(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameter: torch.nn.Parameter,
    write_check: _ExistingTensorWriteCheck,
) -> torch.optim.Optimizer:
    """Copy an optimizer without its state and with only one parameter."""
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))

    def copy_leaf(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return write_check.copy_tensor_for_dry_run(value)
        if isinstance(value, torch.optim.Optimizer) and value is not optimizer:
            return _copy_optimizer(value, group, parameter, write_check)
        if isinstance(value, types.MethodType) and value.__self__ is optimizer:
            return types.MethodType(value.__func__, copied)
        return value

    for name, value in vars(optimizer).items():
        if name not in _NOT_COPIED and not name.endswith("_hooks"):
            vars(copied)[name] = tree_map(copy_leaf, value)
    for name in (each for each in vars(optimizer) if each.endswith("_hooks")):
        vars(copied)[name] = {}  # a `step` that calls `super().step` would run hooks twice, so drop them
    copied.state = defaultdict(dict)
    settings = {name: tree_map(copy_leaf, value) for name, value in group.items() if name != "params"}
    copied.param_groups = [{**settings, "params": [parameter]}]
    return copied


class _ExistingTensorWriteCheck(TorchDispatchMode):
    """Raise if an operator writes to a tensor with values that existed before the block."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._new_storages: dict[int, torch.UntypedStorage] = {}  # ids are reused, so keep storages alive

    def copy_tensor_for_dry_run(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a small tensor with its values, or a meta tensor of the shape of a large one."""
        if type(tensor) in PLAIN_CLASSES and tensor.numel() <= _MAX_COPIED:
            return tensor.detach().clone()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        for position, name in list_written_arguments(func):
            for each in tree_leaves(args[position] if position < len(args) else kwargs.get(name)):
                if (
                    isinstance(each, torch.Tensor)
                    and not each.is_meta
                    and get_storage_key(each) not in self._new_storages
                ):
                    raise RuntimeError(
                        "a dry run of an optimizer step would change a tensor of the user's code"
                    )
        result = func(*args, **kwargs)
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and not each.is_meta:
                # A tensor subclass may have no storage, and then needs no entry.
                with contextlib.suppress(RuntimeError):
                    self._new_storages[get_storage_key(each)] = each.untyped_storage()
        return result


def _find_slot_form(value: object) -> object:
    """Return the `SlotForm` of a tensor, or the name of the type of any other value."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    kind = find_local_tensor_class(value)
    name = _TENSOR if kind in PLAIN_CLASSES else format_class_name(kind)
    return SlotForm(name, format_dtype(value.dtype), tuple(value.shape))


def _check_equal_slots(
    optimizer: torch.optim.Optimizer, parameter: DTensor, layout: Layout, unsharded: Slots, sharded: Slots
) -> None:
    """Raise if slots differ between the sharded and the unsharded weight, or if one is of a special tensor class."""
    kind = type(optimizer).__name__
    facts = {"weight": f"{tuple(parameter.shape)}  {layout}"}
    fix = "use an optimizer whose state is plain tensors of the weight's shape, such as torch.optim.AdamW"
    for name in dict.fromkeys((*unsharded, *sharded)):
        expected, actual = unsharded.get(name), sharded.get(name)
        if expected != actual:
            raise ScopeError(
                f"{kind}: its state {name} for a sharded weight differs in form from that on one device",
                facts={**facts, "one device": _format_form(expected), "sharded": _format_form(actual)},
                why="it chooses its state from the shape of the shard, so its steps would differ from "
                "those on one device",
                fix=fix if _has_special_class(expected) else f"leave this weight unsharded; or {fix}",
            )
        if _has_special_class(actual):
            raise ScopeError(
                f"{kind}: its state {name} for a sharded weight is of a special tensor class",
                facts={**facts, name: _format_form(actual)},
                why="the elements of such a tensor may depend on any value of the weight, so its shards "
                "may differ from those on one device",
                fix=fix,
            )


def _has_special_class(form: object) -> bool:
    return any(isinstance(each, SlotForm) and each.class_name != _TENSOR for each in tree_leaves(form))


def _format_form(form: object) -> str:
    return "none" if form is None else str(form)
