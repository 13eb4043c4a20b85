"""Random torch models."""
