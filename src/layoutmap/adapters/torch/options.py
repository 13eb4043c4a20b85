"""Define the scope options for torch modules, and check where they apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch

from layoutmap.adapters.options import Draws, Gather, Rows, ScopeOptions, check_option_names
from layoutmap.core.errors import ScopeError, join_names

_DECIDED_BY_RULES = ("mesh", "dp_mesh_dims", "shard_placement_fn", "ignored_params")


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Store the scope options that only torch modules have.

    Args:
        draws: `"exact"`: initial values and dropout masks equal those of the unsharded model, bit for bit. `"tiles"`: a
            device draws only its own part. The numbers are the same on every mesh, but differ from those of the
            unsharded model: initial values come from a seed for each tile of 256 by 256, and dropout masks from a hash
            of each element's index. Use it if a model is so large that drawing one stream of numbers takes too long, or
            if there are so many devices that drawing the masks of the global batch takes too long.
        gather: How several processes gather weights that are sharded over `batch_dim` while their block computes.
            `"fully_shard"`: with torch's function, which prefetches the next block where it can; `scope.plan` names the
            weights for which it cannot be used. `"own"`: by this library, which supports `torch.autograd.grad` with
            respect to weights and gradients of gradients.
        rows: Rows that each process passes to a model. `"global"`: all rows of the batch, the same in all processes.
            `"own"`: its own rows, the same number in each process, as from a `DistributedSampler`. A loss that
            `forward` returns then covers the rows of all processes, and outputs with rows are those of the process.
        fully_shard: Arguments of torch's `fully_shard` by name: `mp_policy`, `offload_policy`, and
            `reshard_after_forward`, as in `{"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}`. Only for
            several processes.
    """

    draws: Draws = "exact"
    gather: Gather = "fully_shard"
    rows: Rows = "global"
    fully_shard: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def from_values(
        cls, values: Mapping[str, Any], options: ScopeOptions, *, spans_processes: bool
    ) -> TorchOptions:
        """Return options with these values, after checking them.

        Args:
            values: The values of options by name.
            options: Options that every library has.
            spans_processes: Whether the mesh has devices of other processes.

        Raises:
            ScopeError: An option is unknown, has an invalid value, or would have no effect.
        """
        check_option_names(values, "torch", cls.__slots__)
        # `None` means that an option is not set, so it keeps its default.
        result = cls(**{name: value for name, value in values.items() if value is not None})
        _check_option_value(
            "draws",
            result.draws,
            Draws,
            "this option decides which random numbers initialize weights and drop elements",
        )
        why = "this option decides how weights that are sharded over batch_dim are gathered"
        _check_option_value("gather", result.gather, Gather, why)
        _check_option_value(
            "rows", result.rows, Rows, "this option tells which rows of the batch each process passes"
        )
        if result.rows == "own" and options.batch_dim is None:
            raise ScopeError(
                'rows="own": the scope has no batch_dim',
                why="without it, all processes compute with the same rows",
                fix="pass batch_dim=, the mesh dim over which rows are split, or leave rows out",
            )
        if result.fully_shard:
            _check_fully_shard_is_used(result, options, spans_processes)
            _check_fully_shard_options(result.fully_shard)
        return result


def _check_option_value(name: str, value: str, choices: object, why: str) -> None:
    allowed_values = get_args(choices)
    if value not in allowed_values:
        raise ScopeError(
            f"{name}={value!r}: this value is not allowed",
            facts={"choices": ", ".join(map(repr, allowed_values))},
            why=why,
            fix=f"leave {name} out, or pass {name}={allowed_values[1]!r}",
        )


def _check_fully_shard_is_used(
    torch_options: TorchOptions, options: ScopeOptions, spans_processes: bool
) -> None:
    """Raise if options of `fully_shard` are not a mapping, or if it gathers no weights and so ignores them."""
    if not isinstance(torch_options.fully_shard, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScopeError(
            f"fully_shard={torch_options.fully_shard!r} has the wrong type",
            facts={"type": type(torch_options.fully_shard).__name__},
            why="options of torch's fully_shard are passed on by their names",
            fix='pass a mapping, as in fully_shard={"reshard_after_forward": False}',
        )
    reasons = (
        (torch_options.gather == "own", 'with gather="own", layoutmap gathers the weights itself'),
        (options.batch_dim is None, "without batch_dim no weight is gathered"),
        (not spans_processes, "all devices are of this process, and fully_shard gathers between processes"),
    )
    for is_so, why in reasons:
        if is_so:
            raise ScopeError(
                "the options of fully_shard would not be used",
                facts={"fully_shard": dict(torch_options.fully_shard)},
                why=why,
                fix="leave fully_shard out; it is for torch modules in several processes (torchrun), "
                "in a scope with batch_dim",
            )


# The layout map decides which weights are sharded, so allow only three options of `fully_shard` (decisions/0017).
def _check_fully_shard_options(options: Mapping[str, object]) -> None:
    """Raise for `fully_shard` options that are unknown, of a wrong type, or decided by the layout map."""
    # This import takes 0.1 s, so do it only if the options are used.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    option_types: dict[str, type] = {
        "mp_policy": MixedPrecisionPolicy,
        "offload_policy": OffloadPolicy,
        "reshard_after_forward": bool,
    }
    for name, value in options.items():
        if name not in option_types:
            raise ScopeError(
                f"fully_shard: {name!r} is not an option that a scope passes on",
                facts={"options": join_names([repr(each) for each in option_types])},
                why="rules and batch_dim decide which weights are sharded, and over which dim"
                if name in _DECIDED_BY_RULES
                else "a scope passes on only these options",
                fix="leave it out" if name in _DECIDED_BY_RULES else "use one of these",
            )
        if name == "reshard_after_forward" and type(value) is int:
            raise ScopeError(
                f"fully_shard: reshard_after_forward={value}: a number of devices is not supported",
                why="torch's fully_shard reshards DTensors over all devices of the batch dim, or over none",
                fix="pass True or False",
            )
        if not isinstance(value, option_types[name]):
            raise ScopeError(
                f"fully_shard: {name}={value!r} has the wrong type",
                facts={"type": type(value).__name__},
                why="the value is passed on to torch's fully_shard",
                fix=f"pass a {option_types[name].__name__}",
            )
    offload = options.get("offload_policy")
    if isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and not torch.accelerator.is_available():
        raise ScopeError(
            "fully_shard: weights cannot be moved to pinned memory",
            facts={"offload_policy": repr(offload)},
            why="pinned memory needs an accelerator, and torch finds none here",
            fix="leave offload_policy out, or pass CPUOffloadPolicy(pin_memory=False), which changes nothing on CPUs",
        )
