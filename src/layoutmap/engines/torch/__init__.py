"""Run layoutmap on torch's DTensor. The torch and Keras adapters share this code.

engine, arrays, devices, processes   the engine
specs, storages, modes, operators, modules, backward, trees
                private names of torch that several files use, wrapped once
simulation      several devices in one process; `local_tensors` has torch's part of it
deferred_init   initial values: their operations are recorded, and replayed in parts, bit for bit
dtensor_ops     operators that DTensor computes wrongly or not at all
gather          weights sharded over the batch's dim, gathered for a call; gradients, reduced at the end of a pass
malloc          freed memory, returned to the system while a model is created

From a symptom to the code that may cause it:

initial values differ, or a build takes too much memory      deferred_init
an operator is wrong, slow, or gathers with a warning        dtensor_ops, a file for each kind of function
a first step takes long, or a new torch computes otherwise   dtensor_ops/dispatch, and guard
weights are gathered too often, or a gradient stays partial  gather
simulated devices differ from processes                      simulation, local_tensors
a release lacks a private name                               the one file that has the name, in a test of all of them
"""
