"""Blocks that are written where they belong in a file of whole tensors."""

import os

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layoutmap.adapters.torch.pretrained import _write_block

PROCESSES = ("torch",)


@given(st.data())
def test_blocks_in_any_order_make_the_tensor(tmp_path_factory, data):
    """A tensor of any rank, parted along any axes, is as it is in memory, and nothing around it changes."""
    parts = data.draw(
        st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), max_size=4), "pieces and their size"
    )
    shape = tuple(number * size for number, size in parts)
    values = (
        np.random.default_rng(0)
        .integers(0, 2**15, shape)
        .astype(data.draw(st.sampled_from(["i2", "f4", "u1"])))
    )
    places = data.draw(st.permutations(list(np.ndindex(*(number for number, _ in parts)))))
    start = data.draw(st.integers(0, 20))
    path = tmp_path_factory.mktemp("blocks") / "file"
    path.write_bytes(b"x" * (start + values.nbytes + 3))
    file = os.open(path, os.O_RDWR)
    for place in places:
        index = tuple(slice(i * size, (i + 1) * size) for i, (_, size) in zip(place, parts, strict=True))
        _write_block(file, start, shape, index, values[index])
    os.close(file)

    assert b"x" * start + values.tobytes() + b"xxx" == path.read_bytes()
