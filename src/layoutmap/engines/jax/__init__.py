"""The JAX engine: `jax.Array`s in `NamedSharding`s."""
