"""Variables of small decoders for tests of rules and advice."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from layoutmap.core.variables import AxisRoles, VariableSpec

MESHES = ["model=4", "batch=2,model=4", "data=4,model=2", "x=2,y=2", "batch=8"]


def make_weight(path, shape, *roles, head_size=None):
    return VariableSpec(path, shape, "float32", use=AxisRoles(roles, head_size) if roles else None)


def make_dense(path, sizes, head_size=None):
    yield make_weight(f"{path}.kernel", sizes, "in.0", "out.0", head_size=head_size)
    yield make_weight(f"{path}.bias", sizes[1:], "out.0")


@st.composite
def models(draw):
    """Decoders with attention of three forms and fewer keys than queries, and chains of layers of many sizes."""
    hidden, heads, size = draw(st.sampled_from([32, 64])), draw(st.sampled_from([4, 6, 8])), 16
    few = draw(st.sampled_from([heads, heads // 2]))
    found = [make_weight("tokens.embeddings", (256, hidden), "rows", "out.0")]
    for block in range(draw(st.integers(1, 4))):
        at = f"blocks.{block}.attention"
        form = draw(st.sampled_from(["flat", "heads", "fused"]))
        if form == "fused":
            found += make_dense(f"{at}.qkv", (hidden, (heads + 2 * few) * size))
            found += make_dense(f"{at}.proj", (heads * size, hidden))
        elif form == "flat":
            for part, count in (("query", heads), ("key", few), ("value", few)):
                found += make_dense(f"{at}.{part}", (hidden, count * size), size)
            found += make_dense(f"{at}.output", (heads * size, hidden), size)
        else:
            for part, count in (("query", heads), ("key", few), ("value", few)):
                roles = "in.0", "out.0", "out.1"
                found.append(make_weight(f"{at}.{part}.kernel", (hidden, count, size), *roles))
            found.append(make_weight(f"{at}.output.kernel", (heads, size, hidden), "in.0", "in.1", "out.0"))
        sizes = [hidden, *draw(st.lists(st.sampled_from([24, 96, 128, 256]), min_size=1, max_size=3)), hidden]
        for number, pair in enumerate(itertools.pairwise(sizes)):
            found += make_dense(f"blocks.{block}.{'abcd'[number]}", pair)
        found.append(make_weight(f"blocks.{block}.norm.scale", (hidden,)))
    return [*found, *make_dense("head", (hidden, 256)), make_weight("other", (64, 64))]
