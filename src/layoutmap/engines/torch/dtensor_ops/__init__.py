"""Correct the operators that DTensor computes wrongly, slowly, or not at all.

guard          lets DTensor compute the operators in `proven` by its own rules, and computes others on gathered tensors
mode           looks up each function in the tables below; `unwrap_python` lets it see the calls inside of a function
shards         functions that each device computes on its own shards
gathered       functions that are called on gathered tensors, and the warning
dispatch       DTensor's dispatcher, which asks `guard`; `memories` and `slices`: views that are copies
sums           immediate reductions of partial sums, if a mesh dim does not divide the batch
experts        layers of experts, of which each process computes a part
the others     tables of functions: losses, norms, attention, convolutions, recurrent, rows, joining, slices, randomness
"""

from layoutmap.engines.torch.dtensor_ops.conversions import (
    extract_first_rank_tensor as extract_first_rank_tensor,
)
from layoutmap.engines.torch.dtensor_ops.dispatch import compute_global_shapes_in as compute_global_shapes_in
from layoutmap.engines.torch.dtensor_ops.experts import compute_share_of_experts as compute_share_of_experts
from layoutmap.engines.torch.dtensor_ops.experts import divide_experts as divide_experts
from layoutmap.engines.torch.dtensor_ops.gathered import (
    ignore_gathering_temporarily as ignore_gathering_temporarily,
)
from layoutmap.engines.torch.dtensor_ops.guard import DifferentMeshesError as DifferentMeshesError
from layoutmap.engines.torch.dtensor_ops.local_values import (
    check_value_is_not_shard as check_value_is_not_shard,
)
from layoutmap.engines.torch.dtensor_ops.local_values import has_local_tensor as has_local_tensor
from layoutmap.engines.torch.dtensor_ops.local_values import has_shard as has_shard
from layoutmap.engines.torch.dtensor_ops.memories import (
    check_no_slice_is_outdated as check_no_slice_is_outdated,
)
from layoutmap.engines.torch.dtensor_ops.memories import record_copy as record_copy
from layoutmap.engines.torch.dtensor_ops.mode import (
    enable_dtensor_ops_temporarily as enable_dtensor_ops_temporarily,
)
from layoutmap.engines.torch.dtensor_ops.outside import install_patches_for_mesh as install_patches_for_mesh
from layoutmap.engines.torch.dtensor_ops.randomness import (
    check_equal_random_draws_in_block as check_equal_random_draws_in_block,
)
from layoutmap.engines.torch.dtensor_ops.sums import ProductReductionMode as ProductReductionMode
from layoutmap.engines.torch.dtensor_ops.sums import is_batch_divisible as is_batch_divisible
from layoutmap.engines.torch.dtensor_ops.sums import (
    reduce_gradient_in_backward as reduce_gradient_in_backward,
)
