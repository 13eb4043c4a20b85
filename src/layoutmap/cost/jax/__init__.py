"""Count a training step on JAX from shapes: XLA partitions the lowered step, and its operations count.

lowered     a step as a module of StableHLO, without layouts: made once
..shardy    the same module with layouts
partitioner a process in which XLA's partitioner prints what it makes of that; processes starts it
partitioned that text, read as the operations and values of graph, of the shapes of one device
rewrites    what XLA does to collectives after that
memory      the peak of what a device holds
counting    all of them in turn
compiled    what XLA's compiler makes of it for devices: read by partitioned for the count, by hlo to verify it
"""
