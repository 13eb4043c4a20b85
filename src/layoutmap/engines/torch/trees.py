"""Lists, tuples, dicts and other containers of tensors, as torch takes them apart."""

from __future__ import annotations

from layoutmap.engines.tested import Needed

with Needed("torch"):  # torch 2.13 has no public form of it
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
