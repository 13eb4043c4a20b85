"""Save, load, describe, and export checkpoints of models, and manage the steps of a run."""
