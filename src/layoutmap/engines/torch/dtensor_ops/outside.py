"""Correct operations on DTensors outside a model's calls, where no function mode runs.

Once a tensor on a mesh exists, operators are guarded, plain tensors count as replicated, and these are corrected:

tensor[2:4].zero_()      torch changes a copy if the axis is sharded: `memories` writes it back
tensor.data = value      torch assigns to the wrapper of a DTensor, and its local tensor keeps the old values
model.double(), .to(...) torch swaps DTensors, which fails if a graph or a weak reference has one
tensor[index] = value    torch changes a copy if the axis is sharded
tensor.numpy(), tolist() torch supports them only for plain tensors
copy.deepcopy(tensor)    torch fails for a DTensor that starts inside of a storage, such as a gradient of `fully_shard`
tensor.data_ptr()        torch returns 0, or by `__dlpack__` any address, so a kernel would use arbitrary memory
torch.compile            torch fails for results with placements that only views have
torch.optim.Muon         torch multiplies shards in bfloat16, whose sums are rounded in another order, and gathers often
FlopCounterMode          torch counts operators of DTensors for the global tensors, and others for one device
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import BackwardHook

from layoutmap.core.errors import EngineError, LayoutMapWarning
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.engines.patches import AttributePatch
from layoutmap.engines.tested import ImportErrorConverter, check_names_exist
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.changes import install_patches
from layoutmap.engines.torch.dtensor_ops import conversions
from layoutmap.engines.torch.dtensor_ops.gathered import compute_prod, gather_and_wait
from layoutmap.engines.torch.dtensor_ops.guard import (
    correct_operators_on_mesh,
    has_corrected_operators,
    sharding_query,
)
from layoutmap.engines.torch.dtensor_ops.local_values import check_value_is_not_shard
from layoutmap.engines.torch.dtensor_ops.memories import check_no_slice_is_outdated
from layoutmap.engines.torch.dtensor_ops.mode import (
    enable_dtensor_ops_temporarily,
    set_replicates_plain_tensors,  # pyright: ignore[reportPrivateUsage]
)
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.operators import Args, Function, Kwargs, OpOverload
from layoutmap.engines.torch.placing import (
    gather_if_sharded,
    is_replicated,
    redistribute_if_needed,
    replace_partial_placements,
    shard_like,
)
from layoutmap.engines.torch.specs import (
    get_local,
    get_spec,
    make_dtensor,
    mark_strided_shards_of_view,
    set_local_tensor,
)
from layoutmap.engines.torch.trees import tree_leaves
from layoutmap.engines.torch.unseen import get_storage, increment_change_counter, mark_changes_as_hidden

with ImportErrorConverter("torch"):
    from torch.distributed.tensor import _api
    from torch.optim import _muon as _of_muon
    from torch.utils.flop_counter import _FlopCounterMode as FlopCounting  # pyright: ignore[reportPrivateUsage]

check_names_exist("torch", (BackwardHook, "_unpack_none"), (_of_muon, "_zeropower_via_newtonschulz"))


# A program may use weights outside a model's call, so torch is patched for the mesh (decisions/0151).
def install_patches_for_mesh(device_mesh: DeviceMesh) -> None:
    """Patch torch so that DTensors on a mesh compute correctly outside of `enable_dtensor_ops_temporarily`, too."""
    if not has_corrected_operators(device_mesh):
        correct_operators_on_mesh(device_mesh)
        install_patches(*_PATCHES)


@skip_function_modes
@torch.no_grad()
def _assign_data(original: Callable[..., None], tensor: DTensor, value: torch.Tensor) -> None:
    """Replace `tensor.data = value`: set the values of a DTensor that keeps its layout."""
    if has_corrected_operators(tensor.device_mesh):
        if value.shape != tensor.shape:
            raise EngineError(
                "tensor.data = value: a tensor on a mesh would change its shape",
                facts={"from": tuple(tensor.shape), "to": tuple(value.shape)},
                why="its layout belongs to its present shape",
                fix="give the module another parameter: module.weight = torch.nn.Parameter(value)",
            )
        if isinstance(value, DTensor) and value.device_mesh == tensor.device_mesh:
            value = redistribute_if_needed(value, replace_partial_placements(tensor.placements))
        else:
            value = shard_like(gather_if_sharded(value), tensor)
        if tensor.is_leaf:  # autograd may have saved the tensor's old values, and must then raise in backward
            increment_change_counter(get_storage(tensor))
        set_local_tensor(tensor, get_local(value), get_spec(value))
    original(tensor, value)


@skip_function_modes
@torch.no_grad()
# Conversions such as `model.double()` swap tensors, so a swap must also exchange the layouts (decisions/0151).
def _swap_tensors(original: Callable[..., None], t1: torch.Tensor, t2: torch.Tensor) -> None:
    """Replace `torch.utils.swap_tensors(t1, t2)`: swap the values, types, and layouts of two DTensors."""
    both = [
        each for each in (t1, t2) if isinstance(each, DTensor) and has_corrected_operators(each.device_mesh)
    ]
    if len(both) < 2:
        original(t1, t2)
        return
    contents = [(get_local(each), get_spec(each)) for each in both]
    set_shell: Callable[..., None] = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    for each, (local, spec) in zip(both, reversed(contents), strict=True):
        if each.is_leaf:
            # A backward pass that needs the old values must raise.
            increment_change_counter(get_storage(each))
        set_shell(each, make_dtensor(local, spec))
        set_local_tensor(each, local, spec)


def _assign_item(original: Callable[..., None], tensor: DTensor, index: object, value: object) -> None:
    """Replace `tensor[index] = value`: assign inside of `enable_dtensor_ops_temporarily`."""
    if not has_corrected_operators(tensor.device_mesh):
        original(tensor, index, value)
        return
    with (
        simulation.simulate_ranks_of_mesh(tensor.device_mesh),
        enable_dtensor_ops_temporarily(tensor.device_mesh),
    ):
        original(tensor, index, value)


def _copy_dtensor(original: Function, tensor: DTensor, memo: dict[int, object]) -> object:
    """Replace `copy.deepcopy(tensor)`: clone a DTensor that starts inside of its storage, which torch cannot copy."""
    if id(tensor) in memo or not has_corrected_operators(tensor.device_mesh) or not tensor.storage_offset():
        return original(tensor, memo)
    made = memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return made


@skip_function_modes
def _call_on_gathered_tensor(original: Function, tensor: DTensor, *args: object, **options: object) -> object:
    """Replace a method that torch supports only for unsharded tensors: call it on the gathered tensor."""
    if not has_corrected_operators(tensor.device_mesh):
        return original(tensor, *args, **options)
    check_no_slice_is_outdated(original.__name__, tensor)
    return original(gather_and_wait(tensor), *args, **options)


def _format_scalar(original: Callable[..., str], tensor: DTensor, format_spec: str) -> str:
    """Replace `f"{tensor:.3f}"`: format the value of a scalar DTensor."""
    is_number = tensor.ndim == 0 and has_corrected_operators(tensor.device_mesh)
    if is_number and (format_spec or is_replicated(tensor)):
        return format(tensor.item(), format_spec)
    return original(tensor, format_spec)


def _get_address_or_raise(original: Function, tensor: DTensor, *args: object, **kwargs: object) -> object:
    """Replace `tensor.data_ptr()`: raise, because a kernel would take a shard on the mesh for the global tensor."""
    caller = sys._getframe(find_user_stacklevel({"functools"}) - 1)  # pyright: ignore[reportPrivateUsage]
    asked_in = caller.f_globals.get("__name__")
    # `copy.deepcopy` only compares addresses, and does not read them, so return torch's answer.
    if not has_corrected_operators(tensor.device_mesh) or asked_in == "torch._tensor":
        return original(tensor, *args, **kwargs)
    # For cuDNN, torch's RNN would pack its weights into one storage. It skips this if two weights have the same
    # address, so return the same number for all weights.
    if asked_in == "torch.nn.modules.rnn":
        return 0
    raise EngineError(
        f"{caller.f_code.co_qualname}: reads the address of a tensor on a mesh (data_ptr)",
        facts={"shape": tuple(tensor.shape), "layout": str(tensor.placements)},
        why="a kernel would take this device's shard for the whole tensor",
        fix="pass tensor.full_tensor(), or register the kernel as an operator with torch.library.custom_op "
        "or triton_op: it then runs on gathered tensors, also in the backward pass",
    )


@skip_function_modes
def _compute_muon_update(
    original: Callable[..., torch.Tensor], gradient: torch.Tensor, *options: object
) -> object:
    """Replace the orthogonalization of Muon: compute it from the gathered gradient, equally on each device."""
    if not isinstance(gradient, DTensor) or not has_corrected_operators(gradient.device_mesh):
        return original(gradient, *options)
    return shard_like(original(gather_if_sharded(gradient), *options), gradient)


def _unflatten_tensor(original: Function, pieces: object, metadata: Args, *geometry: object) -> object:
    """Replace `DTensor.__tensor_unflatten__`: also rebuild DTensors with strided shards that only views have."""
    try:
        return original(pieces, metadata, *geometry)
    except ValueError:
        placements, meta, order, requires_grad = metadata
        tensor = original(pieces, (placements, meta, None, requires_grad), *geometry)
        mark_strided_shards_of_view(get_spec(tensor), order)
        return tensor


# This attribute is set on a `FlopCounterMode` that has warned, so that it warns only once.
_WARNED = "_layoutmap_said"


@skip_function_modes
def _count_flops(
    original: Function,
    mode: object,
    func: OpOverload,
    types: object,
    args: Args = (),
    kwargs: Kwargs | None = None,
) -> object:
    """Replace the operator hook of `FlopCounterMode`: count the operations of one device."""
    if sharding_query.is_running:
        return func(*args, **(kwargs or {}))
    leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
    each = next((each for each in leaves if has_corrected_operators(each.device_mesh)), None)
    if each is None:
        found = original(mode, func, types, args, kwargs)
        # The mode returns NotImplemented for operators that read sizes and strides of simulated ranks, so call these
        # directly.
        return func(*args, **(kwargs or {})) if found is NotImplemented and not types else found
    if not hasattr(mode, _WARNED):
        setattr(mode, _WARNED, True)
        warning = LayoutMapWarning(
            "FlopCounterMode counts the operations of one device",
            facts={"mesh": str(tuple(each.device_mesh.shape))},
            why="each device computes its shards, and replicated values are computed by several devices",
            fix="to count the operations of the whole batch, use the unsharded model",
        )
        warnings.warn(warning, stacklevel=find_user_stacklevel({"torch", "functools"}))
    return NotImplemented  # DTensor then calls operators on shards, which the mode counts


def _register_tensor_hook(original: Function, tensor: DTensor, hook: Function) -> object:
    """Replace `tensor.register_hook(hook)`: refuse a hook that returns a shard as the gradient."""

    @functools.wraps(hook)
    def call_and_check_hook(gradient: torch.Tensor | None) -> object:
        # Autograd passes None if only other weights of the same gather have a gradient, so do not call the hook.
        if gradient is None:
            return None
        result = hook(gradient)
        check_value_is_not_shard("a gradient from a hook", result)
        return result

    return original(tensor, call_and_check_hook if has_corrected_operators(tensor.device_mesh) else hook)


def _check_hook_results(original: Function, hook: object, indices: object, values: Any) -> object:
    """Replace the method that unpacks a module backward hook's results: refuse shards among them."""
    for each in tree_leaves(values):
        check_value_is_not_shard("a gradient from a backward hook", each)
    return original(hook, indices, values)


