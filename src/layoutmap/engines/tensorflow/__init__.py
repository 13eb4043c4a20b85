"""The TensorFlow engine: tensors of `tf.experimental.dtensor`."""
