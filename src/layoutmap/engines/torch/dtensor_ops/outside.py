"""Correct operations on DTensors outside a model's calls, where no function mode runs.

From the first tensor on a mesh on, operators are guarded, plain tensors count as replicated, and these are right:

tensor[2:4].zero_()      torch changes a copy where the axis is sharded: `memories` writes it back
tensor.data = value      torch assigns to the shell of a DTensor only, which goes on with the values that it had
model.double(), .to(...) torch swaps DTensors, which it cannot where a graph or a weak reference has one
tensor[index] = value    torch changes a copy where the axis is sharded
tensor.numpy(), tolist() torch refuses them of all that is no plain tensor
copy.deepcopy(tensor)    torch fails for one that begins inside of a storage, as gradients of `fully_shard` do
tensor.data_ptr()        torch gives 0, and by `__dlpack__` any memory: a kernel would read and write what is there
torch.compile            torch fails for results that are sharded as views are
torch.optim.Muon         multiplies shards in bfloat16, whose sums are rounded in another order, and gathers often
FlopCounterMode          torch counts an operator of DTensors as one of global tensors, and others as a device's
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
from layoutmap.engines.patches import Attribute
from layoutmap.engines.tested import Needed, check_names
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.changes import change
from layoutmap.engines.torch.dtensor_ops import conversions
from layoutmap.engines.torch.dtensor_ops.gathered import compute_product, gather_and_wait
from layoutmap.engines.torch.dtensor_ops.guard import guard_mesh, is_guarded, sharding_query
from layoutmap.engines.torch.dtensor_ops.local_values import refuse_shard
from layoutmap.engines.torch.dtensor_ops.memories import refuse_outdated
from layoutmap.engines.torch.dtensor_ops.mode import enable_dtensor_ops, set_replicates_plain_tensors  # pyright: ignore[reportPrivateUsage]
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.operators import Args, Function, Kwargs, OpOverload
from layoutmap.engines.torch.placing import (
    full_tensor,
    is_replicated,
    move_to_placements,
    place_like,
    reduce_placements,
)
from layoutmap.engines.torch.specs import get_local, get_spec, make_dtensor, mark_view_spec, set_pieces
from layoutmap.engines.torch.trees import tree_leaves
from layoutmap.engines.torch.unseen import count, get_memory, hide_changes

with Needed("torch"):
    from torch.distributed.tensor import _api
    from torch.optim import _muon as _of_muon
    from torch.utils.flop_counter import _FlopCounterMode as FlopCounting  # pyright: ignore[reportPrivateUsage]

check_names("torch", (BackwardHook, "_unpack_none"), (_of_muon, "_zeropower_via_newtonschulz"))


# Programs also use weights outside a model's call, so torch is patched for the mesh (decisions/0151).
def prepare_mesh(device_mesh: DeviceMesh) -> None:
    """Patch torch so that DTensors on a mesh compute correctly also outside of `enable_dtensor_ops`.

    Args:
        device_mesh: The mesh.
    """
    if not is_guarded(device_mesh):
        guard_mesh(device_mesh)
        change(*_CHANGES)


@skip_function_modes
@torch.no_grad()
def _assign_data(own: Callable[..., None], tensor: DTensor, value: torch.Tensor) -> None:
    """Replace `tensor.data = value`: set a DTensor's values, and keep its layout."""
    if is_guarded(tensor.device_mesh):
        if value.shape != tensor.shape:
            raise EngineError(
                "tensor.data = value: a tensor on a mesh would change its shape",
                facts={"from": tuple(tensor.shape), "to": tuple(value.shape)},
                why="its layout belongs to its present shape",
                fix="give the module another parameter: module.weight = torch.nn.Parameter(value)",
            )
        if isinstance(value, DTensor) and value.device_mesh == tensor.device_mesh:
            value = move_to_placements(value, reduce_placements(tensor.placements))
        else:
            value = place_like(full_tensor(value), tensor)
        if tensor.is_leaf:  # autograd may have saved the tensor
            count(get_memory(tensor))
        set_pieces(tensor, get_local(value), get_spec(value))
    own(tensor, value)