def _make_method_patch(name: str, replacement: Function, owner: object = DTensor) -> AttributePatch:
    """Return a patch of a method. `replacement` gets the original method as its first argument."""

    def make_replacement(original: Function) -> object:
        return functools.wraps(original)(lambda *args, **kwargs: replacement(original, *args, **kwargs))

    return AttributePatch(owner, name, make_replacement)


def _make_static_method_factory(replacement: Function) -> Callable[[Any], object]:
    """Return a function that makes a static method. `replacement` gets the original function as an argument."""
    return lambda original: staticmethod(
        functools.wraps(original.__func__)(functools.partial(replacement, original.__func__))
    )


class _DistributeTensorPatch:
    """Patch `distribute_tensor` by replacing its code object, because programs import the function itself."""

    _NAME = "layoutmap_distribute"
    _CODE = distribute_tensor.__code__

    def install(self) -> None:
        """Replace the code object."""
        copy = FunctionType(self._CODE, _api.__dict__, "distribute_tensor", distribute_tensor.__defaults__)
        copy.__kwdefaults__ = distribute_tensor.__kwdefaults__
        setattr(_api, self._NAME, functools.partial(conversions.distribute_tensor, copy))
        distribute_tensor.__code__ = _call_layoutmap_distribute.__code__

    def remove(self) -> None:
        """Restore torch's code object."""
        distribute_tensor.__code__ = self._CODE
        if hasattr(_api, self._NAME):
            delattr(_api, self._NAME)


