"""Random JAX models: modules of flax.nnx, and pytrees of weights with a forward function."""
