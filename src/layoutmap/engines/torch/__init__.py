"""The torch engine: `DTensor`s of `torch.distributed.tensor`, and what it shares with torch's adapters.

engine, arrays, devices, processes   the engine
specs, storages, modes, operators, modules, backward, trees
                private names of torch that several files use, wrapped once
simulation      several devices in one process; `local_tensors` has torch's part of it
deferred_init   how tensors get their values: recorded without making them, and made again in parts, bit for bit
dtensor_ops     what DTensor computes wrongly or not at all, computed right
gather          weights sharded over the batch's dim, gathered for a call; gradients, summed up at the end of a pass
malloc          freed memory, given back to the system while a model is created
"""
