"""Compute the cost of a training step on JAX: XLA partitions the lowered step, and its operations are counted.

lowered     lowers a step once to a module of StableHLO without layouts, and computes its cost in any layouts
..shardy    adds layouts to the module
partitioner runs XLA's partitioner in a process of compiler_process, which answers with the partitioned module
partitioned reads this text as the operations and values of graph, with the shapes on one device
rewrites    rewrites collectives as XLA does after partitioning
memory      computes the peak memory of a device
counting    counts operations, collectives, and memory
compiled    compiles the step for devices; partitioned reads its text for the count, and hlo for verifying
"""
