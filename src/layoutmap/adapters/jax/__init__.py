"""What the adapters of JAX's model libraries share."""
