"""Parameters whose axes differ in size, each size with one sharding, and the optimizers of optax that are tried."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import layoutmap as lm

MESH = "batch=2,model=4"
SPECS = {
    40: "model",
    16: "batch",
    8: "batch",
    64: "model",
    12: "model",
}  # by an axis's size; others are unsharded
SHAPES = {
    "embed": {"table": (40, 16)},
    "blocks": [{"kernel": (8, 64), "bias": (64,)}, {"kernel": (8, 64), "bias": (64,)}],
    "head": {"kernel": (12, 56)},
    "scale": (24,),
}


def is_shape(x):
    return isinstance(x, tuple)


def specs_of(shape):
    return tuple(SPECS.get(n, lm.UNSHARDED) for n in shape)


def plain_params(seed=0):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray((random.normal(size=shape) / 8).astype("float32")), SHAPES, is_leaf=is_shape
    )


def laid_out(params, mesh):
    return jax.tree.map(lambda p: lm.dtensor.relayout(p, lm.Layout(specs_of(p.shape), mesh)), params)


def by_rank(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9),
    "muon": lambda: optax.contrib.muon(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-2),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adaptive_grad_clip(0.1),
        optax.scale_by_adam(),
        optax.scale(-1e-2),
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2), "vector": optax.sgd(1e-2, momentum=0.9)}, by_rank
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "masked": lambda: optax.masked(optax.adam(1e-2), is_matrix),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2, weight_decay=0.1),
    "schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
    "sm3": lambda: optax.sm3(1e-2),
    "galore": lambda: optax.contrib.galore(1e-2, rank=4),
    "lbfgs": lambda: optax.scale_by_lbfgs(memory_size=3),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "prodigy": lambda: optax.contrib.prodigy(1e-2),
    "noisy": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(3)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
}
USUAL = ("adamw", "adafactor", "muon", "multi_transform")


def misplaced(state):
    """The leaves of a state with an axis that is not sharded as the parameters' axes of its size."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        layout = (
            lm.dtensor.fetch_layout(leaf) if isinstance(leaf.sharding, jax.sharding.NamedSharding) else None
        )
        if layout is None or layout.sharding_specs != specs_of(leaf.shape):
            found.append((jax.tree_util.keystr(path), leaf.shape, str(layout)))
    return found


def bits(leaf):
    """A leaf's values, element type and whether that is weak."""
    key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    values = np.asarray(jax.random.key_data(leaf) if key else leaf)
    return values.tobytes(), values.shape, str(leaf.dtype), getattr(leaf, "weak_type", False)
