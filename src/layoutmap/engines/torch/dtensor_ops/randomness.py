"""Draw random numbers for DTensors as the unsharded program does, and then shard them.

So dropout and its like give the numbers of one device on any mesh, and the default generator ends in the same state.
In DTensor each device draws its own: pytorch/pytorch#168058.
With `draws="tiles"` a device draws its part of a dropout's mask alone: see `masks`. All processes must have seeded
alike; `same_draws` compares what they draw from.
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
from layoutmap.engines.agreement import Gather, check_alike
from layoutmap.engines.torch.dtensor_ops.gathered import compute_gathered, is_in_place
from layoutmap.engines.torch.dtensor_ops.masks import draw_sharded_mask
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import (
    find_reachable_placements,
    full_tensor,
    move_to_placements,
    place_like,
    reduce_partial,
)
from layoutmap.engines.torch.trees import tree_map


@contextmanager
def same_draws(mesh: DeviceMesh, gather: Gather) -> Generator[None]:
    """Raise if random numbers drawn in the block differ between processes.

    Args:
        mesh: The `DeviceMesh`.
        gather: Gathers from all processes of the mesh, which all ask.

    Raises:
        ScopeError: A process draws other numbers than another, or none; in all of them.
    """
    state = _hash_generators(mesh.device_type)
    yield
    said, _ = check_alike(
        f"from state {state:08x}" if _hash_generators(mesh.device_type) != state else "no numbers", gather
    )
    if said:
        raise ScopeError(
            "the processes draw different random numbers",
            facts={f"process {number}": each for number, each in enumerate(said)},
            why="each process draws all random numbers, such as dropout masks, and uses those of its shards",
            fix="set the same seed in all processes, as with torch.manual_seed(0), and call the model "
            "in the same mode",
        )


def _hash_generators(kind: str) -> int:
    """Return a checksum of the generator states of this process and of its devices."""
    states = [torch.get_rng_state()]
    if kind != "cpu":  # the device's generator draws masks
        states.append(torch.get_device_module(kind).get_rng_state())
    return compute_checksum(*(state.numpy() for state in states))


def _allocate_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return an unsharded tensor with a DTensor's shape, strides, and dtype. Draws follow the strides."""
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _compute_dropout(function: Function, args: Args, kwargs: Kwargs) -> object:
    x, p, train = _read_arguments(*args, **kwargs)
    if not train or p == 0:
        return x  # like torch, draw nothing
    plain = torch.dropout if "feature" not in function.__name__ else torch.feature_dropout
    mask = place_like(plain(_allocate_like(x).fill_(1), p, True), x)
    return x.mul_(mask) if is_in_place(function) else x * mask


def _read_arguments(input: object, p: float, train: bool) -> tuple[Any, float, bool]:
    """Return the arguments of a dropout."""
    return input, p, train


def _compute_dropout_by_shards(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute dropout with each device drawing only its own shard of the mask."""
    x, p, train = _read_arguments(*args, **kwargs)
    of_channels = "feature" in function.__name__
    # Other values are errors that torch raises.
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
        mask = draw(over=1 - p)
        return x.mul_(mask) if in_place else x * mask
    # Dropped elements become the lower limit of SELU, which preserves mean and variance.
    mask, scale = draw(), 1 / math.sqrt((_SELU * _SELU * p + 1) * (1 - p))
    shift = mask.add(-1).mul_(_SELU * scale).add_(_SELU * scale * p)
    mask.mul_(scale)
    return x.mul_(mask).add_(shift) if in_place else reduce_partial(x) * mask + shift


_SELU = 1.7580993408473766


def _make_training_handler(place: int) -> Function:
    """Return the handler of a function that draws only if argument number `place` is true."""

    def compute(function: Function, args: Args, kwargs: Kwargs) -> object:
        training = args[place] if len(args) > place else next(iter(kwargs.values()))
        return draw_gathered(function, args, kwargs) if training else function(*args, **kwargs)

    return compute


def _fill_tensor(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Fill a DTensor with the random numbers that an unsharded tensor would get."""
    x, *rest = args
    values = function(_allocate_like(x), *map(full_tensor, rest), **tree_map(full_tensor, kwargs))
    return x.copy_(place_like(values, x))


def _draw_like(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Return a random DTensor in the shape and placements of another."""
    x, *rest = args
    return place_like(function(_allocate_like(x), *rest, **kwargs), x)


def draw_gathered(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute a random function on gathered tensors, and place its result like the first DTensor."""
    first = next(each for each in (*args, *kwargs.values()) if isinstance(each, DTensor))
    result = compute_gathered(function, args, kwargs)
    if not isinstance(result, DTensor) or result is first or result.shape != first.shape:
        return result
    return move_to_placements(result, find_reachable_placements(first))


_METHODS = (
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
)
_DROPOUTS = (torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_)
_ALPHA_DROPOUTS = (
    *(torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
)
RANDOM: dict[object, Function] = {
    **dict.fromkeys(_DROPOUTS, _compute_dropout),
    **{getattr(torch.Tensor, name): _fill_tensor for name in _METHODS},
    **dict.fromkeys((torch.rand_like, torch.randn_like, torch.randint_like), _draw_like),
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
        draw_gathered,
    ),
    **dict.fromkeys(_ALPHA_DROPOUTS, _make_training_handler(2)),
    **dict.fromkeys((torch.rrelu, torch.rrelu_), _make_training_handler(3)),
}
RANDOM_BY_SHARDS = dict.fromkeys((*_DROPOUTS, *_ALPHA_DROPOUTS), _compute_dropout_by_shards)
