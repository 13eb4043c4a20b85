"""Lists, tuples, dicts and other containers of tensors, as torch takes them apart."""

from __future__ import annotations

from layoutmap.engines.tested import Needed

with Needed("torch"):  # torch.utils.pytree is public from torch 2.14 on only
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
