"""Costs of a training step on JAX, from shapes: Shardy partitions the lowered step, its operations are counted.

lowered     a step as a module of StableHLO, without layouts: made once
..shardy    the same module with layouts, partitioned by Shardy's passes
graph       the partitioned module as operations and the values between them, of the shapes of one device
rewrites    what XLA does to collectives after Shardy
memory      the peak of what a device holds
counting    all of them in turn
compiled    the same figures from XLA's compiler; hlo reads what it made
"""
