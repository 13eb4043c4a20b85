"""Recurrent layers of DTensors: each device runs its part of the batch, with the weights gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from layoutmap.engines.torch.dtensor_ops.gathered import on_whole
from layoutmap.engines.torch.dtensor_ops.pieces import cut_axis, divides, join, mesh_of, piece
from layoutmap.engines.torch.private import tree_leaves


def _run(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if kwargs or not isinstance(args[3], bool):  # a packed sequence
        return on_whole(function, args, kwargs)
    x, states, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = args
    if train and dropout:  # drawn whole, as one device draws
        return on_whole(function, args, kwargs)
    mesh = mesh_of(tree_leaves((x, states, weights)))
    axis = 0 if batch_first else 1
    kept: list[int] = []
    for dim in range(mesh.ndim):
        if cut_axis(x, dim) == axis and divides(x, axis, [*kept, dim], mesh):
            kept.append(dim)

    def placements(cut: int) -> list[Any]:
        return [Shard(cut) if dim in kept else Replicate() for dim in range(mesh.ndim)]

    several = isinstance(states, (tuple, list))
    pieces = [piece(each, mesh, placements(1), kept) for each in (states if several else (states,))]
    whole = [piece(each, mesh, [Replicate()] * mesh.ndim, kept) for each in weights]
    output, *last = function(
        piece(x, mesh, placements(axis), kept),
        tuple(pieces) if several else pieces[0],
        whole,
        *(has_biases, num_layers, dropout, train, bidirectional, batch_first),
    )
    return (join(output, mesh, placements(axis)), *(join(each, mesh, placements(1)) for each in last))


RECURRENT: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _run
)
