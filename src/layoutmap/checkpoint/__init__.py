"""Read and write checkpoints: the place and the checksum of each variable's bytes in files.

Nothing here knows a framework or a model. `scope.saving` and `scope.loading` join it with engines and adapters.
"""
