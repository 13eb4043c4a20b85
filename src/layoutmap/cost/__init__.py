"""Count the cost of a training step: collectives, arithmetic, memory, and time.

An engine counts (`layoutmap.cost.jax`), this folder says what was counted and how long it takes on a machine.
"""
