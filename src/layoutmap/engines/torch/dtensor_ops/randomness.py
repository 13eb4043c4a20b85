"""Draw random numbers for DTensors as the unsharded program does, and then shard them.

So dropout gives the same result on any mesh as on one device, and leaves the default generator in the same state. In
DTensor, each device draws its own numbers (pytorch/pytorch#168058). With `draws="tiles"`, each device draws only its
shard of a dropout mask: see `masks`. All processes must have the same seed.
`check_equal_random_draws_in_block` compares the states of their generators.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import ScopeError
from layoutmap.engines.agreement import Gather, gather_unequal_texts_and_checksums
from layoutmap.engines.torch.dtensor_ops.gathered import compute_on_gathered_tensors, is_in_place
from layoutmap.engines.torch.dtensor_ops.masks import draw_sharded_mask
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import (
    find_reachable_placements,
    gather_if_sharded,
    redistribute_if_needed,
    reduce_if_partial,
    shard_like,
)
from layoutmap.engines.torch.trees import tree_map


@contextmanager
def check_equal_random_draws_in_block(mesh: DeviceMesh, gather: Gather) -> Generator[None]:
    """Raise at the end of the block if random numbers drawn in it differ between processes.

    Args:
        mesh: The `DeviceMesh`.
        gather: Gathers a value from each process of the mesh. All of them call it.

    Raises:
        ScopeError: The processes draw different numbers, or only some draw any. All processes raise it.
    """
    state = _hash_generator_states(mesh.device_type)
    yield
    said, _ = gather_unequal_texts_and_checksums(
        f"from state {state:08x}" if _hash_generator_states(mesh.device_type) != state else "no numbers",
        gather,
    )
    if said:
        raise ScopeError(
            "the processes draw different random numbers",
            facts={f"process {number}": each for number, each in enumerate(said)},
            why="each process draws all random numbers, such as dropout masks, and uses those of its shards",
            fix="set the same seed in all processes, as with torch.manual_seed(0), and call the model "
            "in the same mode",
        )


def _hash_generator_states(device_type: str) -> int:
    """Return a checksum of the states of torch's default CPU generator and of the device's generator."""
    states = [torch.get_rng_state()]
    if device_type != "cpu":  # the device's own generator draws the masks, so include its state
        states.append(torch.get_device_module(device_type).get_rng_state())
    return compute_checksum(*(state.numpy() for state in states))


def _allocate_unsharded_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return an unsharded tensor with a DTensor's shape, strides, and dtype. Random numbers depend on the strides."""
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _compute_dropout(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute a dropout with the mask that an unsharded tensor would get."""
    x, p, train = _bind_dropout_arguments(*args, **kwargs)
    if not train or p == 0:
        return x  # draw no random numbers, because torch draws none either
    plain = torch.dropout if "feature" not in function.__name__ else torch.feature_dropout
    mask = shard_like(plain(_allocate_unsharded_like(x).fill_(1), p, True), x)
    return x.mul_(mask) if is_in_place(function) else x * mask


def _bind_dropout_arguments(input: object, p: float, train: bool) -> tuple[Any, float, bool]:
    """Return the arguments of a dropout in order, also if they are passed by name."""
    return input, p, train


def _compute_dropout_by_shards(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute a dropout with a mask of which each device draws only its own shard."""
    x, p, train = _bind_dropout_arguments(*args, **kwargs)
    of_channels = "feature" in function.__name__
    # For arguments other than these, torch draws nothing or raises, so call the handler that does the same.
    if not train or not 0 < p <= 1 or not x.numel() or (of_channels and x.ndim < 2):
        return RANDOM[function](function, args, kwargs)
    in_place = is_in_place(function)
    axes = 2 if of_channels else x.ndim
    shape = [size if axis < axes else 1 for axis, size in enumerate(x.shape)]  # one number per channel
    placements = [
        each if getattr(each, "dim", axes) < axes else Replicate() for each in find_reachable_placements(x)
    ]
    draw = functools.partial(draw_sharded_mask, shape, x.dtype, x.device, p, x.device_mesh, placements)
    if "alpha" not in function.__name__ or p == 1:
        mask = draw(divisor=1 - p)
        return x.mul_(mask) if in_place else x * mask
    # Set dropped elements to the lower limit of SELU, and scale and shift all elements, to preserve mean and variance.
    mask, scale = draw(), 1 / math.sqrt((_SELU * _SELU * p + 1) * (1 - p))
    shift = mask.add(-1).mul_(_SELU * scale).add_(_SELU * scale * p)
    mask.mul_(scale)
    return x.mul_(mask).add_(shift) if in_place else reduce_if_partial(x) * mask + shift


_SELU = 1.7580993408473766


def _make_training_only_handler(position: int) -> Function:
    """Return the handler of a function that draws random numbers only if its argument at `position` is true."""

    def compute_if_training(function: Function, args: Args, kwargs: Kwargs) -> object:
        training = args[position] if len(args) > position else next(iter(kwargs.values()))
        if training:
            return compute_random_on_gathered_tensors(function, args, kwargs)
        return function(*args, **kwargs)

    return compute_if_training


def _fill_with_random_numbers(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Fill a DTensor in place with the random numbers that an unsharded tensor would get."""
    x, *rest = args
    values = function(
        _allocate_unsharded_like(x), *map(gather_if_sharded, rest), **tree_map(gather_if_sharded, kwargs)
    )
    return x.copy_(shard_like(values, x))


def _draw_random_like(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Return a random DTensor with the shape and placements of a DTensor."""
    x, *rest = args
    return shard_like(function(_allocate_unsharded_like(x), *rest, **kwargs), x)


def compute_random_on_gathered_tensors(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute a random function on gathered tensors. A result shaped like the first DTensor gets its placements."""
    first = next(each for each in (*args, *kwargs.values()) if isinstance(each, DTensor))
    result = compute_on_gathered_tensors(function, args, kwargs)
    if not isinstance(result, DTensor) or result is first or result.shape != first.shape:
        return result
    return redistribute_if_needed(result, find_reachable_placements(first))


_METHODS = (
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
)
_DROPOUTS = (torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_)
_ALPHA_DROPOUTS = (
    *(torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
)
RANDOM: dict[object, Function] = {
    **dict.fromkeys(_DROPOUTS, _compute_dropout),
    **{getattr(torch.Tensor, name): _fill_with_random_numbers for name in _METHODS},
    **dict.fromkeys((torch.rand_like, torch.randn_like, torch.randint_like), _draw_random_like),
    **dict.fromkeys(
        (
            torch.bernoulli,
            torch.Tensor.bernoulli,
            torch.multinomial,
            torch.native_dropout,
            torch.Tensor.multinomial,
            torch.poisson,
            torch.normal,
            torch.binomial,
            F.fractional_max_pool2d,
            F.fractional_max_pool3d,
        ),
        compute_random_on_gathered_tensors,
    ),
    **dict.fromkeys(_ALPHA_DROPOUTS, _make_training_only_handler(2)),
    **dict.fromkeys((torch.rrelu, torch.rrelu_), _make_training_only_handler(3)),
}
RANDOM_BY_SHARDS = dict.fromkeys((*_DROPOUTS, *_ALPHA_DROPOUTS), _compute_dropout_by_shards)
