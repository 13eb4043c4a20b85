"""What the torch engine and the adapters of torch's model libraries share; it knows torch and no mesh library.

private      every private name of torch that this package touches, probed
simulation   eight devices in one process
tape         how tensors get their values, recorded without making them
replay       the values at some indices, bit for bit those of the whole
computing    what DTensor computes wrongly or not at all, computed right
"""
