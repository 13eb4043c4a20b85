"""Read and write checkpoints: files with the chunks of each variable, and a manifest with their offsets and checksums.

Nothing here knows a framework or a model. `scope.saving` and `scope.loading` join it with engines and adapters.
"""
