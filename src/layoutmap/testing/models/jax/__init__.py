"""Drawn models of JAX: modules of flax.nnx, and pytrees of weights with a function of them."""
