"""What DTensor computes wrongly, slowly or not at all, computed right while `mode.computing(device_mesh)` is entered.

mode           looks each function up in the tables below; `opening` opens Python functions so that their calls are seen
pieces, whole  between DTensors and plain tensors: each device's own piece, or all of it
gathered       the last resort, with a warning: computed on whole tensors
sums           when sums over the mesh are made, for a batch that does not divide
the others     tables of functions: losses, norms, attention, convolutions, recurrent, rows, along, joining, slices,
               randomness
"""