# `distribute_tensor` gets this function's code, and runs it with the globals of its module, which then contain
# `layoutmap_distribute`.
def _call_layoutmap_distribute(
    tensor: Any, device_mesh: Any = None, placements: Any = None, *, src_data_rank: Any = 0
) -> Any:
    return layoutmap_distribute(  # noqa: F821 # pyright: ignore[reportUndefinedVariable, reportUnknownVariableType]
        tensor, device_mesh, placements, src_data_rank=src_data_rank
    )


class _ReplicateUnshardedPatch:
    """Make unsharded tensors in calls with DTensors count as replicated, on the thread that installs this patch."""

    def install(self) -> None:
        """Make unsharded tensors count as replicated."""
        set_replicates_plain_tensors(True)

    def remove(self) -> None:
        """Restore torch's refusal of unsharded tensors beside DTensors."""
        set_replicates_plain_tensors(False)


_PATCHES = (
    AttributePatch(
        DTensor,
        "data",
        lambda original: property(
            lambda tensor: mark_changes_as_hidden(original.__get__(tensor)),
            functools.partial(_assign_data, original.__set__),
        ),
    ),
    _make_method_patch("swap_tensors", _swap_tensors, torch.utils),
    _make_method_patch("__setitem__", _assign_item),
    AttributePatch(
        DTensor,
        "__tensor_unflatten__",
        lambda original: staticmethod(functools.partial(_unflatten_tensor, original)),
    ),
    _make_method_patch("__deepcopy__", _copy_dtensor),
    _make_method_patch("data_ptr", _get_address_or_raise),
    _make_method_patch("__dlpack__", _get_address_or_raise),
    _make_method_patch("full_tensor", conversions.full_tensor),
    _make_method_patch("redistribute", conversions.redistribute),
    _make_method_patch("to_local", conversions.to_local),
    AttributePatch(DTensor, "from_local", _make_static_method_factory(conversions.from_local)),
    _DistributeTensorPatch(),
    _make_method_patch("register_hook", _register_tensor_hook),
    _make_method_patch("_unpack_none", _check_hook_results, BackwardHook),
    _make_method_patch("numpy", _call_on_gathered_tensor),
    _make_method_patch("tolist", _call_on_gathered_tensor),
    _make_method_patch("__format__", _format_scalar),
    _make_method_patch("prod", lambda original, *args, **kwargs: compute_prod(original, args, kwargs)),  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    _make_method_patch("__torch_dispatch__", _count_flops, FlopCounting),
    _make_method_patch("_zeropower_via_newtonschulz", _compute_muon_update, _of_muon),
    _ReplicateUnshardedPatch(),
)
