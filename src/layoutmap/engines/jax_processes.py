"""What the processes of one JAX program must agree on: seeds, and values that each draws for itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from layoutmap.draws import Draw
from layoutmap.errors import EngineError

__all__ = ["check_equal_everywhere", "common_seeds"]


def common_seeds(draws: Mapping[str, Draw], *, across: bool) -> dict[str, Any]:
    """The seeds of all programs; across processes those of process 0."""
    seeds = {key: draw.program.seed for key, draw in draws.items() if draw.program is not None}
    if not across or not seeds:
        return seeds
    leaves, tree = jax.tree.flatten(seeds)
    keys = [_is_key(leaf) for leaf in leaves]
    plain = [
        np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        for leaf, is_key in zip(leaves, keys, strict=True)
    ]
    sent = np.concatenate(
        [np.frombuffer(leaf.tobytes(), np.uint8) for leaf in plain] or [np.empty(0, np.uint8)]
    )
    received: Any = multihost_utils.broadcast_one_to_all(sent)
    data, start, common = np.asarray(received).tobytes(), 0, list[Any]()
    for leaf, own, is_key in zip(leaves, plain, keys, strict=True):
        value: Any = np.frombuffer(data[start : start + own.nbytes], own.dtype).reshape(own.shape)
        start += own.nbytes
        common.append(jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)) if is_key else value)
    return jax.tree.unflatten(tree, common)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def check_equal_everywhere(checksums: Mapping[str, int]) -> None:
    """Raise if a value that every process drew whole is not the same in all of them."""
    if not checksums:
        return
    own = np.array(list(checksums.values()), np.uint32)
    everyone = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, len(own))
    differ = [key for i, key in enumerate(checksums) if len(set(everyone[:, i])) > 1]
    if differ:
        raise EngineError(
            f"{differ[0]}: the processes drew different values",
            facts={"variables": ", ".join(differ[:10])},
            why="a value that is drawn whole is drawn by each process, from its own random state",
            mend="give all processes the same seed before the model is built",
        )
