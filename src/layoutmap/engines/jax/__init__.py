"""Create and shard `jax.Array`s with `NamedSharding`s."""
