"""Correct the operators that DTensor computes wrongly, slowly, or not at all.

guard          DTensor computes in its own way what `proven` names; any other operator is computed on gathered tensors
mode           looks each function up in the tables below; `unwrap_python` opens functions so that their calls are seen
shards         functions that each device computes on its own shards
gathered       functions that are called on gathered tensors, and the warning
dispatch       DTensor's dispatcher, which asks `guard`; `memories` and `slices`: views that are copies
sums           when sums over the mesh are made, for a batch that does not divide
the others     tables of functions: losses, norms, attention, convolutions, recurrent, rows, joining, slices, randomness
"""

from layoutmap.engines.torch.dtensor_ops.conversions import take_one_rank as take_one_rank
from layoutmap.engines.torch.dtensor_ops.local_values import has_local_tensor as has_local_tensor
from layoutmap.engines.torch.dtensor_ops.local_values import has_shard as has_shard
from layoutmap.engines.torch.dtensor_ops.local_values import refuse_shard as refuse_shard
from layoutmap.engines.torch.dtensor_ops.memories import note_redistributed as note_redistributed
from layoutmap.engines.torch.dtensor_ops.memories import refuse_outdated as refuse_outdated
from layoutmap.engines.torch.dtensor_ops.mode import enable_dtensor_ops as enable_dtensor_ops
from layoutmap.engines.torch.dtensor_ops.outside import prepare_mesh as prepare_mesh
from layoutmap.engines.torch.dtensor_ops.randomness import same_draws as same_draws
from layoutmap.engines.torch.dtensor_ops.sums import SummingUp as SummingUp
from layoutmap.engines.torch.dtensor_ops.sums import is_batch_divisible as is_batch_divisible
from layoutmap.engines.torch.dtensor_ops.sums import reduce_gradient as reduce_gradient
