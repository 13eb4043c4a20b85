"""Gather weights for a module's call, and reduce gradients at the end of a backward pass.

fsdp           weights sharded over the dim of the batch, gathered by one collective; `fsdp_saved` for the backward pass
fully_shard    the same by torch's own fully_shard, ahead of time; `fully_sharded` has the state that torch keeps
gradients      gradients summed up over the mesh once, at the end of a backward pass
"""

from layoutmap.engines.torch.gather.fsdp import CastDTensorFunction as CastDTensorFunction
from layoutmap.engines.torch.gather.fsdp import GatheredTensors as GatheredTensors
from layoutmap.engines.torch.gather.fsdp import can_gather_by_concatenation as can_gather_by_concatenation
from layoutmap.engines.torch.gather.fsdp import format_weight_changed_message as format_weight_changed_message
from layoutmap.engines.torch.gather.fsdp_saved import save_tensors_as_references as save_tensors_as_references
from layoutmap.engines.torch.gather.fully_shard import GatherUnit as GatherUnit
from layoutmap.engines.torch.gather.fully_sharded import find_fully_sharded_dims as find_fully_sharded_dims
from layoutmap.engines.torch.gather.gradients import GradientReducer as GradientReducer
from layoutmap.engines.torch.gather.gradients import reduce_each_gradient_in as reduce_each_gradient_in
from layoutmap.engines.torch.gather.gradients import split_into_buckets as split_into_buckets
