"""Run layoutmap on torch's DTensor. The torch and Keras adapters share this code.

engine, arrays, devices, processes   the engine
specs, storages, modes, operators, modules, backward, trees
                private names of torch that several files use, wrapped once
simulation      several devices in one process; `local_tensors` has torch's part of it
deferred_init   how tensors get their values: recorded without making them, and made again in parts, bit for bit
dtensor_ops     what DTensor computes wrongly or not at all, computed right
gather          weights sharded over the batch's dim, gathered for a call; gradients, summed up at the end of a pass
malloc          freed memory, given back to the system while a model is created

From a symptom to its place:

initial values differ, or a build takes too much memory      deferred_init
an operator is wrong, slow, or gathers with a warning        dtensor_ops, a file for each kind of function
a first step takes long; a new torch decides otherwise       dtensor_ops/dispatch, and guard
weights are gathered too often; a gradient is no sum yet     gather
simulated devices differ from processes                      simulation, local_tensors
a release lacks a private name                               the one file that has the name, in a test of all of them
"""