@skip_function_modes
@torch.no_grad()
# Conversions such as `model.double()` must work, so a swap exchanges layouts too (decisions/0151).
def _swap_tensors(own: Callable[..., None], t1: torch.Tensor, t2: torch.Tensor) -> None:
    """Replace `torch.utils.swap_tensors(t1, t2)`: swap values, types, and layouts of two DTensors."""
    both = [each for each in (t1, t2) if isinstance(each, DTensor) and is_guarded(each.device_mesh)]
    if len(both) < 2:
        own(t1, t2)
        return
    contents = [(get_local(each), get_spec(each)) for each in both]
    set_shell: Callable[..., None] = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    for each, (local, spec) in zip(both, reversed(contents), strict=True):
        if each.is_leaf:
            count(get_memory(each))  # autograd may have saved the tensor
        set_shell(each, make_dtensor(local, spec))
        set_pieces(each, local, spec)


def _assign_item(own: Callable[..., None], tensor: DTensor, index: object, value: object) -> None:
    """Replace `tensor[index] = value`: run it inside `enable_dtensor_ops`."""
    if not is_guarded(tensor.device_mesh):
        own(tensor, index, value)
        return
    with simulation.simulate_mesh(tensor.device_mesh), enable_dtensor_ops(tensor.device_mesh):
        own(tensor, index, value)


def _copy_tensor(own: Function, tensor: DTensor, memo: dict[int, object]) -> object:
    """Replace `copy.deepcopy(tensor)`: clone a tensor that starts inside its storage."""
    if id(tensor) in memo or not is_guarded(tensor.device_mesh) or not tensor.storage_offset():
        return own(tensor, memo)
    made = memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return made


@skip_function_modes
def _call_on_gathered(own: Function, tensor: DTensor, *args: object, **options: object) -> object:
    """Call a method that torch has only for unsharded tensors, on the gathered tensor."""
    if not is_guarded(tensor.device_mesh):
        return own(tensor, *args, **options)
    refuse_outdated(own.__name__, tensor)
    return own(gather_and_wait(tensor), *args, **options)


def _format_scalar(own: Callable[..., str], tensor: DTensor, format_spec: str) -> str:
    """Replace `f"{tensor:.3f}"`: format a scalar DTensor, which torch supports only for unsharded tensors."""
    is_number = tensor.ndim == 0 and is_guarded(tensor.device_mesh)
    if is_number and (format_spec or is_replicated(tensor)):
        return format(tensor.item(), format_spec)
    return own(tensor, format_spec)


def _refuse_address(own: Function, tensor: DTensor, *args: object, **kwargs: object) -> object:
    """Raise for `tensor.data_ptr()`, through which kernels would read a shard as the global tensor."""
    asking = sys._getframe(find_user_stacklevel({"functools"}) - 1)  # pyright: ignore[reportPrivateUsage]
    asked_in = asking.f_globals.get("__name__")
    # `copy.deepcopy` only compares the address.
    if not is_guarded(tensor.device_mesh) or asked_in == "torch._tensor":
        return own(tensor, *args, **kwargs)
    # cuDNN packs recurrent weights into one storage unless two share an address.
    if asked_in == "torch.nn.modules.rnn":
        return 0
    raise EngineError(
        f"{asking.f_code.co_qualname}: the address of a tensor on a mesh",
        facts={"shape": tuple(tensor.shape), "layout": str(tensor.placements)},
        why="each device has its shards in its own memory, and the kernel's use of them is unknown",
        fix="make the kernel an operator with torch.library.custom_op or triton_op, which runs on "
        "gathered tensors, also in the backward pass; or pass tensor.full_tensor()",
    )


@skip_function_modes
def _compute_muon_update(
    own: Callable[..., torch.Tensor], gradient: torch.Tensor, *options: object
) -> object:
    """Return Muon's update from the gathered gradient, computed by each process."""
    if not isinstance(gradient, DTensor) or not is_guarded(gradient.device_mesh):
        return own(gradient, *options)
    return place_like(own(full_tensor(gradient), *options), gradient)


def _rebuild_tensor(own: Function, pieces: object, known: Args, *form: object) -> object:
    """Return the DTensor of a compiled graph's pieces. Strided shards of a view are marked as such."""
    try:
        return own(pieces, known, *form)
    except ValueError:
        placements, meta, order, requires_grad = known
        tensor = own(pieces, (placements, meta, None, requires_grad), *form)
        mark_view_spec(get_spec(tensor), order)
        return tensor


_WARNED = "_layoutmap_said"  # attribute of a counting mode that has warned


@skip_function_modes
def _count_flops(
    own: Function,
    mode: object,
    func: OpOverload,
    types: object,
    args: Args = (),
    kwargs: Kwargs | None = None,
) -> object:
    """Run an operator under `FlopCounterMode`, which counts the operations of one device."""
    if sharding_query.is_open:
        return func(*args, **(kwargs or {}))
    leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
    each = next((each for each in leaves if is_guarded(each.device_mesh)), None)
    if each is None:
        found = own(mode, func, types, args, kwargs)
        # The mode does not handle sizes and strides, which simulated devices query by operators.
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
    return NotImplemented  # the mode sees the operators on shards


