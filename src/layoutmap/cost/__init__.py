"""Costs of a training step: collectives, arithmetic, memory and time; values, and no framework.

An engine counts (`layoutmap.cost.jax`), this folder says what was counted and how long it takes on a machine.
"""
