"""Random Keras models."""
