"""Compute the cost of a training step: collectives, arithmetic, memory, and time.

`layoutmap.cost.jax` and `torch_step` count operations and memory. The other modules compute the time on a machine.
"""
