"""List the torch operators that DTensor computes correctly, on torch 2.13.

`tests/engines/torch/test_op_database.py` runs torch's database of operators on random layouts, and finds no wrong
number; what only optimizers use is shown by their tests. An operator that is not named here is computed on gathered
tensors. Names are those of `torch.ops.aten`, without the underscore of what changes its target.
"""

from __future__ import annotations

_ELEMENTWISE = """
abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min copysign cos cosh deg2rad digamma div elu eq
erf erfc erfinv exp exp2 expm1 floor fmax fmin fmod frac ge gelu gelu_backward gt heaviside hypot i0 isfinite isinf
isnan isneginf isposinf ldexp le leaky_relu lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul nan_to_num ne neg nextafter polygamma
pow rad2deg reciprocal relu remainder round rsqrt rsub sgn sigmoid sigmoid_backward sign signbit silu silu_backward sin
sinc sinh softplus special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri
special_xlog1py sqrt square sub tan tanh tanh_backward threshold_backward trunc where xlogy _conj conj_physical clone
_to_copy detach alias copy celu hardshrink hardsigmoid hardtanh softshrink threshold
elu_backward hardshrink_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward leaky_relu_backward
softplus_backward softshrink_backward
"""
_VIEWS = """
expand permute select slice split split_with_sizes squeeze t transpose unsqueeze view _unsafe_view view_as_complex
view_as_real
"""
_REDUCTIONS = """
all amax amin any argmax argmin cumsum histc logsumexp max mean min std sum var var_mean linalg_vector_norm
_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data native_layer_norm native_layer_norm_backward
"""
_PRODUCTS = "addmm baddbmm bmm dot mm _grouped_mm"
_PARTS = """
cat constant_pad_nd embedding embedding_dense_backward flip
repeat roll select_backward slice_backward sort stack topk tril triu
"""
_ALONG = "gather index_add index_copy index_fill index_select scatter scatter_add"
_MADE = "empty_like fill full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like zero zeros_like"
_OPTIMIZERS = """
_amp_foreach_non_finite_check_and_unscale _foreach_abs _foreach_add _foreach_addcdiv _foreach_addcmul _foreach_clamp_max
_foreach_clamp_min _foreach_div _foreach_lerp _foreach_maximum _foreach_mul _foreach_neg _foreach_norm _foreach_pow
_foreach_reciprocal _foreach_rsqrt _foreach_sign _foreach_sqrt _foreach_sub _foreach_zero _fused_adam _fused_adamw
"""

PROVEN = frozenset(
    f"{_ELEMENTWISE} {_VIEWS} {_REDUCTIONS} {_PRODUCTS} {_PARTS} {_ALONG} {_MADE} {_OPTIMIZERS}".split()
)
"""Operators that are correct after pending partial sums are reduced."""

ALONG = frozenset(_ALONG.split())
"""Operators that are correct if not in place, and if tensors of the target's rank differ only in the index axis."""

SUMS_PASS = frozenset(
    f"{_VIEWS} add alias bmm cat clone copy detach div mean mm mul neg stack sub sum zero".split()
)
"""Operators that are also correct for partial sums. Their result is then a partial sum."""

ANY_ORDER = frozenset(f"{_ELEMENTWISE} {_PRODUCTS} {_MADE} {_OPTIMIZERS}".split())
"""Operators that are also correct for axes that are sharded over several mesh dims in any order."""

_LOSSES = "binary_cross_entropy binary_cross_entropy_with_logits huber_loss mse_loss smooth_l1_loss soft_margin_loss"
REDUCTIONS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(f"{_LOSSES} {_LOSSES.replace(' ', '_backward ')}_backward".split(), (0,)),
    "nll_loss_forward": (0, 2),
    "nll_loss_backward": (0, 2),
}
"""Losses and the reductions with which they are correct, by torch's enum (0: none, 2: sum), but never a mean."""

_SMALL = """
_cdist_backward _cdist_forward _ctc_loss _ctc_loss_backward _embedding_bag _embedding_bag_forward_only
_local_scalar_dense _pdist_backward _pdist_forward _unique2 bucketize equal index_put is_nonzero is_same_size
masked_select multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward nonzero put
searchsorted select_scatter slice_scatter take trace unbind
"""
QUIET = frozenset(_SMALL.split())
"""Operators that are gathered without a warning, because their tensors are small or there is no alternative."""