def _register_hook(own: Function, tensor: DTensor, hook: Function) -> object:
    """Register a hook that must not return a shard as the gradient."""

    @functools.wraps(hook)
    def check_result(gradient: torch.Tensor) -> object:
        result = hook(gradient)
        refuse_shard("a gradient from a hook", result)
        return result

    return own(tensor, check_result if is_guarded(tensor.device_mesh) else hook)


def _check_hook_results(own: Function, hook: object, places: object, values: Any) -> object:
    """Refuse shards among the gradients that a module's backward hook returns."""
    for each in tree_leaves(values):
        refuse_shard("a gradient from a backward hook", each)
    return own(hook, places, values)


def _patch_method(name: str, instead: Function, of: object = DTensor) -> Attribute:
    """Return the patch that calls a function in place of a method, with torch's own method first."""

    def make_replacement(own: Function) -> object:
        return functools.wraps(own)(lambda *args, **kwargs: instead(own, *args, **kwargs))

    return Attribute(of, name, make_replacement)


def _patch_static(instead: Function) -> Callable[[Any], object]:
    """Return a maker of a static method that calls a function with torch's own method first."""
    return lambda own: staticmethod(functools.wraps(own.__func__)(functools.partial(instead, own.__func__)))


class _Distributing:
    """Patch `distribute_tensor` by replacing its code, because programs import the function itself."""

    _NAME = "layoutmap_distribute"
    _CODE = distribute_tensor.__code__

    def install(self) -> None:
        """Replace the code."""
        own = FunctionType(self._CODE, _api.__dict__, "distribute_tensor", distribute_tensor.__defaults__)
        own.__kwdefaults__ = distribute_tensor.__kwdefaults__
        setattr(_api, self._NAME, functools.partial(conversions.distribute_tensor, own))
        distribute_tensor.__code__ = _distribute.__code__

    def remove(self) -> None:
        """Put torch's code back."""
        distribute_tensor.__code__ = self._CODE
        if hasattr(_api, self._NAME):
            delattr(_api, self._NAME)


# The function's globals are those of torch's module.
def _distribute(
    tensor: Any, device_mesh: Any = None, placements: Any = None, *, src_data_rank: Any = 0
) -> Any:
    return layoutmap_distribute(  # noqa: F821 # pyright: ignore[reportUndefinedVariable, reportUnknownVariableType]
        tensor, device_mesh, placements, src_data_rank=src_data_rank
    )


class _PlainTensorsReplicated:
    """Treat unsharded tensors as replicated next to DTensors, on the thread that installs this."""

    def install(self) -> None:
        """Start to treat them as replicated."""
        set_replicates_plain_tensors(True)

    def remove(self) -> None:
        """Let torch refuse them again."""
        set_replicates_plain_tensors(False)


_CHANGES = (
    Attribute(
        DTensor,
        "data",
        lambda own: property(
            lambda tensor: hide_changes(own.__get__(tensor)), functools.partial(_assign_data, own.__set__)
        ),
    ),
    _patch_method("swap_tensors", _swap_tensors, torch.utils),
    _patch_method("__setitem__", _assign_item),
    Attribute(
        DTensor, "__tensor_unflatten__", lambda own: staticmethod(functools.partial(_rebuild_tensor, own))
    ),
    _patch_method("__deepcopy__", _copy_tensor),
    _patch_method("data_ptr", _refuse_address),
    _patch_method("__dlpack__", _refuse_address),
    _patch_method("full_tensor", conversions.full_tensor),
    _patch_method("redistribute", conversions.redistribute),
    _patch_method("to_local", conversions.to_local),
    Attribute(DTensor, "from_local", _patch_static(conversions.from_local)),
    _Distributing(),
    _patch_method("register_hook", _register_hook),
    _patch_method("_unpack_none", _check_hook_results, BackwardHook),
    _patch_method("numpy", _call_on_gathered),
    _patch_method("tolist", _call_on_gathered),
    _patch_method("__format__", _format_scalar),
    _patch_method("prod", lambda own, *args, **kwargs: compute_product(own, args, kwargs)),  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    _patch_method("__torch_dispatch__", _count_flops, FlopCounting),
    _patch_method("_zeropower_via_newtonschulz", _compute_muon_update, _of_muon),
    _PlainTensorsReplicated(),
)
