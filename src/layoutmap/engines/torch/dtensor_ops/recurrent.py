"""Run recurrent layers on DTensors: each device runs its part of the batch with gathered weights."""

from __future__ import annotations

import torch

from layoutmap.engines.torch.dtensor_ops.gathered import compute_gathered
from layoutmap.engines.torch.dtensor_ops.shards import (
    find_kept_axes,
    find_mesh,
    join_shards,
    take_local_shard,
)
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.trees import is_sequence, tree_leaves


def _compute_recurrent_layer(function: Function, args: Args, kwargs: Kwargs) -> object:
    if kwargs or not isinstance(args[3], bool):  # packed sequences have other arguments
        return compute_gathered(function, args, kwargs)
    x, states, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = args
    if train and dropout:  # dropout draws all numbers as on one device
        return compute_gathered(function, args, kwargs)
    mesh = find_mesh(tree_leaves((x, states, weights)))
    axis = 0 if batch_first else 1
    kept = find_kept_axes([x], mesh, [axis])
    of_states = dict.fromkeys(kept, 1)  # states start with the layer axis, also with batch_first
    several = is_sequence(states)
    shards = [take_local_shard(each, mesh, of_states, kept) for each in (states if several else (states,))]
    output, *last = function(
        take_local_shard(x, mesh, kept, kept),
        tuple(shards) if several else shards[0],
        [take_local_shard(each, mesh, {}, kept) for each in weights],
        *(has_biases, num_layers, dropout, train, bidirectional, batch_first),
    )
    return (join_shards(output, mesh, kept), *(join_shards(each, mesh, of_states) for each in last))


RECURRENT = dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _compute_recurrent_layer)
