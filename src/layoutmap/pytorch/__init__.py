"""What the engine and the adapters of torch's model libraries share; it knows torch and no mesh library.

private      every private name of torch that this package touches, probed
simulation   eight devices in one process
drawing      how tensors get their values, recorded without making them, and made again in parts, bit for bit
computing    what DTensor computes wrongly or not at all, computed right
gathering    weights that the batch cuts, put together for a forward pass; `regathering` does so for the backward pass
gradients    gradients summed up over the mesh once, at the end of a backward pass
heap         freed memory, given back to the system while a model is created
"""
