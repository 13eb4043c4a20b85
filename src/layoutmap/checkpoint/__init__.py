"""Checkpoints: which bytes of which variable are where in files, and the proof that they are the ones that were saved.

Nothing here knows a framework or a model. `scope.saving` and `scope.loading` join it with engines and adapters.
"""
