"""Run recurrent layers on DTensors: each device runs its part of the batch with gathered weights."""

from __future__ import annotations

import torch

from layoutmap.engines.torch.dtensor_ops.gathered import compute_on_gathered_tensors
from layoutmap.engines.torch.dtensor_ops.shards import (
    find_axes_that_stay_sharded,
    find_device_mesh,
    redistribute_to_local_shard,
    wrap_shards_as_dtensor,
)
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.trees import is_sequence, tree_leaves


def _compute_recurrent_layer(function: Function, args: Args, kwargs: Kwargs) -> object:
    if kwargs or not isinstance(args[3], bool):  # torch passes packed sequences differently, so gather them
        return compute_on_gathered_tensors(function, args, kwargs)
    x, states, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = args
    if train and dropout:  # the dropout between layers must draw the same numbers as on one device, so gather
        return compute_on_gathered_tensors(function, args, kwargs)
    mesh = find_device_mesh(tree_leaves((x, states, weights)))
    axis = 0 if batch_first else 1
    kept = find_axes_that_stay_sharded([x], mesh, [axis])
    of_states = dict.fromkeys(kept, 1)  # states start with the layer axis, even with batch_first
    several = is_sequence(states)
    shards = [
        redistribute_to_local_shard(each, mesh, of_states, kept)
        for each in (states if several else (states,))
    ]
    output, *last = function(
        redistribute_to_local_shard(x, mesh, kept, kept),
        tuple(shards) if several else shards[0],
        [redistribute_to_local_shard(each, mesh, {}, kept) for each in weights],
        *(has_biases, num_layers, dropout, train, bidirectional, batch_first),
    )
    return (
        wrap_shards_as_dtensor(output, mesh, kept),
        *(wrap_shards_as_dtensor(each, mesh, of_states) for each in last),
    )


RECURRENT = dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _compute_recurrent_layer)
