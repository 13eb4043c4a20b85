"""Gather weights for a module's call, and reduce gradients at the end of a backward pass.

fsdp           weights sharded over the dim of the batch, gathered by one collective; `fsdp_saved` for the backward pass
fully_shard    the same by torch's own fully_shard, ahead of time; `fully_sharded` has the state that torch keeps
gradients      gradients summed up over the mesh once, at the end of a backward pass
"""

from layoutmap.engines.torch.gather.fsdp import Cast as Cast
from layoutmap.engines.torch.gather.fsdp import Gather as Gather
from layoutmap.engines.torch.gather.fsdp import can_gather as can_gather
from layoutmap.engines.torch.gather.fsdp import describe_early_change as describe_early_change
from layoutmap.engines.torch.gather.fsdp_saved import save_references as save_references
from layoutmap.engines.torch.gather.fully_shard import Unit as Unit
from layoutmap.engines.torch.gather.fully_sharded import find_fully_sharded_dims as find_fully_sharded_dims
from layoutmap.engines.torch.gather.gradients import Gradients as Gradients
