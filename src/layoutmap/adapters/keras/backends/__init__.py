"""Hold one module or group of modules for each backend of Keras."""
