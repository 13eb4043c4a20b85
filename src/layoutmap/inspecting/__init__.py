"""Inspect a model that exists, guard its layouts in training, and compare it with one device and between processes."""
