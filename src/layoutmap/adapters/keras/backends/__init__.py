"""The backends of Keras, one file or a few for each; what they have to do is in `layoutmap.adapters.keras.protocol`."""
