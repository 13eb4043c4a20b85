"""Checkpoints of models: save, load, describe, export, and a manager of several."""
